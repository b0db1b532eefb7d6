"""EAGLE3 (§13): by hand, against loops, gradients, causality, what must not matter, refusals."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import spec_eagle3 as toys
from hypothesis import given
from hypothesis import strategies as st
from spec_eagle3 import SEQ, STEPS, batch, in_loops, named, params
from spec_toys import HIDDEN, KEPT, V, few_examples, target, toy_map

from jaxdraft import (
    Eagle3Objective,
    Target,
    build_map,
    eagle3,
    evaluate_eagle3,
    gradients_eagle3,
    identity_map,
    map_from_buffers,
    teacher,
)
from jaxdraft import eagle3_objective as terms
from jaxdraft.eagle3_evaluate import read_slots
from jaxdraft.vocabulary import kept_ids

N = Eagle3Objective(steps=STEPS)
PRUNED, FULL = toys.config(), toys.config(draft_vocab_size=None)
IDS = {PRUNED: KEPT, FULL: list(range(V))}


def run(of, given_batch=None, weights=None, vocabulary=None, **more):
    """Evaluation and gradients: one program per config, whatever the batch."""
    vocabulary = vocabulary or (toy_map() if of.prunes else None)
    return gradients_eagle3(
        of,
        N,
        params(of) if weights is None else weights,
        more.get("frozen", target()),
        vocabulary,
        batch() if given_batch is None else given_batch,
    )


@cache
def clean(of):
    return run(of)


# --- clause by clause, by hand -------------------------------------------------------------------


def test_positions_and_masks_by_hand():
    # Faults: the label one off; a step that does not shift; a clamped last label counted again
    # (column 4 of step 0); a threshold other than 0.5; rotary positions that stand still.
    assert eagle3.read_positions(3, 5).tolist() == [
        [1, 2, 3, 4, 4],
        [2, 3, 4, 4, 4],
        [3, 4, 4, 4, 4],
    ]
    assert eagle3.rotary_positions(2, 3).tolist() == [[0, 1, 2], [1, 2, 3]]
    m = jnp.array([[1.0, 1.0, 0.5, 0.6, 1.0], [1.0, 1.0, 1.0, 0.0, 0.0]])
    assert eagle3.supervised_slots(m, 3).astype(int).tolist() == [
        [[0, 1, 1, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
        [[1, 0, 0, 0, 0], [0, 0, 0, 0, 0], [0, 0, 0, 0, 0]],
    ]
    assert eagle3.leads_to_supervised(m).astype(int).tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]


def test_more_steps_than_the_sequence_has():
    # Fault: what leaves the sequence counted through a clamped position.
    assert eagle3.supervised_slots(jnp.ones((1, 3)), 5).sum(axis=-1).tolist() == [[1, 0, 0, 0, 0]]


def test_visibility_by_hand():
    # Faults: later steps causal as step 0 is; a later step that does not see itself or the steps
    # between; the diagonal missing from step 0.
    assert eagle3.visibility(3, 3).astype(int).tolist() == [
        [[1, 0, 0], [1, 0, 0], [1, 0, 0]],
        [[1, 1, 0], [0, 1, 0], [0, 1, 0]],
        [[1, 1, 1], [0, 0, 1], [0, 0, 1]],
    ]


def test_loss_by_hand():
    # Faults: divided by counted slots; 0.8 from step 1 on or not at all; W forgotten; the negative
    # sign; an uncounted slot's NaN let through.
    z = jnp.log(jnp.array([[[[3.0, 1.0]] * 3] * 2]))
    p = jnp.array([[[[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]]] * 2])
    ce = terms.soft_cross_entropy(z, p)
    half, first, second = math.log(4) - 0.5 * math.log(3), math.log(4 / 3), math.log(4)
    # a handful of roundings between two ways to write it
    np.testing.assert_allclose(ce[0], [[half, first, second]] * 2, rtol=1e-14)
    ce = ce.at[0, 1, 0].set(jnp.nan)
    counted = jnp.array([[[True, False, True], [False, True, False]]])
    losses = terms.step_losses(ce, counted, 12, ranks=2)
    np.testing.assert_allclose(losses, [(half + second) / 6, first / 6], rtol=1e-14)
    value = terms.total_loss(losses).item()
    assert value == pytest.approx((half + second + 0.8 * first) / 6, rel=1e-14)


def test_target_ids_and_draft_ids_note_10():
    # Faults (note 10): the teacher's choice compared with a draft id, so that target 3 and draft
    # index 3 (target 9) are one; target 7 supervised for the loss, or left out of the accuracy.
    kept, t2d = kept_ids(toy_map()), jnp.asarray(toy_map().t2d)
    z = jnp.zeros((1, 1, 4, 5)).at[0, 0, :, 3].set(1.0)
    choice = terms.teacher_choice(jnp.eye(V)[jnp.array([[[9, 3, 7, 12]]])])
    assert choice.tolist() == [[[9, 3, 7, 12]]]
    assert terms.draft_choice(z, kept).tolist() == [[[9, 9, 9, 9]]]
    mask = jnp.array([[[True, True, True, False]]])
    counted = terms.counted_slots(mask, choice, t2d)
    assert counted.tolist() == [[[True, True, False, False]]]
    ones = jnp.ones((1, 1, 4))
    rows = terms.metric_rows(
        terms.Eagle3Slots(mask, counted, choice, terms.draft_choice(z, kept), ones, ones)
    )
    expected = {
        "loss_step": (2, 4),
        "accept_step": (3, 3),
        "accuracy_step": (1, 3),
        "in_vocabulary_step": (2, 3),
    }
    assert {name: (a.item(), b.item()) for name, (a, b) in rows.items()} == expected


def test_ties_go_to_the_lower_id():
    # Fault: an argmax that takes the last of equals.
    assert terms.teacher_choice(jnp.zeros((1, 1, 1, V)))[0, 0, 0] == 0
    assert terms.draft_choice(jnp.zeros((1, 1, 1, 5)), jnp.arange(5) + 2)[0, 0, 0] == 2


def test_acceptance_of_the_sheets_counterexample():
    # Fault: acceptance against the conditional teacher, which says 1 where the truth is ½.
    logits, kept = jnp.zeros((1, 1, 1, 4)), jnp.array([1, 3])
    p̃, p = teacher.conditional_teacher(logits, kept), teacher.true_teacher(logits, kept)
    z = jnp.zeros((1, 1, 1, 2))
    assert terms.acceptance(z, p̃, p, prunes=True).item() == pytest.approx(0.5, rel=1e-15)
    assert terms.acceptance(z, p̃, p̃, prunes=False).item() == pytest.approx(1.0, rel=1e-15)


def test_padding_rows_are_never_proposed_note_27():
    # Faults (note 27): a pad id kept or proposed; its mass left out of the target's softmax.
    vocabulary = build_map(np.zeros(24, dtype=int), 5, tokenizer_size=20)
    kept, t2d = kept_ids(vocabulary), jnp.asarray(vocabulary.t2d)
    logits = jnp.zeros((1, 1, 2, 24)).at[0, 0, 0, 20:].set(100.0).at[0, 0, 1, 3].set(1.0)
    choice = terms.teacher_choice(logits)
    assert choice.tolist() == [[[20, 3]]]
    assert terms.counted_slots(jnp.ones((1, 1, 2), bool), choice, t2d).tolist() == [[[False, True]]]
    z = jnp.zeros((1, 1, 2, 5))
    assert (terms.draft_choice(z, kept) < 20).all()
    p̃, p = teacher.conditional_teacher(logits, kept), teacher.true_teacher(logits, kept)
    accept = terms.acceptance(z, p̃, p, prunes=True)[0, 0]
    assert accept[0] < 1e-40
    # q = ⅕ each; p = 1/(23 + e) four times and, larger but below ⅕, e/(23 + e)
    assert accept[1].item() == pytest.approx((4 + math.e) / (23 + math.e), rel=1e-14)


# --- against loops -------------------------------------------------------------------------------


def compare(seen, expected):
    # two orders of summation over some ten terms, twenty operations deep
    close = {"rtol": 1e-11, "atol": 1e-12}
    assert seen.loss.item() == pytest.approx(expected["loss"], rel=1e-11)
    assert set(seen.metrics) == set(expected["metrics"])
    for row, pair in expected["metrics"].items():
        for got, wanted in zip(seen.metrics[row], pair, strict=True):
            np.testing.assert_allclose(got, wanted, err_msg=row, **close)
    assert {tuple(at) for at in np.argwhere(seen.eval_mask).tolist()} == set(expected["slots"])
    for at, (h, z, alpha) in expected["slots"].items():
        np.testing.assert_allclose(seen.hidden[at], h, **close)
        np.testing.assert_allclose(seen.draft_logits[at], z, **close)
        np.testing.assert_allclose(seen.accept_probability[at], alpha, **close)


@pytest.mark.parametrize("of", [PRUNED, FULL], ids=["pruned", "full"])
def test_everything_against_loops(of):
    # Faults: the halves of the input swapped or unnormed; g's residual taken after the norm; the
    # next step fed the normed state; keys of a later step at other indices; kv heads in the wrong
    # groups; true and conditional teacher exchanged; a loss over slots that are not counted.
    expected = in_loops(of, STEPS, params(of), target(), IDS[of], batch())
    counted, on = expected["metrics"]["in_vocabulary_step"]
    assert (on > 0).all()
    assert (counted > 0).all()
    assert (counted < on).any() or not of.prunes  # else the case would not tell them apart
    compare(clean(of)[0], expected)


@few_examples
@given(st.integers(0, 2**16), st.lists(st.booleans(), min_size=2 * SEQ, max_size=2 * SEQ))
def test_any_mask(seed, supervised):
    # Faults: any mask, token or teacher that makes formula and words differ, or a silent 0.
    m = jnp.asarray(np.reshape(supervised, (2, SEQ)), dtype=float)
    given_batch = batch(seed, loss_mask=m)
    expected = in_loops(PRUNED, STEPS, params(PRUNED), target(seed), KEPT, given_batch)
    counted, on = expected["metrics"]["in_vocabulary_step"]
    if not counted.any():
        words = "no in-vocabulary target tokens" if on.any() else "no supervised target tokens"
        with pytest.raises(ValueError, match=words):
            run(PRUNED, given_batch, frozen=target(seed))
        return
    compare(run(PRUNED, given_batch, frozen=target(seed))[0], expected)


# --- gradients -----------------------------------------------------------------------------------


@pytest.mark.parametrize("of", [PRUNED, FULL], ids=["pruned", "full"])
def test_every_gradient_against_central_differences(of):
    # Faults: a parameter without a gradient; the states of the step before detached; the head or
    # its input cut off. The loss is the loops', so a wrong forward pass shows too.
    weights = params(of)
    leaves, tree = jax.tree.flatten(weights)
    rng, step = np.random.default_rng(0), 1e-5
    for i, (name, grad) in enumerate(named(clean(of)[1]).items()):
        assert np.abs(grad).max() > 0, name
        direction, values = rng.normal(size=grad.shape), []
        for sign in (1, -1):
            moved = [*leaves]
            moved[i] = leaves[i] + sign * step * jnp.asarray(direction)
            there = jax.tree.unflatten(tree, moved)
            values.append(in_loops(of, STEPS, there, target(), IDS[of], batch())["loss"])
        expected = (values[0] - values[1]) / (2 * step)
        # third derivatives of size 1e2 × step² = 1e-8; rounding 1e-15 / step = 1e-10
        assert (grad * direction).sum() == pytest.approx(expected, rel=1e-6, abs=1e-8), name


def test_parameters_are_those_of_the_contract():
    # Faults: the frozen embedding trained; a norm of q or k as the DFlash family has; the head
    # shared with the target (K rows of its own, K = 5 here).
    layer = [f"midlayer/{name}/scale" for name in ("input_layernorm", "hidden_norm")]
    layer += ["midlayer/post_attention_layernorm/scale", "norm/scale", "fc/kernel"]
    layer += [f"midlayer/self_attn/{name}_proj/kernel" for name in "qkvo"]
    layer += [f"midlayer/mlp/{name}_proj/kernel" for name in ("gate", "up", "down")]
    shapes = {name: array.shape for name, array in named(params(PRUNED)).items()}
    assert set(shapes) == {*layer, "lm_head/kernel"}
    assert shapes["lm_head/kernel"] == (HIDDEN, len(KEPT))
    assert shapes["fc/kernel"] == (3 * HIDDEN, HIDDEN)
    assert shapes["midlayer/self_attn/k_proj/kernel"] == (2 * HIDDEN, 8)
    assert named(params(FULL))["lm_head/kernel"].shape == (HIDDEN, V)


# --- causality, and what must not matter ---------------------------------------------------------


def test_a_later_token_or_state_moves_no_earlier_slot():
    # Faults: a query that sees keys to its right, in any step; a step that reads one token too
    # far; a feature read before its index. Same program: unseen keys weigh exactly 0.
    everything = batch(loss_mask=jnp.ones((2, SEQ)))
    before = run(PRUNED, everything)[0].draft_logits
    i, t = np.arange(STEPS)[:, None], np.arange(SEQ)[None, :]
    in_sequence = t + 1 + i < SEQ
    for u in range(1, SEQ):
        moved = everything._replace(
            input_ids=everything.input_ids.at[:, u].set((everything.input_ids[:, u] + 5) % V)
        )
        same = np.asarray(run(PRUNED, moved)[0].draft_logits == before).all(axis=(0, 3))
        assert same[in_sequence & (t + 1 + i < u)].all(), u
        assert not same[in_sequence & (t + 1 + i == u)].any(), u
        states = everything.hidden_states.at[:, u].add(1.0)
        moved = everything._replace(hidden_states=states)
        same = np.asarray(run(PRUNED, moved)[0].draft_logits == before).all(axis=(0, 3))
        assert same[:, :u].all(), u
        # Index S−1 leads to no label, and what leads to none is not read.
        assert not same[in_sequence & (t == u) & (u < SEQ - 2)].any(), u


def test_the_last_token_is_only_a_label():
    # Fault: what stands behind the sequence's last label read by clamping.
    seen, grads = clean(PRUNED)
    ids = batch().input_ids.at[:, -1].set(11)
    again, others = run(PRUNED, batch(input_ids=ids))
    assert again.loss == seen.loss
    for got, wanted in zip(jax.tree.leaves(others), jax.tree.leaves(grads), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_the_teacher_stands_before_the_label():
    # Fault: the teacher of another position. Only slots of label u+1 follow T at u, and T at 0
    # and at S−1 teaches nobody.
    everything = batch(loss_mask=jnp.ones((2, SEQ)))
    before = run(PRUNED, everything)[0].accept_probability
    i, t = np.arange(STEPS)[:, None], np.arange(SEQ)[None, :]
    for u in range(SEQ):
        states = everything.target_last_hidden_states.at[:, u].add(1.0)
        moved = everything._replace(target_last_hidden_states=states)
        same = np.asarray(run(PRUNED, moved)[0].accept_probability == before)
        supervised = t + 2 + i < SEQ
        follows = supervised & (t + 2 + i == u + 1)
        assert same[:, supervised & ~follows].all(), u
        assert not same[:, follows].any(), u


def test_what_is_not_supervised_changes_nothing_note_9():
    # Fault: the mask applied after the operation, so that 0 · NaN reaches loss or gradient: in
    # the teacher of an unsupervised label, in features and tokens of the padding.
    tidy, on = batch(), np.asarray(batch().loss_mask > 0.5)
    last = SEQ - 1 - on[:, ::-1].argmax(axis=1)
    at = np.arange(SEQ)[None, :]
    teaches = (at >= 1) & np.pad(on[:, 1:], ((0, 0), (0, 1)))
    assert (~teaches[0, 1:4]).any()  # a hole between supervised labels, not only padding
    nan = jnp.nan
    dirty = tidy._replace(
        target_last_hidden_states=jnp.where(
            teaches[:, :, None], tidy.target_last_hidden_states, nan
        ),
        hidden_states=jnp.where((at <= last[:, None] - 2)[:, :, None], tidy.hidden_states, nan),
    )
    seen, grads = clean(PRUNED)
    for bad_id in (-1, V, 10**6):
        # The token at 0 is read by no step, nor is one from the last label on.
        read = (at >= 1) & (at < last[:, None])
        again = dirty._replace(input_ids=jnp.where(read, tidy.input_ids, bad_id))
        other, gradients = run(PRUNED, again)
        pairs = zip(
            jax.tree.leaves((other.loss, other.metrics, gradients)),
            jax.tree.leaves((seen.loss, seen.metrics, grads)),
            strict=True,
        )
        for got, wanted in pairs:
            assert np.isfinite(got).all()
            # the same program on inputs that must not matter: equal to the bit
            np.testing.assert_array_equal(got, wanted)


def test_slots_are_finite_where_nothing_counts_note_9():
    # Fault: rows of teacher or draft selected after the operation. (Compiled, XLA makes a select
    # of the product with the mask and hides it.)
    tidy = batch()
    mask = eagle3.supervised_slots(tidy.loss_mask, STEPS)
    # Step 0 reads every teacher: here T is NaN wherever it teaches no supervised label.
    teaches = jnp.pad(mask[:, 0, :-1], ((0, 0), (1, 0)))[:, :, None]
    states = jnp.where(teaches, tidy.target_last_hidden_states, jnp.nan)
    z = jnp.where(mask[..., None], clean(PRUNED)[0].draft_logits, jnp.nan)
    slots = read_slots(
        PRUNED, target(), toy_map(), tidy._replace(target_last_hidden_states=states), z
    )
    assert np.isfinite(slots.ce).all()
    assert np.isfinite(slots.accept).all()
    np.testing.assert_allclose(  # eager and compiled: rounding of other fusions
        np.where(mask, slots.accept, 0),
        np.where(mask, clean(PRUNED)[0].accept_probability, 0),
        rtol=0,
        atol=1e-14,
    )


def test_float32_follows_its_inputs():
    # Fault: a hard-coded dtype anywhere (x64 is on here).
    def halve(tree):
        return jax.tree.map(lambda x: x.astype("float32") if x.dtype == "float64" else x, tree)

    weights, frozen, rows = map(halve, (params(PRUNED), target(), batch()))
    two = Eagle3Objective(steps=2)  # a later step, and less to compile than three
    seen, grads = gradients_eagle3(PRUNED, two, weights, frozen, toy_map(), rows)
    arrays = jax.tree.leaves((seen._replace(eval_mask=seen.loss), grads))
    assert {x.dtype.name for x in arrays} == {"float32"}


# --- pruned and unpruned -------------------------------------------------------------------------


def test_no_map_and_the_identity_are_the_same():
    # Fault: K = V with another map than t2d all true, d2t all zero.
    vocabulary = identity_map(V)
    assert vocabulary.t2d.all()
    assert (vocabulary.d2t == 0).all()
    other = run(FULL, vocabulary=vocabulary)
    for got, wanted in zip(jax.tree.leaves(other), jax.tree.leaves(clean(FULL)), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_pruning_an_id_that_is_never_chosen_changes_no_loss():
    # Fault: the soft cross entropy of a pruned draft taken over V, or divided by what is kept.
    pruned = toys.config(vocab_size=V + 1, draft_vocab_size=V)
    # The new row's logit is 0, below the largest of sixteen random ones: never the argmax.
    larger = Target(*(jnp.pad(rows, ((0, 1), (0, 0))) for rows in target()))
    vocabulary = map_from_buffers(np.arange(V + 1) < V, np.zeros(V, dtype=np.int64))
    seen = evaluate_eagle3(pruned, N, params(FULL), larger, vocabulary, batch())
    one = clean(FULL)[0]
    # one program with and one without a row more in the teacher: rounding of other fusions
    assert seen.loss.item() == pytest.approx(one.loss.item(), rel=1e-13)
    less, full = seen.metrics["accept_step"][0], one.metrics["accept_step"][0]
    assert (less < full - 1e-4).all()  # the new row's mass is a rejection


# --- refusals ------------------------------------------------------------------------------------


def test_both_errors_in_the_sheets_words():
    # Fault: a loss of 0 for a step that has nothing to learn from. m = 1 at 0 and 1 labels nothing.
    early = jnp.zeros((2, SEQ)).at[:, :2].set(1.0)
    with pytest.raises(ValueError, match="no supervised target tokens"):
        run(PRUNED, batch(loss_mask=early))
    pushed = target().lm_head.at[7].set(100.0)
    states = jnp.abs(batch().target_last_hidden_states)
    with pytest.raises(ValueError, match="no in-vocabulary target tokens"):
        run(
            PRUNED,
            batch(target_last_hidden_states=states),
            frozen=Target(target().embed_tokens, pushed),
        )
    with pytest.raises(ValueError, match="no vocabulary map is given"):
        gradients_eagle3(PRUNED, N, params(PRUNED), target(), None, batch())
    with pytest.raises(ValueError, match=r"the vocabulary map has V = 16, K = 5"):
        gradients_eagle3(FULL, N, params(FULL), target(), toy_map(), batch())
