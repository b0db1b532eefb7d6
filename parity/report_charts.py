"""The two charts of the suite's report: errors beside their limits, and growth over training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch_port.drawing.svg import Axis, Scale, Series, line_chart
from torch_port.drawing.text import escape, power_text

_WIDTH, _LEFT, _RIGHT, _ROW, _TOP = 960, 110, 30, 30, 26
_LOW, _HIGH = 1e-17, 1e1  # what is 0 stands at the low end, what is no number at the high one
# Direct labels have room for a dozen letters.
_SHORT = {
    "pruned-vanilla": "DSpark",
    "dflash-pruned": "DFlash",
    "dpace-both": "D-PACE",
    "eagle3-pruned": "EAGLE3",
    "dflash-pruned, spikes": "with spikes",
}
_STYLES = ("pruned", "full", "coverage", "parity", "untrained")


def closeness_chart(checks: Sequence[Mapping[str, Any]]) -> str:
    """A row per check: its configurations' worst errors as dots, its tolerances as ticks."""
    shown = [check for check in checks if check["configurations"]]
    if not shown:
        return '<p class="empty">Nothing was compared.</p>'
    height = _TOP + _ROW * len(shown) + 34
    across = Scale(_LOW, _HIGH, _LEFT, _WIDTH - _RIGHT, log=True)
    floor = _TOP + _ROW * len(shown)
    parts = []
    for power in range(-16, 2, 2):
        x = f"{across(10.0**power):.1f}"
        parts.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{_TOP - 6}" y2="{floor}"/>')
        parts.append(
            f'<text text-anchor="middle" x="{x}" y="{floor + 16}">{power_text(10.0**power)}</text>'
        )
    for number, check in enumerate(shown):
        parts.append(_row(check, across, _TOP + _ROW * number + _ROW / 2))
    parts.append(f'<text text-anchor="middle" x="{across(1e-8):.0f}" y="{height - 2}">error</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" viewBox="0 0 {_WIDTH} {height}">'
        "<title>Worst errors beside their tolerances</title>"
        f"<desc>One row per check, logarithmic.</desc>{''.join(parts)}</svg>"
    )


def _row(check: Mapping[str, Any], across: Scale, y: float) -> str:
    end = across(_HIGH)
    entries = check["configurations"]
    limits = sorted({entry["tolerance"] for entry in entries.values() if entry["tolerance"]})
    parts = [
        f'<text class="row" text-anchor="end" x="{_LEFT - 14}" y="{y + 4:.1f}">'
        f"{escape(check['name'])}</text>",
        f'<line class="rail" x1="{_LEFT}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>',
    ]
    if limits:
        least = across(limits[0])
        parts.append(
            f'<line class="over" x1="{least:.1f}" x2="{end:.1f}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    for limit in limits:
        x = f"{across(limit):.1f}"
        parts.append(
            f'<line class="limit" x1="{x}" x2="{x}" y1="{y - 8:.1f}" y2="{y + 8:.1f}">'
            f"<title>tolerance {limit:.1e}</title></line>"
        )
    for name, entry in entries.items():
        worst = math.inf if entry["worst"] is None else entry["worst"]
        at = across(min(max(worst, _LOW), _HIGH))
        style = "call" if entry["agrees"] else "miss"
        tip = escape(f"{name}: {worst:.1e} of {entry['tolerance']:.0e}, {entry['cases']} cases")
        parts.append(
            f'<circle class="{style}" cx="{at:.1f}" cy="{y:.1f}" r="5">'
            f"<title>{tip}</title></circle>"
        )
    return "".join(parts)


def growth_chart(curves: Mapping[str, Sequence[float]]) -> str:
    """A line per training run: the worst parameter's error after each step."""
    lines = [
        Series(
            _SHORT.get(name, name[:12]),
            [(float(step), max(error, 1e-17)) for step, error in enumerate(values, start=1)],
            _STYLES[number % len(_STYLES)],
            f"{values[-1]:.0e} at last" if values else "",
            number % 2 == 1,
        )
        for number, (name, values) in enumerate(curves.items())
    ]
    return line_chart(
        "Error growth over training steps",
        "The worst parameter's error after each step, one line per run.",
        lines,
        Axis("step", whole=True),
        Axis("difference", log=True, text=power_text),
        None,
    )
