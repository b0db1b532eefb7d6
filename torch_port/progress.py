"""Progress a person can follow: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

LINE_EVERY = 5.0  # seconds between plain lines


class Stage:
    """One piece of work with a known number of steps."""

    def __init__(self, name: str, total: int, console: Console, bar: Progress | None) -> None:
        self.name, self.total = name, total
        self._console, self._bar = console, bar
        self._task = bar.add_task(name, total=total, detail="") if bar else None
        self._started = self._last_line = time.monotonic()

    def update(self, done: int, detail: str = "", total: int | None = None) -> None:
        """Say that `done` of the total steps are done; `detail` are the numbers to show.

        `total` replaces the number of steps, for work that learns it on the way.
        """
        self.total = self.total if total is None else total
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=done, total=self.total, detail=detail)
            return
        now = time.monotonic()
        if now - self._last_line >= LINE_EVERY and done < self.total:
            self._last_line = now
            left = (now - self._started) / max(done, 1) * (self.total - done)
            self._console.print(
                f"  {self.name}: {done}/{self.total}  {detail}  ETA {clock(left)}",
                highlight=False,
                soft_wrap=True,
            )


@contextmanager
def stage(name: str, total: int, console: Console) -> Iterator[Stage]:
    """Show progress of `total` steps on `console`; says at the end how long it took."""
    started = time.monotonic()
    if console.is_terminal:
        with Progress(
            TextColumn("  {task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[detail]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        ) as bar:
            yield Stage(name, total, console, bar)
    else:
        yield Stage(name, total, console, None)
    console.print(f"  {name}: done in {clock(time.monotonic() - started)}", highlight=False)


def clock(seconds: float) -> str:
    """Write a duration as m:ss.

    >>> clock(75.2)
    '1:15'
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d}"
