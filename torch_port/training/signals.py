"""SIGTERM and SIGINT ask a run to stop; the ranks agree on the step after which they do."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch_port.training.distribution import Ranks

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopSignals:
    """What was signalled to this process, and what the ranks made of it.

    Ranks must stop after the same step, or one waits in a collective for another that has left. At
    a step's end each gives its flag to an all-reduce on a gloo group of its own (checkpoints are
    written in a thread, on another one). A rank that was not signalled does not wait for the sum:
    it reads it a step later, when it is long done, so nothing is held up and nothing touches the
    device. A rank that was signalled waits. If the sum says that all were, as by torchrun, all have
    waited, and all stop now; else all stop after the next step.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None  # the first one
        self._interrupted = False
        self._group: dist.ProcessGroup | None = None
        self._asked: tuple[Any, torch.Tensor] | None = None  # the all-reduce that is under way
        self._agreed = False

    def requested(self, ranks: Ranks) -> bool:
        """Return whether to save and stop now. All ranks call this once, at the end of each step.

        True on all ranks at the same call, once any of them was signalled; it stays True.
        """
        if ranks.world_size == 1:
            return self.received is not None
        if self._agreed:
            return True
        if self._asked is not None:
            work, flag = self._asked
            work.wait()
            self._asked = None
            if flag.item():
                self._agreed = True
                return True
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        received = self.received is not None  # read once: a signal may come at any moment
        flag = torch.tensor([int(received)], dtype=torch.int32, device="cpu")
        work = dist.all_reduce(flag, group=self._group, async_op=True)
        self._asked = (work, flag)
        if received:
            work.wait()
            self._agreed = flag.item() == ranks.world_size
        return self._agreed

    def finish(self) -> None:
        """Wait for the last all-reduce: a rank that leaves before it breaks it for the others."""
        if self._asked is not None:
            self._asked[0].wait()
            self._asked = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal: remember it; a second SIGINT is an order, not a wish."""
        if number == signal.SIGINT:
            if self._interrupted:
                raise KeyboardInterrupt
            self._interrupted = True
        self.received = self.received or signal.Signals(number)


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Turn SIGTERM and SIGINT into a request to stop, for as long as the block runs.

    A second SIGINT raises KeyboardInterrupt at once. A second SIGTERM says nothing new: torchrun
    sends one to each of its processes and kills what is there 30 seconds later, so a step and a
    save have to fit into that. Use in the main thread; Python handles signals there only.

    Yields:
        The StopSignals to ask after every step.
    """
    stop = StopSignals()
    before = {number: signal.signal(number, stop._receive) for number in _SIGNALS}
    try:
        yield stop
        stop.finish()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
