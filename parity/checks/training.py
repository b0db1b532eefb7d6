"""The same training run on both sides: torch AdamW against optax, step by step (spec sheet §14)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parity.cases import Array, Case, as_dtype
from parity.checks.base import Check, CheckResult, Measured, Plan, record
from parity.checks.eagle3 import port_eagle3_draft
from parity.checks.optimizer import compare_masters, masters_case
from parity.checks.ranks import RANKS_RUN, compare_ranks
from parity.compare import relative_error
from parity.configurations import BY_NAME
from parity.draw import draw_recipe
from parity.names import BUFFERS, EAGLE3_TABLE, TABLE, to_flax, to_torch
from parity.recipes import OPTIMIZER
from parity.sides import (
    Answer,
    port_batch,
    port_draft,
    port_objective,
    setup_jax,
    spec_batch,
    spec_draft,
)
from parity.tolerances import EXACT, TRAINING

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
class AfterStep:
    """One side after a step: the loss before the update, then parameters and both moments."""

    loss: float
    parameters: dict[str, Array]
    first: dict[str, Array]
    second: dict[str, Array]


@dataclass(frozen=True)
class TrajectoryStep:
    """One step of both runs: the losses before the update, worst parameter and moment after it."""

    step: int
    loss_port: float
    loss_spec: float
    worst_name: str
    worst_error: float
    moment_name: str = ""
    moment_error: float = 0.0

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
    for index, (port, spec) in enumerate(runs, start=1):
        worst, error = _worst(port.parameters, spec.parameters)
        moments = [
            (f"{which} moment of {name}", off)
            for which, (name, off) in (
                ("first", _worst(port.first, spec.first, scaled=True)),
                ("second", _worst(port.second, spec.second, scaled=True)),
            )
        ]
        moment = max(moments, key=lambda pair: pair[1])
        result.append(TrajectoryStep(index, port.loss, spec.loss, worst, error, *moment))
        on_step(index, len(batches))
    return result


def _worst(
    got: Mapping[str, Array], expected: Mapping[str, Array], scaled: bool = False
) -> tuple[str, float]:
    """Return (name, error) of the tensor that is furthest off; `scaled` without the floor.

    Second moments are squares of small gradients: beside a floor of 1e-2 they would not be seen.
    """
    if set(got) != set(expected):
        return ", ".join(sorted(set(got) ^ set(expected))), float("inf")
    errors = {}
    for name, value in expected.items():
        size = max(float(np.abs(value).max(initial=0.0)), 1e-30) if scaled else 1.0
        errors[name] = relative_error(got[name] / size, value / size)
    # Before the first update there are no moments.
    return max(errors.items(), key=lambda item: item[1]) if errors else ("", 0.0)


def port_training(case: Case, dtype: str) -> Answer:
    """Answer a training case with the port: every step's loss, and the weights after the last."""
    return _as_answer(_port_run(case, step_batches(case), dtype))


def spec_training(case: Case, dtype: str) -> Answer:
    """Answer a training case with the spec: every step's loss, and the weights after the last."""
    return _as_answer(_spec_run(case, step_batches(case), dtype))


def _as_answer(run: Iterator[AfterStep]) -> Answer:
    losses: list[float] = []
    weights: dict[str, Array] = {}
    for after in run:
        losses.append(after.loss)
        weights = after.parameters  # the last step's are the answer
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


def _port_run(case: Case, batches: list[dict[str, Array]], dtype: str) -> Iterator[AfterStep]:
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
        rows = range(len(arrays["input_ids"])) if case.extra.get(MICRO_BATCHES) else ()
        parts = [{name: v[row : row + 1] for name, v in arrays.items()} for row in rows] or [arrays]
        micro_batches = [port_batch(part, dtype) for part in parts]
        report = training_step(draft, optimizer, micro_batches, target, objective, step)
        moments = optimizer.moments()
        yield AfterStep(
            report.loss,
            {name: p.detach().numpy().copy() for name, p in draft.named_parameters()},
            {name: first.numpy().copy() for name, (first, _) in moments.items()},
            {name: second.numpy().copy() for name, (_, second) in moments.items()},
        )


def _spec_run(case: Case, batches: list[dict[str, Array]], dtype: str) -> Iterator[AfterStep]:
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
    for loss, *trees in run:
        yield AfterStep(loss, *(to_torch(tree, table) for tree in trees))


# A loss, then parameters and moments as trees.
SpecRun = Iterator[tuple[float, Any, Any, Any]]


def _moments(state: Any) -> tuple[Any, Any]:
    """Read AdamW's two moments from the state of optax's chain."""
    import optax

    return optax.tree.get(state, "mu"), optax.tree.get(state, "nu")


def _spec_dspark(
    case: Case, optimizer: Any, batches: list[dict[str, Array]], dtype: str
) -> SpecRun:
    from jaxdraft import training
    from jaxdraft.config import ObjectiveConfig

    config, params, target, vocabulary = spec_draft(case, dtype)
    objective = ObjectiveConfig(**case.objective)
    state = training.start(config, objective, optimizer, params, target, vocabulary)
    for arrays in batches:
        state, report = training.train_step(state, spec_batch(arrays, dtype))
        training.check_step(objective, report)
        yield float(report.evaluation.loss), state.params, *_moments(state.optimizer_state)


def _spec_dflash(
    case: Case, optimizer: Any, batches: list[dict[str, Array]], dtype: str
) -> SpecRun:
    from jaxdraft.dflash import DFlashObjective, gradients_dflash

    config, params, target, vocabulary = spec_draft(case, dtype)
    objective = DFlashObjective(**case.objective)

    def gradients(params: Any, arrays: dict[str, Array]) -> tuple[Any, Any]:
        batch = spec_batch(arrays, dtype)
        return gradients_dflash(config, objective, params, target, vocabulary, batch)

    return _spec_steps(optimizer, params, gradients, batches)


def _spec_eagle3(
    case: Case, optimizer: Any, batches: list[dict[str, Array]], dtype: str
) -> SpecRun:
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
) -> SpecRun:
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
        yield float(evaluation.loss), params, *_moments(moments)


# --- The suite's check --------------------------------------------------------------------------

NAME = "training"
STEPS, FEW_STEPS = 50, 12  # the latter in a quick run, of all but one family
MICRO_BATCHES = "micro_batches"  # of the case: the port takes each row of a batch by itself
# What is trained: a configuration of the suite, and what its optimizer does besides.
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "pruned-vanilla": ("pruned-vanilla", {}),
    "pruned-vanilla, micro-batches": ("pruned-vanilla", {MICRO_BATCHES: True}),
    "dflash-pruned": ("dflash-pruned", {}),
    "dpace-both": ("dpace-both", {}),
    "eagle3-pruned": ("eagle3-pruned", {}),
    # As the next, in the spec's own step, whose state a skipped step must leave as it was.
    "pruned-vanilla, spikes": (
        "pruned-vanilla",
        {"spike_multiple": 1.07, "peak_rate": 1e-4, "final_rate": 0.0, "max_grad_norm": 12.0},
    ),
    # A norm that is 1.3 times the mean is a spike here, at a rate so small that norms do not just
    # fall: 5 of 12 steps are skipped, and a guard that learns from spikes skips others. Norms stand
    # on both sides of the clip.
    "dflash-pruned, spikes": (
        "dflash-pruned",
        {"spike_multiple": 1.3, "peak_rate": 1e-4, "final_rate": 0.0, "max_grad_norm": 12.0},
    ),
}
MASTERS_RUN = "bf16 masters"


def drawn_run(configuration: str, seed: int, steps: int, **numbers: Any) -> Case:
    """Draw a training case: weights of a configuration, and as many batches of it.

    Half of the tokens are kept ones, so that every batch has labels to learn. `numbers` replace the
    optimizer's: warm-up of 3 steps, weight decay 0.1, a clip at 1.
    """
    recipe = BY_NAME[configuration].recipe
    case = draw_recipe(recipe, 1000 * seed + 3)
    tensors = {n: v for n, v in case.tensors.items() if not n.startswith("batch/")}
    kept = np.nonzero(tensors["weights/t2d"])[0]
    for step in range(steps):
        batch = draw_recipe(recipe, 1000 * seed + 100 + step).group("batch")
        rows, seq = batch["input_ids"].shape
        random = np.random.default_rng([seed, step])
        batch["input_ids"][:, ::2] = random.choice(kept, (rows, seq // 2))
        tensors |= {f"steps/{step}/{what}": value for what, value in batch.items()}
    optimizer = OPTIMIZER | {"warmup_steps": 3, "total_steps": steps} | numbers
    return replace(case, tensors=tensors, extra=case.extra | {"optimizer": optimizer})


def run_training(plan: Plan) -> CheckResult:
    """Train every family on both sides; compare losses, moments and parameters step by step."""
    result, started = CheckResult(NAME), time.process_time()
    chosen = [name for name in (*RUNS, MASTERS_RUN, RANKS_RUN) if plan.wants(name)]
    for done, name in enumerate(chosen, start=1):
        if name == RANKS_RUN:
            record({NAME: result}, name, None, compare_ranks(plan.seed))
        elif name == MASTERS_RUN:
            case = masters_case(plan.seed)
            record({NAME: result}, name, case, compare_masters(case), "float32")
        else:
            base, numbers = RUNS[name][0], dict(RUNS[name][1])
            split = numbers.pop(MICRO_BATCHES, False)
            few = plan.quick and name != "pruned-vanilla"
            case = drawn_run(base, plan.seed, FEW_STEPS if few else STEPS, **numbers)
            case = replace(case, extra=case.extra | {MICRO_BATCHES: split})
            measured, curve = compare_runs(case)
            record({NAME: result}, name, case, measured)
            result.curves[name] = curve
        plan.progress(done, len(chosen))
        if plan.first_only and result.findings:
            break
    result.seconds = time.process_time() - started
    return result


def compare_runs(case: Case, dtype: str = "float64") -> tuple[list[Measured], list[float]]:
    """Return every step's comparisons, and the worst parameter's error after each step."""
    try:
        steps = trajectories(case, dtype)
    except Exception as problem:  # noqa: BLE001 (a side that breaks off is a disagreement)
        stage = f"a step ({type(problem).__name__}: {problem})"
        return [Measured(NAME, stage, float("inf"), EXACT)], []
    measured = []
    for step in steps:
        for what, error, allowed in (
            ("loss", step.loss_error, TRAINING["loss"]),
            (step.moment_name, step.moment_error, TRAINING["moments"]),
            (f"parameter {step.worst_name}", step.worst_error, TRAINING["parameters"]),
        ):
            measured.append(Measured(NAME, f"step {step.step}: {what}", error, allowed))
    return measured, [step.worst_error for step in steps]


CHECK = Check(
    NAME,
    "AdamW with warm-up and cosine, clip, weight decay and spike guard over 50 steps of every "
    "family, once with each row a micro-batch: losses, both moments, every parameter, step by "
    "step; float32 masters of bf16 weights",
    ("§8", "§11", "§14"),
    run_training,
    (
        "real ranks (two are pretended), resumed runs: the port's tests have them",
        "the draw of the anchors, which each side does with its own generator",
        "DFlash and EAGLE3 steps of the spec are composed of its parts here: it has no such step",
    ),
)
