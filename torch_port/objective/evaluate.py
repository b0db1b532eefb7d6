"""One batch through draft and objective: the function that training, evaluation and parity call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_port.blocks import Blocks, make_blocks, slot_weights
from torch_port.config import ObjectiveConfig
from torch_port.data.batch import Batch
from torch_port.models.block_draft import BlockDraft, FrozenTarget
from torch_port.models.dspark import DSparkDraft
from torch_port.objective.fused_batch import fused_objective
from torch_port.objective.loss import (
    Denominators,
    Numerators,
    assemble_loss,
    check_denominators,
    count_denominators,
    weigh,
)
from torch_port.objective.metrics import Pair, metric_pairs
from torch_port.objective.terms import SlotTerms, slot_terms


@dataclass(frozen=True)
class Outcome:
    """What a forward pass gives: sums to assemble a loss from, metric pairs, per-slot terms."""

    blocks: Blocks
    hidden: Tensor
    terms: SlotTerms
    numerators: Numerators
    metrics: dict[str, Pair]
    loss: Tensor | None  # with gradient; None when no denominators were given


def layout_blocks(draft: BlockDraft, batch: Batch) -> Blocks:
    """Lay out a batch's blocks for a draft, in its layout (§3)."""
    return make_blocks(
        batch.input_ids,
        batch.loss_mask,
        batch.anchor_positions,
        batch.block_keep_mask,
        block_size=draft.config.block_size,
        mask_token_id=draft.config.mask_token_id,
        draft_index_V=draft.draft_vocab_index(),
        block_layout=draft.block_layout,
    )


def run_draft(
    draft: BlockDraft, batch: Batch, target: FrozenTarget
) -> tuple[Blocks, Batch, Tensor]:
    """Return (a batch's blocks; the batch laid out for the draft; h [B, N, G, H])."""
    blocks = layout_blocks(draft, batch)
    batch = batch.with_layout(draft.config.block_size, draft.block_layout)
    hidden = draft(
        blocks,
        batch.hidden_states,
        batch.anchor_positions,
        batch.block_keep_mask,
        target,
        batch.layout if draft.compute.attention == "blockwise" else None,
    )
    return blocks, batch, hidden


def batch_denominators(draft: DSparkDraft, batch: Batch, objective: ObjectiveConfig) -> Tensor:
    """Return [den, ce_den] of a batch: masks and map alone, no forward pass."""
    dtype = torch.promote_types(batch.hidden_states.dtype, torch.float32)
    return count_denominators(layout_blocks(draft, batch), objective, dtype)


def forward_batch(
    draft: DSparkDraft,
    batch: Batch,
    target: FrozenTarget,
    objective: ObjectiveConfig,
    denominators: Denominators | None = None,
    ranks: int = 1,
) -> Outcome:
    """Run a batch: blocks, backbone, per-slot terms, weighted sums, metric pairs, loss.

    Arguments: `denominators` of the whole step (`reduce_denominators`) and its number of `ranks`;
    without denominators there is no loss, for evaluation.
    Raises UserError when the draft prunes and no vocabulary map is installed.
    """
    blocks, batch, hidden = run_draft(draft, batch, target)
    terms, loss = batch_objective(
        draft, hidden, blocks, batch, target, objective, denominators, ranks
    )
    weights = slot_weights(blocks.evaluated, objective.loss_decay_gamma, terms.l1.dtype)
    metrics = metric_pairs(
        terms,
        blocks,
        weights,
        prunes=draft.prunes_vocabulary,
        confidence=draft.confidence_head is not None,
    )
    return Outcome(blocks, hidden, terms, weigh(terms, weights), metrics, loss)


def batch_objective(
    draft: DSparkDraft,
    hidden_BNGH: Tensor,
    blocks: Blocks,
    batch: Batch,
    target: FrozenTarget,
    objective: ObjectiveConfig,
    denominators: Denominators | None,
    ranks: int,
) -> tuple[SlotTerms, Tensor | None]:
    """Return every slot's terms and the loss (None without denominators), as `draft.compute` says.

    "plain" keeps the published operations in their order; "fused" computes the gradient along with
    the terms, which then carry none.
    """
    if draft.compute.objective == "fused":
        return fused_objective(
            draft, hidden_BNGH, blocks, batch, target, objective, denominators, ranks
        )
    states, normalizer = batch.target_last_hidden_states, batch.target_log_normalizer
    terms = slot_terms(draft, hidden_BNGH, blocks, target, states, normalizer, objective)
    if denominators is None:
        return terms, None
    weights = slot_weights(blocks.evaluated, objective.loss_decay_gamma, terms.l1.dtype)
    prunes = draft.prunes_vocabulary
    numerators = weigh(terms, weights)
    return terms, assemble_loss(numerators, denominators, objective, prunes=prunes, ranks=ranks)


def whole_loss(
    draft: DSparkDraft, numerators: Sequence[Numerators], local: Tensor, objective: ObjectiveConfig
) -> Tensor:
    """Return the loss of several batches taken as one, on this process.

    Arguments: the batches' numerators, and the sum of their denominators, [den, ce_den].
    Raises §8's errors.
    """
    den, ce_den = local
    denominators = Denominators(den, ce_den if draft.prunes_vocabulary else den)
    check_denominators(denominators.den.item(), denominators.ce_den.item(), objective)
    ce, l1, confidence = torch.stack(
        [torch.stack([n.ce, n.l1, n.confidence]) for n in numerators]
    ).sum(0)
    return assemble_loss(
        Numerators(ce, l1, confidence),
        denominators,
        objective,
        prunes=draft.prunes_vocabulary,
        ranks=1,
    )
