"""EAGLE3 on the NPU's kernels, and what one of its steps asks of a device."""

import re
import sys

import pytest
import torch
from eagle3_toys import eagle3_batch, eagle3_draft
from emulated_npu import emulated_torch_npu
from scan import Scan
from torch import Tensor
from toys import target, to_meta

from torch_port.config_eagle3 import Eagle3Objective
from torch_port.device import NPU, use_kernels
from torch_port.models.dspark import FrozenTarget
from torch_port.models.eagle3 import Eagle3Draft
from torch_port.training.optimizer import MasterAdamW, OptimizerConfig
from torch_port.training.step import accumulate_gradients

STEPS = 3


def step(dtype: torch.dtype, where: str = "cpu") -> tuple[Tensor, Eagle3Draft]:
    """Loss and gradients of a training step in a dtype on a device."""
    model, frozen = eagle3_draft(), target()
    E, U = (x.to(where, dtype) for x in (frozen.embed_tokens, frozen.lm_head))
    if where == "meta":
        to_meta(model, dtype)
    else:
        model.to(where, dtype)
    b = eagle3_batch().to(torch.device(where), dtype)
    objective = Eagle3Objective(steps=STEPS)
    return accumulate_gradients(model, [b], FrozenTarget(E, U), objective)[0], model


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_npus_kernels_equal_their_twins(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, relative: float
) -> None:
    """Faults: a model file that goes past the seam, shapes a kernel does not take, a gradient lost.

    In float32 the emulation refuses float64; some hundred operations that round at 6e-8.
    """
    expected, twin = step(dtype)
    module = emulated_torch_npu(float64=dtype == torch.float64)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    with use_kernels(NPU):
        actual, model = step(dtype)
    torch.testing.assert_close(actual, expected, rtol=relative, atol=0)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        bound = relative * q.grad.abs().max().item()
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=bound, msg=name)
    # Per step: norms of token, state, feed-forward and head; q and k are turned; one gated unit.
    assert module.calls.count("npu_rms_norm") == 4 * STEPS
    assert module.calls.count("npu_rotary_mul") == 2 * STEPS
    assert module.calls.count("npu_swiglu") == STEPS


def test_what_reaches_the_device_in_one_step() -> None:
    """Field-notes 32 and 34. Faults: a float64 table or scalar on the device; boolean indexing,
    whose shape depends on data; a sync in the middle of the step.

    The device is torch's `meta`, which has no values: whatever needs one raises.
    """
    with Scan("meta") as scan:
        _, model = step(torch.float32, "meta")
        config = OptimizerConfig(peak_rate=0.1, warmup_steps=1, total_steps=9)
        optimizer = MasterAdamW(model.named_parameters(), config)
        optimizer.apply(0.1, optimizer.gradient_norm())
    assert torch.float64 not in scan.dtypes, scan.dtypes[torch.float64]
    assert len(scan.dtypes[torch.float32]) > 40  # the scan saw the step
    forbidden = "nonzero|masked_select|index.Tensor|index_put|_local_scalar|item"
    assert not [name for name in scan.operators if re.search(forbidden, name)]
