"""The spike guard: a whole step is skipped when its gradient norm stands out (spec sheet §14)."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class SpikeGuard:
    """The geometric mean of the gradient norms of the steps taken so far.

    Clipping bounds a spike's norm, not its direction, and Adam's second moment remembers it. A norm
    above `multiple` times the mean is skipped and does not enter the mean, or the next spike would
    find a higher limit (field-note 19: a mean plus sigmas caught one of four). A norm of 0 is no
    spike and has no logarithm: it is left out. Every rank sees the same reduced norm, so all skip
    or none.

    >>> guard = SpikeGuard(multiple=10.0)
    >>> [guard.admits(norm) for norm in (2.0, 2.0, 21.0, 19.0)]
    [True, True, False, True]
    """

    multiple: float
    log_sum: float = 0.0
    seen: int = 0

    def admits(self, norm: float) -> bool:
        """Return whether a step with this (finite) norm is taken, and remember the norm if so."""
        if self.seen and norm > self.multiple * math.exp(self.log_sum / self.seen):
            return False
        if norm > 0:
            self.log_sum += math.log(norm)
            self.seen += 1
        return True
