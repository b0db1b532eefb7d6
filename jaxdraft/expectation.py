"""The expected length of a round of speculative decoding (sheet §10)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdraft.decoding import TargetFunction, checked_pass
from jaxdraft.drafting import Drafter, check_block, check_logits, distribution


def expected_length(
    target: TargetFunction,
    drafter: Drafter,
    tokens: Int[Array, " seq"],
    hidden_states: Float[Array, "context captured"],
    proposals: int,
    temperature: float | int,
) -> Float[Array, ""]:
    """Expected tokens of a round, by enumeration of every prefix that the draft can propose.

    1 + Σ_j Σ over prefixes x of length j of Π_{k≤j} min(p_k(x_k | x_<k), q_k(x_k | x_<k)).
    §9's τ puts α_k of one given continuation in the place of the inner sums: it is equal only
    where α_k does not depend on the prefix. Takes a pass of the target for every prefix of fewer
    than n tokens that can be accepted: at most 1 + K + … + K^(n−1) = (K^n − 1)/(K − 1).

    Args:
        target: the target.
        drafter: the draft.
        tokens: the tokens so far, the anchor last [seq].
        hidden_states: captured states of the tokens before the anchor [context captured].
        proposals: n.
        temperature: t ≥ 0.

    Returns:
        A number from 1 to n + 1.

    Raises:
        ValueError: more proposals than the block has slots, and what `speculative_round` refuses
            of either side's logits.

    Source: sheet §10, expected length.
    """
    check_block(drafter, proposals)

    def accepted_after(prefix: Int[Array, " longer"], state: Any, left: int) -> Float[Array, ""]:
        state, z, _ = drafter.step(state, prefix[-1])
        logits = checked_pass(target, prefix, drafter).logits[-1]
        check_logits("the draft's logits", z)
        check_logits("the target's logits", logits)
        q, p = distribution(z, temperature), distribution(logits, temperature)
        overlap = jnp.minimum(p[drafter.kept], q)
        total = overlap.sum()
        for i in overlap.nonzero()[0] if left > 1 else ():
            longer = jnp.append(prefix, drafter.kept[i].astype(prefix.dtype))
            total = total + overlap[i] * accepted_after(longer, state, left - 1)
        return total

    return 1 + accepted_after(tokens, drafter.begin(tokens, hidden_states), proposals)
