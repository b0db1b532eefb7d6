"""Each fused kernel beside its portable twin, forward and gradient.

The kernel runs on the device in float32 and bfloat16; the twin runs on the host in float64, from
the very same (rounded) inputs: no float64 reaches a card, and the twin's own rounding is no part of
what is judged. An error is the largest difference, relative to its tensor's largest magnitude.

Shape suffixes: A query heads, R kv heads, Q queries, K keys, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torch_port.device import PORTABLE, Kernels
from torch_port.doctor.checks import Check, guarded

Run = Callable[[Kernels, Sequence[Tensor]], list[Tensor]]

REMEDY = (
    "train with the portable twin (torch_port.device.use_kernels(PORTABLE)) to see whether the run "
    "is sound without it, and report it with this line, CANN's version and the card's name"
)


@dataclass(frozen=True)
class Sizes:
    """How large the comparison's tensors are. The default is a chunk of the 27B draft's step."""

    rows: int = 512
    hidden: int = 5120
    inner: int = 17408
    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    queries: int = 128
    context: int = 1024


DEFAULT = Sizes()
SMALL = Sizes(
    rows=6, hidden=16, inner=12, query_heads=4, kv_heads=2, head_dim=8, queries=8, context=10
)


@dataclass(frozen=True)
class Case:
    """One kernel: its inputs (float64, on the host), what to run, names of what comes out.

    `wide`, `narrow`: the tolerance in float32 and in bfloat16; None where the kernel is not used
    in bfloat16. `why` says where they come from.
    """

    kernel: str
    inputs: list[Tensor]
    run: Run
    outputs: tuple[str, ...]
    wide: float
    narrow: float | None
    why: str


def check_kernels(kernels: Kernels, device: torch.device, sizes: Sizes = DEFAULT) -> list[Check]:
    """Compare every kernel of `kernels` on `device` with its portable twin, a line per dtype."""
    checks = []
    for case in cases(sizes):
        for dtype, tolerance in ((torch.float32, case.wide), (torch.bfloat16, case.narrow)):
            if tolerance is not None:
                checks.append(_compare(case, kernels, device, dtype, tolerance))
    return checks


def _compare(
    case: Case, kernels: Kernels, device: torch.device, dtype: torch.dtype, tolerance: float
) -> Check:
    name = f"{case.kernel} {str(dtype).removeprefix('torch.')}"
    rounded = [x if x.dtype == torch.bool else x.to(dtype) for x in case.inputs]
    exact = [x if x.dtype == torch.bool else x.double() for x in rounded]
    expected = case.run(PORTABLE, exact)
    try:
        actual = [x.detach().cpu() for x in case.run(kernels, [x.to(device) for x in rounded])]
    except Exception as error:  # noqa: BLE001 (one bad kernel must not hide the others)
        return guarded("kernels", name, error, REMEDY)
    errors = {
        output: relative_error(a, e)
        for output, a, e in zip(case.outputs, actual, expected, strict=True)
    }
    worst = max(errors, key=lambda output: errors[output])
    text = f"worst {errors[worst]:.1e} ({worst}), allowed {tolerance:.0e}: {case.why}"
    if errors[worst] <= tolerance:
        return Check("kernels", name, "ok", text)
    told = ", ".join(f"{output} {error:.1e}" for output, error in errors.items())
    return Check("kernels", name, "failed", f"{text}; all: {told}", REMEDY)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return max|a − e| / max|e|; infinite where shapes differ or a value is not finite.

    >>> relative_error(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 4.0]))
    0.5
    """
    if actual.shape != expected.shape or not bool(actual.isfinite().all()):
        return float("inf")
    scale = expected.double().abs().max().clamp_min(1e-30)
    return float((actual.double() - expected.double()).abs().max() / scale)


def cases(sizes: Sizes) -> list[Case]:
    """Return the comparisons, with inputs drawn from a fixed seed."""
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64)

    rows, heads, D = sizes.rows, sizes.query_heads, sizes.head_dim
    angle = draw(1, 1, rows, D // 2).repeat(1, 1, 1, 2)
    wide, inner = (1, rows, sizes.hidden), (1, rows, sizes.inner)
    pointwise = "roundings of 2⁻²⁴ (2⁻⁹ in bf16) of each element and a few of them in a gradient"
    return [
        Case(
            "rms_norm",
            [draw(*wide), 1 + 0.1 * draw(sizes.hidden), draw(*wide)],
            lambda kernels, x: _with_gradients(lambda a, w: kernels.rms_norm(a, w, 1e-6), x),
            ("out", "dx", "dweight"),
            1e-5,
            1e-2,
            pointwise,
        ),
        Case(
            "rotary",
            [draw(1, heads, rows, D), angle.cos(), angle.sin(), draw(1, heads, rows, D)],
            _rotary,
            ("out", "dx"),
            1e-5,
            1e-2,
            pointwise,
        ),
        Case(
            "swiglu",
            [draw(*inner), draw(*inner), draw(*inner)],
            lambda kernels, x: _with_gradients(kernels.swiglu, x),
            ("out", "dgate", "dup"),
            1e-5,
            1e-2,
            pointwise,
        ),
        _attention(sizes, draw, g),
        Case(
            "fused_adamw",
            [draw(rows, 64), draw(64), *(draw(rows, 64) for _ in range(3)), draw(64)],
            _adamw,
            ("weight", "norm weight", "exp_avg", "exp_avg_sq"),
            1e-5,
            None,
            "three updates on float32 masters, a root and a division each",
        ),
    ]


def _attention(sizes: Sizes, draw: Callable[..., Tensor], g: torch.Generator) -> Case:
    """A chunk as the draft calls it: context that grows with the block, then the blocks' own."""
    A, R, Q, D = sizes.query_heads, sizes.kv_heads, sizes.queries, sizes.head_dim
    K = sizes.context + Q
    hidden = torch.rand(Q, K, generator=g) < 0.5
    hidden[torch.arange(Q), sizes.context + torch.arange(Q)] = False  # a query sees itself
    return Case(
        "attention_chunk",
        [draw(1, A, Q, D), draw(1, R, K, D), draw(1, R, K, D), hidden, draw(1, A, Q, D)],
        _attend,
        ("out", "dq", "dk", "dv"),
        1e-3,
        2e-2,
        "float32 products may take factors rounded to HF32's 2⁻¹²; bf16 rounds shares and outputs; "
        "a wrong mask, scale or head order is off by 1e-1 and more",
    )


def _with_gradients(function: Callable[..., Tensor], x: Sequence[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of all inputs; the last tensor is the output's."""
    leaves = [leaf.detach().requires_grad_() for leaf in x[:-1]]
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, x[-1])]


def _rotary(kernels: Kernels, x: Sequence[Tensor]) -> list[Tensor]:
    return _with_gradients(lambda a: kernels.rotary(a, x[1], x[2]), (x[0], x[3]))


def _attend(kernels: Kernels, x: Sequence[Tensor]) -> list[Tensor]:
    q, k, v, hidden_QK, grad = x
    scale = q.shape[-1] ** -0.5
    out, stats = kernels.attention_chunk(q, k, v, hidden_QK, scale)
    return [out, *kernels.attention_chunk_grad(q, k, v, hidden_QK, scale, out, stats, grad)]


def _adamw(kernels: Kernels, x: Sequence[Tensor]) -> list[Tensor]:
    """Three updates of a matrix and a vector, one with weight decay, at rates that fall."""
    weight, norm, *gradients, norm_gradient = (tensor.clone() for tensor in x)
    groups: list[dict[str, Any]] = [
        {"params": [weight], "weight_decay": 0.1},
        {"params": [norm], "weight_decay": 0.0},
    ]
    optimizer = kernels.fused_adamw(groups, (0.9, 0.95), 1e-8)
    for update, gradient in enumerate(gradients, start=1):
        optimizer.step(0.05 / update, [(weight, gradient), (norm, norm_gradient * update)])
    state = optimizer.state[weight]
    return [weight, norm, state["exp_avg"], state["exp_avg_sq"]]
