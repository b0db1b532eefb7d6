"""The bonus-anchor layout and its two losses (§3, §12): by hand, against loops, and gradients."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_toys import (
    KEPT,
    NO_HEADS,
    SEQ,
    SLOTS,
    V,
    batch,
    config,
    dflash_config,
    few_examples,
    params,
    target,
    toy_map,
)

from jaxdraft import (
    Batch,
    DFlashObjective,
    DSparkDraft,
    ObjectiveConfig,
    Target,
    dpace,
    evaluate,
    evaluate_dflash,
    gradients_dflash,
    identity_map,
    map_from_buffers,
)
from jaxdraft import dflash as layout
from jaxdraft.draft import DraftOutput
from jaxdraft.evaluate import read_slots
from jaxdraft.metrics import Slots
from jaxdraft.objective import slot_terms, weighted_sums

DECAYED = DFlashObjective(loss_decay_gamma=4.0)
BOTH = DFlashObjective(dpace="both", beta=0.25)
OBJECTIVES = {
    "decayed": DECAYED,
    "flat": DFlashObjective(),
    **{variant: DFlashObjective(dpace=variant, beta=0.25) for variant in dpace.VARIANTS},
}


def weights_of(of, seed=0):
    """Random parameters of a DFlash draft: those of a DSpark draft that has no heads."""
    return params(config(**NO_HEADS, draft_vocab_size=of.draft_vocab_size), seed)


def toy_batch(seed=2, **changes):
    """Row 0, anchor 4: labels at 4, 5, 6, 7, of which 6 alone is unsupervised; most ids kept."""
    anchors = jnp.asarray([[1, 4, 7], [0, 4, 0]])
    ids = np.random.default_rng(seed).choice([*KEPT, 7, 15], (2, SEQ))
    fields = {"anchor_positions": anchors, "input_ids": jnp.asarray(ids), **changes}
    return batch(seed, **fields)


# --- the layout ---------------------------------------------------------------------------------


def test_labels_teachers_and_mask_by_hand():
    # Faults: the anchor-first labels; slot 0 trained; the prefix product (slot 3 of the first
    # block would not count); the clamped last token counted again; a dropped block that counts.
    ids, m = jnp.arange(10, 17)[None], jnp.array([[1.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0]])
    empty, keep = jnp.zeros((1, 7, 1)), jnp.array([[True, True, False]])
    out = layout.read_labels(
        dflash_config(), Batch(ids, m, empty, empty, jnp.array([[1, 4, 0]]), keep)
    )
    assert out.tokens[0].tolist() == [[11, 12, 13, 14], [14, 15, 16, 16], [10] * 4]
    assert out.teacher_at[0].tolist() == [[0, 1, 2, 3], [3, 4, 5, 5], [0] * 4]
    assert out.mask[0].astype(int).tolist() == [[0, 1, 0, 1], [0, 1, 1, 0], [0] * 4]


def test_weights_decay_from_slot_one_by_hand():
    # Fault: decay counted from slot 0, as in the anchor-first layout.
    mask = jnp.array([[[False, True, False, True]]])
    w = layout.decayed_weights(mask, 2.0, jnp.float64)
    # exp of two libraries: the last bit may differ
    np.testing.assert_allclose(w[0, 0], [0, 1, 0, math.exp(-1)], rtol=1e-15, atol=0)
    assert layout.decayed_weights(mask, None, jnp.float64)[0, 0].tolist() == [0, 1, 0, 1]
    unmasked = layout.decayed_weights(jnp.ones((1, 1, 4), bool), 2.0, jnp.float64)
    np.testing.assert_allclose(unmasked[0, 0, :3], [1, 1, math.exp(-0.5)], rtol=1e-15, atol=0)


# --- the two losses -----------------------------------------------------------------------------


def hand_slots():
    """One block of four slots, q = (¾, ¼) in each, the third one's label pruned."""
    z, labels = jnp.log(jnp.array([[[[3.0, 1.0]] * 4]])), jnp.array([[[0, 0, -100, 1]]])
    mask, teacher = jnp.array([[[False, True, True, True]]]), jnp.full((1, 1, 4, 2), 0.5)
    terms = slot_terms(z, None, labels, teacher, teacher, prunes=True)
    return Slots(mask, mask.astype(z.dtype), labels, z, None, teacher, teacher, terms)


def test_dflash_loss_by_hand():
    # Faults: a pruned label counted in the denominator; decay from slot 0; W forgotten.
    slots = hand_slots()
    sums = weighted_sums(
        slots.terms, layout.position_weights(DFlashObjective(loss_decay_gamma=2.0), slots)
    )
    last = math.exp(-1)
    numerator, denominator = math.log(4 / 3) + last * math.log(4), 1 + last
    # a handful of roundings between two ways to write it
    assert sums.ce_num.item() == pytest.approx(numerator, rel=1e-14)
    assert sums.ce_den.item() == pytest.approx(denominator, rel=1e-14)
    over_ranks = layout.loss(sums.ce_num, jnp.asarray(5.0), ranks=3).item()
    assert over_ranks == pytest.approx(3 * numerator / 5, rel=1e-14)


def test_dpace_loss_by_hand():
    # Faults: divided by weights or slots instead of rows; β and 1−β swapped; W forgotten.
    slots = hand_slots()
    sums = weighted_sums(slots.terms, layout.position_weights(BOTH, slots))
    # c = ¾, 0, ¼ behind the anchor, so s = 13/16, 1/4, 7/16
    one, two, three = 13 / 16, 13 / 64, 91 / 1024
    numerator = (one + two + three) * math.log(4 / 3) + three * math.log(4)
    over_ranks = dpace.loss(sums.ce_num, 2, ranks=3).item()
    assert over_ranks == pytest.approx(3 * numerator / 2, rel=1e-14)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_slot_zero_does_not_move_the_loss(name):
    # Fault: slot 0 trained to repeat the anchor, or its NaN let through.
    of, given_batch, frozen = dflash_config(), toy_batch(), target()
    labels = layout.read_labels(of, given_batch)

    def value(z):
        out = DraftOutput(hidden=z, logits=z, confidence_logits=None)
        slots = read_slots(of, frozen, toy_map(), given_batch, labels.mask, *labels[:2], out)
        return weighted_sums(slots.terms, layout.position_weights(OBJECTIVES[name], slots)).ce_num

    z = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, SLOTS, len(KEPT))))
    first, grad = jax.jit(jax.value_and_grad(value))(z)
    assert (np.asarray(grad)[:, :, 0] == 0).all()
    assert (np.abs(grad).max(axis=(0, 1, 3))[1:] > 0).all()
    again, _ = jax.jit(jax.value_and_grad(value))(z.at[:, :, 0].set(jnp.nan))
    assert again == first


# --- against loops ------------------------------------------------------------------------------


def softmax(z):
    e = np.exp(z - z.max())
    return e / e.sum()


def slot_weight(objective, block, k):
    """§12 for one slot; `block` holds (counts, c) per slot."""
    if objective.dpace == "none":
        decay = objective.loss_decay_gamma
        return 1.0 if decay is None else math.exp(-max(k - 1, 0) / decay)
    beta = objective.beta
    s = [(1 - beta) * c + beta if on else 1.0 for on, c in block]
    prefix = [math.prod(s[: j + 1]) for j in range(len(s))]
    suffix = sum(prefix[j] for j in range(k, len(s)) if block[j][0])
    return {"cumulative": prefix[k], "continuation": suffix / prefix[k], "both": suffix}[
        objective.dpace
    ]


def in_loops(objective, ids, given_batch, frozen, logits, fixed=None):
    """Loss, weights and some rows of §9 from the draft's logits, slot by slot."""
    x, m, _, T, anchors, keep = (np.asarray(array) for array in given_batch)
    U, seq = np.asarray(frozen.lm_head), x.shape[1]
    w, ce = np.zeros((2, *anchors.shape, SLOTS))
    inside, on = np.zeros(w.shape, bool), np.zeros(w.shape, bool)
    hits, accept, tau = np.zeros(w.shape), np.zeros(w.shape), []
    for b, n in np.ndindex(anchors.shape):
        a, block = anchors[b, n], []
        for k in range(SLOTS):
            at = a + k
            counts = k > 0 and keep[b, n] and at < seq and m[b, min(at, seq - 1)] > 0.5
            q = softmax(logits[b, n, k])
            label = ids.index(x[b, at]) if counts and x[b, at] in ids else None
            block.append((counts, 0.0 if label is None else q[label]))
            if counts:
                on[b, n, k], inside[b, n, k] = True, label is not None
                ce[b, n, k] = 0.0 if label is None else -math.log(q[label])
                hits[b, n, k] = q.argmax() == label
                accept[b, n, k] = np.minimum(q, softmax(U @ T[b, at - 1])[ids]).sum()
        w[b, n] = [slot_weight(objective, block, k) * block[k][0] for k in range(SLOTS)]
        if on[b, n].any():
            tau.append(1 + np.cumprod(on[b, n, 1:] * accept[b, n, 1:]).sum())
    used = w if fixed is None else fixed
    numerator, denominator = (used * inside * ce).sum(), (used * inside).sum()
    rows = {
        "ce_loss": (numerator, denominator),
        "acc": (hits.sum(), on.sum()),
        "tau_probabilistic": (sum(tau), len(tau)),
        "ce_position": ((inside * ce).sum((0, 1))[1:], inside.sum((0, 1))[1:]),
        "accuracy_position": (hits.sum((0, 1))[1:], on.sum((0, 1))[1:]),
        "accept_position": (accept.sum((0, 1))[1:], on.sum((0, 1))[1:]),
        "draft_vocab_coverage": (inside.sum(), on.sum()),
    }
    total = denominator if objective.dpace == "none" else x.shape[0]
    return numerator / total if total else math.nan, w, rows


@pytest.mark.parametrize("prunes", [True, False])
@pytest.mark.parametrize("name", ["decayed", "both"])
def test_loss_and_metrics_against_loops(name, prunes):
    # Faults: τ and the per-slot rows run over slot 0 (τ would be 1 everywhere); rows of heads
    # that are not there; w in the evaluation rows; the teacher read one position off.
    of = dflash_config() if prunes else dflash_config(draft_vocab_size=None)
    given_batch, frozen = toy_batch(), target()
    vocabulary = toy_map() if prunes else None
    seen = evaluate_dflash(of, OBJECTIVES[name], weights_of(of), frozen, vocabulary, given_batch)
    ids = KEPT if prunes else list(range(V))
    value, _, rows = in_loops(
        OBJECTIVES[name], ids, given_batch, frozen, np.asarray(seen.draft_logits)
    )
    # two orders of summation over at most 24 slots
    assert seen.loss.item() == pytest.approx(value, rel=1e-13)
    absent = {"draft_vocab_coverage", "teacher_kept_mass"} - set(seen.metrics)
    assert absent == (set() if prunes else {"draft_vocab_coverage", "teacher_kept_mass"})
    for row in rows.keys() - absent:
        for got, expected in zip(seen.metrics[row], rows[row], strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-13, atol=1e-13, err_msg=row)
    assert not [row for row in seen.metrics if "confidence" in row]
    assert not seen.eval_mask[:, :, 0].any()
    assert seen.eval_mask[0, 1].tolist() == [False, True, False, True]


@few_examples
@given(st.integers(0, 2**16), st.lists(st.booleans(), min_size=20, max_size=20))
def test_any_mask(seed, supervised):
    # Faults: any mask, anchor or label that makes formula and words differ, or a silent NaN.
    of, rng = dflash_config(), np.random.default_rng(seed)
    given_batch = toy_batch(
        seed,
        loss_mask=jnp.asarray(np.reshape(supervised, (2, SEQ)), dtype=float),
        anchor_positions=jnp.asarray(rng.integers(0, SEQ, (2, 3))),
    )
    arguments = of, BOTH, weights_of(of), target(seed), toy_map(), given_batch
    labels = layout.read_labels(of, given_batch)
    if not np.isin(np.asarray(labels.tokens)[np.asarray(labels.mask)], KEPT).any():
        some = bool(labels.mask.any())
        words = "no in-vocabulary target tokens" if some else "no supervised target tokens"
        with pytest.raises(ValueError, match=words):
            evaluate_dflash(*arguments)
        return
    seen = evaluate_dflash(*arguments)
    value, _, rows = in_loops(BOTH, KEPT, given_batch, target(seed), np.asarray(seen.draft_logits))
    assert seen.loss.item() == pytest.approx(value, rel=1e-13)
    for got, expected in zip(
        seen.metrics["tau_probabilistic"], rows["tau_probabilistic"], strict=True
    ):
        assert got.item() == pytest.approx(expected, rel=1e-13)


# --- gradients ----------------------------------------------------------------------------------

SOME = (
    "fc/kernel",
    "norm/scale",
    "layers_0/self_attn/q_proj/kernel",
    "layers_0/mlp/up_proj/kernel",
)


@pytest.mark.parametrize("name", ["decayed", *dpace.VARIANTS])
def test_central_differences_with_the_weights_held(name):
    # Faults: a gradient through D-PACE's weights; a parameter that gets none.
    of, frozen, given_batch = dflash_config(), target(), toy_batch()
    weights = weights_of(of)
    _, grads = gradients_dflash(of, OBJECTIVES[name], weights, frozen, toy_map(), given_batch)

    def logits(tree):
        # the logits do not depend on the objective: one compilation for all of them
        seen = evaluate_dflash(of, DECAYED, tree, frozen, toy_map(), given_batch)
        return np.asarray(seen.draft_logits)

    _, fixed, _ = in_loops(OBJECTIVES[name], KEPT, given_batch, frozen, logits(weights))
    leaves, tree = jax.tree.flatten(weights)
    rng, step = np.random.default_rng(0), 1e-5
    live_differs, names = False, []
    for i, (path, grad) in enumerate(jax.tree_util.tree_leaves_with_path(grads)):
        names.append("/".join(entry.key for entry in path))
        assert np.abs(grad).max() > 0, path
        if names[-1] not in SOME:
            continue
        direction, held, live = rng.normal(size=grad.shape), [], []
        for sign in (1, -1):
            moved = [*leaves]
            moved[i] = leaves[i] + sign * step * jnp.asarray(direction)
            z = logits(jax.tree.unflatten(tree, moved))
            held.append(in_loops(OBJECTIVES[name], KEPT, given_batch, frozen, z, fixed)[0])
            live.append(in_loops(OBJECTIVES[name], KEPT, given_batch, frozen, z)[0])
        got = (np.asarray(grad) * direction).sum()
        # third derivatives of size 1e2 × step² = 1e-8; rounding 1e-15 / step = 1e-10
        expected = (held[0] - held[1]) / (2 * step)
        assert got == pytest.approx(expected, rel=1e-6, abs=1e-8), path
        live_differs |= abs((live[0] - live[1]) / (2 * step) - expected) > 1e-4
    assert set(SOME) <= set(names)
    # where it matters: with live weights the difference quotient is another one
    assert live_differs == (name != "decayed")


def test_poisoned_slots_change_nothing_note_9():
    # Fault: the weight applied after the operation, so that 0 · NaN reaches loss or gradient.
    of, clean, runs = dflash_config(), toy_batch(), []
    on = np.asarray(clean.loss_mask > 0.5)
    # The teacher of a supervised label may stand at an unsupervised position.
    teaches = np.pad(on[:, 1:], ((0, 0), (0, 1)))
    for bad_id in (None, -1, V, 10**6):
        dirty = clean
        if bad_id is not None:
            states = jnp.where(teaches[:, :, None], clean.target_last_hidden_states, jnp.nan)
            dirty = clean._replace(
                input_ids=jnp.where(on, clean.input_ids, bad_id), target_last_hidden_states=states
            )
        seen, grads = gradients_dflash(of, BOTH, weights_of(of), target(), toy_map(), dirty)
        runs.append(jax.tree.leaves((seen.loss, seen.metrics, grads)))
    for run in runs[1:]:
        for got, expected in zip(run, runs[0], strict=True):
            assert np.isfinite(got).all()
            # the same program on inputs that must not matter: equal to the bit
            np.testing.assert_array_equal(got, expected)


def test_float32_follows_its_inputs():
    # Fault: a hard-coded dtype anywhere (x64 is on here).
    def halve(tree):
        return jax.tree.map(lambda x: x.astype("float32") if x.dtype == "float64" else x, tree)

    of = dflash_config()
    for objective in (DECAYED, DFlashObjective(dpace="continuation")):
        seen, grads = gradients_dflash(
            of, objective, halve(weights_of(of)), halve(target()), toy_map(), halve(toy_batch())
        )
        arrays = jax.tree.leaves((seen._replace(eval_mask=seen.loss), grads))
        assert {x.dtype.name for x in arrays} == {"float32"}


# --- pruned and unpruned, and the backbone -------------------------------------------------------


def test_no_map_and_the_identity_are_the_same():
    # Fault: an unpruned draft that maps its labels.
    of = dflash_config(draft_vocab_size=None)
    runs = [
        evaluate_dflash(of, BOTH, weights_of(of), target(), vocabulary, toy_batch())
        for vocabulary in (None, identity_map(V))
    ]
    for one, other in zip(*map(jax.tree.leaves, runs), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", ["decayed", "both"])
def test_pruning_an_id_that_never_occurs_changes_no_loss(name):
    # Fault: the cross entropy of a pruned draft taken over V, or shared with another denominator.
    full, frozen, given_batch = dflash_config(draft_vocab_size=None), target(), toy_batch()
    pruned = dflash_config(vocab_size=V + 1, draft_vocab_size=V)
    larger = Target(*(jnp.pad(rows, ((0, 1), (0, 0))) for rows in frozen))
    t2d = np.arange(V + 1) < V
    vocabulary = map_from_buffers(t2d, np.zeros(V, dtype=np.int64))
    weights, objective = weights_of(full), OBJECTIVES[name]
    one = evaluate_dflash(full, objective, weights, frozen, None, given_batch)
    two = evaluate_dflash(pruned, objective, weights, larger, vocabulary, given_batch)
    kept, slots = (float(x) for x in two.metrics["teacher_kept_mass"])
    assert 0 < kept < slots
    # one program with and one without a row more in the teacher: rounding of other fusions
    assert two.loss.item() == pytest.approx(one.loss.item(), rel=1e-13)
    for got, expected in zip(two.metrics["ce_loss"], one.metrics["ce_loss"], strict=True):
        assert got.item() == pytest.approx(expected.item(), rel=1e-13)


def test_the_backbone_is_the_anchor_first_ones():
    # Faults: other inputs, positions or visibility than §3.2 and §4 for this layout.
    of, bare, weights = dflash_config(), config(**NO_HEADS), weights_of(dflash_config())
    seen = evaluate_dflash(of, DECAYED, weights, target(), toy_map(), toy_batch())
    other = evaluate(bare, ObjectiveConfig(), weights, target(), toy_map(), toy_batch())
    # two programs around the same backbone: rounding of other fusions
    np.testing.assert_allclose(seen.hidden, other.hidden, rtol=0, atol=1e-12)
    np.testing.assert_allclose(seen.draft_logits, other.draft_logits, rtol=0, atol=1e-12)
    assert (np.asarray(seen.eval_mask) != np.asarray(other.eval_mask)).any()


def test_states_at_or_after_an_anchor_do_not_move_its_block_note_7():
    # Fault (note 7): a layout that lets the context reach up to the anchor.
    of, clean = dflash_config(), toy_batch(anchor_positions=jnp.array([[2, 4, 7], [2, 4, 0]]))
    seen = evaluate_dflash(of, DECAYED, weights_of(of), target(), toy_map(), clean)
    for n, anchor in ((0, 2), (1, 4)):
        moved = clean._replace(hidden_states=clean.hidden_states.at[:, anchor:].add(3.0))
        after = evaluate_dflash(of, DECAYED, weights_of(of), target(), toy_map(), moved)
        # the same program; unseen keys weigh exactly 0
        np.testing.assert_array_equal(after.draft_logits[:, n], seen.draft_logits[:, n])
        before = clean._replace(hidden_states=clean.hidden_states.at[:, anchor - 1].add(3.0))
        after = evaluate_dflash(of, DECAYED, weights_of(of), target(), toy_map(), before)
        assert (np.asarray(after.draft_logits[:, n]) != np.asarray(seen.draft_logits[:, n])).any()


# --- refusals -----------------------------------------------------------------------------------


def test_each_layout_refuses_the_others_dflash_config():
    # Fault: a draft decoded or trained with the other layout, which looks fine and is rejected
    # almost always.
    of, bare, weights = dflash_config(), config(**NO_HEADS), weights_of(dflash_config())
    words = r"bonus-anchor.*got 'dspark' .anchor-first"
    for compute in (evaluate_dflash, gradients_dflash):
        with pytest.raises(ValueError, match=words):
            compute(bare, DECAYED, weights, target(), toy_map(), toy_batch())
    with pytest.raises(ValueError, match=r"anchor-first.*got 'dflash' .bonus-anchor"):
        evaluate(of, ObjectiveConfig(), weights, target(), toy_map(), toy_batch())
    with pytest.raises(ValueError, match="expected 'dspark'"):
        DSparkDraft(of).init(jax.random.key(0), *[None] * 6)


@pytest.mark.parametrize("objective", [DECAYED, BOTH])
def test_both_errors_in_the_sheets_words(objective):
    # Fault: a loss of NaN (decayed) or 0 (D-PACE) for a step that has nothing to learn from.
    of, weights, frozen = dflash_config(), weights_of(dflash_config()), target()
    unsupervised = toy_batch(loss_mask=jnp.zeros((2, SEQ)))
    outside = toy_batch(input_ids=jnp.asarray(np.full((2, SEQ), 7)))
    with pytest.raises(ValueError, match="no supervised target tokens"):
        gradients_dflash(of, objective, weights, frozen, toy_map(), unsupervised)
    with pytest.raises(ValueError, match="no in-vocabulary target tokens"):
        evaluate_dflash(of, objective, weights, frozen, toy_map(), outside)
    with pytest.raises(ValueError, match="no vocabulary map is given"):
        evaluate_dflash(of, objective, weights, frozen, None, toy_batch())
