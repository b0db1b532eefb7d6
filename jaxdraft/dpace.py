"""D-PACE (sheet §12): what a slot is worth, from the draft's own confidence in the labels.

A slot pays only if every slot before it is accepted, and it opens the way for those behind it.
Shapes: batch, blocks, slots γ. M is the evaluation mask of the bonus-anchor layout.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

VARIANTS = ("cumulative", "continuation", "both")


def label_probability(
    z: Float[Array, "batch blocks γ kept"], draft_labels: Int[Array, "batch blocks γ"]
) -> Float[Array, "batch blocks γ"]:
    """c = q[label], or 0 where the label was pruned (draft label < 0): serving would reject it.

    Args:
        z: draft logits, finite [batch blocks γ kept].
        draft_labels: index[label] [batch blocks γ].

    Returns:
        c [batch blocks γ].

    Source: sheet §12.
    """
    inside = draft_labels >= 0
    safe = jnp.where(inside, draft_labels, 0)
    read = jnp.take_along_axis(jax.nn.softmax(z, axis=-1), safe[..., None], axis=-1)[..., 0]
    return jnp.where(inside, read, 0)


def smoothed(
    c: Float[Array, "batch blocks γ"], mask: Bool[Array, "batch blocks γ"], beta: float | int
) -> Float[Array, "batch blocks γ"]:
    """s = (1−β)·c + β, and 1 at masked slots, which then change no product.

    Args:
        c: label probabilities [batch blocks γ].
        mask: M [batch blocks γ].
        beta: β, above 0 and up to 1.

    Returns:
        s [batch blocks γ], from β to 1.

    Source: sheet §12.
    """
    return jnp.where(mask, (1 - beta) * c + beta, 1)


def prefix_confidence(s: Float[Array, "batch blocks γ"]) -> Float[Array, "batch blocks γ"]:
    """P_k = Π_{j≤k} s_j: the chance that the block is accepted up to slot k.

    Args:
        s: smoothed label probabilities [batch blocks γ].

    Returns:
        P [batch blocks γ], not increasing along a block.

    Source: sheet §12.

    >>> prefix_confidence(jnp.array([[[1.0, 0.5, 0.5]]]))[0, 0].tolist()
    [1.0, 0.5, 0.25]
    """
    return jnp.cumprod(s, axis=-1)


def expected_suffix(
    prefix: Float[Array, "batch blocks γ"], mask: Bool[Array, "batch blocks γ"]
) -> Float[Array, "batch blocks γ"]:
    """R_k = Σ_{j≥k} M_j·P_j: how many tokens from slot k on the block is expected to yield.

    Args:
        prefix: P [batch blocks γ].
        mask: M [batch blocks γ].

    Returns:
        R [batch blocks γ], not increasing along a block.

    Source: sheet §12.

    >>> mask = jnp.array([[[False, True, True]]])
    >>> expected_suffix(jnp.array([[[1.0, 0.5, 0.25]]]), mask)[0, 0].tolist()
    [0.75, 0.75, 0.25]
    """
    return jax.lax.cumsum(mask.astype(prefix.dtype) * prefix, axis=2, reverse=True)


def continuation_value(
    s: Float[Array, "batch blocks γ"], mask: Bool[Array, "batch blocks γ"]
) -> Float[Array, "batch blocks γ"]:
    """R/P: the tokens expected from slot k on, itself included, given that slot k is accepted.

    Written without the quotient, as R_k/P_k = M_k + s_{k+1}·R_{k+1}/P_{k+1}: after some pruned
    labels a small β makes P underflow to 0, where R/P would be 0/0 and the value is not.

    Args:
        s: smoothed label probabilities [batch blocks γ].
        mask: M [batch blocks γ].

    Returns:
        R/P [batch blocks γ]; at least 1 at counted slots.

    Source: sheet §12.

    >>> mask = jnp.array([[[False, True, True]]])
    >>> continuation_value(jnp.array([[[1.0, 0.5, 0.5]]]), mask)[0, 0].tolist()
    [0.75, 1.5, 1.0]
    """
    counted = mask.astype(s.dtype)
    values = [counted[..., -1]]
    for k in reversed(range(s.shape[-1] - 1)):
        values.append(counted[..., k] + s[..., k + 1] * values[-1])
    return jnp.stack(values[::-1], axis=-1)


def weights(
    variant: str,
    c: Float[Array, "batch blocks γ"],
    mask: Bool[Array, "batch blocks γ"],
    beta: float | int,
) -> Float[Array, "batch blocks γ"]:
    """w = M · the variant's value, without a gradient.

    P for "cumulative", R/P for "continuation", their product R for "both".

    Args:
        variant: one of `VARIANTS`.
        c: label probabilities [batch blocks γ].
        mask: M [batch blocks γ].
        beta: β.

    Returns:
        w [batch blocks γ], finite for every β.

    Raises:
        ValueError: an unknown variant, or β outside (0, 1].

    Source: sheet §12.
    """
    if variant not in VARIANTS:
        raise ValueError(f"variant: expected one of {', '.join(VARIANTS)}, got {variant!r}")
    if not 0 < beta <= 1:
        raise ValueError(f"beta: expected a number above 0 and up to 1, got {beta!r}")
    s = smoothed(jax.lax.stop_gradient(c), mask, beta)
    prefix = prefix_confidence(s)
    value = {
        "cumulative": prefix,
        "continuation": continuation_value(s, mask),
        "both": expected_suffix(prefix, mask),
    }[variant]
    return mask.astype(c.dtype) * value


def loss(
    ce_num: Float[Array, ""], total_rows: Float[Array, ""] | int, ranks: int = 1
) -> Float[Array, ""]:
    """This rank's share of the step's loss: W · Σ w·1[kept]·ce / Σ_ranks B.

    Label: from the data, as a draft id. The denominator counts rows, not slots: a row with more
    supervised slots weighs more.

    Args:
        ce_num: this rank's Σ w·1[kept]·ce, with w from `weights`.
        total_rows: B, the batch size, summed over all ranks and micro-batches of the step.
        ranks: W, the number of ranks that the gradients are averaged over.

    Returns:
        A scalar whose mean over ranks is the loss of the step.

    Source: sheet §12.
    """
    return ranks * ce_num / total_rows
