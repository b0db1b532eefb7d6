"""`parity judge`: an implementation, through its adapter, against conformance vectors."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from parity.adapter import Unavailable, load_adapter
from parity.cases import Case, CaseError, list_cases, read_case
from parity.judge import judge_case
from parity.judge_mutants import mutant_lines, run_mutants
from parity.judge_report import (
    document,
    exit_status,
    legend,
    markdown,
    summary,
    table,
    unjudged,
    unseen,
)
from parity.judge_verdicts import CaseVerdict


def judge_command(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of vectors.")],
    implementation: Annotated[
        str,
        typer.Option(
            metavar="MODULE:OBJECT",
            help="An adapter or what makes one; ready ones: torch_port, jaxdraft, speculators, "
            "specforge.",
        ),
    ],
    mutants: Annotated[
        bool, typer.Option("--mutants", help="Then show it faulty inputs: each must be seen.")
    ] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", help="Write everything found here.")
    ] = None,
    markdown_path: Annotated[
        Path | None, typer.Option("--markdown", help="Write the conformance table here.")
    ] = None,
) -> None:
    """Judge any implementation (torch, JAX, NumPy) by conformance vectors, stage by stage.

    A number that differs is another convention where a known one explains it, else a fault, named
    by the first stage that differs. docs/judge.md says how to write an adapter.

    Exit status: 0 conforms, or differs by what it declares; 1 a fault, or a convention that is not
    declared, or a mutant that is not seen; 2 cannot run, or nothing was judged.

    Example: parity judge --implementation examples.numpy_adapter:NumpyDraft tests/vectors
    """
    console = Console()
    try:
        adapter: Any = load_adapter(implementation)
        cases = [read_case(path) for path in list_cases(directory)]
        verdicts = list(_judged(adapter, cases))
    except Unavailable as reason:
        _stop(f"skipped: {reason}")
    except (CaseError, ValueError) as error:
        _stop(str(error))
    console.print(table(verdicts), markup=False)
    _print(console, [f"{i}: {text}" for i, text in enumerate(legend(verdicts), 1)])
    _print(console, [f"declared, not visible: {text}" for text in unseen(adapter, verdicts)])
    _print(console, [f"not judged: {text}" for text in unjudged(verdicts)])
    found = run_mutants(adapter, cases) if mutants else []
    lines = mutant_lines(found) if mutants else []
    _print(console, [summary(adapter, verdicts), *lines])
    if json_path is not None:
        said = document(adapter, verdicts)
        if mutants:
            said["mutants"] = [vars(v) for v in found]
        json_path.write_text(json.dumps(said, indent=1, ensure_ascii=False) + "\n", "utf-8")
    if markdown_path is not None:
        markdown_path.write_text(markdown(adapter, verdicts, lines), "utf-8")
    status = exit_status(verdicts)
    if status == 0 and any(v.applied and v.case is None for v in found):
        status = 1
    raise typer.Exit(status)


def _judged(adapter: Any, cases: list[Case]) -> Iterator[CaseVerdict]:
    """Judge one case after the other, with a line now and then where that takes long."""
    last = time.monotonic()
    for done, case in enumerate(cases):
        if time.monotonic() - last > 10:
            last = time.monotonic()
            Console(stderr=True).print(f"{done}/{len(cases)} cases", highlight=False)
        yield judge_case(adapter, case)


def _print(console: Console, lines: list[str]) -> None:
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False, markup=False)


def _stop(message: str) -> NoReturn:
    Console(stderr=True).print(f"Error: {message}", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(2)
