"""Speculative decoding (§10): rules by hand, and all its paths enumerated on tiny vocabularies."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_decoding import (
    Paths,
    assert_same_distribution,
    outputs,
    softmax,
    table_drafter,
    table_target,
    target_process,
)

from jaxdraft.decoding import (
    DecodingConfig,
    accepts,
    over_vocabulary,
    residual,
    speculate,
    speculative_round,
    verify,
)
from jaxdraft.drafting import distribution, draft_block, sample
from jaxdraft.expectation import expected_length
from jaxdraft.metrics import tau_probabilistic
from jaxdraft.objective import overlap

LAST_U = math.nextafter(1.0, 0.0)


def u(x):
    return jnp.asarray(float(x))


# Rules, by hand


def test_sample_takes_the_first_id_that_exceeds_u():
    # Faults: ≥ instead of >, an id of probability 0 at u = 0 or between two others.
    p = jnp.array([0.0, 0.25, 0.0, 0.5, 0.25, 0.0])
    got = [int(sample(p, u(x))) for x in (0, 0.2499, 0.25, 0.7499, 0.75, LAST_U)]
    assert got == [1, 1, 3, 3, 4, 4]


def test_sample_where_rounding_ends_below_u():
    # Fault: past the end, or the impossible last id, where ten times 0.1 sum to less than u.
    p = jnp.array([0.1] * 10 + [0.0])
    assert int(sample(p, u(LAST_U))) == 9
    assert int(sample(p * (1 - 1e-9), u(LAST_U))) == 9


def test_temperature_by_hand():
    # Faults: t multiplying; ties to the higher id; overflow at a tiny t; t = 0 dividing.
    z = jnp.array([[0.0, math.log(2.0)], [1.0, 1.0]])
    # exponentials of two libraries
    np.testing.assert_allclose(distribution(z, 0.5), [[0.2, 0.8], [0.5, 0.5]], rtol=1e-15)
    assert distribution(z, 0).tolist() == [[0, 1], [1, 0]]
    assert distribution(z, 1e-320).tolist() == [[0, 1], [1, 0]]
    assert distribution(z * 1e9, 1e-305).tolist() == [[0, 1], [0.5, 0.5]]


def test_accepts_strictly_below():
    # Fault: ≤ accepts what the target never says (p = 0, u = 0).
    cases = [(0.0, 0.5, 0.0), (0.25, 0.5, 0.5), (0.25, 0.5, 0.4999), (0.5, 0.5, LAST_U)]
    assert [bool(accepts(u(p), u(q), u(x))) for p, q, x in cases] == [False, False, True, True]


def test_residual_by_hand():
    # Faults: p taken instead of p − q; renormalised over the kept ids only.
    q = over_vocabulary(jnp.array([[0.75, 0.25]]), jnp.array([1, 3]), 4)
    assert q.tolist() == [[0, 0.75, 0, 0.25]]
    assert residual(jnp.array([0.25, 0.25, 0.25, 0.25]), q[0]).tolist() == [0.5, 0, 0.5, 0]
    # nothing left: rounding alone rejected it
    assert residual(q[0], q[0]).tolist() == q[0].tolist()


def test_draws_of_a_round_are_read_in_their_order():
    # Faults: acceptances before or between proposals; the correction drawn from the next free u.
    # Proposals 1 (u = 0.6) and 0 (u = 0.2); acceptance by p/q = ½ and ½ at u = 0.3 and 0.7; the
    # residual after prefix 1 is all on 2.
    target = table_target(3, look_up=lambda _: jnp.log(jnp.array([0.25, 0.25, 0.5])))
    drafter = table_drafter([0, 1], look_up=lambda _: jnp.zeros(2))
    states = jnp.zeros((0, 1))
    how = DecodingConfig(proposals=2, limit=9, temperature=1.0)

    def committed(*draws):
        got, _ = speculative_round(target, drafter, jnp.array([0]), states, how, jnp.asarray(draws))
        return got.accepted, got.committed

    assert committed(0.6, 0.2, 0.3, 0.7, 0.1) == (1, (1, 2))
    assert committed(0.6, 0.2, 0.7, 0.3, 0.1) == (0, (2,))
    assert committed(0.6, 0.2, 0.3, 0.4, 0.1) == (2, (1, 0, 0))
    assert committed(0.6, 0.2, 0.3, 0.4, 0.6) == (2, (1, 0, 2))


# All paths

CASES = {
    "unpruned": dict(vocab=3, kept=[0, 1, 2], n=2, limit=2, temperature=1.0),
    "pruned, cold": dict(vocab=4, kept=[0, 2], n=2, limit=2, temperature=0.6),
    "ends": dict(vocab=3, kept=[1, 2], n=2, limit=3, temperature=1.5, end_of_text=1),
    "one by one": dict(vocab=2, kept=[0, 1], n=1, limit=4, temperature=1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_the_loops_output_distribution_is_the_targets(name, monkeypatch):
    # Faults: residual without − q; q not 0 outside the kept ids; bonus token from q; renormalised
    # acceptance; states of rejected tokens given to the draft; tokens kept past the end of text;
    # a mean accepted length, in the first round or a later one, that is not the enumerated one.
    case = dict(CASES[name])
    vocab, kept, n = case.pop("vocab"), case.pop("kept"), case.pop("n")
    target, drafter, prompt = table_target(vocab), table_drafter(kept), [1, 0]
    how = DecodingConfig(proposals=n, **case)
    draws = jnp.zeros((how.limit, 2 * n + 1))

    def run():
        return speculate(target, drafter, jnp.array(prompt), how, draws)

    seen = [(w, tuple(r.tokens.tolist()[2:]), r.rounds) for w, _, r in Paths(monkeypatch).over(run)]
    for _, new, rounds in seen:
        assert new == sum((r.committed for r in rounds), ())
        assert all(r.accepted <= r.proposed <= n for r in rounds)
    got = outputs((weight, new) for weight, new, _ in seen)
    assert_same_distribution(got, target_process(target, prompt, **case))
    if name == "one by one":  # the limit of 4 cuts neither of the first two rounds
        assert_mean_lengths(target, drafter, prompt, seen)


def assert_mean_lengths(target, drafter, prompt, seen):
    """Mean tokens of the first and second rounds = mean expected length where they begin."""
    for at in range(2):
        mean = sum(weight * len(of[at].committed) for weight, _, of in seen)
        starts = outputs(
            (weight, sum((r.committed for r in of[:at]), ())) for weight, _, of in seen
        )
        expected = 0.0
        for start, weight in starts.items():
            tokens = jnp.array([*prompt, *start])
            known = target(tokens).hidden_states[:-1]
            expected += weight * float(expected_length(target, drafter, tokens, known, 1, 1.0))
        # sums of some thousand products of size 1
        assert abs(mean - expected) < 1e-12


@pytest.mark.parametrize(("kept", "n", "t"), [([0, 2], 3, 0.6), ([0, 1, 2, 3], 2, 1.0)])
def test_a_rounds_paths_length_and_draws(kept, n, t, monkeypatch):
    # Faults: a mean accepted length that is not the enumerated one; target ids read as draft ids
    # in either; a temperature on one side only; and, replayed on the real code, any u taken from
    # another place of the array.
    target, drafter, tokens = table_target(4), table_drafter(kept), jnp.array([3, 1])
    known = target(tokens).hidden_states[:1]
    how = DecodingConfig(proposals=n, limit=n + 1, temperature=t)

    def run(draws):
        return speculative_round(target, drafter, tokens, known, how, draws)[0]

    with monkeypatch.context() as patched:
        seen = list(Paths(patched).over(lambda: run(jnp.zeros(2 * n + 1))))
    mean = sum(weight * len(round_.committed) for weight, _, round_ in seen)
    # sums of some hundred products of size 1
    assert abs(mean - enumerated_by_hand(4, kept, (3, 1), n, t)) < 1e-12
    assert abs(mean - float(expected_length(target, drafter, tokens, known, n, t))) < 1e-12
    for _, used, round_ in seen[::7]:
        draws = np.full(2 * n + 1, 0.5)
        draws[: len(used) - 1], draws[-1] = used[:-1], used[-1]
        assert run(jnp.asarray(draws)) == round_


class SecondRoundEndedError(Exception):
    """The draft is asked for a third block: the loop has committed two rounds."""


@pytest.mark.parametrize(("vocab", "kept"), [(2, [0, 1]), (3, [0, 2])])
def test_the_loops_mean_accepted_length_at_two_proposals(vocab, kept, monkeypatch):
    # Faults: the second round begun from a wrong anchor, or with states of rejected tokens; a
    # bonus token left out, or an accepted one, in either round. Every path of two rounds is
    # walked; 7 new tokens are more than two rounds of two proposals add, so nothing is cut.
    n, prompt, target = 2, [1, 0], table_target(vocab)
    plain, begun = table_drafter(kept), []
    how = DecodingConfig(proposals=n, limit=7, temperature=1.0)
    draws = jnp.zeros((7, 2 * n + 1))

    def begin(tokens, hidden_states):
        begun.append(tokens.tolist())
        if len(begun) == 3:
            raise SecondRoundEndedError
        return plain.begin(tokens, hidden_states)

    def run():
        begun.clear()
        with pytest.raises(SecondRoundEndedError):
            speculate(target, plain._replace(begin=begin), jnp.array(prompt), how, draws)
        return [tuple(tokens) for tokens in begun]

    seen = [(weight, run_) for weight, _, run_ in Paths(monkeypatch).over(run)]
    assert len(seen) >= 100
    for at in range(2):
        mean = sum(weight * (len(of[at + 1]) - len(of[at])) for weight, of in seen)
        starts = outputs((weight, of[at]) for weight, of in seen)
        by_hand = sum(w * enumerated_by_hand(vocab, kept, of, n, 1.0) for of, w in starts.items())
        # sums of some hundred products of size 1
        assert abs(mean - by_hand) < 1e-12
        spec = 0.0
        for start, weight in starts.items():
            tokens = jnp.array(start)
            known = target(tokens).hidden_states[:-1]
            spec += weight * float(expected_length(target, plain, tokens, known, n, 1.0))
        assert abs(mean - spec) < 1e-12


def enumerated_by_hand(vocab, kept, prefix, n, t):
    """§10's formula on the tables, in NumPy."""
    if n == 0:
        return 1.0
    p = softmax(table_target(vocab)(jnp.asarray(prefix)).logits[-1], t)
    q = softmax(table_drafter(kept).step(prefix[:-1], prefix[-1]).logits, t)
    both = [(min(p[x], q[i]), x) for i, x in enumerate(kept)]
    return 1 + sum(m * enumerated_by_hand(vocab, kept, (*prefix, x), n - 1, t) for m, x in both)


def test_tau_and_the_expected_length_differ_where_acceptance_depends_on_the_prefix():
    # Fault: either formula taken for the other. Slot 0: p = (¾, ¼), q = (¼, ¾), so α = ½. Slot 1:
    # after token 0 draft and target agree (α = 1), after token 1 they are disjoint (α = 0).
    # §10: 1 + ½ + (¼·1 + ¼·0) = 1.75: accepted prefixes are as likely as min(p, q), ¼ each.
    # §9: 1 + ½ + ½·α of the slot after the data's token: 2 on token 0, 1.5 on token 1. Averaged
    # over data that the target wrote, ¾·2 + ¼·1.5 = 1.875, an estimate that is 0.125 too high.
    p = {(0,): [0.75, 0.25], (0, 0): [0.5, 0.5], (0, 1): [1.0, 0.0]}
    q = {(0,): [0.25, 0.75], (0, 0): [0.5, 0.5], (0, 1): [0.0, 1.0]}
    target = table_target(2, look_up=lambda context: jnp.log(jnp.asarray(p[context])))
    drafter = table_drafter([0, 1], look_up=lambda context: jnp.log(jnp.asarray(q[context])))

    def tau(label):
        slots = [jnp.array([[[table[(0,)], table[(0, label)]]]]) for table in (q, p)]
        return float(tau_probabilistic(overlap(*slots), jnp.ones((1, 1, 2), bool))[0])

    none = jnp.zeros((0, 1))
    length = float(expected_length(target, drafter, jnp.array([0]), none, 2, 1.0))
    print(f"tau {tau(0)} on token 0, {tau(1)} on token 1, expected length {length}")
    # exponentials of logarithms of a few numbers of size 1
    assert [tau(0), tau(1), 0.75 * tau(0) + 0.25 * tau(1)] == pytest.approx([2, 1.5, 1.875], 1e-14)
    assert length == pytest.approx(1.75, 1e-14)
    # one slot: nothing to depend on, and both are 1 + α
    one = float(expected_length(target, drafter, jnp.array([0]), none, 1, 1.0))
    assert one == pytest.approx(1.5, 1e-14)


# Field notes


def test_more_drafts_than_the_block_has_slots_are_refused_note_29():
    # Fault (note 29): seven drafts asked of a block-5 model, answered with rubbish.
    target, drafter = table_target(3), table_drafter([0, 2], slots=5)
    words = "proposals: 7 asked of a draft whose blocks have 5 slots"
    prompt = jnp.array([1])
    with pytest.raises(ValueError, match=words):
        speculate(target, drafter, prompt, DecodingConfig(proposals=7, limit=9), None)
    with pytest.raises(ValueError, match=words):
        draft_block(drafter, prompt, jnp.zeros((0, 1)), 0, jnp.zeros(7))
    with pytest.raises(ValueError, match=words):
        expected_length(target, drafter, prompt, jnp.zeros((0, 1)), 7, 0)
    # Faults: the bound off by one; a number of proposals brought down in silence. A round adds at
    # most 6 tokens, so the limit of 9 does not cut the first one's statistics.
    five = speculate(target, drafter, prompt, DecodingConfig(proposals=5, limit=9), None)
    assert five.rounds[0].proposed == 5


def counting(end_of_text=None, limit=9, wrong_after=99):
    """Target and draft both count upwards; the draft goes astray after a token."""
    target = table_target(9, look_up=lambda context: jax.nn.one_hot((context[-1] + 1) % 9, 9))
    drafter = table_drafter(
        list(range(9)),
        look_up=lambda context: jax.nn.one_hot(
            (context[-1] + 1 + (context[-1] >= wrong_after)) % 9, 9
        ),
    )
    how = DecodingConfig(proposals=4, limit=limit, end_of_text=end_of_text)
    return speculate(target, drafter, jnp.array([1]), how, None)


def test_an_accepted_end_of_text_ends_the_sequence_note_30():
    # Fault (note 30): tokens kept past an accepted end of text, at slot 2 of 4, in the output or
    # in the statistics.
    got = counting(end_of_text=4)
    assert got.tokens.tolist() == [1, 2, 3, 4]
    assert got.rounds == ((3, 3, (2, 3, 4)),)


def test_an_end_of_text_from_the_target_and_a_limit():
    # Faults: a bonus or corrected end of text that goes on; a limit that is overshot, or whose
    # last round keeps the statistics of tokens that were dropped.
    bonus = counting(end_of_text=6)
    assert bonus.rounds == ((4, 4, (2, 3, 4, 5, 6)),)
    corrected = counting(end_of_text=4, wrong_after=3)
    assert corrected.rounds == ((4, 2, (2, 3, 4)),)
    limited = counting(limit=7)
    assert limited.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert limited.rounds == ((4, 4, (2, 3, 4, 5, 6)), (2, 2, (7, 8)))


# Truncation's plumbing, and greedy verification


def test_truncated_rounds_skip_draws_and_keep_the_place_of_the_last():
    # Fault: acceptances read from the draws of dropped proposals, or a bonus from another place.
    target = table_target(3, look_up=lambda _: jnp.log(jnp.array([0.25, 0.25, 0.5])))
    drafter = table_drafter([0, 1], look_up=lambda _: jnp.zeros(2), confidence=lambda _: 0.0)
    how = DecodingConfig(proposals=3, limit=9, temperature=1.0, truncate=lambda _: 1)
    draws = jnp.array([0.6, 0.1, 0.1, 0.3, 0.9, 0.9, 0.6])
    got, scored = speculative_round(target, drafter, jnp.array([0]), jnp.zeros((0, 1)), how, draws)
    assert got == (1, 1, (1, 2))
    assert scored.logits.shape[0] == 2  # the dropped proposals cost the target nothing
    nothing = DecodingConfig(proposals=3, limit=9, temperature=1.0, truncate=lambda _: 0)
    plain, _ = speculative_round(target, drafter, jnp.array([0]), jnp.zeros((0, 1)), nothing, draws)
    assert plain == (0, 0, (2,))


def test_what_truncate_may_answer():
    # Faults: statistics that hold an array where a number is expected, and print as one; a float,
    # a bool or a number of proposals that the block has not, cut to something.
    target = table_target(3, look_up=lambda _: jnp.log(jnp.array([0.25, 0.25, 0.5])))
    drafter = table_drafter([0, 1], look_up=lambda _: jnp.zeros(2), confidence=lambda _: 0.0)

    def proposed(answer):
        how = DecodingConfig(proposals=3, limit=9, temperature=1.0, truncate=lambda _: answer)
        args = target, drafter, jnp.array([0]), jnp.zeros((0, 1)), how, jnp.full(7, 0.1)
        return speculative_round(*args)[0]

    for answer in (2, np.int32(2), jnp.asarray(2)):
        assert str(proposed(answer)) == "Round(proposed=2, accepted=2, committed=(0, 0, 0))"
    for answer in (True, 2.0, jnp.asarray(2.0), jnp.array([2]), None, -1, 4):
        with pytest.raises(ValueError, match="truncate: expected a whole number from 0 to"):
            proposed(answer)


def test_greedy_verification_by_hand():
    # Faults: acceptance beyond the first mismatch; the correction from another slot.
    p = jax.nn.one_hot(jnp.array([2, 0, 1, 3]), 4)
    for proposals, expected in (
        ([2, 0, 1], (3, 3)),
        ([2, 1, 1], (1, 0)),
        ([0, 0, 1], (0, 2)),
    ):
        x = jnp.array(proposals)
        for draw in (0.0, 0.5, LAST_U):
            count, token = verify(x, jax.nn.one_hot(x, 4), p, jnp.full(3, draw), u(draw))
            assert (count, int(token)) == expected
