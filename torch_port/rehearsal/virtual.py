"""A virtual `npu:0` on a machine without one: tensors have a device and a size, and no memory.

torch lets Python stand in for a device's backend. The name is taken for the rest of the process,
so real torch_npu cannot be imported after it; what this module replaces besides is put back.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from torch_port.blocks import decay_weights
from torch_port.errors import UserError
from torch_port.models.attention import rotary_tables
from torch_port.objective.eagle3 import step_weights
from torch_port.rehearsal.kernels import stand_in_torch_npu


@contextmanager
def virtual_device(kind: str) -> Iterator[torch.device]:
    """Give a device on which nothing is allocated: "npu", or "cpu" to rehearse the portable branch.

    Inside, every new tensor is a fake one, autograd runs in the calling thread (the trace is one
    thread's) and `torch_npu` is a stand-in.
    Raises UserError for another kind, and where torch already has the NPU of a real torch_npu.
    """
    if kind not in ("npu", "cpu"):
        raise UserError(f"device {kind!r} cannot be rehearsed; 'npu' and 'cpu' can")
    with contextlib.ExitStack() as stack:
        if kind == "npu":
            stack.enter_context(_npu_backend())
        stack.enter_context(_fresh_caches())
        stack.enter_context(_constants_from_the_host())
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield torch.device("npu:0" if kind == "npu" else "cpu")


@contextmanager
def _fresh_caches() -> Iterator[None]:
    """Empty what keeps tensors beyond a call: fake ones must not meet those of another mode."""
    caches = (rotary_tables, decay_weights, step_weights)
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for cache in caches:
            cache.cache_clear()


@contextmanager
def _constants_from_the_host() -> Iterator[None]:
    """Let `torch.tensor(values, device=…)` copy to the device by an operator that is seen."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)


class _Stream:
    """A stream or an event: nothing runs, so nothing is waited for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.device = torch.device("npu:0")
        self.stream_id = 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        """Wait for nothing."""

    def wait_event(self, _: Any) -> None:
        """Wait for nothing."""

    def record_event(self, _: Any = None) -> _Stream:
        """Return an event that has passed."""
        return _Stream()

    def record(self, _: Any = None) -> None:
        """Record nothing."""

    def wait(self, _: Any = None) -> None:
        """Wait for nothing."""

    def synchronize(self) -> None:
        """Wait for nothing."""

    def query(self) -> bool:
        """Tell that all work is done."""
        return True


class _NpuModule(SimpleNamespace):
    """What torch and FSDP2 ask of `torch.npu`."""

    Stream = Event = _Stream

    def is_available(self) -> bool:
        """There is one."""
        return True

    def is_initialized(self) -> bool:
        """It needs no initialisation."""
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def current_device(self) -> int:
        """Return the one device's index."""
        return 0

    def device_count(self) -> int:
        """Return 1: a rank sees one card."""
        return 1

    def set_device(self, _: Any) -> None:
        """There is one device."""

    def device(self, _: Any) -> contextlib.AbstractContextManager[None]:
        """Choose the one device."""
        return contextlib.nullcontext()

    def manual_seed_all(self, _: int) -> None:
        """Nothing draws."""

    def get_rng_state(self, _: Any = None) -> torch.Tensor:
        """Return no state; torch asks for it wherever random states are saved (`fork_rng`)."""
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def set_rng_state(self, _: Any, __: Any = None) -> None:
        """Nothing draws."""

    def current_stream(self, _: Any = None) -> _Stream:
        """Return a stream."""
        return _Stream()

    default_stream = current_stream

    def stream(self, _: Any) -> contextlib.AbstractContextManager[None]:
        """Choose a stream."""
        return contextlib.nullcontext()

    def synchronize(self, _: Any = None) -> None:
        """Nothing runs."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        """Return the dtypes that autocast takes."""
        return [torch.float16, torch.bfloat16]


_registered = False


@contextmanager
def _npu_backend() -> Iterator[None]:
    global _registered
    if not _registered:
        if "torch_npu" in sys.modules:
            raise UserError(
                "torch_npu is loaded in this process, so its device name is taken; rehearse in a "
                "process of its own: torch-port rehearse"
            )
        _setup_privateuseone_for_python_backend("npu", backend_module=_NpuModule())
        _registered = True
    before = sys.modules.get("torch_npu")
    with stand_in_torch_npu() as module:
        sys.modules["torch_npu"] = module
        try:
            yield
        finally:
            if before is None:
                del sys.modules["torch_npu"]
            else:
                sys.modules["torch_npu"] = before
