"""Blocks and visibility (§3, §4): tables worked out by hand, and slow loops over cells."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_toys import config, few_examples

from jaxdraft import Batch, blocks
from jaxdraft.evaluate import read_labels

IDS = jnp.array([[10, 11, 12, 13, 14, 15, 16]])
NOTE_8 = jnp.array([[0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0]])


def labels_of(loss_mask, anchors, keep, slots=4, ids=IDS):
    empty = jnp.zeros((1, ids.shape[1], 1))
    batch = Batch(ids, loss_mask, empty, empty, jnp.array([anchors]), jnp.array([keep]))
    return read_labels(config(block_size=slots), batch)


def test_candidates_of_note_8():
    # Fault (note 8): anchors chosen by their own mask only (5 would be one), or a last position.
    assert np.flatnonzero(blocks.candidates(NOTE_8)[0]).tolist() == [3, 4]
    assert np.flatnonzero(blocks.candidates(jnp.ones((1, 3)))[0]).tolist() == [0, 1]


def test_supervision_is_above_one_half():
    # Fault: m used as a weight or compared with 0.
    assert blocks.supervised(jnp.array([[0.5, 0.51, 0.49, 1.0]]))[0].tolist() == [0, 1, 0, 1]


def test_labels_previous_teacher_of_note_8():
    # Faults: labels shifted, padding not clamped, dropped blocks read at their anchor.
    out = labels_of(NOTE_8, [3, 4, 0], [True, True, False])
    assert out.tokens[0].tolist() == [[14, 15, 16, 16], [15, 16, 16, 16], [10, 10, 10, 10]]
    assert out.previous[0].tolist() == [[13, 14, 15, 16], [14, 15, 16, 16], [10, 10, 10, 10]]
    assert out.teacher_at[0].tolist() == [[3, 4, 5, 5], [4, 5, 5, 5], [0, 0, 0, 0]]
    assert out.mask[0].astype(int).tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


def test_an_unsupervised_label_ends_the_block():
    # Fault: the evaluation mask without its prefix product (slots 2 and 3 would count).
    out = labels_of(jnp.array([[1.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0]]), [0], [True])
    assert out.mask[0].astype(int).tolist() == [[1, 0, 0, 0]]


def test_labels_beyond_the_sequence_do_not_count():
    # Fault: the clamped last token counted once more, because it is supervised.
    out = labels_of(jnp.ones((1, 7)), [5], [True])
    assert out.mask[0].astype(int).tolist() == [[1, 0, 0, 0]]


def test_draft_tokens_and_positions():
    # Faults: a dropped block that starts with x[0]; positions counted from 0.
    anchors, keep = jnp.array([[4, 0]]), jnp.array([[True, False]])
    tokens = blocks.draft_tokens(IDS, anchors, keep, 3, mask_token_id=2)
    assert tokens[0].tolist() == [[14, 2, 2], [2, 2, 2]]
    assert blocks.positions(anchors, 3)[0].tolist() == [[4, 5, 6], [0, 1, 2]]


def test_weights_decay_from_slot_zero():
    # Fault: decay starting at slot 1, or by k·decay.
    mask = jnp.array([[[True, True, True, False]]])
    w = blocks.weights(mask, jnp.asarray(2.0), jnp.float64)
    by_hand = [1.0, math.exp(-0.5), math.exp(-1.0), 0.0]
    # exp of two libraries: the last bit may differ
    np.testing.assert_allclose(w[0, 0], by_hand, rtol=1e-15, atol=0)
    assert blocks.weights(mask, None, jnp.float64)[0, 0].tolist() == [1, 1, 1, 0]


def drawn(context, own):
    return [
        "".join(".#"[int(c)] for c in row) + "|" + "".join(".#"[int(c)] for c in square)
        for row, square in zip(
            np.asarray(context).reshape(-1, context.shape[-1]),
            np.asarray(own).reshape(-1, own.shape[-1]),
            strict=True,
        )
    ]


FULL = ["##....|###"] * 3 + ["####..|###"] * 3 + ["......|..."] * 3
SLIDING = (
    ["##....|#..", ".#....|##.", "......|###"]
    + ["..##..|#..", "...#..|##.", "......|###"]
    + ["......|..."] * 3
)


@pytest.mark.parametrize(("window", "table"), [(None, FULL), (3, SLIDING)])
def test_visibility_cell_by_cell(window, table):
    # Faults: the anchor's own position in the context; a window off by one or cutting the block;
    # sliding layers that see later slots; a dropped block that sees anything.
    anchors, keep = jnp.array([[2, 4, 3]]), jnp.array([[True, True, False]])
    context = blocks.context_visibility(anchors, keep, 3, 6, window)
    own = blocks.own_visibility(keep, 3, causal=window is not None)
    assert drawn(context, own) == table


@few_examples
@given(
    st.lists(st.integers(0, 7), min_size=3, max_size=3),
    st.lists(st.booleans(), min_size=3, max_size=3),
    st.lists(st.sampled_from([0.0, 0.5, 0.7, 1.0]), min_size=8, max_size=8),
    st.integers(1, 6),
)
def test_blocks_against_loops(anchors, keep, loss_mask, window):
    # Fault: any disagreement between the formulas and the sheet's words, cell by cell.
    seq, slots = 8, 3
    out = labels_of(jnp.array([loss_mask]), anchors, keep, slots, jnp.arange(20, 28)[None])
    out = jax.tree.map(np.asarray, out)
    visible = blocks.context_visibility(jnp.array([anchors]), jnp.array([keep]), slots, seq, window)
    visible = np.asarray(visible)
    for n, (a, kept) in enumerate(zip(anchors, keep, strict=True)):
        alive = kept
        for k in range(slots):
            at = min(a + 1 + k, seq - 1) if kept else 0
            alive = alive and a + 1 + k < seq and loss_mask[a + 1 + k] > 0.5
            before = 20 + a if k == 0 else out.tokens[0, n, k - 1]
            got = [x[0, n, k] for x in (out.mask, out.tokens, out.teacher_at, out.previous)]
            assert got == [alive, 20 + at, max(at - 1, 0), before]
            for s in range(seq):
                sees = kept and s < a and s >= a + k - (window - 1)
                assert bool(visible[0, n, k, s]) == sees


def test_drawn_anchors_width_padding_and_order():
    # Faults: padding in front, width always N, candidates drawn twice, unsorted.
    masks = jnp.array([[1.0] * 8, [0, 1, 1, 0, 0, 0, 0, 0]], dtype=float)
    anchors, keep = blocks.draw_anchors(jax.random.key(0), masks, 4)
    assert anchors.shape == (2, 4)
    assert keep.tolist() == [[True] * 4, [True, False, False, False]]
    assert anchors[1].tolist() == [1, 0, 0, 0]
    assert anchors[0].tolist() == sorted(set(anchors[0].tolist()))
    everything, _ = blocks.draw_anchors(jax.random.key(0), masks, 99)
    assert everything[0].tolist() == list(range(7))


def test_no_candidate_at_all_keeps_nothing_at_width_one():
    # Fault: width 0, which leaves a rank out of the step.
    anchors, keep = blocks.draw_anchors(jax.random.key(0), jnp.zeros((2, 5)), 3)
    assert (anchors.tolist(), keep.tolist()) == ([[0], [0]], [[False], [False]])
    with pytest.raises(ValueError, match="at least 1"):
        blocks.draw_anchors(jax.random.key(0), jnp.zeros((2, 5)), 0)


def test_a_draw_depends_on_its_sample_only():
    # Fault: resuming, reordering or padding a batch changes the anchors.
    masks = jnp.ones((3, 12))
    one, _ = blocks.draw_anchors(blocks.sample_keys(5, 1, jnp.array([7, 8, 9])), masks, 4)
    padded = jnp.pad(masks[:1], ((0, 0), (0, 4)))
    two, _ = blocks.draw_anchors(blocks.sample_keys(5, 1, jnp.array([9])), padded, 4)
    assert one[2].tolist() == two[0].tolist()
    later, _ = blocks.draw_anchors(blocks.sample_keys(5, 2, jnp.array([7, 8, 9])), masks, 4)
    assert one.tolist() != later.tolist()


def test_draws_are_uniform():
    # Fault: the first candidates preferred. 4 of 10, 2000 rows: each is drawn 800 ± 22; 5 σ.
    anchors, _ = blocks.draw_anchors(jax.random.key(1), jnp.ones((2000, 11)), 4)
    counts = np.bincount(np.asarray(anchors).ravel(), minlength=10)
    assert abs(counts - 800).max() < 5 * 22
