"""Evaluation of a draft: the metric pairs of spec sheet §9 over a set of batches, no gradient."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from torch_port.config import ObjectiveConfig
from torch_port.data.batch import Batch
from torch_port.errors import UserError
from torch_port.models.dspark import DSparkDraft, FrozenTarget
from torch_port.objective.evaluate import batch_denominators, forward_batch
from torch_port.objective.loss import (
    Denominators,
    Numerators,
    assemble_loss,
    check_denominators,
)
from torch_port.objective.metrics import Pair, add_pairs, ratios


@torch.no_grad()
def evaluate(
    draft: DSparkDraft, batches: Iterable[Batch], target: FrozenTarget, objective: ObjectiveConfig
) -> dict[str, float | list[float]]:
    """Return the loss and every metric of §9 over all batches taken as one, on this process.

    Numerators and denominators are summed before they are divided, so batches of unequal size do
    not weigh the same.
    Raises UserError when no batch was given, and §8's errors.
    """
    pairs: dict[str, Pair] = {}
    sums: list[torch.Tensor] = []
    local: list[torch.Tensor] = []
    for batch in batches:
        outcome = forward_batch(draft, batch, target, objective)
        pairs = add_pairs(pairs, outcome.metrics)
        n = outcome.numerators
        sums.append(torch.stack([n.ce, n.l1, n.confidence]))
        local.append(batch_denominators(draft, batch, objective))
    if not sums:
        raise UserError("nothing to evaluate: no batch was given; prepare held-out samples")
    den, ce_den = torch.stack(local).sum(0)
    denominators = Denominators(den, ce_den if draft.prunes_vocabulary else den)
    check_denominators(denominators.den.item(), denominators.ce_den.item(), objective)
    ce, l1, confidence = torch.stack(sums).sum(0)
    loss = assemble_loss(
        Numerators(ce, l1, confidence),
        denominators,
        objective,
        prunes=draft.prunes_vocabulary,
        ranks=1,
    )
    return {"loss": loss.item(), **ratios(pairs)}
