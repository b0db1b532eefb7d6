"""The teacher's summed probability of every target id: counts that ask the target (spec sheet §7).

Shape suffixes: S tokens of a sample, P positions, V target ids, H hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_port.errors import UserError
from torch_port.objective.products import product

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
