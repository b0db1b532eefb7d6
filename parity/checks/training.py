"""The same training run on both sides: torch AdamW against optax, step by step (spec sheet §14)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from parity.cases import Array, Case, as_dtype
from parity.checks.eagle3 import port_eagle3_draft
from parity.compare import relative_error
from parity.names import BUFFERS, EAGLE3_TABLE, TABLE, to_flax, to_torch
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

# EAGLE3 has no anchors; the port's batch has a place for them.
_WITHOUT_ANCHORS = {
    "anchor_positions": np.zeros((1, 1), np.int64),
    "block_keep_mask": np.zeros((1, 1), bool),
}


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
    from torch_port.config_eagle3 import Eagle3Objective
    from torch_port.training.optimizer import MasterAdamW, OptimizerConfig
    from torch_port.training.step import training_step

    numbers = dict(case.extra["optimizer"])
    betas = (numbers.pop("beta1"), numbers.pop("beta2"))
    objective: Any
    if "eagle3" in case.extra:
        draft, target = port_eagle3_draft(case, dtype)
        objective = Eagle3Objective(**case.extra["eagle3"], **case.objective)
        batches = [_WITHOUT_ANCHORS | arrays for arrays in batches]
    else:
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
    from jaxdraft.training import OptimizerConfig

    numbers: dict[str, Any] = dict(case.extra["optimizer"])
    numbers["epsilon"] = numbers.pop("eps")
    optimizer, table = OptimizerConfig(**numbers), TABLE
    if "eagle3" in case.extra:
        run, table = _spec_eagle3(case, optimizer, batches, dtype), EAGLE3_TABLE
    elif case.config["dflash_config"]["projector_type"] == "dflash":
        run = _spec_dflash(case, optimizer, batches, dtype)
    else:
        run = _spec_dspark(case, optimizer, batches, dtype)
    for loss, params in run:
        yield loss, {name: np.asarray(value) for name, value in to_torch(params, table).items()}


def _spec_dspark(
    case: Case, optimizer: Any, batches: list[dict[str, Array]], dtype: str
) -> Iterator[tuple[float, Any]]:
    from jaxdraft import training
    from jaxdraft.config import ObjectiveConfig

    config, params, target, vocabulary = spec_draft(case, dtype)
    objective = ObjectiveConfig(**case.objective)
    state = training.start(config, objective, optimizer, params, target, vocabulary)
    for arrays in batches:
        state, report = training.train_step(state, spec_batch(arrays, dtype))
        training.check_step(objective, report)
        yield float(report.evaluation.loss), state.params


def _spec_dflash(
    case: Case, optimizer: Any, batches: list[dict[str, Array]], dtype: str
) -> Iterator[tuple[float, Any]]:
    from jaxdraft.dflash import DFlashObjective, gradients_dflash

    config, params, target, vocabulary = spec_draft(case, dtype)
    objective = DFlashObjective(**case.objective)

    def gradients(params: Any, arrays: dict[str, Array]) -> tuple[Any, Any]:
        batch = spec_batch(arrays, dtype)
        return gradients_dflash(config, objective, params, target, vocabulary, batch)

    return _spec_steps(optimizer, params, gradients, batches)


def _spec_eagle3(
    case: Case, optimizer: Any, batches: list[dict[str, Array]], dtype: str
) -> Iterator[tuple[float, Any]]:
    import jax.numpy as jnp
    from jax import tree_util

    from jaxdraft.eagle3_config import Eagle3Config, Eagle3Objective
    from jaxdraft.eagle3_evaluate import Eagle3Batch, gradients_eagle3
    from jaxdraft.evaluate import Target
    from jaxdraft.vocabulary import map_from_buffers

    weights = as_dtype(case.group("weights"), dtype)
    vocabulary = map_from_buffers(*(weights.pop(name) for name in BUFFERS))
    frozen = as_dtype(case.group("target"), dtype)
    target = Target(*(jnp.asarray(frozen[f"{n}.weight"]) for n in ("embed_tokens", "lm_head")))
    config = Eagle3Config.from_hf(case.config)
    objective = Eagle3Objective(**case.extra["eagle3"], **case.objective)

    def gradients(params: Any, arrays: dict[str, Array]) -> tuple[Any, Any]:
        batch = Eagle3Batch(**{n: jnp.asarray(v) for n, v in as_dtype(arrays, dtype).items()})
        return gradients_eagle3(config, objective, params, target, vocabulary, batch)

    params = tree_util.tree_map(jnp.asarray, to_flax(weights, EAGLE3_TABLE))
    return _spec_steps(optimizer, params, gradients, batches)


def _spec_steps(
    optimizer: Any,
    params: Any,
    gradients: Callable[[Any, dict[str, Array]], tuple[Any, Any]],
    batches: list[dict[str, Array]],
) -> Iterator[tuple[float, Any]]:
    """Compose §14 of the spec's parts for a draft that `train_step` does not train.

    Order as there: spike guard on the norm, clip and AdamW's direction, rate of the step.
    """
    import jax
    import optax

    from jaxdraft import training

    transformation = training.make_optimizer(optimizer)
    moments = transformation.init(params)
    guard = training.fresh_guard(jax.tree.leaves(params)[0].dtype)
    for step, arrays in enumerate(batches, start=1):
        evaluation, grads = gradients(params, arrays)
        with jax.numpy_dtype_promotion("standard"):  # optax mixes its own float32 scalars in
            norm = optax.tree.norm(grads)
            guard, spike = training.spike_guard(guard, norm, optimizer.spike_multiple)
            if not spike:
                direction, moments = transformation.update(grads, moments, params)
                rate = training.rate(optimizer, step)
                params = jax.tree.map(
                    lambda p, d, r=rate: p - r.astype(p.dtype) * d, params, direction
                )
        yield float(evaluation.loss), params
