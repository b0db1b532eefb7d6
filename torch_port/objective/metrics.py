"""The metric pairs of spec sheet §9: (numerator, denominator), summed over ranks by the caller."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_port.blocks import Blocks
from torch_port.objective.terms import SlotTerms

Pair = tuple[Tensor, Tensor]


def metric_pairs(
    terms: SlotTerms, blocks: Blocks, weights_BNG: Tensor, *, prunes: bool, confidence: bool
) -> dict[str, Pair]:
    """Return every pair of §9; per-slot ones are [G].

    Evaluation metrics count with M; the loss rows with w. `prunes` adds the pruned-only rows;
    without a `confidence` head its rows come out as 0 over their denominators.
    """
    M = blocks.evaluated.to(weights_BNG.dtype)
    kept = M * blocks.label_is_kept
    count, den = M.sum(), weights_BNG.sum()
    per_slot = (0, 1)
    survival = (M * terms.accept).cumprod(-1)
    predicted = (M * terms.confidence_probability).cumprod(-1)
    bias = (M * (predicted - survival)).sum() if confidence else torch.zeros_like(count)
    blocks_evaluated = blocks.evaluated.any(-1).to(M.dtype).sum()
    pairs = {
        "acc": ((M * terms.correct).sum(), count),
        "ce_loss": ((weights_BNG * terms.ce).sum(), (weights_BNG * blocks.label_is_kept).sum()),
        "l1_loss": ((weights_BNG * terms.l1).sum(), den),
        "confidence_loss": ((weights_BNG * terms.confidence_loss).sum(), den),
        "confidence_abs_error": ((weights_BNG * terms.confidence_error).sum(), den),
        "teacher_agreement": ((M * terms.agrees).sum(), count),
        "teacher_top1_prob": ((M * terms.teacher_top).sum(), count),
        "draft_top1_prob": ((M * terms.draft_top).sum(), count),
        "tau_probabilistic": (blocks_evaluated + survival.sum(), blocks_evaluated),
        "ce_position": ((kept * terms.ce).sum(per_slot), kept.sum(per_slot)),
        "accuracy_position": ((M * terms.correct).sum(per_slot), M.sum(per_slot)),
        "accept_position": ((M * terms.accept).sum(per_slot), M.sum(per_slot)),
        "confidence_cumprod_bias": (bias, count),
    }
    if prunes:
        pairs["draft_vocab_coverage"] = (kept.sum(), count)
        pairs["teacher_kept_mass"] = ((M * terms.kept_mass).sum(), count)
    return {name: (top.detach(), bottom.detach()) for name, (top, bottom) in pairs.items()}


def add_pairs(total: dict[str, Pair], new: dict[str, Pair]) -> dict[str, Pair]:
    """Add two sets of pairs, numerator to numerator and denominator to denominator."""
    if not total:
        return new
    return {name: (total[name][0] + n, total[name][1] + d) for name, (n, d) in new.items()}


def ratios(pairs: dict[str, Pair]) -> dict[str, float | list[float]]:
    """Turn pairs into values on the host, one transfer per pair; 0/0 is 0."""
    return {
        name: torch.where(bottom == 0, 0, top / torch.where(bottom == 0, 1, bottom)).tolist()
        for name, (top, bottom) in pairs.items()
    }
