"""EAGLE3's attention over several training-time-test steps (spec sheet §13).

Step i's query at index t sees step 0's keys at indices ≤ t and, from each later step j ≤ i, the key
at index t alone. As one mask that would be [S, n·S], nearly empty beyond its first S columns. Here
each query has one score per later step beside its causal scores, under one softmax, and queries
pass a few at a time, so that scores of one chunk exist at once.

Shape suffixes: B batch, S sequence, A query heads, R kv heads, E = A/R query heads of one kv head,
Q queries of a chunk, M = E·Q rows of one product, K keys a chunk can see, D head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

QUERIES = 256  # of a chunk: its scores are [B, A, QUERIES, ≤ S + n]

KeysValues = tuple[Tensor, Tensor]  # of one step, each [B, R, S, D]


def training_time_attention(
    q_BASD: Tensor, steps: Sequence[KeysValues], queries: int = QUERIES
) -> Tensor:
    """Attend with scale D^−½; query head a reads kv head ⌊a·R/A⌋ (§5).

    Arguments: the current step's queries; keys and values of steps 0 … i, rotated; `queries` of a
    chunk, which moves no number.
    Returns [B, A, S, D]. Scores and softmax are float32 or better. The backward pass computes each
    chunk's scores again.
    """
    S = q_BASD.shape[2]
    parts = [
        checkpoint(
            _chunk,
            q_BASD[:, :, start : start + queries],
            steps,
            start,
            use_reentrant=False,
            preserve_rng_state=False,  # nothing here draws
        )
        for start in range(0, S, queries)
    ]
    return torch.cat(parts, dim=2)


def _chunk(q_BAQD: Tensor, steps: Sequence[KeysValues], start: int) -> Tensor:
    A, Q, D = q_BAQD.shape[1:]
    stop = start + Q
    wide = torch.promote_types(q_BAQD.dtype, torch.float32)
    first_k, first_v = (x[:, :, :stop].to(wide) for x in steps[0])
    later = [
        tuple(x[:, :, None, start:stop].to(wide) for x in keys_values) for keys_values in steps[1:]
    ]
    R = first_k.shape[1]
    q_BREQD = (q_BAQD.to(wide) * D**-0.5).unflatten(1, (R, A // R))
    causal_BREQK = (q_BREQD.flatten(2, 3) @ first_k.mT).unflatten(2, (A // R, Q))
    query_Q1 = torch.arange(start, stop, device=q_BAQD.device).unsqueeze(1)
    hidden_QK = torch.arange(stop, device=q_BAQD.device) > query_Q1
    causal_BREQK = causal_BREQK.masked_fill(hidden_QK, -torch.inf)
    same_index = [(q_BREQD * k).sum(-1, keepdim=True) for k, _ in later]
    weights = torch.cat([causal_BREQK, *same_index], dim=-1).softmax(-1)
    out_BRMD = weights[..., :stop].flatten(2, 3) @ first_v
    out_BREQD = out_BRMD.unflatten(2, (A // R, Q))
    for step, (_, v) in enumerate(later):
        out_BREQD = out_BREQD + weights[..., stop + step : stop + step + 1] * v
    return out_BREQD.flatten(1, 2).to(q_BAQD.dtype)
