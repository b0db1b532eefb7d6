"""A batch's terms and loss by the fused objective (spec sheet §7, §8; `fused.py` does the work).

Shape suffixes: B batch, S sequence, N blocks, G slots, T = B·N·G, M evaluated slots, P covered
positions, H hidden size, r Markov rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from torch_port.blocks import Blocks, slot_weights
from torch_port.config import ObjectiveConfig
from torch_port.data.batch import Batch
from torch_port.layout import Layout
from torch_port.models.block_draft import BlockDraft, FrozenTarget
from torch_port.models.dspark import DSparkDraft
from torch_port.models.heads import lookup
from torch_port.objective.fused import Code, Slots, SlotValues, Teacher, fused_terms
from torch_port.objective.loss import Denominators
from torch_port.objective.teacher import log_normalizer
from torch_port.objective.terms import SlotTerms

# The streamed normaliser's slice: wide enough for the product, small enough to stay in the cache.
_NORMALIZER_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class _Factors:
    """What ce_num, l1_num and conf_num are multiplied by in the loss; tensors of no dimension."""

    ce: Tensor
    l1: Tensor
    confidence: Tensor


def fused_objective(
    draft: DSparkDraft,
    hidden_BNGH: Tensor,
    blocks: Blocks,
    batch: Batch,
    target: FrozenTarget,
    objective: ObjectiveConfig,
    denominators: Denominators | None,
    ranks: int,
) -> tuple[SlotTerms, Tensor | None]:
    """Return (every slot's terms, without gradient; the loss, with it).

    Without `denominators` there is no loss and no gradient.
    Raises UserError when the batch was laid out for another block size.
    """
    layout = batch.with_layout(blocks.label.shape[-1], draft.block_layout).layout
    assert layout is not None
    slots_M, wide = layout.slots_M, torch.promote_types(hidden_BNGH.dtype, torch.float32)
    factors = _factors(objective, denominators, draft.prunes_vocabulary, ranks, slots_M, wide)
    weight_M = pick(slot_weights(blocks.evaluated, objective.loss_decay_gamma, wide), slots_M)
    kept_M = pick(blocks.label_is_kept, slots_M)
    code, e_M = _markov(draft, hidden_BNGH, blocks, layout)
    gradients = torch.is_grad_enabled() and denominators is not None
    with torch.set_grad_enabled(gradients):
        loss, values = fused_terms(
            hidden_BNGH.flatten(0, 2),
            code,
            None if draft.markov_head is None else draft.markov_head.markov_w2.weight,
            draft.output_head(target.lm_head),
            covered_teacher(draft, batch, target, layout),
            Slots(
                label_M=pick(blocks.label_draft_id, slots_M),
                kept_M=kept_M,
                ce_factor_M=factors.ce * weight_M * kept_M,
                l1_factor_M=factors.l1 * weight_M,
            ),
            layout,
            int(draft.compute.objective_buffer_mib * 2**20),
        )
        hidden_MH = hidden_BNGH.flatten(0, 2).index_select(0, slots_M)
        logit_M = draft.confidence(hidden_MH, e_M, objective.detach_confidence)
        if logit_M is not None:
            logit_M = logit_M.to(wide)
            bce_M = F.binary_cross_entropy_with_logits(logit_M, values.accept, reduction="none")
            loss = loss + factors.confidence * (weight_M * bce_M).sum()
            probability_M = logit_M.detach().sigmoid()
            error_M = (probability_M - values.accept).abs()
            confidence = bce_M.detach(), error_M, probability_M
        else:
            confidence = (torch.zeros_like(values.l1),) * 3
    terms = to_places(values, confidence, layout, blocks)
    return terms, loss if denominators is not None else None


def _factors(
    objective: ObjectiveConfig,
    denominators: Denominators | None,
    prunes: bool,
    ranks: int,
    like: Tensor,
    dtype: torch.dtype,
) -> _Factors:
    if denominators is None:
        one = torch.ones((), dtype=dtype, device=like.device)
        return _Factors(one, one, one)
    share = ranks / denominators.den.to(dtype)
    ce_share = ranks / denominators.ce_den.to(dtype) if prunes else share
    # With α_ce = 0 the term is 0 whatever its denominator: 0/0 must not come in.
    ce = objective.ce_alpha * ce_share if objective.ce_alpha > 0 else torch.zeros_like(share)
    return _Factors(ce, objective.l1_alpha * share, objective.confidence_alpha * share)


def _markov(
    draft: DSparkDraft, hidden_BNGH: Tensor, blocks: Blocks, layout: Layout
) -> tuple[Code | None, Tensor | None]:
    """Return (what W2 turns into the bias; e of each evaluated slot, for the confidence head)."""
    head = draft.markov_head
    if head is None:
        return None, None
    slots_M = layout.slots_M
    previous_M = pick(blocks.previous, slots_M)
    if head.scope == "position":
        # A slot's previous token stands at its teacher's position: one row serves all its slots.
        first_P = torch.zeros_like(layout.positions_P).index_copy(
            0, layout.place_M, torch.arange(len(slots_M), device=slots_M.device)
        )
        e_Pr = head.embed(previous_M.index_select(0, first_P))
        # A position's slots add up their gradients: not in bf16.
        return Code(e_Pr, by_position=True), lookup(e_Pr, layout.place_M)
    if head.scope == "slot":
        e_Mr = head.embed(previous_M)
        hidden_MH = hidden_BNGH.flatten(0, 2).index_select(0, slots_M)
        return Code(head.code(hidden_MH, e_Mr), by_position=False), e_Mr
    # Evaluated slots come before the others of their block, so 0 there changes nothing, and what is
    # not finite there stays out of the gradient.
    evaluated_BNG1 = blocks.evaluated.unsqueeze(-1)
    e_BNGr = torch.where(evaluated_BNG1, head.embed(blocks.previous), 0)
    code_BNGr = head.code(torch.where(evaluated_BNG1, hidden_BNGH, 0), e_BNGr)
    code_Mr, e_Mr = (x.flatten(0, 2).index_select(0, slots_M) for x in (code_BNGr, e_BNGr))
    return Code(code_Mr, by_position=False), e_Mr


@torch.no_grad()
def covered_teacher(
    draft: BlockDraft, batch: Batch, target: FrozenTarget, layout: Layout
) -> Teacher:
    """Return what the frozen target says at the positions that a batch's slots cover."""
    states_PH = batch.target_last_hidden_states.flatten(0, 1).index_select(0, layout.positions_P)
    head_KH = draft.draft_head(target.lm_head)
    stored = batch.target_log_normalizer
    if not draft.prunes_vocabulary:
        return Teacher(states_PH, head_KH, None, None)
    if stored is not None:
        return Teacher(states_PH, head_KH, pick(stored, layout.positions_P), None)
    rows = max(64, _NORMALIZER_ELEMENTS // max(1, len(states_PH)))
    pruned_P = log_normalizer(states_PH, target.lm_head, rows, draft.pruned_target_ids())
    return Teacher(states_PH, head_KH, None, pruned_P)


def to_places(
    values: SlotValues, confidence: tuple[Tensor, Tensor, Tensor], layout: Layout, blocks: Blocks
) -> SlotTerms:
    """Put the evaluated slots' values back to their places [B, N, G], 0 elsewhere.

    `confidence` holds the loss, error and probability of a confidence head, [M] each.
    """
    bce_M, error_M, probability_M = confidence
    columns = SlotTerms(
        ce=values.ce,
        l1=values.l1,
        accept=values.accept,
        confidence_loss=bce_M,
        confidence_error=error_M,
        confidence_probability=probability_M,
        kept_mass=values.kept_mass,
        correct=values.correct,
        agrees=values.agrees,
        teacher_top=values.teacher_top,
        draft_top=values.draft_top,
    )
    stacked = torch.stack(list(vars(columns).values()))
    places = stacked.new_zeros(len(stacked), blocks.label.numel())
    places = places.index_copy(1, layout.slots_M, stacked)
    return SlotTerms(*places.view(-1, *blocks.label.shape))


def pick(values: Tensor, index: Tensor) -> Tensor:
    """Return some slots or positions of a tensor over all of them, by their flat numbers."""
    return values.flatten().index_select(0, index)
