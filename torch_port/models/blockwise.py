"""Draft attention block by block: only the columns that a query can see (spec sheet §4).

The dense form builds N·γ × (S + N·γ) scores, of which a block needs its context and itself. Here
each block of anchor a works on one contiguous slice of keys: its own γ keys are written over
context slots a … a+γ−1 of a copy, which no later block of the walk needs, because the walk goes
down the anchors. A full-attention layer then needs no mask at all. Memory grows with S + N·γ.

An NPU takes one fused call per few blocks instead: see `_Chunked`.

Shape suffixes: B batch, S sequence, N blocks, G slots, Q = N·G, A query heads, R kv heads, E = A/R
query heads of one kv head, M = E·G rows of one product, D head dimension, C keys a block sees.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_port.device import attention_chunk, attention_chunk_grad, kernels_for
from torch_port.layout import Layout

BLOCKS_PER_CALL = 8  # of a fused NPU call: 128 queries at γ = 16; very large calls can time out


def blockwise_attention(
    q_BAQD: Tensor,
    context: tuple[Tensor, Tensor],
    own: tuple[Tensor, Tensor],
    layout: Layout,
    window: int | None,
) -> Tensor:
    """Attend with scale D^−½; query head i reads kv head ⌊i·R/A⌋ (§5).

    Arguments: `q_BAQD`; `context`, keys and values [B, R, S, D]; `own`, keys and values of the
    draft's blocks [B, R, Q, D]; the batch's layout; `window` ω of a sliding layer, or None.
    Returns [B, A, Q, D]; exactly 0 for dropped blocks.
    """
    form = _Chunked if kernels_for(q_BAQD.device).name == "npu" else _Sliced
    return form.apply(q_BAQD, *context, *own, layout, window)


def first_key(anchor: int, window: int | None) -> int:
    """Return the first context key that any slot of a block sees: 0, or a − (ω − 1)."""
    return 0 if window is None else max(0, anchor - window + 1)


def band_hidden(block_size: int, window: int, device: torch.device) -> Tensor:
    """Return what a sliding block may not see, bool [G, ω − 1 + G], True = hidden.

    Columns are context keys a − (ω − 1) … a − 1, then the own slots. Slot j sees context from
    a + j − (ω − 1) on, and own slots ≤ j; ω does not cut inside the block.

    >>> band_hidden(2, 3, torch.device("cpu")).int().tolist()
    [[0, 0, 0, 1], [1, 0, 0, 0]]
    """
    slot_G1 = torch.arange(block_size, device=device).unsqueeze(1)
    column = torch.arange(window - 1 + block_size, device=device)
    own = column - (window - 1)
    return torch.where(own < 0, column < slot_G1, own > slot_G1)


@dataclass(frozen=True)
class _Scratch:
    """What the walk over one row reuses from block to block, in float32 or better."""

    keys_RSD: Tensor
    values_RSD: Tensor
    query_RMD: Tensor
    out_RMD: Tensor
    scores: Tensor  # flat, R·M·(S + G)
    shares: Tensor
    hidden_GC: Tensor | None  # a sliding layer's band
    heads: tuple[int, int, int, int]  # R, E, G, D


def _scratch(q_BAQD: Tensor, k_BRSD: Tensor, block_size: int, window: int | None) -> _Scratch:
    A, D = q_BAQD.shape[1], q_BAQD.shape[3]
    R, S = k_BRSD.shape[1:3]
    M = A // R * block_size
    wide = torch.promote_types(q_BAQD.dtype, torch.float32)
    longest = S if window is None else min(S, window - 1)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=wide, device=q_BAQD.device)

    return _Scratch(
        keys_RSD=empty(R, S + block_size, D),
        values_RSD=empty(R, S + block_size, D),
        query_RMD=empty(R, M, D),
        out_RMD=empty(R, M, D),
        scores=empty(R * M * (longest + block_size)),
        shares=empty(R * M * (longest + block_size)),
        hidden_GC=None if window is None else band_hidden(block_size, window, q_BAQD.device),
        heads=(R, A // R, block_size, D),
    )


class _Row:
    """The walk over one row of a batch: shared by forward and backward."""

    def __init__(
        self, scratch: _Scratch, q_AQD: Tensor, keys: tuple[Tensor, ...], window: int | None
    ) -> None:
        self.s, self.q_AQD, self.window = scratch, q_AQD, window
        context_k, context_v, self.own_k, self.own_v = keys
        self.s.keys_RSD[:, : context_k.shape[1]].copy_(context_k)
        self.s.values_RSD[:, : context_v.shape[1]].copy_(context_v)

    def split(self, x_AQD: Tensor, block: int) -> Tensor:
        """View a block's rows as [R, E, G, D]."""
        R, E, G, _ = self.s.heads
        return x_AQD[:, block * G : (block + 1) * G].unflatten(0, (R, E))

    def attend(self, anchor: int, block: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a block's (softmax shares [R, M, C], keys [R, C, D], values [R, C, D])."""
        s = self.s
        R, E, G, D = s.heads
        rows = slice(block * G, (block + 1) * G)
        low, high = first_key(anchor, self.window), anchor + G
        s.keys_RSD[:, anchor:high].copy_(self.own_k[:, rows])
        s.values_RSD[:, anchor:high].copy_(self.own_v[:, rows])
        torch.mul(self.split(self.q_AQD, block), D**-0.5, out=s.query_RMD.view(R, E, G, D))
        keys_RCD, values_RCD = s.keys_RSD[:, low:high], s.values_RSD[:, low:high]
        shape = (R, E * G, high - low)
        size = R * E * G * (high - low)
        scores_RMC = torch.bmm(s.query_RMD, keys_RCD.mT, out=s.scores[:size].view(shape))
        if s.hidden_GC is not None:
            hidden_GC = s.hidden_GC[:, s.hidden_GC.shape[1] - (high - low) :]
            scores_RMC.view(R, E, G, -1).masked_fill_(hidden_GC, -torch.inf)
        shares_RMC = torch.softmax(scores_RMC, -1, out=s.shares[:size].view(shape))
        return shares_RMC, keys_RCD, values_RCD


class _Sliced(torch.autograd.Function):
    """One block at a time; the backward pass computes the shares again, which keeps no scores."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BAQD: Tensor,
        context_k: Tensor,
        context_v: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        layout: Layout,
        window: int | None,
    ) -> Tensor:
        keys = (context_k, context_v, own_k, own_v)
        scratch = _scratch(q_BAQD, context_k, layout.block_size, window)
        R, E, G, D = scratch.heads
        out_BAQD = _zeros_like_heads(q_BAQD)
        for b, visits in enumerate(layout.visits):
            row = _Row(scratch, q_BAQD[b], tuple(x[b] for x in keys), window)
            for anchor, block in reversed(visits):
                shares_RMC, _, values_RCD = row.attend(anchor, block)
                torch.bmm(shares_RMC, values_RCD, out=scratch.out_RMD)
                row.split(out_BAQD[b], block).copy_(scratch.out_RMD.view(R, E, G, D))
        ctx.save_for_backward(q_BAQD, *keys, out_BAQD)
        ctx.layout, ctx.window = layout, window
        return out_BAQD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BAQD: Tensor) -> tuple[Tensor | None, ...]:
        q_BAQD, *keys, out_BAQD = ctx.saved_tensors
        layout, window = ctx.layout, ctx.window
        scratch = _scratch(q_BAQD, keys[0], layout.block_size, window)
        d_q = _zeros_like_heads(q_BAQD)
        wide = scratch.keys_RSD.dtype
        d_keys = [torch.zeros_like(x, dtype=wide) for x in keys]
        for b, visits in enumerate(layout.visits):
            row = _Row(scratch, q_BAQD[b], tuple(x[b] for x in keys), window)
            sums = tuple(x[b] for x in d_keys)
            for anchor, block in reversed(visits):
                _block_gradient(row, anchor, block, grad_BAQD[b], out_BAQD[b], d_q[b], sums)
        d_keys = [d.to(x.dtype) for d, x in zip(d_keys, keys, strict=True)]
        return (d_q, *d_keys, None, None)


def _block_gradient(
    row: _Row,
    anchor: int,
    block: int,
    grad_AQD: Tensor,
    out_AQD: Tensor,
    d_q_AQD: Tensor,
    sums: tuple[Tensor, ...],
) -> None:
    """Add one block's gradients to dq and to `sums`, those of (context k, v, own k, v).

    With P the shares and dP = dO·Vᵀ: dS = P ⊙ (dP − Σ dO⊙O), because Σ P⊙dP = Σ dO⊙O.
    """
    s = row.s
    R, E, G, D = s.heads
    shares_RMC, keys_RCD, values_RCD = row.attend(anchor, block)
    low, rows = first_key(anchor, row.window), slice(block * G, (block + 1) * G)
    inside = anchor - low  # context columns; the block's own follow
    d_context_k, d_context_v, d_own_k, d_own_v = sums
    d_out_RMD = row.split(grad_AQD, block).to(s.out_RMD.dtype).reshape(R, E * G, D)
    mean_RM1 = (d_out_RMD * row.split(out_AQD, block).reshape(R, E * G, D)).sum(-1, keepdim=True)

    _add_product(d_context_v[:, low:anchor], shares_RMC[..., :inside], d_out_RMD)
    d_own_v[:, rows] = shares_RMC[..., inside:].mT @ d_out_RMD
    d_score_RMC = s.scores[: shares_RMC.numel()].view(shares_RMC.shape)
    torch.bmm(d_out_RMD, values_RCD.mT, out=d_score_RMC)
    d_score_RMC.sub_(mean_RM1).mul_(shares_RMC)
    torch.bmm(d_score_RMC, keys_RCD, out=s.out_RMD)
    row.split(d_q_AQD, block).copy_(s.out_RMD.mul_(D**-0.5).view(R, E, G, D))
    _add_product(d_context_k[:, low:anchor], d_score_RMC[..., :inside], s.query_RMD)
    d_own_k[:, rows] = d_score_RMC[..., inside:].mT @ s.query_RMD


def _add_product(total_RCD: Tensor, left_RMC: Tensor, right_RMD: Tensor) -> None:
    if total_RCD.shape[1]:  # anchor 0 has no context
        total_RCD.baddbmm_(left_RMC.mT, right_RMD)


def _zeros_like_heads(x_BAQD: Tensor) -> Tensor:
    """Zeros whose memory runs [B, Q, A, D], as the output projection takes them."""
    B, A, Q, D = x_BAQD.shape
    return x_BAQD.new_zeros(B, Q, A, D).transpose(1, 2)


class _Chunked(torch.autograd.Function):
    """A few blocks per fused call: keys are the context up to the last anchor, then their own.

    The calls go through the seam (`torch_port/device.py`), whose mask says True = hidden. The
    gradient is the fused kernel's own: merging two calls' outputs by their statistics would not be
    differentiable, and saving each call's keys would keep S of them per few blocks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q_BAQD: Tensor,
        context_k: Tensor,
        context_v: Tensor,
        own_k: Tensor,
        own_v: Tensor,
        layout: Layout,
        window: int | None,
    ) -> Tensor:
        keys = (context_k, context_v, own_k, own_v)
        out_BAQD = _zeros_like_heads(q_BAQD)
        stats = []
        for call in _calls(layout, window):
            out_1AQD, statistics = attention_chunk(*call.inputs(q_BAQD, keys))
            out_BAQD[call.row].index_copy_(1, call.queries, out_1AQD[0])
            stats.append(statistics)
        ctx.save_for_backward(q_BAQD, *keys, out_BAQD)
        ctx.layout, ctx.window, ctx.stats = layout, window, stats
        return out_BAQD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BAQD: Tensor) -> tuple[Tensor | None, ...]:
        q_BAQD, *keys, out_BAQD = ctx.saved_tensors
        d_q = _zeros_like_heads(q_BAQD)
        wide = torch.promote_types(q_BAQD.dtype, torch.float32)
        d_keys = [torch.zeros_like(x, dtype=wide) for x in keys]
        for call, stats in zip(_calls(ctx.layout, ctx.window), ctx.stats, strict=True):
            row = slice(call.row, call.row + 1)
            out, grad = (x[row].index_select(2, call.queries) for x in (out_BAQD, grad_BAQD))
            inputs = call.inputs(q_BAQD, tuple(keys))
            d_q_1AQD, *d_both = attention_chunk_grad(*inputs, out, stats, grad)
            d_q[call.row].index_copy_(1, call.queries, d_q_1AQD[0])
            for context, own, d in zip(d_keys[:2], d_keys[2:], d_both, strict=True):
                context[call.row, :, call.low : call.high] += d[0, :, : call.high - call.low]
                own[call.row].index_copy_(1, call.queries, d[0, :, call.high - call.low :].to(wide))
        d_keys = [d.to(x.dtype) for d, x in zip(d_keys, keys, strict=True)]
        return (d_q, *d_keys, None, None)


@dataclass(frozen=True)
class _Call:
    """One fused call: blocks of one row, next to each other in the order of anchors."""

    row: int
    low: int  # context keys low … high − 1, then the blocks' own
    high: int
    queries: Tensor
    hidden_QK: Tensor  # True = hidden

    def inputs(
        self, q_BAQD: Tensor, keys: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
        """Return the call's q, k, v, mask and scale."""
        row = slice(self.row, self.row + 1)
        k, v = (
            torch.cat(
                [context[row, :, self.low : self.high], own[row].index_select(2, self.queries)], 2
            )
            for context, own in ((keys[0], keys[2]), (keys[1], keys[3]))
        )
        q = q_BAQD[row].index_select(2, self.queries)
        return q, k, v, self.hidden_QK, q.shape[-1] ** -0.5


def _calls(layout: Layout, window: int | None) -> Iterator[_Call]:
    """Cut each row's kept blocks into calls of `BLOCKS_PER_CALL`."""
    start = 0
    for row, visits in enumerate(layout.visits):
        for first in range(0, len(visits), BLOCKS_PER_CALL):
            part = visits[first : first + BLOCKS_PER_CALL]
            at = slice(start + first, start + first + len(part))
            low, high = first_key(part[0][0], window), part[-1][0]
            hidden_QK = _call_hidden(layout, layout.visit_anchors_X[at], low, high, window)
            yield _Call(row, low, high, layout.visit_queries_XG[at].flatten(), hidden_QK)
        start += len(visits)


def _call_hidden(
    layout: Layout, anchors_n: Tensor, low: int, high: int, window: int | None
) -> Tensor:
    """Return what a call's queries may not see, bool [n·G, (high − low) + n·G]."""
    device, G, n = anchors_n.device, layout.block_size, len(anchors_n)
    slot_G = torch.arange(G, device=device)
    context = torch.arange(low, high, device=device)
    anchor_n11 = anchors_n.view(n, 1, 1)
    hidden_nGC = (context >= anchor_n11).expand(n, G, high - low)
    own_GG = torch.zeros(G, G, dtype=torch.bool, device=device)
    if window is not None:
        first_nG1 = anchor_n11 + slot_G.view(1, G, 1) - (window - 1)
        hidden_nGC = hidden_nGC | (context < first_nG1)
        own_GG = slot_G > slot_G.unsqueeze(1)
    block = torch.arange(n, device=device)
    other_nn = block != block.unsqueeze(1)
    own_nGnG = other_nn.view(n, 1, n, 1) | own_GG.view(1, G, 1, G)
    return torch.cat([hidden_nGC.reshape(n * G, -1), own_nGnG.reshape(n * G, n * G)], dim=1)
