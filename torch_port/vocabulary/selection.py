"""Choosing the draft vocabulary from token counts (spec sheet §2). Host work, in NumPy."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from torch_port.config import check_draft_vocab_size
from torch_port.errors import UserError

Ids = NDArray[np.int64]


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
    counts = np.asarray(counts)
    if counts.ndim != 1 or counts.dtype.kind not in "iu" or (counts < 0).any():
        raise UserError(
            "counts must be one non-negative integer per target id, not "
            f"{counts.dtype} of shape {counts.shape}"
        )
    size = check_draft_vocab_size(size, len(counts))
    usable = len(counts) if tokenizer_size is None else tokenizer_size
    if type(usable) is not int or not 1 <= usable <= len(counts):
        raise UserError(
            f"tokenizer_size must be a whole number in 1 … {len(counts)}, not {usable!r}"
        )
    if counts[usable:].any():
        raise UserError(
            f"counts hold ids from tokenizer_size {usable} up, which are padding rows of the head "
            "and cannot occur; is it the size of another tokenizer?"
        )
    pins = _pinned_ids(pinned)
    if pins.size and (pins[0] < 0 or pins[-1] >= usable):
        raise UserError(f"pinned ids must lie in 0 … {usable - 1}, not {pins[[0, -1]].tolist()}")
    if pins.size > size:
        raise UserError(
            f"{pins.size} pinned ids do not fit a draft_vocab_size of {size}; "
            f"raise it to at least {pins.size} or pin fewer ids"
        )
    if size > usable:
        raise UserError(
            f"draft_vocab_size is {size}, but the tokenizer produces only {usable} ids; "
            f"lower it to at most {usable}"
        )
    order = np.argsort(-counts[:usable].astype(np.int64), kind="stable")  # stable: ties to lower id
    rest = order[~np.isin(order, pins)]
    return np.sort(np.concatenate([pins, rest[: size - pins.size]]))


def _pinned_ids(pinned: Iterable[int]) -> Ids:
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
