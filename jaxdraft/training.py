"""Learning rate, spike guard, AdamW and the training step (sheet §14), with optax."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from jaxdraft.blocks import draw_padded_anchors
from jaxdraft.checks import is_real
from jaxdraft.config import DraftConfig, ObjectiveConfig
from jaxdraft.evaluate import Batch, Evaluation, Target, loss_and_evaluation, working_dtype
from jaxdraft.objective import check_supervision, coefficients
from jaxdraft.vocabulary import VocabularyMap

W1 = "markov_w1"


@dataclass(frozen=True)
class OptimizerConfig:
    """The numbers of §14. `max_grad_norm` is c (infinity clips nothing).

    `spike_multiple` is how far above the running mean a gradient norm may be (`spike_guard`;
    infinity skips nothing).

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
    spike_multiple: float | int = 10.0

    def __post_init__(self) -> None:
        for name in ("warmup_steps", "total_steps"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise ValueError(f"{name}: expected a whole number, got {value!r}")
        if not 0 <= self.warmup_steps < self.total_steps:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps}, total_steps = {self.total_steps}: expected "
                "0 <= warmup_steps < total_steps"
            )
        for name in ("peak_rate", "epsilon"):
            value = getattr(self, name)
            if not (is_real(value) and value > 0):
                raise ValueError(f"{name}: expected a finite number > 0, got {value!r}")
        for name in ("final_rate", "weight_decay"):
            value = getattr(self, name)
            if not (is_real(value) and value >= 0):
                raise ValueError(f"{name}: expected a finite number >= 0, got {value!r}")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not (is_real(value) and 0 <= value < 1):
                raise ValueError(f"{name}: expected 0 <= {name} < 1, got {value!r}")
        if isinstance(self.max_grad_norm, bool) or not self.max_grad_norm > 0:
            raise ValueError(
                f"max_grad_norm: expected a number > 0, got {self.max_grad_norm!r}; infinity "
                "clips nothing"
            )
        if isinstance(self.spike_multiple, bool) or not self.spike_multiple > 1:
            raise ValueError(
                f"spike_multiple: expected a number > 1, got {self.spike_multiple!r}; infinity "
                "skips nothing"
            )


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


class SpikeGuard(NamedTuple):
    """The gradient norms so far: the mean of their logarithms, and how many they are."""

    mean_log: Float[Array, ""]
    seen: Int[Array, ""]


def spike_guard(
    guard: SpikeGuard, norm: Float[Array, ""], multiple: Float[Array, ""] | float | int
) -> tuple[SpikeGuard, Bool[Array, ""]]:
    """Whether a gradient norm is a spike: above `multiple` times the mean of those before it.

    The mean is geometric, exp(1/n·Σ log‖g_s‖) over the n norms before this one that were no
    spikes: a spike must not raise the limit for the next one. Without a norm before it nothing is
    a spike; a norm of 0 is none and, having no logarithm, does not count. Where healthy norms
    rise past the limit for good, every step is skipped from there on: `StepReport.taken` shows it.

    Args:
        guard: the norms before this step.
        norm: ‖g‖ of the step, reduced and finite, before the clip.
        multiple: 10 in §14's optimizer.

    Returns:
        The norms up to this step, and whether it is a spike.

    Source: sheet §14 ("spike guard"); field note 19.

    >>> seen = SpikeGuard(jnp.log(2.0), jnp.array(3))
    >>> [bool(spike_guard(seen, jnp.array(norm), 10)[1]) for norm in (19.0, 21.0)]
    [False, True]
    """
    mean, n = guard
    spike = (n > 0) & (norm > multiple * jnp.exp(mean))
    counts = ~spike & (norm > 0)
    log = jnp.log(jnp.where(counts, norm, 1))
    moved = mean + (log - mean) / (n + 1).astype(mean.dtype)
    return SpikeGuard(jnp.where(counts, moved, mean), n + counts.astype(n.dtype)), spike


def make_optimizer(optimizer: OptimizerConfig) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW's direction, which a step follows for −rate(t).

    The clip's factor is min(1, c/‖g‖), nothing added to the norm. The direction is
    m̂/(√v̂ + ε) + decay·θ; moments are kept in the dtype of the parameters and bias-corrected by
    the number of updates, which a skipped step does not raise; rate(t) is the step's own.

    Args:
        optimizer: the numbers.

    Returns:
        An optax transformation from gradients to directions.

    Source: sheet §14.
    """
    return optax.chain(
        optax.clip_by_global_norm(optimizer.max_grad_norm),
        optax.scale_by_adam(b1=optimizer.beta1, b2=optimizer.beta2, eps=optimizer.epsilon),
        optax.add_decayed_weights(optimizer.weight_decay, mask=decays),
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class TrainState:
    """All that a step reads besides its batch and key. `step` counts skipped steps too.

    `params` are the master weights. `num_anchors` is N of §3.1, or None where every batch brings
    its anchors. `target_config` is the target's config as JSON with sorted keys, or None where
    none was given; a checkpoint needs it (contracts §3).
    """

    step: Int[Array, ""]
    params: Any
    optimizer_state: Any
    guard: SpikeGuard
    target: Target
    vocabulary: VocabularyMap
    config: DraftConfig = field(metadata={"static": True})
    objective: ObjectiveConfig = field(metadata={"static": True})
    optimizer: OptimizerConfig = field(metadata={"static": True})
    num_anchors: int | None = field(default=None, metadata={"static": True})
    target_config: str | None = field(default=None, metadata={"static": True})


class StepReport(NamedTuple):
    """What a step saw: its evaluation before the update, ‖g‖ before the clip, and rate(t).

    `taken` is False for a step that changed no weight: a spike, or one that is not finite.
    """

    evaluation: Evaluation
    gradient_norm: Float[Array, ""]
    rate: Float[Array, ""]
    taken: Bool[Array, ""]


def start(
    config: DraftConfig,
    objective: ObjectiveConfig,
    optimizer: OptimizerConfig,
    params: Any,
    target: Target,
    vocabulary: VocabularyMap,
    num_anchors: int | None = None,
    target_config: Mapping[str, Any] | None = None,
) -> TrainState:
    """The state before step 1.

    Args:
        config: what the draft is.
        objective: the coefficients.
        optimizer: the numbers of §14.
        params: the parameter tree: the master weights, float32 or float64.
        target: E and U.
        vocabulary: the map.
        num_anchors: N, for steps that draw their anchors; None where batches bring them.
        target_config: the target's parsed config.json; a state without one cannot be saved.

    Returns:
        A state with zero moments, that has seen no gradient norm.

    Raises:
        ValueError: a parameter of another dtype (named), parameters of several dtypes, an
            `num_anchors` below 1, or a config that is no JSON.

    Source: sheet §11, §14.
    """
    check_masters(params)
    if num_anchors is not None and (
        not isinstance(num_anchors, int) or isinstance(num_anchors, bool) or num_anchors < 1
    ):
        raise ValueError(f"num_anchors: expected a whole number >= 1 or None, got {num_anchors!r}")
    return TrainState(
        step=jnp.zeros((), dtype=int),
        params=params,
        optimizer_state=make_optimizer(optimizer).init(params),
        guard=fresh_guard(working_dtype(params)),
        target=target,
        vocabulary=vocabulary,
        config=config,
        objective=objective,
        optimizer=optimizer,
        num_anchors=num_anchors,
        target_config=None if target_config is None else as_json(target_config),
    )


def fresh_guard(dtype: DTypeLike) -> SpikeGuard:
    """The guard before step 1: no norm seen.

    Args:
        dtype: the working dtype.

    Returns:
        Two zeros.
    """
    return SpikeGuard(jnp.zeros((), dtype), jnp.zeros((), int))


def check_masters(params: Any) -> None:
    """Refuse parameters that are no master weights.

    Args:
        params: the parameter tree.

    Raises:
        ValueError: a parameter is neither float32 nor float64; the message names it and its dtype.

    Source: sheet §11, §14 ("float32 moments and master weights"); field note 14.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if leaf.dtype not in (jnp.float32, jnp.float64):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(
                f"params: {name} is {leaf.dtype}; master weights are float32 (or float64, for "
                "tests), in which small updates are not rounded away: cast the tree"
            )


def as_json(target_config: Mapping[str, Any]) -> str:
    """A parsed config as JSON with sorted keys: equal configs give equal text.

    Args:
        target_config: the target's parsed config.json.

    Returns:
        The text.

    Raises:
        ValueError: a value that JSON cannot hold.

    >>> as_json({"b": [1.5, None], "a": True})
    '{"a": true, "b": [1.5, null]}'
    """
    try:
        return json.dumps(target_config, sort_keys=True, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"target_config: expected what json.loads gives for the target's config.json; {error}"
        ) from error


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

    In §14's order: reduce, check finite, spike guard, clip, update masters, cast. The batch is the
    whole step's, the rows of all ranks and micro-batches in one array: the reduction over them is
    `objective.weighted_sums`' sum over rows, and nothing is communicated. The draft computes in
    the masters' dtype: the cast changes nothing.

    It raises nothing: a step that is not finite, or whose gradient norm is a spike, changes
    parameters, moments and guard nowhere. Give the report to `check_step`, and drop the new state
    when that raises. A spike raises nothing: the run goes on with the next batch and the next
    rate.

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
    objective, numbers = state.objective, state.optimizer
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
    step = state.step + 1
    lr = rate(numbers, step)
    # optax mixes its own float32 scalars in: it does not run under strict promotion.
    with jax.numpy_dtype_promotion("standard"):
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(seen.loss) & jnp.isfinite(norm)
        guard, spike = spike_guard(state.guard, norm, numbers.spike_multiple)
        direction, moments = make_optimizer(numbers).update(
            grads, state.optimizer_state, state.params
        )
        params = jax.tree.map(lambda θ, u: θ - lr.astype(θ.dtype) * u, state.params, direction)
    taken = finite & ~spike
    before = state.params, state.optimizer_state, state.guard
    params, moments, guard = jax.tree.map(
        partial(jnp.where, taken), (params, moments, guard), before
    )
    after = replace(state, step=step, params=params, optimizer_state=moments, guard=guard)
    return after, StepReport(seen, norm, lr, taken)


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
