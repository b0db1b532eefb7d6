"""Counting target ids over supervised tokens (spec sheet §2). Host work, in NumPy.

On an NPU bincount runs on the slow scalar core (ascend.md), so counting stays on the host.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from torch_port.errors import UserError

# Supervised ids gathered before they are counted: one bincount makes a whole [V] array, which for
# a sample of some hundred tokens and V = 248320 costs a thousand times more than the counting.
_TOGETHER = 1 << 20


def count_supervised_tokens(
    samples: Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]],
    vocab_size: int,
    tokenizer_size: int | None = None,
) -> NDArray[np.int64]:
    """Count how often each target id is a supervised token.

    Arguments: `samples`, pairs of `input_ids` [S] and `loss_mask` [S] (supervised where > 0.5),
    consumed one by one; `vocab_size` V; `tokenizer_size` V_tok (default V).
    Returns counts int64 [V].
    Raises UserError for a supervised id outside 0 … V_tok − 1: the tokenizer is not the target's.

    >>> count_supervised_tokens([(np.array([3, 1, 3]), np.array([1.0, 0.0, 1.0]))], 4).tolist()
    [0, 0, 0, 2]
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    usable = vocab_size if tokenizer_size is None else tokenizer_size
    waiting: list[NDArray[np.int64]] = []
    held = 0
    for input_ids, loss_mask in samples:
        supervised = np.asarray(input_ids)[np.asarray(loss_mask) > 0.5]
        waiting.append(supervised)
        held += supervised.size
        if held >= _TOGETHER:
            _add(counts, waiting, usable)
            waiting, held = [], 0
    _add(counts, waiting, usable)
    return counts


def _add(counts: NDArray[np.int64], waiting: list[NDArray[np.int64]], usable: int) -> None:
    """Add the waiting ids to `counts`, in place."""
    ids = np.concatenate(waiting) if waiting else np.zeros(0, dtype=np.int64)
    if not ids.size:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= usable:
        name = "vocab_size" if usable == len(counts) else "tokenizer_size"
        raise UserError(
            f"supervised tokens span ids {low} … {high}, "
            f"but {name} is {usable}; tokenizer and target do not belong together"
        )
    found = np.bincount(ids)
    counts[: len(found)] += found
