"""The frozen teacher's normaliser over all of V, without a `[…, V]` tensor (spec sheet §7).

Shape suffixes: B batch, S sequence, P states, R rows of a slice, H hidden size, V target ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_port.objective.products import product

# Rows of the head per slice: the widest temporary is [B, S, SLICE] instead of [B, S, V].
SLICE = 1024


@torch.no_grad()
def log_normalizer(
    states: Tensor, lm_head_VH: Tensor, rows: int = SLICE, ids: Tensor | None = None
) -> Tensor:
    """Return logsumexp over all V (or over `ids` alone) of states·Uᵀ, streamed over head rows.

    Running maximum m and sum s of exp(ℓ − m), rescaled whenever the maximum moves.

    Arguments: `states` […, H]; `lm_head_VH`; `rows` of the head per slice; `ids`, the target ids to
    sum over, in any order.
    Returns […] in float32 or better, computed in that type from the stored states and head:
    products rounded to bf16 would let the kept mass exceed 1 (§11).
    """
    dtype = torch.promote_types(states.dtype, torch.float32)
    rows_PH = states.reshape(-1, states.shape[-1])
    largest = states.new_full((len(rows_PH),), -torch.inf, dtype=dtype)
    total = torch.zeros_like(largest)
    parts = lm_head_VH.split(rows) if ids is None else ids.split(rows)
    for part in parts:
        part_RH = part if ids is None else lm_head_VH.index_select(0, part)
        logits = product(rows_PH, part_RH)
        top = torch.maximum(largest, logits.amax(-1))
        share = logits.sub_(top.unsqueeze(-1)).exp_().sum(-1)
        total = total * (largest - top).exp() + share
        largest = top
    return (largest + total.log()).view(states.shape[:-1])
