"""Draft attention over [context ; own block], dense form (spec sheet §4).

Shape suffixes: B batch, S sequence, N blocks, G slots, Q = N·G queries, A query heads, R kv heads,
D head dimension.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F


def dense_mask(
    anchors_BN: Tensor, keep_BN: Tensor, sequence: int, block_size: int, window: int | None
) -> Tensor:
    """Return what each query may see, bool [B, 1, Q, S + Q], True = visible.

    Query (block n, slot j) sees context s < a_n and the keys of its own block. With a sliding
    `window` ω it sees context s ≥ a_n + j − (ω − 1) and own slots ≤ j; ω does not cut inside the
    block. A dropped block's queries see their own block here, so that no softmax row is empty;
    `draft_attention` sets their output to 0.
    """
    B, N = anchors_BN.shape
    device = anchors_BN.device
    slot_G = torch.arange(block_size, device=device)
    context_S = torch.arange(sequence, device=device)
    anchor_BN11 = anchors_BN[:, :, None, None]
    sees_context = (context_S < anchor_BN11) & keep_BN[:, :, None, None]
    sees_context = sees_context.expand(B, N, block_size, sequence)
    own_GG = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    if window is not None:
        first_seen_BNG1 = anchor_BN11 + slot_G[:, None] - (window - 1)
        sees_context = sees_context & (context_S >= first_seen_BNG1)
        own_GG = own_GG.tril()
    same_block_NN = torch.eye(N, dtype=torch.bool, device=device)
    sees_own = (same_block_NN[:, None, :, None] & own_GG[None, :, None, :]).reshape(
        N * block_size, N * block_size
    )
    context = sees_context.reshape(B, N * block_size, sequence)
    return torch.cat([context, sees_own.expand(B, -1, -1)], dim=-1).unsqueeze(1)


def draft_attention(
    q_BAQD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, mask_B1QK: Tensor, keep_BQ: Tensor
) -> Tensor:
    """Attend with scale D^−½; query head i reads kv head ⌊i·R/A⌋ (§5).

    Returns [B, A, Q, D]; exactly 0 where `keep_BQ` is False.
    """
    out_BAQD = F.scaled_dot_product_attention(
        q_BAQD, k_BRKD, v_BRKD, attn_mask=mask_B1QK, enable_gqa=True
    )
    return torch.where(keep_BQ[:, None, :, None], out_BAQD, 0)


def table_length(positions: int) -> int:
    """Return the length of the tables that serve so many positions: the next power of two.

    Batches differ in length. A table for each length would be made on the host and copied to the
    device, which makes the device wait, in nearly every step.

    >>> [table_length(n) for n in (1, 5, 4096, 4112)]
    [1, 8, 4096, 8192]
    """
    return 1 << (positions - 1).bit_length()


@lru_cache(maxsize=16)
def rotary_tables(
    length: int, head_dim: int, theta: float, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each [length, D], half-split layout.

    Angles are computed on the host in float64 and rounded once to `dtype`: float32 angles at
    position 4096 are off by 1e-4, and no float64 may reach the device.
    """
    with torch.inference_mode(False):  # kept beyond the call: training may need them next
        position = torch.arange(length, dtype=torch.float64)
        rate = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angle = torch.outer(position, rate).repeat(1, 2)
        return angle.cos().to(dtype).to(device), angle.sin().to(dtype).to(device)
