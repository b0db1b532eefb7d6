"""What `parity judge` found, as a table, as Markdown and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from parity.adapter import computes_in
from parity.judge_verdicts import BAD, CONFORMS, DECLARED, NOT_JUDGED, CaseVerdict

NOTHING_JUDGED = "nothing judged"
_ORDER = (*BAD, DECLARED, CONFORMS)


def overall(verdicts: Sequence[CaseVerdict]) -> str:
    """Return the worst verdict of all cases; "nothing judged" where nothing was compared."""
    found = {v.verdict for v in verdicts}
    return next((verdict for verdict in _ORDER if verdict in found), NOTHING_JUDGED)


def exit_status(verdicts: Sequence[CaseVerdict]) -> int:
    """Return 0 (conforms, or by its declared conventions), 1, or 2 where nothing was judged."""
    said = overall(verdicts)
    return 2 if said == NOTHING_JUDGED else int(said in BAD)


def summary(adapter: Any, verdicts: Sequence[CaseVerdict]) -> str:
    """Return one line: the verdict, and how many cases there are of each."""
    counts = Counter(v.verdict for v in verdicts)
    parts = [f"{counts[name]} {name}" for name in (*reversed(_ORDER), NOT_JUDGED) if counts[name]]
    return f"{adapter.name} ({computes_in(adapter)}): {overall(verdicts)}; {', '.join(parts)}"


def unseen(adapter: Any, verdicts: Sequence[CaseVerdict]) -> list[str]:
    """Return declared conventions that no case shows: nothing was found out about them."""
    seen = {text for v in verdicts for text in v.conventions}
    return [text for text in adapter.conventions.told() if text not in seen]


def legend(verdicts: Sequence[CaseVerdict]) -> list[str]:
    """Return the conventions that were seen, in the order of their numbers (from 1)."""
    return list(dict.fromkeys(text for v in verdicts for text in v.conventions))


def table(verdicts: Sequence[CaseVerdict]) -> Table:
    """Return a row per case; conventions by number."""
    shown = Table(box=None)
    for name in ("case", "verdict", "stage", "worst", "judged"):
        shown.add_column(name, no_wrap=True)
    shown.add_column("what")
    numbers = {text: str(i) for i, text in enumerate(legend(verdicts), 1)}
    for v in (v for v in verdicts if v.verdict != NOT_JUDGED):
        what = v.detail or _numbered(v, numbers)
        worst = f"{v.worst:.1e}" if v.errors else "-"
        shown.add_row(v.case, v.verdict, v.stage or "-", worst, _judged(v), what)
    return shown


def _numbered(verdict: CaseVerdict, numbers: Mapping[str, str]) -> str:
    return ", ".join(sorted((numbers[text] for text in verdict.conventions), key=int))


def _judged(verdict: CaseVerdict) -> str:
    """Say how many stages were compared, and whether all that the case has."""
    return f"{len(verdict.errors)}{', not all' if verdict.unjudged else ''}"


def unjudged(verdicts: Sequence[CaseVerdict]) -> list[str]:
    """Return what was not judged, each with the number of cases; metrics in one line."""
    counts, metrics = Counter[str](), Counter[str]()
    for v in verdicts:
        if v.verdict == NOT_JUDGED and v.detail:
            counts[f"whole cases, {v.detail}"] += 1
            continue
        for text in v.unjudged:
            if text.startswith("metrics "):
                metrics.update(text.removeprefix("metrics ").split(", "))
            else:
                counts[text] += 1
    lines = [f"{text} ({_cases(count)})" for text, count in sorted(counts.items())]
    if metrics:
        told = ", ".join(f"{name} ({count})" for name, count in sorted(metrics.items()))
        lines.append(f"metrics, with the number of cases: {told}")
    return lines


def _cases(count: int) -> str:
    return "1 case" if count == 1 else f"{count} cases"


def markdown(adapter: Any, verdicts: Sequence[CaseVerdict], mutants: Sequence[str] = ()) -> str:
    """Return the conformance table: cases with the same outcome in one row."""
    lines = [f"**{summary(adapter, verdicts)}**", ""]
    numbers = {text: str(i) for i, text in enumerate(legend(verdicts), 1)}
    rows: dict[tuple[str, ...], list[CaseVerdict]] = {}
    for v in verdicts:
        if v.verdict != NOT_JUDGED:
            told = _numbered(v, numbers) or "-"
            rows.setdefault((v.verdict, told, v.stage or "-"), []).append(v)
    lines += ["| verdict | conventions | first stage that differs | worst error | cases |"]
    lines += ["|---|---|---|---|---|"]
    for (verdict, told, stage), group in rows.items():
        worst = max(v.worst for v in group)
        names = ", ".join(v.case for v in group)
        lines.append(f"| {verdict} | {told} | {stage} | {worst:.1e} | {names} |")
    if numbers:
        lines += ["", *(f"{number}. {text}" for text, number in numbers.items())]
    left = unseen(adapter, verdicts)
    if left:
        lines += ["", f"Declared, and not visible in these cases: {'; '.join(left)}."]
    if unjudged(verdicts):
        lines += ["", f"Not judged: {'; '.join(unjudged(verdicts))}."]
    if mutants:
        lines += ["", *mutants]
    return "\n".join(lines) + "\n"


def document(adapter: Any, verdicts: Sequence[CaseVerdict]) -> dict[str, Any]:
    """Return all that was found, for JSON; an infinite error is null."""
    return {
        "implementation": adapter.name,
        "dtype": computes_in(adapter),
        "declared": adapter.conventions.deviations(),
        "verdict": overall(verdicts),
        "exit_status": exit_status(verdicts),
        "declared_but_not_visible": unseen(adapter, verdicts),
        "cases": [
            {
                "case": v.case,
                "verdict": v.verdict,
                "first_that_differs": v.stage,
                "conventions": list(v.conventions),
                "detail": v.detail,
                "errors": {n: e if e < float("inf") else None for n, e in v.errors.items()},
                "not_judged": list(v.unjudged),
            }
            for v in verdicts
        ],
    }
