"""A rehearsal's report on the terminal: the verdict, then a section for each question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_port.drawing.text import percent, size
from torch_port.rehearsal.operators import short
from torch_port.rehearsal.report import FORMAT, KINDS

BAR = 24  # characters of a category's bar
HELD = 6  # of the tensors that are alive at the peak


def show(report: Mapping[str, Any], console: Console) -> None:
    """Print a report of `report_of`; it fits 100 columns."""
    assert report["format"] == FORMAT
    for line in verdict_lines(report):
        console.print(line)
    _heading(console, "Memory", memory_headline(report))
    console.print(_memory(report["memory"]))
    console.print(_held(report["memory"]["held"]))
    _heading(console, "Placement", placement_headline(report))
    _findings(console, report, "placement")
    _heading(console, "Operators", operators_headline(report))
    _findings(console, report, "operators")
    _heading(console, "Collectives", collectives_headline(report))
    if report["collectives"]:
        console.print(_collectives(report["collectives"]))
    _findings(console, report, "collectives")
    _heading(console, "Operations", operations_headline(report))
    console.print(_operations(report["operations"]))


def verdict_lines(report: Mapping[str, Any]) -> list[Text]:
    """Return what to know first: whether it fits, and whether it runs as it is."""
    verdict = report["verdict"]
    fits, free = verdict["fits"], verdict["free_bytes"]
    room = f"{size(free)} free" if fits else f"{size(-free)} too much"
    where = f"fits in {card(report)} less {100 * verdict['margin']:.0f} %"
    wrong = verdict["wrong"]
    runs = "yes" if not wrong else f"no, {wrong} finding{'s' if wrong > 1 else ''} below"
    return [
        Text.assemble(f"{where}: ", _answer("yes" if fits else "no", fits), f", {room}"),
        Text.assemble("runs on the device as it is: ", _answer(runs, not wrong)),
    ]


def _answer(text: str, good: bool) -> tuple[str, str]:
    return text, "bold green" if good else "bold red"


def _heading(console: Console, name: str, line: str) -> None:
    console.print()
    console.print(Text.assemble((name, "bold"), f"  {line}"))


def card(report: Mapping[str, Any]) -> str:
    """Return a card's memory, as in "64 GiB"."""
    return f"{report['verdict']['hbm_bytes'] / 2**30:.4g} GiB"


def memory_headline(report: Mapping[str, Any]) -> str:
    """Return the peak and where it is reached."""
    memory = report["memory"]
    return (
        f"peak {size(memory['peak'])} per rank in {memory['phase']}, "
        f"{short(memory['name'])} at {memory['where']}"
    )


def _memory(memory: Mapping[str, Any]) -> Table:
    table = _table("", "at the peak", "", "share")
    peak = memory["peak"] or 1
    for category, held in memory["by_category"].items():
        if held:
            bar = "█" * max(1, round(BAR * held / peak))
            table.add_row(category, size(held), bar, percent(held / peak))
    table.add_row("between steps", size(memory["persistent"]), "", "", style="dim")
    if memory["host"]:
        table.add_row("host memory", size(memory["host"]), "", "", style="dim")
    return table


def _held(held: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("largest at the peak", "count", "shape", "dtype", "made at")
    for row in held[:HELD]:
        shape = "×".join(str(n) for n in row["shape"])
        table.add_row(
            Text(f"{size(row['bytes'])} {row['category']}"),
            str(row["count"]),
            shape,
            row["dtype"],
            Text(made_at(row)),
        )
    return table


def made_at(row: Mapping[str, Any]) -> str:
    """Return where a tensor was made; before the steps the line says nothing."""
    return "set-up" if row["phase"] == "set-up" else row["where"]


def placement_headline(report: Mapping[str, Any]) -> str:
    """Return whether every tensor of a step is on the device."""
    found = [f for f in report["findings"] if f["kind"] in KINDS["placement"]]
    if found:
        return f"{len(found)} wrong"
    syncs = sum(f["count"] for f in report["noted"] if f["kind"] == "sync")
    return f"every tensor of a step is on the device; {syncs} documented syncs in two steps"


def operators_headline(report: Mapping[str, Any]) -> str:
    """Return how many operators a step has, by what becomes of them."""
    operators = report["operators"]
    calls, distinct = operators["calls"], operators["distinct"]
    told = [f"{calls[kind]:,} {kind} ({distinct[kind]})" for kind in calls]
    total = sum(calls.values())
    dtypes = ", ".join(sorted(operators["dtypes"]))
    return f"{total:,} calls in a step: {', '.join(told)}; dtypes {dtypes}"


def collectives_headline(report: Mapping[str, Any]) -> str:
    """Return how many collectives a step has, and their bytes."""
    rows = report["collectives"]
    if not rows:
        return "none: one rank"
    total = sum(row["bytes"] for row in rows)
    count = sum(row["count"] for row in rows)
    return f"{count} in a step over {report['world_size']} ranks, {size(total)}"


def _collectives(rows: Sequence[Mapping[str, Any]]) -> Table:
    groups = len({row["group"] for row in rows}) > 1
    names = ("collective", "count", "bytes", "dtype", *(["group"] if groups else []), "phase")
    table = _table(*names, "first line")
    for row in rows:
        cells = (row["dtype"], *([row["group"]] if groups else []), row["phase"], row["where"])
        sent = size(row["bytes"]) if row["bytes"] >= 1024 else f"{row['bytes']} B"
        table.add_row(row["name"], str(row["count"]), sent, *(Text(c) for c in cells))
    return table


def operations_headline(report: Mapping[str, Any]) -> str:
    """Return a step's operations, and what the field's form of it would have spent."""
    operations = report["operations"]
    text = f"{tera(operations['products'])} TFLOP of products in a step"
    naive = operations["naive_products"]
    if not naive:
        return text
    share = operations["products"] / naive
    return (
        f"{text}: {percent(share)} of the {tera(naive)} that a dense mask with everything "
        "recomputed would spend"
    )


def _operations(operations: Mapping[str, Any]) -> Table:
    table = _table("part", "TFLOP", "", "share", "elements")
    total = operations["products"] or 1
    for part, counted in operations["parts"].items():
        share = counted["products"] / total
        bar = "█" * round(BAR * share)
        cells = (
            tera(counted["products"]),
            bar,
            percent(share),
            f"{counted['elements'] / 1e9:.2f} G",
        )
        table.add_row(part, *cells)
    return table


def tera(operations: int) -> str:
    """Return operations in units of 10¹², with three digits or so.

    >>> tera(123_456_000_000_000), tera(1_234_000_000)
    ('123', '0.00123')
    """
    value = operations / 1e12
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _findings(console: Console, report: Mapping[str, Any], section: str) -> None:
    """Print a section's findings, the wrong ones in full and the noted ones in a line."""
    for finding in report["findings"]:
        if finding["kind"] in KINDS[section]:
            head = f"  {finding['kind']} "
            times = f" ({finding['count']} calls)" if finding["count"] > 1 else ""
            console.print(
                Text.assemble((head, "bold red"), (finding["where"], "bold"), f"{times}\n    "),
                Text(finding["text"]),
                sep="",
                soft_wrap=True,
            )
    remarks: dict[str, dict[str, None]] = {}
    for finding in report["noted"]:
        if finding["kind"] in KINDS[section]:
            remark = f"{finding['kind']}, {finding['text'].split('; ')[-1]}"
            remarks.setdefault(remark, {})[finding["where"]] = None
    for remark, places in remarks.items():
        console.print(Text(f"  {remark}: {', '.join(places)}", style="dim"))


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    numbers = ("at the peak", "share", "count", "bytes", "TFLOP", "elements")
    places = ("made at", "first line")  # a narrow terminal folds them: cut, they say nothing
    for name in columns:
        table.add_column(
            name,
            justify="right" if name in numbers else "left",
            no_wrap=name not in places,
            overflow="fold",
        )
    return table
