"""Work on pieces by several processes, answers in the pieces' order. No torch."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from multiprocessing import connection, get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

from torch_port.errors import UserError

Piece = TypeVar("Piece")
Part = TypeVar("Part")


def resolve_processes(given: int | None, option: str = "--workers") -> int:
    """Return how many processes work: all cores that this process may use, if not given.

    Raises UserError for fewer than one.
    """
    if given is None:
        return len(os.sched_getaffinity(0))
    if given < 1:
        raise UserError(f"{option} is {given}, but at least 1 process must work; give 1 or more")
    return given


def in_processes(
    work: Callable[[Piece], Part],
    pieces: Sequence[Piece],
    workers: int,
    start: Callable[..., None] | None = None,
    settings: tuple[Any, ...] = (),
    option: str = "--workers",
) -> Iterator[Part]:
    """Yield `work(piece)` for every piece, in order.

    Two pieces per process are under way, not the whole list: memory does not grow with it.

    Arguments: `work`, a module's function; `pieces`; `workers`; `start`, if there is one, called
    with `settings` in every process before its first piece; `option` that sets the number of
    processes.
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
            f"a working process ended without an answer (out of memory?); {option} is {workers}, "
            "lower it"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _start(start: Callable[..., None] | None, settings: tuple[Any, ...]) -> None:
    # Ctrl-C reaches the whole group, and ends this process at once and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_with_parent()
    if start is not None:
        start(*settings)


def end_with_parent() -> None:
    """Let this process end as soon as the one that started it has: killed, it could not say so."""
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
