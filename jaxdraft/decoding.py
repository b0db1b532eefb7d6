"""Speculative decoding (sheet §10): verifying a block, and the loop.

One sequence at a time. Shapes: seq tokens so far, n proposals in a round. A target and a draft are
given as functions, so that anything can be decoded with, a draft of either layout among it
(`drafting.dspark_drafter`, `dflash_drafter`). All randomness is an array of draws u in
[0, 1); the draws of a round are in the order: proposals slot by slot, acceptances slot by slot,
correction or bonus, 2n + 1 in all. A draw that a round has no use for (acceptances after a
rejection) is skipped: every draw keeps its place.
"""

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, Key

from jaxdraft.checks import is_real
from jaxdraft.drafting import (
    Drafter,
    Proposals,
    check_block,
    check_logits,
    distribution,
    draft_block,
    sample,
)


class TargetPass(NamedTuple):
    """One pass of the target: row s is its logits and captured states after reading token s."""

    logits: Float[Array, "seq vocab"]
    hidden_states: Float[Array, "seq captured"]


TargetFunction = Callable[[Int[Array, " seq"]], TargetPass]


class Round(NamedTuple):
    """How many proposals were verified and accepted, and the tokens that the round adds.

    Plain Python numbers.
    """

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
    number of its proposals that get verified, an int or an integer scalar of any array library
    (see `jaxdraft.scheduling`), or None for all. Whole numbers may be NumPy's and are kept as
    Python's; a bool or a float is none. The
    output stays exactly the target's only if keeping slot j depends on logits 0 … j alone: c_j
    knows the tokens before slot j, and c_{j+1} already knows token j.

    Raises:
        ValueError: a setting is of another type or out of its range; the message names it.
    """

    proposals: int
    limit: int
    temperature: float | int = 0
    end_of_text: int | None = None
    truncate: Callable[[Float[Array, " n"]], int | Int[Array, ""]] | None = None

    def __post_init__(self) -> None:
        for field in ("proposals", "limit"):
            value = getattr(self, field)
            if not _is_count(value) or value < 1:
                raise ValueError(f"{field}: expected a whole number >= 1, got {value!r}")
            object.__setattr__(self, field, int(value))
        if not (is_real(self.temperature) and self.temperature >= 0):
            raise ValueError(
                f"temperature: expected a finite number >= 0, got {self.temperature!r}"
            )
        end = self.end_of_text
        if end is not None:
            if not _is_count(end) or end < 0:
                raise ValueError(f"end_of_text: expected an id or None, got {end!r}")
            object.__setattr__(self, "end_of_text", int(end))
        if self.truncate is not None and not callable(self.truncate):
            raise ValueError(
                "truncate: expected a function of a block's confidence logits, or None; got "
                f"{self.truncate!r}"
            )


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


def checked_pass(
    target: TargetFunction, tokens: Int[Array, " seq"], drafter: Drafter
) -> TargetPass:
    """One pass of the target, refused where a row or an id would be taken for another one.

    Args:
        target: the target.
        tokens: what it reads [seq].
        drafter: gives the ids that will be looked up.

    Returns:
        The pass: logits [seq vocab], captured states [seq captured].

    Raises:
        ValueError: not one row per token, or fewer ids than the draft can propose.
    """
    scored, rows = target(tokens), tokens.shape[0]
    for name, shape in zip(scored._fields, (array.shape for array in scored), strict=True):
        if len(shape) != 2 or shape[0] != rows:
            raise ValueError(
                f"target: expected {name} with a row for each of the {rows} tokens that it was "
                f"given, got {list(shape)}"
            )
    ids, largest = scored.logits.shape[1], int(drafter.kept.max())
    if largest >= ids:
        raise ValueError(
            f"target: its logits have {ids} ids but the draft can propose id {largest}; use the "
            "target that the draft was trained for"
        )
    return scored


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
        ValueError: more proposals than the block has slots, not 2n + 1 draws, logits of either
            side that give no distribution, a target's pass that has not one row per token,
            `truncate` without confidences or with an answer that is no number from 0 to n.

    Source: sheet §10.
    """
    n, t, anchor = config.proposals, config.temperature, tokens.shape[0] - 1
    if draws.shape[0] != 2 * n + 1:
        raise ValueError(
            f"draws: expected 2·proposals + 1 = {2 * n + 1} for a round, got {draws.shape[0]}"
        )
    block = draft_block(drafter, tokens, hidden_states, t, draws[:n])
    length = _verified_length(block, config)
    drafted = block.tokens[:length]
    scored = checked_pass(target, jnp.concatenate([tokens, drafted]), drafter)
    check_logits("the target's logits at the proposals", scored.logits[anchor:])
    p = distribution(scored.logits[anchor:], t)
    q = over_vocabulary(block.probabilities[:length], drafter.kept, p.shape[-1])
    accepted, token = verify(drafted, q, p, draws[n : n + length], draws[2 * n])
    committed = (*drafted[:accepted].tolist(), int(token))
    return Round(proposed=length, accepted=accepted, committed=committed), scored


def uniform_draws(
    key: Key[Array, ""], rounds: int, proposals: int, dtype: DTypeLike
) -> Float[Array, "rounds draws"]:
    """Draws for `speculate`, one row per round.

    A row is a function of the key, its round's number, n and the dtype: not of how many rounds
    are asked for, and not of how many of its draws a round came to use. Another n or dtype gives
    other numbers.

    Args:
        key: a random key.
        rounds: how many rows; a round adds at least one token, so `limit` of them are enough.
        proposals: n.
        dtype: the working dtype.

    Returns:
        Uniform on [0, 1), 1 excluded [rounds 2n+1].

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
        target: a causal target, a row of logits and of states for every token it is given; called
            once for the prompt and once per round.
        drafter: the draft.
        prompt: at least one token; the last one is the first anchor [seq].
        config: proposals, limit, temperature, end of text, truncation.
        draws: u's in [0, 1), one row per round and at least `limit` rows, of the working dtype
            [rounds 2n+1]; None at temperature 0, where no draw matters.

    Returns:
        The tokens, prompt included, and the rounds: Σ len(committed) tokens are new.

    Raises:
        ValueError: an empty prompt, ids that the target does not have, draws that are missing, too
            few or outside [0, 1), and whatever `speculative_round` refuses.

    Source: sheet §10; field notes 29 and 30.
    """
    if prompt.shape[0] == 0:
        raise ValueError("prompt: expected at least one token, the first anchor; got none")
    check_block(drafter, config.proposals)
    scored = checked_pass(target, prompt, drafter)
    _check_ids(prompt, config, scored.logits.shape[1])
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


def _verified_length(block: Proposals, config: DecodingConfig) -> int:
    if config.truncate is None:
        return config.proposals
    if block.confidence_logits is None:
        raise ValueError(
            "truncate needs confidence logits but the draft has no confidence head: leave truncate "
            "out, or use a draft with enable_confidence_head = true"
        )
    if bool(jnp.isnan(block.confidence_logits).any()):
        raise ValueError("truncate: the draft's confidence logits hold NaN, which keeps no prefix")
    answer = config.truncate(block.confidence_logits)
    try:
        length = -1 if isinstance(answer, bool) else operator.index(answer)
    except TypeError:
        length = -1
    if not 0 <= length <= config.proposals:
        raise ValueError(
            f"truncate: expected a whole number from 0 to proposals = {config.proposals}, got "
            f"{answer!r}"
        )
    return length


def _is_count(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_ids(prompt: Int[Array, " seq"], config: DecodingConfig, ids: int) -> None:
    if not bool(((prompt >= 0) & (prompt < ids)).all()):
        raise ValueError(f"prompt: expected ids from 0 to {ids - 1}, got {prompt.tolist()}")
    if config.end_of_text is not None and config.end_of_text >= ids:
        raise ValueError(
            f"end_of_text = {config.end_of_text} is none of the target's ids, 0 to {ids - 1}: it "
            "would end nothing"
        )


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
