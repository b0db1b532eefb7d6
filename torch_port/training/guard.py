"""The spike guard: what is done about a step whose gradient norm stands out (spec sheet §14)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

GuardMode = Literal["off", "observe", "skip"]


@dataclass
class SpikeGuard:
    """The geometric mean of the gradient norms of the steps taken so far.

    Clipping bounds a spike's norm, not its direction, and Adam's second moment remembers it. A norm
    above `multiple` times the mean is a spike and does not enter the mean, or the next one would
    find a higher limit (field-note 19: a mean plus sigmas caught one of four). A norm of 0 is no
    spike and has no logarithm: it is left out. Every rank sees the same reduced norm, so all skip
    or none.

    `mode`: "skip" leaves a spike's step out, "observe" takes it, "off" looks at no norm and
    remembers none. It may change on resume: log_sum and seen mean the same in all three.

    >>> guard = SpikeGuard(multiple=10.0)
    >>> [guard.admits(norm) for norm in (2.0, 2.0, 21.0, 19.0)]
    [True, True, False, True]
    """

    multiple: float
    mode: GuardMode = "skip"
    log_sum: float = 0.0
    seen: int = 0

    def is_spike(self, norm: float) -> bool:
        """Return whether a (finite) norm stands out; nothing is remembered."""
        if self.mode == "off" or not self.seen:
            return False
        return norm > self.multiple * math.exp(self.log_sum / self.seen)

    def admits(self, norm: float) -> bool:
        """Return whether a step with this (finite) norm is taken; a norm that is no spike stays.

        A spike stays out of the mean in "observe" too, where its step is taken.
        """
        if self.is_spike(norm):
            return self.mode == "observe"
        if self.mode != "off" and norm > 0:
            self.log_sum += math.log(norm)
            self.seen += 1
        return True
