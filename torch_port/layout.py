"""What the host knows of a batch's blocks before the step: which slots count, and in which order.

The fused objective and the blockwise attention walk slots and blocks in the order of the sequence.
That order depends on anchors and masks alone, so it is found here, on the host, where batches are
made: boolean indexing on the device gives data-dependent shapes, and each costs a sync.

Shape suffixes: B batch, S sequence, N blocks, G slots, M evaluated slots, P covered positions,
X kept blocks of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torch_port.blocks import evaluation_mask, label_offset
from torch_port.config import ANCHOR_FIRST, BlockLayout


@dataclass(frozen=True)
class Layout:
    """The evaluated slots of a batch sorted by teacher position, and its blocks sorted by anchor.

    A position t of row b is written b·S + t; slot k of block n is (b·N + n)·G + k. A slot's teacher
    state and its previous token both stand before its label, at a + k (bonus-anchor: a + k − 1), so
    what depends on the position alone is computed once for all slots that share it.
    """

    block_size: int
    slots_M: Tensor  # evaluated slots, ascending by position
    place_M: Tensor  # where a slot's position stands in positions_P
    positions_P: Tensor  # covered positions, ascending
    first_P: tuple[int, ...]  # host: first entry of slots_M at each position, and M at the end
    visits: tuple[tuple[tuple[int, int], ...], ...]  # host: per row, kept (anchor, block) ascending
    visit_anchors_X: Tensor  # the anchors of `visits`, all rows one after another
    visit_queries_XG: Tensor  # the slots of those blocks, counted within their row
    block_layout: BlockLayout = ANCHOR_FIRST

    def row(self, row: int) -> tuple[tuple[tuple[int, int], ...], Tensor]:
        """Return a row's (visits; slots of their blocks [X, G])."""
        start = sum(len(visits) for visits in self.visits[:row])
        visits = self.visits[row]
        return visits, self.visit_queries_XG[start : start + len(visits)]

    def to(self, device: torch.device) -> Layout:
        """Move the index tensors to a device; the host's part stays."""
        return Layout(
            self.block_size,
            self.slots_M.to(device),
            self.place_M.to(device),
            self.positions_P.to(device),
            self.first_P,
            self.visits,
            self.visit_anchors_X.to(device),
            self.visit_queries_XG.to(device),
            self.block_layout,
        )


def lay_out(
    loss_mask_BS: Tensor,
    anchors_BN: Tensor,
    keep_BN: Tensor,
    block_size: int,
    block_layout: BlockLayout = ANCHOR_FIRST,
) -> Layout:
    """Find a batch's layout from its loss mask, anchors and keep mask.

    Meant for host tensors, in the loader; tensors on a device are copied, which costs a sync.
    Returns a `Layout` on the host.
    """
    mask, anchors, keep = loss_mask_BS.cpu(), anchors_BN.cpu(), keep_BN.cpu()
    evaluated = evaluation_mask(mask, anchors, keep, block_size, block_layout).numpy()
    B, S = mask.shape
    row_B11 = np.arange(B)[:, None, None]
    before_label = np.arange(block_size) + label_offset(block_layout) - 1
    position_BNG = row_B11 * S + anchors.numpy()[:, :, None] + before_label
    slots = np.flatnonzero(evaluated)
    position_M = position_BNG.reshape(-1)[slots]
    order = np.argsort(position_M, kind="stable")
    positions, place, counts = np.unique(position_M[order], return_inverse=True, return_counts=True)
    visits = tuple(
        tuple(sorted((int(anchors[b, n]), int(n)) for n in np.flatnonzero(keep[b].numpy())))
        for b in range(B)
    )
    flat = np.array([pair for row in visits for pair in row], dtype=np.int64).reshape(-1, 2)
    return Layout(
        block_size,
        slots_M=torch.from_numpy(slots[order]),
        place_M=torch.from_numpy(place.reshape(-1)),
        positions_P=torch.from_numpy(positions),
        first_P=(0, *np.cumsum(counts).tolist()),
        visits=visits,
        visit_anchors_X=torch.from_numpy(flat[:, 0].copy()),
        visit_queries_XG=torch.from_numpy(flat[:, 1:] * block_size + np.arange(block_size)),
        block_layout=block_layout,
    )
