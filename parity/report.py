"""The report of `parity run`: report.json, and report.html, one file that loads nothing.

The page is a function of the document in report.json, and of mutants.json when that lies beside it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from parity.checks.base import CHECKS, CheckResult, Finding, find_check
from parity.report_charts import closeness_chart, growth_chart
from parity.report_style import STYLE
from parity.suite import SuiteResult
from torch_port.data.atomic import atomic_file
from torch_port.drawing.text import escape

FORMAT = 1
Document = Mapping[str, Any]


def write_report(suite: SuiteResult, out: Path, commands: Mapping[int, str]) -> tuple[Path, Path]:
    """Write both files below `out`; `commands` replay findings, by the finding's id."""
    document = describe(suite, commands)
    page, data = out / "report.html", out / "report.json"
    text = json.dumps(document, indent=1, allow_nan=False) + "\n"
    for path, content in ((data, text), (page, render(document, read_mutants(out)))):
        with atomic_file(path) as stream:
            stream.write(content.encode())
    return page, data


def read_mutants(out: Path) -> Document | None:
    """Return what `parity mutants` wrote to this directory, None where it did not."""
    try:
        found = json.loads((out / "mutants.json").read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def describe(suite: SuiteResult, commands: Mapping[int, str]) -> dict[str, Any]:
    """Return a run as JSON has it; an error that is no finite number is null."""
    cases, edges = suite.counts()
    return {
        "format": FORMAT,
        "quick": suite.quick,
        "seed": suite.seed,
        "started": suite.started,
        "seconds": round(suite.seconds, 1),
        "agrees": suite.agrees,
        "random_cases": cases,
        "edges": edges,
        "refused": suite.refused,
        "disagreements": len(suite.findings),
        "versions": suite.versions,
        "checks": [_described(result, commands) for result in suite.results.values()],
        "not_run": [name for name in CHECKS if name not in suite.results],
    }


def _described(result: CheckResult, commands: Mapping[int, str]) -> dict[str, Any]:
    check = find_check(result.name)
    return {
        "name": result.name,
        "what": check.what,
        "clauses": list(check.clauses),
        "agrees": result.agrees,
        "seconds": round(result.seconds, 1),
        "configurations": {
            name: {
                "cases": count,
                "worst": _finite(result.worst[name]),
                "tolerance": result.tolerance[name],
                "agrees": all(f.configuration != name for f in result.findings),
            }
            for name, count in result.cases.items()
        },
        "curves": result.curves,
        "findings": [_found(f, commands.get(id(f))) for f in result.findings],
        "blind_spots": list(check.blind_spots),
    }


def _found(finding: Finding, command: str | None) -> dict[str, Any]:
    return {
        "configuration": finding.configuration,
        "stage": finding.stage,
        "error": _finite(finding.error),
        "tolerance": finding.tolerance,
        "text": finding.text,
        "replay": command,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- The page ---------------------------------------------------------------------------------


def render(document: Document, mutants: Document | None) -> str:
    """Return the page of a report."""
    title = "Do port and specification agree?"
    kind = "quick run" if document["quick"] else "full run"
    facts = [kind, f"seed {document['seed']}", document["started"], _clock(document["seconds"])]
    body = (
        f"<header><h1>{title}</h1><p>{escape(' · '.join(facts))}</p></header>"
        f'<section class="cards">{_cards(document, mutants)}</section>'
        f"{_findings(document)}"
        f"<h2>How close</h2>{_closeness(document)}"
        f"<h2>Checks by configurations</h2>{_matrix(document)}"
        f"<h2>Training, step by step</h2>{_growth(document)}"
        f"<h2>Faults put in on purpose</h2>{_mutants(mutants)}"
        f"<h2>What was not compared, and why</h2>{_blind_spots(document)}"
        f"<h2>How this was run</h2>{_origin(document)}"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes}:{rest:02d} min"


def _card(title: str, figure: str, style: str, sentence: str) -> str:
    return (
        f'<article class="card"><h3>{escape(title)}</h3>'
        f'<p class="figure {style}">{escape(figure)}</p><p>{escape(sentence)}</p></article>'
    )


def _cards(document: Document, mutants: Document | None) -> str:
    checks = document["checks"]
    good = sum(check["agrees"] for check in checks)
    configurations = {name for check in checks for name in check["configurations"]}
    cards = [
        _card(
            "Answer",
            "YES" if document["agrees"] else "NO",
            "good" if document["agrees"] else "bad",
            f"{good} of {len(checks)} checks agree; {document['disagreements']} disagreements",
        ),
        _card(
            "Random cases",
            f"{document['random_cases']:,}",
            "",
            f"and {document['edges']} edges, in {len(configurations)} configurations; "
            f"{document['refused']} of all are batches that both sides refuse",
        ),
    ]
    name, share = _closest(document)
    cards.append(
        _card("Closest call", _share_text(share), "bad" if share > 1 else "", f"of what {name}")
    )
    if mutants is not None:
        entries = mutants.get("entries", [])
        seen = sum(entry.get("detected_by") is not None for entry in entries)
        style = "good" if seen == len(entries) else "bad"
        told = "faults put into either side, one at a time, that a check saw"
        cards.append(_card("Mutants", f"{seen} of {len(entries)}", style, told))
    return "".join(cards)


def _share_text(share: float) -> str:
    if share > 1:
        return "over 100%"
    return "equal" if share == 0 else f"{100 * share:.2g}%"


def _closest(document: Document) -> tuple[str, float]:
    """Return (words, share of its tolerance) of the worst comparison."""
    best, share = "was allowed", 0.0
    for check in document["checks"]:
        for name, entry in check["configurations"].items():
            worst = math.inf if entry["worst"] is None else entry["worst"]
            mine = worst / entry["tolerance"] if entry["tolerance"] else math.inf * bool(worst or 0)
            if worst and mine > share:
                best, share = f"was allowed: {check['name']}, {name}", mine
    return best, share


def _findings(document: Document) -> str:
    rows = [
        f"<tr><th>{escape(check['name'])}</th><td>{escape(found['configuration'])}</td>"
        f'<td class="left">{escape(found["text"])}</td>'
        f"<td>{_number(found['error'])} of {_number(found['tolerance'])}</td>"
        f'<td class="left"><code>{escape(found["replay"] or "")}</code></td></tr>'
        for check in document["checks"]
        for found in check["findings"]
    ]
    if not rows:
        return ""
    head = "<tr><th>check</th><th>configuration</th><th>what</th><th>error</th><th>replay</th></tr>"
    table = f"<thead>{head}</thead><tbody>{''.join(rows)}</tbody>"
    return (
        '<h2>Disagreements</h2><div class="table"><table class="bad-rows texts">'
        f"{table}</table></div>"
    )


def _number(value: float | None) -> str:
    if value is None:
        return "∞"
    return "0" if value == 0 else f"{value:.0e}"


def _figure(chart: str, caption: str) -> str:
    return f"<figure>{chart}<figcaption>{escape(caption)}</figcaption></figure>"


def _closeness(document: Document) -> str:
    caption = (
        "Each dot is a configuration's worst error, relative to its tensor's largest magnitude. "
        "A tick on its line is what is allowed, the red part what would fail. Errors of exactly 0 "
        "stand at the left end. Far left of the tick is good: a fault, measured by the mutants, is "
        "many decades to the right of rounding."
    )
    return _figure(closeness_chart(document["checks"]), caption)


def _matrix(document: Document) -> str:
    """A table of configurations by checks: worst error, coloured by its distance to the limit."""
    checks = [check for check in document["checks"] if check["configurations"]]
    names = list(dict.fromkeys(n for check in checks for n in check["configurations"]))
    head = "".join(f'<th scope="col">{escape(check["name"])}</th>' for check in checks)
    rows = []
    for name in names:
        cells = "".join(_cell(check["configurations"].get(name)) for check in checks)
        rows.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    legend = (
        "Worst error of each configuration. "
        '<span class="m m0">equal</span> <span class="m m1">over 4 decades inside</span> '
        '<span class="m m2">1 to 4 decades</span> <span class="m m3">within a decade</span> '
        '<span class="m mx">disagrees</span>; hover for cases and tolerance.'
    )
    return (
        f'<div class="table"><table class="matrix"><thead><tr><th></th>{head}</tr></thead>'
        f'<tbody>{"".join(rows)}</tbody></table><p class="legend">{legend}</p></div>'
    )


def _cell(entry: Document | None) -> str:
    if entry is None:
        return '<td class="none">·</td>'
    worst, tolerance = entry["worst"], entry["tolerance"]
    tip = f"{entry['cases']} cases, tolerance {_number(tolerance)}"
    if worst is None or not entry["agrees"]:
        style = "mx"
    elif worst == 0:
        style = "m0"
    else:
        decades = math.log10(tolerance / worst) if tolerance else 0.0
        style = "m1" if decades > 4 else "m2" if decades > 1 else "m3"
    return f'<td class="m {style}" title="{escape(tip)}">{_number(worst)}</td>'


def _growth(document: Document) -> str:
    curves = {
        name: values for check in document["checks"] for name, values in check["curves"].items()
    }
    caption = (
        "The parameter that differs most after each AdamW step, in float64, relative to its "
        "largest magnitude. Rounding enters anew at every step and AdamW's division enlarges it "
        "where a gradient is near 0, so a good curve creeps up; a jump means that the two compute "
        "different things."
    )
    return f'<div class="narrow">{_figure(growth_chart(curves), caption)}</div>'


def _mutants(mutants: Document | None) -> str:
    if mutants is None:
        return (
            '<div class="table"><p class="empty">No mutants.json lies beside this report: '
            "<code>parity mutants</code> with the same --out writes it.</p></div>"
        )
    entries = mutants.get("entries", [])
    by_check: dict[str, list[Document]] = {}
    for entry in entries:
        by_check.setdefault(str(entry.get("detected_by") or "nobody"), []).append(entry)
    order = [n for n in (*CHECKS, *sorted(set(by_check) - set(CHECKS))) if n in by_check]
    which = {name: ", ".join(str(e.get("name")) for e in by_check[name]) for name in order}
    rows = "".join(
        f'<tr class="{"bad" if name == "nobody" else ""}"><th scope="row">{escape(name)}</th>'
        f'<td>{len(by_check[name])}</td><td class="left">{escape(which[name])}</td></tr>'
        for name in order
    )
    head = "<tr><th>first seen by</th><th>mutants</th><th>which</th></tr>"
    table = f"<thead>{head}</thead><tbody>{rows}</tbody>"
    return f'<div class="table"><table class="texts">{table}</table></div>'


def _blind_spots(document: Document) -> str:
    items = []
    for check in document["checks"]:
        spots = "".join(f"<li>{escape(spot)}</li>" for spot in check["blind_spots"])
        clauses = escape(", ".join(check["clauses"]))
        items.append(
            f'<article class="card"><h3>{escape(check["name"])} <small>{clauses}</small></h3>'
            f"<p>{escape(check['what'])}</p>"
            + (f"<p><b>Not compared:</b></p><ul>{spots}</ul>" if spots else "")
            + "</article>"
        )
    left = document["not_run"]
    if left:
        items.append(
            '<article class="card"><h3>Not run</h3>'
            f"<p>{escape(', '.join(left))}: left out by --only</p></article>"
        )
    return f'<section class="cards wide">{"".join(items)}</section>'


def _origin(document: Document) -> str:
    def listed(title: str, pairs: Sequence[tuple[str, str]]) -> str:
        items = "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in pairs)
        return f'<article class="card"><h3>{title}</h3><dl>{items}</dl></article>'

    times = [(check["name"], f"{check['seconds']:.1f} s") for check in document["checks"]]
    total = sum(check["seconds"] for check in document["checks"])
    times += [
        ("all, of CPU", f"{total:.0f} s"),
        ("the run", f"{document['seconds']:.0f} s"),
    ]
    drawn = [
        ("seed", str(document["seed"])),
        ("random cases", f"{document['random_cases']:,}"),
        ("edges", str(document["edges"])),
        ("started", document["started"]),
    ]
    cards = (
        listed("Time", times)
        + listed("Cases", drawn)
        + listed("Versions", list(document["versions"].items()))
    )
    return f'<footer class="cards">{cards}</footer>'
