"""Metric pairs (§9), worked out by hand."""

import math

import jax.numpy as jnp
import numpy as np

from jaxdraft.metrics import Slots, metric_pairs, prefix_products
from jaxdraft.objective import slot_terms, weighted_sums

# Draft over two kept ids: q = (¾, ¼), (½, ½) with a tie, and a slot that does not count.
Z = [[math.log(3), 0.0], [0.0, 0.0], [0.0, 9.0]]
TRUE = [[0.5, 0.2], [0.1, 0.3], [0.5, 0.5]]
DRAFT_LABELS = [0, -100, 1]


def pairs(prunes=True, confidence=True):
    """Two rows of one block with three slots; the second block counts nowhere."""
    mask = jnp.array([[[True, True, False]], [[False, False, False]]])
    z, true, labels = (jnp.array([[rows]] * 2) for rows in (Z, TRUE, DRAFT_LABELS))
    c = jnp.zeros((2, 1, 3)) if confidence else None
    conditional = true / true.sum(axis=-1, keepdims=True)
    terms = slot_terms(z, c, labels, conditional, true, prunes)
    w = jnp.array([[[1.0, 0.5, 0.0]], [[0.0, 0.0, 0.0]]])
    slots = Slots(mask, w, labels, z, c, jnp.log(true), true, terms)
    return metric_pairs(slots, weighted_sums(terms, w), prunes)


def expect(got, numerator, denominator):
    # Sums of at most three numbers of size 1: rounding stays below 1e-14.
    np.testing.assert_allclose(got[0], numerator, rtol=0, atol=1e-14)
    np.testing.assert_allclose(got[1], denominator, rtol=0, atol=1e-14)


def test_every_pruned_row_by_hand():
    # Faults: w instead of M in the evaluation rows; a pruned label counted as a hit or left out;
    # acceptance from the renormalised teacher; L1 halved; decay in the per-slot rows.
    got = pairs()
    a0, a1 = 0.5 + 0.2, 0.1 + 0.3  # Σ min(q, p)
    expect(got["acc"], 1, 2)
    expect(got["ce_loss"], -math.log(0.75), 1)
    expect(got["l1_loss"], 2 * (0.75 - 5 / 7) + 0.5 * 0.5, 1.5)
    expect(got["confidence_loss"], 1.5 * math.log(2), 1.5)
    expect(got["confidence_abs_error"], abs(0.5 - a0) + 0.5 * abs(0.5 - a1), 1.5)
    expect(got["draft_vocab_coverage"], 1, 2)
    expect(got["teacher_kept_mass"], 0.7 + 0.4, 2)
    expect(got["teacher_agreement"], 1, 2)  # the tie goes to id 0, the teacher's argmax is 1
    expect(got["teacher_top1_prob"], 0.5 + 0.3, 2)
    expect(got["draft_top1_prob"], 0.75 + 0.5, 2)
    expect(got["tau_probabilistic"], 1 + a0 + a0 * a1, 1)
    expect(got["ce_position"], [-math.log(0.75), 0, 0], [1, 0, 0])
    expect(got["accuracy_position"], [1, 0, 0], [1, 1, 0])
    expect(got["accept_position"], [a0, a1, 0], [1, 1, 0])
    expect(got["confidence_cumprod_bias"], (0.5 - a0) + (0.25 - a0 * a1), 2)
    assert len(got) == 15


def test_unpruned_has_no_pruning_rows():
    # Fault: rows of another kind of run in the report.
    assert pairs().keys() - pairs(prunes=False).keys() == {
        "draft_vocab_coverage",
        "teacher_kept_mass",
    }


def test_without_a_confidence_head():
    # Fault: rows missing, or compared with σ(0).
    got = pairs(confidence=False)
    expect(got["confidence_loss"], 0, 1.5)
    expect(got["confidence_abs_error"], 0, 1.5)
    expect(got["confidence_cumprod_bias"], 0, 2)


def test_prefix_products_stop_at_the_mask():
    # Fault: τ counting slots after the end of a block.
    mask = jnp.array([[[True, False, True]]])
    assert prefix_products(jnp.full((1, 1, 3), 0.5), mask)[0, 0].tolist() == [0.5, 0, 0]
