"""Learning rate, AdamW and the training step (sheet §14), with optax."""

import math
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, Key

from jaxdraft.blocks import draw_padded_anchors
from jaxdraft.config import DraftConfig, ObjectiveConfig
from jaxdraft.evaluate import Batch, Evaluation, Target, loss_and_evaluation, working_dtype
from jaxdraft.objective import check_supervision, coefficients
from jaxdraft.vocabulary import VocabularyMap

W1 = "markov_w1"


@dataclass(frozen=True)
class OptimizerConfig:
    """The numbers of §14. `max_grad_norm` is c (infinity clips nothing).

    Raises:
        ValueError: a number is out of its range; the message names it.
    """

    peak_rate: float | int
    warmup_steps: int
    total_steps: int
    max_grad_norm: float | int
    final_rate: float | int = 0.0
    beta1: float | int = 0.9
    beta2: float | int = 0.95
    epsilon: float | int = 1e-8
    weight_decay: float | int = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps}, total_steps = {self.total_steps}: expected "
                "0 <= warmup_steps < total_steps"
            )
        for name in ("peak_rate", "max_grad_norm", "epsilon"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}: expected a number > 0, got {getattr(self, name)!r}")
        for name in ("final_rate", "weight_decay"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: expected a number >= 0, got {getattr(self, name)!r}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name}: expected 0 <= {name} < 1, got {getattr(self, name)}")


def rate(optimizer: OptimizerConfig, t: Int[Array, ""] | int) -> Float[Array, ""]:
    """The learning rate of step t, counted from 1: warm-up, then cosine.

    peak·t/warm for t ≤ warm, then final + (peak − final)·½(1 + cos(π·(t−warm)/(total−warm)));
    past the last step it stays at final.

    Args:
        optimizer: peak, warm, total, final.
        t: the step, from 1.

    Returns:
        A scalar; rate(1) > 0, rate(total) = final.

    Source: sheet §14.

    >>> [round(float(rate(OptimizerConfig(1.0, 2, 6, 1.0), t)), 4) for t in range(1, 7)]
    [0.5, 1.0, 0.8536, 0.5, 0.1464, 0.0]
    """
    peak, final = optimizer.peak_rate, optimizer.final_rate
    warm, total = optimizer.warmup_steps, optimizer.total_steps
    step = jnp.minimum(jnp.asarray(t, dtype=float), total)
    rising = peak * step / max(warm, 1)
    falling = final + (peak - final) * 0.5 * (1 + jnp.cos(math.pi * (step - warm) / (total - warm)))
    return jnp.where(step <= warm, rising, falling)


def decays(params: Any) -> Any:
    """Which parameters weight decay touches: all but norms, biases and W1.

    Args:
        params: the parameter tree.

    Returns:
        The same tree of booleans.

    Source: sheet §14.
    """

    def touched(path: tuple[Any, ...], _: Array) -> bool:
        names = [entry.key for entry in path]
        return names[-1] not in ("scale", "bias") and W1 not in names

    return jax.tree_util.tree_map_with_path(touched, params)


def make_optimizer(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW with decoupled decay at rate(t).

    The clip's factor is min(1, c/‖g‖), nothing added to the norm; moments are bias-corrected and
    kept in the dtype of the parameters.

    Args:
        optimizer: the numbers.

    Returns:
        An optax transformation, step t counted from 1.

    Source: sheet §14.
    """
    return optax.chain(
        optax.clip_by_global_norm(optimizer.max_grad_norm),
        optax.adamw(
            # optax counts steps from 0.
            learning_rate=lambda count: rate(optimizer, count + 1),
            b1=optimizer.beta1,
            b2=optimizer.beta2,
            eps=optimizer.epsilon,
            weight_decay=optimizer.weight_decay,
            mask=decays,
        ),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class TrainState:
    """All that a step reads besides its batch and key. `step` counts the steps that were taken.

    `num_anchors` is N of §3.1, or None where every batch brings its anchors.
    """

    step: Int[Array, ""]
    params: Any
    optimizer_state: Any
    target: Target
    vocabulary: VocabularyMap
    config: DraftConfig = field(metadata={"static": True})
    objective: ObjectiveConfig = field(metadata={"static": True})
    optimizer: OptimizerConfig = field(metadata={"static": True})
    num_anchors: int | None = field(default=None, metadata={"static": True})


class StepReport(NamedTuple):
    """What a step saw: its evaluation before the update, ‖g‖ before the clip, and rate(t)."""

    evaluation: Evaluation
    gradient_norm: Float[Array, ""]
    rate: Float[Array, ""]


def start(
    config: DraftConfig,
    objective: ObjectiveConfig,
    optimizer: OptimizerConfig,
    params: Any,
    target: Target,
    vocabulary: VocabularyMap,
    num_anchors: int | None = None,
) -> TrainState:
    """The state before step 1.

    Args:
        config: what the draft is.
        objective: the coefficients.
        optimizer: the numbers of §14.
        params: the parameter tree (master weights).
        target: E and U.
        vocabulary: the map.
        num_anchors: N, for steps that draw their anchors; None where batches bring them.

    Returns:
        A state with zero moments.
    """
    return TrainState(
        step=jnp.zeros((), dtype=int),
        params=params,
        optimizer_state=make_optimizer(optimizer).init(params),
        target=target,
        vocabulary=vocabulary,
        config=config,
        objective=objective,
        optimizer=optimizer,
        num_anchors=num_anchors,
    )


def with_anchors(batch: Batch, key: Key[Array, "..."], N: int) -> Batch:
    """The batch with anchors drawn from the key in the place of its own.

    Args:
        batch: ids, mask and states; its anchors are not read.
        key: one key for the batch, or one per row (`blocks.sample_keys`).
        N: the most anchors a row may have.

    Returns:
        The batch at a fixed width (`blocks.draw_padded_anchors`).

    Source: sheet §3.1.
    """
    anchors, keep = draw_padded_anchors(key, batch.loss_mask, N)
    return batch._replace(anchor_positions=anchors, block_keep_mask=keep)


@jax.jit
def train_step(
    state: TrainState, batch: Batch, key: Key[Array, "..."] | None = None
) -> tuple[TrainState, StepReport]:
    """One optimizer step, a pure function of state, batch and key.

    It raises nothing: give the report to `check_step`, and drop the new state when that raises.

    Args:
        state: the state after t−1 steps.
        batch: the batch of step t.
        key: what the anchors are drawn from, `state.num_anchors` of them; None keeps the batch's.

    Returns:
        The state after t steps, and what the step saw.

    Raises:
        ValueError: a key is given and the state has no `num_anchors`.

    Source: sheet §3.1, §14.
    """
    if key is not None:
        if state.num_anchors is None:
            raise ValueError("num_anchors: a key to draw from needs the number; give it to `start`")
        batch = with_anchors(batch, key, state.num_anchors)
    objective = state.objective
    alphas = coefficients(objective, working_dtype(state.params))
    (_, seen), grads = jax.value_and_grad(loss_and_evaluation, has_aux=True)(
        state.params,
        state.config,
        objective.detach_confidence,
        alphas,
        state.target,
        state.vocabulary,
        batch,
    )
    # optax mixes its own float32 scalars in: it does not run under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        updates, optimizer_state = make_optimizer(state.optimizer).update(
            grads, state.optimizer_state, state.params
        )
        params = optax.apply_updates(state.params, updates)
        norm = optax.tree.norm(grads)
    step = state.step + 1
    after = replace(state, step=step, params=params, optimizer_state=optimizer_state)
    return after, StepReport(seen, norm, rate(state.optimizer, step))


def check_step(objective: ObjectiveConfig, report: StepReport) -> None:
    """Refuse a step that learnt from nothing or came out non-finite.

    Args:
        objective: gives α_ce.
        report: what `train_step` saw.

    Raises:
        ValueError: the two errors of §8.
        FloatingPointError: the loss or the gradient norm is not finite.

    Source: sheet §8, §14 ("check finite").
    """
    metrics = report.evaluation.metrics
    check_supervision(objective, float(metrics["l1_loss"][1]), float(metrics["ce_loss"][1]))
    loss, norm = float(report.evaluation.loss), float(report.gradient_norm)
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise FloatingPointError(
            f"the step is not finite: loss {loss}, gradient norm {norm}; keep the state before it"
        )
