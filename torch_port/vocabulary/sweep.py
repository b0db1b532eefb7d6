"""Coverage over the size of the draft vocabulary, from one count: the rows and the chart. No torch.

One ranking of the ids serves every K: a larger map keeps what a smaller one keeps, and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from torch_port.drawing.style import standalone
from torch_port.drawing.svg import Axis, Marker, Point, Series, line_chart
from torch_port.drawing.text import fixed, percent_text
from torch_port.errors import UserError
from torch_port.vocabulary.counts import TokenCounts
from torch_port.vocabulary.heldout import check_heldout
from torch_port.vocabulary.selection import (
    coverage_curve,
    first_of,
    pinned_ids,
    rank_by_count,
    rank_by_mass,
    size_for_coverage,
)

RULES = ("count", "mass")
_CURVE_POINTS = 120


@dataclass(frozen=True)
class Ranking:
    """All ids of a tokenizer in the order in which a growing K keeps them, and what they cover.

    `ids` int64 [V_tok], the first `pins` of them pinned; `train`, `heldout` and `mass` float64
    [V_tok]: the shares of the training tokens, of the held-out tokens and of the teacher's
    probability that the first 1, 2, … of them hold (None where it was not measured).
    """

    ids: NDArray[np.int64]
    pins: int
    train: NDArray[np.float64]
    heldout: NDArray[np.float64] | None
    mass: NDArray[np.float64] | None
    rule: str

    def kept(self, size: int) -> NDArray[np.int64]:
        """Return the ids [K] of the map with K ids, ascending; refuses a K that cannot be."""
        if size < 1:
            raise UserError(f"draft_vocab_size is {size}, but a map keeps at least 1 id")
        return first_of(self.ids, size, self.pins)

    def size_for(self, share: float) -> int:
        """Return the smallest K that covers a share: of tokens, or of mass where that ranks."""
        curve = self.train if self.rule == "count" or self.mass is None else self.mass
        if not 0.0 < share <= 1.0:
            raise UserError(
                f"--coverage is {share}, but must lie above 0 and at most at 1; write 0.99 for 99%"
            )
        if curve[-1] < share:  # padding rows of the head hold mass
            raise UserError(
                f"--coverage is {share}, but all {len(curve)} ids of the tokenizer hold only "
                f"{curve[-1]:.6f} of the teacher's mass; lower it"
            )
        return size_for_coverage(curve, share, self.pins)


@dataclass(frozen=True)
class SweepRow:
    """One K: shares from 0 to 1 (None: not measured), and ids kept that never occurred."""

    size: int
    train: float
    heldout: float | None
    mass: float | None
    unseen: int


def rank(
    counts: TokenCounts,
    *,
    rule: str = "count",
    pin: Sequence[int] = (),
    pin_special: bool = True,
    pin_bytes: bool = True,
    heldout: TokenCounts | None = None,
) -> Ranking:
    """Rank a tokenizer's ids for all K at once.

    Arguments: `counts` of the training corpus; `rule`, count or mass; `pin`, ids to keep whatever
    they count, beside the special and the one-byte tokens; `heldout` counts, never ranked by.
    Raises UserError for an unknown rule, mass without mass, pins that are no ids, and held-out
    counts that do not compare (`check_heldout`).
    """
    outside = sorted({i for i in pin if not 0 <= i < counts.tokenizer_size})
    if outside:
        raise UserError(
            f"--pin {','.join(map(str, outside))}: the tokenizer's ids are 0 … "
            f"{counts.tokenizer_size - 1}; leave {'it' if len(outside) == 1 else 'them'} out, or "
            "count with the tokenizer that has them"
        )
    pins = pinned_ids(
        [
            *pin,
            *(counts.special_ids if pin_special else ()),
            *(counts.byte_ids if pin_bytes else ()),
        ]
    )
    if rule not in RULES:
        raise UserError(f"--by is {rule!r}, but ids are chosen by {' or '.join(RULES)}")
    if rule == "mass" and counts.mass is None:
        raise UserError(
            "--by mass needs the teacher's mass, and these counts have none; count the feature "
            "directory again with `torch-port vocab count FEATURES --teacher-mass --target DIR`"
        )
    if rule == "mass" and counts.mass is not None:
        ids = rank_by_mass(counts.mass, pins, counts.tokenizer_size)
    else:
        ids = rank_by_count(counts.counts, pins, counts.tokenizer_size)
    if heldout is not None:
        check_heldout(counts, heldout)
    return Ranking(
        ids=ids,
        pins=len(pins),
        train=coverage_curve(ids, counts.counts),
        heldout=None if heldout is None else coverage_curve(ids, heldout.counts),
        mass=None if counts.mass is None else coverage_curve(ids, counts.mass),
        rule=rule,
    )


def sweep(ranking: Ranking, counts: TokenCounts, sizes: Sequence[int]) -> list[SweepRow]:
    """Return a row per K, ascending and each once. Raises UserError for a K that cannot be."""

    def at(curve: NDArray[np.float64] | None, size: int) -> float | None:
        return None if curve is None else float(curve[size - 1])

    rows = []
    for size in sorted(set(sizes)):
        kept = ranking.kept(size)
        rows.append(
            SweepRow(
                size=size,
                train=float(ranking.train[size - 1]),
                heldout=at(ranking.heldout, size),
                mass=at(ranking.mass, size),
                unseen=int(np.count_nonzero(counts.counts[kept] == 0)),
            )
        )
    return rows


def default_sizes(ranking: Ranking) -> list[int]:
    """Return powers of two from 1024 (or the pins, if more) up to the tokenizer's size, and that.

    A tokenizer below 1024 ids is swept from 16.
    """
    usable = len(ranking.ids)
    low = max(1024 if usable > 1024 else 16, ranking.pins)
    return [2**n for n in range(64) if low <= 2**n < usable] + [usable]


def coverage_chart(ranking: Ranking, chosen: int | None = None) -> str:
    """Return the coverage curves as an SVG document that needs nothing beside it.

    Arguments: `ranking`; `chosen` K to mark, or None.
    """
    usable = len(ranking.ids)
    low = max(ranking.pins, min(16, usable // 8), 1)
    sizes = np.unique(np.geomspace(low, usable, _CURVE_POINTS).round().astype(int))

    def points(curve: NDArray[np.float64]) -> list[Point]:
        return [(float(size), float(curve[size - 1])) for size in sizes.tolist()]

    def note(curve: NDArray[np.float64]) -> str:
        return "" if chosen is None else f"{curve[chosen - 1]:.2%} at K"

    curves = [("training", ranking.train, "coverage", True)]
    if ranking.heldout is not None:
        curves.append(("held-out", ranking.heldout, "full", False))
    if ranking.mass is not None:
        curves.append(("kept mass", ranking.mass, "pruned", False))
    lines = [
        Series(name, points(curve), style, note(curve), dashed)
        for name, curve, style, dashed in curves
    ]
    marker = None if chosen is None else Marker(float(chosen), f"K = {fixed(chosen, 0)}")
    chart = line_chart(
        "Coverage against the size of the draft vocabulary",
        "The share of supervised tokens that a draft vocabulary of K ids holds. A held-out curve "
        "far below the training one says that the corpus is too narrow for its map.",
        lines,
        Axis("K, ids kept", log=True, text=_thousands),
        Axis("share covered", text=percent_text),
        marker,
    )
    return standalone(chart)


def _thousands(value: float) -> str:
    """A tick's label, short enough for its neighbours."""
    return f"{value:g}" if value < 1000 else f"{value / 1000:g}k"
