"""DFlash on the NPU's kernels, and what one of its steps asks of a device."""

import re
import sys
from typing import Any

import pytest
import torch
from dflash_toys import FUSED, OBJECTIVES, PLAIN, dflash_draft, holed_batch
from emulated_npu import emulated_torch_npu
from scan import Scan
from torch import Tensor
from toys import G, target, to_meta

from torch_port.compute import ComputeConfig
from torch_port.config import BONUS_ANCHOR
from torch_port.device import NPU, use_kernels
from torch_port.models import blockwise
from torch_port.models.block_draft import FrozenTarget
from torch_port.models.dflash import DFlashDraft
from torch_port.training.optimizer import MasterAdamW, OptimizerConfig
from torch_port.training.step import accumulate_gradients

WINDOW = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}


def step(
    dtype: torch.dtype, kind: str, compute: ComputeConfig, where: str = "cpu", **changes: Any
) -> tuple[Tensor, DFlashDraft]:
    """Loss and gradients of a training step in a dtype on a device."""
    model, frozen = dflash_draft(compute, **changes), target()
    E, U = (x.to(where, dtype) for x in (frozen.embed_tokens, frozen.lm_head))
    if where == "meta":
        to_meta(model, dtype)
    else:
        model.to(where, dtype)
    b = holed_batch().laid_out(G, BONUS_ANCHOR).to(torch.device(where), dtype)
    return accumulate_gradients(model, [b], FrozenTarget(E, U), OBJECTIVES[kind])[0], model


@pytest.mark.parametrize(("dtype", "relative"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
@pytest.mark.parametrize("changes", [{}, WINDOW])
@pytest.mark.parametrize(
    # Two layers; rows of 3 and 2 kept blocks, two blocks a call: 2 + 1 calls in each.
    ("kind", "compute", "fused_calls"),
    [("decay", FUSED, 6), ("both", FUSED, 6), ("both", PLAIN, 0)],
)
def test_npus_kernels_equal_their_twins(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    relative: float,
    changes: dict[str, Any],
    kind: str,
    compute: ComputeConfig,
    fused_calls: int,
) -> None:
    """Faults: a path past the seam, blocks of the other layout in a fused call's mask, D-PACE's
    first pass through the backbone twice, a gradient lost.

    In float32 the emulation refuses float64; some hundred operations that round at 6e-8.
    """
    expected, twin = step(dtype, kind, compute, **changes)
    module = emulated_torch_npu(float64=dtype == torch.float64)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(blockwise, "BLOCKS_PER_CALL", 2)
    with use_kernels(NPU):
        actual, model = step(dtype, kind, compute, **changes)
    torch.testing.assert_close(actual, expected, rtol=relative, atol=0)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None, name
        bound = relative * q.grad.abs().max().item()
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=bound, msg=name)
    # Per layer: norms before attention and feed-forward, of q, of the context's and the block's own
    # k; the last three are turned; one gated unit. Outside: the context's norm and the final one.
    assert module.calls.count("npu_rms_norm") == 2 * 5 + 2
    assert module.calls.count("npu_rotary_mul") == 2 * 3
    assert module.calls.count("npu_swiglu") == 2
    assert module.calls.count("npu_fusion_attention") == fused_calls
    assert module.calls.count("npu_fusion_attention_grad") == fused_calls


@pytest.mark.parametrize("compute", [FUSED, PLAIN])
@pytest.mark.parametrize("kind", ["decay", "both"])
def test_what_reaches_the_device_in_one_step(kind: str, compute: ComputeConfig) -> None:
    """Field-notes 32 and 34. Faults: float64 decay weights or D-PACE products on the device;
    boolean indexing, whose shape depends on data; a sync in the middle of the step.

    The device is torch's `meta`, which has no values: whatever needs one raises.
    """
    with Scan("meta") as scan:
        _, model = step(torch.float32, kind, compute, "meta", **WINDOW)
        config = OptimizerConfig(peak_rate=0.1, warmup_steps=1, total_steps=9)
        optimizer = MasterAdamW(model.named_parameters(), config)
        optimizer.apply(0.1, optimizer.gradient_norm())
    assert torch.float64 not in scan.dtypes, scan.dtypes[torch.float64]
    assert len(scan.dtypes[torch.float32]) > 40  # the scan saw the step
    forbidden = "nonzero|masked_select|index.Tensor|index_put|_local_scalar|item"
    assert not [name for name in scan.operators if re.search(forbidden, name)]
