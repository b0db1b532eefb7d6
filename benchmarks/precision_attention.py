"""Errors of draft attention, dense and blockwise, against a softmax written out in float64.

Shape suffixes: S sequence, N blocks, G slots, Q = N·G, A query heads, R kv heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from benchmarks.cases import AttentionInputs, attention_inputs
from benchmarks.precision_cases import Values, error
from benchmarks.shapes import AttentionShape
from torch_port.layout import lay_out
from torch_port.models.attention import dense_mask, draft_attention
from torch_port.models.blockwise import blockwise_attention

BLOCK = 8
Form = Callable[..., Tensor]
NAMES = ("output", "d q", "d context k", "d own k", "d context v", "d own v")


def attention_errors(
    sequence: int, heat: float, dtype: torch.dtype
) -> dict[str, tuple[float, float]]:
    """Return the errors of (dense, blockwise) attention: output and gradients.

    `heat` is the standard deviation of the scores.
    """
    anchors = min(32, sequence // 4)
    shape = AttentionShape(sequence, anchors, BLOCK, heads=4, kv_heads=2, head_dim=32)
    inputs = attention_inputs(shape)
    parts = [inputs.q.detach() * heat]
    parts += [x.detach() for x in (inputs.k_context, inputs.k_own, inputs.v_context, inputs.v_own)]
    rounded = [x.to(dtype) for x in parts]
    d_out = inputs.d_out.to(dtype)
    want = _run(_written_out, rounded, d_out, inputs, torch.float64)
    dense, blockwise = (_run(form, rounded, d_out, inputs, dtype) for form in (_dense, _blockwise))
    return {
        name: (error(dense[name], want[name]), error(blockwise[name], want[name])) for name in NAMES
    }


def _run(
    form: Form, parts: list[Tensor], d_out: Tensor, inputs: AttentionInputs, dtype: torch.dtype
) -> Values:
    leaves = [x.detach().to(dtype).requires_grad_() for x in parts]
    out = form(*leaves, inputs)
    torch.autograd.backward(out, d_out.to(dtype))
    gradients = [x.grad for x in leaves if x.grad is not None]
    return dict(zip(NAMES, (out.detach(), *gradients), strict=True))


def _mask(inputs: AttentionInputs) -> Tensor:
    return dense_mask(
        inputs.anchors_BN, inputs.keep_BN, inputs.k_context.shape[2], BLOCK, window=None
    )


def _written_out(
    q: Tensor, k: Tensor, own_k: Tensor, v: Tensor, own_v: Tensor, inputs: AttentionInputs
) -> Tensor:
    groups = q.shape[1] // k.shape[1]
    keys, values = (
        torch.cat(both, dim=2).repeat_interleave(groups, dim=1) for both in ((k, own_k), (v, own_v))
    )
    scores = q @ keys.mT * q.shape[-1] ** -0.5
    return scores.masked_fill(~_mask(inputs), -torch.inf).softmax(-1) @ values


def _dense(
    q: Tensor, k: Tensor, own_k: Tensor, v: Tensor, own_v: Tensor, inputs: AttentionInputs
) -> Tensor:
    keep_BQ = inputs.keep_BN.repeat_interleave(BLOCK, dim=1)
    keys, values = (torch.cat(both, dim=2) for both in ((k, own_k), (v, own_v)))
    return draft_attention(q, keys, values, _mask(inputs), keep_BQ)


def _blockwise(
    q: Tensor, k: Tensor, own_k: Tensor, v: Tensor, own_v: Tensor, inputs: AttentionInputs
) -> Tensor:
    everywhere = torch.ones(1, k.shape[2])
    layout = lay_out(everywhere, inputs.anchors_BN, inputs.keep_BN, BLOCK)
    return blockwise_attention(q, (k, v), (own_k, own_v), layout, None)
