"""Drafting one block slot by slot (sheet §10, §6).

One sequence at a time. Shapes: seq tokens so far, n proposals, `kept` the ids that can be proposed.
A draft is given as two functions (`Drafter`), so that anything can be decoded with. Both layouts
are built: `dspark_drafter` reads γ proposals off a block, `dflash_drafter` γ−1, since slot 0 of the
bonus-anchor layout holds the anchor. Rejection sampling needs to know nothing of it: in either
layout each proposal was drawn from the q that is reported with it.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxdraft.backbone import Backbone
from jaxdraft.config import DFLASH, DSPARK, DraftConfig, check_layout
from jaxdraft.draft import DSparkDraft
from jaxdraft.evaluate import Target, fitting_map, working_dtype
from jaxdraft.heads import RnnMarkovHead
from jaxdraft.vocabulary import VocabularyMap, kept_ids


class Slot(NamedTuple):
    """One slot of a block: the state after it, z over the proposable ids, c (None without head)."""

    state: Any
    logits: Float[Array, " kept"]
    confidence_logit: Float[Array, ""] | None


class Drafter(NamedTuple):
    """A draft as decoding sees it; `dspark_drafter` and `dflash_drafter` make one from a model.

    `begin(tokens, hidden_states)` starts the block whose anchor is the last token, from the
    captured target states of the tokens before it, and returns a state. `step(state, previous)`
    gives the next slot; `previous` is the previous token, a **target** id. `kept` holds the target
    ids it can propose, ascending: no padding id is among them. `slots` is how many tokens a block
    can propose: γ in the anchor-first layout, γ−1 in the bonus-anchor one.
    """

    begin: Callable[[Int[Array, " seq"], Float[Array, "context captured"]], Any]
    step: Callable[[Any, Int[Array, ""]], Slot]
    kept: Int[Array, " kept"]
    slots: int


class Proposals(NamedTuple):
    """What a block proposes: target ids x, the q each was drawn from, c (None without head)."""

    tokens: Int[Array, " n"]
    probabilities: Float[Array, "n kept"]
    confidence_logits: Float[Array, " n"] | None


def distribution(
    logits: Float[Array, "*rows width"], temperature: float | int
) -> Float[Array, "*rows width"]:
    """softmax(logits / t); at t = 0 all mass on the argmax, the lowest id on ties.

    A one-hot p and q make every rule of this module its greedy form, whatever the draws: a
    proposal is accepted iff it is the target's argmax, and that argmax is the correction.

    Args:
        logits: z or ℓ [*rows width].
        temperature: t ≥ 0.

    Returns:
        Probabilities [*rows width].

    Source: sheet §10.

    >>> distribution(jnp.array([1.0, 3.0, 3.0]), 0).tolist()
    [0.0, 1.0, 0.0]
    """
    # XLA takes a subnormal number for 0 and would divide by it.
    if temperature < jnp.finfo(logits.dtype).tiny:
        return jax.nn.one_hot(logits.argmax(axis=-1), logits.shape[-1], dtype=logits.dtype)
    # The largest logit is 0 before the division: a tiny t overflows to −inf only.
    return jax.nn.softmax((logits - logits.max(axis=-1, keepdims=True)) / temperature, axis=-1)


def sample(probabilities: Float[Array, " width"], u: Float[Array, ""]) -> Int[Array, ""]:
    """The first id whose cumulative probability exceeds u; never one of probability 0.

    Where rounding leaves the total at or below u, the last possible id.

    Args:
        probabilities: [width].
        u: a draw in [0, 1).

    Returns:
        An id.

    Source: sheet §10.

    >>> int(sample(jnp.array([0.25, 0.0, 0.75]), jnp.array(0.25)))
    2
    """
    possible = probabilities > 0
    # A parallel sum need not ascend to the last bit: an impossible id is masked out as well.
    reached = possible & (jnp.cumsum(probabilities) > u)
    last = probabilities.shape[0] - 1 - possible[::-1].argmax()
    return jnp.where(reached.any(), reached.argmax(), last)


def draft_block(
    drafter: Drafter,
    tokens: Int[Array, " seq"],
    hidden_states: Float[Array, "context captured"],
    temperature: float | int,
    draws: Float[Array, " n"],
) -> Proposals:
    """n proposals after the last token, slot by slot.

    Each sampled draft id is turned into its target id **before** the next slot is given it.

    Args:
        drafter: the draft.
        tokens: the tokens so far, the anchor last [seq].
        hidden_states: captured states of the tokens before the anchor [context captured].
        temperature: t ≥ 0.
        draws: one per proposal [n].

    Returns:
        Target ids [n], q over the kept ids [n kept], confidence logits [n] or None.

    Raises:
        ValueError: more proposals than the block has slots, or logits that give no distribution.

    Source: sheet §10, §6; field notes 28 and 29.
    """
    check_block(drafter, draws.shape[0])
    state, previous = drafter.begin(tokens, hidden_states), tokens[-1]
    chosen, distributions, confidences = [], [], []
    for slot, u in enumerate(draws):
        state, z, c = drafter.step(state, previous)
        check_logits(f"the draft's logits of proposal {slot}", z)
        q = distribution(z, temperature)
        previous = drafter.kept[sample(q, u)].astype(tokens.dtype)
        chosen.append(previous)
        distributions.append(q)
        if c is not None:
            confidences.append(c)
    return Proposals(
        tokens=jnp.stack(chosen),
        probabilities=jnp.stack(distributions),
        confidence_logits=jnp.stack(confidences) if confidences else None,
    )


def check_block(drafter: Drafter, proposals: int) -> None:
    """Refuse to draft more tokens than a block has slots.

    Args:
        drafter: the draft.
        proposals: n.

    Raises:
        ValueError: n is above the drafter's slots.

    Source: field note 29.
    """
    if proposals > drafter.slots:
        raise ValueError(
            f"proposals: {proposals} asked of a draft whose blocks have {drafter.slots} slots to "
            "propose with (block_size of them; one fewer in the bonus-anchor layout): ask for at "
            f"most {drafter.slots}, or use a draft with larger blocks"
        )


def check_logits(name: str, logits: Float[Array, "*rows width"]) -> None:
    """Refuse logits that give no distribution; −inf is the logit of an id that is never said.

    At temperature 0 an argmax would pick NaN and go on; above it no comparison with NaN is true,
    so every proposal would be rejected and the last id be drawn.

    Args:
        name: whose logits they are, for the message.
        logits: z or ℓ [*rows width].

    Raises:
        ValueError: a row holds NaN or +inf, or nothing but −inf.
    """
    # A maximum passes NaN on.
    if not bool(jnp.isfinite(logits.max(axis=-1)).all()):
        raise ValueError(
            f"{name}: expected numbers (−inf for ids that are never said), got NaN, +inf or a row "
            "of −inf alone; look for a fault in its weights or in the captured states"
        )


class BlockState(NamedTuple):
    """Where a block stands: the slot that is read next, h of all slots, the rnn head's s."""

    slot: Int[Array, ""]
    hidden: Float[Array, "γ hidden"]
    recurrent: Float[Array, " rank"]


def dspark_drafter(
    config: DraftConfig,
    params: Any,
    target: Target,
    vocabulary: VocabularyMap | None,
    tokenizer_size: int | None = None,
) -> Drafter:
    """A DSpark draft as decoding sees it: one backbone pass per block, then the heads per slot.

    Given a block's own tokens as previous tokens, its slots give the logits of the teacher-forced
    forward. Captured states at or after the anchor are not seen, so there may be more of them.

    Args:
        config: what the draft is, with `projector_type` "dspark".
        params: the parameter tree.
        target: E and U.
        vocabulary: the map; None only for an unpruned draft.
        tokenizer_size: V_tok; ids from there up are padding and get no probability, whatever
            their logits, also in an unpruned draft. None means V.

    Returns:
        The drafter; its `kept` are the kept ids below V_tok, and it has γ slots.

    Raises:
        ValueError: the config is of the other layout, the map does not fit it, or the map keeps
            no id below V_tok.

    Source: sheet §10, §5, §6, §1 (V_tok); field notes 27 and 28.
    """
    check_layout(config, DSPARK)
    return _model_drafter(config, params, target, vocabulary, tokenizer_size)


def dflash_drafter(
    config: DraftConfig,
    params: Any,
    target: Target,
    vocabulary: VocabularyMap | None,
    tokenizer_size: int | None = None,
) -> Drafter:
    """A DFlash draft as decoding sees it: one backbone pass per block, the head per slot.

    Slot k predicts x[a+k] and slot 0 holds the anchor, so proposal j is read off slot j+1. There
    is no Markov head: the q of a proposal does not depend on the proposals before it, and the
    slots give the logits of the forward pass whatever was sampled.

    Args:
        config: what the draft is, with `projector_type` "dflash".
        params: the backbone's parameter tree.
        target: E and U.
        vocabulary: the map; None only for an unpruned draft.
        tokenizer_size: V_tok, as for `dspark_drafter`.

    Returns:
        The drafter, of γ−1 slots and without confidence logits.

    Raises:
        ValueError: as `dspark_drafter`.

    Source: sheet §3, last paragraph; §10; §12.
    """
    check_layout(config, DFLASH)
    return _model_drafter(config, params, target, vocabulary, tokenizer_size)


def slot_logits(
    model: DSparkDraft,
    state: BlockState,
    previous: Int[Array, ""],
    head_rows: Float[Array, "kept hidden"],
) -> Slot:
    """z = h·U_Kᵀ + Markov bias of one slot, its confidence logit, and the state after it.

    Args:
        model: the draft, bound to its parameters.
        state: the block's state before the slot.
        previous: the previous token, a **target** id.
        head_rows: U_K [kept hidden].

    Returns:
        The slot, z over all K kept ids.

    Source: sheet §6.
    """
    h = state.hidden[state.slot][None, None, None, :]
    z = jnp.einsum("bnjh,kh->bnjk", h, head_rows)
    recurrent, e = state.recurrent, None
    if model.config.markov_head_type != "none":
        head, e = model.markov_head, model.markov_head.embed(previous[None, None, None])
        if isinstance(head, RnnMarkovHead):
            s, bias = head.step(recurrent[None, None, :], e[:, :, 0], h[:, :, 0])
            recurrent, z = s[0, 0], z + bias[:, :, None]
        else:
            z = z + head(e, h)
    c = model.confidence_head(h, e)[0, 0, 0] if model.config.enable_confidence_head else None
    after = state._replace(slot=state.slot + 1, recurrent=recurrent)
    return Slot(state=after, logits=z[0, 0, 0], confidence_logit=c)


def _model_drafter(
    config: DraftConfig,
    params: Any,
    target: Target,
    vocabulary: VocabularyMap | None,
    tokenizer_size: int | None,
) -> Drafter:
    kept = kept_ids(fitting_map(config, vocabulary))
    head_rows = target.lm_head[kept]
    if tokenizer_size is not None and tokenizer_size > config.vocab_size:
        raise ValueError(
            f"tokenizer_size: expected at most vocab_size = {config.vocab_size}, got "
            f"{tokenizer_size}: the head has a row for every id that a tokenizer can produce"
        )
    # Kept ids ascend, so the padding ids among them are the last columns of z.
    proposable = kept if tokenizer_size is None else kept[kept < tokenizer_size]
    if proposable.shape[0] == 0:
        raise ValueError(
            f"tokenizer_size = {tokenizer_size} leaves none of the kept ids: pass the number of "
            "ids that the tokenizer can produce, or build the map with it"
        )

    def begin(
        tokens: Int[Array, " seq"], hidden_states: Float[Array, "context captured"]
    ) -> BlockState:
        _check_states(config, hidden_states, tokens.shape[0] - 1)
        anchor = jnp.asarray(tokens.shape[0] - 1)
        return _begin(config, params, target.embed_tokens, anchor, tokens[-1], hidden_states)

    def step(state: BlockState, previous: Int[Array, ""]) -> Slot:
        after = _step(config, params, head_rows, state, previous)
        return after._replace(logits=after.logits[: proposable.shape[0]])

    slots = config.block_size - _first_slot(config)
    return Drafter(begin=begin, step=step, kept=proposable, slots=slots)


def _first_slot(config: DraftConfig) -> int:
    """Return the first slot that predicts a token after the anchor (sheet §3)."""
    return 1 if config.projector_type == DFLASH else 0


def _check_states(
    config: DraftConfig, hidden_states: Float[Array, "context captured"], needed: int
) -> None:
    seen, width = hidden_states.shape
    if seen < needed:
        raise ValueError(
            f"hidden_states: expected the captured states of the {needed} tokens before the "
            f"anchor, got {seen}; pass the target's states of every token it has read"
        )
    layers, hidden = len(config.target_layer_ids), config.hidden_size
    if width != layers * hidden:
        raise ValueError(
            f"hidden_states: expected {layers} captured layers (target_layer_ids) of hidden_size = "
            f"{hidden}, that is rows of {layers * hidden}, got rows of {width}"
        )


@partial(jax.jit, static_argnums=0)
def _begin(
    config: DraftConfig,
    params: Any,
    embed_tokens: Float[Array, "vocab hidden"],
    anchor: Int[Array, ""],
    anchor_token: Int[Array, ""],
    hidden_states: Float[Array, "context captured"],
) -> BlockState:
    ids = jnp.full((config.block_size,), config.mask_token_id, anchor_token.dtype)
    embedded = embed_tokens[ids.at[0].set(anchor_token)]
    # The anchor has a position but no state yet: a row that nothing sees, so that a context that
    # begins with the anchor is not empty.
    context = jnp.pad(hidden_states, ((0, 1), (0, 0)))
    # What the slots propose is not among the backbone's inputs: one pass serves the whole block.
    # A DSpark draft keeps the backbone's parameters at the top of its tree, beside its heads'.
    h = Backbone(config, working_dtype(params)).apply(
        {"params": params},
        context[None],
        embedded[None, None],
        anchor[None, None],
        jnp.ones((1, 1), bool),
    )
    first = jnp.full_like(anchor, _first_slot(config))
    return BlockState(first, h[0, 0], jnp.zeros((config.markov_rank,), h.dtype))


@partial(jax.jit, static_argnums=0)
def _step(
    config: DraftConfig,
    params: Any,
    head_rows: Float[Array, "kept hidden"],
    state: BlockState,
    previous: Int[Array, ""],
) -> Slot:
    if config.projector_type == DFLASH:
        z = head_rows @ state.hidden[state.slot]
        return Slot(state=state._replace(slot=state.slot + 1), logits=z, confidence_logit=None)
    model = DSparkDraft(config)
    return model.apply({"params": params}, state, previous, head_rows, method=slot_logits)
