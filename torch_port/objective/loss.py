"""Weighted sums, their denominators over ranks, and the loss (spec sheet §8).

Denominators depend on masks and the vocabulary map alone, so a step knows them before its first
forward: an unpruned run all-reduces one scalar, a pruned run exactly one more.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torch_port.blocks import Blocks, slot_weights
from torch_port.config import ObjectiveConfig
from torch_port.errors import UserError
from torch_port.objective.terms import SlotTerms

NO_SUPERVISION = "no supervised target tokens"
NOTHING_INSIDE = "no in-vocabulary target tokens"


@dataclass(frozen=True)
class Denominators:
    """Σ w, and Σ w·1[label kept] (equal to Σ w when unpruned), over ranks and micro-batches."""

    den: Tensor
    ce_den: Tensor


def count_denominators(blocks: Blocks, objective: ObjectiveConfig, dtype: torch.dtype) -> Tensor:
    """Return this batch's [den, ce_den], shape [2]."""
    weights = slot_weights(blocks.evaluated, objective.loss_decay_gamma, dtype)
    return torch.stack([weights.sum(), (weights * blocks.label_is_kept).sum()])


def reduce_denominators(local: Tensor, prunes: bool) -> Denominators:
    """Sum [den, ce_den] over the ranks: one all-reduce unpruned, two pruned.

    Ranks must agree on number and order of collectives; both follow from the run's config alone.
    """
    den, ce_den = local[0].clone(), local[1].clone()
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(den)
        if prunes:
            dist.all_reduce(ce_den)
    return Denominators(den, ce_den if prunes else den)


def world_size() -> int:
    """Return the number of ranks, 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@dataclass(frozen=True)
class Numerators:
    """Σ w·ce, Σ w·l1 and Σ w·confidence of one batch."""

    ce: Tensor
    l1: Tensor
    confidence: Tensor


def weigh(terms: SlotTerms, weights_BNG: Tensor) -> Numerators:
    """Sum a batch's terms with the weights of §3.6."""
    return Numerators(
        ce=(weights_BNG * terms.ce).sum(),
        l1=(weights_BNG * terms.l1).sum(),
        confidence=(weights_BNG * terms.confidence_loss).sum(),
    )


def assemble_loss(
    numerators: Numerators,
    denominators: Denominators,
    objective: ObjectiveConfig,
    *,
    prunes: bool,
    ranks: int,
) -> Tensor:
    """Return the loss of one batch, to be averaged over `ranks` and summed over micro-batches.

    unpruned: W·(α_ce·ce + α_l1·l1 + α_conf·conf) / den
    pruned:   W·(α_ce·ce / ce_den + (α_l1·l1 + α_conf·conf) / den)

    The unpruned form keeps the published operations in their order. A denominator of 0 gives a
    non-finite loss here and an error at the step's one sync (`check_denominators`).
    """
    a_ce, a_l1, a_conf = objective.ce_alpha, objective.l1_alpha, objective.confidence_alpha
    n = numerators
    if not prunes:
        return ranks * (a_ce * n.ce + a_l1 * n.l1 + a_conf * n.confidence) / denominators.den
    rest = (a_l1 * n.l1 + a_conf * n.confidence) / denominators.den
    if a_ce == 0:
        return ranks * rest  # the term is 0 whatever its denominator
    return ranks * (a_ce * n.ce / denominators.ce_den + rest)


def check_denominators(den: float, ce_den: float, objective: ObjectiveConfig) -> None:
    """Raise §8's two errors on the sums over all ranks and micro-batches, in the sheet's words."""
    if den == 0:
        raise UserError(
            f"{NO_SUPERVISION}: no anchor of this step has a supervised label; check the loss "
            "masks, and filter samples without two adjacent supervised tokens"
        )
    if objective.ce_alpha > 0 and ce_den == 0:
        raise UserError(
            f"{NOTHING_INSIDE}: the draft vocabulary keeps no label of this step; raise "
            "draft_vocab_size, build the map from this corpus, or set ce_alpha to 0"
        )
