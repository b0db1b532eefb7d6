"""The map between target ids and draft ids (sheet §2).

Integer work on the host, in NumPy: a map is built and checked once, then used as arrays.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float64, Int, Int64

from jaxdraft import blocks

PRUNED = -100


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class VocabularyMap:
    """Which target ids the draft keeps (sheet §2); a pytree of three arrays.

    `t2d` bool[V] marks the kept target ids; `d2t` int64[K] holds offsets: draft id i stands for
    target id i + d2t[i]; `index` int64[V] is derived: the draft id of a target id, or -100 where
    it was pruned.
    """

    t2d: Bool[Array | np.ndarray, " vocab"]
    d2t: Int[Array | np.ndarray, " kept"]
    index: Int[Array | np.ndarray, " vocab"]


def kept_ids(vocabulary: VocabularyMap) -> Int[Array, " kept"]:
    """The target id of each draft id, ascending: arange(K) + d2t.

    Args:
        vocabulary: the map, d2t[K].

    Returns:
        Target ids [K].

    Source: sheet §2, the invariant.
    """
    offsets = jnp.asarray(vocabulary.d2t)
    return jnp.arange(offsets.shape[0], dtype=offsets.dtype) + offsets


def build_map(
    counts: Any, size: Any, pinned: Iterable[Any] = (), tokenizer_size: Any = None
) -> VocabularyMap:
    """The map of the K most counted ids.

    Pinned ids first, then by count descending with ties to the lower id (so ids without a count
    fill up from the lowest), then sorted.

    Args:
        counts: whole numbers [V], how often each target id is a supervised token.
        size: K.
        pinned: ids kept whatever their count (special tokens, ids a user names).
        tokenizer_size: V_tok; ids from there up are padding rows of the head and never kept.
            None means V.

    Returns:
        The map, t2d[V], d2t[K], index[V].

    Raises:
        ValueError: counts, size, pinned or tokenizer_size are off; the message names which.

    Source: sheet §2.

    >>> build_map([0, 7, 2, 7, 0], 3, pinned=[4]).t2d.nonzero()[0].tolist()
    [1, 3, 4]
    """
    counts = _checked_counts(counts)
    producible = _checked_tokenizer_size(tokenizer_size, counts.shape[0])
    if counts[producible:].any():
        raise ValueError(
            f"counts: ids from tokenizer_size = {producible} up are padding and cannot occur, but "
            f"id {producible + int(counts[producible:].argmax())} has a count"
        )
    return _map_of_highest(counts, size, pinned, producible)


def teacher_mass(
    states: Float[Array, "batch seq hidden"],
    loss_mask: Float[Array, "batch seq"],
    lm_head: Float[Array, "vocab hidden"],
) -> Float[Array, " vocab"]:
    """How much probability the teacher gives each id, summed over supervised positions.

    Σ over supervised positions t ≥ 1 of softmax(T_{t−1}·Uᵀ) over all of V: the teacher of
    position t stands at t−1. The counterpart of counting the supervised tokens x_t; it adds up
    over batches.

    Args:
        states: T, the target's final states [batch seq hidden].
        loss_mask: m [batch seq].
        lm_head: U [vocab hidden].

    Returns:
        The mass of each target id [V], padding rows included; it sums to the number of
        supervised positions t ≥ 1.

    Source: sheet §3.5, §7.
    """
    p = jax.nn.softmax(jnp.einsum("bsh,vh->bsv", states[:, :-1], lm_head), axis=-1)
    on = blocks.supervised(loss_mask)[:, 1:, None]
    return jnp.where(on, p, 0).sum(axis=(0, 1))


def build_map_by_mass(
    mass: Any, size: Any, pinned: Iterable[Any] = (), tokenizer_size: Any = None
) -> VocabularyMap:
    """The map of the K ids to which the teacher gives most probability.

    Of all maps of K ids that hold the pinned ones and no padding row, it has the largest mean
    kept mass over the positions that `mass` was summed over: that mean is Σ mass of kept ids /
    their number. Order, pins, ties and fill are those of `build_map`. Sums of floating numbers
    differ in the last bits between machines, so near ties may fall otherwise there: save the map.

    Args:
        mass: floating numbers [V], from `teacher_mass`; padding rows may have mass.
        size: K.
        pinned: ids kept whatever their mass.
        tokenizer_size: V_tok; ids from there up are never kept. None means V.

    Returns:
        The map, t2d[V], d2t[K], index[V].

    Raises:
        ValueError: mass, size, pinned or tokenizer_size are off; the message names which.

    Source: sheet §2 and the row `teacher_kept_mass` of §9.

    >>> build_map_by_mass([0.0, 0.7, 0.2, 0.7, 0.4], 3, tokenizer_size=4).t2d.nonzero()[0].tolist()
    [1, 2, 3]
    """
    mass = _checked_mass(mass)
    producible = _checked_tokenizer_size(tokenizer_size, mass.shape[0])
    return _map_of_highest(mass, size, pinned, producible)


def identity_map(vocab_size: Any) -> VocabularyMap:
    """The map of an unpruned draft: every id kept, every offset 0.

    Args:
        vocab_size: V.

    Returns:
        The map with K = V.

    Raises:
        ValueError: V is no whole number from 1 up.

    Source: sheet §13, last line.
    """
    if not _is_whole(vocab_size) or vocab_size < 1:
        raise ValueError(f"vocab_size: expected a whole number >= 1, got {vocab_size!r}")
    return _map_of_kept(np.ones(vocab_size, dtype=np.bool_))


def map_from_buffers(t2d: Any, d2t: Any) -> VocabularyMap:
    """The map that a checkpoint's two buffers describe.

    Args:
        t2d: bool [V].
        d2t: int64 [K], offsets.

    Returns:
        The map, with its index derived.

    Raises:
        ValueError: a shape or dtype is off, or the invariant nonzero(t2d) = arange(K) + d2t
            does not hold.

    Source: sheet §2; contracts §1.
    """
    t2d, d2t = np.asarray(t2d), np.asarray(d2t)
    if t2d.dtype != np.bool_ or t2d.ndim != 1:
        raise ValueError(f"t2d: expected bool [V], got {t2d.dtype} {list(t2d.shape)}")
    if d2t.dtype != np.int64 or d2t.ndim != 1:
        raise ValueError(f"d2t: expected int64 [K], got {d2t.dtype} {list(d2t.shape)}")
    marked = int(t2d.sum())
    if marked == 0:
        raise ValueError("t2d marks no id at all: the buffers hold no map; build or load one")
    if marked != d2t.shape[0]:
        raise ValueError(
            f"t2d marks {marked} ids but d2t has {d2t.shape[0]} entries: take both from one map"
        )
    expected = _map_of_kept(t2d)
    wrong = np.flatnonzero(expected.d2t != d2t)
    if wrong.size:
        i = int(wrong[0])
        raise ValueError(
            f"d2t[{i}] = {d2t[i]} makes draft id {i} the target id {i + d2t[i]}, but t2d keeps "
            f"{i + expected.d2t[i]} there: d2t holds offsets (target id - draft id), and both "
            "buffers must come from one map"
        )
    return expected


def check_same_map(installed: VocabularyMap, offered: VocabularyMap) -> None:
    """Refuse a map that differs from the one the draft's rows were trained with.

    Args:
        installed: the map that is in use, t2d[V].
        offered: the map that a corpus or a checkpoint brings, t2d[V].

    Raises:
        ValueError: the selections differ, also when they have the same size.

    Source: contracts §1; field note 1.
    """
    if not np.array_equal(installed.t2d, offered.t2d):
        raise ValueError(
            f"this vocabulary map is not the installed one: installed {_selection(installed)}, "
            f"offered {_selection(offered)}; keep the saved map, or start a new draft"
        )


def coverage(vocabulary: VocabularyMap, counts: Any) -> float:
    """The share of supervised tokens that the draft can say.

    Σ counts of kept ids / Σ counts.

    Args:
        vocabulary: the map, t2d[V].
        counts: whole numbers [V], over supervised tokens only.

    Returns:
        A number from 0 to 1.

    Raises:
        ValueError: counts are off, have another V than the map, or sum to 0.

    Source: sheet §2.

    >>> coverage(build_map([0, 6, 1, 3], 2), [0, 6, 1, 3])
    0.9
    """
    counts = _checked_counts(counts)
    t2d = np.asarray(vocabulary.t2d)
    if counts.shape != t2d.shape:
        raise ValueError(f"counts: expected V = {t2d.shape[0]} entries, got {counts.shape[0]}")
    total = int(counts.sum())
    if total == 0:
        raise ValueError("counts sum to 0: coverage needs at least one supervised token")
    return int(counts[t2d].sum()) / total


def _map_of_highest(
    score: Int64[np.ndarray, " vocab"] | Float64[np.ndarray, " vocab"],
    size: Any,
    pinned: Iterable[Any],
    producible: int,
) -> VocabularyMap:
    size = _checked_size(size, producible)
    pins = _checked_pins(pinned, size, producible)
    by_score = np.argsort(-score[:producible], kind="stable")
    chosen = np.concatenate([pins, by_score[~np.isin(by_score, pins)]])[:size]
    t2d = np.zeros(score.shape[0], dtype=np.bool_)
    t2d[chosen] = True
    return _map_of_kept(t2d)


def _map_of_kept(t2d: Bool[np.ndarray, " vocab"]) -> VocabularyMap:
    kept = np.flatnonzero(t2d).astype(np.int64)
    draft_ids = np.arange(kept.shape[0], dtype=np.int64)
    index = np.full(t2d.shape[0], PRUNED, dtype=np.int64)
    index[kept] = draft_ids
    return VocabularyMap(t2d=t2d, d2t=kept - draft_ids, index=index)


def _selection(vocabulary: VocabularyMap) -> str:
    ids = np.flatnonzero(np.asarray(vocabulary.t2d))
    shown = ", ".join(str(i) for i in ids[:8])
    return f"{ids.size} ids ({shown}{', …' if ids.size > 8 else ''})"


def _checked_counts(counts: Any) -> Int64[np.ndarray, " vocab"]:
    array = np.asarray(counts)
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(
            f"counts: expected whole numbers [V], got {array.dtype} {list(array.shape)}"
        )
    if (array < 0).any() or (array > np.iinfo(np.int64).max).any():
        raise ValueError(
            f"counts: expected numbers from 0 to 2^63 - 1, got {array.min()} to {array.max()}"
        )
    return array.astype(np.int64)


def _checked_mass(mass: Any) -> Float64[np.ndarray, " vocab"]:
    array = np.asarray(mass)
    if array.ndim != 1 or array.size == 0 or not np.issubdtype(array.dtype, np.floating):
        raise ValueError(
            f"mass: expected floating numbers [V], got {array.dtype} {list(array.shape)}; counts "
            "are for build_map"
        )
    if not (np.isfinite(array) & (array >= 0)).all():
        raise ValueError(f"mass: expected finite numbers >= 0, got {array.min()} to {array.max()}")
    return array.astype(np.float64)


def _checked_tokenizer_size(size: Any, V: int) -> int:
    if size is None:
        return V
    if not _is_whole(size) or not 1 <= size <= V:
        raise ValueError(f"tokenizer_size: expected a whole number from 1 to {V}, got {size!r}")
    return int(size)


def _is_whole(value: object) -> bool:
    """Whether it is an int of Python or of NumPy: K may come from an array. Booleans are none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _checked_size(size: Any, producible: int) -> int:
    if not _is_whole(size) or not 1 <= size <= producible:
        raise ValueError(
            f"size (draft_vocab_size): expected a whole number from 1 to {producible}, the ids "
            f"that the tokenizer can produce; got {size!r}"
        )
    return int(size)


def _checked_pins(
    pinned: Iterable[Any], size: int, producible: int
) -> Int64[np.ndarray, " pinned"]:
    given = list(pinned)
    odd = [i for i in given if not _is_whole(i)]
    if odd:  # 1.7 would pin another token
        raise ValueError(f"pinned: expected whole numbers, got {odd[0]!r}")
    pins = sorted({int(i) for i in given})
    if any(not 0 <= i < producible for i in pins):
        raise ValueError(f"pinned: expected ids from 0 to {producible - 1}, got {pins}")
    if len(pins) > size:
        raise ValueError(
            f"pinned: {len(pins)} ids do not fit into a draft vocabulary of {size}: raise "
            "draft_vocab_size or pin fewer"
        )
    return np.asarray(pins, dtype=np.int64)
