"""Evaluation of a draft: the metric pairs of spec sheet §9 over a set of batches, no gradient."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torch_port.config import Settings
from torch_port.data.batch import Batch
from torch_port.errors import UserError
from torch_port.models.block_draft import FrozenTarget
from torch_port.objective.families import family_of
from torch_port.objective.metrics import Pair, add_pairs, ratios


@torch.no_grad()
def evaluate(
    draft: nn.Module, batches: Iterable[Batch], target: FrozenTarget, objective: Settings
) -> dict[str, float | list[float]]:
    """Return the loss and every metric of §9 over all batches taken as one, on this process.

    Numerators and denominators are summed before they are divided, so batches of unequal size do
    not weigh the same.
    Raises UserError when no batch was given, and §8's errors.
    """
    family = family_of(draft, objective)
    pairs: dict[str, Pair] = {}
    numerators: list[Any] = []
    local: list[torch.Tensor] = []
    for batch in batches:
        prepared = family.prepare(draft, batch, target)
        outcome = family.forward(draft, prepared, target, objective)
        pairs = add_pairs(pairs, outcome.metrics)
        numerators.append(outcome.numerators)
        local.append(family.denominators(draft, prepared, objective))
    if not numerators:
        raise UserError("nothing to evaluate: no batch was given; prepare held-out samples")
    loss = family.whole_loss(draft, numerators, torch.stack(local).sum(0), objective)
    return {"loss": loss.item(), **ratios(pairs)}
