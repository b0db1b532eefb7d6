"""Values drawn by hypothesis for a check's cases, and the simplest of them that disagrees.

hypothesis decides what varies from case to case; the weights and tensors behind it come from NumPy
by the case's number, so that they are fresh in each and stay while hypothesis simplifies.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from typing import Any, TypeVar

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis.configuration import set_hypothesis_home_dir
from hypothesis.strategies import SearchStrategy

from torch_port.cache import default_cache_root

# What simplifying may cost: a comparison takes about 50 ms where its shapes are compiled.
TRIES, SECONDS = 60, 20.0

Value = TypeVar("Value")


class _Disagreement(Exception):  # noqa: N818 (what hypothesis looks for, no error)
    """A drawn value on which the two sides disagree."""


def drawn(strategy: SearchStrategy[Value], name: str, count: int) -> list[Value]:
    """Return `count` values; the first is the simplest that the strategy has.

    Arguments: the strategy; the name that stands for the draw, seed included; how many.
    """
    values: list[Value] = []
    explore(strategy, name, count, lambda number, value: values.append(value))
    return values


def explore(
    strategy: SearchStrategy[Value],
    name: str,
    count: int,
    visit: Callable[[int, Value], Any],
    alike: Callable[[int, Value], bool] | None = None,
) -> tuple[int, Value] | None:
    """Visit `count` drawn values in turn, until one disagrees; return (its number, the value).

    Arguments: as `drawn`; `visit(number, value)`, true for a disagreement; `alike(number, value)`,
    whether a simpler value disagrees in the same way: with it the returned value is the simplest
    that hypothesis found, in TRIES attempts and SECONDS at most.
    An exception that `visit` raises ends the draw and is raised here.
    """
    search = _Search(visit, alike)
    told = settings(
        max_examples=count,
        phases=(Phase.generate, Phase.shrink) if alike is not None else (Phase.generate,),
        database=None,  # a run is a function of its seed, not of the runs before it
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    set_hypothesis_home_dir(default_cache_root() / "hypothesis")  # not where the user stands
    try:
        seed(zlib.crc32(name.encode()))(told(given(strategy)(search.see)))()
    except _Disagreement:
        pass
    finally:
        set_hypothesis_home_dir(None)
    if search.broken is not None:
        raise search.broken
    if search.found is None and search.visited < count:
        raise RuntimeError(f"{name}: hypothesis found {search.visited} values, not {count}")
    return search.found


class _Search:
    """What hypothesis calls with each value: first all are visited, later one is simplified."""

    def __init__(
        self,
        visit: Callable[[int, Any], Any],
        alike: Callable[[int, Any], bool] | None,
    ) -> None:
        self.visit, self.alike = visit, alike
        self.visited = 0
        self.found: tuple[int, Any] | None = None
        self.broken: Exception | None = None
        self._tries, self._since = 0, 0.0
        self._known: dict[str, bool] = {}  # by repr: whether a value disagrees

    def see(self, value: Any) -> None:
        """Raise _Disagreement where the two sides disagree."""
        if self.broken is not None or (self.found is not None and self.alike is None):
            return
        disagrees = self._first(value) if self.found is None else self._again(value)
        if disagrees and self.alike is not None:
            raise _Disagreement

    def _first(self, value: Any) -> bool:
        number, self.visited = self.visited, self.visited + 1
        try:
            if not self.visit(number, value):
                return False
        except Exception as error:  # noqa: BLE001 (raised when hypothesis is done)
            self.broken = error
            return False
        self.found, self._since = (number, value), time.monotonic()
        self._known[repr(value)] = True
        return True

    def _again(self, value: Any) -> bool:
        """Whether a value that hypothesis takes for simpler disagrees too; it is told once."""
        assert self.found is not None
        assert self.alike is not None
        told = self._known.get(repr(value))
        if told is None:
            self._tries += 1
            over = self._tries > TRIES or time.monotonic() - self._since > SECONDS
            told = self._known[repr(value)] = not over and self._alike(value)
        if told:
            self.found = (self.found[0], value)
        return told

    def _alike(self, value: Any) -> bool:
        assert self.found is not None
        assert self.alike is not None
        try:
            return self.alike(self.found[0], value)
        except Exception:  # noqa: BLE001 (what breaks off is another fault than the one found)
            return False
