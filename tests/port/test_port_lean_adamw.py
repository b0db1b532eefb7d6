"""torch's fused AdamW in place of NpuFusedAdamW (`compute.adamw: torch`)."""

from __future__ import annotations

import torch
from torch import nn

from torch_port.device import NPU, PORTABLE, use_kernels
from torch_port.portable import LeanAdamW, TorchAdamW
from torch_port.training.optimizer import MasterAdamW, OptimizerConfig

RATES = OptimizerConfig(peak_rate=1e-2, warmup_steps=2, total_steps=10, weight_decay=0.1)


def parameters() -> list[tuple[str, nn.Parameter]]:
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(5, 4, generator=draw), torch.ones(4)]
    return [
        (name, nn.Parameter(value.bfloat16()))
        for name, value in zip(("a.weight", "norm.weight"), values, strict=True)
    ]


def run(optimizer: MasterAdamW, steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(step)
        for parameter in optimizer.parameters:
            parameter.grad_dtype = torch.float32
            parameter.grad = torch.randn(parameter.shape, generator=draw)
        optimizer.apply(1e-2, optimizer.gradient_norm())


def test_it_says_what_the_reference_says() -> None:
    """Faults: another epsilon, decay or bias correction; the kernel is never taken, or always."""
    with use_kernels(NPU):
        lean = MasterAdamW(parameters(), RATES, lean=True)
    with use_kernels(PORTABLE):
        reference = MasterAdamW(parameters(), RATES, lean=True)
    assert type(lean._adamw) is LeanAdamW
    assert type(reference._adamw) is TorchAdamW
    run(lean, range(6))
    run(reference, range(6))
    for one, other in zip(lean.masters, reference.masters, strict=True):
        # The same dozen float32 operations in another order; updates are 1e-2 each.
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
    assert not torch.equal(lean.masters[0], parameters()[0][1].float())


def test_its_state_is_restored_bit_for_bit() -> None:
    """Faults: the count of updates restarts, or lies on the host, where the kernel refuses it."""
    with use_kernels(NPU):
        whole = MasterAdamW(parameters(), RATES, lean=True)
        run(whole, range(3))
        saved = {
            f"optimizer.masters.{n}": m.clone()
            for n, m in zip(whole.names, whole.masters, strict=True)
        }
        for name, (first, second) in whole.moments().items():
            saved[f"optimizer.exp_avg.{name}"] = first.clone()
            saved[f"optimizer.exp_avg_sq.{name}"] = second.clone()
        again = MasterAdamW(parameters(), RATES, lean=True)
        again.restore(saved, whole.updates)
        run(whole, range(3, 6))
        run(again, range(3, 6))
    assert (whole.updates, again.updates) == (6, 6)
    assert all(torch.equal(a, b) for a, b in zip(whole.masters, again.masters, strict=True))
