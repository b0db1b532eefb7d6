"""One optimizer step: denominators, forward, backward, one sync, update (spec sheet §8, §14)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from torch_port.config import Settings
from torch_port.data.batch import Batch
from torch_port.errors import NonFiniteError, UserError
from torch_port.models.block_draft import FrozenTarget
from torch_port.objective.families import family_of
from torch_port.objective.loss import world_size
from torch_port.objective.metrics import Pair, add_pairs
from torch_port.training.distribution import average_gradients
from torch_port.training.optimizer import MasterAdamW, rate_at


@dataclass(frozen=True)
class StepReport:
    """One step's numbers: host floats from the sync, metric pairs still on the device."""

    step: int
    loss: float
    gradient_norm: float
    rate: float
    metrics: dict[str, Pair]
    taken: bool = True  # False: the gradient norm was a spike, and the weights stayed
    spike: bool = False  # the guard said so, whether the step was taken or not


def accumulate_gradients(
    draft: nn.Module,
    micro_batches: Sequence[Batch],
    target: FrozenTarget,
    objective: Settings,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, dict[str, Pair]]:
    """Run forward and backward over the micro-batches of a step; nothing here syncs.

    Returns (loss summed over micro-batches, den, ce_den, metric pairs), all on the device. Rank
    gradients are averaged when a process group exists. Gradients are float32 or better, whatever
    the parameters are.
    """
    ranks, family = world_size(), family_of(draft, objective)
    for parameter in draft.parameters():
        # Chunks, micro-batches and ranks add up here: in bf16 each sum would round (§11).
        parameter.grad_dtype = torch.promote_types(parameter.dtype, torch.float32)
    prepared = [family.prepare(draft, batch, target) for batch in micro_batches]
    local = torch.stack([family.denominators(draft, b, objective) for b in prepared]).sum(0)
    denominators = family.reduce(draft, local)
    loss_sum = torch.zeros_like(denominators.den)
    pairs: dict[str, Pair] = {}
    for batch in prepared:
        outcome = family.forward(draft, batch, target, objective, denominators, ranks)
        loss = outcome.loss
        assert loss is not None  # denominators were given
        torch.autograd.backward(loss)
        loss_sum = loss_sum + loss.detach()
        pairs = add_pairs(pairs, outcome.metrics)
    average_gradients(draft)
    return loss_sum, denominators.den, denominators.ce_den, pairs


def training_step(
    draft: nn.Module,
    optimizer: MasterAdamW,
    micro_batches: Sequence[Batch],
    target: FrozenTarget,
    objective: Settings,
    step: int,
) -> StepReport:
    """Take optimizer step `step` (from 1): reduce, check finite, spike guard, clip, update, cast.

    A step whose norm is a spike is skipped, unless the guard only observes: no weight and no moment
    moves, and the schedule goes on; the report says so.

    The four numbers of the host checks cross in one transfer, after backward; it is the step's
    only device sync.

    Raises UserError with §8's words when nothing was supervised or nothing is in the vocabulary,
    and NonFiniteError when the gradient norm is not finite; the weights are untouched then.
    """
    loss, den, ce_den, pairs = accumulate_gradients(draft, micro_batches, target, objective)
    norm = optimizer.gradient_norm()
    wide = loss.dtype
    loss_value, den_value, ce_den_value, norm_value = torch.stack(
        [loss, den, ce_den, norm.to(wide)]
    ).tolist()
    try:
        family_of(draft, objective).check(den_value, ce_den_value, objective)
        # The norm is of the reduced gradients: every rank sees the same one and none raises alone.
        if not math.isfinite(norm_value):
            raise NonFiniteError(
                f"step {step}: loss {loss_value}, gradient norm {norm_value}; the weights were not "
                "touched. Look for non-finite features, or lower peak_rate"
            )
    except UserError:
        optimizer.release_gradients()
        raise
    rate = rate_at(step, optimizer.config)
    spike, taken = optimizer.guard.is_spike(norm_value), optimizer.guard.admits(norm_value)
    if taken:
        optimizer.apply(rate, norm)
    else:
        optimizer.release_gradients()
    return StepReport(step, loss_value, norm_value, rate, pairs, taken, spike)
