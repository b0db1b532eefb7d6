"""Teachers, terms, sums, loss (§7, §8), by hand, and field notes 2, 9, 10 and 11."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_toys import KEPT, K, V, batch, config, few_examples, params, target, toy_map

from jaxdraft import ObjectiveConfig, evaluate, gradients
from jaxdraft import objective as obj
from jaxdraft.evaluate import read_labels
from jaxdraft.teacher import conditional_teacher, teacher_logits, true_teacher

DECAYED = ObjectiveConfig(loss_decay_gamma=4.0)


def one(values):
    """A single slot: [1, 1, 1, …]."""
    return jnp.asarray([[[values]]])


def test_the_half_counterexample():
    # Fault: acceptance measured against the renormalised teacher, which says 1.0 here.
    teacher, kept = jnp.zeros((1, 1, 1, 4)), jnp.array([0, 1])
    conditional, true = conditional_teacher(teacher, kept), true_teacher(teacher, kept)
    draft = one([0.0, 0.0])
    assert conditional[0, 0, 0].tolist() == [0.5, 0.5]
    assert obj.overlap(conditional, conditional).item() == 1.0
    terms = obj.slot_terms(draft, None, one(0), conditional, true, prunes=True)
    # exp(−log 4) is ¼ but for one rounding
    assert terms.accept.item() == pytest.approx(0.5, abs=1e-15)
    assert terms.l1.item() == 0.0


def test_teachers_by_hand():
    # Fault: logsumexp over the kept ids only, or a softmax over all of V for the conditional.
    logits, kept = one([math.log(4), 0.0, 0.0, math.log(2)]), jnp.array([0, 2])
    # one exp and one log apart: rounding only
    np.testing.assert_allclose(true_teacher(logits, kept)[0, 0, 0], [0.5, 0.125], rtol=1e-14)
    np.testing.assert_allclose(conditional_teacher(logits, kept)[0, 0, 0], [0.8, 0.2], rtol=1e-14)


def test_terms_by_hand():
    # Faults: L1 halved, the cross entropy of the wrong column, BCE against 1 − α.
    z, label = one([math.log(3), 0.0]), one(1)  # q = (¾, ¼)
    terms = obj.slot_terms(z, one(2.0), label, one([0.5, 0.5]), one([0.5, 0.1]), prunes=True)
    bce = -0.6 * math.log(1 / (1 + math.exp(-2))) - 0.4 * math.log(1 / (1 + math.exp(2)))
    got = [x.item() for x in (terms.ce, terms.l1, terms.accept, terms.confidence)]
    # a handful of roundings between two ways to write each number
    np.testing.assert_allclose(got, [math.log(4), 0.5, 0.6, bce], rtol=1e-14)
    full = obj.slot_terms(z, None, label, one([0.5, 0.5]), one([0.5, 0.5]), prunes=False)
    assert (full.accept.item(), full.confidence.item()) == (pytest.approx(0.75, abs=1e-15), 0.0)


def test_extreme_logits_stay_finite():
    # Fault: log of a q that underflowed, a BCE that overflows.
    z, label = one([1e9, -1e9]), one(1)
    terms = obj.slot_terms(z, one(-1e9), label, one([0.0, 1.0]), one([0.0, 1.0]), prunes=True)
    assert (terms.ce.item(), terms.l1.item(), terms.accept.item()) == (2e9, 2.0, 0.0)
    assert terms.confidence.item() == 0.0


def sums(*values):
    return obj.Sums(*(jnp.asarray(float(v)) for v in values))


@pytest.mark.parametrize(
    ("prunes", "ce_alpha", "expected"),
    [
        (True, 0.5, 2 * (0.5 * 6 / 4 + (2 * 10 + 3 * 7) / 8)),
        (False, 0.5, 2 * (0.5 * 6 + 2 * 10 + 3 * 7) / 8),
        (True, 0.0, 2 * (2 * 10 + 3 * 7) / 8),
    ],
)
def test_loss_by_hand(prunes, ce_alpha, expected):
    # Faults: one denominator for both when pruned, two when not, W forgotten.
    alphas = obj.coefficients(ObjectiveConfig(ce_alpha, 2.0, 3.0), jnp.dtype("float64"))
    ce_den = jnp.asarray(4.0 if ce_alpha else 0.0)
    own = sums(6, 99, 10, 7, 99)  # its own denominators are not what divides
    assert obj.loss(own, jnp.asarray(8.0), ce_den, alphas, prunes, ranks=2).item() == expected


def test_sums_by_hand():
    # Fault: a pruned label kept in the denominator of the cross entropy.
    terms = obj.SlotTerms(
        kept=jnp.array([[[True, False]]]),
        ce=jnp.array([[[2.0, 0.0]]]),
        l1=jnp.array([[[1.0, 0.5]]]),
        accept=jnp.array([[[0.5, 0.5]]]),
        confidence=jnp.array([[[3.0, 1.0]]]),
    )
    got = obj.weighted_sums(terms, jnp.array([[[1.0, 0.5]]]))
    assert [x.item() for x in got] == [2.0, 1.0, 1.25, 3.5, 1.5]


def test_label_outside_the_draft_vocabulary_note_10():
    # Fault: target id 9 taken for a draft id; target id 7 counted by CE or dropped by L1.
    index = toy_map().index
    assert (index[9], index[7]) == (3, -100)
    z = jnp.broadcast_to(jnp.log(jnp.array([1.0, 2, 3, 4, 10]) / 20), (1, 1, 2, 5))
    uniform, labels = jnp.full((1, 1, 2, 5), 0.2), jnp.array([[[index[9], index[7]]]])
    terms = obj.slot_terms(z, None, labels, uniform, uniform, prunes=True)
    got = obj.weighted_sums(terms, jnp.ones((1, 1, 2)))
    # q = 1/20 … 10/20 against 0.2: |…| sums to 0.6 per slot
    np.testing.assert_allclose(
        [got.ce_num, got.ce_den, got.l1_num, got.den], [math.log(5), 1, 1.2, 2], rtol=1e-14
    )


def finite_and_equal(one_result, other_result):
    # the same program on inputs that must not matter: equal to the bit
    for got, expected in zip(*map(jax.tree.leaves, (one_result, other_result)), strict=True):
        assert np.isfinite(got).all()
        np.testing.assert_array_equal(got, expected)


def test_poisoned_slots_change_nothing_note_9():
    # Fault: the weight applied after the operation, so that 0 · NaN reaches loss or gradient.
    clean, of = batch(), config()
    off = ~np.asarray(clean.loss_mask > 0.5)
    runs = []
    for bad_id in (None, -1, V, 10**6):
        dirty = clean
        if bad_id is not None:
            dirty = clean._replace(
                input_ids=jnp.where(off, bad_id, clean.input_ids),
                target_last_hidden_states=jnp.where(
                    off[:, :, None], jnp.nan, clean.target_last_hidden_states
                ),
            )
        seen, grads = gradients(of, DECAYED, params(of), target(), toy_map(), dirty)
        runs.append((seen.loss, seen.metrics, grads))
    for run in runs[1:]:
        finite_and_equal(run, runs[0])


def test_nan_logits_outside_the_mask_note_9():
    # Fault: selecting the loss of a slot instead of its logits.
    mask = jnp.array([[[True, False]]])

    def term(z):
        rows = obj.counted_rows(mask, z)
        teacher = jnp.full((1, 1, 2, 2), 0.5)
        terms = obj.slot_terms(rows, None, jnp.array([[[0, -1]]]), teacher, teacher, True)
        return (mask.astype(z.dtype) * (terms.ce + terms.l1)).sum()

    z = jnp.array([[[[1.0, 2.0], [jnp.nan, jnp.inf]]]])
    value, grad = jax.value_and_grad(term)(z)
    assert np.isfinite(value)
    assert np.isfinite(grad).all()
    assert grad[0, 0, 1].tolist() == [0.0, 0.0]


def test_the_teacher_gets_no_gradient_note_11():
    # Fault: with a trainable head, the distance pulls the teacher too.
    states = jnp.asarray(np.random.default_rng(0).normal(size=(1, 1, 2, 3)))
    head = jnp.asarray(np.random.default_rng(1).normal(size=(6, 3)))
    kept = jnp.array([1, 4])

    def distance(u, teacher):
        q = jax.nn.softmax(jnp.einsum("bnjh,kh->bnjk", states, u[kept]), axis=-1)
        return obj.l1_distance(q, teacher(u)).sum()

    def live(u):
        return conditional_teacher(teacher_logits(states, u), kept)

    fixed = live(head)
    ours = jax.grad(lambda u: distance(u, live))(head)
    # the same arithmetic with the teacher as a constant
    np.testing.assert_array_equal(ours, jax.grad(lambda u: distance(u, lambda _: fixed))(head))


def test_both_errors_in_the_sheets_words():
    # Fault: a loss of NaN or 0 for a step that has nothing to learn from.
    of, weights, frozen = config(), params(config()), target()
    unsupervised = batch(loss_mask=jnp.zeros((2, 10)))
    with pytest.raises(ValueError, match="no supervised target tokens"):
        evaluate(of, DECAYED, weights, frozen, toy_map(), unsupervised)
    outside = batch(input_ids=jnp.asarray(np.full((2, 10), 7)))
    with pytest.raises(ValueError, match="no in-vocabulary target tokens"):
        gradients(of, DECAYED, weights, frozen, toy_map(), outside)
    ce_off = replace(DECAYED, ce_alpha=0.0)
    assert np.isfinite(evaluate(of, ce_off, weights, frozen, toy_map(), outside).loss)


def test_pruned_without_a_fitting_map_note_2():
    # Fault: ids 0 … K−1 assumed.
    of = config()
    with pytest.raises(ValueError, match="no vocabulary map is given"):
        evaluate(of, DECAYED, params(of), target(), None, batch())
    with pytest.raises(ValueError, match="has V = 16, K = 5 but the config says"):
        evaluate(replace(of, draft_vocab_size=4), DECAYED, {}, target(), toy_map(), batch())


def test_mixed_parameter_dtypes_are_refused():
    # Fault: a float32 leaf silently promoted.
    of = config()
    weights = params(of)
    weights["norm"]["scale"] = weights["norm"]["scale"].astype("float32")
    with pytest.raises(ValueError, match="expected one dtype"):
        evaluate(of, DECAYED, weights, target(), toy_map(), batch())


def test_float32_follows_its_inputs():
    # Fault: a hard-coded dtype anywhere (x64 is on here).
    def halve(tree):
        return jax.tree.map(lambda x: x.astype("float32") if x.dtype == "float64" else x, tree)

    of = config()
    seen, grads = gradients(
        of, DECAYED, halve(params(of)), halve(target()), toy_map(), halve(batch())
    )
    arrays = jax.tree.leaves((seen._replace(eval_mask=seen.loss), grads))
    assert {x.dtype.name for x in arrays} == {"float32"}


@few_examples
@given(st.integers(0, 2**16), st.lists(st.booleans(), min_size=20, max_size=20))
def test_any_mask(seed, supervised):
    # Faults: α above the kept mass; a dropped block that counts; coverage outside [0, 1].
    of, rng = config(), np.random.default_rng(seed)
    given_batch = batch(
        seed,
        loss_mask=jnp.asarray(np.reshape(supervised, (2, 10)), dtype=float),
        anchor_positions=jnp.asarray(rng.integers(0, 10, (2, 3))),
    )
    objective = replace(DECAYED, ce_alpha=0.0)
    arguments = of, objective, params(of, seed), target(seed), toy_map(), given_batch
    if not read_labels(of, given_batch).mask.any():
        with pytest.raises(ValueError, match="no supervised target tokens"):
            evaluate(*arguments)
        return
    seen = evaluate(*arguments)
    mask, accept = np.asarray(seen.eval_mask), np.asarray(seen.accept_probability)
    assert np.isfinite(seen.loss)
    assert not mask[1, 2].any()
    assert (np.diff(mask.astype(int), axis=-1) <= 0).all()
    logits = np.asarray(given_batch.target_last_hidden_states @ target(seed).lm_head.T)
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    for b, n, k in np.argwhere(mask):
        a = int(given_batch.anchor_positions[b, n])
        # two softmaxes: rounding only
        assert accept[b, n, k] <= p[b, a + k, KEPT].sum() + 1e-14
    tau, blocks_counted = (float(x) for x in seen.metrics["tau_probabilistic"])
    assert blocks_counted <= tau <= (1 + of.block_size) * blocks_counted
    assert blocks_counted == mask.any(axis=-1).sum()


def test_unpruned_acceptance_is_the_overlap():
    # Fault: 1 − l1 instead of 1 − ½·l1.
    rng = np.random.default_rng(3)
    q, p = (jnp.asarray(rng.dirichlet(np.ones(K), (1, 1, 4))) for _ in range(2))
    got = obj.overlap_from_l1(obj.l1_distance(q, p))
    # equal in exact numbers; sums of 5 terms below 1
    np.testing.assert_allclose(got, obj.overlap(q, p), rtol=0, atol=1e-15)
