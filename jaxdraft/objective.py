"""Per-slot terms, their sums, the loss and its two errors (sheet §8)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxdraft.config import ObjectiveConfig


class Coefficients(NamedTuple):
    """The α's and the decay as arrays, so that changing them compiles nothing again."""

    ce_alpha: Float[Array, ""]
    l1_alpha: Float[Array, ""]
    confidence_alpha: Float[Array, ""]
    decay: Float[Array, ""] | None


class SlotTerms(NamedTuple):
    """The terms of every slot, and whether its label is kept; unspecified where M is False."""

    kept: Bool[Array, "batch blocks γ"]
    ce: Float[Array, "batch blocks γ"]
    l1: Float[Array, "batch blocks γ"]
    accept: Float[Array, "batch blocks γ"]
    confidence: Float[Array, "batch blocks γ"]


class Sums(NamedTuple):
    """The weighted sums of one rank and micro-batch; they add up over both."""

    ce_num: Float[Array, ""]
    ce_den: Float[Array, ""]
    l1_num: Float[Array, ""]
    conf_num: Float[Array, ""]
    den: Float[Array, ""]


def coefficients(objective: ObjectiveConfig, dtype: DTypeLike) -> Coefficients:
    """The objective's numbers in the working dtype.

    Args:
        objective: the α's and `loss_decay_gamma`.
        dtype: the working dtype.

    Returns:
        Four scalars; decay None stays None.
    """
    decay = objective.loss_decay_gamma
    return Coefficients(
        ce_alpha=jnp.asarray(objective.ce_alpha, dtype),
        l1_alpha=jnp.asarray(objective.l1_alpha, dtype),
        confidence_alpha=jnp.asarray(objective.confidence_alpha, dtype),
        decay=None if decay is None else jnp.asarray(decay, dtype),
    )


def counted_rows(
    mask: Bool[Array, "batch blocks γ"], rows: Float[Array, "batch blocks γ width"]
) -> Float[Array, "batch blocks γ width"]:
    """The rows of counted slots, and zeros elsewhere, before anything is computed from them.

    Selecting afterwards would let a NaN through: 0 · NaN is NaN, in the gradient too.

    Args:
        mask: M [batch blocks γ].
        rows: logits [batch blocks γ width].

    Returns:
        [batch blocks γ width].

    Source: sheet §8 (first bullet); field note 9.
    """
    return jnp.where(mask[..., None], rows, 0)


def cross_entropy(
    z: Float[Array, "batch blocks γ kept"], draft_labels: Int[Array, "batch blocks γ"]
) -> Float[Array, "batch blocks γ"]:
    """ce = −log q[label], or 0 where the label was pruned (draft label < 0).

    Label: from the data, as a draft id. Reads a safe row, then selects.

    Args:
        z: draft logits [batch blocks γ kept].
        draft_labels: index[label] [batch blocks γ].

    Returns:
        ce [batch blocks γ].

    Source: sheet §8.
    """
    inside = draft_labels >= 0
    safe = jnp.where(inside, draft_labels, 0)
    log_q = jax.nn.log_softmax(z, axis=-1)
    read = jnp.take_along_axis(log_q, safe[..., None], axis=-1)[..., 0]
    return jnp.where(inside, -read, 0)


def l1_distance(
    q: Float[Array, "batch blocks γ kept"], conditional: Float[Array, "batch blocks γ kept"]
) -> Float[Array, "batch blocks γ"]:
    """l1 = Σ |q − p̃|, twice the total variation; its subgradient at q = p̃ is 0.

    Args:
        q: the draft's distribution [batch blocks γ kept].
        conditional: p̃ [batch blocks γ kept].

    Returns:
        l1 [batch blocks γ].

    Source: sheet §8; paper Eq. 10.
    """
    return jnp.abs(q - conditional).sum(axis=-1)


def overlap(
    q: Float[Array, "batch blocks γ kept"], true: Float[Array, "batch blocks γ kept"]
) -> Float[Array, "batch blocks γ"]:
    """Acceptance of a pruned draft: α = Σ min(q, p) over kept ids, clamped to [0, 1].

    Args:
        q: the draft's distribution [batch blocks γ kept].
        true: p, summing to the kept mass [batch blocks γ kept].

    Returns:
        α [batch blocks γ].

    Source: sheet §8.
    """
    return jnp.clip(jnp.minimum(q, true).sum(axis=-1), 0, 1)


def overlap_from_l1(l1: Float[Array, "batch blocks γ"]) -> Float[Array, "batch blocks γ"]:
    """Acceptance of an unpruned draft: α = 1 − ½·l1, clamped to [0, 1].

    Equal to `overlap` in exact numbers; written so that existing runs keep their arithmetic.

    Args:
        l1: Σ |q − p̃| [batch blocks γ].

    Returns:
        α [batch blocks γ].

    Source: sheet §8.
    """
    return jnp.clip(1 - 0.5 * l1, 0, 1)


def confidence_term(
    c: Float[Array, "batch blocks γ"], accept: Float[Array, "batch blocks γ"]
) -> Float[Array, "batch blocks γ"]:
    """BCE with logits against α: softplus(c) − α·c, no gradient to α.

    Args:
        c: confidence logits [batch blocks γ].
        accept: α [batch blocks γ].

    Returns:
        The binary cross entropy [batch blocks γ].

    Source: sheet §8; paper Eq. 11.
    """
    return jax.nn.softplus(c) - jax.lax.stop_gradient(accept) * c


def slot_terms(
    z: Float[Array, "batch blocks γ kept"],
    c: Float[Array, "batch blocks γ"] | None,
    draft_labels: Int[Array, "batch blocks γ"],
    conditional: Float[Array, "batch blocks γ kept"],
    true: Float[Array, "batch blocks γ kept"],
    prunes: bool,
) -> SlotTerms:
    """All terms of every slot, unreduced and unweighted.

    Args:
        z: draft logits, finite (`counted_rows`) [batch blocks γ kept].
        c: confidence logits [batch blocks γ], or None without the head: its term is 0.
        draft_labels: index[label], negative where pruned [batch blocks γ].
        conditional: p̃ [batch blocks γ kept].
        true: p [batch blocks γ kept].
        prunes: K < V.

    Returns:
        kept, ce, l1, accept, confidence, each [batch blocks γ].

    Source: sheet §8.
    """
    q = jax.nn.softmax(z, axis=-1)
    l1 = l1_distance(q, conditional)
    accept = overlap(q, true) if prunes else overlap_from_l1(l1)
    return SlotTerms(
        kept=draft_labels >= 0,
        ce=cross_entropy(z, draft_labels),
        l1=l1,
        accept=accept,
        confidence=jnp.zeros_like(l1) if c is None else confidence_term(c, accept),
    )


def weighted_sums(terms: SlotTerms, w: Float[Array, "batch blocks γ"]) -> Sums:
    """The sums of one batch, over all its slots.

    ce_num = Σ w·1[kept]·ce, ce_den = Σ w·1[kept], l1_num = Σ w·l1, conf_num = Σ w·confidence,
    den = Σ w. A pruned label leaves numerator and denominator of the cross entropy.

    Args:
        terms: per-slot terms [batch blocks γ].
        w: position weights [batch blocks γ].

    Returns:
        Five scalars, to be added over ranks and micro-batches.

    Source: sheet §8.
    """
    kept = w * terms.kept.astype(w.dtype)
    return Sums(
        ce_num=(kept * terms.ce).sum(),
        ce_den=kept.sum(),
        l1_num=(w * terms.l1).sum(),
        conf_num=(w * terms.confidence).sum(),
        den=w.sum(),
    )


def loss(
    sums: Sums,
    total_den: Float[Array, ""],
    total_ce_den: Float[Array, ""],
    alphas: Coefficients,
    prunes: bool,
    ranks: int = 1,
) -> Float[Array, ""]:
    """This rank's share of the step's loss.

    unpruned: W·(α_ce·ce_num + α_l1·l1_num + α_conf·conf_num) / Σ den
    pruned:   W·(α_ce·ce_num / Σ ce_den + (α_l1·l1_num + α_conf·conf_num) / Σ den)

    With α_ce = 0 the CE term is 0 whatever its denominator. Where Σ den = 0 the result is no
    number; `check_supervision` says so on the host.

    Args:
        sums: this rank's own sums.
        total_den: Σ den over all ranks and micro-batches of the step.
        total_ce_den: Σ ce_den over the same.
        alphas: the coefficients.
        prunes: K < V.
        ranks: W, the number of ranks that the gradients are averaged over.

    Returns:
        A scalar whose mean over ranks is the loss of the step.

    Source: sheet §8.
    """
    ce = alphas.ce_alpha * sums.ce_num
    l1 = alphas.l1_alpha * sums.l1_num
    confidence = alphas.confidence_alpha * sums.conf_num
    if not prunes:
        return ranks * (ce + l1 + confidence) / total_den
    ce_term = ce / jnp.where(alphas.ce_alpha > 0, total_ce_den, 1)
    return ranks * (ce_term + (l1 + confidence) / total_den)


def check_supervision(objective: ObjectiveConfig, total_den: float, total_ce_den: float) -> None:
    """Refuse a step without anything to learn from, on sums over all ranks and micro-batches.

    Args:
        objective: gives α_ce.
        total_den: Σ den.
        total_ce_den: Σ ce_den.

    Raises:
        ValueError: `no supervised target tokens` when Σ den = 0; `no in-vocabulary target tokens`
            when α_ce > 0 and Σ ce_den = 0.

    Source: sheet §8.
    """
    if total_den == 0:
        raise ValueError(
            "no supervised target tokens: no block of the batch has a label with loss_mask > 0.5; "
            "check loss_mask, anchor_positions and block_keep_mask"
        )
    if objective.ce_alpha > 0 and total_ce_den == 0:
        raise ValueError(
            "no in-vocabulary target tokens: the draft vocabulary keeps no label of the batch; "
            "raise draft_vocab_size, rebuild the map from this corpus, or set ce_alpha = 0"
        )
