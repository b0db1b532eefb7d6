"""The vocabulary map (§2) and field notes 1 to 6."""

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from spec_toys import KEPT, V, few_examples, toy_map

from jaxdraft.vocabulary import (
    build_map,
    build_map_by_mass,
    check_same_map,
    coverage,
    identity_map,
    kept_ids,
    map_from_buffers,
    teacher_mass,
)


def kept(vocabulary):
    return kept_ids(vocabulary).tolist()


def test_toy_map_by_hand():
    # Fault: offsets off by one, an index that is not −100 where pruned.
    toy = toy_map()
    assert kept(toy) == KEPT
    assert toy.d2t.tolist() == [0, 2, 2, 6, 8]
    expected = [0, -100, -100, 1, 2, *[-100] * 4, 3, -100, -100, 4, *[-100] * 3]
    assert toy.index.tolist() == expected


def test_counts_then_ties_to_the_lower_id():
    # Fault: an unstable sort, which gives ties to any id.
    assert kept(build_map([1, 5, 3, 5, 3, 3], 4)) == [1, 2, 3, 4]


def test_pins_come_first():
    # Fault (note 6): special tokens lost to a narrow corpus.
    assert kept(build_map([0, 9, 8, 7, 0, 0], 3, pinned=[5, 0, 5])) == [0, 1, 5]


def test_fill_with_lowest_unused_ids_three_tokens_five_places():
    # Fault (note 5): repeated or arbitrary ids filling up; two builds that differ.
    counts = np.zeros(V, dtype=np.int64)
    counts[[2, 10, 15]] = 4
    assert kept(build_map(counts, 5)) == [0, 1, 2, 10, 15]
    assert build_map(counts, 5).d2t.tolist() == build_map(counts, 5).d2t.tolist()


def test_padding_rows_are_never_kept():
    # Fault: ids from V_tok up filled in (§1).
    assert kept(build_map([0, 0, 3, 0, 0, 0], 3, tokenizer_size=4)) == [0, 1, 2]
    with pytest.raises(ValueError, match="from 1 to 4"):
        build_map([0, 0, 3, 0, 0, 0], 5, tokenizer_size=4)
    with pytest.raises(ValueError, match="id 5 has a count"):
        build_map([0, 0, 3, 0, 0, 1], 2, tokenizer_size=4)


def test_a_whole_number_of_numpy_is_a_size():
    # Fault: K read from an array refused as if it were no whole number, though pins may be such.
    for kind in (np.int64, np.int32, np.uint8):
        got = build_map([0, 0, 3, 0, 0, 0], kind(3), [kind(1)], tokenizer_size=kind(4))
        assert kept(got) == [0, 1, 2]
        assert kept(identity_map(kind(3))) == [0, 1, 2]
    for bad in (np.True_, np.float64(2), 0, -1, np.int64(-1)):
        with pytest.raises(ValueError, match="vocab_size: expected a whole number >= 1"):
            identity_map(bad)


@pytest.mark.parametrize("size", [0, -3, 7, True, 2.0, None, np.True_, np.float64(2), np.int64(7)])
def test_bad_size(size):
    # Fault: a size coerced or clamped.
    with pytest.raises(ValueError, match=r"size \(draft_vocab_size\)"):
        build_map([1, 2, 3, 4, 5, 6], size)


def test_bad_counts_and_pins():
    # Fault: float counts rounded, negative counts sorted last, pins that push each other out.
    for counts in ([1.5, 2.0], [[1, 2]], [1, -2], []):
        with pytest.raises(ValueError, match="counts"):
            build_map(counts, 1)
    with pytest.raises(ValueError, match="pinned: 3 ids do not fit"):
        build_map([1, 2, 3], 2, pinned=[0, 1, 2])
    with pytest.raises(ValueError, match="pinned: expected ids from 0 to 2"):
        build_map([1, 2, 3], 2, pinned=[3])


def test_buffers_alone_reproduce_the_map():
    # Fault (note 4): a side file needed to know what the rows mean.
    built = build_map([0, 9, 8, 7, 0, 0], 3, pinned=[5])
    read = map_from_buffers(built.t2d, built.d2t)
    assert read.index.tolist() == built.index.tolist() == [-100, 0, 1, -100, -100, 2]


def test_d2t_read_as_absolute_ids_is_refused():
    # Fault (note 3): offsets taken for ids, or offsets that lead to −1 or V.
    t2d = toy_map().t2d
    for offsets in (KEPT, [-1, 2, 2, 6, 8], [0, 2, 2, 6, 12]):
        with pytest.raises(ValueError, match="d2t holds offsets"):
            map_from_buffers(t2d, np.array(offsets))


def test_buffers_of_wrong_size_dtype_or_nothing():
    # Fault: a cast hiding that the buffers are no map.
    t2d, d2t = toy_map().t2d, toy_map().d2t
    for bad, words in (
        ((t2d.astype(np.int64), d2t), "t2d: expected bool"),
        ((t2d, d2t.astype(np.int32)), "d2t: expected int64"),
        ((t2d[None], d2t), "t2d: expected bool"),
        ((t2d, d2t[:4]), "marks 5 ids but d2t has 4"),
        ((np.zeros(V, dtype=bool), d2t[:0]), "marks no id"),
    ):
        with pytest.raises(ValueError, match=words):
            map_from_buffers(*bad)


def test_another_map_of_equal_size_is_refused():
    # Fault (note 1): a warm start recomputed the map; every row meant another token.
    other = build_map(np.arange(V), 5)
    check_same_map(toy_map(), toy_map())
    with pytest.raises(ValueError, match=r"installed 5 ids \(0, 3, 4, 9, 12\), offered 5 ids \(11"):
        check_same_map(toy_map(), other)


def test_coverage_by_hand():
    # Fault: ids counted instead of tokens.
    counts = np.zeros(V, dtype=np.int64)
    counts[[0, 3, 7]] = [1, 2, 5]
    assert coverage(toy_map(), counts) == 3 / 8
    with pytest.raises(ValueError, match="sum to 0"):
        coverage(toy_map(), counts * 0)
    with pytest.raises(ValueError, match="expected V = 16"):
        coverage(toy_map(), counts[:9])


def test_identity():
    # Fault: an unpruned map that is not the identity.
    full = identity_map(4)
    assert (full.t2d.all(), full.d2t.tolist(), full.index.tolist()) == (True, [0] * 4, [0, 1, 2, 3])


@few_examples
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.data())
def test_map_properties(counts, data):
    # Fault: anything that breaks the invariant, keeps a worse id, or loses a pin.
    size = data.draw(st.integers(1, len(counts)))
    pinned = data.draw(st.sets(st.integers(0, len(counts) - 1), max_size=size))
    built = build_map(counts, size, pinned)
    ids = kept(built)
    assert np.flatnonzero(built.t2d).tolist() == ids == sorted(set(ids))
    assert len(ids) == size
    assert pinned <= set(ids)
    out = [i for i in range(len(counts)) if i not in ids]
    for worst in set(ids) - pinned:
        assert all((-counts[worst], worst) < (-counts[i], i) for i in out)
    assert [built.index[i] for i in ids] == list(range(size))
    assert all(built.index[i] == -100 for i in out)


def test_teacher_mass_by_hand():
    # Faults: the teacher read at the supervised position instead of before it; position 0 counted;
    # softmax over fewer rows than V. Softmax of (log 2, 0, 0) is (½, ¼, ¼), of (0, log 6, 0) ⅛ ¾ ⅛.
    head = jnp.eye(3)
    states = jnp.array([[[math.log(2), 0, 0], [0, math.log(6), 0], [9, 9, 0], [0, 9, 0]]])
    mass = teacher_mass(states, jnp.array([[1.0, 1.0, 0.7, 0.5]]), head)
    # exp(log x) apart from x by rounding
    np.testing.assert_allclose(mass, [5 / 8, 1, 3 / 8], rtol=1e-14)


def best_subset(p, size, pinned, producible):
    """The K-subset with the largest mean kept mass, by trying all of them."""
    subsets = itertools.combinations(range(producible), size)
    allowed = [ids for ids in subsets if pinned <= set(ids)]
    return max(allowed, key=lambda ids: p[:, list(ids)].sum(axis=1).mean())


@few_examples
@given(st.integers(0, 2**16), st.integers(1, 6), st.sets(st.integers(0, 5), max_size=2))
def test_the_map_by_mass_keeps_the_most_teacher_mass(seed, size, pinned):
    # Fault: any other selection rule; a pin lost; a padding row (ids 6, 7) kept.
    pinned = set(sorted(pinned)[:size])
    rng = np.random.default_rng(seed)
    states, head = rng.normal(size=(2, 5, 4)), rng.normal(size=(8, 4))
    supervised = rng.random((2, 5)) > 0.3
    supervised[0, 1] = True
    mass = teacher_mass(*(jnp.asarray(x, dtype=float) for x in (states, supervised, head)))
    at = [(b, t - 1) for b, t in np.argwhere(supervised) if t >= 1]
    odds = np.exp(np.array([head @ states[b, t] for b, t in at]))
    p = odds / odds.sum(axis=1, keepdims=True)
    built = build_map_by_mass(mass, size, pinned, tokenizer_size=6)
    ids = kept(built)
    assert tuple(ids) == best_subset(p, size, pinned, 6)
    # sums of at most 8 softmaxes in two orders
    np.testing.assert_allclose(
        np.asarray(mass)[ids].sum() / len(at), p[:, ids].sum(axis=1).mean(), rtol=1e-13
    )


def test_counting_keeps_less_mass_than_the_mass_rule():
    # Fault: both rules the same. Two positions whose sampled token was the unlikely id 2.
    p = np.array([[0.5, 0.1, 0.4], [0.5, 0.1, 0.4]])
    assert kept(build_map([0, 0, 2], 1)) == [2]
    assert kept(build_map_by_mass(p.sum(axis=0), 1)) == [0]


def test_mass_pins_ties_fill_and_padding():
    # Faults: ties to any id, unused ids filled from the top, padding rows refused or kept.
    assert kept(build_map_by_mass([0.5, 2.0, 0.5, 0.5], 2)) == [0, 1]
    assert kept(build_map_by_mass([0.0, 0.0, 3.5, 0.0], 3, pinned=[3])) == [0, 2, 3]
    assert kept(build_map_by_mass([0.1, 0.2, 9.0], 1, tokenizer_size=2)) == [1]
    assert kept(build_map_by_mass(np.array([0.1, 0.2], dtype=np.float32), 1)) == [1]


def test_bad_mass():
    # Fault: counts taken for mass, NaN sorted anywhere, a size clamped.
    for mass in ([1, 2], [[0.5]], [0.5, float("nan")], [0.5, float("inf")], [-0.5, 1.0], []):
        with pytest.raises(ValueError, match="mass: expected"):
            build_map_by_mass(mass, 1)
    with pytest.raises(ValueError, match=r"size \(draft_vocab_size\)"):
        build_map_by_mass([0.5, 0.5], 3)
    with pytest.raises(ValueError, match="pinned: 2 ids do not fit"):
        build_map_by_mass([0.5, 0.5], 1, pinned=[0, 1])
