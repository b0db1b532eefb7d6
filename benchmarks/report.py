"""Results as tables for a terminal, as Markdown for docs/performance.md, and as JSON."""

from __future__ import annotations

import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import Variant
from benchmarks.parts import Comparison
from benchmarks.shapes import PUBLISHED

BASELINE = "field"
MARKERS = ("<!-- results: begin -->", "<!-- results: end -->")
COLUMNS = (
    "variant",
    "ms",
    "field ÷ it",
    "÷ bound",
    "MiB",
    "÷ field",
    "notes",
)
Row = dict[str, Any]


def machine() -> dict[str, Any]:
    """Return what the numbers depend on."""
    return {
        "cpu": _cpu_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "blas": "mkl" if torch.backends.mkl.is_available() else "other",
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe_machine(facts: dict[str, Any]) -> str:
    """Write the machine in a line."""
    return (
        f"{facts['cpu']}, {facts['threads']} threads, torch {facts['torch']}, "
        f"Python {facts['python']}, BLAS {facts['blas']}, {facts['dtype']}"
    )


def summarise(comparison: Comparison) -> dict[str, Any]:
    """Turn a measured comparison into plain numbers, for JSON and the tables.

    Ratios are of medians within this run. `value_difference` is the largest relative difference of
    a variant's value (its loss) from the first variant's: all must compute the same thing.
    """
    by_name = {variant.name: variant for variant in comparison.variants}
    values = [v.value for v in comparison.variants if v.value is not None]
    return {
        "part": comparison.part,
        "case": comparison.case,
        "shape": comparison.shape,
        "value_difference": max(abs(value - values[0]) / abs(values[0]) for value in values),
        "variants": [_row(variant, by_name, comparison) for variant in comparison.variants],
        "products": {
            name: [asdict(product) for product in listed]
            for name, listed in comparison.products.items()
        },
    }


def _row(variant: Variant, by_name: dict[str, Variant], comparison: Comparison) -> Row:
    baseline = by_name.get(BASELINE)
    of_work = not (variant.aside or variant.products)
    bound = by_name[variant.bound].median if variant.bound else None
    listed = comparison.products.get(variant.name, [])
    flop = sum(product.flop for product in listed)
    title = f"{comparison.part} {comparison.case}"
    against = baseline if of_work and baseline is not variant else None
    return {
        "name": variant.name,
        "milliseconds": variant.median,
        "all_milliseconds": variant.milliseconds,
        "times_faster_than_field": against.median / variant.median if against else None,
        "bound": variant.bound,
        "of_products": variant.median / bound if bound else None,
        "peak_bytes": variant.peak_bytes,
        "of_fields_peak": _share(variant.peak_bytes, against.peak_bytes) if against else None,
        "gflop": flop / 1e9 if listed else None,
        "gflop_per_second": flop / 1e6 / variant.median if listed else None,
        "milliseconds_in_the_notes": PUBLISHED.get((title, variant.name)),
    }


def _share(peak: int | None, baseline: int | None) -> float | None:
    return peak / baseline if peak is not None and baseline else None


def cells(row: Row) -> tuple[str, ...]:
    """Write one variant's row, a cell per column."""
    peak = row["peak_bytes"]
    return (
        row["name"],
        _number(row["milliseconds"]),
        _number(row["times_faster_than_field"], "×", 2),
        _number(row["of_products"], "", 2),
        _number(None if peak is None else peak / 2**20),
        _number(row["of_fields_peak"], "", 2),
        row["milliseconds_in_the_notes"] or "",
    )


def _number(value: float | None, unit: str = "", digits: int | None = None) -> str:
    if value is None:
        return ""
    if digits is None:
        digits = 0 if value >= 100 else 1
    return f"{value:,.{digits}f}{unit}"


def title_of(summary: dict[str, Any]) -> str:
    """Write a comparison's title with its sizes."""
    flat: dict[str, Any] = {}
    for name, value in summary["shape"].items():
        flat |= value if isinstance(value, dict) else {name: value}
    short = {
        "hidden": "H",
        "draft_vocab": "K",
        "vocab": "V",
        "sequence": "S",
        "anchors": "N",
        "block": "γ",
        "rank": "r",
        "evaluated_slots": "slots",
        "covered_positions": "positions",
    }
    sizes = ", ".join(f"{short.get(k, k.replace('_', ' '))} {v}" for k, v in flat.items())
    return f"{summary['part']} {summary['case']} ({sizes})"


def print_comparison(summary: dict[str, Any], console: Console) -> None:
    """Print one comparison's table and the products of its bounds."""
    table = Table(title=title_of(summary), title_justify="left", title_style="bold")
    for index, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if index else "left", no_wrap=index == 0)
    for row in summary["variants"]:
        table.add_row(*cells(row))
    console.print(table)
    difference = summary["value_difference"]
    console.print(f"  all compute the same value, to {difference:.1e} relative", highlight=False)
    for row in summary["variants"]:
        for line in _product_lines(summary, row):
            console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)
    console.print()


def _product_lines(summary: dict[str, Any], row: Row) -> list[str]:
    listed = summary["products"].get(row["name"])
    if not listed:
        return []
    head = (
        f"{row['name']}: {row['gflop']:.4g} GFLOP at {row['gflop_per_second']:,.0f} GFLOP/s "
        "(product: m × k × n, how many, GFLOP of all)"
    )
    lines = [head]
    for product in listed:
        sizes = " × ".join(f"{product[axis]:,.0f}" for axis in "mkn")
        gflop = product["flop"] / 1e9
        lines.append(f"  {product['name']}: {sizes}, {product['count']:,}, {gflop:.3g}")
    return lines


def markdown(report: dict[str, Any]) -> str:
    """Write the tables of a report as Markdown, products last."""
    where = describe_machine(report["machine"])
    lines = [f"`{report['command']}`", "", f"{where}; medians of {report['repeats']} rounds."]
    for summary in report["comparisons"]:
        lines += ["", f"**{title_of(summary)}**", ""]
        lines.append("| " + " | ".join(COLUMNS) + " |")
        lines.append("|---" + "|---:" * (len(COLUMNS) - 1) + "|")
        lines += ["| " + " | ".join(cells(row)) + " |" for row in summary["variants"]]
        lines += ["", f"All compute the same value, to {summary['value_difference']:.1e} relative."]
    lines += ["", "### The products of each bound", ""]
    for summary in report["comparisons"]:
        lines.append(f"- {summary['part']} {summary['case']}")
        for row in summary["variants"]:
            found = _product_lines(summary, row)
            lines += [f"    - {found[0]}"] if found else []
            lines += [f"        - {line.strip()}" for line in found[1:]]
    return "\n".join(lines)


def between_markers(document: str, results: str) -> str:
    """Replace what stands between a document's two markers.

    >>> begin, end = MARKERS
    >>> print(between_markers(f"top {begin} old {end} bottom", "new"))
    top <!-- results: begin -->
    new
    <!-- results: end --> bottom

    Raises ValueError when a marker is missing.
    """
    head, begin, rest = document.partition(MARKERS[0])
    _, end, tail = rest.partition(MARKERS[1])
    if not (begin and end):
        raise ValueError(f"it needs the lines {MARKERS[0]} and {MARKERS[1]}")
    return f"{head}{begin}\n{results}\n{end}{tail}"
