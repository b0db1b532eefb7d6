"""Prefix lengths from confidences, the scheduler against brute force, calibration; by hand."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_decoding import (
    Paths,
    assert_same_distribution,
    outputs,
    table_drafter,
    table_target,
    target_process,
)

from jaxdraft.decoding import DecodingConfig, speculate
from jaxdraft.scheduling import (
    confident_prefix,
    cumulative_cross_entropy,
    fit_temperatures,
    log_survival,
    scaled,
    schedule,
    survival,
    throughput,
)


def logit(p):
    return math.log(p) - math.log1p(-p)


def logits(*probabilities):
    return jnp.array([logit(p) for p in probabilities])


def test_survival_and_prefix_by_hand():
    # Faults: the single σ compared instead of the product; > instead of ≥; a later slot that
    # comes back above the threshold.
    c = jnp.stack([logits(0.8, 0.5, 0.99), logits(0.3, 0.99, 0.99)])
    # sigmoids of logarithms
    np.testing.assert_allclose(survival(c), [[0.8, 0.4, 0.396], [0.3, 0.297, 0.29403]], rtol=1e-14)
    assert confident_prefix(c, 0.39).tolist() == [3, 0]
    assert confident_prefix(c, 0.45).tolist() == [1, 0]
    assert confident_prefix(c, 0).tolist() == [3, 3]
    # σ(0) is exactly ½
    assert confident_prefix(jnp.zeros(3), 0.25).tolist() == 2
    # underflow: nothing is 0 by rounding alone that a threshold of 1 would keep
    assert confident_prefix(jnp.array([1e9, -1e9, 1e9]), 1).tolist() == 1
    with pytest.raises(ValueError, match="threshold: expected a probability"):
        confident_prefix(c, 1.5)


def test_scaled_by_hand():
    # Fault: temperatures along the wrong axis, or multiplied.
    got = scaled(jnp.array([[2.0, 6.0], [4.0, 3.0]]), jnp.array([2.0, 3.0]))
    assert got.tolist() == [[1, 2], [2, 1]]


def test_throughput_by_hand():
    # Faults: the token that every request gets left out, of the tokens or of the batch.
    a = jnp.array([[0.5, 0.25], [0.75, 0.5]])
    assert throughput(a, jnp.array([1, 2]), lambda n: n) == (2 + 0.5 + 0.75 + 0.5) / 5
    assert throughput(a, jnp.array([0, 0]), lambda n: 4.0) == 0.5


CONVEX = {
    "free": lambda n: 1.0,
    "linear": lambda n: 1 + 0.3 * n,
    "steep": lambda n: 1 + 2.0 * n,
    "square": lambda n: 1 + 0.02 * n * n,
    "roofline": lambda n: max(1.0, n / 4),
}


@pytest.mark.parametrize("name", CONVEX)
def test_the_scheduler_is_the_best_of_all_combinations_for_a_convex_time(name):
    # Faults: candidates in another order, e.g. by single confidence; the candidate that lowers the
    # throughput admitted; the early stop per request instead of for the batch.
    rng = np.random.default_rng(3)
    for requests, slots in ((2, 3), (3, 2)):
        for _ in range(4):
            a = survival(jnp.asarray(rng.normal(0.5, 1.5, (requests, slots))))
            got = throughput(a, schedule(a, CONVEX[name]), CONVEX[name])
            every = itertools.product(range(slots + 1), repeat=requests)
            best = max(brute(np.asarray(a), lengths, CONVEX[name]) for lengths in every)
            # two orders of summation of at most 7 terms
            assert got == pytest.approx(best, rel=1e-14)


def brute(a, lengths, step_time):
    expected = sum(1 + a[r, :n].sum() for r, n in enumerate(lengths))
    return expected / step_time(len(a) + sum(lengths))


def test_lengths_by_hand():
    # Fault: lengths in candidate order, or given to the wrong request. Time n + 1. Admitted:
    # .9 → 2.9/4 ≥ 2/3, .8 → 3.7/5, .72 → 4.42/6 falls below .74.
    a = jnp.array([[0.8, 0.4], [0.9, 0.72]])
    assert schedule(a, lambda n: n + 1).tolist() == [1, 1]
    # ties: the earlier slot, then the lower request; after .9 and .9 a step costs 9 instead of 5
    tied = jnp.array([[0.9, 0.9], [0.9, 0.9]])
    assert schedule(tied, lambda n: [0, 0, 3, 4, 5, 9, 9][n]).tolist() == [1, 1]
    assert schedule(tied, lambda n: [0, 0, 3, 4, 9, 9, 9][n]).tolist() == [1, 0]


def test_a_candidate_that_leaves_the_throughput_equal_is_admitted():
    # Fault: < and ≤ exchanged in the early stop. All numbers are dyadic: exact. One request, times
    # 1, 1.5, 1.75, 3: throughput 1/1, 1.5/1.5 = 1 (equal: admitted), 1.75/1.75 = 1, then
    # 1.875/3 falls.
    a = jnp.array([[0.5, 0.25, 0.125]])
    assert schedule(a, lambda n: [0, 1, 1.5, 1.75, 3][n]).tolist() == [2]
    # an equal one on the way to a better one: 1, 1, then 1.75/1.25
    assert schedule(a, lambda n: [0, 1, 1.5, 1.25, 3][n]).tolist() == [2]


def steps(n):
    """A tile of 1, then tiles of 3: not convex."""
    return 1.0 if n <= 1 else 2.0


def test_the_early_stop_is_not_the_best_for_a_stepwise_time():
    # Fault: a docstring that promises the optimum where the first fall is not final.
    a = jnp.array([[0.9, 0.9, 0.9]])
    along = [throughput(a, jnp.array([n]), steps) for n in range(4)]
    assert along == pytest.approx([1, 0.95, 1.4, 1.85], rel=1e-15)
    assert schedule(a, steps).tolist() == [0]


def test_scheduler_errors():
    # Fault: confidences taken for survivals, which need not descend: lengths that are no prefixes.
    with pytest.raises(ValueError, match="survivals: expected probabilities that never ascend"):
        schedule(jnp.array([[0.5, 0.9]]), lambda n: 1.0)
    with pytest.raises(ValueError, match="survivals"):
        schedule(jnp.array([[1.5, 0.9]]), lambda n: 1.0)
    with pytest.raises(ValueError, match=r"step_time\(2\): expected a time above 0"):
        schedule(jnp.array([[0.5, 0.4]]), lambda n: 2.0 - n)


# Exactness of decoding with truncation: every path enumerated

KEPT, PROMPT = [0, 2], [1, 0]


def sure_after_token_0(context):
    """Confidence that knows the previous token: slot 0 middling, then high after 0 only."""
    return logit(0.6) if len(context) == len(PROMPT) else logit(0.98 if context[-1] == 0 else 0.02)


def best_of_all_lengths(c):
    a = survival(c)[None]
    return max(range(3), key=lambda n: throughput(a, jnp.array([n]), steps))


def early_stop(c):
    # A first candidate of 0.6 raises, 1.6/1.1 > 1; the second one after token 0 only, where it
    # gives 2.188/1.4 and otherwise 1.612/1.4.
    return int(schedule(survival(c)[None], lambda n: 1 + 0.1 * (n - 1) ** 2)[0])


def distribution_with(truncate, monkeypatch):
    target = table_target(3)
    drafter = table_drafter(KEPT, confidence=sure_after_token_0)
    how = DecodingConfig(proposals=2, limit=2, temperature=1.0, truncate=truncate)
    prompt, draws = jnp.array(PROMPT), jnp.zeros((2, 5))
    paths = Paths(monkeypatch).over(lambda: speculate(target, drafter, prompt, how, draws))
    seen = [(weight, result) for weight, _, result in paths]
    got = outputs((weight, tuple(r.tokens.tolist()[2:])) for weight, r in seen)
    lengths = {r.rounds[0].proposed for _, r in seen}
    return got, lengths, target_process(target, PROMPT, 2)


@pytest.mark.parametrize(
    "truncate", [lambda c: int(confident_prefix(c, 0.5)), early_stop], ids=["threshold", "schedule"]
)
def test_truncation_that_looks_no_further_than_its_slot_is_exact(truncate, monkeypatch):
    # Fault: a bonus token that is not drawn from p after the last verified proposal; a rule that
    # looks ahead.
    got, lengths, expected = distribution_with(truncate, monkeypatch)
    assert lengths == {1, 2}
    assert_same_distribution(got, expected)


def test_the_best_of_all_lengths_shifts_the_output(monkeypatch):
    # The reason for the early stop: with the stepwise time, token 0 is verified (with slot 1) and
    # token 2 is dropped unseen, because the confidence of slot 1 already knows token 0 or 2.
    got, lengths, expected = distribution_with(best_of_all_lengths, monkeypatch)
    assert lengths == {0, 2}
    first = outputs((weight, tokens[0]) for tokens, weight in got.items())
    right = outputs((weight, tokens[0]) for tokens, weight in expected.items())
    assert abs(sum(first.values()) - 1) < 1e-12
    assert max(abs(first[token] - right[token]) for token in right) > 0.05


# Sequential temperature scaling


def test_cumulative_cross_entropy_by_hand():
    # Faults: NaN at certain predictions that are right; masked samples counted; a mean.
    g, a = jnp.array([0.5, 1.0, 0.0, 0.25, 0.2]), jnp.array([0.5, 1.0, 0.0, 0.9, 0.4])
    m = jnp.array([True, True, True, False, True])
    got = cumulative_cross_entropy(jnp.log(g), jnp.log1p(-g), a, m)
    by_hand = math.log(2) - 0.4 * math.log(0.2) - 0.6 * math.log(0.8)
    # a handful of logarithms
    assert float(got) == pytest.approx(by_hand, rel=1e-15)


def test_log_survival_by_hand():
    # Faults: log(1 − g) from a g that rounds to 1 (−inf at slot 0 below), or lost beside log g.
    hit, missed = jnp.zeros(2), jnp.full(2, -jnp.inf)
    for c in (jnp.array([logit(0.75), 50.0]), jnp.array([logit(0.5), 60.0])):
        hit, missed = log_survival(hit, missed, c)
    # 1 − σ(50)·σ(60) = e^−50 + e^−60 to 1e-21; sigmoids of logarithms
    np.testing.assert_allclose(jnp.exp(hit), [0.375, 1.0], rtol=1e-14)
    np.testing.assert_allclose(
        missed, [math.log(0.625), math.log(math.exp(-50) + math.exp(-60))], rtol=1e-14
    )


def grid():
    return jnp.array([0.25, 0.5, 1.0, 2.0, 3.0, 4.0])


def test_planted_temperatures_are_found():
    # Faults: one temperature for all slots; temperatures multiplied; later slots fitted to the
    # single acceptance instead of the cumulative one.
    rng = np.random.default_rng(0)
    true = jnp.asarray(rng.normal(0.5, 1.5, (40, 4)))
    planted = jnp.array([2.0, 0.5, 4.0, 1.0])
    c = true * planted[None, :]
    got = fit_temperatures(c, jax.nn.sigmoid(true), jnp.ones((40, 4), bool), grid())
    assert got.tolist() == planted.tolist()


def test_a_later_slot_makes_up_for_an_earlier_one():
    # Fault: slots fitted one by one. Slot 0 says ½ at every temperature though α = 0.8. Slot 1 has
    # α = ½: alone it would choose the largest T. Given slot 0, the product has to be 0.8·½ = 0.4,
    # so σ(c/T) = 0.8, and c = 2·logit(0.8) gives T = 2. The tie of slot 0 goes to the first.
    c = jnp.array([[0.0, 2 * logit(0.8)]])
    accept, all_count = jnp.array([[0.8, 0.5]]), jnp.array([[True, True]])
    assert fit_temperatures(c, accept, all_count, grid()).tolist() == [0.25, 2.0]
    alone = fit_temperatures(c[:, 1:], accept[:, 1:], all_count[:, 1:], grid())
    assert alone.tolist() == [4.0]


def test_masked_slots_teach_nothing():
    # Fault: a slot after the end of a block counted, also where its own mask comes back.
    c = jnp.array([[logit(0.8) * 2, logit(0.6)], [1e9, 5.0], [logit(0.8) * 2, 50.0]])
    accept = jnp.array([[0.8, 0.6], [0.0, 0.0], [0.8, 0.0]])
    mask = jnp.array([[True, True], [False, True], [True, False]])
    assert fit_temperatures(c, accept, mask, grid()).tolist() == [2.0, 1.0]


def test_calibration_errors():
    # Fault: the first candidate returned as if it had been fitted.
    c = jnp.zeros((2, 2))
    mask = jnp.array([[True, False], [False, True]])
    with pytest.raises(ValueError, match="no held-out sample reaches slot 1"):
        fit_temperatures(c, c, mask, grid())
    for bad in (grid()[:0], grid() - 0.25, jnp.array([1.0, jnp.inf]), jnp.array([jnp.nan])):
        with pytest.raises(ValueError, match="candidates: expected at least one temperature"):
            fit_temperatures(c, c, mask, bad)
    # a NaN is the least of all losses to argmin; where nothing counts it may stand
    odd, ok = jnp.array([[0.0, jnp.nan]]), jnp.array([[0.5, 0.5]])
    on, off = jnp.array([[True, True]]), jnp.array([[True, False]])
    with pytest.raises(ValueError, match="c: expected finite confidence logits"):
        fit_temperatures(odd, ok, on, grid())
    for wrong in (odd, jnp.array([[0.5, 1.5]]), jnp.array([[-0.5, 0.5]])):
        with pytest.raises(ValueError, match="accept: expected acceptances from 0 to 1"):
            fit_temperatures(ok, wrong, on, grid())
    with pytest.raises(ValueError, match="no held-out sample reaches slot 1"):
        fit_temperatures(odd, odd, off, grid())


def test_float32_chooses_what_float64_chooses_where_sigmoids_round_to_1():
    # Fault: −log(1 − g) of a g that float32 rounds to 1. At c = 20 both candidates do: their
    # losses were +inf, or 0, alike, and the first one won. By hand: α = 0.99999 is σ(11.5), and T =
    # 1 is nearer to 20/11.5 than T = ½. Slot 1: 0.7 = σ(0.847), 1/T = 1 is nearer than 2. With the
    # acceptance certain, the sharper T = ½ is right.
    c, mask = np.array([[20.0, 1.0]]), jnp.array([[True, True]])
    for accept, expected in (([0.99999, 0.7], [1.0, 1.0]), ([1.0, 0.7], [0.5, 1.0])):
        for dtype in (jnp.float32, jnp.float64):
            for candidates in ([0.5, 1.0], [1.0, 0.5]):
                given = [jnp.asarray(a, dtype) for a in (c, [accept], candidates)]
                got = fit_temperatures(given[0], given[1], mask, given[2])
                assert got.dtype == dtype
                assert got.tolist() == expected, (dtype, candidates)
