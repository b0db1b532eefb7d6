"""The objectives of DFlash drafts: decayed cross entropy and D-PACE (spec sheet §12).

Blocks are bonus-anchor: slot k predicts x[a+k], slot 0 is not trained, and each label stands for
itself. The per-slot terms are those of DSpark (`terms.py`, `fused.py`) without heads; what differs
is how the slots are weighed.

Shape suffixes: B batch, S sequence, N blocks, G slots, M evaluated slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from torch_port.blocks import Blocks, slot_weights
from torch_port.config import DFlashObjectiveConfig, ObjectiveConfig
from torch_port.data.batch import Batch
from torch_port.errors import UserError
from torch_port.models.block_draft import FrozenTarget
from torch_port.models.dflash import DFlashDraft
from torch_port.objective.evaluate import layout_blocks, run_draft
from torch_port.objective.fused import Slots, SlotValues, fused_terms
from torch_port.objective.fused_batch import covered_teacher, pick, to_places
from torch_port.objective.loss import NO_SUPERVISION, NOTHING_INSIDE
from torch_port.objective.metrics import Pair, metric_pairs
from torch_port.objective.terms import SlotTerms, slot_terms

_OfSlots = TypeVar("_OfSlots", SlotTerms, Blocks)
# Rows of §9 that are about a head these drafts do not have.
_CONFIDENCE_ROWS = ("confidence_loss", "confidence_abs_error", "confidence_cumprod_bias")


@dataclass(frozen=True)
class DFlashDenominators:
    """Sums over ranks and micro-batches: Σ w, Σ w·1[label kept], and what the loss divides by.

    That is Σ w·1[label kept] with decay, and B, the number of sequences, with D-PACE, whose w is
    not known before the forward pass: there w is M in the first two.
    """

    den: Tensor
    ce_den: Tensor
    divisor: Tensor


@dataclass(frozen=True)
class DFlashOutcome:
    """What a forward pass gives; `numerators` is Σ w·1[label kept]·ce, without gradient."""

    blocks: Blocks
    hidden: Tensor
    terms: SlotTerms
    weights: Tensor  # [B, N, G], 0 where not evaluated
    numerators: Tensor
    metrics: dict[str, Pair]
    loss: Tensor | None  # with gradient; None when no denominators were given


def batch_denominators(
    draft: DFlashDraft, batch: Batch, objective: DFlashObjectiveConfig
) -> Tensor:
    """Return [den, ce_den, divisor] of a batch: masks and map alone, no forward pass."""
    dtype = torch.promote_types(batch.hidden_states.dtype, torch.float32)
    blocks = layout_blocks(draft, batch)
    weights = _decayed(blocks, objective, dtype)  # M with D-PACE, which has no decay
    inside = (weights * blocks.label_is_kept).sum()
    sequences = torch.full_like(inside, len(batch.input_ids))
    return torch.stack([weights.sum(), inside, inside if objective.dpace == "none" else sequences])


def reduce_denominators(draft: DFlashDraft, local: Tensor) -> DFlashDenominators:
    """Sum over the ranks: one all-reduce of the three numbers, pruned or not."""
    total = local.clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(total)
    return DFlashDenominators(*total.unbind())


def check_denominators(den: float, ce_den: float, objective: DFlashObjectiveConfig) -> None:
    """Raise §8's two errors on the sums over all ranks and micro-batches, in the sheet's words.

    D-PACE's divisor is never 0, but a step without a kept label trains nothing there either.
    """
    if den == 0:
        raise UserError(
            f"{NO_SUPERVISION}: no block of this step has a supervised label after its anchor; "
            "check the loss masks, and filter samples without two adjacent supervised tokens"
        )
    if ce_den == 0:
        raise UserError(
            f"{NOTHING_INSIDE}: the draft vocabulary keeps no label of this step; raise "
            "draft_vocab_size, or build the map from this corpus"
        )


def forward_batch(
    draft: DFlashDraft,
    batch: Batch,
    target: FrozenTarget,
    objective: DFlashObjectiveConfig,
    denominators: DFlashDenominators | None = None,
    ranks: int = 1,
) -> DFlashOutcome:
    """Run a batch: blocks, backbone, per-slot terms, their weights, metric pairs, loss.

    loss = ranks · Σ w·1[label kept]·ce / divisor, w = M·exp(−max(k − 1, 0)/decay) or D-PACE's.
    Raises UserError when the draft prunes and no vocabulary map is installed.
    """
    blocks, batch, hidden = run_draft(draft, batch, target)
    scale = None if denominators is None else ranks / denominators.divisor
    if draft.compute.objective == "fused":
        terms, weights, loss = _fused(draft, hidden, blocks, batch, target, objective, scale)
    else:
        terms, weights, loss = _plain(draft, hidden, blocks, batch, target, objective, scale)
    numerators = (weights * terms.ce.detach()).sum()
    metrics = _metrics(terms, blocks, weights, draft.prunes_vocabulary)
    return DFlashOutcome(blocks, hidden, terms, weights, numerators, metrics, loss)


def whole_loss(
    draft: DFlashDraft,
    numerators: Sequence[Tensor],
    local: Tensor,
    objective: DFlashObjectiveConfig,
) -> Tensor:
    """Return the loss of several batches taken as one, on this process; raises §8's errors."""
    check_denominators(local[0].item(), local[1].item(), objective)
    return torch.stack(list(numerators)).sum() / local[2]


def dpace_weights(probability_BNG: Tensor, evaluated_BNG: Tensor, kind: str, beta: float) -> Tensor:
    """Return D-PACE's weights M·P, M·R/P or M·R ("cumulative", "continuation", "both"), [B, N, G].

    s_k = (1 − β)·c_k + β, and 1 at slots that do not count; P_k = Π_{j≤k} s_j;
    R_k = Σ_{j≥k} M_j·P_j. The ratio is summed by itself, R_k/P_k = M_k + s_{k+1}·R_{k+1}/P_{k+1}:
    P of a long block underflows, and 0/0 must not come in.

    Arguments: c_k = q_k[label], 0 where the label was pruned (serving would reject it), anything
    finite where a slot does not count; M. No gradient passes. Source: spec sheet §12.
    """
    M = evaluated_BNG.to(probability_BNG.dtype)
    s_BNG = torch.where(evaluated_BNG, (1 - beta) * probability_BNG.detach() + beta, 1)
    cumulative = s_BNG.cumprod(-1)
    if kind == "cumulative":
        return M * cumulative
    value = torch.zeros_like(M[..., 0])
    values = []
    for slot in reversed(range(M.shape[-1])):
        value = M[..., slot] + value  # `value` holds s_{k+1}·R_{k+1}/P_{k+1}
        values.append(value)
        value = s_BNG[..., slot] * value
    continuation = torch.stack(values[::-1], dim=-1)
    return M * (continuation if kind == "continuation" else cumulative * continuation)


def _decayed(blocks: Blocks, objective: DFlashObjectiveConfig, dtype: torch.dtype) -> Tensor:
    return slot_weights(blocks.evaluated, objective.loss_decay_gamma, dtype, first_slot=1)


def _from_confidence(ce_BNG: Tensor, blocks: Blocks, objective: DFlashObjectiveConfig) -> Tensor:
    """Return D-PACE's weights of c = exp(−ce); where the label was pruned ce is 0, and c is too."""
    assert objective.beta is not None  # D-PACE's objectives have one
    c_BNG = torch.where(blocks.label_is_kept, (-ce_BNG).exp(), 0)
    return dpace_weights(c_BNG, blocks.evaluated, objective.dpace, objective.beta)


def _plain(
    draft: DFlashDraft,
    hidden_BNGH: Tensor,
    blocks: Blocks,
    batch: Batch,
    target: FrozenTarget,
    objective: DFlashObjectiveConfig,
    scale: Tensor | None,
) -> tuple[SlotTerms, Tensor, Tensor | None]:
    """Return (terms, weights, loss) by the reference form; a chunk's logits are made again."""
    states, normalizer = batch.target_last_hidden_states, batch.target_log_normalizer
    no_heads = ObjectiveConfig()  # says how a confidence head is read; there is none
    terms = slot_terms(draft, hidden_BNGH, blocks, target, states, normalizer, no_heads)
    if objective.dpace == "none":
        weights = _decayed(blocks, objective, terms.ce.dtype)
    else:
        weights = _from_confidence(terms.ce, blocks, objective)
    return terms, weights, None if scale is None else scale * (weights * terms.ce).sum()


def _fused(
    draft: DFlashDraft,
    hidden_BNGH: Tensor,
    blocks: Blocks,
    batch: Batch,
    target: FrozenTarget,
    objective: DFlashObjectiveConfig,
    scale: Tensor | None,
) -> tuple[SlotTerms, Tensor, Tensor | None]:
    """Return (terms, weights, loss), the gradient computed along with the terms.

    D-PACE's weights depend on q: a pass for c_k alone comes first, then the one with the gradient.
    """
    layout = batch.layout
    assert layout is not None  # `run_draft` laid the batch out
    slots_M, wide = layout.slots_M, torch.promote_types(hidden_BNGH.dtype, torch.float32)
    teacher = covered_teacher(draft, batch, target, layout)
    head_KH = draft.output_head(target.lm_head)
    label_M, kept_M = pick(blocks.label_draft_id, slots_M), pick(blocks.label_is_kept, slots_M)

    def walk(factor_M: Tensor, gradients: bool) -> tuple[Tensor, SlotValues]:
        with torch.set_grad_enabled(gradients):
            return fused_terms(
                hidden_BNGH.flatten(0, 2),
                None,
                None,
                head_KH,
                teacher,
                Slots(label_M, kept_M, factor_M * kept_M, torch.zeros_like(factor_M)),
                layout,
                int(draft.compute.objective_buffer_mib * 2**20),
            )

    def terms_of(values: SlotValues) -> SlotTerms:
        nothing = torch.zeros_like(values.l1)
        return to_places(values, (nothing, nothing, nothing), layout, blocks)

    if objective.dpace == "none":
        weights = _decayed(blocks, objective, wide)
    else:
        _, values = walk(torch.zeros(len(slots_M), dtype=wide, device=slots_M.device), False)
        terms = terms_of(values)
        weights = _from_confidence(terms.ce, blocks, objective)
        if scale is None:
            return terms, weights, None
    factor = weights if scale is None else weights * scale.to(wide)
    loss, values = walk(pick(factor, slots_M), torch.is_grad_enabled() and scale is not None)
    return terms_of(values), weights, None if scale is None else loss


def _metrics(
    terms: SlotTerms, blocks: Blocks, weights_BNG: Tensor, prunes: bool
) -> dict[str, Pair]:
    """Return §9's pairs over slots 1 … γ − 1; per-slot ones are [G − 1]."""
    pairs = metric_pairs(
        _without_anchor(terms),
        _without_anchor(blocks),
        weights_BNG[..., 1:],
        prunes=prunes,
        confidence=False,
    )
    return {name: pair for name, pair in pairs.items() if name not in _CONFIDENCE_ROWS}


def _without_anchor(of_slots: _OfSlots) -> _OfSlots:
    """Leave out slot 0 of every tensor, all [B, N, G]."""
    return type(of_slots)(**{f.name: getattr(of_slots, f.name)[..., 1:] for f in fields(of_slots)})
