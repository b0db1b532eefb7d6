"""Which samples a step takes, on which rank: a function of (seed, epoch) alone.

Samples of like length meet in a step, so that little is padding and no rank waits for another's
long batch. The samples of an optimizer step depend on how many it takes in all, not on how they
are spread over ranks and accumulation: 2 ranks of 4 see what 1 rank of 8 sees.

Shape suffixes: n samples, G samples of an optimizer step, A accumulated micro-batches, W ranks,
B samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_port.errors import UserError

# Steps among whose samples like lengths are looked for: enough to fill them with little padding,
# few enough that an epoch's order stays random.
_WINDOW_STEPS = 64


@dataclass(frozen=True)
class Split:
    """How an optimizer step's samples are spread: `batch_size` B, `accumulation` A, ranks W."""

    batch_size: int
    accumulation: int = 1
    world_size: int = 1
    rank: int = 0

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation", "world_size"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} is {getattr(self, name)}; give 1 or more")
        if not 0 <= self.rank < self.world_size:
            raise UserError(f"rank is {self.rank}, but there are {self.world_size}")

    @property
    def step_samples(self) -> int:
        """Return G = B·A·W, the samples of an optimizer step on all ranks."""
        return self.batch_size * self.accumulation * self.world_size


def steps_per_epoch(count: int, split: Split) -> int:
    """Return how many optimizer steps an epoch has, on every rank.

    The samples that fill no step are left out, other ones every epoch.
    Raises UserError when there are fewer samples than a step takes.
    """
    steps = count // split.step_samples
    if steps < 1:
        raise UserError(
            f"{count} trainable samples do not fill one step of {split.step_samples} (batch_size "
            f"{split.batch_size} × accumulation {split.accumulation} × {split.world_size} ranks); "
            "lower one of them, or prepare more data"
        )
    return steps


def epoch_order(lengths: Sequence[int], split: Split, seed: int, epoch: int) -> NDArray[np.int64]:
    """Return the places in `lengths` that this rank takes, [steps, A, B].

    A random order is cut into windows of some steps, each window is sorted by length and cut into
    steps, whose order is then random again. Of a step's sorted samples each micro-batch takes a
    stretch, and the ranks take turns in it.
    """
    steps, G = steps_per_epoch(len(lengths), split), split.step_samples
    random = np.random.default_rng([seed, epoch])
    order = random.permutation(len(lengths))[: steps * G]
    length_of = np.asarray(lengths, dtype=np.int64)
    windows = [
        window[np.argsort(length_of[window], kind="stable")]
        for window in np.split(order, range(G * _WINDOW_STEPS, steps * G, G * _WINDOW_STEPS))
    ]
    by_step = np.concatenate(windows).reshape(steps, G)[random.permutation(steps)]
    spread = by_step.reshape(steps, split.accumulation, split.batch_size, split.world_size)
    return spread[..., split.rank].astype(np.int64)
