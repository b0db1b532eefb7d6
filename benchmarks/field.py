"""The baseline: the published formulation of the training step, frozen.

Written once and never tuned, so that a ratio against it means the same in every version. It
imports torch alone and shares no line with the port; a test holds its loss and gradients equal to
the port's plain ones. What it does, as published:

- objective: 16 blocks per chunk under activation checkpointing; the teacher's K logits at every
  (anchor, slot), and when the draft prunes the logsumexp over all of V there too, in one product;
- attention: SDPA with one dense bool mask [B, 1, N·γ, S + N·γ]; k and v repeated for grouped
  queries, as transformers' SDPA path does when a mask is given;
- backbone: eager layers, projections over [context ; own], the mask built once per step.

It computes the loss and no metric, which makes it a little cheaper than a published step. Full
attention, vanilla Markov head and a confidence head on [h; e] only. Masks end a block at its first
unsupervised label; dropped blocks see their own keys and weigh 0.

Shape suffixes: B batch, S sequence, N blocks, G slots, Q = N·G, H hidden, V target ids,
K draft ids, A heads, R kv heads, D head dimension, M blocks of one chunk.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

CHUNK = 16  # blocks
Weights = Mapping[str, Tensor]  # parameters under the field's names


@dataclass(frozen=True)
class Layout:
    """The index tensors of a batch's blocks, [B, N, G]."""

    position: Tensor
    input_ids: Tensor
    label: Tensor  # draft id, 0 where the label is pruned
    kept: Tensor  # bool: the label has a draft id
    previous: Tensor  # target id before the slot
    teacher_position: Tensor
    evaluated: Tensor  # bool


@dataclass(frozen=True)
class Coefficients:
    """The weights of the three terms, and the decay along the block (None: no decay)."""

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    decay: float | None = 4.0


def lay_out(
    input_ids_BS: Tensor,
    loss_mask_BS: Tensor,
    anchors_BN: Tensor,
    keep_BN: Tensor,
    block_size: int,
    mask_token_id: int,
    draft_index_V: Tensor,
) -> Layout:
    """Lay out blocks anchor-first: slot k stands at a + k and predicts x[a + 1 + k]."""
    B, S = input_ids_BS.shape
    row = torch.arange(B)[:, None, None]
    position = anchors_BN[..., None] + torch.arange(block_size)
    label_at = position + 1
    safe = label_at.clamp(max=S - 1) * keep_BN[..., None]
    valid = (label_at < S) & (loss_mask_BS[row, safe] > 0.5) & keep_BN[..., None]
    label = input_ids_BS[row, safe]
    first = input_ids_BS.gather(1, anchors_BN)
    input_ids = torch.full_like(position, mask_token_id)
    input_ids[..., 0] = torch.where(keep_BN, first, mask_token_id)
    draft_label = draft_index_V[label]
    return Layout(
        position=position,
        input_ids=input_ids,
        label=draft_label.clamp(min=0),
        kept=draft_label >= 0,
        previous=torch.cat([first[..., None], label[..., :-1]], dim=-1),
        teacher_position=(safe - 1).clamp(min=0),
        evaluated=valid.long().cumprod(-1).bool(),
    )


def dense_mask(anchors_BN: Tensor, keep_BN: Tensor, sequence: int, block_size: int) -> Tensor:
    """Return bool [B, 1, Q, S + Q], True = visible: context before the anchor, own block."""
    N = anchors_BN.shape[1]
    before = torch.arange(sequence) < anchors_BN[..., None]
    context = (before & keep_BN[..., None]).repeat_interleave(block_size, dim=1)
    block = torch.arange(N).repeat_interleave(block_size)
    own = (block[:, None] == block[None, :]).expand(len(anchors_BN), -1, -1)
    return torch.cat([context, own], dim=-1)[:, None]


def attention(q_BAQD: Tensor, k_BRKD: Tensor, v_BRKD: Tensor, mask: Tensor) -> Tensor:
    """Attend under one dense mask; returns [B, A, Q, D]."""
    groups = q_BAQD.shape[1] // k_BRKD.shape[1]
    k = k_BRKD.repeat_interleave(groups, dim=1)
    v = v_BRKD.repeat_interleave(groups, dim=1)
    return F.scaled_dot_product_attention(q_BAQD, k, v, attn_mask=mask)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x · rsqrt(mean(x²) + eps) · weight."""
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rotary(position_BK: Tensor, head_dim: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return (cos, sin), each [B, 1, K, D], half-split."""
    rate = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angle = (position_BK[..., None] * rate).repeat(1, 1, 2)[:, None]
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x_i, x_{i + D/2})."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], dim=-1) * sin


def backbone(
    weights: Weights,
    layout: Layout,
    embed_tokens_VH: Tensor,
    captured_BSF: Tensor,
    mask: Tensor,
    *,
    layers: int,
    head_dim: int,
    eps: float,
    theta: float,
) -> Tensor:
    """Return the final hidden states [B, N, G, H] of every slot."""
    B, S = captured_BSF.shape[:2]
    position_BQ = layout.position.flatten(1)
    everywhere = torch.cat([torch.arange(S).expand(B, -1), position_BQ], dim=1)
    q_rotary = rotary(position_BQ, head_dim, theta, captured_BSF)
    k_rotary = rotary(everywhere, head_dim, theta, captured_BSF)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)

    context = rms_norm(captured_BSF @ weights["fc.weight"].T, weights["hidden_norm.weight"], eps)
    y = embed_tokens_VH[layout.input_ids].flatten(1, 2)
    for layer in range(layers):
        own = {
            name.removeprefix(f"layers.{layer}.").removesuffix(".weight"): tensor
            for name, tensor in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        u = rms_norm(y, own["input_layernorm"], eps)
        source = torch.cat([context, u], dim=1)
        q = rms_norm(heads(u @ own["self_attn.q_proj"].T), own["self_attn.q_norm"], eps)
        k = rms_norm(heads(source @ own["self_attn.k_proj"].T), own["self_attn.k_norm"], eps)
        v = heads(source @ own["self_attn.v_proj"].T)
        out = attention(rotate(q, *q_rotary), rotate(k, *k_rotary), v, mask)
        y = y + out.transpose(1, 2).flatten(2) @ own["self_attn.o_proj"].T
        u = rms_norm(y, own["post_attention_layernorm"], eps)
        inner = F.silu(u @ own["mlp.gate_proj"].T) * (u @ own["mlp.up_proj"].T)
        y = y + inner @ own["mlp.down_proj"].T
    return rms_norm(y, weights["norm.weight"], eps).view(*layout.position.shape, -1)


def objective(
    weights: Weights,
    hidden_BNGH: Tensor,
    layout: Layout,
    states_BSH: Tensor,
    draft_head_KH: Tensor,
    lm_head_VH: Tensor,
    coefficients: Coefficients,
) -> Tensor:
    """Return the loss of a batch, `CHUNK` blocks at a time; it prunes when K < V."""
    B, _, G, _ = hidden_BNGH.shape
    prunes = len(draft_head_KH) < len(lm_head_VH)
    weight_BNG = layout.evaluated.to(hidden_BNGH.dtype)
    if coefficients.decay is not None:
        slot_G = torch.arange(G, dtype=weight_BNG.dtype)
        weight_BNG = weight_BNG * torch.exp(-slot_G / coefficients.decay)
    states_BNGH = states_BSH[torch.arange(B)[:, None, None], layout.teacher_position]
    per_block = [
        tensor.flatten(0, 1)
        for tensor in (
            hidden_BNGH,
            states_BNGH,
            layout.previous,
            layout.label,
            layout.kept,
            weight_BNG,
        )
    ]
    sums = hidden_BNGH.new_zeros(3)
    for chunk in zip(*(tensor.split(CHUNK) for tensor in per_block), strict=True):
        sums = sums + checkpoint(
            _chunk_sums, weights, draft_head_KH, lm_head_VH, *chunk, use_reentrant=False
        )
    c, den = coefficients, weight_BNG.sum()
    if not prunes:
        return (c.ce * sums[0] + c.l1 * sums[1] + c.confidence * sums[2]) / den
    ce_den = (weight_BNG * layout.kept).sum()
    return c.ce * sums[0] / ce_den + (c.l1 * sums[1] + c.confidence * sums[2]) / den


def _chunk_sums(
    weights: Weights,
    draft_head_KH: Tensor,
    lm_head_VH: Tensor,
    hidden_MGH: Tensor,
    states_MGH: Tensor,
    previous_MG: Tensor,
    label_MG: Tensor,
    kept_MG: Tensor,
    weight_MG: Tensor,
) -> Tensor:
    """Return one chunk's [Σ w·ce, Σ w·l1, Σ w·confidence]."""
    e = F.embedding(previous_MG, weights["markov_head.markov_w1.weight"])
    logits = hidden_MGH @ draft_head_KH.T + e @ weights["markov_head.markov_w2.weight"].T
    prunes = len(draft_head_KH) < len(lm_head_VH)
    with torch.no_grad():
        teacher = states_MGH @ draft_head_KH.T
        conditional = teacher.softmax(-1)
        if prunes:
            normalizer = (states_MGH @ lm_head_VH.T).logsumexp(-1, keepdim=True)
            true = (teacher - normalizer).exp()
    ce = F.cross_entropy(logits.flatten(0, 1), label_MG.flatten(), reduction="none")
    q = logits.softmax(-1)
    l1 = (q - conditional).abs().sum(-1)
    with torch.no_grad():
        overlap = torch.minimum(q, true).sum(-1) if prunes else 1 - 0.5 * l1
        accept = overlap.clamp(0, 1)
    confidence = F.linear(
        torch.cat([hidden_MGH, e], dim=-1),
        weights["confidence_head.proj.weight"],
        weights["confidence_head.proj.bias"],
    ).squeeze(-1)
    bce = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
    return torch.stack(
        [
            (weight_MG * kept_MG * ce.view_as(weight_MG)).sum(),
            (weight_MG * l1).sum(),
            (weight_MG * bce).sum(),
        ]
    )
