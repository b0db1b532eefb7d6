"""`python -m benchmarks.step`: the training step's parts against the baseline and their bound."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from benchmarks.parts import Comparison


class Part(StrEnum):
    """What is measured."""

    OBJECTIVE = "objective"
    ATTENTION = "attention"
    STEP = "step"


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    compare: Annotated[
        bool,
        typer.Option(
            "--compare/--alone",
            help="With the baseline and the plain and dense forms, or the port's defaults alone.",
        ),
    ] = True,
    only: Annotated[Part | None, typer.Option(help="One part; without it all three.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds whose median is taken.")] = 5,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write every number here.")
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="Put the tables between this document's markers."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Toy sizes: does it run? The numbers mean nothing.")
    ] = False,
) -> None:
    """Measure objective, attention and whole step: forward and backward, float32, on the CPU.

    Variants are alternated in one process and compared by their medians; peak memory is that of
    live tensors, traced in a pass of its own, above inputs and parameters. Takes minutes; keep the
    machine idle meanwhile.

    Exit status: 0 whatever the numbers are; 2 for bad options.

    Example: python -m benchmarks.step --compare --json results.json
    """
    console = Console()
    if docs is not None:
        _check_docs(docs)
    if json_path is not None and not json_path.parent.is_dir():
        raise typer.BadParameter(
            f"{json_path}: its directory does not exist; make it first", param_hint="--json"
        )
    report = _run([only] if only else list(Part), compare, repeats, quick, console)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if docs is not None:
        from benchmarks.report import between_markers, markdown

        text = between_markers(docs.read_text(encoding="utf-8"), markdown(report))
        docs.write_text(text, encoding="utf-8")


def _check_docs(docs: Path) -> None:
    """Refuse a document without markers before the minutes are spent."""
    from benchmarks.report import between_markers

    try:
        between_markers(docs.read_text(encoding="utf-8"), "")
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{docs}: {error}", param_hint="--docs") from None


def _run(
    parts: list[Part], compare: bool, repeats: int, quick: bool, console: Console
) -> dict[str, Any]:
    # Imported here: they bring torch, and --help should be fast.
    from benchmarks import shapes
    from benchmarks.parts import comparisons
    from benchmarks.report import describe_machine, machine, print_comparison

    chosen: dict[Part, dict[str, Any]] = {
        Part.OBJECTIVE: dict(shapes.QUICK_OBJECTIVE if quick else shapes.OBJECTIVE),
        Part.ATTENTION: dict(shapes.QUICK_ATTENTION if quick else shapes.ATTENTION),
        Part.STEP: dict(shapes.QUICK_STEP if quick else shapes.STEP),
    }
    facts = machine()
    console.print(describe_machine(facts), highlight=False, soft_wrap=True)
    summaries = []
    for part in parts:
        for make in comparisons(part, chosen[part], alone=not compare):
            summaries.append(_measured(make, repeats, console))
            print_comparison(summaries[-1], console)
    return {
        "command": shlex.join(["python", "-m", "benchmarks.step", *sys.argv[1:]]),
        "machine": facts,
        "quick": quick,
        "repeats": repeats,
        "comparisons": summaries,
    }


def _measured(make: Callable[[], Comparison], repeats: int, console: Console) -> dict[str, Any]:
    """Make a comparison, measure it, and keep its numbers only: its inputs go with it."""
    from benchmarks.measure import measure
    from benchmarks.report import summarise
    from torch_port.progress import stage

    comparison = make()
    name = f"{comparison.part} {comparison.case}"
    with stage(name, len(comparison.variants) * (repeats + 1), console) as shown:
        measure(comparison.variants, repeats, shown.update)
    return summarise(comparison)


if __name__ == "__main__":
    # As the torch-port command sets it, for the same reason; read at torch's import.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    app(prog_name="python -m benchmarks.step")
