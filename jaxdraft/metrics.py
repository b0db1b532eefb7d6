"""The metric pairs (sheet §9): each a numerator and a denominator, summed over ranks.

Evaluation metrics use the evaluation mask M, not the weights w. Ties in an argmax go to the
lower id.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxdraft.objective import SlotTerms, Sums

Pair = tuple[Array, Array]


class Slots(NamedTuple):
    """What the metrics are computed from, for every slot."""

    mask: Bool[Array, "batch blocks γ"]
    weights: Float[Array, "batch blocks γ"]
    draft_labels: Int[Array, "batch blocks γ"]
    draft_logits: Float[Array, "batch blocks γ kept"]
    confidence_logits: Float[Array, "batch blocks γ"] | None
    teacher_logits: Float[Array, "batch blocks γ kept"]  # ℓ of the kept ids
    true: Float[Array, "batch blocks γ kept"]
    terms: SlotTerms


def mean_over_mask(
    values: Float[Array, "batch blocks γ"], mask: Bool[Array, "batch blocks γ"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Σ M·value / Σ M.

    Args:
        values: [batch blocks γ].
        mask: M [batch blocks γ].

    Returns:
        Numerator and denominator, scalars.

    Source: sheet §9.
    """
    m = mask.astype(values.dtype)
    return (m * values).sum(), m.sum()


def per_slot(
    values: Float[Array, "batch blocks γ"], mask: Bool[Array, "batch blocks γ"]
) -> tuple[Float[Array, " γ"], Float[Array, " γ"]]:
    """Σ M·value / Σ M for each slot k, without decay.

    Args:
        values: [batch blocks γ].
        mask: M [batch blocks γ].

    Returns:
        Numerators and denominators [γ].

    Source: sheet §9, the rows `*_position`.
    """
    m = mask.astype(values.dtype)
    return (m * values).sum(axis=(0, 1)), m.sum(axis=(0, 1))


def prefix_products(
    values: Float[Array, "batch blocks γ"], mask: Bool[Array, "batch blocks γ"]
) -> Float[Array, "batch blocks γ"]:
    """Π_{k≤j} M_k·value_k for each slot j.

    Args:
        values: probabilities [batch blocks γ].
        mask: M [batch blocks γ].

    Returns:
        [batch blocks γ].

    Source: sheet §9.
    """
    return jnp.cumprod(mask.astype(values.dtype) * values, axis=-1)


def tau_probabilistic(
    accept: Float[Array, "batch blocks γ"], mask: Bool[Array, "batch blocks γ"]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Expected tokens per round: per block with any M, 1 + Σ_j Π_{k≤j} M_k·α_k.

    Args:
        accept: α [batch blocks γ].
        mask: M [batch blocks γ].

    Returns:
        The sum over such blocks, and their number.

    Source: sheet §9.
    """
    lengths = 1 + prefix_products(accept, mask).sum(axis=-1)
    counted = mask.any(axis=-1).astype(accept.dtype)
    return (counted * lengths).sum(), counted.sum()


def confidence_cumprod_bias(
    c: Float[Array, "batch blocks γ"] | None,
    accept: Float[Array, "batch blocks γ"],
    mask: Bool[Array, "batch blocks γ"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Σ_j M_j·(Π_{k≤j} M_k·σ(c_k) − Π_{k≤j} M_k·α_k) / Σ M; 0 / Σ M without the head.

    Args:
        c: confidence logits [batch blocks γ], or None.
        accept: α [batch blocks γ].
        mask: M [batch blocks γ].

    Returns:
        Numerator and denominator, scalars.

    Source: sheet §9.
    """
    predicted = accept if c is None else jax.nn.sigmoid(c)
    return mean_over_mask(prefix_products(predicted, mask) - prefix_products(accept, mask), mask)


def confidence_abs_error(
    c: Float[Array, "batch blocks γ"] | None,
    accept: Float[Array, "batch blocks γ"],
    w: Float[Array, "batch blocks γ"],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Σ w·|σ(c) − α| / Σ w; 0 / Σ w without the head.

    Args:
        c: confidence logits [batch blocks γ], or None.
        accept: α [batch blocks γ].
        w: position weights [batch blocks γ].

    Returns:
        Numerator and denominator, scalars.

    Source: sheet §9.
    """
    predicted = accept if c is None else jax.nn.sigmoid(c)
    return (w * jnp.abs(predicted - accept)).sum(), w.sum()


def metric_pairs(slots: Slots, sums: Sums, prunes: bool) -> dict[str, Pair]:
    """Every row of the table.

    Args:
        slots: per-slot arrays, finite where M is False.
        sums: the objective's sums of the same batch.
        prunes: K < V; only then are there `draft_vocab_coverage` and `teacher_kept_mass`.

    Returns:
        Name to (numerator, denominator): scalars, or [γ] for the rows `*_position`.

    Source: sheet §9.
    """
    mask, terms, z = slots.mask, slots.terms, slots.draft_logits
    q, dtype = jax.nn.softmax(z, axis=-1), z.dtype
    guess = z.argmax(axis=-1).astype(slots.draft_labels.dtype)
    # A pruned label is negative, so no guess equals it: a miss.
    hit = (guess == slots.draft_labels).astype(dtype)
    agrees = (z.argmax(axis=-1) == slots.teacher_logits.argmax(axis=-1)).astype(dtype)
    pairs: dict[str, Pair] = {
        "acc": mean_over_mask(hit, mask),
        "ce_loss": (sums.ce_num, sums.ce_den),
        "l1_loss": (sums.l1_num, sums.den),
        "confidence_loss": (sums.conf_num, sums.den),
        "confidence_abs_error": confidence_abs_error(
            slots.confidence_logits, terms.accept, slots.weights
        ),
        "teacher_agreement": mean_over_mask(agrees, mask),
        "teacher_top1_prob": mean_over_mask(slots.true.max(axis=-1), mask),
        "draft_top1_prob": mean_over_mask(q.max(axis=-1), mask),
        "tau_probabilistic": tau_probabilistic(terms.accept, mask),
        "ce_position": per_slot(terms.ce, mask & terms.kept),
        "accuracy_position": per_slot(hit, mask),
        "accept_position": per_slot(terms.accept, mask),
        "confidence_cumprod_bias": confidence_cumprod_bias(
            slots.confidence_logits, terms.accept, mask
        ),
    }
    if prunes:
        pairs["draft_vocab_coverage"] = mean_over_mask(terms.kept.astype(dtype), mask)
        pairs["teacher_kept_mass"] = mean_over_mask(slots.true.sum(axis=-1), mask)
    return pairs
