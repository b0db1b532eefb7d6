"""Cross entropy and L1 with their gradients in one pass over chunks (spec sheet §7, §8).

Nothing K-wide outlives its chunk and nothing is computed twice. The denominators depend on masks
alone, so the gradient with respect to the logits is known as soon as the logits are:

    dCE/dz = q − onehot(label),   dΣ|q − p̃|/dz = q ⊙ (s − Σ q⊙s),   s = sign(q − p̃).

What depends on the sequence position only (the teacher, the vanilla head's bias, and the sums for
its gradient) is done once per covered position, not once per slot. Slots are walked in the order of
their positions, which the host knows (`torch_port/layout.py`), a chunk at a time.

Shape suffixes: M evaluated slots, P covered positions, T all slots (B·N·G), C slots of a chunk,
E positions of a chunk, K draft ids, H hidden size, r Markov rank.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from torch_port.errors import UserError
from torch_port.layout import Layout
from torch_port.objective.products import product
from torch_port.objective.reductions import row_max

PIECES = 16  # that a chunk's slots are compared with the teacher in, while they are in the cache


@dataclass(frozen=True)
class Teacher:
    """What the frozen target says at the covered positions; never given a gradient."""

    states_PH: Tensor
    head_KH: Tensor
    normalizer_P: Tensor | None  # log Σ exp over all of V, where the features carry it
    pruned_P: Tensor | None  # else log Σ exp over the pruned ids; neither when K = V


@dataclass(frozen=True)
class Slots:
    """What the objective asks of each evaluated slot, in the layout's order."""

    label_M: Tensor  # draft id; any legal one where the label was pruned
    kept_M: Tensor  # bool
    ce_factor_M: Tensor  # what ce is multiplied by in the loss, 0 where pruned
    l1_factor_M: Tensor  # what l1 is multiplied by in the loss


@dataclass(frozen=True)
class Code:
    """What W2 turns into the Markov bias, by position [P, r] (vanilla) or by slot [M, r]."""

    values: Tensor
    by_position: bool


@dataclass(frozen=True)
class SlotValues:
    """Each evaluated slot's values, [M], without gradient, in float32 or better."""

    ce: Tensor
    l1: Tensor
    accept: Tensor
    kept_mass: Tensor
    correct: Tensor
    agrees: Tensor
    teacher_top: Tensor
    draft_top: Tensor


def fused_terms(
    hidden_TH: Tensor,
    code: Code | None,
    w2_Kr: Tensor | None,
    head_KH: Tensor,
    teacher: Teacher,
    slots: Slots,
    layout: Layout,
    buffer_bytes: int,
) -> tuple[Tensor, SlotValues]:
    """Return Σ (ce_factor·ce + l1_factor·l1), which carries the gradient, and every slot's values.

    Arguments: `hidden_TH`, the states of all slots; `code` with W2, or neither without a Markov
    head; `head_KH`, the draft's head: frozen, or a parameter, which then costs one more product of
    the forward one's size and K×H floats for its gradient; `buffer_bytes` for all K-wide buffers.
    Raises UserError when `buffer_bytes` do not hold one slot and its position.
    """
    work = _Work(
        teacher,
        slots,
        layout,
        by_position=code is not None and code.by_position,
        buffer_bytes=buffer_bytes,
        gradients=torch.is_grad_enabled(),
    )
    values = None if code is None else code.values
    loss, columns = _Fused.apply(hidden_TH, values, w2_Kr, head_KH, work)
    return loss, SlotValues(*columns.unbind(0))


@dataclass(frozen=True)
class _Work:
    teacher: Teacher
    slots: Slots
    layout: Layout
    by_position: bool
    buffer_bytes: int
    gradients: bool


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        code: Tensor | None,
        w2_Kr: Tensor | None,
        head_KH: Tensor,
        work: _Work,
    ) -> tuple[Tensor, Tensor]:
        needs = ctx.needs_input_grad[:4] if work.gradients else (False,) * 4
        walk = _Walk((hidden_TH, code, w2_Kr, head_KH), work, needs)
        values = walk.run()
        ctx.save_for_backward(*walk.gradients())
        ctx.mark_non_differentiable(values)
        slots = work.slots
        return (slots.ce_factor_M * values[0] + slots.l1_factor_M * values[1]).sum(), values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        # Out of place: with retain_graph the saved gradients are read again.
        scaled = (None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors)
        return (*scaled, None)


@dataclass(frozen=True)
class _Said:
    """The teacher at a chunk's positions: kept mass, largest true probability, its draft id."""

    mass_E: Tensor
    top_E: Tensor
    best_E: Tensor


@dataclass(frozen=True)
class _Rows:
    """How many K-wide rows each buffer has."""

    slots: int  # of a chunk
    places: int  # positions of a chunk
    piece: int  # of a chunk's slots, compared with the teacher at a time; two buffers

    @classmethod
    def within(
        cls, buffer_bytes: int, K: int, layout: Layout, wide: torch.dtype, narrow: torch.dtype
    ) -> _Rows:
        """Share out `buffer_bytes`; places follow the batch, as many as slots where each is alone.

        A bf16 draft's logit gradient is rounded before its products: that copy counts along.
        Raises UserError where one row of each does not fit.
        """
        row = K * torch.finfo(wide).bits // 8
        copy = 0 if narrow == wide else K * torch.finfo(narrow).bits // 8
        least = 4 * row + copy
        if buffer_bytes < least:
            mib = math.ceil(least / 2**20 * 1e4) / 1e4  # up: the remedy has to be enough
            raise UserError(
                f"objective_buffer_mib is {buffer_bytes / 2**20:.6g}, but one slot and its "
                f"position take {mib} MiB at a draft vocabulary of {K}; raise it to {mib} or more"
            )
        alone = len(layout.positions_P) / max(1, len(layout.slots_M))
        slots = int(buffer_bytes / ((1 + alone) * row + copy))
        slots = min(slots, max(1, len(layout.slots_M)))
        while True:
            places = min(math.ceil(1.05 * alone * slots), len(layout.positions_P))
            rows = cls(max(1, slots), max(1, places), max(1, slots // PIECES))
            held = (rows.slots + rows.places + 2 * rows.piece) * row + rows.slots * copy
            if held <= buffer_bytes:
                return rows
            slots -= 1


@dataclass(frozen=True)
class _Chunk:
    """Consecutive slots, and the consecutive positions that they stand at."""

    slots: slice
    places: slice


def _chunks(first_P: tuple[int, ...], rows: _Rows) -> Iterator[_Chunk]:
    """Cut the slots into chunks of like size; a position's slots may fall into two of them."""
    total, last = first_P[-1], len(first_P) - 1
    size = -(-total // -(-total // rows.slots)) if total else 1
    slot, place = 0, 0
    while slot < total:
        stop = min(slot + size, first_P[min(place + rows.places, last)])
        beyond = bisect_left(first_P, stop)  # the position after that of slot stop − 1
        yield _Chunk(slice(slot, stop), slice(place, beyond))
        slot, place = stop, beyond if stop == first_P[beyond] else beyond - 1


class _Walk:
    """One pass over a batch's slots: inputs, buffers, and the sums that come out."""

    def __init__(
        self, inputs: tuple[Tensor | None, ...], work: _Work, needs: tuple[bool, ...]
    ) -> None:
        hidden, self.code, self.w2, head = inputs
        assert hidden is not None
        assert head is not None
        self.hidden, self.head = hidden, head
        self.layout, self.teacher, self.slots = work.layout, work.teacher, work.slots
        self.by_position = work.by_position
        self.wide = torch.promote_types(hidden.dtype, torch.float32)
        # Sums over chunks are held in float32 or better until the end.
        self.d_hidden = torch.zeros_like(hidden) if needs[0] else None
        self.d_code, self.d_w2, self.d_head = (
            None if x is None or not need else torch.zeros_like(x, dtype=self.wide)
            for x, need in zip(inputs[1:], needs[1:], strict=True)
        )
        self.backward = any(needs)
        self.rows = _Rows.within(work.buffer_bytes, len(head), self.layout, self.wide, hidden.dtype)
        self.slots_CK = self._empty(self.rows.slots)
        # One after the other: the positions' bias, their teacher, their sums of dz.
        self.places_EK = self._empty(self.rows.places)
        self.pieces = self._empty(self.rows.piece), self._empty(self.rows.piece)

    def _empty(self, rows: int) -> Tensor:
        return torch.empty(rows, len(self.head), dtype=self.wide, device=self.head.device)

    def run(self) -> Tensor:
        """Walk all chunks; return the rows of `SlotValues`, [8, M]."""
        columns = [self._chunk(chunk) for chunk in _chunks(self.layout.first_P, self.rows)]
        if not columns:
            return torch.empty(8, 0, dtype=self.wide, device=self.head.device)
        return torch.cat(columns, dim=1)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, code, W2 and head; autograd casts what it must."""
        return self.d_hidden, self.d_code, self.d_w2, self.d_head

    def _chunk(self, chunk: _Chunk) -> Tensor:
        at = chunk.slots
        z_CK = self.slots_CK[: at.stop - at.start]
        places_EK = self.places_EK[: chunk.places.stop - chunk.places.start]
        place_C = self.layout.place_M[at] - chunk.places.start
        hidden_CH = self.hidden.index_select(0, self.layout.slots_M[at])
        label_C, kept_C = self.slots.label_M[at], self.slots.kept_M[at]
        self._logits(hidden_CH, chunk, place_C, z_CK, places_EK)
        top_C, best_C = row_max(z_CK)
        chosen_C = z_CK.gather(-1, label_C.unsqueeze(-1)).squeeze(-1)
        said = self._teach(chunk.places, places_EK)
        mass_C = said.mass_E.index_select(0, place_C)
        pieces = [
            self._piece(slice(i, i + self.rows.piece), at.start, z_CK, best_C, place_C, mass_C)
            for i in range(0, len(z_CK), self.rows.piece)
        ]
        draft_top_C, l1_C, accept_C = (torch.cat(x) for x in zip(*pieces, strict=True))
        if self.backward:
            # z has become dz, but for the label's own −1.
            z_CK.scatter_add_(1, label_C.unsqueeze(-1), -self.slots.ce_factor_M[at].unsqueeze(-1))
            self._chain(z_CK, hidden_CH, chunk, place_C, places_EK)
        values = SlotValues(
            # From the logits and the maximum, never log q[label]: that underflows.
            ce=torch.where(kept_C, (top_C - chosen_C) - draft_top_C.log(), 0),
            l1=l1_C,
            accept=accept_C,
            kept_mass=mass_C,
            correct=((best_C == label_C) & kept_C).to(self.wide),
            agrees=(best_C == said.best_E.index_select(0, place_C)).to(self.wide),
            teacher_top=said.top_E.index_select(0, place_C),
            draft_top=draft_top_C,
        )
        return torch.stack(list(vars(values).values()))

    def _teach(self, at: slice, taught_EK: Tensor) -> _Said:
        """Fill `taught_EK` with p̃ at a chunk's positions."""
        teacher = self.teacher
        # Never rounded to bf16: it would not fit its float32 normaliser.
        product(teacher.states_PH[at], teacher.head_KH, taught_EK)
        top_E, best_E = row_max(taught_EK)
        for part in taught_EK.split(self.rows.piece):
            part.copy_(torch.softmax(part, -1, out=self.pieces[0][: len(part)]))
        share_E = taught_EK.gather(-1, best_E.unsqueeze(-1)).squeeze(-1)
        inside_E = top_E - share_E.log()  # logsumexp over the kept ids: max p̃ is exp(top − it)
        if teacher.normalizer_P is not None:
            mass_E = (inside_E - teacher.normalizer_P[at]).exp()
        elif teacher.pruned_P is not None:
            mass_E = (inside_E - torch.logaddexp(inside_E, teacher.pruned_P[at])).exp()
        else:
            mass_E = torch.ones_like(inside_E)
        return _Said(mass_E, mass_E * share_E, best_E)

    def _logits(
        self,
        hidden_CH: Tensor,
        chunk: _Chunk,
        place_C: Tensor,
        out_CK: Tensor,
        bias_EK: Tensor,
    ) -> None:
        """z = h·Uᵀ + bias, neither of them rounded to bf16."""
        if self.code is None or self.w2 is None:
            product(hidden_CH, self.head, out_CK)
            return
        if self.by_position:
            product(self.code[chunk.places], self.w2, bias_EK)
            torch.index_select(bias_EK, 0, place_C, out=out_CK)
        else:
            product(self.code[chunk.slots], self.w2, out_CK)
        if self.hidden.dtype == self.head.dtype == self.wide:
            out_CK.addmm_(hidden_CH, self.head.T)
            return
        size = self.rows.piece
        for part, states in zip(out_CK.split(size), hidden_CH.split(size), strict=True):
            part.add_(product(states, self.head, self.pieces[0][: len(part)]))

    def _piece(
        self,
        part: slice,
        start: int,
        z_CK: Tensor,
        best_C: Tensor,
        place_C: Tensor,
        mass_C: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (max q, Σ|q − p̃|, α) of some rows of a chunk; their logits become dz."""
        z = z_CK[part]
        q, d = (buffer[: len(z)] for buffer in self.pieces)
        torch.softmax(z, -1, out=q)
        top = q.gather(-1, best_C[part].unsqueeze(-1)).squeeze(-1)
        torch.index_select(self.places_EK, 0, place_C[part], out=d)
        prunes = self.teacher.normalizer_P is not None or self.teacher.pruned_P is not None
        if prunes:  # the true p is p̃ times the kept mass
            overlap = torch.minimum(torch.mul(d, mass_C[part].unsqueeze(-1), out=z), q, out=z)
            accept = overlap.sum(-1)
        torch.sub(q, d, out=d)
        l1 = torch.abs(d, out=z).sum(-1)  # not vector_norm(·, 1): it loses 1e-5 at K = 16k
        if not prunes:
            accept = 1 - 0.5 * l1
        if self.backward:
            at = slice(start + part.start, start + part.start + len(z))
            self._logit_gradient(at, q, d, z)
        return top, l1, accept.clamp(0, 1)

    def _logit_gradient(self, at: slice, q: Tensor, d: Tensor, out: Tensor) -> None:
        """out = l1_factor·q⊙(s − Σ q⊙s) + ce_factor·q, s = sign(d); d is used up."""
        ce = self.slots.ce_factor_M[at].unsqueeze(-1)
        l1 = self.slots.l1_factor_M[at].unsqueeze(-1)
        mean = d.sign_().mul_(q).sum(-1, keepdim=True)
        torch.mul(q, ce - l1 * mean, out=out)
        out.add_(d.mul_(l1))

    def _chain(
        self,
        dz_CK: Tensor,
        hidden_CH: Tensor,
        chunk: _Chunk,
        place_C: Tensor,
        sum_EK: Tensor,
    ) -> None:
        """Carry a chunk's logit gradient on to hidden states, head and Markov code."""
        narrow_CK = dz_CK.to(self.hidden.dtype)
        if self.d_hidden is not None:
            slots_C = self.layout.slots_M[chunk.slots]
            self.d_hidden.index_copy_(0, slots_C, narrow_CK @ self.head)
        if self.d_head is not None:
            _add_product(narrow_CK.T, hidden_CH, self.d_head)
        if not self.by_position:
            self._chain_code(narrow_CK, chunk.slots)
            return
        del narrow_CK  # one such copy at a time is what `_Rows` counts
        _add_rows(sum_EK.zero_(), place_C, dz_CK)
        self._chain_code(sum_EK.to(self.hidden.dtype), chunk.places)

    def _chain_code(self, dz: Tensor, at: slice) -> None:
        if self.code is None or self.w2 is None:
            return
        if self.d_code is not None:
            self.d_code[at] += dz @ self.w2
        if self.d_w2 is not None:
            _add_product(dz.T, self.code[at], self.d_w2)


def _add_product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """out += a·b, summed in out's dtype."""
    if a.dtype == b.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        out.add_(a @ b)


def _add_rows(out_EK: Tensor, place_C: Tensor, rows_CK: Tensor) -> None:
    """out[place[c]] += rows[c], in a fixed order.

    On the CPU index_add walks its rows in order. Elsewhere it may add atomically, in any order, and
    a product with the 0/1 matrix of places costs next to nothing beside the others.
    """
    if out_EK.device.type == "cpu":
        out_EK.index_add_(0, place_C, rows_CK)
        return
    onehot_EC = place_C == torch.arange(len(out_EK), device=place_C.device).unsqueeze(-1)
    out_EK.addmm_(onehot_EC.to(rows_CK.dtype), rows_CK)
