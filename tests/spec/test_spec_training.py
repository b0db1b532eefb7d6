"""The optimizer (§14): rates, clip and AdamW by hand, and the training step."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_toys import batch, config, params, target, toy_map

from jaxdraft import ObjectiveConfig, OptimizerConfig, gradients, train_step
from jaxdraft.blocks import draw_anchors, sample_keys
from jaxdraft.training import check_step, decays, make_optimizer, rate, start

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
        for kernel, scale in steps:
            grads = {"layer": {"kernel": jnp.array(kernel)}, "norm": {"scale": jnp.array(scale)}}
            updates, state = optimizer.update(grads, state, weights)
            weights = jax.tree.map(jnp.add, weights, updates)
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
    _, later = train_step(after, batch())
    assert float(later.rate) == 0.01


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
        ({"peak_rate": 0.0}, "peak_rate"),
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
