"""Every parameter's gradient against central differences, and where gradients must not go."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_toys import SLOTS, batch, config, params, target, toy_map

from jaxdraft import ObjectiveConfig, evaluate, gradients

OBJECTIVE = ObjectiveConfig(loss_decay_gamma=4.0)
DRAFTS = {
    "vanilla": {},
    "gated-mha": {
        "markov_head_type": "gated",
        "num_key_value_heads": 2,
        "confidence_head_with_markov": False,
    },
    "rnn-sliding": {
        "markov_head_type": "rnn",
        "layer_types": ["sliding_attention"],
        "sliding_window": 3,
    },
    "none-unpruned": {
        "markov_rank": 0,
        "confidence_head_with_markov": False,
        "draft_vocab_size": None,
    },
}


ALL = (0.1, 0.9, 1.0)
TERMS = {"ce": (1.0, 0.0, 0.0), "l1": (0.0, 1.0, 0.0), "confidence": (0.0, 0.0, 1.0)}


def frozen_alpha_loss(of, alphas, weights, vocabulary, start):
    """The loss with the confidence term's target α held at its value for the start weights."""
    ce, l1, confidence = alphas
    seen = evaluate(
        of,
        replace(OBJECTIVE, ce_alpha=ce, l1_alpha=l1, confidence_alpha=0.0),
        weights,
        target(),
        vocabulary,
        batch(),
    )
    w = np.asarray(seen.eval_mask) * np.exp(-np.arange(SLOTS) / 4.0)
    c, alpha = np.asarray(seen.confidence_logits), np.asarray(start.accept_probability)
    bce = (w * (np.logaddexp(c, 0) - alpha * c)).sum() / w.sum()
    return float(seen.loss) + confidence * bce


@pytest.mark.parametrize(
    ("name", "alphas"),
    [(name, ALL) for name in DRAFTS] + [("vanilla", alphas) for alphas in TERMS.values()],
    ids=[*DRAFTS, *TERMS],
)
def test_central_differences(name, alphas):
    # Faults: a parameter that gets no gradient, a term that is cut off, α pulled by its own head.
    of = config(**DRAFTS[name])
    weights, vocabulary = params(of), toy_map() if of.prunes else None
    ce, l1, confidence = alphas
    objective = replace(OBJECTIVE, ce_alpha=ce, l1_alpha=l1, confidence_alpha=confidence)
    start, grads = gradients(of, objective, weights, target(), vocabulary, batch())
    leaves, tree = jax.tree.flatten(weights)
    rng, step = np.random.default_rng(0), 1e-5
    for i, (path, grad) in enumerate(jax.tree_util.tree_leaves_with_path(grads)):
        direction = rng.normal(size=grad.shape)
        values = []
        for sign in (1, -1):
            moved = [*leaves]
            moved[i] = leaves[i] + sign * step * jnp.asarray(direction)
            there = jax.tree.unflatten(tree, moved)
            values.append(frozen_alpha_loss(of, alphas, there, vocabulary, start))
        expected = (values[0] - values[1]) / (2 * step)
        got = (np.asarray(grad) * direction).sum()
        # third derivatives of size 1e2 × step² = 1e-8; rounding 1e-15 / step = 1e-10
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-8), path
        assert np.abs(grad).max() > 0 or alphas != ALL, path  # one term alone may miss a weight


def test_detach_confidence_cuts_both_inputs():
    # Fault: only h, or only e, detached.
    of = config()
    only = ObjectiveConfig(0.0, 0.0, 1.0, 4.0, detach_confidence=True)
    _, cut = gradients(of, only, params(of), target(), toy_map(), batch())
    head = cut.pop("confidence_head")
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(head))
    assert all((np.asarray(x) == 0).all() for x in jax.tree.leaves(cut))
    attached = replace(only, detach_confidence=False)
    _, whole = gradients(of, attached, params(of), target(), toy_map(), batch())
    assert np.abs(whole["markov_head"]["markov_w1"]["embedding"]).max() > 0
    assert np.abs(whole["fc"]["kernel"]).max() > 0
    # W2 only reaches the confidence term through α, which is no path
    assert (np.asarray(whole["markov_head"]["markov_w2"]["kernel"]) == 0).all()
