"""Counting target ids over supervised tokens (spec sheet §2). Host work, in NumPy.

On an NPU bincount runs on the slow scalar core (ascend.md), so counting stays on the host.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from torch_port.errors import UserError


def count_supervised_tokens(
    samples: Iterable[tuple[NDArray[np.int64], NDArray[np.float32]]], vocab_size: int
) -> NDArray[np.int64]:
    """Count how often each target id is a supervised token.

    Arguments: `samples`, pairs of `input_ids` [S] and `loss_mask` [S] (supervised where > 0.5);
    `vocab_size` V.
    Returns counts int64 [V].
    Raises UserError for a supervised id outside 0 … V − 1: the tokenizer is not the target's.

    >>> count_supervised_tokens([(np.array([3, 1, 3]), np.array([1.0, 0.0, 1.0]))], 4).tolist()
    [0, 0, 0, 2]
    """
    counts = np.zeros(vocab_size, dtype=np.int64)
    for input_ids, loss_mask in samples:
        supervised = np.asarray(input_ids)[np.asarray(loss_mask) > 0.5]
        if supervised.size and (supervised.min() < 0 or supervised.max() >= vocab_size):
            raise UserError(
                f"supervised tokens span ids {int(supervised.min())} … {int(supervised.max())}, "
                f"but vocab_size is {vocab_size}; tokenizer and target do not belong together"
            )
        counts += np.bincount(supervised, minlength=vocab_size)
    return counts
