"""One line of `torch-port doctor`, and what runs them. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "missing", "failed", "skipped"]

_STYLE = {"ok": "green", "missing": "yellow", "failed": "bold red", "skipped": "dim"}


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, how it is, what was found, and what to do about it.

    `status`: "ok"; "missing", something that this machine lacks; "failed", something that is there
    and wrong; "skipped", not looked at, because of an earlier line.
    """

    section: str
    name: str
    status: Status
    found: str
    remedy: str = ""


def healthy(checks: Iterable[Check]) -> bool:
    """Return whether nothing is missing, failed or skipped: the machine can train on its cards."""
    return all(check.status == "ok" for check in checks)


def guarded(section: str, name: str, error: Exception, remedy: str) -> Check:
    """Return the line of a check that broke off, in the error's own words."""
    said = str(error).strip().split("\n", 1)[0]
    return Check(section, name, "failed", f"{type(error).__name__}: {said}", remedy)


def show(checks: Sequence[Check], console: Console) -> None:
    """Print the lines by section, each with its remedy, and a last line that counts them."""
    for section in dict.fromkeys(check.section for check in checks):
        console.print(Text(section, style="bold"))
        table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column(width=9, no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for check in checks:
            if check.section == section:
                status = Text(f"  {check.status}", style=_STYLE[check.status])
                table.add_row(status, Text(check.name), _words(check))
        console.print(table)
    console.print(Text(summary(checks), style="bold"))


def _words(check: Check) -> Text:
    if not check.remedy:
        return Text(check.found)
    return Text.assemble(f"{check.found}\n", (f"→ {check.remedy}", "italic"))


def summary(checks: Sequence[Check]) -> str:
    """Return how many lines are of each status, and what that means.

    >>> summary([Check("versions", "python", "ok", "3.11")])
    '1 ok: this machine can train on its cards'
    """
    counts = [(status, sum(check.status == status for check in checks)) for status in _STYLE]
    counted = ", ".join(f"{number} {status}" for status, number in counts if number)
    verdict = "can" if healthy(checks) else "cannot yet"
    return f"{counted}: this machine {verdict} train on its cards"


def as_json(checks: Sequence[Check]) -> dict[str, Any]:
    """Return what `--json` writes."""
    return {"format": 1, "healthy": healthy(checks), "checks": [asdict(check) for check in checks]}
