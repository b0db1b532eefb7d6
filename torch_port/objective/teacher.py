"""The frozen teacher's normaliser and argmax over all of V, without a `[…, V]` tensor (§7).

Shape suffixes: B batch, S sequence, P states, R rows of a slice, H hidden size, V target ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_port.objective.products import product
from torch_port.objective.reductions import row_max

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
        largest, total = _take_in(logits, logits.amax(-1), largest, total)
    return (largest + total.log()).view(states.shape[:-1])


def _take_in(
    logits: Tensor, part_top: Tensor, largest: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the running maximum and sum after one more slice, whose logits are overwritten."""
    top = torch.maximum(largest, part_top)
    share = logits.sub_(top.unsqueeze(-1)).exp_().sum(-1)
    return top, total * (largest - top).exp() + share


@torch.no_grad()
def normalizer_and_best(
    states: Tensor, lm_head_VH: Tensor, rows: int = SLICE
) -> tuple[Tensor, Tensor]:
    """Return (logsumexp, argmax) over all V of states·Uᵀ, both streamed in one pass, each […].

    Arguments: `states` […, H]; `lm_head_VH`; `rows` of the head per slice. Ties of the argmax go to
    the lower id.
    """
    rows_PH = states.reshape(-1, states.shape[-1])
    wide = torch.promote_types(states.dtype, torch.float32)
    largest = states.new_full((len(rows_PH),), -torch.inf, dtype=wide)
    total = torch.zeros_like(largest)
    best = torch.zeros_like(largest, dtype=torch.int64)
    for start in range(0, len(lm_head_VH), rows):
        logits = product(rows_PH, lm_head_VH[start : start + rows])
        part_top, part_best = row_max(logits)
        best = torch.where(part_top > largest, part_best + start, best)  # a tie keeps the lower id
        largest, total = _take_in(logits, part_top, largest, total)
    shape = states.shape[:-1]
    return (largest + total.log()).view(shape), best.view(shape)
