"""Make tests/port/toys.py importable under one name; the emulated NPU as a fixture."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def npu(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The emulation, allowing float64, with the override set to the NPU's kernels."""
    from emulated_npu import emulated_torch_npu

    from torch_port.device import NPU, use_kernels

    module = emulated_torch_npu(float64=True)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    with use_kernels(NPU):
        yield module
