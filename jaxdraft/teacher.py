"""The two teachers (sheet §7). Merging them either way is wrong.

The conditional teacher is what the draft is distilled to: it sums to 1 over the kept ids, the only
ones the draft can put mass on. The true teacher is what acceptance is measured against: it sums
to the kept mass, because mass that pruning removed is a real rejection.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def teacher_logits(
    states: Float[Array, "batch blocks γ hidden"], lm_head: Float[Array, "vocab hidden"]
) -> Float[Array, "batch blocks γ vocab"]:
    """ℓ = T·Uᵀ over all of V, never given a gradient.

    Args:
        states: the target's final states at the teacher positions [batch blocks γ hidden].
        lm_head: U [vocab hidden].

    Returns:
        ℓ [batch blocks γ vocab].

    Source: sheet §7; field note 11.
    """
    return jax.lax.stop_gradient(jnp.einsum("bnjh,vh->bnjv", states, lm_head))


def conditional_teacher(
    logits: Float[Array, "batch blocks γ vocab"], kept: Int[Array, " kept"]
) -> Float[Array, "batch blocks γ kept"]:
    """p̃ = softmax of ℓ restricted to the kept ids; sums to 1. The distillation target.

    Args:
        logits: ℓ over all of V [batch blocks γ vocab].
        kept: the kept target ids [kept].

    Returns:
        p̃ [batch blocks γ kept].

    Source: sheet §7; paper Eq. 10.
    """
    return jax.nn.softmax(logits[..., kept], axis=-1)


def true_teacher(
    logits: Float[Array, "batch blocks γ vocab"], kept: Int[Array, " kept"]
) -> Float[Array, "batch blocks γ kept"]:
    """p = exp(ℓ_kept − logsumexp over **all** V); sums to the kept mass ≤ 1. For acceptance.

    Args:
        logits: ℓ over all of V [batch blocks γ vocab].
        kept: the kept target ids [kept].

    Returns:
        p [batch blocks γ kept].

    Source: sheet §7.
    """
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.exp(logits[..., kept] - normaliser)
