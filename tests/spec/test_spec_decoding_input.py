"""Speculative decoding (§10): what is refused by name, and decoding in float32."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_decoding import (
    Paths,
    outputs,
    row,
    table_drafter,
    table_target,
    target_process,
)

from jaxdraft.decoding import (
    DecodingConfig,
    TargetPass,
    accepts,
    residual,
    speculate,
    speculative_round,
    uniform_draws,
)
from jaxdraft.drafting import distribution, draft_block, sample
from jaxdraft.expectation import expected_length

NAN, INF = math.nan, math.inf


# Settings


def settings(**changes):
    """Check settings as a program without this run's type checks has them checked."""
    given = {"proposals": 1, "limit": 1, "temperature": 0, "end_of_text": None, "truncate": None}
    checked = SimpleNamespace(**given | changes)
    DecodingConfig.__post_init__(checked)
    return checked


def test_settings_that_are_refused():
    # Faults: a bool taken for 1, a float for the number it is near; each refused by its name.
    for field in ("proposals", "limit"):
        for bad in (0, -1, True, 2.0, np.int64(0), np.True_, np.float64(2), "2", None):
            with pytest.raises(ValueError, match=f"{field}: expected a whole number"):
                settings(**{field: bad})
    for bad in (-0.5, NAN, INF, True, "1", None, np.float32(1)):
        with pytest.raises(ValueError, match="temperature: expected a finite number >= 0"):
            settings(temperature=bad)
    for bad in (-1, False, 7.0, np.int64(-7)):
        with pytest.raises(ValueError, match="end_of_text: expected an id"):
            settings(end_of_text=bad)
    with pytest.raises(ValueError, match="truncate: expected a function"):
        settings(truncate=2)
    settings(proposals=3, limit=2, temperature=0.5, end_of_text=0, truncate=len)
    # Fault: NumPy's numbers refused, or carried on into the statistics.
    kept = settings(proposals=np.int64(3), limit=np.int32(2), end_of_text=np.uint8(7))
    assert repr((kept.proposals, kept.limit, kept.end_of_text)) == "(3, 2, 7)"
    with pytest.raises(ValueError, match="limit: expected a whole number"):
        DecodingConfig(proposals=1, limit=0)  # the class itself asks


def any_id(tokens):
    """A target that reads ids it does not have, as a table read by JAX would."""
    return TargetPass(jnp.zeros((tokens.shape[0], 3)), jnp.full((tokens.shape[0], 1), 11.0))


def decode(draws, prompt=(1,), drafter=None, **changes):
    how = DecodingConfig(**{"proposals": 2, "limit": 2, "temperature": 1, **changes})
    tokens = jnp.array(prompt, dtype=int)
    return speculate(any_id, drafter or table_drafter([0, 2]), tokens, how, draws)


def test_draws_and_prompts_that_are_refused():
    # Faults: an error deep in an array library, or none: JAX clamps an index past the end, so a
    # draw that is missing would be the last one again, and an unknown id the last row.
    with pytest.raises(ValueError, match="draws: none given at temperature = 1"):
        decode(None)
    with pytest.raises(ValueError, match=r"draws: expected at least limit = 2 rows .* = 5, got"):
        decode(jnp.zeros((1, 5)))
    for outside in (1.0, -0.1, NAN):
        with pytest.raises(ValueError, match=r"draws: expected numbers in \[0, 1\)"):
            decode(jnp.full((2, 5), outside))
    with pytest.raises(ValueError, match="prompt: expected at least one token"):
        decode(jnp.zeros((2, 5)), prompt=())
    for bad in (-1, 3):
        with pytest.raises(ValueError, match="prompt: expected ids from 0 to 2"):
            decode(jnp.zeros((2, 5)), prompt=(1, bad))
    with pytest.raises(ValueError, match="end_of_text = 3 is none of the target's ids, 0 to 2"):
        decode(jnp.zeros((2, 5)), end_of_text=3)
    how = DecodingConfig(proposals=2, limit=2, temperature=1)
    for width in (4, 6):
        args = table_target(3), table_drafter([0, 2]), jnp.array([1]), jnp.zeros((0, 1)), how
        with pytest.raises(ValueError, match=f"draws: expected .* = 5 for a round, got {width}"):
            speculative_round(*args, jnp.zeros(width))


def test_truncation_without_confidences():
    # Faults: no truncation where one was asked for; a NaN confidence, below every threshold and
    # above none, that keeps nothing or all of a block.
    with pytest.raises(ValueError, match="truncate needs confidence logits"):
        decode(jnp.zeros((2, 5)), truncate=len)
    drafter = table_drafter([0, 2], confidence=lambda context: NAN if len(context) > 1 else 1.0)
    with pytest.raises(ValueError, match="truncate: the draft's confidence logits hold NaN"):
        decode(jnp.zeros((2, 5)), truncate=len, drafter=drafter)


# Logits and passes

NO_DISTRIBUTION = [[0.0, NAN, 1.0], [0.0, INF, 1.0], [-INF, -INF, -INF]]


def three_ways(target, drafter, temperature):
    """The loop, a round and the expected length, as functions without arguments."""
    n, prompt = 2, jnp.array([1])
    how = DecodingConfig(proposals=n, limit=4, temperature=temperature)
    draws, states = jnp.full((4, 2 * n + 1), 0.5), jnp.zeros((0, 1))
    return (
        lambda: speculate(target, drafter, prompt, how, draws),
        lambda: speculative_round(target, drafter, prompt, states, how, draws[0]),
        lambda: expected_length(target, drafter, prompt, states, n, temperature),
    )


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", NO_DISTRIBUTION)
@pytest.mark.parametrize("after", [1, 2])
def test_logits_that_give_no_distribution_are_refused(bad, temperature, after):
    # Fault: NaN decoded. No comparison with it is true: all was rejected and the last id drawn, at
    # t = 0 its place was the argmax; the output looked like text. From either side, after one
    # token (slot 0) or two (a later slot).
    def look_up(context):
        return jnp.array(bad if len(context) == after else [2.0, 1.0, 0.0])

    def agreed(_):
        return jnp.array([2.0, 1.0, 0.0])

    fine, good = table_target(3, look_up=agreed), table_drafter([0, 1, 2], look_up=agreed)
    for run in three_ways(fine, table_drafter([0, 1, 2], look_up=look_up), temperature):
        with pytest.raises(ValueError, match=r"the draft's logits.*NaN"):
            run()
    for run in three_ways(table_target(3, look_up=look_up), good, temperature):
        with pytest.raises(ValueError, match=r"the target's logits.*NaN"):
            run()
    block = jnp.array([1]), jnp.zeros((0, 1)), temperature, jnp.full(2, 0.5)
    with pytest.raises(ValueError, match=f"the draft's logits of proposal {after - 1}: "):
        draft_block(table_drafter([0, 1, 2], look_up=look_up), *block)
    for run in three_ways(fine, good, temperature):
        run()


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_ids_that_are_never_said(temperature):
    # Fault: −inf refused together with NaN; it is how an id is ruled out.
    def out(context):
        return row(0, 3, context).at[1].set(-INF)

    target, drafter = table_target(3, look_up=out), table_drafter([0, 1, 2], look_up=out)
    for run in three_ways(target, drafter, temperature):
        run()
    draws = uniform_draws(jax.random.key(0), 8, 2, jnp.float64)
    how = DecodingConfig(proposals=2, limit=8, temperature=temperature)
    got = speculate(target, drafter, jnp.array([0]), how, draws)
    assert 1 not in got.tokens.tolist()


@pytest.mark.parametrize("side", ["logits", "hidden_states"])
def test_a_targets_pass_of_another_length_is_refused(side):
    # Faults: a target that returns the last row alone (as servers do), or drops it, or a batch:
    # rows read from the wrong token, or clamped to the last one, without an error.
    def changed(change):
        def target(tokens):
            scored = table_target(3)(tokens)
            return scored._replace(**{side: change(getattr(scored, side))})

        return target

    for change in (lambda x: x[-1:], lambda x: x[:-1], lambda x: x[None], lambda x: x[:, 0]):
        for run in three_ways(changed(change), table_drafter([0, 2]), 1.0):
            with pytest.raises(ValueError, match=f"target: expected {side} with a row for each of"):
                # a prompt of one token has one row, right or wrong: a later pass is refused then
                run()


def test_a_target_of_fewer_ids_than_the_draft_proposes_is_refused():
    # Fault: JAX drops the q of ids that are out of range and reads the last p in their place.
    for run in three_ways(table_target(3), table_drafter([0, 3]), 1.0):
        with pytest.raises(ValueError, match="logits have 3 ids but the draft can propose id 3"):
            run()


# float32

LAST_U = np.nextafter(np.float32(1), np.float32(0))


def test_rules_in_float32():
    # Faults: a constant of float64 that is 0 or 1 in float32 (a subnormal t that is divided by, a
    # u of 1); results of another dtype.
    z = jnp.array([[0.0, 1.0], [1.0, 1.0]], jnp.float32)
    assert distribution(z, 1e-40).tolist() == [[0, 1], [1, 0]]
    assert distribution(z * 1e30, 1e-37).tolist() == [[0, 1], [0.5, 0.5]]
    tenths = jnp.array([0.1] * 10 + [0.0], jnp.float32)
    u = jnp.asarray(LAST_U)
    assert int(sample(tenths, u)) == int(sample(tenths * jnp.float32(0.999), u)) == 9
    half = jnp.asarray(0.5, jnp.float32)
    assert bool(accepts(half, half, u))
    assert not bool(accepts(half / 2, half, half))
    left = residual(jnp.array([0.25, 0.75], jnp.float32), jnp.array([0.5, 0.5], jnp.float32))
    assert left.tolist() == [0, 1]
    assert {distribution(z, 0).dtype, distribution(z, 0.7).dtype, left.dtype} == {z.dtype}


def test_float32_draws_stay_below_1():
    # Fault: draws of float64 rounded to float32, which makes a 1 of about one in 3e7 of them.
    draws = uniform_draws(jax.random.key(1), 2000, 40, jnp.float32)
    assert draws.dtype == jnp.float32
    assert draws.min() >= 0
    assert draws.max() < 1
    # 162000 draws: the mean of uniform numbers, within 5 standard deviations
    assert abs(float(draws.astype(float).mean()) - 0.5) < 5 * (1 / 12 / draws.size) ** 0.5


def test_the_output_distribution_in_float32(monkeypatch):
    # Faults: a float64 table or draw in between (strict promotion refuses the mix), probabilities
    # whose rounding is renormalised away on one side only.
    target = table_target(3, dtype=jnp.float32)
    drafter = table_drafter([0, 2], dtype=jnp.float32)
    how = DecodingConfig(proposals=2, limit=2, temperature=0.7)
    draws, prompt, used = jnp.zeros((2, 5), jnp.float32), [1, 0], []

    def noted(tokens):
        scored = target(tokens)
        used.append(scored.logits.dtype)
        return scored

    def run():
        return speculate(noted, drafter, jnp.array(prompt), how, draws)

    paths = Paths(monkeypatch, jnp.float32).over(run)
    got = outputs((weight, tuple(r.tokens.tolist()[2:])) for weight, _, r in paths)
    assert set(used) == {jnp.dtype("float32")}
    expected = target_process(table_target(3), prompt, 2, 0.7)
    for value in got.keys() | expected.keys():
        # products of up to 10 float32 probabilities, each a few roundings of 6e-8 off: 2e-6
        assert abs(got.get(value, 0.0) - expected.get(value, 0.0)) < 2e-6, value
    args = drafter, jnp.array(prompt), target(jnp.array(prompt)).hidden_states[:1], 2, 0.7
    length = expected_length(target, *args)
    assert length.dtype == jnp.float32
    exact = expected_length(table_target(3), table_drafter([0, 2]), *args[1:])
    assert abs(float(length) - float(exact)) < 2e-6
