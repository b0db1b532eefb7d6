"""Timing and memory of variants: alternated in one process, medians; live tensor bytes, traced."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from torch import Tensor

from torch_port.memory import PeakMemory


@dataclass
class Variant:
    """One way to compute the same thing, and what was measured of it.

    `run` does one forward and backward and returns its value (a loss), or None. `leaves` are the
    tensors whose gradients are dropped before each run, outside the clock. `bound` names the
    products that it is held against; `products` marks the bound itself, whose memory is not
    measured.
    """

    name: str
    run: Callable[[], Tensor | None]
    leaves: Iterable[Tensor] = ()
    bound: str | None = None
    aside: bool = False  # measured for information: neither a form of the work nor its bound
    products: bool = False
    milliseconds: list[float] = field(default_factory=list)
    peak_bytes: int | None = None
    value: float | None = None

    @property
    def median(self) -> float:
        """The median time, in milliseconds."""
        return statistics.median(self.milliseconds)

    def reset(self) -> None:
        """Drop gradients of an earlier run."""
        for leaf in self.leaves:
            leaf.grad = None


def time_once(variant: Variant) -> float:
    """Run a variant once; returns milliseconds."""
    variant.reset()
    started = time.perf_counter()
    value = variant.run()
    elapsed = time.perf_counter() - started
    if value is not None:
        variant.value = value.item()
    variant.reset()
    return elapsed * 1000


def trace_peak(variant: Variant) -> int:
    """Return the peak bytes of live tensors in one run, above inputs and parameters."""
    variant.reset()
    with PeakMemory() as traced:
        variant.run()
    variant.reset()
    return traced.peak


def measure(variants: list[Variant], repeats: int, tick: Callable[[int, str], None]) -> None:
    """Fill in every variant's times, peak and value.

    First a pass that traces memory, which warms up too; then `repeats` rounds in which every
    variant runs once, the first of a round changing from round to round, so that a slow spell of
    the machine meets all of them. `tick` is told how many runs
    are done, and what runs next.
    """
    for done, variant in enumerate(variants):
        tick(done, f"{variant.name}: memory")
        if variant.products:
            variant.run()
        else:
            variant.peak_bytes = trace_peak(variant)
    gc.collect()
    gc.disable()
    try:
        for round_ in range(repeats):
            first = round_ % len(variants)
            order = variants[first:] + variants[:first]
            for done, variant in enumerate(order, start=(round_ + 1) * len(variants)):
                tick(done, f"{variant.name}: round {round_ + 1}")
                variant.milliseconds.append(time_once(variant))
            gc.collect()
    finally:
        gc.enable()
