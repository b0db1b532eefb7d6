"""A rehearsal's report as one HTML file: verdict, memory timeline, and the sections' tables.

The page needs nothing else: its style and its chart are inside it, it loads nothing and runs no
script.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_port.data.atomic import atomic_file
from torch_port.drawing.areas import Layer, Limit, Span, stacked_chart
from torch_port.drawing.style import CHARTS, COLOURS
from torch_port.drawing.svg import Axis
from torch_port.drawing.text import escape, percent, size
from torch_port.rehearsal.operators import short
from torch_port.rehearsal.printing import (
    card,
    collectives_headline,
    made_at,
    memory_headline,
    operations_headline,
    operators_headline,
    placement_headline,
    tera,
    verdict_lines,
)
from torch_port.rehearsal.report import FORMAT, KINDS

HELD = 24  # rows of what is alive at the peak
# Okabe and Ito's, as `drawing.style` has them; layers that touch differ in lightness too.
_LAYERS = """
.parameters { color: #0067a8; } .frozen { color: #62b8ee; } .optimizer { color: #00785a; }
.gradients { color: #e8b84a; } .batch { color: #949ca9; } .saved { color: #bf4f00; }
.temporaries { color: #e59cc6; }
svg .area { fill: currentColor; fill-opacity: 0.85; }
svg .limit { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 6 4; }
svg .hit:hover { fill: var(--ink); fill-opacity: 0.06; }
"""
_PAGE = """
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, Arial, sans-serif; }
main { max-width: 1160px; margin: 0 auto; padding: 36px 20px 48px; }
h1 { margin: 0; font-size: 26px; } h2 { margin: 36px 0 8px; font-size: 19px; }
p { margin: 4px 0; } p.soft, caption, dt { color: var(--soft); }
.good { color: var(--good); } .bad { color: var(--bad); }
p.verdict { font-size: 20px; font-weight: 600; }
figure, .table { margin: 12px 0 0; padding: 14px 16px; background: var(--card);
  border: 1px solid var(--edge); border-radius: 10px; overflow-x: auto; }
figure svg { display: block; width: 100%; height: auto; }
.legend span { margin-right: 18px; white-space: nowrap; font-size: 13px; }
.legend i { display: inline-block; width: 11px; height: 11px; margin-right: 6px;
  background: currentColor; border-radius: 2px; } .legend b { color: var(--ink); font-weight: 400; }
table { width: 100%; border-collapse: collapse; font-size: 13.5px; }
th, td { padding: 4px 14px 4px 0; text-align: left; white-space: nowrap;
  font-variant-numeric: tabular-nums; }
thead th { color: var(--soft); font-weight: 600; } tbody tr { border-top: 1px solid var(--edge); }
td.wide { white-space: normal; min-width: 320px; } .number { text-align: right; }
details { margin-top: 10px; } summary { cursor: pointer; color: var(--soft); }
"""
_STYLES = {
    "parameters": "parameters",
    "frozen target tensors": "frozen",
    "optimizer state": "optimizer",
    "gradients": "gradients",
    "batch": "batch",
    "saved activations": "saved",
    "temporaries": "temporaries",
}


def write_page(report: Mapping[str, Any], path: Path) -> None:
    """Write a report of `report_of` as one HTML file, completely or not at all."""
    assert report["format"] == FORMAT
    with atomic_file(path) as stream:
        stream.write(page(report).encode())


def page(report: Mapping[str, Any]) -> str:
    """Return the page's HTML."""
    facts = [f"{name} {value}" for name, value in report["run"].items()]
    title = "Rehearsal of a training run"
    lines = [line.plain for line in verdict_lines(report)]
    good = report["verdict"]["fits"], not report["verdict"]["wrong"]
    verdict = "".join(
        f'<p class="verdict {"good" if is_good else "bad"}">{escape(line)}</p>'
        for line, is_good in zip(lines, good, strict=True)
    )
    body = (
        f"<header><h1>{title}</h1><p class='soft'>{escape(' · '.join(facts))}</p></header>"
        f"{verdict}{_memory(report)}{_placement(report)}{_operators(report)}"
        f"{_collectives(report)}{_operations(report)}{_made(report)}"
    )
    style = COLOURS + _PAGE + CHARTS + _LAYERS
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{style}</style></head><body><main>{body}</main></body></html>\n"
    )


def _section(name: str, line: str, *parts: str) -> str:
    return f"<h2>{name}</h2><p>{escape(line)}</p>{''.join(parts)}"


def _memory(report: Mapping[str, Any]) -> str:
    memory = report["memory"]
    held = _table(
        ("bytes", "count", "what for", "shape", "dtype", "operator", "made at", "phase"),
        (
            (
                size(row["bytes"]),
                row["count"],
                row["category"],
                "×".join(str(n) for n in row["shape"]),
                row["dtype"],
                short(row["name"]),
                made_at(row),
                row["phase"],
            )
            for row in memory["held"][:HELD]
        ),
        numbers=2,
    )
    return _section(
        "Memory",
        memory_headline(report),
        f"<figure>{timeline(report)}{_legend(memory)}</figure>",
        f"<details open><summary>Alive at the peak</summary>{held}</details>",
    )


def timeline(report: Mapping[str, Any]) -> str:
    """Return the chart of what is allocated over both steps, by category, in GiB."""
    memory, verdict = report["memory"], report["verdict"]
    points = memory["timeline"]
    layers = [
        Layer(category, _STYLES[category], [p["bytes"][category] / 2**30 for p in points])
        for category in memory["by_category"]
    ]
    limits = [
        Limit(verdict["usable_bytes"] / 2**30, f"{size(verdict['usable_bytes'])} usable"),
    ]
    if memory["peak"] < verdict["usable_bytes"] / 20:
        limits = []  # of a toy nothing would be seen below the card's line
    return stacked_chart(
        "Memory over two steps",
        f"Allocated memory by category; {memory_headline(report)}.",
        [float(p["operator"]) for p in points],
        layers,
        limits,
        _spans(points, memory["by_phase"]),
        Axis("GiB allocated"),
    )


def _spans(points: Sequence[Mapping[str, Any]], peaks: Mapping[str, int]) -> list[Span]:
    """Put points of one phase together; its note is the phase's peak.

    A phase that was left does not come back: sharding fills places that were made in the set-up.
    """
    spans: list[Span] = []
    for point in points:
        phase, x = point["phase"], float(point["operator"])
        if any(span.name == phase for span in spans):
            phase = spans[-1].name
        if spans and spans[-1].name == phase:
            spans[-1] = Span(spans[-1].start, x, phase, spans[-1].note)
        else:
            if spans:
                before = spans[-1]
                spans[-1] = Span(before.start, x, before.name, before.note)
            spans.append(Span(x, x, phase, f"(peak {size(peaks.get(phase, 0))})"))
    return spans


def _legend(memory: Mapping[str, Any]) -> str:
    entries = (
        f'<span class="{_STYLES[category]}"><i></i><b>{escape(category)} {size(held)}</b></span>'
        for category, held in memory["by_category"].items()
    )
    return f'<p class="legend">At the peak: {"".join(entries)}</p>'


def _placement(report: Mapping[str, Any]) -> str:
    return _section("Placement", placement_headline(report), _findings(report, "placement"))


def _operators(report: Mapping[str, Any]) -> str:
    rows = (
        (o["count"], short(o["name"]), o["kind"], ", ".join(o["dtypes"]), o["where"])
        for o in report["operators"]["all"]
    )
    table = _table(("count", "operator", "on the NPU", "dtypes", "first line"), rows, numbers=1)
    return _section(
        "Operators",
        operators_headline(report),
        _findings(report, "operators"),
        f"<details><summary>Every operator of the second step</summary>{table}</details>",
    )


def _collectives(report: Mapping[str, Any]) -> str:
    rows = (
        (r["count"], size(r["bytes"]), r["name"], r["dtype"], r["group"], r["phase"], r["where"])
        for r in report["collectives"]
    )
    columns = ("count", "bytes", "collective", "dtype", "group", "phase", "first line")
    table = _table(columns, rows, numbers=2) if report["collectives"] else ""
    return _section(
        "Collectives", collectives_headline(report), _findings(report, "collectives"), table
    )


def _operations(report: Mapping[str, Any]) -> str:
    operations = report["operations"]
    total = operations["products"] or 1
    rows = (
        (tera(c["products"]), percent(c["products"] / total), f"{c['elements'] / 1e9:.2f}", part)
        for part, c in operations["parts"].items()
    )
    columns = ("TFLOP of products", "share", "10⁹ element operations", "part")
    return _section("Operations", operations_headline(report), _table(columns, rows, numbers=3))


def _findings(report: Mapping[str, Any], section: str) -> str:
    kinds = KINDS[section]
    rows = [
        (finding, wrong)
        for name, wrong in (("findings", True), ("noted", False))
        for finding in report[name]
        if finding["kind"] in kinds
    ]
    if not rows:
        return ""
    cells = "".join(
        f'<tr><td class="{"bad" if wrong else ""}">{escape(f["kind"])}</td>'
        f"<td>{escape(f['where'])}</td><td class='number'>{f['count']}</td>"
        f'<td class="wide">{escape(f["text"])}</td></tr>'
        for f, wrong in rows
    )
    head = "<tr><th>finding</th><th>line</th><th class='number'>calls</th><th></th></tr>"
    return f'<div class="table"><table><thead>{head}</thead><tbody>{cells}</tbody></table></div>'


def _table(columns: Sequence[str], rows: Iterable[Sequence[object]], numbers: int) -> str:
    """A table whose first `numbers` columns are numbers."""

    def line(tag: str, cells: Sequence[object]) -> str:
        marked = (
            f'<{tag} class="{"number" if i < numbers else ""}">{escape(cell)}</{tag}>'
            for i, cell in enumerate(cells)
        )
        return f"<tr>{''.join(marked)}</tr>"

    body = "".join(line("td", row) for row in rows)
    head = line("th", columns)
    return f'<div class="table"><table><thead>{head}</thead><tbody>{body}</tbody></table></div>'


def _made(report: Mapping[str, Any]) -> str:
    ranks = report["world_size"]
    return (
        f"<h2>How this was made</h2><p class='soft'>Two optimizer steps on a virtual "
        f"{escape(report['device'])} of {card(report)}, rank 0 of "
        f"{ranks}; {report['operators']['dispatched']:,} operators in {report['seconds']:.0f} s. "
        "No kernel ran: what a kernel needs beside its tensors, how the allocator's memory "
        "fragments and how long anything takes are not known.</p>"
    )
