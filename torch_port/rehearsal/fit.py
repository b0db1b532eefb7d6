"""The longest samples that fit a card, by recomputation, sharding and draft vocabulary.

A peak is that of the optimizer's update, which hangs on no sample, or grows nearly in proportion to
the samples. So two small rehearsals say where the limit should be, and rehearsals there find it, to
`STEP` tokens: the result fits, and `STEP` more do not.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from torch_port.data.atomic import atomic_file
from torch_port.data.parallel import in_processes
from torch_port.drawing.style import standalone
from torch_port.drawing.svg import Axis, Series, line_chart
from torch_port.progress import stage
from torch_port.rehearsal.rehearse import MARGIN, rehearse
from torch_port.rehearsal.variants import changed, with_length, with_vocabulary
from torch_port.run import RunConfig

STEP = 512  # tokens
RECOMPUTE = ("none", "mlp", "layer")
_STYLES = {"none": "full", "mlp": "coverage", "layer": "pruned"}


@dataclass(frozen=True)
class Longest:
    """What fits in one setting: S and N, 0 where not even `STEP` tokens do, and the peak there.

    `bounded`: the search ended at the longest samples that were asked for.
    """

    vocabulary: int
    recompute: str
    cards: int  # that share parameters and optimizer; 1: one card holds everything
    length: int
    anchors: int
    peak: int
    bounded: bool
    rehearsals: int


@dataclass(frozen=True)
class Frontier:
    """What is searched: the run, its draft's config, a card's memory, ranks, longest samples."""

    run: RunConfig
    config: Any
    hbm_bytes: int
    world_size: int
    largest: int

    def find(self, vocabularies: list[int], console: Console, workers: int = 2) -> list[Longest]:
        """Search every vocabulary, recomputation and sharding, some at a time."""
        shardings = (1,) if self.world_size == 1 else (1, self.world_size)
        cases = [(k, r, c) for c in shardings for r in RECOMPUTE for k in vocabularies]
        found: list[Longest] = []
        done = in_processes(partial(longest, self), cases, workers)
        with stage("settings", len(cases), console) as progress:
            for result in done:
                found.append(result)
                progress.update(len(found), f"K = {result.vocabulary}: {result.length} tokens")
        return found

    def anchors(self, length: int) -> int:
        """Return N of samples of that length, as many to a token as in the run file."""
        base = self.run.data.max_length or 4 * self.run.data.num_anchors
        return max(1, self.run.data.num_anchors * length // base)

    def peak(self, case: tuple[int, str, int], length: int) -> tuple[int, int]:
        """Rehearse one setting; return the peak, and the peak of forward and backward alone."""
        vocabulary, recompute, cards = case
        run, config = with_vocabulary(self.run, self.config, vocabulary)
        run = with_length(run, length, self.anchors(length))
        run = changed(run, "compute", recompute=recompute)
        run = changed(run, "distribution", mode="single" if cards == 1 else "fsdp")
        memory = rehearse(run, config=config, world_size=cards, coarse=True).memory
        passes = [memory.by_phase[f"step 2: {name}"] for name in ("forward", "backward")]
        return memory.peak, max(passes)


def longest(frontier: Frontier, case: tuple[int, str, int]) -> Longest:
    """Search one setting: K, what is recomputed, and how many cards share the run."""
    peaks: dict[int, tuple[int, int]] = {}
    usable = frontier.hbm_bytes * (1 - MARGIN)

    def fits(length: int) -> bool:
        if length not in peaks:
            peaks[length] = frontier.peak(case, length)
        return peaks[length][0] <= usable

    top = max(STEP, frontier.largest // STEP * STEP)
    low, high = 0, top + STEP  # fits; does not
    guess = min(2048, top)
    for _ in range(40):
        if fits(guess):
            low = max(low, guess)
        else:
            high = min(high, guess)
        if high - low <= STEP:
            break
        guess = _next(low, high, peaks, usable, min(4096, top))
    return Longest(
        *case,
        length=low,
        anchors=frontier.anchors(low) if low else 0,
        peak=peaks[low][0] if low else peaks[min(peaks)][0],
        bounded=low == top,
        rehearsals=len(peaks),
    )


def _next(
    low: int, high: int, peaks: dict[int, tuple[int, int]], usable: float, second: int
) -> int:
    """Return the length to look at: where a line through the two nearest peaks meets the limit."""
    if len(peaks) == 1:
        return second if low < second < high else (low + high) // 2 // STEP * STEP
    near = sorted(peaks, key=lambda s: abs(peaks[s][1] - usable))[:2]
    first, last = sorted(near)
    slope = (peaks[last][1] - peaks[first][1]) / (last - first)
    if slope <= 0:
        return (low + high) // 2 // STEP * STEP
    meets = first + (usable - peaks[first][1]) / slope
    return int(min(max(meets // STEP * STEP, low + STEP), high - STEP))


def show_frontier(found: list[Longest], console: Console) -> None:
    """Print the frontier: a row for each setting, a column for each vocabulary."""
    vocabularies = list(dict.fromkeys(item.vocabulary for item in found))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("cards", justify="right")
    table.add_column("recompute")
    for vocabulary in vocabularies:
        table.add_column(f"K = {vocabulary}", justify="right", no_wrap=True)
    rows: dict[tuple[int, str], list[str]] = {}
    for item in found:
        rows.setdefault((item.cards, item.recompute), []).append(_cell(item))
    for (cards, recompute), cells in rows.items():
        table.add_row(f"{cards}, fsdp" if cards > 1 else "1", recompute, *cells)
    console.print(table)
    ratio = next((item.length / item.anchors for item in found if item.anchors), 0)
    console.print(
        f"The longest samples that fit, in tokens, to {STEP}, and their peak in GiB; an anchor to "
        f"{ratio:.3g} tokens. ≥: longer ones were not looked at.",
        highlight=False,
    )


def _cell(item: Longest) -> str:
    peak = f"{item.peak / 2**30:.1f}"
    if not item.length:
        return f"none ({peak})"
    return f"{'≥ ' if item.bounded else ''}{item.length} ({peak})"


def write_frontier(
    found: list[Longest], json_file: Path | None, svg: Path | None, console: Console
) -> None:
    """Write what was found as JSON and as a chart, where they are wanted."""
    if json_file is not None:
        with atomic_file(json_file) as stream:
            stream.write(json.dumps([asdict(item) for item in found], indent=1).encode() + b"\n")
        console.print(f"JSON: {json_file}", highlight=False)
    if svg is not None:
        with atomic_file(svg) as stream:
            stream.write(chart(found).encode())
        console.print(f"Chart: {svg}", highlight=False)


def chart(found: list[Longest]) -> str:
    """Return the frontier as an SVG document: the longest samples against K, a line a setting."""
    lines: dict[tuple[int, str], list[tuple[float, float | None]]] = {}
    for item in sorted(found, key=lambda item: item.vocabulary):
        point = (float(item.vocabulary), float(item.length))
        lines.setdefault((item.cards, item.recompute), []).append(point)
    series = [
        Series(
            f"recompute {recompute}",
            points,
            _STYLES[recompute],
            note="one card" if cards == 1 else f"{cards} cards, fsdp",
            dashed=cards > 1,
        )
        for (cards, recompute), points in lines.items()
    ]
    drawn = line_chart(
        "The longest samples that fit",
        "Tokens of a sample, with its anchors, against the ids of the draft vocabulary.",
        series,
        Axis("K, ids kept", log=True, text=_thousands),
        Axis("tokens of a sample", text=_thousands, include=(0.0,)),
        None,
    )
    return standalone(drawn)


def _thousands(value: float) -> str:
    return f"{value:g}" if value < 1000 else f"{value / 1000:g}k"
