"""Work on pieces by several processes, answers in the pieces' order. No torch."""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import get_context
from typing import Any, TypeVar

from torch_port.errors import UserError

Piece = TypeVar("Piece")
Part = TypeVar("Part")


def check_workers(workers: int) -> None:
    """Refuse fewer than one process."""
    if workers < 1:
        raise UserError(
            f"--workers is {workers}, but at least 1 process must count; give 1 or more, or leave "
            "it out to use all cores"
        )


def in_processes(
    work: Callable[[Piece], Part],
    pieces: Sequence[Piece],
    workers: int,
    start: Callable[..., None],
    settings: tuple[Any, ...],
) -> Iterator[Part]:
    """Yield `work(piece)` for every piece, in order.

    Two pieces per process are under way, not the whole list: memory does not grow with it.

    Arguments: `work`, a module's function; `pieces`; `workers`; `start`, called with `settings`
    in every process before its first piece.
    Raises UserError when a process dies, and what `work` raises.
    """
    # Spawned, not forked: a fork would copy the locks of whatever threads there are.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start, (start, settings))
    waiting = iter(pieces)
    try:
        running: deque[Future[Part]] = deque(
            pool.submit(work, piece) for piece in islice(waiting, 2 * workers)
        )
        while running:
            yield running.popleft().result()
            running.extend(pool.submit(work, piece) for piece in islice(waiting, 1))
    except BrokenProcessPool:
        raise UserError(
            f"a counting process ended without an answer (out of memory?); --workers is {workers}, "
            "lower it"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(start: Callable[..., None], settings: tuple[Any, ...]) -> None:
    # Ctrl-C reaches the whole group, and ends this process at once and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    start(*settings)
