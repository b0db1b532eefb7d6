"""The optimizer (§14): rates, spike guard, clip and AdamW by hand, and the training step."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_toys import batch, config, params, target, toy_map

from jaxdraft import Batch, ObjectiveConfig, OptimizerConfig, evaluate, gradients, train_step
from jaxdraft.blocks import draw_anchors, sample_keys
from jaxdraft.training import (
    SpikeGuard,
    check_step,
    decays,
    fresh_guard,
    make_optimizer,
    rate,
    spike_guard,
    start,
)

OPTIMIZER = OptimizerConfig(
    peak_rate=0.01, warmup_steps=2, total_steps=10, max_grad_norm=1.0, weight_decay=0.1
)
OBJECTIVE = ObjectiveConfig(loss_decay_gamma=4.0)


def test_rates_by_hand():
    # Faults: steps counted from 0 (rate(1) = 0, rate(total) > 0), the cosine over all steps.
    optimizer = OptimizerConfig(1.0, 4, 20, 1.0, final_rate=0.2)
    got = [float(rate(optimizer, t)) for t in (1, 2, 4, 5, 12, 20, 21)]
    at_5 = 0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi / 16))
    # one cosine of two libraries
    np.testing.assert_allclose(got, [0.25, 0.5, 1.0, at_5, 0.6, 0.2, 0.2], rtol=1e-14)
    assert float(rate(OptimizerConfig(1.0, 0, 2, 1.0), 1)) == pytest.approx(0.5)


def test_what_decays():
    # Fault: weight decay on norms, biases or W1.
    tree = decays(params(config(markov_head_type="gated")))
    kept = {jax.tree_util.keystr(p) for p, on in jax.tree_util.tree_leaves_with_path(tree) if on}
    assert all(path.endswith("['kernel']") for path in kept)
    assert "['markov_head']['markov_w2']['kernel']" in kept
    assert not tree["markov_head"]["markov_w1"]["embedding"]
    assert sum(not on for on in jax.tree.leaves(tree)) == 6 + 1 + 2  # norms, W1, biases


def adamw_by_hand(value, grads, decay):
    first = second = 0.0
    for t, g in enumerate(grads, 1):
        first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g * g
        lr = 0.01 * t / 2 if t <= 2 else 0.01 * 0.5 * (1 + math.cos(math.pi * (t - 2) / 8))
        moved = (first / (1 - 0.9**t)) / (math.sqrt(second / (1 - 0.95**t)) + 1e-8)
        value -= lr * (moved + decay * value)
    return value


def test_clip_and_adamw_by_hand():
    # Faults: 1e-6 added to the norm, decay scaled by the moments, moments not corrected.
    weights = {"layer": {"kernel": jnp.array([2.0, -1.0])}, "norm": {"scale": jnp.array([3.0])}}
    steps = [([3.0, 0.0], [4.0]), ([0.1, 0.2], [0.2]), ([-30.0, 0.0], [40.0])]
    optimizer = make_optimizer(OPTIMIZER)
    with jax.numpy_dtype_promotion("standard"):
        state = optimizer.init(weights)
        for t, (kernel, scale) in enumerate(steps, 1):
            grads = {"layer": {"kernel": jnp.array(kernel)}, "norm": {"scale": jnp.array(scale)}}
            direction, state = optimizer.update(grads, state, weights)
            lr = float(rate(OPTIMIZER, t))
            weights = jax.tree.map(lambda θ, u, lr=lr: θ - lr * u, weights, direction)
    got = [*weights["layer"]["kernel"], *weights["norm"]["scale"]]
    expected = [
        adamw_by_hand(2.0, [0.6, 0.1, -0.6], 0.1),
        adamw_by_hand(-1.0, [0.0, 0.2, 0.0], 0.1),
        adamw_by_hand(3.0, [0.8, 0.2, 0.8], 0.0),
    ]
    # float64 with a float32 nowhere: a dozen roundings
    np.testing.assert_allclose(got, expected, rtol=1e-13)


def test_train_step_is_pure_and_steps_as_by_hand():
    # Faults: an update from other gradients than `gradients`; hidden state; the step counter.
    of = config()
    before = start(of, OBJECTIVE, OPTIMIZER, params(of), target(), toy_map())
    after, report = train_step(before, batch())
    again, _ = train_step(before, batch())
    for one, two in zip(jax.tree.leaves(after), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(one, two)
    seen, grads = gradients(of, OBJECTIVE, params(of), target(), toy_map(), batch())
    norm = math.sqrt(sum(float((np.asarray(g) ** 2).sum()) for g in jax.tree.leaves(grads)))
    # two compilations of the same sums
    assert float(report.gradient_norm) == pytest.approx(norm, rel=1e-12)
    assert float(report.evaluation.loss) == pytest.approx(float(seen.loss), rel=1e-12)
    assert (int(after.step), float(report.rate)) == (1, 0.005)
    flat = zip(
        *(map(np.asarray, jax.tree.leaves(t)) for t in (after.params, before.params, grads)),
        jax.tree.leaves(decays(grads)),
        strict=True,
    )
    for got, value, grad, on in flat:
        g = grad * min(1.0, 1.0 / norm)
        expected = value - 0.005 * (g / (np.abs(g) + 1e-8) + (0.1 if on else 0.0) * value)
        # g/(|g| + ε) is steep where |g| is near ε: the gradient's own 1e-15 over 1e-8
        np.testing.assert_allclose(got, expected, rtol=1e-10, atol=1e-8)
    check_step(OBJECTIVE, report)
    assert bool(report.taken)
    _, later = train_step(after, batch())
    assert float(later.rate) == 0.01


def equal(one, two):
    return all(map(np.array_equal, jax.tree.leaves(one), jax.tree.leaves(two)))


def guarded(norms, multiple=10):
    """Feed norms one by one: which were spikes, and the guard at the end."""
    guard, spikes = fresh_guard(jnp.float64), []
    for norm in norms:
        guard, spike = spike_guard(guard, jnp.asarray(norm, float), multiple)
        spikes.append(bool(spike))
    return spikes, guard


def test_spike_guard_by_hand():
    # Faults: an arithmetic mean (of 1 and 100: 50.5, limit 505); a spike that raises the limit for
    # the next one (field note 19); a first norm compared with nothing; another multiple.
    spikes, guard = guarded([1.0, 1.0, 9.9, 10.5])  # mean of three: 2.147, limit 21.5
    assert spikes == [False] * 4
    assert guarded([4.0, 16.0, 81.0])[0] == [False, False, True]  # mean 8, limit 80
    assert guarded([4.0, 16.0, 79.0])[0] == [False, False, False]
    assert guarded([4.0, 16.0, 1e9, 81.0, 79.0])[0] == [False, False, True, True, False]
    assert guarded([1e9])[0] == [False]
    assert guarded([4.0, 9.0], multiple=2)[0] == [False, True]
    spikes, guard = guarded([2.0, 8.0, 1e9, 2.0])
    assert int(guard.seen) == 3
    # logarithms and a running mean of three
    assert float(guard.mean_log) == pytest.approx(math.log(32) / 3, rel=1e-15)


def test_a_norm_of_zero_leaves_the_spike_guard_as_it_was():
    # Fault: log 0 = −inf in the mean, and every later step a spike.
    assert guarded([0.0, 3.0, 0.0, 3.0])[0] == [False] * 4
    assert int(guarded([0.0, 3.0, 0.0])[1].seen) == 1


def test_a_spike_skips_the_whole_step_before_the_clip():
    # Faults: the clipped norm guarded (at most 1: no spike ever); moments or weights moved by a
    # skipped step; a spike in the mean; the bias correction or the rate out of step after it.
    of = config()
    state = start(of, OBJECTIVE, OPTIMIZER, params(of), target(), toy_map())
    plain, report = train_step(state, batch())
    log = math.log(float(report.gradient_norm))
    assert float(report.gradient_norm) > OPTIMIZER.max_grad_norm  # the clip is at work
    assert (float(plain.guard.mean_log), int(plain.guard.seen)) == (pytest.approx(log), 1)

    calm = SpikeGuard(jnp.asarray(log - math.log(10.1), float), jnp.array(4))
    after, skipped = train_step(replace(state, guard=calm), batch())
    assert not bool(skipped.taken)
    assert int(after.step) == 1
    for part in ("params", "optimizer_state"):
        assert equal(getattr(after, part), getattr(state, part)), part
    assert equal(after.guard, calm)
    check_step(OBJECTIVE, skipped)  # a spike is no error

    near = SpikeGuard(jnp.asarray(log - math.log(9.9), float), jnp.array(4))
    taken, report = train_step(replace(state, guard=near), batch())
    assert bool(report.taken)
    assert equal(taken.params, plain.params)
    assert int(taken.guard.seen) == 5

    # Step 2 after a skipped step 1: rate(2) = 0.01, and the first update's bias correction, so
    # every weight moves as in step 1 but for twice the rate.
    second, report = train_step(replace(after, guard=fresh_guard(jnp.float64)), batch())
    assert float(report.rate) == 0.01
    moved = zip(
        *(map(np.asarray, jax.tree.leaves(s.params)) for s in (state, plain, second)), strict=True
    )
    for start_at, once, twice in moved:
        # differences of numbers near 1
        np.testing.assert_allclose(twice - start_at, 2 * (once - start_at), rtol=0, atol=1e-14)


def test_a_step_that_is_not_finite_changes_nothing_but_its_number():
    # Fault: NaN in moments or in the guard, where it would make every later comparison false.
    of = config()
    state, _ = train_step(start(of, OBJECTIVE, OPTIMIZER, params(of), target(), toy_map()), batch())
    for bad in (
        batch(hidden_states=jnp.full((2, 10, 16), jnp.nan, float)),
        batch(loss_mask=jnp.zeros((2, 10))),
    ):
        after, report = train_step(state, bad)
        assert not bool(report.taken)
        assert equal(replace(after, step=state.step), state)
        assert int(after.step) == 2


def test_masters_are_float32_or_float64():
    # Field note 14. Fault: bfloat16 masters, whose norms stay exactly 1.0, accepted silently.
    of = config()
    tree = params(of)
    tree["norm"]["scale"] = tree["norm"]["scale"].astype(jnp.bfloat16)
    with pytest.raises(ValueError, match="params: norm/scale is bfloat16; master weights are"):
        start(of, OBJECTIVE, OPTIMIZER, tree, target(), toy_map())
    low = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), params(of))
    state = start(of, OBJECTIVE, OPTIMIZER, low, target(), toy_map())
    floating = jax.tree.leaves((state.params, state.optimizer_state[1].mu, state.guard.mean_log))
    assert {leaf.dtype for leaf in floating} == {jnp.dtype("float32")}


@pytest.mark.parametrize("wrong", [0, True, 2.0])
def test_start_refuses_an_odd_number_of_anchors(wrong):
    # Fault: an error far from its cause, inside the jitted step.
    with pytest.raises((ValueError, TypeError), match="num_anchors"):
        start(config(), OBJECTIVE, OPTIMIZER, params(config()), target(), toy_map(), wrong)


def test_the_rows_of_a_step_are_those_of_its_micro_batches():
    # Fault: a loss that is no quotient of sums over rows, so that the batch of a whole step is not
    # the reduction over its ranks and micro-batches. The rows differ in what they supervise.
    both, given = batch(), (config(), OBJECTIVE, params(config()), target(), toy_map())
    whole = evaluate(*given, both)
    halves = [evaluate(*given, Batch(*(a[row : row + 1] for a in both))) for row in (0, 1)]
    for name, pair in whole.metrics.items():
        for part in (0, 1):
            summed = sum(np.asarray(h.metrics[name][part]) for h in halves)
            # one order of at most 24 terms against another
            np.testing.assert_allclose(summed, pair[part], rtol=1e-13, atol=1e-14, err_msg=name)
    # §8 from the two rows' own numbers, the pruned expression with each Σ over both rows
    sums = {n: sum(np.array(h.metrics[n], float) for h in halves) for n in whole.metrics}
    terms = [sums[n][0] / sums[n][1] for n in ("ce_loss", "l1_loss", "confidence_loss")]
    assert float(whole.loss) == pytest.approx(np.dot([0.1, 0.9, 1.0], terms), rel=1e-13)
    assert not np.allclose(halves[0].loss, halves[1].loss)


def test_check_step_refuses():
    # Fault: a step without supervision, or with a NaN, taken silently.
    of = config()
    state = start(of, OBJECTIVE, OPTIMIZER, params(of), target(), toy_map())
    _, empty = train_step(state, batch(loss_mask=jnp.zeros((2, 10))))
    with pytest.raises(ValueError, match="no supervised target tokens"):
        check_step(OBJECTIVE, empty)
    _, poisoned = train_step(state, batch(hidden_states=jnp.asarray(np.full((2, 10, 16), np.nan))))
    with pytest.raises(FloatingPointError, match="keep the state before it"):
        check_step(OBJECTIVE, poisoned)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"warmup_steps": 10}, "0 <= warmup_steps < total_steps"),
        ({"warmup_steps": True}, "warmup_steps: expected a whole number, got True"),
        ({"peak_rate": 0.0}, "peak_rate"),
        ({"peak_rate": float("inf")}, "peak_rate: expected a finite number > 0, got inf"),
        ({"weight_decay": float("nan")}, "weight_decay: expected a finite number >= 0, got nan"),
        ({"spike_multiple": 1.0}, "spike_multiple: expected a number > 1, got 1.0"),
        ({"spike_multiple": float("nan")}, "spike_multiple"),
        ({"max_grad_norm": True}, "max_grad_norm: expected a number > 0, got True"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm"),
        ({"final_rate": -1.0}, "final_rate"),
        ({"beta1": 1.0}, "beta1"),
    ],
)
def test_optimizer_config_refusals(changes, words):
    # Fault: a division by 0 or a NaN far from its cause.
    numbers = {"peak_rate": 1.0, "warmup_steps": 1, "total_steps": 10, "max_grad_norm": 1.0}
    with pytest.raises(ValueError, match=words):
        OptimizerConfig(**{**numbers, **changes})


def test_a_step_is_a_function_of_state_batch_and_key():
    # Faults: anchors of the batch kept beside a key; another draw within the jit; padding that
    # changes a sum. The key's anchors drawn outside give the same step, but for the order of sums.
    state = start(config(), OBJECTIVE, OPTIMIZER, params(config()), target(), toy_map(), 3)
    keys = sample_keys(0, 1, jnp.array([4, 9]))
    plain = batch()
    after, report = train_step(state, plain, keys)
    anchors, keep = draw_anchors(keys, plain.loss_mask, 3)
    outside, expected = train_step(
        state, plain._replace(anchor_positions=anchors, block_keep_mask=keep)
    )
    assert float(report.evaluation.loss) == pytest.approx(
        float(expected.evaluation.loss), rel=1e-12
    )
    for one, two in zip(
        jax.tree.leaves(after.params), jax.tree.leaves(outside.params), strict=True
    ):
        np.testing.assert_allclose(one, two, rtol=0, atol=1e-9)  # Adam enlarges rounding
    again, _ = train_step(state, plain, keys)
    assert all(map(np.array_equal, jax.tree.leaves(after.params), jax.tree.leaves(again.params)))
    _, other = train_step(state, plain, sample_keys(0, 2, jnp.array([4, 9])))
    assert float(other.evaluation.loss) != float(report.evaluation.loss)
    with pytest.raises(ValueError, match="num_anchors"):
        train_step(replace(state, num_anchors=None), plain, keys)
