"""EAGLE3's terms, loss and metrics (sheet §13).

Slots are [batch steps seq]: index t of step i. What is not defined here is §7's and §8's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxdraft.metrics import Pair
from jaxdraft.objective import l1_distance, overlap, overlap_from_l1

STEP_DECAY = 0.8


class Eagle3Slots(NamedTuple):
    """What the loss and the metrics are computed from; unspecified where `mask` is False."""

    mask: Bool[Array, "batch steps seq"]
    counted: Bool[Array, "batch steps seq"]
    choice: Int[Array, "batch steps seq"]
    guess: Int[Array, "batch steps seq"]
    ce: Float[Array, "batch steps seq"]
    accept: Float[Array, "batch steps seq"]


def teacher_choice(logits: Float[Array, "batch steps seq vocab"]) -> Int[Array, "batch steps seq"]:
    """The teacher's argmax over **all** of V, a target id; ties go to the lower id.

    Args:
        logits: ℓ [batch steps seq vocab].

    Returns:
        Target ids [batch steps seq].

    Source: sheet §13.
    """
    return logits.argmax(axis=-1)


def counted_slots(
    mask: Bool[Array, "batch steps seq"],
    choice: Int[Array, "batch steps seq"],
    t2d: Bool[Array, " vocab"],
) -> Bool[Array, "batch steps seq"]:
    """Where the loss is counted: slot supervised ∧ the teacher's argmax kept.

    Args:
        mask: M [batch steps seq].
        choice: the teacher's argmax, target ids [batch steps seq].
        t2d: which target ids are kept [vocab].

    Returns:
        [batch steps seq]; M itself when everything is kept.

    Source: sheet §13.
    """
    return mask & t2d[choice]


def soft_cross_entropy(
    z: Float[Array, "batch steps seq kept"], conditional: Float[Array, "batch steps seq kept"]
) -> Float[Array, "batch steps seq"]:
    """−Σ p̃·log q over kept ids, against the conditional teacher.

    Args:
        z: draft logits, finite [batch steps seq kept].
        conditional: p̃ [batch steps seq kept].

    Returns:
        [batch steps seq].

    Source: sheet §13.
    """
    return -(conditional * jax.nn.log_softmax(z, axis=-1)).sum(axis=-1)


def acceptance(
    z: Float[Array, "batch steps seq kept"],
    conditional: Float[Array, "batch steps seq kept"],
    true: Float[Array, "batch steps seq kept"],
    prunes: bool,
) -> Float[Array, "batch steps seq"]:
    """α as §8 has it: Σ min(q, p) with the true p; 1 − ½·l1 when unpruned; clamped to [0, 1].

    Args:
        z: draft logits, finite [batch steps seq kept].
        conditional: p̃ [batch steps seq kept].
        true: p [batch steps seq kept].
        prunes: K < V.

    Returns:
        α [batch steps seq].

    Source: sheet §13, §8.
    """
    q = jax.nn.softmax(z, axis=-1)
    return overlap(q, true) if prunes else overlap_from_l1(l1_distance(q, conditional))


def draft_choice(
    z: Float[Array, "batch steps seq kept"], kept: Int[Array, " kept"]
) -> Int[Array, "batch steps seq"]:
    """The draft's argmax, mapped through d2t to a target id; ties go to the lower id.

    Args:
        z: draft logits [batch steps seq kept].
        kept: the target id of each draft id, arange(K) + d2t [kept].

    Returns:
        Target ids [batch steps seq].

    Source: sheet §13.
    """
    return kept[z.argmax(axis=-1)]


def step_losses(
    ce: Float[Array, "batch steps seq"],
    counted: Bool[Array, "batch steps seq"],
    total_positions: int,
    ranks: int = 1,
) -> Float[Array, " steps"]:
    """This rank's share of each step's loss: W · Σ ce over counted slots / Σ_ranks (B·S).

    The denominator is every position, supervised or not, counted or not, the same in all steps.

    Args:
        ce: soft cross entropy [batch steps seq].
        counted: where it is counted [batch steps seq].
        total_positions: Σ B·S over all ranks and micro-batches of the optimizer step.
        ranks: W, the number of ranks that the gradients are averaged over.

    Returns:
        loss_i [steps].

    Source: sheet §13.
    """
    return ranks * jnp.where(counted, ce, 0).sum(axis=(0, 2)) / total_positions


def total_loss(losses: Float[Array, " steps"]) -> Float[Array, ""]:
    """Σ_i 0.8^i · loss_i, i from 0.

    Args:
        losses: loss_i [steps].

    Returns:
        A scalar whose mean over ranks is the loss of the optimizer step.

    Source: sheet §13.

    >>> round(float(total_loss(jnp.array([1.0, 1.0, 1.0]))), 6)
    2.44
    """
    return (STEP_DECAY ** jnp.arange(losses.shape[0], dtype=losses.dtype) * losses).sum()


def per_step(
    values: Float[Array, "batch steps seq"], mask: Bool[Array, "batch steps seq"]
) -> tuple[Float[Array, " steps"], Float[Array, " steps"]]:
    """Σ M·value / Σ M for each step.

    Args:
        values: finite [batch steps seq].
        mask: M [batch steps seq].

    Returns:
        Numerators and denominators [steps].

    Source: sheet §13.
    """
    m = mask.astype(values.dtype)
    return (m * values).sum(axis=(0, 2)), m.sum(axis=(0, 2))


def metric_rows(slots: Eagle3Slots) -> dict[str, Pair]:
    """Per step: loss, acceptance, accuracy, and how many of the teacher's choices are kept.

    Accuracy is over all supervised slots: a pruned choice equals no guess and is a miss.

    Args:
        slots: per-slot arrays [batch steps seq], finite where M is False.

    Returns:
        Name to (numerator, denominator), each [steps]. `loss_step` is over all positions, the
        others are over supervised slots.

    Source: sheet §13.
    """
    batch, steps, seq = slots.mask.shape
    dtype = slots.ce.dtype
    hit = (slots.guess == slots.choice).astype(dtype)
    numerator, _ = per_step(slots.ce, slots.counted)
    return {
        "loss_step": (numerator, jnp.full(steps, batch * seq, dtype)),
        "accept_step": per_step(slots.accept, slots.mask),
        "accuracy_step": per_step(hit, slots.mask),
        "in_vocabulary_step": per_step(slots.counted.astype(dtype), slots.mask),
    }


def check_supervision(total_supervised: float, total_counted: float) -> None:
    """Refuse a step without anything to learn from, on sums over all ranks and micro-batches.

    Step 0 alone decides: the slots of step i are those of step 0 that stand i to the right.

    Args:
        total_supervised: Σ M of step 0.
        total_counted: Σ M·1[the teacher's argmax kept] of step 0.

    Raises:
        ValueError: `no supervised target tokens` when Σ M = 0; `no in-vocabulary target tokens`
            when nothing is counted: the loss would be 0 and move nothing.

    Source: sheet §8 has the words; §13.
    """
    if total_supervised == 0:
        raise ValueError(
            "no supervised target tokens: no label from position 2 up has loss_mask > 0.5; check "
            "loss_mask"
        )
    if total_counted == 0:
        raise ValueError(
            "no in-vocabulary target tokens: the draft vocabulary keeps none of the teacher's "
            "choices; raise draft_vocab_size, or rebuild the map from this corpus"
        )
