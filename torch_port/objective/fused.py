"""Cross entropy and L1 with their gradients in one pass over chunks (spec sheet §7, §8).

Nothing K-wide outlives its chunk and nothing is computed twice. The denominators depend on masks
alone, so the gradient with respect to the logits is known as soon as the logits are:

    dCE/dz = q − onehot(label),   dΣ|q − p̃|/dz = q ⊙ (s − Σ q⊙s),   s = sign(q − p̃).

What depends on the sequence position only (the teacher, the vanilla head's bias, and the sums for
its gradient) is done once per covered position, not once per slot. Slots are walked in the order of
their positions, which the host knows (`torch_port/layout.py`): the teacher is computed for a group
of positions at a time, and the group's slots follow a chunk at a time.

Shape suffixes: M evaluated slots, P covered positions, T all slots (B·N·G), C slots of a chunk,
E positions of a chunk, Q positions of a group, K draft ids, H hidden size, r Markov rank.
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
    """The teacher at a group's positions: kept mass, largest true probability, its draft id."""

    mass_Q: Tensor
    top_Q: Tensor
    best_Q: Tensor


@dataclass(frozen=True)
class _Rows:
    """How many K-wide rows each buffer has."""

    slots: int  # of a chunk; two buffers
    taught: int  # positions of a group, whose teacher is computed by one product
    places: int  # positions of a chunk; two buffers, bias and sum

    @classmethod
    def within(cls, buffer_bytes: int, K: int, wide: torch.dtype, narrow: torch.dtype) -> _Rows:
        """Share out `buffer_bytes`: as many positions taught as slots, half as many places.

        A bf16 draft's logit gradient is rounded before its products: that copy counts along.
        Raises UserError where one row of each does not fit.
        """
        row = K * torch.finfo(wide).bits // 8
        copy = 0 if narrow == wide else K * torch.finfo(narrow).bits // 8
        slots = buffer_bytes // (4 * row + copy)
        need = 5 * row + copy
        if buffer_bytes < need:
            mib = math.ceil(need / 2**20 * 1e4) / 1e4  # up: the remedy has to be enough
            raise UserError(
                f"objective_buffer_mib is {buffer_bytes / 2**20:.6g}, but one slot and its "
                f"position take {mib} MiB at a draft vocabulary of {K}; raise it to {mib} or more"
            )
        return cls(slots, taught=slots, places=max(1, slots // 2))


@dataclass(frozen=True)
class _Chunk:
    """Consecutive slots, and the consecutive positions that they stand at."""

    slots: slice
    places: slice


@dataclass(frozen=True)
class _Group:
    """Consecutive covered positions, and the chunks that their slots are walked in."""

    taught: slice
    chunks: tuple[_Chunk, ...]


def _groups(layout: Layout, rows: _Rows) -> Iterator[_Group]:
    """Cut the covered positions into groups, and each group's slots into chunks of like size."""
    last = len(layout.first_P) - 1
    for start in range(0, last, rows.taught):
        end = min(start + rows.taught, last)
        yield _Group(slice(start, end), tuple(_chunks(layout.first_P, start, end, rows)))


def _chunks(first_P: tuple[int, ...], start: int, end: int, rows: _Rows) -> Iterator[_Chunk]:
    """Cut the slots at positions start … end − 1; a position's slots may fall into two chunks."""
    slot, place, beyond = first_P[start], start, first_P[end]
    size = _share(beyond - slot, rows.slots)
    while slot < beyond:
        stop = min(slot + size, first_P[min(place + rows.places, end)])
        last = bisect_left(first_P, stop) - 1  # the position of slot stop − 1
        yield _Chunk(slice(slot, stop), slice(place, last + 1))
        slot, place = stop, last if stop < first_P[last + 1] else last + 1


def _share(total: int, most: int) -> int:
    """Return the size of equal shares of `total`, none above `most`."""
    return -(-total // -(-total // most))


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
        self.rows = _Rows.within(work.buffer_bytes, len(head), self.wide, hidden.dtype)
        slots = min(self.rows.slots, len(self.layout.slots_M))
        positions = len(self.layout.positions_P)
        taught, places = min(self.rows.taught, positions), min(self.rows.places, positions)
        # The group's teacher logits pass through the chunks' buffers, which are one piece for it.
        self.slot_rows = self._empty(max(2 * slots, taught))
        self.taught_QK, self.bias_EK = self._empty(taught), self._empty(places)
        self.sum_EK = self._empty(places) if self.by_position and self.backward else None

    def _empty(self, rows: int) -> Tensor:
        return torch.empty(rows, len(self.head), dtype=self.wide, device=self.head.device)

    def run(self) -> Tensor:
        """Walk all groups; return the rows of `SlotValues`, [8, M]."""
        columns: list[Tensor] = []
        for group in _groups(self.layout, self.rows):
            said = self._teach(group.taught)
            columns.extend(self._chunk(chunk, group.taught.start, said) for chunk in group.chunks)
        if not columns:
            return torch.empty(8, 0, dtype=self.wide, device=self.head.device)
        return torch.cat(columns, dim=1)

    def gradients(self) -> tuple[Tensor | None, ...]:
        """Return the gradients of hidden, code, W2 and head; autograd casts what it must."""
        return self.d_hidden, self.d_code, self.d_w2, self.d_head

    def _teach(self, at: slice) -> _Said:
        """Fill `taught_QK` with p̃ at a group's positions."""
        teacher = self.teacher
        taught_QK, spare_QK = (x[: at.stop - at.start] for x in (self.taught_QK, self.slot_rows))
        # Never rounded to bf16: it would not fit its float32 normaliser.
        product(teacher.states_PH[at], teacher.head_KH, spare_QK)
        top_Q, best_Q = row_max(spare_QK)
        torch.softmax(spare_QK, -1, out=taught_QK)
        share_Q = taught_QK.gather(-1, best_Q.unsqueeze(-1)).squeeze(-1)
        inside_Q = top_Q - share_Q.log()  # logsumexp over the kept ids: max p̃ is exp(top − it)
        if teacher.normalizer_P is not None:
            mass_Q = (inside_Q - teacher.normalizer_P[at]).exp()
        elif teacher.pruned_P is not None:
            mass_Q = (inside_Q - torch.logaddexp(inside_Q, teacher.pruned_P[at])).exp()
        else:
            mass_Q = torch.ones_like(inside_Q)
        return _Said(mass_Q, mass_Q * share_Q, best_Q)

    def _chunk(self, chunk: _Chunk, start: int, said: _Said) -> Tensor:
        at, n = chunk.slots, chunk.slots.stop - chunk.slots.start
        a_CK, q_CK = self.slot_rows[:n], self.slot_rows[n : 2 * n]
        place_C = self.layout.place_M[at]
        taught_C = place_C - start
        hidden_CH = self.hidden.index_select(0, self.layout.slots_M[at])
        label_C, kept_C = self.slots.label_M[at], self.slots.kept_M[at]
        self._logits(hidden_CH, chunk, place_C - chunk.places.start, a_CK, q_CK)
        top_C, best_C = row_max(a_CK)
        chosen_C = a_CK.gather(-1, label_C.unsqueeze(-1)).squeeze(-1)
        torch.softmax(a_CK, -1, out=q_CK)
        draft_top_C = q_CK.gather(-1, best_C.unsqueeze(-1)).squeeze(-1)
        mass_C = said.mass_Q.index_select(0, taught_C)
        l1_C, accept_C = self._compare(taught_C, mass_C, a_CK, q_CK)
        if self.backward:
            self._logit_gradient(at, a_CK, q_CK)
            self._chain(a_CK, hidden_CH, chunk, place_C - chunk.places.start)
        values = SlotValues(
            # From the logits and the maximum, never log q[label]: that underflows.
            ce=torch.where(kept_C, (top_C - chosen_C) - draft_top_C.log(), 0),
            l1=l1_C,
            accept=accept_C,
            kept_mass=mass_C,
            correct=((best_C == label_C) & kept_C).to(self.wide),
            agrees=(best_C == said.best_Q.index_select(0, taught_C)).to(self.wide),
            teacher_top=said.top_Q.index_select(0, taught_C),
            draft_top=draft_top_C,
        )
        return torch.stack(list(vars(values).values()))

    def _logits(
        self, hidden_CH: Tensor, chunk: _Chunk, place_C: Tensor, out_CK: Tensor, spare_CK: Tensor
    ) -> None:
        """z = h·Uᵀ + bias, neither of them rounded to bf16."""
        if self.code is None or self.w2 is None:
            product(hidden_CH, self.head, out_CK)
            return
        if self.by_position:
            bias_EK = self.bias_EK[: chunk.places.stop - chunk.places.start]
            product(self.code[chunk.places], self.w2, bias_EK)
            torch.index_select(bias_EK, 0, place_C, out=out_CK)
        else:
            product(self.code[chunk.slots], self.w2, out_CK)
        if self.hidden.dtype == self.head.dtype == self.wide:
            out_CK.addmm_(hidden_CH, self.head.T)
        else:
            out_CK.add_(product(hidden_CH, self.head, spare_CK))

    def _compare(
        self, taught_C: Tensor, mass_C: Tensor, a_CK: Tensor, q_CK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return (Σ|q − p̃|, α); leave q − p̃ in `a_CK`."""
        torch.index_select(self.taught_QK, 0, taught_C, out=a_CK)
        prunes = self.teacher.normalizer_P is not None or self.teacher.pruned_P is not None
        if prunes:  # the true p is p̃ times the kept mass
            overlap_CK = torch.minimum(a_CK.mul_(mass_C.unsqueeze(-1)), q_CK, out=a_CK)
            overlap_C = overlap_CK.sum(-1)
            torch.index_select(self.taught_QK, 0, taught_C, out=a_CK)
        torch.sub(q_CK, a_CK, out=a_CK)
        # The bias has served. Not vector_norm(·, 1): it loses 1e-5 at K = 16k, and is slower.
        spare_EK = self.bias_EK
        parts = a_CK.split(len(spare_EK))
        l1_C = torch.cat([torch.abs(d, out=spare_EK[: len(d)]).sum(-1) for d in parts])
        if not prunes:
            overlap_C = 1 - 0.5 * l1_C
        return l1_C, overlap_C.clamp(0, 1)

    def _logit_gradient(self, at: slice, a_CK: Tensor, q_CK: Tensor) -> None:
        """Turn q − p̃ in `a_CK` into the loss's gradient with respect to the logits.

        l1_factor·q⊙(s − Σ q⊙s) + ce_factor·(q − onehot). `q_CK` is used up.
        """
        ce_C1 = self.slots.ce_factor_M[at].unsqueeze(-1)
        l1_C1 = self.slots.l1_factor_M[at].unsqueeze(-1)
        mean_C1 = a_CK.sign_().mul_(q_CK).sum(-1, keepdim=True)
        a_CK.mul_(l1_C1).add_(q_CK.mul_(ce_C1 - l1_C1 * mean_C1))
        a_CK.scatter_add_(1, self.slots.label_M[at].unsqueeze(-1), -ce_C1)

    def _chain(self, dz_CK: Tensor, hidden_CH: Tensor, chunk: _Chunk, place_C: Tensor) -> None:
        """Carry a chunk's logit gradient on to hidden states, head and Markov code."""
        narrow_CK = dz_CK.to(self.hidden.dtype)
        if self.d_hidden is not None:
            slots_C = self.layout.slots_M[chunk.slots]
            self.d_hidden.index_copy_(0, slots_C, narrow_CK @ self.head)
        if self.d_head is not None:
            _add_product(narrow_CK.T, hidden_CH, self.d_head)
        if self.sum_EK is None:
            self._chain_code(narrow_CK, chunk.slots)
            return
        del narrow_CK  # one such copy at a time is what `_Rows` counts
        sum_EK = self.sum_EK[: chunk.places.stop - chunk.places.start].zero_()
        _add_rows(sum_EK, place_C, dz_CK)
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


def _add_rows(out_QK: Tensor, place_C: Tensor, rows_CK: Tensor) -> None:
    """out[place[c]] += rows[c], in a fixed order.

    On the CPU index_add walks its rows in order. Elsewhere it may add atomically, in any order, and
    a product with the 0/1 matrix of places costs next to nothing beside the others.
    """
    if out_QK.device.type == "cpu":
        out_QK.index_add_(0, place_C, rows_CK)
        return
    onehot_QC = place_C == torch.arange(len(out_QK), device=place_C.device).unsqueeze(-1)
    out_QK.addmm_(onehot_QC.to(rows_CK.dtype), rows_CK)
