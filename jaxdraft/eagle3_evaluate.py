"""EAGLE3 from arrays to an evaluation and its gradients: §13 of the sheet, put together."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxdraft import teacher
from jaxdraft.blocks import at_positions
from jaxdraft.eagle3 import (
    Eagle3Draft,
    Eagle3Output,
    leads_to_supervised,
    read_positions,
    supervised_slots,
)
from jaxdraft.eagle3_config import Eagle3Config, Eagle3Objective
from jaxdraft.eagle3_objective import (
    Eagle3Slots,
    acceptance,
    check_supervision,
    counted_slots,
    draft_choice,
    metric_rows,
    soft_cross_entropy,
    step_losses,
    teacher_choice,
    total_loss,
)
from jaxdraft.evaluate import Target, fitting_map, working_dtype
from jaxdraft.metrics import Pair
from jaxdraft.objective import counted_rows
from jaxdraft.vocabulary import VocabularyMap, kept_ids


class Eagle3Batch(NamedTuple):
    """Token ids x, loss mask m, three captured states F, final states T."""

    input_ids: Int[Array, "batch seq"]
    loss_mask: Float[Array, "batch seq"]
    hidden_states: Float[Array, "batch seq captured"]
    target_last_hidden_states: Float[Array, "batch seq hidden"]


class Eagle3Evaluation(NamedTuple):
    """What a draft is worth on a batch; slots outside `eval_mask` are unspecified."""

    loss: Float[Array, ""]
    metrics: dict[str, Pair]
    accept_probability: Float[Array, "batch steps seq"]
    eval_mask: Bool[Array, "batch steps seq"]
    draft_logits: Float[Array, "batch steps seq kept"]
    hidden: Float[Array, "batch steps seq hidden"]


def run_draft(
    config: Eagle3Config,
    objective: Eagle3Objective,
    params: Any,
    target: Target,
    batch: Eagle3Batch,
) -> Eagle3Output:
    """The training-time test on a batch, every step from the data's tokens.

    Args:
        config: what the draft is.
        objective: gives n.
        params: the parameter tree.
        target: gives E.
        batch: the batch.

    Returns:
        h and z of every slot.

    Source: sheet §13.
    """
    rows, seq = batch.input_ids.shape
    at = read_positions(objective.steps, seq)
    tokens = at_positions(batch.input_ids, jnp.broadcast_to(at[None], (rows, *at.shape)))
    in_use = leads_to_supervised(batch.loss_mask)[:, :, None]
    return Eagle3Draft(config).apply(
        {"params": params},
        jnp.where(in_use, batch.hidden_states, 0),
        target.embed_tokens[tokens],
    )


def read_slots(
    config: Eagle3Config,
    target: Target,
    vocabulary: VocabularyMap,
    batch: Eagle3Batch,
    z: Float[Array, "batch steps seq kept"],
) -> Eagle3Slots:
    """What every slot says against what it is taught.

    Args:
        config: says whether the draft prunes.
        target: gives U.
        vocabulary: the map.
        batch: gives m and T.
        z: the draft's logits [batch steps seq kept].

    Returns:
        The slots, finite where M is False.

    Source: sheet §13; field note 9.
    """
    steps, seq = z.shape[1:3]
    kept = kept_ids(vocabulary)
    mask = supervised_slots(batch.loss_mask, steps)
    at = jnp.broadcast_to(read_positions(steps, seq)[None], mask.shape)
    states = at_positions(batch.target_last_hidden_states, at)
    teacher_z = counted_rows(mask, teacher.teacher_logits(states, target.lm_head))
    z = counted_rows(mask, z)
    conditional = teacher.conditional_teacher(teacher_z, kept)
    choice = teacher_choice(teacher_z)
    return Eagle3Slots(
        mask=mask,
        counted=counted_slots(mask, choice, jnp.asarray(vocabulary.t2d)),
        choice=choice,
        guess=draft_choice(z, kept),
        ce=soft_cross_entropy(z, conditional),
        accept=acceptance(z, conditional, teacher.true_teacher(teacher_z, kept), config.prunes),
    )


def evaluation(
    params: Any,
    config: Eagle3Config,
    objective: Eagle3Objective,
    target: Target,
    vocabulary: VocabularyMap,
    batch: Eagle3Batch,
) -> tuple[Float[Array, ""], Eagle3Evaluation]:
    """Loss, metrics and slot arrays of one batch on one rank; traceable, raises nothing.

    Args:
        params: the parameter tree.
        config: what the draft is (static).
        objective: how many steps (static).
        target: E and U.
        vocabulary: the map.
        batch: the batch.

    Returns:
        The loss, and the evaluation that holds it, as `jax.value_and_grad` wants them.

    Source: sheet §13.
    """
    out = run_draft(config, objective, params, target, batch)
    slots = read_slots(config, target, vocabulary, batch, out.logits)
    losses = step_losses(slots.ce, slots.counted, batch.input_ids.size)
    value = total_loss(losses)
    return value, Eagle3Evaluation(
        loss=value,
        metrics=metric_rows(slots),
        accept_probability=slots.accept,
        eval_mask=slots.mask,
        draft_logits=out.logits,
        hidden=out.hidden,
    )


_evaluation = partial(jax.jit, static_argnums=(1, 2))(evaluation)
_gradients = partial(jax.jit, static_argnums=(1, 2))(jax.value_and_grad(evaluation, has_aux=True))


def evaluate_eagle3(
    config: Eagle3Config,
    objective: Eagle3Objective,
    params: Any,
    target: Target,
    vocabulary: VocabularyMap | None,
    batch: Eagle3Batch,
) -> Eagle3Evaluation:
    """What an EAGLE3 draft is worth on a batch (one rank, one micro-batch).

    Args:
        config: what the draft is.
        objective: how many steps.
        params: the parameter tree; its dtype is the working dtype.
        target: E and U, each [V, H].
        vocabulary: the map; None only for an unpruned draft, which has the identity.
        batch: the batch.

    Returns:
        Loss, metric pairs and slot arrays.

    Raises:
        ValueError: nothing is supervised or in the vocabulary (the words of §8), or the map does
            not fit the config.

    Source: sheet §13.
    """
    working_dtype(params)
    vocabulary = fitting_map(config, vocabulary)
    _, result = _evaluation(params, config, objective, target, vocabulary, batch)
    _check(result)
    return result


def gradients_eagle3(
    config: Eagle3Config,
    objective: Eagle3Objective,
    params: Any,
    target: Target,
    vocabulary: VocabularyMap | None,
    batch: Eagle3Batch,
) -> tuple[Eagle3Evaluation, Any]:
    """`evaluate_eagle3`, and d loss / d parameter for every parameter.

    The gradient of a step runs through the states of all steps before it. The embedding and the
    target's head are frozen.

    Args:
        config: what the draft is.
        objective: how many steps.
        params: the parameter tree; its dtype is the working dtype.
        target: E and U, each [V, H].
        vocabulary: the map; None only for an unpruned draft, which has the identity.
        batch: the batch.

    Returns:
        The evaluation, and gradients in the tree of the parameters.

    Raises:
        ValueError: as `evaluate_eagle3`.

    Source: sheet §13.
    """
    working_dtype(params)
    vocabulary = fitting_map(config, vocabulary)
    (_, result), grads = _gradients(params, config, objective, target, vocabulary, batch)
    _check(result)
    return result, grads


def _check(result: Eagle3Evaluation) -> None:
    counted, supervised = result.metrics["in_vocabulary_step"]
    check_supervision(float(supervised[0]), float(counted[0]))
