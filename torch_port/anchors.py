"""Anchors: which positions may start a draft block, and the draw (spec sheet §3.1).

Host work in NumPy, done where batches are made; importing it costs no torch.

Shape suffixes: B batch, S sequence.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from torch_port.errors import UserError


def anchor_candidates(loss_mask: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the positions a of one row where a and a+1 are both supervised (§3.1).

    >>> anchor_candidates(np.array([0, 0, 0, 1, 1, 1, 0], dtype=np.float32)).tolist()
    [3, 4]
    """
    supervised = loss_mask > 0.5
    return np.nonzero(supervised[:-1] & supervised[1:])[0]


def draw_anchors(
    loss_mask_BS: NDArray[np.float32], sample_ids: list[int], count: int, seed: int, epoch: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Draw up to `count` distinct anchors per row, uniformly and sorted (§3.1).

    A row's draw is a function of (seed, epoch, sample id) alone, so neither its neighbours in the
    batch nor prefetching nor resuming can change it.

    Arguments: `loss_mask_BS`; `sample_ids`, one per row; `count` N; `seed`; `epoch`.
    Returns (anchor positions int64 [B, N'], keep bool [B, N']), N' = min(N, most candidates of a
    row), at least 1; short rows are padded with anchor 0 and keep False.
    Raises UserError for count < 1.
    """
    if count < 1:
        raise UserError(f"num_anchors is {count}, but a sequence needs at least 1")
    candidates = [anchor_candidates(row) for row in loss_mask_BS]
    width = max(1, min(count, max(len(found) for found in candidates)))
    anchors = np.zeros((len(candidates), width), dtype=np.int64)
    keep = np.zeros((len(candidates), width), dtype=bool)
    for row, (found, sample_id) in enumerate(zip(candidates, sample_ids, strict=True)):
        taken = min(width, len(found))
        random = np.random.default_rng([seed, epoch, sample_id])
        anchors[row, :taken] = np.sort(random.choice(found, taken, replace=False))
        keep[row, :taken] = True
    return anchors, keep


def is_trainable(loss_mask: NDArray[np.float32]) -> bool:
    """Return whether a sample has an anchor candidate: two adjacent supervised positions.

    >>> is_trainable(np.array([0, 1, 0, 1])), is_trainable(np.array([0, 1, 1, 0]))
    (False, True)
    """
    return anchor_candidates(loss_mask).size > 0
