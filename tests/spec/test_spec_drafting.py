"""Decoding with a real draft, at the sizes of the field notes: slots, greedy output, ids (§10)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_toys import HIDDEN, SLOTS, K, V, config, dflash_config, params, toy_map
from spec_toys import target as weights_of_target

from jaxdraft import dflash
from jaxdraft.decoding import DecodingConfig, TargetPass, speculate, uniform_draws
from jaxdraft.drafting import dflash_drafter, draft_block, dspark_drafter
from jaxdraft.evaluate import Batch, run_draft
from jaxdraft.vocabulary import identity_map, kept_ids

HEADS = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn, sliding": {
        "markov_head_type": "rnn",
        "layer_types": ["sliding_attention"],
        "sliding_window": 3,
    },
    "none": {
        "markov_rank": 0,
        "confidence_head_with_markov": False,
        "enable_confidence_head": False,
    },
}
LONGEST = 40


def backbone_of(weights):
    """A DFlash draft's tree: the backbone's part of a DSpark draft's."""
    return {name: leaf for name, leaf in weights.items() if not name.endswith("_head")}


def real(of, seed=0, **options):
    """The toy draft with random weights; captured states padded to one length, to compile once."""
    if of.projector_type == "dflash":
        weights = backbone_of(params(config(**HEADS["none"]), seed))
        drafter = dflash_drafter(of, weights, weights_of_target(), toy_map(), **options)
    else:
        drafter = dspark_drafter(of, params(of, seed), weights_of_target(), toy_map(), **options)

    def begin(tokens, hidden_states):
        assert hidden_states.shape[0] == tokens.shape[0] - 1
        missing = LONGEST - hidden_states.shape[0]
        return drafter.begin(
            tokens, jnp.pad(hidden_states, ((0, missing), (0, 0)), constant_values=7)
        )

    return drafter._replace(begin=begin)


TABLES = np.random.default_rng(5).normal(size=(3, LONGEST, 2 * HIDDEN + V))


def toy_target(tokens):
    """Causal: two tokens and the position decide; kept ids are favoured, to be accepted."""
    ids = np.asarray(tokens)
    before = np.concatenate([[0], ids[:-1]])
    rows = TABLES[0][ids] + TABLES[1][before] + TABLES[2][: len(ids)]
    logits = rows[:, 2 * HIDDEN :] + 3 * toy_map().t2d
    return TargetPass(jnp.asarray(logits), jnp.asarray(rows[:, : 2 * HIDDEN]))


@pytest.mark.parametrize("head", HEADS)
def test_slot_by_slot_equals_the_teacher_forced_forward(head):
    # Faults: an rnn state that is not carried, or carried from block to block; a mask token before
    # slot 1; states at or after the anchor seen; c without, or with a later, previous token.
    of, anchors = config(**HEADS[head]), [0, 3]
    ids = np.random.default_rng(7).integers(0, V, 8)
    states = toy_target(ids).hidden_states
    batch = Batch(
        input_ids=jnp.asarray(ids)[None],
        loss_mask=jnp.ones((1, 8)),
        hidden_states=states[None],
        target_last_hidden_states=jnp.zeros((1, 8, HIDDEN)),
        anchor_positions=jnp.array([anchors]),
        block_keep_mask=jnp.array([[True, True]]),
    )
    previous = jnp.asarray([[ids[a : a + SLOTS] for a in anchors]])
    forward = jax.jit(run_draft, static_argnums=(0, 1))
    weights, kept = weights_of_target(), kept_ids(toy_map())
    forced = forward(of, False, params(of), weights, kept, batch, previous)
    drafter = real(of)
    for n, anchor in enumerate(anchors):
        state = drafter.begin(jnp.asarray(ids[: anchor + 1]), states[:anchor])
        for k in range(SLOTS):
            state, z, c = drafter.step(state, previous[0, n, k])
            # two orders of summation over 8 to 40 terms, logits up to 1e1
            np.testing.assert_allclose(z, forced.logits[0, n, k], rtol=0, atol=1e-12)
            if forced.confidence_logits is None:
                assert c is None
            else:
                expected = forced.confidence_logits[0, n, k]
                np.testing.assert_allclose(c, expected, rtol=0, atol=1e-12)


def test_a_dflash_block_is_the_forward_pass_of_slots_1_to_3():
    # Faults: proposals read off the block one slot early (slot 0 holds the anchor), the block or
    # its context placed one token off, a slot that depends on what was sampled before it.
    of, anchors = dflash_config(), [0, 3]
    ids = np.random.default_rng(7).integers(0, V, 8)
    states = toy_target(ids).hidden_states
    batch = Batch(
        input_ids=jnp.asarray(ids)[None],
        loss_mask=jnp.ones((1, 8)),
        hidden_states=states[None],
        target_last_hidden_states=jnp.zeros((1, 8, HIDDEN)),
        anchor_positions=jnp.array([anchors]),
        block_keep_mask=jnp.array([[True, True]]),
    )
    weights, kept = backbone_of(params(config(**HEADS["none"]))), kept_ids(toy_map())
    forced = dflash.run_draft(of, weights, weights_of_target(), kept, batch)
    labels_at = dflash.label_positions(batch.anchor_positions, batch.block_keep_mask, SLOTS, 8)
    drafter = real(of)
    assert drafter.slots == SLOTS - 1
    for n, anchor in enumerate(anchors):
        state = drafter.begin(jnp.asarray(ids[: anchor + 1]), states[:anchor])
        for j in range(drafter.slots):
            state, z, c = drafter.step(state, jnp.asarray(15 - j))
            (slot,) = np.flatnonzero(labels_at[0, n] == anchor + 1 + j)
            # two orders of summation over 8 to 40 terms, logits up to 1e1
            np.testing.assert_allclose(z, forced.logits[0, n, slot], rtol=0, atol=1e-12)
            assert c is None


def test_each_layout_has_its_drafter():
    # Faults: a draft decoded with the other layout than it was trained with, which no error shows;
    # as many proposals as slots asked of a bonus-anchor block, where there is one fewer.
    rest = weights_of_target(), toy_map()
    dspark, bonus = config(**HEADS["none"]), dflash_config()
    weights = params(dspark)
    with pytest.raises(ValueError, match=r"expected 'dspark' .the anchor-first layout., got 'dfl"):
        dspark_drafter(bonus, backbone_of(weights), *rest)
    with pytest.raises(ValueError, match=r"expected 'dflash' .the bonus-anchor layout., got 'dsp"):
        dflash_drafter(dspark, backbone_of(weights), *rest)
    how = DecodingConfig(proposals=SLOTS, limit=2)
    speculate(toy_target, real(dspark), jnp.array([2, 11]), how, None)
    with pytest.raises(ValueError, match="4 asked of a draft whose blocks have 3 slots"):
        speculate(toy_target, real(bonus), jnp.array([2, 11]), how, None)


def test_a_prompt_of_one_token_needs_no_context():
    # Fault: attention over an empty context.
    of = config()
    drafter = dspark_drafter(of, params(of), weights_of_target(), toy_map())
    block = draft_block(drafter, jnp.array([5]), jnp.zeros((0, 2 * HIDDEN)), 1.0, jnp.zeros(SLOTS))
    padded = draft_block(
        real(of), jnp.array([5]), jnp.zeros((0, 2 * HIDDEN)), 1.0, jnp.zeros(SLOTS)
    )
    np.testing.assert_allclose(block.probabilities, padded.probabilities, atol=1e-14)


def greedy(prompt, limit, end_of_text=None):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + limit and tokens[-1] != end_of_text:
        tokens.append(int(np.argmax(np.asarray(toy_target(tokens).logits)[-1])))
    return tokens


@pytest.mark.parametrize("head", [*HEADS, "dflash"])
def test_temperature_0_is_the_targets_greedy_output(head):
    # Faults: ties, a bonus token from the wrong row, a stale context, draws that matter at t = 0.
    of = dflash_config() if head == "dflash" else config(**HEADS[head])
    prompt, drafter = [2, 11], real(of)
    n = drafter.slots
    how = DecodingConfig(proposals=n, limit=12)
    calls = []

    def counted(tokens):
        calls.append(tokens.shape[0])
        return toy_target(tokens)

    got = speculate(counted, drafter, jnp.array(prompt), how, None)
    assert got.tokens.tolist() == greedy(prompt, 12)
    accepted = sum(r.accepted for r in got.rounds)
    assert 0 < accepted < sum(r.proposed for r in got.rounds)
    assert len(calls) == 1 + len(got.rounds)
    draws = uniform_draws(jax.random.key(3), 12, n, jnp.float64)
    assert speculate(toy_target, drafter, jnp.array(prompt), how, draws).rounds == got.rounds


def test_same_key_same_output_and_every_round_has_draws_of_its_own():
    # Faults: one row of draws for all rounds; draws that depend on how many are asked for.
    draws = uniform_draws(jax.random.key(3), 6, 4, jnp.float64)
    assert draws.shape == (6, 9)
    assert len(set(draws.ravel().tolist())) == 54
    longer = uniform_draws(jax.random.key(3), 9, 4, jnp.float64)
    assert (longer[:6] == draws).all()
    how = DecodingConfig(proposals=4, limit=6, temperature=1.0)
    args = toy_target, real(config()), jnp.array([2, 11]), how
    one, two = (speculate(*args, draws) for _ in range(2))
    assert one.rounds == two.rounds
    assert speculate(*args, longer[3:]).tokens.tolist() != one.tokens.tolist()


@pytest.mark.parametrize("temperature", [0, 3])
def test_padding_ids_are_never_proposed_note_27(temperature):
    # Fault (note 27): real vocabulary 20, head rows 24, pad logits +100: pad ids proposed, by an
    # unpruned draft here, or by one whose map kept them.
    of = config(vocab_size=24, draft_vocab_size=24)
    weights = params(of)
    weights["markov_head"] = {
        "markov_w1": {"embedding": jnp.ones((24, 3))},
        "markov_w2": {"kernel": jnp.zeros((3, 24)).at[0, 20:].set(100.0)},
    }
    frozen = weights_of_target()
    tables = type(frozen)(*(jnp.pad(x, ((0, 8), (0, 0))) for x in frozen))

    def proposed(tokenizer_size):
        drafter = dspark_drafter(of, weights, tables, identity_map(24), tokenizer_size)
        args = jnp.array([2, 11]), jnp.zeros((1, 2 * HIDDEN)), temperature
        return drafter, [draft_block(drafter, *args, jnp.full(4, x)) for x in (0.0, 0.4, 0.9999)]

    drafter, blocks = proposed(20)
    assert drafter.kept.tolist() == list(range(20))
    assert all((block.tokens < 20).all() for block in blocks)
    for block in blocks:
        # 20 probabilities of a softmax
        np.testing.assert_allclose(block.probabilities.sum(axis=-1), np.ones(4), atol=1e-14)
    assert any((block.tokens >= 20).any() for block in proposed(None)[1])
    with pytest.raises(ValueError, match="tokenizer_size = 0 leaves none"):
        proposed(0)
    # Fault: V_tok of another target's tokenizer taken (§1: V_tok ≤ V).
    with pytest.raises(ValueError, match="at most vocab_size = 24, got 25"):
        proposed(25)


def test_the_sampled_draft_id_is_mapped_before_w1_note_28():
    # Fault (note 28): W1 read with draft ids. Biases that fire only after a target token: 5 → 9
    # (draft id 3) → 3 (draft id 1) → 12 (draft id 4). Draft id 3 must fire token 9's bias and
    # target token 3 must not: read with draft ids, 9 would be followed by 12.
    of = config(confidence_head_with_markov=False)
    weights = params(of)
    w1 = jnp.zeros((V, 3)).at[5, 0].set(1.0).at[9, 1].set(1.0).at[3, 2].set(1.0)
    w2 = jnp.zeros((3, K)).at[0, 3].set(1e3).at[1, 1].set(1e3).at[2, 4].set(1e3)
    weights["markov_head"] = {"markov_w1": {"embedding": w1}, "markov_w2": {"kernel": w2}}
    drafter = dspark_drafter(of, weights, weights_of_target(), toy_map())
    states = jnp.zeros((1, 2 * HIDDEN))
    for temperature in (0, 1):
        block = draft_block(drafter, jnp.array([7, 5]), states, temperature, jnp.full(3, 0.5))
        assert block.tokens.tolist() == [9, 3, 12]


def test_missing_captured_states_are_refused():
    # Fault: rows that are not there taken for zeros before the anchor, and attended to.
    drafter = dspark_drafter(config(), params(config()), weights_of_target(), toy_map())
    tokens = jnp.array([1, 2, 3, 4, 5])
    with pytest.raises(ValueError, match="states of the 4 tokens before the anchor, got 2"):
        drafter.begin(tokens, jnp.zeros((2, 2 * HIDDEN)))
    with pytest.raises(ValueError, match=r"2 captured layers .* rows of 16, got rows of 8"):
        drafter.begin(tokens, jnp.zeros((4, HIDDEN)))


@pytest.mark.parametrize(
    "of", [config(**HEADS["rnn, sliding"]), dflash_config()], ids=["dspark", "dflash"]
)
def test_a_real_draft_in_float32(of):
    # Faults: a float64 constant in the block (strict promotion refuses it), another dtype of q;
    # rounding that reaches the tokens: from equal draws the two dtypes commit the same ones, unless
    # a draw lies within 1e-6 of a bound, which none of these does.
    def cast(dtype):
        return lambda tree: jax.tree.map(lambda x: jnp.asarray(x, dtype), tree)

    def single_target(tokens):
        return cast(jnp.float32)(toy_target(tokens))

    single = cast(jnp.float32)
    if of.projector_type == "dflash":
        weights, make = backbone_of(params(config(**HEADS["none"]))), dflash_drafter
    else:
        weights, make = params(of), dspark_drafter
    narrow = make(of, single(weights), single(weights_of_target()), toy_map())
    wide = make(of, weights, weights_of_target(), toy_map())
    states = jnp.zeros((1, 2 * HIDDEN), jnp.float32)
    draws = uniform_draws(jax.random.key(8), 6, 3, jnp.float32)
    block = draft_block(narrow, jnp.array([2, 11]), states, 1.0, draws[0, :3])
    assert block.probabilities.dtype == jnp.float32
    how = DecodingConfig(proposals=3, limit=6, temperature=1.0)
    got = speculate(single_target, narrow, jnp.array([2, 11]), how, draws)
    exact = speculate(toy_target, wide, jnp.array([2, 11]), how, draws.astype(jnp.float64))
    assert got.rounds == exact.rounds
    assert any(r.accepted for r in got.rounds)
