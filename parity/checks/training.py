"""The same training run on both sides: torch AdamW against optax, step by step (spec sheet §14)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.cases import Array, Case
from parity.compare import relative_error
from parity.names import to_torch
from parity.sides import (
    Answer,
    port_batch,
    port_draft,
    port_objective,
    setup_jax,
    spec_batch,
    spec_draft,
)

# Per step and dtype: the largest relative error of a loss, and of any parameter tensor.
# float64: gradients agree to 1e-14 or so of a tensor's maximum; AdamW divides by sqrt(v) + 1e-8, so
# an element whose gradient is near 0 enlarges its rounding by up to 1e8 / its tensor's maximum.
# float32: the same enlargement of 1e-7 makes single parameters move by a whole rate; the loss,
# a sum over all of them, still follows.
LOSS_TOLERANCE = {"float64": 1e-10, "float32": 1e-4}
PARAMETER_TOLERANCE = {"float64": 1e-8, "float32": 1e-1}


@dataclass(frozen=True)
class TrajectoryStep:
    """One step of both runs: the losses before the update, the worst parameter after it."""

    step: int
    loss_port: float
    loss_spec: float
    worst_name: str
    worst_error: float

    @property
    def loss_error(self) -> float:
        """Relative error of the port's loss."""
        return relative_error(self.loss_port, self.loss_spec)


def trajectories(
    case: Case, dtype: str, on_step: Callable[[int, int], None] = lambda *_: None
) -> list[TrajectoryStep]:
    """Train on both sides from the case's weights, over its `steps/{i}/…` batches.

    Arguments: a case whose `optimizer` entry gives §14's numbers; the dtype of both runs;
    `on_step(done, total)` for progress.
    Returns one entry per step. Raises what either side raises.
    """
    batches = step_batches(case)
    runs = zip(_port_run(case, batches, dtype), _spec_run(case, batches, dtype), strict=True)
    result = []
    for index, ((port_loss, port), (spec_loss, spec)) in enumerate(runs, start=1):
        errors = {name: relative_error(port[name], spec[name]) for name in spec}
        worst = max(errors, key=lambda name: errors[name])
        result.append(TrajectoryStep(index, port_loss, spec_loss, worst, errors[worst]))
        on_step(index, len(batches))
    return result


def port_training(case: Case, dtype: str) -> Answer:
    """Answer a training case with the port: every step's loss, and the weights after the last."""
    return _as_answer(_port_run(case, step_batches(case), dtype))


def spec_training(case: Case, dtype: str) -> Answer:
    """Answer a training case with the spec: every step's loss, and the weights after the last."""
    return _as_answer(_spec_run(case, step_batches(case), dtype))


def _as_answer(run: Iterator[tuple[float, dict[str, Array]]]) -> Answer:
    losses: list[float] = []
    weights: dict[str, Array] = {}
    for loss, weights in run:  # noqa: B007 (the last step's weights are the answer)
        losses.append(loss)
    return Answer(
        loss=losses[-1],
        metrics={"loss_by_step": (np.array(losses), np.ones(len(losses)))},
        tensors={f"trained/{name}": value for name, value in weights.items()},
    )


def step_batches(case: Case) -> list[dict[str, Array]]:
    """Return the case's batches in the order of their numbers."""
    numbers = sorted(
        {int(name.split("/")[1]) for name in case.tensors if name.startswith("steps/")}
    )
    return [case.group(f"steps/{number}") for number in numbers]


def _port_run(
    case: Case, batches: list[dict[str, Array]], dtype: str
) -> Iterator[tuple[float, dict[str, Array]]]:
    from torch_port.training.optimizer import MasterAdamW, OptimizerConfig
    from torch_port.training.step import training_step

    numbers = dict(case.extra["optimizer"])
    betas = (numbers.pop("beta1"), numbers.pop("beta2"))
    draft, target = port_draft(case, dtype)
    objective = port_objective(case, draft)
    optimizer = MasterAdamW(draft.named_parameters(), OptimizerConfig(betas=betas, **numbers))
    for step, arrays in enumerate(batches, start=1):
        report = training_step(
            draft, optimizer, [port_batch(arrays, dtype)], target, objective, step
        )
        yield (
            report.loss,
            {name: p.detach().numpy().copy() for name, p in draft.named_parameters()},
        )


def _spec_run(
    case: Case, batches: list[dict[str, Array]], dtype: str
) -> Iterator[tuple[float, dict[str, Array]]]:
    setup_jax()
    from jaxdraft import training
    from jaxdraft.config import ObjectiveConfig

    numbers: dict[str, Any] = dict(case.extra["optimizer"])
    numbers["epsilon"] = numbers.pop("eps")
    config, params, target, vocabulary = spec_draft(case, dtype)
    objective = ObjectiveConfig(**case.objective)
    optimizer = training.OptimizerConfig(**numbers)
    state = training.start(config, objective, optimizer, params, target, vocabulary)
    for arrays in batches:
        state, report = training.train_step(state, spec_batch(arrays, dtype))
        training.check_step(objective, report)
        yield (
            float(report.evaluation.loss),
            {name: np.asarray(value) for name, value in to_torch(state.params).items()},
        )
