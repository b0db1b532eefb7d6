"""What is allocated on the device during a rehearsal, and for what.

Every storage that an operator returns counts from then until the last tensor of it is gone, views
once. What it is *for* is known later: a storage that is still there when a backward pass begins was
kept for it, a gradient is one that a parameter holds afterwards. So allocations and releases are
written down, labels are given at those moments, and the peak is found at the end.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal
from unittest import mock

import torch
from torch.utils._pytree import tree_leaves

from torch_port.rehearsal.trace import Finding, OperatorCall

Category = Literal[
    "parameters",
    "gradients",
    "optimizer state",
    "frozen target tensors",
    "batch",
    "saved activations",
    "temporaries",
]
CATEGORIES: tuple[Category, ...] = (
    "parameters",
    "frozen target tensors",
    "optimizer state",
    "gradients",
    "batch",
    "saved activations",
    "temporaries",
)
ALLOCATION = 512  # bytes: the caching allocators of CUDA and of torch_npu round up to it
POINTS = 400  # of the timeline


@dataclass(slots=True, eq=False)
class Block:
    """One storage: its bytes as allocated now, and the operator that made it."""

    bytes: int
    on_device: bool
    name: str
    where: str
    phase: str
    shape: tuple[int, ...]
    dtype: str
    category: Category | None = None


@dataclass(frozen=True)
class Held:
    """Storages of one line that are alive at the peak: how many, and their bytes together."""

    bytes: int
    count: int
    category: Category
    shape: tuple[int, ...]
    dtype: str
    name: str
    where: str
    phase: str


@dataclass(frozen=True)
class Point:
    """A moment of the timeline, the fullest of its stretch of operators."""

    operator: int
    phase: str
    bytes: dict[Category, int]


@dataclass(frozen=True)
class MemoryReport:
    """The peak on the device: bytes, by category, and the operator that reached it.

    `held`: what is alive then, the largest first. `persistent`: bytes between steps. `host`: the
    peak of the host's share, which offloading fills. `by_phase`: the peak of each phase.
    """

    peak: int
    by_category: dict[Category, int]
    name: str
    where: str
    phase: str
    held: list[Held]
    persistent: int
    host: int
    by_phase: dict[str, int]
    timeline: list[Point]


class Memory:
    """The observer that writes down allocations and releases."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._round = 1 if device.type == "cpu" else ALLOCATION
        self._live: dict[int, tuple[weakref.ref[Any], Block]] = {}
        self._events: list[tuple[Block, int]] = []  # bytes, negative where released
        self.persistent = 0

    def before(self, call: OperatorCall) -> None:
        """Nothing is allocated before an operator runs."""

    def after(self, call: OperatorCall) -> None:
        """Take in the storages that the operator made."""
        for tensor in call.result if type(call.result) in (tuple, list) else (call.result,):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor, call)
            elif isinstance(tensor, (tuple, list)):
                for inner in tree_leaves(tensor):
                    if isinstance(inner, torch.Tensor):
                        self._see(inner, call)

    def finding(self) -> list[Finding]:
        """Memory is reported on its own."""
        return []

    def _see(self, tensor: torch.Tensor, call: OperatorCall) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or storage.nbytes() == 0:
            return
        block = Block(
            self._rounded(storage.nbytes()),
            tensor.device.type == self.device.type,
            call.name,
            call.where,
            call.phase,
            tuple(tensor.shape),
            str(tensor.dtype).removeprefix("torch."),
        )
        events, live = self._events, self._live

        def released(_: object) -> None:
            del live[key]
            events.append((block, -block.bytes))

        live[key] = (weakref.ref(storage, released), block)
        events.append((block, block.bytes))

    def _rounded(self, size: int) -> int:
        return -(-size // self._round) * self._round

    @contextmanager
    def watching_storages(self) -> Iterator[None]:
        """See also storages that are emptied and filled again without an operator, as FSDP2's."""
        resize = torch.UntypedStorage.resize_

        def watched(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            found = self._live.get(storage._cdata)
            if found is not None:
                block, now = found[1], self._rounded(size)
                self._events.append((block, now - block.bytes))
                block.bytes = now
            return result

        with mock.patch.object(torch.UntypedStorage, "resize_", watched):
            yield

    def label(self, tensors: Iterable[Any], category: Category) -> None:
        """Say what some tensors' storages are for; the first label stays."""
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                found = self._live.get(_local(tensor).untyped_storage()._cdata)
                if found is not None and found[1].category is None:
                    found[1].category = category

    def label_rest(self, category: Category) -> None:
        """Say what everything is for that is alive and has no label."""
        for _, block in self._live.values():
            if block.category is None:
                block.category = category

    def between_steps(self) -> None:
        """Note what stays from one step to the next."""
        self.persistent = sum(b.bytes for _, b in self._live.values() if b.on_device)

    def report(self) -> MemoryReport:
        """Find the peak. Call at the end: what never got a label was temporary."""
        at, host = _fullest(self._events)
        totals: Counter[Category] = Counter()
        alive: Counter[Block] = Counter()
        for block, change in self._events[: at + 1]:
            if not block.on_device:
                continue
            totals[block.category or "temporaries"] += change
            alive[block] += change
        last = self._events[at][0]
        return MemoryReport(
            peak=sum(totals.values()),
            by_category={c: totals[c] for c in CATEGORIES},
            name=last.name,
            where=last.where,
            phase=last.phase,
            held=_held(alive),
            persistent=self.persistent,
            host=host,
            by_phase=_by_phase(self._events),
            timeline=_timeline(self._events),
        )


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return a rank's own part of a sharded tensor."""
    local = getattr(tensor, "_local_tensor", None)
    return tensor if local is None else local


def _fullest(events: list[tuple[Block, int]]) -> tuple[int, int]:
    """Return the event at which the device is fullest, and the host's peak in bytes."""
    live = peak = at = host = host_peak = 0
    for index, (block, change) in enumerate(events):
        if not block.on_device:
            host += change
            host_peak = max(host, host_peak)
            continue
        live += change
        if live > peak:
            peak, at = live, index
    return at, host_peak


def _held(alive: Mapping[Block, int]) -> list[Held]:
    groups: dict[tuple[Any, ...], list[int]] = {}
    for b, size in alive.items():
        if size:
            key = (b.category or "temporaries", b.shape, b.dtype, b.name, b.where, b.phase)
            groups.setdefault(key, []).append(size)
    held = [Held(sum(sizes), len(sizes), *key) for key, sizes in groups.items()]
    return sorted(held, key=lambda h: -h.bytes)


def _by_phase(events: list[tuple[Block, int]]) -> dict[str, int]:
    """Return each phase's peak. A release counts to the phase of the allocation before it."""
    peaks: dict[str, int] = {}
    live, phase = 0, ""
    for block, change in events:
        if not block.on_device:
            continue
        live += change
        phase = block.phase if change > 0 else phase
        peaks[phase] = max(peaks.get(phase, 0), live)
    return peaks


def _timeline(events: list[tuple[Block, int]]) -> list[Point]:
    stretch = max(1, -(-len(events) // POINTS))
    totals: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
    points: list[Point] = []
    best, live, phase = -1, 0, ""
    for index, (block, change) in enumerate(events):
        if index % stretch == 0:
            best = -1
        if block.on_device:
            totals[block.category or "temporaries"] += change
            live += change
            phase = block.phase if change > 0 else phase
        if live > best:
            point = Point(index, phase, dict(totals))
            if best < 0:
                points.append(point)
            else:
                points[-1] = point
            best = live
    return points
