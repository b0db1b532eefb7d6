"""`jaxdraft`, the specification, as an adapter of `parity judge`."""

from __future__ import annotations

import importlib.util

from parity.adapter import Unavailable
from parity.adapters.sides import SideAdapter
from parity.checks.decoding import spec_decoding
from parity.checks.eagle3 import spec_eagle3
from parity.sides import setup_jax, spec_answer

if importlib.util.find_spec("jax") is None:
    raise Unavailable('jaxdraft needs jax; pip install "jaxdraft[spec]"')
setup_jax()

adapter = SideAdapter("jaxdraft", spec_answer, spec_eagle3, spec_decoding)
