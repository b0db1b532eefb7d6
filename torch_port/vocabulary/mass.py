"""The teacher's summed probability of every target id: counts that ask the target (spec sheet §7).

Shape suffixes: S tokens of a sample, P positions, V target ids, H hidden size.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from torch_port.data.features import FeatureDirectory
from torch_port.errors import UserError
from torch_port.objective.products import product
from torch_port.progress import stage
from torch_port.vocabulary.feature_pieces import FeaturePiece, feature_pieces, read_samples

PIECE_ROWS = 4096  # tokens whose states are read at a time: some tens of MB
_BUFFER_BYTES = 64 << 20  # of a [P, V] float32 buffer; wide products are fast from some rows up


class TeacherMass:
    """Σ over supervised positions t ≥ 1 of softmax(T_{t−1}·Uᵀ) over all of V.

    The teacher of position t stands at t − 1 (§3.5). Positions of several samples share a product,
    so short samples cost no more than long ones.
    """

    def __init__(self, head_VH: Tensor) -> None:
        # Widened once: a product would do it again for every buffer.
        self._head_VH = head_VH.to(torch.promote_types(head_VH.dtype, torch.float32))
        self._rows = max(1, _BUFFER_BYTES // (4 * len(head_VH)))
        self._total_V = torch.zeros(len(head_VH), dtype=torch.float64)
        self._waiting: list[Tensor] = []
        self._held = 0

    def add(self, states_SH: Tensor, mask_S: Tensor) -> None:
        """Add one sample: `states_SH` after the final norm, `mask_S` its loss mask.

        Raises UserError when the states are not as wide as the head, or not finite.
        """
        if states_SH.shape[-1] != self._head_VH.shape[-1]:
            raise UserError(
                f"the features' final states are {states_SH.shape[-1]} wide, --target's head "
                f"{self._head_VH.shape[-1]}; give the target that the features were captured from"
            )
        states_PH = states_SH[:-1][mask_S[1:] > 0.5]
        if not bool(torch.isfinite(states_PH).all()):
            raise UserError(
                "the features hold final states that are not finite; capture them again"
            )
        self._waiting.append(states_PH)
        self._held += len(states_PH)
        if self._held >= self._rows:
            self._flush()

    def total(self) -> Tensor:
        """Return the mass of every id, float64 [V]; it sums to the number of positions."""
        self._flush()
        return self._total_V

    @torch.no_grad()
    def _flush(self) -> None:
        if not self._held:
            return
        for states_PH in torch.cat(self._waiting).split(self._rows):
            logits_PV = product(states_PH.to(self._head_VH.dtype), self._head_VH)
            self._total_V += logits_PV.softmax(-1).sum(0, dtype=torch.float64)
        self._waiting, self._held = [], 0


def sum_mass(
    features: Sequence[FeatureDirectory], head_VH: Tensor, console: Console, workers: int
) -> NDArray[np.float64]:
    """Sum the teacher's mass over feature directories, float64 [V], with progress.

    Threads, not processes: they share one head, and its products keep the lock free. Pieces do not
    depend on the number of threads, each is summed by one thread and added in order, so the result
    is the same for any number, bit for bit.

    Arguments: `features`; `head_VH` U; `workers` threads.
    Raises UserError as `TeacherMass.add`.
    """
    head_VH = head_VH.to(torch.promote_types(head_VH.dtype, torch.float32))
    pieces = feature_pieces(features, PIECE_ROWS)
    total_V = torch.zeros(len(head_VH), dtype=torch.float64)
    done = 0
    with stage("teacher mass", sum(map(len, features)), console) as progress, _one_thread_each():
        for piece, mass_V in zip(pieces, _in_threads(pieces, head_VH, workers), strict=True):
            total_V += mass_V
            done += piece.samples
            progress.update(done, f"{workers} threads")
    return total_V.numpy()


def _in_threads(pieces: Sequence[FeaturePiece], head_VH: Tensor, workers: int) -> Iterator[Tensor]:
    """Yield the pieces' masses in order; two pieces per thread are under way."""

    def mass_of(piece: FeaturePiece) -> Tensor:
        mass = TeacherMass(head_VH)
        for mask_S, states_SH in read_samples(piece, ("loss_mask", "target_last_hidden_states")):
            mass.add(states_SH, mask_S)
        return mass.total()

    waiting = iter(pieces)
    pool = ThreadPoolExecutor(workers)
    try:
        running: deque[Future[Tensor]] = deque(
            pool.submit(mass_of, piece) for piece in islice(waiting, 2 * workers)
        )
        while running:
            yield running.popleft().result()
            running.extend(pool.submit(mass_of, piece) for piece in islice(waiting, 1))
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread_each() -> Iterator[None]:
    """Products on one thread: how torch cuts one between threads changes its last bits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
