"""`parity run` and `parity replay`."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from parity.cases import CaseError
from parity.checks.base import CHECKS, CheckResult, Finding, Plan
from torch_port.errors import UserError
from torch_port.progress import stage

console = Console()


def run_command(
    quick: Annotated[
        bool, typer.Option("--quick", help="Few cases of each configuration.")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="CHECK", help="A check; repeatable.")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="Where the report and failing cases go.")
    ] = Path("runs/parity"),
    seed: Annotated[int, typer.Option(min=0, help="What the cases are drawn from.")] = 0,
    workers: Annotated[
        int, typer.Option(min=0, help="Processes that share the work; 0: this one alone.")
    ] = 2,
) -> None:
    """Compare both implementations: every check over all configurations.

    Writes DIR/report.html and DIR/report.json, and the failing cases below DIR/failures. Checks:
    vocabulary, blocks, losses, gradients, metrics, acceptance, decoding, training, checkpoints,
    precision. The exit status is 1 when something disagrees, 2 when nothing was run.

    Example: parity run --quick --only blocks --only losses
    """
    from parity.suite import run_suite

    names = _chosen(only)
    _need_packages()
    _check_out(out)
    plan = Plan(quick=quick, seed=seed, shrink=True)
    started = time.monotonic()
    _say(f"{len(names)} checks; the first minute goes to imports and compilation")
    with stage("parity", 1, console) as bar:
        suite = run_suite(
            plan,
            names,
            workers,
            # The longest tasks come first: of the first cases no time that is left can be told.
            lambda done, total, what: bar.update(done, what, total) if 50 * done > total else None,
            lambda found: _say(f"  FAIL {found.check}, {found.configuration}: {found.stage}"),
        )
    from parity.report import write_report

    commands = _save_findings(suite.findings, out)
    paths = write_report(suite, out, commands)
    for name, result in suite.results.items():
        _say(_line(name, result))
        for finding in _first_of_each(result.findings):
            _say(_told(finding, commands.get(id(finding))))
    cases, edges = suite.counts()
    agreeing = sum(result.agrees for result in suite.results.values())
    minutes, seconds = divmod(round(time.monotonic() - started), 60)
    spent = sum(result.seconds for result in suite.results.values())
    _say(f"report: {' '.join(map(str, paths))}; {spent:.0f} s of CPU in {workers or 1} processes")
    _say(
        f"{agreeing} of {len(suite.results)} checks agree: {cases:,} random cases and {edges} "
        f"edges, {len(suite.findings)} disagreements, {minutes}:{seconds:02d} min"
    )
    raise typer.Exit(0 if suite.agrees else 1)


def replay_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A case that `run` wrote.")],
) -> None:
    """Run a failing case again, every comparison in the order of the data flow.

    The exit status is 1 while the two disagree.

    Example: parity replay runs/parity/failures/losses-pruned-vanilla-7
    """
    from parity.replay import replay

    _need_packages()
    try:
        case, compared, measured = replay(file)
    except CaseError as error:
        raise UserError(str(error)) from None
    _say(f"{case.name}: found by {compared['check']} at {compared['stage']}")
    for each in measured:
        verdict = "FAIL" if each.fails else "ok  "
        _say(f"{verdict} {each.check:<11} {each.stage}  {each.error:.1e} ({_allowed(each)})")
    first = next((each for each in measured if each.fails), None)
    if first is None:
        _say(f"the two agree: {len(measured)} comparisons")
        raise typer.Exit(0)
    _say(f"{first.stage} is the first tensor that differs, {first.error:.1e} ({_allowed(first)})")
    raise typer.Exit(1)


def _allowed(each: object) -> str:
    tolerance = getattr(each, "tolerance", 0.0)
    return f"tolerance {tolerance:.0e}" if tolerance else "must be equal"


def _say(text: str) -> None:
    console.print(text, soft_wrap=True, highlight=False, markup=False)


def _chosen(only: list[str] | None) -> tuple[str, ...]:
    unknown = [name for name in only or [] if name not in CHECKS]
    if unknown:
        raise UserError(f"--only {unknown[0]}: no such check; there are {', '.join(CHECKS)}")
    return tuple(name for name in CHECKS if not only or name in only)


def _check_out(out: Path) -> None:
    """Refuse, before minutes of work, what a report could not be written to."""
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: is a file; name a directory")
    out.mkdir(parents=True, exist_ok=True)


def _need_packages() -> None:
    import importlib.util

    for name, what in (("jax", "the spec side"), ("hypothesis", "drawing cases")):
        if importlib.util.find_spec(name) is None:
            raise UserError(f'{what} needs {name}; pip install "jaxdraft[parity]"')


def _save_findings(findings: list[Finding], out: Path) -> dict[int, str]:
    """Save the first case of each check and configuration; return the commands that replay them."""
    from parity.replay import save_finding

    _forget_older(out / "failures")
    commands = {}
    for finding in _first_of_each(findings):
        path = save_finding(out / "failures", finding)
        if path is not None:
            commands[id(finding)] = f"parity replay {path}"
    return commands


def _forget_older(directory: Path) -> None:
    """Remove what an earlier run saved here: cases that say what was compared, nothing else."""
    files = {"case.json", "tensors.safetensors"}
    for path in sorted(directory.glob("*/case.json")):
        try:
            ours = "compared" in json.loads(path.read_text())
        except ValueError:
            continue
        if ours and {file.name for file in path.parent.iterdir()} == files:
            for name in files:
                (path.parent / name).unlink()
            path.parent.rmdir()


def _first_of_each(findings: list[Finding]) -> list[Finding]:
    first: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        first.setdefault((finding.check, finding.configuration), finding)
    return list(first.values())


def _line(name: str, result: CheckResult) -> str:
    """Say a check's verdict in a line: cases, configurations, the closest call."""
    cases = sum(result.cases.values())
    closest = max(
        result.worst,
        key=lambda c: result.worst[c] / (result.tolerance[c] or math.inf),
        default=None,
    )
    told = "nothing was compared"
    if closest is not None:
        allowed = result.tolerance[closest]
        told = f"worst {result.worst[closest]:.1e}"
        told += f" of {allowed:.0e} allowed ({closest})" if allowed else " where all must be equal"
    verdict = "ok  " if result.agrees else "FAIL"
    return f"{verdict} {name:<12}{cases:>7,} cases, {len(result.cases):>2} configurations; {told}"


def _told(finding: Finding, command: str | None) -> str:
    lines = [f"       {finding.configuration}: {finding.text}"]
    lines.append(f"       error {finding.error:.1e}, allowed {finding.tolerance:.0e}")
    if command is not None:
        lines.append(f"       {command}")
    return "\n".join(lines)
