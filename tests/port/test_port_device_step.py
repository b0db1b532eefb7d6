"""AdamW and a whole draft on the NPU's kernels, emulated on the CPU, beside the portable twins."""

import re
import sys
from types import ModuleType

import pytest
import torch
from device_twins import TOLERANCE, assert_near, draws
from emulated_npu import emulated_torch_npu
from scan import Functions, Scan
from torch import Tensor, nn
from toys import G, batch, draft, target, to_meta

from torch_port import device
from torch_port.compute import ComputeConfig
from torch_port.config import ObjectiveConfig
from torch_port.device import NPU, PORTABLE, Kernels, use_kernels
from torch_port.errors import UserError
from torch_port.models import blockwise
from torch_port.models.dspark import DSparkDraft, FrozenTarget
from torch_port.objective.evaluate import Outcome, batch_denominators, forward_batch
from torch_port.objective.loss import Denominators
from torch_port.training.optimizer import MasterAdamW, OptimizerConfig

# --- Optimizer -----------------------------------------------------------------------------------


def trained(kernels: Kernels, dtype: torch.dtype) -> tuple[list[Tensor], MasterAdamW]:
    """Five steps of three parameters, one of which never has a gradient."""
    start = draws((3, 4), (5,), (2, 2), dtype=dtype, seed=5)
    named = [
        (name, nn.Parameter(x))
        for name, x in zip(("a.weight", "b.bias", "unused.weight"), start, strict=True)
    ]
    settings = OptimizerConfig(peak_rate=0.05, warmup_steps=1, total_steps=9, weight_decay=0.1)
    with use_kernels(kernels):
        optimizer = MasterAdamW(named, settings)
        for step in range(5):
            for _, p in named[:2]:
                p.grad = draws(tuple(p.shape), dtype=dtype, seed=20 + step)[0]
            optimizer.apply(0.05 / (1 + step), optimizer.gradient_norm())
    assert all(p.grad is None for _, p in named)
    return [p.detach() for _, p in named], optimizer


@pytest.mark.parametrize("dtype", [*TOLERANCE, torch.bfloat16])
def test_optimizer_steps_equal(npu: ModuleType, dtype: torch.dtype) -> None:
    """Faults: gradients assigned where NpuFusedAdamW reads the first step's storage, so that every
    later step repeats step 1; the rate, betas, eps or decay not handed on."""
    (actual, ours), (_, twin) = trained(NPU, dtype), trained(PORTABLE, dtype)
    relative = TOLERANCE.get(dtype, 2e-6)  # bf16 parameters have float32 masters
    for a, e in zip(ours.masters, twin.masters, strict=True):
        assert_near(a.detach(), e.detach(), relative)
    assert ours.moments().keys() == twin.moments().keys() == {"a.weight", "b.bias"}
    for name, moments in twin.moments().items():
        for a, e in zip(ours.moments()[name], moments, strict=True):
            assert_near(a, e, relative)
    for a, master in zip(actual, ours.masters, strict=True):
        assert torch.equal(a, master.detach().to(dtype))
    assert torch.equal(actual[2], draws((3, 4), (5,), (2, 2), dtype=dtype, seed=5)[2])


@pytest.mark.parametrize(("then", "message"), [((0, 1), "first gradient"), ((), "no gradient")])
def test_the_set_of_gradients_may_not_change(npu: ModuleType, then: tuple, message: str) -> None:
    """Fault: a parameter without a gradient in the first step is never updated, silently, and one
    without in a later step is updated by a stale one."""
    ps = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))]
    optimizer = MasterAdamW(
        [("a.weight", ps[0]), ("b.weight", ps[1])],
        OptimizerConfig(peak_rate=0.1, warmup_steps=1, total_steps=9),
    )
    ps[0].grad = torch.ones(2)
    optimizer.apply(0.1, optimizer.gradient_norm())
    before = ps[0].detach().clone()
    for i in then:
        ps[i].grad = torch.ones_like(ps[i])
    with pytest.raises(UserError, match=message):
        optimizer.apply(0.1, torch.tensor(1.0))
    assert torch.equal(ps[0].detach(), before)


def test_a_first_step_without_any_gradient(npu: ModuleType) -> None:
    """Fault: NpuFusedAdamW fixes the empty set, and nothing ever learns. Adam's first update is
    the rate, against the gradient's sign (to 1e-7: ε and float32)."""
    p = nn.Parameter(torch.ones(2))
    optimizer = device.fused_adamw([{"params": [p]}], (0.9, 0.95), 1e-8, p.device)
    optimizer.step(0.5, [(p, None)])
    optimizer.step(0.5, [(p, torch.tensor([2.0, -3.0]))])
    decay = 1 - 0.5 * 1e-2  # torch's default weight decay, and the NPU's
    expected = torch.tensor([decay - 0.5, decay + 0.5])
    torch.testing.assert_close(p.detach(), expected, rtol=1e-6, atol=0)


# --- A whole draft -------------------------------------------------------------------------------


def run(
    dtype: torch.dtype, where: str = "cpu", compute: ComputeConfig | None = None, **changes
) -> tuple[Outcome, DSparkDraft]:
    """Forward and backward of the toy draft in a dtype on a device."""
    model, b, frozen = draft(scale=3.0, **changes), batch().laid_out(G), target()
    model.compute = compute or model.compute
    if where == "meta":
        to_meta(model, dtype)
    else:
        model.to(where, dtype)
    b = b.to(torch.device(where), dtype)
    frozen = FrozenTarget(frozen.embed_tokens.to(where, dtype), frozen.lm_head.to(where, dtype))
    objective = ObjectiveConfig(loss_decay_gamma=3.0)
    den, ce_den = batch_denominators(model, b, objective)
    outcome = forward_batch(model, b, frozen, objective, Denominators(den, ce_den))
    assert outcome.loss is not None
    torch.autograd.backward(outcome.loss)
    return outcome, model


PLAIN = ComputeConfig(objective="plain", attention="dense")
WINDOW = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("changes", [{}, WINDOW])
@pytest.mark.parametrize(
    ("compute", "fused_calls"),
    # Two layers; rows of 3 and 2 kept blocks, two blocks a call. Recomputing a layer calls again.
    [(ComputeConfig(), 6), (ComputeConfig(recompute="layer"), 12), (PLAIN, 0)],
)
def test_a_whole_draft_on_the_npus_kernels(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    changes: dict,
    compute: ComputeConfig,
    fused_calls: int,
) -> None:
    """Faults: a model file that goes past the seam, shapes a kernel does not take, a gradient lost.

    In float32 the emulation is the strict one, which refuses float64. Its tolerance is 25 times the
    kernels': two layers and a loss follow one another.
    """
    expected, twin = run(dtype, compute=compute, **changes)
    module = emulated_torch_npu(float64=dtype == torch.float64)
    monkeypatch.setitem(sys.modules, "torch_npu", module)
    monkeypatch.setattr(blockwise, "BLOCKS_PER_CALL", 2)
    with use_kernels(NPU):
        actual, model = run(dtype, compute=compute, **changes)
    relative = 1e-12 if dtype == torch.float64 else 25 * TOLERANCE[dtype]
    assert actual.loss is not None
    assert expected.loss is not None
    assert_near(actual.hidden.detach(), expected.hidden.detach(), relative)
    assert_near(actual.loss.detach(), expected.loss.detach(), relative)
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if p.grad is not None and q.grad is not None:
            assert_near(p.grad, q.grad, relative)
    times = 2 if compute.recompute == "layer" else 1
    # Per layer: norms before attention and feed-forward, of q, of the context's and the block's own
    # k; the last three are turned; one gated unit. Outside: the context's norm and the final one.
    assert module.calls.count("npu_rms_norm") == 10 * times + 2
    assert module.calls.count("npu_rotary_mul") == 6 * times
    assert module.calls.count("npu_swiglu") == 2 * times
    assert module.calls.count("npu_fusion_attention") == fused_calls
    assert module.calls.count("npu_fusion_attention_grad") == fused_calls // times


@pytest.mark.parametrize("compute", [ComputeConfig(), PLAIN])
@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
def test_what_reaches_the_device_in_one_step(head: str, compute: ComputeConfig) -> None:
    """Field-notes 32, 33 and 34. Faults: a float64 table or scalar on the device; boolean indexing,
    whose shape depends on data; a fused recurrent kernel; a sync in the middle of the step.

    The device is torch's `meta`, which has no values: whatever needs one raises.
    """
    with Functions() as functions, Scan("meta") as scan:
        _, model = run(torch.float32, "meta", compute, markov_head_type=head)
        optimizer = MasterAdamW(
            model.named_parameters(),
            OptimizerConfig(peak_rate=0.1, warmup_steps=1, total_steps=9),
        )
        optimizer.apply(0.1, optimizer.gradient_norm())
    assert torch.float64 not in scan.dtypes, scan.dtypes[torch.float64]
    assert len(scan.dtypes[torch.float32]) > 40  # the scan saw the step
    forbidden = "nonzero|masked_select|index.Tensor|index_put|_local_scalar|item"
    assert not [name for name in scan.operators if re.search(forbidden, name)]
    assert "sigmoid" in functions.names or head == "vanilla"
    assert not [name for name in functions.names if re.search("gru|lstm|rnn", name)]
