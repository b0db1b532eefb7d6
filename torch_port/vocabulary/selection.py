"""Choosing the draft vocabulary from token counts or teacher mass (spec sheet §2). In NumPy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from torch_port.config import check_draft_vocab_size
from torch_port.errors import UserError

Ids = NDArray[np.int64]
Mass = NDArray[np.float64]


def select_by_count(
    counts: Ids, size: int, pinned: Iterable[int] = (), tokenizer_size: int | None = None
) -> Ids:
    """Choose the K target ids that a draft keeps.

    Pinned ids first, then by count descending with ties to the lower id; ids without a count fill
    up from the lowest; the result ascends, so the same counts give the same map everywhere.

    Arguments: `counts` [V] over supervised tokens; `size` K; `pinned` ids to keep whatever they
    count; `tokenizer_size` V_tok (default V): rows from there up are padding, never kept.
    Returns the kept ids [K], ascending.
    Raises UserError for a bad K, a bad count array, a pinned id outside 0 … V_tok − 1, more pinned
    ids than K, and K > V_tok. Source: spec sheet §2.

    >>> select_by_count(np.array([0, 5, 9, 5, 0]), 3, pinned=[4]).tolist()
    [1, 2, 4]
    """
    pins = pinned_ids(pinned)
    counts = _checked_counts(counts)
    size = check_draft_vocab_size(size, len(counts))
    return first_of(rank_by_count(counts, pins, tokenizer_size), size, len(pins))


def select_by_mass(
    mass: Mass, size: int, pinned: Iterable[int] = (), tokenizer_size: int | None = None
) -> Ids:
    """Choose the K target ids to which the teacher gives most probability.

    Of all maps of K ids that hold the pinned ones and no padding row, this one has the largest
    mean kept mass over the positions that `mass` was summed over. Pins, ties and fill are those
    of `select_by_count`. Sums of floating numbers differ in their last bits between machines: save
    the map, do not build it again.

    Arguments: `mass` [V] from `teacher_mass`, padding rows included; the rest as for counts.
    Returns the kept ids [K], ascending.
    Raises UserError as `select_by_count`. Source: spec sheet §2 and `teacher_kept_mass` of §9.

    >>> select_by_mass(np.array([0.0, 0.7, 0.2, 0.7, 0.4]), 3, tokenizer_size=4).tolist()
    [1, 2, 3]
    """
    pins = pinned_ids(pinned)
    mass = _checked_mass(mass)
    size = check_draft_vocab_size(size, len(mass))
    return first_of(rank_by_mass(mass, pins, tokenizer_size), size, len(pins))


def rank_by_count(counts: Ids, pins: Ids, tokenizer_size: int | None = None) -> Ids:
    """Return all usable ids [V_tok] in the order in which a growing K keeps them (§2).

    Arguments: `counts` [V]; `pins` from `pinned_ids`; `tokenizer_size` V_tok.
    Raises UserError for bad counts, a bad V_tok, counts of padding ids and pins outside the usable
    ids.

    >>> rank_by_count(np.array([0, 5, 9, 5, 0]), np.array([4])).tolist()
    [4, 2, 1, 3, 0]
    """
    counts = _checked_counts(counts)
    usable = _checked_tokenizer_size(tokenizer_size, len(counts))
    if counts[usable:].any():
        raise UserError(
            f"counts hold ids from tokenizer_size {usable} up, which are padding rows of the head "
            "and cannot occur; is it the size of another tokenizer?"
        )
    return _rank(counts[:usable].astype(np.int64), pins)


def rank_by_mass(mass: Mass, pins: Ids, tokenizer_size: int | None = None) -> Ids:
    """Return all usable ids [V_tok] in the order in which a growing K keeps them, by mass.

    Padding rows may have mass (they are part of the target's softmax); they are not ranked.
    """
    mass = _checked_mass(mass)
    return _rank(mass[: _checked_tokenizer_size(tokenizer_size, len(mass))], pins)


def first_of(ranked: Ids, size: int, pins: int) -> Ids:
    """Return the first K of ranked ids, ascending: what a map of that size keeps.

    Raises UserError for K below the number of pins, or above the usable ids.
    """
    if pins > size:
        raise UserError(
            f"{pins} pinned ids do not fit a draft_vocab_size of {size}; "
            f"raise it to at least {pins} or pin fewer ids"
        )
    if size > len(ranked):
        raise UserError(
            f"draft_vocab_size is {size}, but the tokenizer produces only {len(ranked)} ids; "
            f"lower it to at most {len(ranked)}"
        )
    return np.sort(ranked[:size])


def pinned_ids(pinned: Iterable[int]) -> Ids:
    """Return distinct pinned ids, ascending; nothing is coerced, 3.7 would pin another token."""
    given = list(pinned)
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise UserError(f"pinned ids must be whole numbers, not {value!r}")
    return np.unique(np.array(given, dtype=np.int64))


def coverage(kept: Ids, counts: Ids) -> float:
    """Return Σ counts of kept ids / Σ counts, over supervised tokens (spec sheet §2).

    Arguments: `kept` ids [K]; `counts` [V]. Raises UserError when nothing was counted.

    >>> coverage(np.array([1, 2]), np.array([1, 2, 5]))
    0.875
    """
    total = int(counts.sum())
    if total == 0:
        raise UserError("no supervised token was counted: coverage has no meaning on this corpus")
    return int(counts[kept].sum()) / total


def coverage_curve(ranked: Ids, weights: Ids | Mass) -> Mass:
    """Return the share of `weights` that the first 1, 2, … V_tok ranked ids hold, [V_tok].

    Arguments: `ranked` ids; `weights` [V], counts of any corpus (held-out ones too) or mass.
    Raises UserError when the weights sum to 0.

    >>> coverage_curve(np.array([2, 0, 1]), np.array([1, 2, 5])).tolist()
    [0.625, 0.75, 1.0]
    """
    held = np.cumsum(weights[ranked])
    rest = np.ones(len(weights), dtype=bool)
    rest[ranked] = False
    # Not weights.sum(): added in another order, all ids could hold less than all of the mass.
    total = held[-1] + weights[rest].sum()
    if not total:
        raise UserError("no supervised token was counted: coverage has no meaning on this corpus")
    return np.asarray(held / total, dtype=np.float64)


def size_for_coverage(curve: Mass, share: float, pins: int) -> int:
    """Return the smallest K that reaches a coverage, at least the number of pins (and 1).

    Arguments: `curve` from `coverage_curve`; `share` in (0, 1].
    Raises UserError for another share, and for one that no K reaches (padding rows hold mass).

    >>> size_for_coverage(np.array([0.625, 0.75, 1.0]), 0.75, pins=0)
    2
    """
    if not 0.0 < share <= 1.0:
        raise UserError(
            f"coverage is {share}, but must lie above 0 and at most at 1; write 0.99 for 99%"
        )
    reached = np.nonzero(curve >= share)[0]
    if not reached.size:
        raise UserError(
            f"no draft_vocab_size reaches a coverage of {share}: all {len(curve)} ids of the "
            f"tokenizer hold {curve[-1]:.6f}; lower the coverage"
        )
    return max(int(reached[0]) + 1, pins, 1)


def _rank(scores: NDArray[Any], pins: Ids) -> Ids:
    usable = len(scores)
    if pins.size and (pins[0] < 0 or pins[-1] >= usable):
        raise UserError(f"pinned ids must lie in 0 … {usable - 1}, not {pins[[0, -1]].tolist()}")
    order = np.argsort(-scores, kind="stable")  # stable: ties to the lower id
    unpinned = np.ones(usable, dtype=bool)
    unpinned[pins] = False
    return np.concatenate([pins, order[unpinned[order]]])


def _checked_counts(counts: Any) -> Ids:
    counts = np.asarray(counts)
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise UserError(
            "counts must be one non-negative integer per target id, not "
            f"{counts.dtype} of shape {counts.shape}"
        )
    return counts


def _checked_mass(mass: Any) -> Mass:
    mass = np.asarray(mass)
    if mass.ndim != 1 or mass.dtype.kind != "f" or not (np.isfinite(mass) & (mass >= 0)).all():
        raise UserError(
            "mass must be one finite number of at least 0 per target id, not "
            f"{mass.dtype} of shape {mass.shape}; counts are for select_by_count"
        )
    return mass.astype(np.float64)


def _checked_tokenizer_size(size: int | None, vocab_size: int) -> int:
    usable = vocab_size if size is None else size
    if type(usable) is not int or not 1 <= usable <= vocab_size:
        raise UserError(
            f"tokenizer_size must be a whole number in 1 … {vocab_size}, not {usable!r}"
        )
    return usable
