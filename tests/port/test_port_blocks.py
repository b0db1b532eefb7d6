"""Anchors, labels, masks, weights: tables by hand, and a slow loop as reference."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_port.anchors import anchor_candidates, draw_anchors
from torch_port.blocks import make_blocks, slot_weights
from torch_port.errors import UserError

INDEX = torch.tensor([0, -100, -100, 1, 2, -100, -100, -100, -100, 3])  # V = 10


def blocks_of(ids, mask, anchors, keep, gamma=4):
    return make_blocks(
        torch.tensor([ids]),
        torch.tensor([mask], dtype=torch.float32),
        torch.tensor([anchors]),
        torch.tensor([keep]),
        block_size=gamma,
        mask_token_id=8,
        draft_index_V=INDEX,
    )


def test_field_note_8_candidates() -> None:
    """Fault: an anchor chosen by its own mask only (position 5 has no supervised successor)."""
    mask = np.array([0, 0, 0, 1, 1, 1, 0], dtype=np.float32)
    assert anchor_candidates(mask).tolist() == [3, 4]


def test_one_block_by_hand() -> None:
    """Faults: labels shifted, decay or teacher off by one, a block that survives a gap."""
    ids = [9, 4, 3, 7, 4, 9, 1, 3]
    mask = [0, 0, 1, 1, 1, 0, 1, 1]
    b = blocks_of(ids, mask, [2, 6, 0], [True, True, False])
    assert b.input_ids[0].tolist() == [[3, 8, 8, 8], [1, 8, 8, 8], [8, 8, 8, 8]]
    assert b.position[0].tolist() == [[2, 3, 4, 5], [6, 7, 8, 9], [0, 1, 2, 3]]
    assert b.label[0, 0].tolist() == [7, 4, 9, 1]
    assert b.label_is_kept[0, 0].tolist() == [False, True, True, False]
    assert b.label_draft_id[0, 0].tolist() == [0, 2, 3, 0]
    assert b.previous[0, 0].tolist() == [3, 7, 4, 9]
    assert b.teacher_position[0].tolist() == [[2, 3, 4, 5], [6, 6, 6, 6], [0, 0, 0, 0]]
    # Slot 2's label (position 5) is unsupervised: it and slot 3 are out, though 6 is supervised.
    assert b.evaluated[0].tolist() == [
        [True, True, False, False],
        [True, False, False, False],
        [False] * 4,
    ]


def test_soft_mask_supervises_above_one_half() -> None:
    b = blocks_of([0] * 6, [1, 1, 0.5, 0.6, 1, 1], [0, 2], [True, True], gamma=2)
    assert b.evaluated[0].tolist() == [[True, False], [True, True]]


def test_weights_decay_from_slot_zero() -> None:
    """Fault: decay starting at slot 1 (weights 1, 1, …)."""
    evaluated = torch.tensor([[[True, True, False]]])
    w = slot_weights(evaluated, 2.0, torch.float64)
    expected = torch.tensor([[[1.0, math.exp(-0.5), 0.0]]], dtype=torch.float64)
    torch.testing.assert_close(w, expected, rtol=0, atol=1e-15)
    assert slot_weights(evaluated, None, torch.float64).tolist() == [[[1.0, 1.0, 0.0]]]


@given(st.data())
def test_blocks_against_a_slow_loop(data: st.DataObject) -> None:
    """Every index tensor against §3 written as a loop over rows, blocks and slots."""
    S, N, gamma = (data.draw(st.integers(low, 9)) for low in (2, 1, 1))
    ids = data.draw(st.lists(st.integers(0, 9), min_size=S, max_size=S))
    mask = data.draw(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=S, max_size=S))
    anchors = data.draw(st.lists(st.integers(0, S - 1), min_size=N, max_size=N))
    keep = data.draw(st.lists(st.booleans(), min_size=N, max_size=N))
    b = blocks_of(ids, mask, anchors, keep, gamma)
    for n in range(N):
        alive = keep[n]
        for k in range(gamma):
            at = anchors[n] + 1 + k
            alive = alive and at < S and mask[at] > 0.5
            assert b.evaluated[0, n, k].item() == alive
            if alive:
                assert b.label[0, n, k].item() == ids[at]
                assert b.previous[0, n, k].item() == ids[at - 1]
                assert b.teacher_position[0, n, k].item() == at - 1
                assert b.label_is_kept[0, n, k].item() == (INDEX[ids[at]] >= 0)


def test_draws_are_a_function_of_the_sample_alone() -> None:
    """Fault: prefetching, neighbours or batch order changing a sample's anchors."""
    mask = np.ones((2, 40), dtype=np.float32)
    together, _ = draw_anchors(mask, [7, 8], 5, seed=1, epoch=2)
    alone, _ = draw_anchors(mask[1:], [8], 5, seed=1, epoch=2)
    assert together[1].tolist() == alone[0].tolist()
    other, _ = draw_anchors(mask[1:], [8], 5, seed=1, epoch=3)
    assert other[0].tolist() != alone[0].tolist()


@given(st.data())
def test_draw_properties(data: st.DataObject) -> None:
    """Distinct sorted candidates, then padding; width min(N, most candidates), at least 1."""
    B, S, N = (data.draw(st.integers(1, 6)) for _ in range(3))
    rows = st.lists(st.sampled_from([0.0, 1.0]), min_size=S, max_size=S)
    mask = np.array(data.draw(st.lists(rows, min_size=B, max_size=B)), dtype=np.float32)
    anchors, keep = draw_anchors(mask, list(range(B)), N, seed=0, epoch=0)
    most = max(len(anchor_candidates(row)) for row in mask)
    assert anchors.shape == keep.shape == (B, max(1, min(N, most)))
    for row in range(B):
        kept = anchors[row][keep[row]]
        found = anchor_candidates(mask[row])
        assert len(kept) == min(anchors.shape[1], len(found))
        assert (np.diff(kept) > 0).all()
        assert set(kept.tolist()) <= set(found.tolist())
        assert (anchors[row][~keep[row]] == 0).all()
        assert keep[row][: len(kept)].all()


def test_draws_are_uniform() -> None:
    """Fault: the first N candidates taken. 2000 draws of 1 of 4: 500 ± 4 sigma (19.4 each)."""
    mask = np.ones((1, 5), dtype=np.float32)
    drawn = [draw_anchors(mask, [i], 1, 0, 0)[0][0, 0] for i in range(2000)]
    assert (abs(np.bincount(drawn, minlength=4) - 500) < 78).all()


def test_no_anchor_count_is_refused() -> None:
    with pytest.raises(UserError, match="num_anchors is 0"):
        draw_anchors(np.ones((1, 4), dtype=np.float32), [0], 0, 0, 0)
