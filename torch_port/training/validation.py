"""Validation: the loss and every metric of spec sheet §9 over the samples kept from training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from torch_port.config import Settings
from torch_port.data.batch import Batch
from torch_port.models.block_draft import FrozenTarget
from torch_port.objective.families import family_of
from torch_port.objective.metrics import Pair, add_pairs, ratios
from torch_port.training.distribution import Ranks
from torch_port.training.inputs import TrainingInputs, validation_batches
from torch_port.training.metrics import Values, reduce_pairs


@torch.no_grad()
def validate(
    draft: Any,
    inputs: TrainingInputs,
    target: FrozenTarget,
    objective: Settings,
    ranks: Ranks,
    on_device: Callable[[Batch], Batch],
) -> Values:
    """Return loss and metrics over all validation samples of all ranks, taken as one batch.

    Every rank takes as many forward passes, whatever samples it has, and two all-reduces: the
    denominators, then all numbers.
    Raises UserError with §8's words when nothing is supervised in them.
    """
    family = family_of(draft, objective)
    pairs: dict[str, Pair] = {}
    numerators: list[Any] = []
    denominators: list[torch.Tensor] = []
    for batch in validation_batches(inputs, ranks.rank, ranks.world_size):
        prepared = family.prepare(draft, on_device(batch), target)
        outcome = family.forward(draft, prepared, target, objective)
        pairs = add_pairs(pairs, outcome.metrics)
        numerators.append(outcome.numerators)
        denominators.append(family.denominators(draft, prepared, objective))
    total = torch.stack(denominators).sum(0)
    if ranks.world_size > 1:
        dist.all_reduce(total)
    # This rank's numerators over everybody's denominators: the ranks' shares add up to the loss.
    share = family.whole_loss(draft, numerators, total, objective).item()
    return ratios(reduce_pairs(pairs, {"loss": (share, 1 / ranks.world_size)}, ranks))
