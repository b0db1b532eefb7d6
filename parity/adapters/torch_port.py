"""`torch_port` as an adapter of `parity judge`."""

from __future__ import annotations

from parity.adapters.sides import SideAdapter
from parity.checks.decoding import port_decoding
from parity.checks.eagle3 import port_eagle3
from parity.sides import port_answer

adapter = SideAdapter("torch_port", port_answer, port_eagle3, port_decoding)
