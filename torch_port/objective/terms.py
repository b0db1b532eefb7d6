"""Per-slot terms of the objective, plain form: the reference (spec sheet §7, §8).

Logits are made for a few blocks at a time under activation checkpointing, so K-wide tensors of one
chunk exist at once, and no `[…, V]` tensor in a pruned run. Nothing here is masked by boolean
indexing: values at slots that do not count are replaced *before* they enter an operation, because a
weight of 0 does not stop a NaN's gradient.

Shape suffixes: B batch, S sequence, N blocks, G slots, M blocks of one chunk, K draft ids,
H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from torch_port.blocks import Blocks
from torch_port.config import ObjectiveConfig
from torch_port.models.block_draft import BlockDraft, FrozenTarget
from torch_port.models.heads import wide
from torch_port.objective.products import product
from torch_port.objective.teacher import log_normalizer

CHUNK = 16  # blocks per chunk, as published


@dataclass(frozen=True)
class SlotTerms:
    """What the objective and the metrics need of every slot, all [B, N, G]; 0 where not evaluated.

    `ce`, `l1` and `confidence_loss` carry gradient.
    """

    ce: Tensor  # −log q[index[label]], 0 where the label is pruned
    l1: Tensor  # Σ|q − p̃|
    accept: Tensor  # α
    confidence_loss: Tensor  # BCE with logits against α
    confidence_error: Tensor  # |σ(c) − α|
    confidence_probability: Tensor  # σ(c)
    kept_mass: Tensor  # Σ p over kept ids
    correct: Tensor  # 1[argmax z = index[label]]
    agrees: Tensor  # 1[argmax z = argmax ℓ_kept]
    teacher_top: Tensor  # max p
    draft_top: Tensor  # max q


@dataclass(frozen=True)
class _Chunk:
    """One chunk's inputs, [M, G] or [M, G, H]."""

    hidden: Tensor
    teacher_state: Tensor
    teacher_normalizer: Tensor
    previous: Tensor
    label_draft_id: Tensor
    label_is_kept: Tensor
    evaluated: Tensor


def slot_terms(
    draft: BlockDraft,
    hidden_BNGH: Tensor,
    blocks: Blocks,
    target: FrozenTarget,
    teacher_states_BSH: Tensor,
    normalizer_BS: Tensor | None,
    objective: ObjectiveConfig,
    chunk: int = CHUNK,
) -> SlotTerms:
    """Compute every slot's terms, `chunk` blocks at a time.

    Arguments: the draft and its hidden states; the blocks; the frozen target; T [B, S, H] after the
    final norm; `normalizer_BS`, the stored log normaliser, or None to stream it here (pruned runs
    only: an unpruned one needs no normaliser beyond its own K = V logits).
    Returns a `SlotTerms` of [B, N, G] tensors.
    """
    B, N, G, H = hidden_BNGH.shape
    head_KH, teacher_KH = draft.output_head(target.lm_head), draft.draft_head(target.lm_head)
    if not draft.prunes_vocabulary:
        normalizer_BS = teacher_states_BSH.new_zeros(B, teacher_states_BSH.shape[1])  # not read
    elif normalizer_BS is None:
        normalizer_BS = log_normalizer(teacher_states_BSH, target.lm_head)
    position_BNG = blocks.teacher_position
    row_B11 = torch.arange(B, device=position_BNG.device).view(B, 1, 1)
    flat_MG = (position_BNG + row_B11 * teacher_states_BSH.shape[1]).flatten(0, 1)
    evaluated_MG = blocks.evaluated.flatten(0, 1)
    parts: list[tuple[Tensor, ...]] = []
    for start in range(0, B * N, chunk):
        rows = slice(start, start + chunk)
        at = flat_MG[rows]
        state = teacher_states_BSH.flatten(0, 1).index_select(0, at.flatten()).view(*at.shape, H)
        inputs = _Chunk(
            hidden=hidden_BNGH.flatten(0, 1)[rows],
            teacher_state=state,
            teacher_normalizer=normalizer_BS.flatten().index_select(0, at.flatten()).view(at.shape),
            previous=blocks.previous.flatten(0, 1)[rows],
            label_draft_id=blocks.label_draft_id.flatten(0, 1)[rows],
            label_is_kept=blocks.label_is_kept.flatten(0, 1)[rows],
            evaluated=evaluated_MG[rows],
        )
        parts.append(
            checkpoint(
                _chunk_terms,
                draft,
                inputs,
                head_KH,
                teacher_KH,
                objective,
                use_reentrant=False,
                preserve_rng_state=False,  # nothing in a chunk draws
            )
        )
    whole = [torch.cat(pieces).view(B, N, G) for pieces in zip(*parts, strict=True)]
    return SlotTerms(*whole)


def _chunk_terms(
    draft: BlockDraft,
    chunk: _Chunk,
    head_KH: Tensor,
    teacher_KH: Tensor,
    objective: ObjectiveConfig,
) -> tuple[Tensor, ...]:
    M = chunk.evaluated
    e = draft.embed_previous(chunk.previous)
    # The states as well as the logits: what is not finite there would reach the gradients of the
    # heads' own weights, in a product with 0.
    hidden = _where_evaluated(M, chunk.hidden)
    logits = _where_evaluated(M, draft.logits(hidden, e, head_KH))
    confidence = draft.confidence(hidden, e, objective.detach_confidence)
    with torch.no_grad():
        # Never rounded to bf16: it would not fit its float32 normaliser, and the kept mass came out
        # up to 1.28.
        teacher = product(chunk.teacher_state.flatten(0, 1), teacher_KH)
        teacher = _where_evaluated(M, teacher.view(*M.shape, -1))
        conditional = teacher.softmax(-1)
        if draft.prunes_vocabulary:
            true = (teacher - _where_evaluated(M, chunk.teacher_normalizer).unsqueeze(-1)).exp()
        else:
            true = conditional
    q = logits.softmax(-1)
    chosen = logits.gather(-1, chunk.label_draft_id.unsqueeze(-1)).squeeze(-1)
    counts = M & chunk.label_is_kept
    ce = torch.where(counts, logits.logsumexp(-1) - chosen, 0)
    l1 = torch.where(M, (q - conditional).abs().sum(-1), 0)
    with torch.no_grad():
        overlap = torch.minimum(q, true).sum(-1) if draft.prunes_vocabulary else 1 - 0.5 * l1
        accept = overlap.clamp(0, 1)
    best = logits.argmax(-1)
    zero = torch.zeros_like(l1)
    if confidence is None:
        confidence_loss, probability, error = zero, zero, zero
    else:
        confidence = _where_evaluated(M, wide(confidence))
        confidence_loss = F.binary_cross_entropy_with_logits(confidence, accept, reduction="none")
        probability = confidence.detach().sigmoid()
        error = (probability - accept).abs()
    values = SlotTerms(
        ce=ce,
        l1=l1,
        accept=accept,
        confidence_loss=confidence_loss,
        confidence_error=error,
        confidence_probability=probability,
        kept_mass=true.sum(-1),
        correct=((best == chunk.label_draft_id) & chunk.label_is_kept).to(l1.dtype),
        agrees=(best == teacher.argmax(-1)).to(l1.dtype),
        teacher_top=true.amax(-1),
        draft_top=q.detach().amax(-1),
    )
    return tuple(torch.where(M, getattr(values, f.name), 0) for f in fields(values))


def _where_evaluated(evaluated: Tensor, values: Tensor) -> Tensor:
    """Replace slots that do not count by 0, before they enter an operation (field-note 9)."""
    mask = evaluated if values.dim() == evaluated.dim() else evaluated.unsqueeze(-1)
    return torch.where(mask, values, 0)
