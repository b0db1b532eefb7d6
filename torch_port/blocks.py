"""Labels, masks and weights of a batch's draft blocks (spec sheet §3, §12), in both layouts.

Shape suffixes: B batch, S sequence, N blocks (anchors), G slots of a block (γ).
Index arithmetic on the device, without boolean indexing and without a sync; anchors are drawn on
the host (`torch_port/anchors.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from torch_port.config import ANCHOR_FIRST, BONUS_ANCHOR, BlockLayout


@dataclass(frozen=True)
class Blocks:
    """The index tensors of a batch's blocks, all [B, N, G]."""

    position: Tensor  # rotary position a + k of slot k
    input_ids: Tensor  # x[a], then mask tokens
    label: Tensor  # target id x[a+1+k] or x[a+k]; a harmless id where `evaluated` is False
    label_is_kept: Tensor  # bool: the label has a draft id
    label_draft_id: Tensor  # the label's draft id; 0 where it was pruned
    previous: Tensor  # target id before slot k's label; of slot 0 x[a]
    teacher_position: Tensor  # where in the sequence the teacher of slot k stands
    evaluated: Tensor  # bool, the evaluation mask M


def make_blocks(
    input_ids_BS: Tensor,
    loss_mask_BS: Tensor,
    anchors_BN: Tensor,
    keep_BN: Tensor,
    *,
    block_size: int,
    mask_token_id: int,
    draft_index_V: Tensor,
    block_layout: BlockLayout = ANCHOR_FIRST,
) -> Blocks:
    """Lay out the blocks of a batch (§3.2 to §3.5).

    Arguments: the batch's ids, loss mask, anchors and keep mask; γ; the mask token; the draft id
    of each target id (−100 where pruned); where the slots predict.
    Returns a `Blocks`. Ids at positions that do not count may be anything, −1 or V included
    (padding conventions differ): they are clamped into [0, V) before they index a table.
    """
    B, S = input_ids_BS.shape
    V = draft_index_V.shape[0]
    slot_G = torch.arange(block_size, device=anchors_BN.device)
    keep_BN1 = keep_BN.unsqueeze(-1)
    position_BNG = anchors_BN.unsqueeze(-1) + slot_G
    safe_BNG = torch.where(
        keep_BN1, (position_BNG + label_offset(block_layout)).clamp(max=S - 1), 0
    )
    legal_BS = input_ids_BS.clamp(0, V - 1)

    def at(values_BS: Tensor, index: Tensor) -> Tensor:
        return values_BS.gather(1, index.reshape(B, -1)).view(index.shape)

    label_BNG = at(legal_BS, safe_BNG)
    first_BN1 = at(legal_BS, anchors_BN).unsqueeze(-1)
    draft_id_BNG = draft_index_V.index_select(0, label_BNG.flatten()).view(label_BNG.shape)
    masks = torch.full_like(position_BNG, mask_token_id)
    return Blocks(
        position=position_BNG,
        input_ids=torch.where(keep_BN1 & (slot_G == 0), first_BN1, masks),
        label=label_BNG,
        label_is_kept=draft_id_BNG >= 0,
        label_draft_id=draft_id_BNG.clamp(min=0),
        previous=torch.cat([first_BN1, label_BNG[..., :-1]], dim=-1),
        teacher_position=(safe_BNG - 1).clamp(min=0),
        evaluated=evaluation_mask(loss_mask_BS, anchors_BN, keep_BN, block_size, block_layout),
    )


def label_offset(block_layout: BlockLayout) -> int:
    """Return how far slot 0's label stands after the anchor: 1 anchor-first, 0 bonus-anchor."""
    return 0 if block_layout == BONUS_ANCHOR else 1


def evaluation_mask(
    loss_mask_BS: Tensor,
    anchors_BN: Tensor,
    keep_BN: Tensor,
    block_size: int,
    block_layout: BlockLayout = ANCHOR_FIRST,
) -> Tensor:
    """Return M, bool [B, N, G]: label in range, supervised, block kept.

    Anchor-first: then the prefix product, one unsupervised label ends the block (§3.3).
    Bonus-anchor: each label stands for itself, and slot 0, the anchor, for none (§12).
    """
    S = loss_mask_BS.shape[1]
    slot_G = torch.arange(block_size, device=anchors_BN.device)
    label_at_BNG = anchors_BN.unsqueeze(-1) + label_offset(block_layout) + slot_G
    safe_BNG = label_at_BNG.clamp(max=S - 1)
    mask_BNG = loss_mask_BS.gather(1, safe_BNG.flatten(1)).view(safe_BNG.shape)
    valid_BNG = (label_at_BNG < S) & (mask_BNG > 0.5) & keep_BN.unsqueeze(-1)
    if block_layout == BONUS_ANCHOR:
        return valid_BNG & (slot_G > 0)
    return valid_BNG.to(torch.int32).cumprod(-1) > 0


def slot_weights(
    evaluated_BNG: Tensor, decay: float | None, dtype: torch.dtype, first_slot: int = 0
) -> Tensor:
    """Return w = M · exp(−max(k − first, 0)/decay); no decay when `decay` is None.

    `first_slot` is the first one that predicts: 0 anchor-first (§3.6, paper §3.3), 1 bonus-anchor.
    The exponentials are computed on the host in float64 and rounded once, so that no float64
    reaches the device.
    """
    weights = evaluated_BNG.to(dtype)
    if decay is None:
        return weights
    G = evaluated_BNG.shape[-1]
    return weights * decay_weights(G, first_slot, decay, dtype, weights.device)


@lru_cache(maxsize=16)
def decay_weights(
    block_size: int, first_slot: int, decay: float, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Return exp(−max(k − first, 0)/decay) of every slot, [G].

    Kept beyond the call: a copy from the host makes the device wait, in every step.
    """
    with torch.inference_mode(False):  # training may need them next
        later = np.maximum(np.arange(block_size) - first_slot, 0)
        slots = np.exp(-later / decay)
        return torch.tensor(slots.tolist(), dtype=dtype, device=device)
