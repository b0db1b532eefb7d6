"""D-PACE's position weights (§12): a block worked out by hand, and their properties."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_toys import few_examples

from jaxdraft import dpace

# One block: slot 0 is the anchor, slot 2 has a pruned label (c = 0), slot 3 is masked. β = ¼:
# (NumPy here: the working dtype is set after this module is imported.)
MASK = np.array([[[False, True, True, False, True]]])
C = np.array([[[0.9, 0.5, 0.0, 0.3, 0.25]]])
S = [1.0, 0.625, 0.25, 1.0, 0.4375]
PREFIX = [1.0, 0.625, 0.15625, 0.15625, 0.068359375]
SUFFIX = [0.849609375, 0.849609375, 0.224609375, 0.068359375, 0.068359375]
BY_HAND = {
    "cumulative": [0, 0.625, 0.15625, 0, 0.068359375],
    "continuation": [0, 1.359375, 1.4375, 0, 1.0],
    "both": [0, 0.849609375, 0.224609375, 0, 0.068359375],
}


def test_dpace_steps_by_hand():
    # Faults: β and 1−β swapped; a masked slot that lowers the product; a suffix that starts at
    # k+1 or counts masked slots. All numbers are dyadic: exact.
    s = dpace.smoothed(jnp.asarray(C), jnp.asarray(MASK), 0.25)
    prefix = dpace.prefix_confidence(s)
    assert s[0, 0].tolist() == S
    assert prefix[0, 0].tolist() == PREFIX
    assert dpace.expected_suffix(prefix, jnp.asarray(MASK))[0, 0].tolist() == SUFFIX


@pytest.mark.parametrize("variant", dpace.VARIANTS)
def test_dpace_weights_by_hand(variant):
    # Faults: the variants exchanged; R·P or P/R for R/P; a masked slot that weighs.
    w = dpace.weights(variant, jnp.asarray(C), jnp.asarray(MASK), 0.25)
    assert w[0, 0].tolist() == BY_HAND[variant]


def test_label_probability_by_hand():
    # Fault: a pruned label read as the last row, or at its safe row.
    z = jnp.log(jnp.array([[[[1.0, 2.0, 5.0], [5.0, 2.0, 1.0]]]]))
    c = dpace.label_probability(z, jnp.array([[[2, -100]]]))
    # one exp, one log and one sum apart from the fraction
    np.testing.assert_allclose(c[0, 0], [5 / 8, 0], rtol=1e-14, atol=0)


def test_dpace_weights_carry_no_gradient():
    # Fault: the loss lowered by lowering its weights.
    z = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 5, 3)))
    labels = jnp.array([[[0, 1, -100, 2, 2]]])
    for variant in dpace.VARIANTS:

        def total(z, variant=variant):
            c = dpace.label_probability(z, labels)
            return dpace.weights(variant, c, jnp.asarray(MASK), 0.5).sum()

        value, grad = jax.value_and_grad(total)(z)
        assert value > 0
        assert (np.asarray(grad) == 0).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_small_beta_leaves_the_weights_finite(dtype):
    # Fault: R/P of a prefix that underflowed, 0/0. Slots 1 and 2 have pruned labels, so P is 1e-300
    # (0 in float32) and then 0 at slot 3, whose label is certain: s = 1, and slot 4 is worth ½.
    c = jnp.asarray([[[1.0, 0.0, 0.0, 1.0, 0.5]]], dtype)
    mask = jnp.array([[[False, True, True, True, True]]])
    beta = 1e-300
    got = dpace.weights("continuation", c, mask, beta)
    assert got.dtype == dtype
    # β vanishes beside 1 and ½: exact
    assert got[0, 0].tolist() == [0, 1, 2.5, 1.5, 1]
    for variant in ("cumulative", "both"):
        assert dpace.weights(variant, c, mask, beta)[0, 0, 2:].tolist() == [0, 0, 0]


def test_dpace_errors():
    # Fault: β = 0 or a variant of another spelling found out far from here, or never.
    for beta in (0.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match="beta: expected a number above 0"):
            dpace.weights("both", jnp.asarray(C), jnp.asarray(MASK), beta)
    with pytest.raises(ValueError, match="variant: expected one of cumulative, continuation, both"):
        dpace.weights("Both", jnp.asarray(C), jnp.asarray(MASK), 0.5)


@few_examples
@given(
    st.lists(st.floats(0, 1), min_size=6, max_size=6),
    st.lists(st.booleans(), min_size=6, max_size=6),
    st.floats(0.01, 1),
)
def test_dpace_properties(c, mask, beta):
    # Faults: P that grows, R below what it holds, masked slots that matter, R/P below 1.
    m = np.array(mask)
    given_c, given_m = jnp.array([[c]]), jnp.array([[mask]])
    prefix = dpace.prefix_confidence(dpace.smoothed(given_c, given_m, beta))
    suffix = dpace.expected_suffix(prefix, given_m)
    P, R = np.asarray(prefix)[0, 0], np.asarray(suffix)[0, 0]
    # products of at most 6 factors, each rounded
    assert (np.diff(P) <= 1e-15).all()
    assert (beta ** np.cumsum(m) * (1 - 1e-14) <= P).all()
    assert (P <= 1 + 1e-15).all()
    assert (R >= 0).all()
    assert (np.diff(R) <= 1e-15).all()
    assert (R[m] >= P[m] * (1 - 1e-14)).all()
    one, two, three = (np.asarray(dpace.weights(v, given_c, given_m, beta))[0, 0] for v in BY_HAND)
    assert (two[m] >= 1 - 1e-14).all()
    np.testing.assert_allclose(one * two, three, rtol=1e-13, atol=0)
    assert not np.concatenate([w[~m] for w in (one, two, three)]).any()
    elsewhere = jnp.where(given_m, given_c, 1 - given_c)
    np.testing.assert_array_equal(dpace.weights("both", elsewhere, given_m, beta)[0, 0], three)
    # β = 1 trusts every label: P = 1, R counts the slots that are left; exact whole numbers
    certain = dpace.weights("both", given_c, given_m, 1)[0, 0]
    assert certain.tolist() == (m * np.cumsum(m[::-1])[::-1]).tolist()
