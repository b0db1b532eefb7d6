"""`parity mutants`: the command, its progress and its report on the terminal."""

from __future__ import annotations

import enum
import importlib.util
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from parity.checks.base import CHECKS
from parity.mutant_catalogue import Mutant, catalogue, check_fresh, markdown
from parity.mutants import Verdict, run_mutants, write_report


class MutantSide(enum.StrEnum):
    """The implementation that a fault is put into."""

    spec = "spec"
    port = "port"


def mutants_command(
    only: Annotated[
        list[str] | None, typer.Option("--only", help="A mutant by its name; repeatable.")
    ] = None,
    side: Annotated[MutantSide | None, typer.Option(help="The faults of one side.")] = None,
    out: Annotated[Path | None, typer.Option(help="Directory for mutants.json.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at a time.")] = 2,
    others: Annotated[
        bool,
        typer.Option(
            "--others/--no-others",
            help="Run the whole suite on a mutant that its own checks do not see.",
        ),
    ] = True,
    as_list: Annotated[
        bool, typer.Option("--list", help="Print the catalogue as a Markdown table; run nothing.")
    ] = False,
) -> None:
    """Inject faults, one at a time, and see which check of the suite detects each.

    Every fault is put into one side's source while it is imported, in a process of its own; nothing
    on disk changes. The quick checks run one by one until one disagrees: first a mutant's own, on
    the configurations that matter to it, then the whole suite. What survives is an open finding.

    Exit status: 0 when every mutant is detected, 1 when one survives, 2 for a name that there is
    not, or a mutant whose source text is not there any more.

    Example: parity mutants --only label-shift --only guard-learns-from-spikes
    """
    chosen = _chosen(catalogue(), only or [], side)
    stale = check_fresh(chosen)
    if stale:
        _stop("stale mutants:\n" + "\n".join(stale))
    if as_list:
        print(markdown(chosen), end="")
        return
    if not all(map(importlib.util.find_spec, ("jax", "hypothesis"))):
        _stop('mutants need both sides and hypothesis; pip install "jaxdraft[parity]"')
    verdicts = _run(chosen, jobs, others)
    if out is not None:
        write_report(out, verdicts)
    raise typer.Exit(conclude(verdicts))


def conclude(verdicts: Sequence[Verdict]) -> int:
    """Print the open findings and the last line; return the exit status."""
    for verdict in verdicts:
        if verdict.detected_by is None:
            mutant = verdict.mutant
            print(
                f"open finding: {mutant.name} ({mutant.side}, {mutant.clause}) survives: "
                f"{mutant.what} [{verdict.note or 'no note'}]"
            )
    detected = sum(verdict.detected_by is not None for verdict in verdicts)
    print(f"{detected} of {len(verdicts)} mutants detected", flush=True)
    return 0 if detected == len(verdicts) else 1


def _chosen(
    mutants: tuple[Mutant, ...], only: Sequence[str], side: MutantSide | None
) -> tuple[Mutant, ...]:
    unknown = sorted(set(only) - {mutant.name for mutant in mutants})
    if unknown:
        _stop(f"--only {unknown[0]}: there is no such mutant; parity mutants --list shows them")
    chosen = tuple(
        m for m in mutants if (not only or m.name in only) and (side is None or m.side == side)
    )
    if not chosen:
        _stop(f"--only and --side {side} leave no mutant: the named ones are the other side's")
    return chosen


def _run(mutants: tuple[Mutant, ...], jobs: int, others: bool) -> list[Verdict]:
    console, done, started = Console(), list[Verdict](), time.monotonic()
    if not console.is_terminal:

        def told(verdict: Verdict) -> None:
            done.append(verdict)
            seen = verdict.detected_by or "SURVIVES"
            name, seconds = verdict.mutant.name, verdict.seconds
            # Flushed: into a pipe, minutes of work would look like none.
            print(f"{len(done)}/{len(mutants)} {name:<34} {seen:<12} {seconds:.1f} s", flush=True)

        verdicts = run_mutants(mutants, jobs, told, others)
        console.print(_table(verdicts, len(mutants), time.monotonic() - started))
        return verdicts
    with Live(_table([], len(mutants), 0.0), console=console) as live:

        def drawn(verdict: Verdict) -> None:
            done.append(verdict)
            live.update(_table(done, len(mutants), time.monotonic() - started))

        return run_mutants(mutants, jobs, drawn, others)


def _table(verdicts: Sequence[Verdict], total: int, seconds: float) -> Table:
    """Draw mutants by the check that saw them, and by side."""
    table = Table(title=f"{len(verdicts)} of {total} mutants examined, {seconds:.0f} s")
    table.add_column("seen by")
    for name in ("spec", "port", "seconds each"):
        table.add_column(name, justify="right")
    for check in (*CHECKS, None):
        of_check = [v for v in verdicts if v.detected_by == check]
        if not of_check:
            continue
        sides = [str(sum(v.mutant.side == side for v in of_check)) for side in ("spec", "port")]
        mean = sum(v.seconds for v in of_check) / len(of_check)
        table.add_row(check or "nothing: survives", *sides, f"{mean:.1f}")
    return table


def _stop(message: str) -> NoReturn:
    Console(stderr=True).print(f"Error: {message}", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(2)
