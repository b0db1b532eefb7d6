"""Speculative decoding (sheet §10): verifying a block, the loop, the expected length.

One sequence at a time. Shapes: seq tokens so far, n proposals in a round. A target and a draft are
given as functions, so that anything can be decoded with. All randomness is an array of draws u in
[0, 1); the draws of a round are in the order: proposals slot by slot, acceptances slot by slot,
correction or bonus, 2n + 1 in all. A draw that a round has no use for (acceptances after a
rejection) is skipped: every draw keeps its place.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from jaxdraft.drafting import Drafter, Proposals, check_block, distribution, draft_block, sample


class TargetPass(NamedTuple):
    """One pass of the target: row s is its logits and captured states after reading token s."""

    logits: Float[Array, "seq vocab"]
    hidden_states: Float[Array, "seq captured"]


TargetFunction = Callable[[Int[Array, " seq"]], TargetPass]


class Round(NamedTuple):
    """How many proposals were verified and accepted, and the tokens that the round adds."""

    proposed: int
    accepted: int
    committed: tuple[int, ...]


class Speculation(NamedTuple):
    """The prompt and what was added to it, and the rounds that did."""

    tokens: Int[Array, " total"]
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class DecodingConfig:
    """How to decode.

    `proposals` n per round, `limit` of new tokens, `temperature` of both sides (0 is greedy), the
    `end_of_text` id or None, and `truncate`: from the confidence logits [n] of a block to the
    number of its proposals that get verified (see `jaxdraft.scheduling`), or None for all. The
    output stays exactly the target's only if keeping slot j depends on logits 0 … j alone: c_j
    knows the tokens before slot j, and c_{j+1} already knows token j.

    Raises:
        ValueError: a number is out of its range; the message names it.
    """

    proposals: int
    limit: int
    temperature: float | int = 0
    end_of_text: int | None = None
    truncate: Callable[[Float[Array, " n"]], int] | None = None

    def __post_init__(self) -> None:
        for field in ("proposals", "limit"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: expected at least 1, got {getattr(self, field)}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature: expected a number >= 0, got {self.temperature}")


def accepts(p: Float[Array, ""], q: Float[Array, ""], u: Float[Array, ""]) -> Bool[Array, ""]:
    """Whether a proposal is accepted: u·q(x) < p(x), that is with probability min(1, p/q).

    Args:
        p: the target's probability of x, over all of V.
        q: the draft's probability of x.
        u: a draw in [0, 1).

    Returns:
        True or False.

    Source: sheet §10.
    """
    return u * q < p


def residual(p: Float[Array, " vocab"], q: Float[Array, " vocab"]) -> Float[Array, " vocab"]:
    """max(p − q, 0), renormalised over all of V: what a correction is drawn from.

    Args:
        p: the target's distribution [vocab].
        q: the draft's, 0 outside the kept ids [vocab].

    Returns:
        [vocab]. p itself where nothing is left, which only rounding can bring about: a rejection
        means that q exceeds p somewhere.

    Source: sheet §10.
    """
    excess = jnp.maximum(p - q, 0)
    total = excess.sum()
    return jnp.where(total > 0, excess / jnp.where(total > 0, total, 1), p)


def over_vocabulary(
    q: Float[Array, "n kept"], kept: Int[Array, " kept"], vocab_size: int
) -> Float[Array, "n vocab"]:
    """q over all of V: 0 outside the kept ids.

    Args:
        q: the draft's distributions [n kept].
        kept: the target id of each column [kept].
        vocab_size: V.

    Returns:
        [n vocab].

    Source: sheet §10.
    """
    return jnp.zeros((q.shape[0], vocab_size), q.dtype).at[:, kept].set(q)


def verify(
    proposals: Int[Array, " n"],
    q: Float[Array, "n vocab"],
    p: Float[Array, "n+1 vocab"],
    accept_draws: Float[Array, " n"],
    last_draw: Float[Array, ""],
) -> tuple[int, Int[Array, ""]]:
    """Accept a prefix by rejection sampling, and draw the token after it.

    At the first rejection from max(p − q, 0) renormalised over all of V; after a full accept one
    more token from p. With one-hot p and q this is greedy verification (`distribution`).

    Args:
        proposals: x, target ids [n].
        q: what each was drawn from, 0 outside the kept ids [n vocab].
        p: the target's distribution at each slot and after the last one [n+1 vocab].
        accept_draws: one per slot [n].
        last_draw: for the correction or the bonus token.

    Returns:
        How many proposals are accepted, and the token after them.

    Source: sheet §10.
    """
    for k, x in enumerate(proposals):
        if not accepts(p[k, x], q[k, x], accept_draws[k]):
            return k, sample(residual(p[k], q[k]), last_draw)
    return proposals.shape[0], sample(p[-1], last_draw)


def speculative_round(
    target: TargetFunction,
    drafter: Drafter,
    tokens: Int[Array, " seq"],
    hidden_states: Float[Array, "context captured"],
    config: DecodingConfig,
    draws: Float[Array, " draws"],
) -> tuple[Round, TargetPass]:
    """Draft a block, score anchor and proposals in one pass, verify.

    Args:
        target: the target.
        drafter: the draft.
        tokens: the tokens so far, the anchor last [seq].
        hidden_states: captured states of the tokens before the anchor [context captured].
        config: proposals n, temperature, truncation.
        draws: proposals, acceptances, correction or bonus [2n + 1].

    Returns:
        The round, not cut yet, and the target's pass over tokens and verified proposals.

    Raises:
        ValueError: more proposals than the block has slots, or `truncate` without confidences.

    Source: sheet §10.
    """
    n, t, anchor = config.proposals, config.temperature, tokens.shape[0] - 1
    block = draft_block(drafter, tokens, hidden_states, t, draws[:n])
    length = _verified_length(block, config)
    drafted = block.tokens[:length]
    scored = target(jnp.concatenate([tokens, drafted]))
    p = distribution(scored.logits[anchor:], t)
    q = over_vocabulary(block.probabilities[:length], drafter.kept, p.shape[-1])
    accepted, token = verify(drafted, q, p, draws[n : n + length], draws[2 * n])
    committed = (*drafted[:accepted].tolist(), int(token))
    return Round(proposed=length, accepted=accepted, committed=committed), scored


def uniform_draws(
    key: Key[Array, ""], rounds: int, proposals: int, dtype: DTypeLike
) -> Float[Array, "rounds draws"]:
    """Draws for `speculate`; those of a round depend on the key and its number alone.

    Args:
        key: a random key.
        rounds: how many rounds; as many as new tokens are always enough.
        proposals: n.
        dtype: the working dtype.

    Returns:
        Uniform on [0, 1) [rounds 2n+1].

    Source: sheet §10, randomness.
    """
    keys = jax.vmap(lambda r: jax.random.fold_in(key, r))(jnp.arange(rounds))
    return jax.vmap(lambda k: jax.random.uniform(k, (2 * proposals + 1,), dtype))(keys)


def speculate(
    target: TargetFunction,
    drafter: Drafter,
    prompt: Int[Array, " seq"],
    config: DecodingConfig,
    draws: Float[Array, "rounds draws"] | None,
) -> Speculation:
    """Continue a prompt; the output distribution is exactly the target's.

    At temperature 0 the output is the target's own greedy output. An accepted, corrected or bonus
    end-of-text token ends the sequence there. Every round asks for n proposals; what a round
    would add past the end of text or the limit is cut, from its statistics too. The draft is
    given the captured states of the committed tokens only, each from the pass that verified it.

    Args:
        target: a causal target; called once for the prompt and once per round.
        drafter: the draft.
        prompt: at least one token; the last one is the first anchor [seq].
        config: proposals, limit, temperature, end of text, truncation.
        draws: u's in [0, 1), one row per round and at least `limit` rows, of the working dtype
            [rounds 2n+1]; None at temperature 0, where no draw matters.

    Returns:
        The tokens, prompt included, and the rounds: Σ len(committed) tokens are new.

    Raises:
        ValueError: an empty prompt, more proposals than the block has slots, draws that are
            missing, too few or outside [0, 1), `truncate` without confidences.

    Source: sheet §10; field notes 29 and 30.
    """
    if prompt.shape[0] == 0:
        raise ValueError("prompt: expected at least one token, the first anchor; got none")
    check_block(drafter, config.proposals)
    scored = target(prompt)
    rows = _checked_draws(draws, config, scored.logits.dtype)
    tokens, rounds, left = prompt, [], config.limit
    while left > 0:
        known = scored.hidden_states[: tokens.shape[0] - 1]
        outcome, scored = speculative_round(target, drafter, tokens, known, config, next(rows))
        outcome = cut(outcome, left, config.end_of_text)
        rounds.append(outcome)
        tokens = jnp.concatenate([tokens, jnp.asarray(outcome.committed, tokens.dtype)])
        left -= len(outcome.committed)
        if outcome.committed[-1] == config.end_of_text:
            break
    return Speculation(tokens=tokens, rounds=tuple(rounds))


def cut(outcome: Round, left: int, end_of_text: int | None) -> Round:
    """End a round after its first end-of-text token, and after `left` tokens.

    Args:
        outcome: the round.
        left: how many tokens may still be added, ≥ 1.
        end_of_text: the id, or None.

    Returns:
        The round whose tokens, accepted and verified proposals stop there.

    Source: sheet §10, last sentence of its first paragraph; field note 30.

    >>> cut(Round(4, 4, (5, 6, 1, 7, 8)), 9, end_of_text=1)
    Round(proposed=3, accepted=3, committed=(5, 6, 1))
    """
    ends = [i + 1 for i, token in enumerate(outcome.committed) if token == end_of_text]
    end = min([*ends, left])
    if end >= len(outcome.committed):
        return outcome
    return Round(
        proposed=min(outcome.proposed, end),
        accepted=min(outcome.accepted, end),
        committed=outcome.committed[:end],
    )


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
    where α_k does not depend on the prefix. Takes K^n passes of the target.

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
        ValueError: more proposals than the block has slots.

    Source: sheet §10, expected length.
    """
    check_block(drafter, proposals)

    def accepted_after(prefix: Int[Array, " longer"], state: Any, left: int) -> Float[Array, ""]:
        state, z, _ = drafter.step(state, prefix[-1])
        q = distribution(z, temperature)
        p = distribution(target(prefix).logits[-1], temperature)
        overlap = jnp.minimum(p[drafter.kept], q)
        total = overlap.sum()
        for i in overlap.nonzero()[0] if left > 1 else ():
            longer = jnp.append(prefix, drafter.kept[i].astype(prefix.dtype))
            total = total + overlap[i] * accepted_after(longer, state, left - 1)
        return total

    return 1 + accepted_after(tokens, drafter.begin(tokens, hidden_states), proposals)


def _verified_length(block: Proposals, config: DecodingConfig) -> int:
    if config.truncate is None:
        return config.proposals
    if block.confidence_logits is None:
        raise ValueError(
            "truncate needs confidence logits but the draft has no confidence head: leave truncate "
            "out, or use a draft with enable_confidence_head = true"
        )
    length = config.truncate(block.confidence_logits)
    if not 0 <= length <= config.proposals:
        raise ValueError(f"truncate: expected 0 to {config.proposals} proposals, got {length}")
    return length


def _checked_draws(
    draws: Float[Array, "rounds draws"] | None, config: DecodingConfig, dtype: DTypeLike
) -> Iterator[Float[Array, " draws"]]:
    rounds, width = config.limit, 2 * config.proposals + 1
    if draws is None:
        if config.temperature > 0:
            raise ValueError(
                f"draws: none given at temperature = {config.temperature}: pass uniform_draws(key, "
                f"{rounds}, {config.proposals}, dtype), or set temperature = 0"
            )
        draws = jnp.zeros((rounds, width), dtype)
    if draws.shape[0] < rounds or draws.shape[1] != width:
        raise ValueError(
            f"draws: expected at least limit = {rounds} rows of 2·proposals + 1 = {width}, got "
            f"{list(draws.shape)}"
        )
    if not bool(((draws >= 0) & (draws < 1)).all()):
        raise ValueError("draws: expected numbers in [0, 1), got one outside")
    return iter(draws)
