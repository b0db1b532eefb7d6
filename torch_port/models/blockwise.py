"""Draft attention block by block: only the columns that a query can see (spec sheet §4).

The dense form builds N·γ × (S + N·γ) scores, of which a block needs its context and itself. Here
each block of anchor a works on one contiguous slice of keys: its own γ keys are written over
context slots a … a+γ−1 of a copy, which no later block of the walk needs, because the walk goes
down the anchors. A full-attention layer then needs no mask at all. Memory grows with S + N·γ.
(Two, four or eight blocks at once, with a small mask, came out 8 % slower on two cores: there are
fewer calls, but the scores leave the cache.)

An NPU takes one fused call per few blocks instead: see `_Chunked`.

Shape suffixes: B batch, S sequence, N blocks, G slots, Q = N·G, A query heads, R kv heads, E = A/R
query heads of one kv head, M = E·G rows of one product, D head dimension, C keys a block sees,
n blocks of a pack or call, X their slots; 2 is keys, then values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_port.device import attention_chunk, attention_chunk_grad, kernels_for
from torch_port.layout import Layout

PACK = 32  # blocks whose slots are gathered by one operator
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
    if window is not None:  # nothing lies further back; the band is as wide as the window
        window = min(window, context[0].shape[2] + layout.block_size)
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


class _Walk:
    """One row's blocks from the last anchor down, packed a few at a time, in float32 or better.

    A block's query heads of one kv head are rows of one product, so that keys are never repeated.
    """

    def __init__(
        self, q_AQD: Tensor, keys: tuple[Tensor, ...], layout: Layout, row: int, window: int | None
    ) -> None:
        context_k, context_v, own_k, own_v = keys
        self.q_AQD, self.own = q_AQD, (own_k, own_v)
        self.R, S, self.D = context_k.shape
        self.E, self.G, self.window = len(q_AQD) // self.R, layout.block_size, window
        self.wide = torch.promote_types(q_AQD.dtype, torch.float32)
        self.visits, self.queries_XG = layout.row(row)
        device, G = q_AQD.device, self.G
        self.both_2RSD = torch.empty(
            2, self.R, S + G, self.D, dtype=self.wide, device=device
        )  # keys, then values
        self.both_2RSD[0, :, :S].copy_(context_k)
        self.both_2RSD[1, :, :S].copy_(context_v)
        longest = (S if window is None else min(S, window - 1)) + G
        scratch = torch.empty(2, self.R * self.E * G * longest, dtype=self.wide, device=device)
        self.scratch = scratch.unbind(0)  # scores, shares
        self.hidden_GC = None if window is None else band_hidden(G, window, device)

    def packs(self) -> Iterator[_Pack]:
        """Cut the walk into packs of up to `PACK` blocks."""
        for end in range(len(self.visits), 0, -PACK):
            start = max(0, end - PACK)
            queries_X = self.queries_XG[start:end].flatten()
            anchors = [anchor for anchor, _ in self.visits[start:end]]
            yield _Pack(anchors, queries_X)

    def pack(self, x_AQD: Tensor, queries_X: Tensor) -> Tensor:
        """Copy the blocks of a pack to [n, R, M, D]."""
        heads = len(x_AQD) // self.R
        # Memory runs [Q, A, D] as it comes from a projection: select there, or all of it is copied.
        packed = x_AQD.transpose(0, 1).index_select(0, queries_X).to(self.wide)
        packed = packed.view(-1, self.G, self.R, heads, self.D).permute(0, 2, 3, 1, 4)
        return packed.reshape(-1, self.R, heads * self.G, self.D)

    def pack_queries(self, queries_X: Tensor) -> Tensor:
        """Copy a pack's queries, scaled, to [n, R, M, D]."""
        return self.pack(self.q_AQD, queries_X).mul_(self.D**-0.5)

    def unpack(self, packed_nRMD: Tensor, queries_X: Tensor, out_AQD: Tensor) -> None:
        """Write the blocks of a pack to their places in `out_AQD`."""
        n = len(packed_nRMD)
        flat = packed_nRMD.unflatten(2, (-1, self.G)).permute(0, 3, 1, 2, 4)
        flat = flat.reshape(n * self.G, len(out_AQD), self.D).to(out_AQD.dtype)
        out_AQD.transpose(0, 1).index_copy_(0, queries_X, flat)

    def own_keys(self, queries_X: Tensor) -> Tensor:
        """Copy a pack's own keys and values to [n, 2, R, G, D]."""
        return torch.stack([self.pack(x, queries_X) for x in self.own], dim=1)

    def attend(self, query_RMD: Tensor, own_2RGD: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
        """Return a block's (softmax shares [R, M, C]; keys and values [2, R, C, D])."""
        low, high = first_key(anchor, self.window), anchor + self.G
        self.both_2RSD[:, :, anchor:high].copy_(own_2RGD)
        seen_2RCD = self.both_2RSD[:, :, low:high]
        shape = (*query_RMD.shape[:2], high - low)
        scores_RMC, shares_RMC = (x[: math.prod(shape)].view(shape) for x in self.scratch)
        torch.bmm(query_RMD, seen_2RCD[0].mT, out=scores_RMC)
        if self.hidden_GC is not None:
            hidden_GC = self.hidden_GC[:, self.hidden_GC.shape[1] - (high - low) :]
            scores_RMC.view(self.R, self.E, self.G, -1).masked_fill_(hidden_GC, -torch.inf)
        return torch.softmax(scores_RMC, -1, out=shares_RMC), seen_2RCD


@dataclass(frozen=True)
class _Pack:
    """Some blocks of a row, ascending: their anchors, and their slots one after another."""

    anchors: list[int]
    queries_X: Tensor


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
        out_BAQD = _zeros_like_heads(q_BAQD)
        for row in range(len(q_BAQD)):
            walk = _Walk(q_BAQD[row], tuple(x[row] for x in keys), layout, row, window)
            for pack in walk.packs():
                query_nRMD = walk.pack_queries(pack.queries_X)
                out_nRMD = torch.empty_like(query_nRMD)
                blocks = zip(
                    pack.anchors, query_nRMD, walk.own_keys(pack.queries_X), out_nRMD, strict=True
                )
                for anchor, query_RMD, own_2RGD, out_RMD in reversed(list(blocks)):
                    shares_RMC, seen_2RCD = walk.attend(query_RMD, own_2RGD, anchor)
                    torch.bmm(shares_RMC, seen_2RCD[1], out=out_RMD)
                walk.unpack(out_nRMD, pack.queries_X, out_BAQD[row])
        ctx.save_for_backward(q_BAQD, *keys, out_BAQD)
        ctx.layout, ctx.window = layout, window
        return out_BAQD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BAQD: Tensor) -> tuple[Tensor | None, ...]:
        q_BAQD, *keys, out_BAQD = ctx.saved_tensors
        d_q = _zeros_like_heads(q_BAQD)
        d_keys = [
            torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in keys
        ]
        for row in range(len(q_BAQD)):
            walk = _Walk(q_BAQD[row], tuple(x[row] for x in keys), ctx.layout, row, ctx.window)
            sums = tuple(x[row] for x in d_keys)
            for pack in walk.packs():
                _pack_gradient(walk, pack, (grad_BAQD[row], out_BAQD[row]), d_q[row], sums)
        d_keys = [d.to(x.dtype) for d, x in zip(d_keys, keys, strict=True)]
        return (d_q, *d_keys, None, None)


def _pack_gradient(
    walk: _Walk,
    pack: _Pack,
    outside: tuple[Tensor, Tensor],
    d_q_AQD: Tensor,
    sums: tuple[Tensor, ...],
) -> None:
    """Add a pack's gradients to dq and to `sums`, those of (context k, v, own k, v).

    `outside` is dO and O. With P the shares and dP = dO·Vᵀ: dS = P ⊙ (dP − Σ dO⊙O), because
    Σ P⊙dP = Σ dO⊙O.
    """
    d_context_k, d_context_v, *d_own_sums = sums
    query_nRMD = walk.pack_queries(pack.queries_X)
    d_out_nRMD, out_nRMD = (walk.pack(x, pack.queries_X) for x in outside)
    mean_nRM1 = (d_out_nRMD * out_nRMD).sum(-1, keepdim=True)
    own_n2RGD = walk.own_keys(pack.queries_X)
    d_query_nRMD, d_own_n2RGD = out_nRMD, torch.empty_like(own_n2RGD)  # out has served
    blocks = zip(
        pack.anchors,
        *(query_nRMD, own_n2RGD, d_out_nRMD, mean_nRM1, d_query_nRMD),
        *d_own_n2RGD.unbind(1),
        strict=True,
    )
    for anchor, query, own, d_out, mean, d_query, d_own_k, d_own_v in reversed(list(blocks)):
        low = first_key(anchor, walk.window)
        inside = anchor - low  # context columns; the block's own follow
        shares_RMC, (keys_RCD, values_RCD) = walk.attend(query, own, anchor)
        shares_RCM = shares_RMC.mT
        torch.bmm(shares_RCM[:, inside:], d_out, out=d_own_v)
        d_scores_RMC = walk.scratch[0][: shares_RMC.numel()].view(shares_RMC.shape)
        torch.bmm(d_out, values_RCD.mT, out=d_scores_RMC)
        d_scores_RMC.sub_(mean).mul_(shares_RMC)
        torch.bmm(d_scores_RMC, keys_RCD, out=d_query)
        d_scores_RCM = d_scores_RMC.mT
        torch.bmm(d_scores_RCM[:, inside:], query, out=d_own_k)
        if inside:  # anchor 0 has no context
            d_context_v[:, low:anchor].baddbmm_(shares_RCM[:, :inside], d_out)
            d_context_k[:, low:anchor].baddbmm_(d_scores_RCM[:, :inside], query)
    walk.unpack(d_query_nRMD.mul_(walk.D**-0.5), pack.queries_X, d_q_AQD)
    for total, d_own_nRGD in zip(d_own_sums, d_own_n2RGD.unbind(1), strict=True):
        walk.unpack(d_own_nRGD, pack.queries_X, total)


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
        stats: list[Tensor] = []  # two of each call
        for call in _calls(layout, window):
            out_1AQD, statistics = attention_chunk(*call.inputs(q_BAQD, keys))
            out_BAQD[call.row].index_copy_(1, call.queries, out_1AQD[0])
            stats.extend(statistics)
        # Saved like the rest: as attributes they would outlive a layer that is computed again.
        ctx.save_for_backward(q_BAQD, *keys, out_BAQD, *stats)
        ctx.layout, ctx.window = layout, window
        return out_BAQD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BAQD: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: a layer that is computed again allows no second look
        q_BAQD, *keys, out_BAQD = saved[:6]
        stats = saved[6:]
        d_q = _zeros_like_heads(q_BAQD)
        wide = torch.promote_types(q_BAQD.dtype, torch.float32)
        d_keys = [torch.zeros_like(x, dtype=wide) for x in keys]
        pairs = zip(stats[::2], stats[1::2], strict=True)
        for call, both in zip(_calls(ctx.layout, ctx.window), pairs, strict=True):
            row = slice(call.row, call.row + 1)
            out, grad = (x[row].index_select(2, call.queries) for x in (out_BAQD, grad_BAQD))
            inputs = call.inputs(q_BAQD, tuple(keys))
            d_q_1AQD, *d_both = attention_chunk_grad(*inputs, out, both, grad)
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
