"""A stand-in for torch_npu: its operators' shapes and gradients, without a kernel behind them.

Schemas, shapes and what the backward operators return are those of the torch_npu 2.13.0 wheel
(`op_plugin/meta/_meta_registrations.py`, and the schemas in its library); NpuFusedAdamW allocates
what its source allocates (`optim/`). What each operator keeps for its backward pass is its inputs
and what its backward operator takes. A kernel's own workspace is not known.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

STAT_COLUMNS = 8  # softmax_max and softmax_sum are [B, heads, Sq, 8] float32
ALL_MASK = 1
_EVERYTHING = 2147483647

_ATTENTION_SETTINGS = (
    "float {scale}=1., float keep_prob=1., int pre_tockens=2147483647, int next_tockens=2147483647,"
    " int inner_precise=0, {seeds}int[]? prefix=None, int[]? actual_seq_qlen=None,"
    " int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True,"
    ' bool sync=False, str softmax_layout=""'
)
SCHEMAS = (
    "npu_rms_norm(Tensor input, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_rms_norm_backward(Tensor dy, Tensor input, Tensor gamma, Tensor rstd) -> (Tensor, Tensor)",
    "npu_rotary_mul(Tensor input, Tensor r1, Tensor r2, str rotary_mode='half',"
    " Tensor? rotate=None) -> Tensor",
    "npu_rotary_mul_backward(Tensor grad, Tensor input, Tensor r1, Tensor r2,"
    " str rotary_mode='half') -> (Tensor, Tensor, Tensor)",
    "npu_swiglu(Tensor input, int dim=-1) -> Tensor",
    "npu_swiglu_backward(Tensor grad_output, Tensor input, int dim=-1) -> Tensor",
    "npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout,"
    " Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, "
    + _ATTENTION_SETTINGS.format(scale="scale", seeds="")
    + ") -> (Tensor, Tensor, Tensor, Tensor, int, int, int)",
    "npu_fusion_attention_grad(Tensor query, Tensor key, Tensor value, Tensor dy, int head_num,"
    " str input_layout, *, Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None,"
    " Tensor? softmax_max=None, Tensor? softmax_sum=None, Tensor? softmax_in=None,"
    " Tensor? attention_in=None, "
    + _ATTENTION_SETTINGS.format(
        scale="scale_value", seeds="int seed=0, int offset=0, int numels=0, "
    )
    + ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)


# --- Shapes --------------------------------------------------------------------------------------


def _rms_norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    kept = input.dim() - gamma.dim()
    rstd = [*input.shape[:kept], *([1] * gamma.dim())]
    return torch.empty_like(input), input.new_empty(rstd, dtype=torch.float32)


def _rms_norm_backward(
    dy: Tensor, input: Tensor, gamma: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input), torch.empty_like(gamma, dtype=torch.float32)


def _rotary_mul(
    input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Any = None
) -> Tensor:
    return input.new_empty(input.shape)


def _rotary_mul_backward(
    grad: Tensor, input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half"
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.empty_like(input),
        torch.empty_like(r1, dtype=input.dtype),
        torch.empty_like(r2, dtype=input.dtype),
    )


def _swiglu(input: Tensor, dim: int = -1) -> Tensor:
    shape = list(input.shape)
    shape[dim] //= 2
    return input.new_empty(shape)


def _swiglu_backward(grad_output: Tensor, input: Tensor, dim: int = -1) -> Tensor:
    return torch.empty_like(input)


def _fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str, *_: Any, **__: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
    B, _heads, Q, _D = query.shape
    out = query.new_empty(B, head_num, Q, value.shape[3])
    largest, total = (
        query.new_empty(B, head_num, Q, STAT_COLUMNS, dtype=torch.float32) for _ in range(2)
    )
    return out, largest, total, query.new_empty(0), 0, 0, 0


def _fusion_attention_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dy: Tensor,
    head_num: int,
    input_layout: str,
    **_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    gradients = (x.new_empty(x.shape, dtype=query.dtype) for x in (query, key, value))
    dq, dk, dv = gradients
    return dq, dk, dv, query.new_empty(0), query.new_empty(0, dtype=torch.float32)


# --- Gradients -----------------------------------------------------------------------------------


def _rms_norm_gradient(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    x, gamma, rstd = ctx.saved_tensors
    dx, dgamma = torch.ops.npu.npu_rms_norm_backward(dy, x, gamma, rstd)
    return dx, dgamma, None


def _rms_norm_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(inputs[0], inputs[1], output[1])
    ctx.mark_non_differentiable(output[1])


def _rotary_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    x, r1, r2 = ctx.saved_tensors
    dx, _, _ = torch.ops.npu.npu_rotary_mul_backward(grad, x, r1, r2, ctx.mode)
    return dx, None, None, None, None


def _rotary_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.mode = inputs[3]


def _swiglu_gradient(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return torch.ops.npu.npu_swiglu_backward(grad, x, ctx.dim), None


def _swiglu_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.dim = inputs[1]


class _FusionAttention(torch.autograd.Function):
    """npu_fusion_attention with one mask, as torch_npu's scaled_dot_product_attention calls it."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, scale: float
    ) -> Tensor:
        out, largest, total, *_ = torch.ops.npu.npu_fusion_attention(
            q, k, v, q.shape[1], "BNSD", atten_mask=hidden, scale=scale, sparse_mode=ALL_MASK
        )
        ctx.save_for_backward(q, k, v, hidden, out, largest, total)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, hidden, out, largest, total = ctx.saved_tensors
        dq, dk, dv, _, _ = torch.ops.npu.npu_fusion_attention_grad(
            q,
            k,
            v,
            grad,
            q.shape[1],
            "BNSD",
            atten_mask=hidden,
            softmax_max=largest,
            softmax_sum=total,
            attention_in=out,
            scale_value=ctx.scale,
            sparse_mode=ALL_MASK,
        )
        return dq, dk, dv, None, None


def _dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """torch_npu has this operator of its own: the fused kernel, with the mask turned over."""
    hidden = None if attn_mask is None else attn_mask.logical_not()
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _FusionAttention.apply(query, key, value, hidden, scale)


# --- The optimizer -------------------------------------------------------------------------------


def _combine(tensors: list[Tensor]) -> Tensor:
    """npu_combine_tensors: one zeroed buffer, and each tensor's storage exchanged for its part."""
    buffer = torch.zeros(
        sum(x.numel() for x in tensors), dtype=tensors[0].dtype, device=tensors[0].device
    )
    offset = 0
    for x in tensors:
        copy = x.clone()
        x.data = buffer.as_strided(x.shape, x.stride(), offset)
        x.copy_(copy)
        offset += x.numel()
    return buffer


class NpuFusedAdamW(torch.optim.Optimizer):
    """The allocations of torch_npu.optim.NpuFusedAdamW, in their order."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, defaults)
        self._combined: list[tuple[Tensor, ...]] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Combine at the first step, then update each group's buffers whole."""
        if not self._combined:
            self._combine_all()
        for group, buffers in zip(self.param_groups, self._combined, strict=True):
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["step"] += 1
            if buffers:
                _update(group, *buffers)

    def _combine_all(self) -> None:
        members = [[p for p in g["params"] if p.grad is not None] for g in self.param_groups]
        everyone = [p for group in members for p in group]
        if not everyone:
            return
        parameters = _combine(everyone)
        gradients = _combine([p.grad for p in everyone])
        start = 0
        for group in members:
            if not group:
                self._combined.append(())
                continue
            for p in group:
                state = self.state[p]
                step = state.get("step", 0)
                moments = [state.get(name) for name in ("exp_avg", "exp_avg_sq")]
                first, second = (
                    torch.zeros_like(p) if x is None else torch.zeros_like(p).copy_(x)
                    for x in moments
                )
                state.update(step=step, exp_avg=first, exp_avg_sq=second)
            firsts = _combine([self.state[p]["exp_avg"] for p in group])
            seconds = _combine([self.state[p]["exp_avg_sq"] for p in group])
            size = sum(p.numel() for p in group)
            part = slice(start, start + size)
            start += size
            self._combined.append((parameters[part], gradients[part], firsts, seconds))


def _update(group: dict[str, Any], p: Tensor, g: Tensor, m: Tensor, v: Tensor) -> None:
    beta1, beta2 = group["betas"]
    p.mul_(1 - group["lr"] * group["weight_decay"])
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    deviation = (v.sqrt() / math.sqrt(1 - beta2)).add_(group["eps"])
    p.addcdiv_(m, deviation, value=-group["lr"])


# --- The module ----------------------------------------------------------------------------------

_SHAPES: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": _rms_norm,
    "npu_rms_norm_backward": _rms_norm_backward,
    "npu_rotary_mul": _rotary_mul,
    "npu_rotary_mul_backward": _rotary_mul_backward,
    "npu_swiglu": _swiglu,
    "npu_swiglu_backward": _swiglu_backward,
    "npu_fusion_attention": _fusion_attention,
    "npu_fusion_attention_grad": _fusion_attention_grad,
}
_GRADIENTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "npu_rms_norm": (_rms_norm_gradient, _rms_norm_context),
    "npu_rotary_mul": (_rotary_gradient, _rotary_context),
    "npu_swiglu": (_swiglu_gradient, _swiglu_context),
}
CALLED = ("npu_rms_norm", "npu_rotary_mul", "npu_swiglu", "npu_fusion_attention")


@contextmanager
def stand_in_torch_npu() -> Iterator[ModuleType]:
    """Register the operators for the virtual device and give the module that calls them.

    The registrations end with the block: a real torch_npu must not find them.
    """
    library = torch.library.Library("npu", "FRAGMENT")
    aten = torch.library.Library("aten", "IMPL")
    try:
        for schema in SCHEMAS:
            library.define(schema)
        for name, shape in _SHAPES.items():
            torch.library.register_fake(f"npu::{name}", shape, lib=library)
        for name, (gradient, context) in _GRADIENTS.items():
            torch.library.register_autograd(
                f"npu::{name}", gradient, setup_context=context, lib=library
            )
        attention = "scaled_dot_product_attention"
        aten.impl(attention, _dot_product_attention, "AutogradPrivateUse1")
        yield _module()
    finally:
        library._destroy()
        aten._destroy()


def _module() -> ModuleType:
    module = ModuleType("torch_npu")
    for name in (*CALLED, "npu_fusion_attention_grad"):
        setattr(module, name, getattr(torch.ops.npu, name))
    module.optim = SimpleNamespace(NpuFusedAdamW=NpuFusedAdamW)  # type: ignore[attr-defined]
    module.__version__ = "2.13.0 (rehearsed)"  # type: ignore[attr-defined]
    return module


__all__ = ["NpuFusedAdamW", "stand_in_torch_npu"]
