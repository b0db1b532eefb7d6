"""The single-process training loop: batches in, step reports out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from torch import nn

from torch_port.config import Settings
from torch_port.data.batch import Batch
from torch_port.models.block_draft import FrozenTarget
from torch_port.training.optimizer import MasterAdamW, OptimizerConfig
from torch_port.training.step import StepReport, training_step


def train(
    draft: nn.Module,
    batches: Iterable[Batch],
    target: FrozenTarget,
    objective: Settings,
    optimizer_config: OptimizerConfig,
    on_step: Callable[[StepReport, Batch, float], None],
) -> MasterAdamW:
    """Train one optimizer step per batch and call `on_step(report, batch, seconds)` after each.

    Returns the optimizer, with its moments and masters.
    Raises UserError from a step (§8's errors, non-finite values); earlier steps stand.
    """
    optimizer = MasterAdamW(draft.named_parameters(), optimizer_config)
    for step, batch in enumerate(batches, start=1):
        started = time.perf_counter()
        report = training_step(draft, optimizer, [batch], target, objective, step)
        on_step(report, batch, time.perf_counter() - started)
    return optimizer
