"""The demo's report: one HTML file to look at, one table for the terminal.

Both read the dict that the demo writes as metrics.json. The page needs nothing else: its style and
its charts are inside it, it loads nothing and runs no script.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from torch_port.data.atomic import atomic_file
from torch_port.demo.style import STYLE
from torch_port.demo.summary import (
    Headline,
    comparison,
    headlines,
    look,
    passed,
    verdict,
)
from torch_port.drawing.svg import Axis, Marker, Point, Series, line_chart, running_mean
from torch_port.drawing.text import (
    NONE,
    error,
    escape,
    finite,
    fixed,
    percent,
    percent_text,
    power_text,
)
from torch_port.errors import UserError

FORMAT = 1
"""The format of metrics.json that this file reads."""

_EXACT = 1e-17  # where a difference of exactly 0 is drawn on a logarithmic axis
_RUNS = {"pruned": "pruned", "full": "unpruned"}
_SMOOTH_FROM = 40  # a curve of fewer points is drawn as it is


def write_report(metrics: dict[str, Any], path: Path) -> None:
    """Write the report as one self-contained HTML file, completely or not at all.

    Args:
        metrics: the content of metrics.json; numbers may be None or missing, they read "–".
        path: the file to write, in a directory that exists. An older report is replaced.

    Raises:
        UserError: the metrics are of another format.
    """
    page = _page(metrics).encode()
    with atomic_file(path) as stream:
        stream.write(page)


def terminal_table(metrics: Mapping[str, Any]) -> RenderableType:
    """The verdict and the comparison, to be read in ten seconds.

    Args:
        metrics: the content of metrics.json.

    Returns:
        A renderable for `rich.console.Console.print`; it fits 80 columns.
    """
    word, sentence = verdict(metrics)
    colour = {"YES": "bold green", "NO": "bold red"}.get(word, "bold yellow")
    answer = Text.assemble("Do port and specification agree?  ", (word, colour))
    table = Table(box=SIMPLE_HEAD)
    table.add_column("")
    for name, style in (("pruned", "bold"), ("unpruned", ""), ("pruned vs unpruned", "dim")):
        table.add_column(name, justify="right", style=style, no_wrap=True)
    for row in comparison(metrics):
        if row.brief:
            cells = (row.name, row.pruned, row.full, row.relation)
            table.add_row(*(Text(cell) for cell in cells))
    return Group(answer, Text(sentence, style="dim"), table)


def _page(metrics: Mapping[str, Any]) -> str:
    if look(metrics, "format") != FORMAT:
        raise UserError(
            f"format of the metrics: expected {FORMAT}, got {look(metrics, 'format')!r}; "
            "run `torch-port demo` again to write them anew"
        )
    title = "A pruned draft, trained and cross-checked"
    vocabulary = look(metrics, "vocabulary")
    facts = [
        f"{fixed(look(vocabulary, 'size'), 0)} of {fixed(look(vocabulary, 'of'), 0)} ids kept",
        f"{fixed(look(metrics, 'runs', 'pruned', 'steps'), 0)} steps",
        f"seed {fixed(look(metrics, 'seed'), 0)}",
        str(look(metrics, "started") or ""),
        f"{fixed(look(metrics, 'seconds', 'total'), 0)} s",
    ]
    badge = '<span class="badge">quick run</span>' if look(metrics, "quick") is True else ""
    cards = "".join(_card(headline) for headline in headlines(metrics))
    training = _loss_chart(metrics) + _tau_chart(metrics)
    parity = _trajectory_chart(metrics) + _checks_table(metrics)
    kept = _coverage_chart(metrics) + _acceptance_chart(metrics)
    body = (
        f"<header><h1>{title}</h1><p>{escape(' · '.join(filter(None, facts)))}{badge}</p></header>"
        f'<section class="cards">{cards}</section>'
        f'<h2>Training</h2><section class="pair">{training}</section>'
        f'<h2>What the draft can say, and what is accepted</h2><section class="pair">{kept}'
        f"</section><h2>Pruned against unpruned</h2>{_comparison_table(metrics)}"
        f'<h2>Port against specification</h2><section class="pair uneven">{parity}'
        f"</section><h2>How this run was made</h2>{_origin(metrics)}"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{STYLE}</style></head><body><main>{body}</main></body></html>\n"
    )


def _card(headline: Headline) -> str:
    longest = max((value for _, value, *_ in headline.bars if value), default=0.0)
    bars = "".join(
        f'<div class="bar {style}"><span>{escape(name)}</span>'
        f'<i><b style="width:{100 * max(value or 0.0, 0.0) / (longest or 1.0):.1f}%"></b></i>'
        f"<span>{escape(text)}</span></div>"
        for name, value, text, style in headline.bars
    )
    return (
        f'<article class="card"><h3>{escape(headline.title)}</h3>'
        f'<p class="figure {headline.style}">{escape(headline.figure)}</p>{bars}'
        f"<p>{escape(headline.sentence)}</p></article>"
    )


def _figure(title: str, caption: str, chart: str) -> str:
    return (
        f"<figure><h3>{escape(title)}</h3>{chart}"
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


def _points(rows: Any, x: str, y: str) -> list[Point]:
    """(x, y) of every row that has an x; a y that is no finite number leaves a gap."""
    pairs = [(finite(look(row, x)), finite(look(row, y))) for row in rows or []]
    return [(a, b) for a, b in pairs if a is not None]


def _curves(metrics: Mapping[str, Any], key: str) -> list[Series]:
    """Both runs' curves of one quantity: faint raw values behind a running mean where many."""
    faint, lines = [], []
    for run, name in _RUNS.items():
        points = _points(look(metrics, "runs", run, "curve"), "step", key)
        if len(points) >= _SMOOTH_FROM:
            faint.append(Series(name, points, run, faint=True))
            points = running_mean(points, 2 * (len(points) // 40) + 1)
        last = next((y for _, y in reversed(points) if y is not None), None)
        lines.append(Series(name, points, run, f"{fixed(last)} at the end"))
    return faint + lines


def _loss_chart(metrics: Mapping[str, Any]) -> str:
    title = "Training loss"
    caption = (
        "The loss at each step: faint as it was, strong as a running mean. A good curve falls "
        "steeply, then flattens. Compare the shapes, not the heights: the pruned loss is taken "
        "over fewer ids."
    )
    step, loss = Axis("step", whole=True), Axis("loss")
    chart = line_chart(title, caption, _curves(metrics, "loss"), step, loss, None)
    return _figure(title, caption, chart)


def _tau_chart(metrics: Mapping[str, Any]) -> str:
    title = "τ during training"
    caption = (
        "Estimated tokens per pass of the target, on the training batches; 1 means that nothing "
        "the draft proposes is accepted. A good curve rises and has not turned down at the end. "
        "The pruned one may stay a little below: it cannot propose what was pruned."
    )
    step, tau = Axis("step", whole=True), Axis("τ, tokens per target pass", include=(1.0,))
    chart = line_chart(title, caption, _curves(metrics, "tau"), step, tau, None)
    return _figure(title, caption, chart)


def _coverage_chart(metrics: Mapping[str, Any]) -> str:
    title = "Coverage against the size of the draft vocabulary"
    caption = (
        "The share of the answers' tokens that a draft vocabulary of K ids holds; the rule marks "
        "the K of this run. A good curve is close to 100% long before the full vocabulary, and "
        "held-out modules stay close to the training ones."
    )
    vocabulary = look(metrics, "vocabulary")
    curve, chosen = look(vocabulary, "curve"), finite(look(vocabulary, "size"))
    lines, dots = [], []
    for key, name, dashed in (("train", "training", True), ("heldout", "held-out", False)):
        value = finite(look(vocabulary, f"coverage_{key}"))
        note = f"{percent(value)} at K"
        lines.append(Series(name, _points(curve, "size", key), "coverage", note, dashed))
        if value is not None:
            dots.append((value, "coverage"))
    marker = None
    if chosen is not None and chosen > 0:
        marker = Marker(chosen, f"K = {fixed(chosen, 0)}", tuple(dots))
    size, share = Axis("K, ids kept", log=True), Axis("tokens covered", text=percent_text)
    return _figure(title, caption, line_chart(title, caption, lines, size, share, marker))


def _acceptance_chart(metrics: Mapping[str, Any]) -> str:
    title = "Acceptance per slot"
    caption = (
        "How likely the target accepts the token in each slot of a block, given the true tokens "
        "before it, on held-out modules. Slot 0 follows the anchor; later slots are harder, so a "
        "good curve falls gently, far above the untrained one."
    )
    lines = []
    for run, state, name, style, dashed in (
        ("pruned", "trained", "pruned", "pruned", False),
        ("full", "trained", "unpruned", "full", False),
        ("pruned", "untrained", "untrained", "untrained", True),
    ):
        slots = look(metrics, "runs", run, "heldout", state, "accept_position") or []
        points: list[Point] = [(float(k), finite(value)) for k, value in enumerate(slots)]
        note = f"{percent(slots[0])} in slot 0" if slots else ""
        lines.append(Series(name, points, style, note, dashed))
    slot, share = Axis("slot", whole=True), Axis("accepted", text=percent_text, include=(0.0,))
    return _figure(title, caption, line_chart(title, caption, lines, slot, share, None))


def _trajectory_chart(metrics: Mapping[str, Any]) -> str:
    title = "Two trainings from the same start"
    rows = look(metrics, "parity", "trajectory") or []
    gaps: list[Point] = []
    for row in rows:
        step, port, spec = (finite(look(row, k)) for k in ("step", "loss_port", "loss_spec"))
        if step is not None:
            gap = None if port is None or spec is None else max(abs(port - spec), _EXACT)
            gaps.append((step, gap))
    exact = sum(gap == _EXACT for _, gap in gaps)
    caption = (
        "The port and the specification train side by side, each with its own gradients and "
        "optimizer: how far their losses, and the parameter that differs most, are apart after "
        "each step. In float64 a good curve stays many decades below 1 and creeps up slowly, as "
        "rounding adds up; a jump means that the two compute different things."
    )
    if exact:
        caption += f" {exact} of {len(gaps)} losses are equal to the last bit, drawn at 10⁻¹⁷."
    worst = [
        (step, None if value is None else max(value, _EXACT))
        for step, value in _points(rows, "step", "worst_parameter")
    ]
    lines = [
        Series(name, points, "parity", f"{error(points[-1][1])} at last", dashed)
        for name, points, dashed in (("loss", gaps, False), ("parameters", worst, True))
        if points
    ]
    step_axis, gap_axis = Axis("step", whole=True), Axis("difference", log=True, text=power_text)
    chart = line_chart(title, caption, lines, step_axis, gap_axis, None)
    return _figure(title, caption, chart)


def _table(head: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """An HTML table; a row is (class, cells), and every cell but the first is right-aligned."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr class="{style}"><th scope="row">{escape(cells[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells[1:])
        + "</tr>"
        for style, cells in rows
    )
    table = f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="table">{table}</div>'


def _comparison_table(metrics: Mapping[str, Any]) -> str:
    rows = [
        ("brief" if row.brief else "", (row.name, row.pruned, row.full, row.relation))
        for row in comparison(metrics)
    ]
    return _table(("", "pruned", "unpruned", "pruned vs unpruned"), rows)


def _checks_table(metrics: Mapping[str, Any]) -> str:
    checks = look(metrics, "parity", "checks") or []
    if not checks:
        return f'<div class="table"><p class="empty">{escape(verdict(metrics)[1])}</p></div>'
    rows = []
    for check in sorted(checks, key=passed):  # the failed ones first
        good = passed(check)
        cells = (error(look(check, "worst")), error(look(check, "tolerance")))
        mark = "✓ agrees" if good else "✗ DIFFERS"
        rows.append(("good" if good else "bad", (str(look(check, "name")), *cells, mark)))
    return _table(("check", "worst error", "tolerance", "verdict"), rows)


def _origin(metrics: Mapping[str, Any]) -> str:
    """Corpus, target, timings and versions, as four lists."""

    def listed(title: str, pairs: Sequence[tuple[str, str]]) -> str:
        items = "".join(f"<dt>{escape(a)}</dt><dd>{escape(b)}</dd>" for a, b in pairs)
        return f'<article class="card"><h3>{title}</h3><dl>{items}</dl></article>'

    def numbers(part: str, *keys: str) -> list[tuple[str, str]]:
        return [(key.replace("_", " "), fixed(look(metrics, part, key), 0)) for key in keys]

    corpus = [
        *numbers("corpus", "train_samples", "heldout_samples", "heldout_modules"),
        *numbers("corpus", "train_tokens", "supervised_tokens"),
        ("fingerprint", str(look(metrics, "corpus", "fingerprint") or NONE)[:12]),
    ]
    cached = {True: "from the cache", False: "in this run"}
    target = [
        *numbers("target", "parameters", "layers", "hidden_size", "vocab_size"),
        ("held-out loss", fixed(look(metrics, "target", "heldout_loss"), 3)),
        ("trained", cached.get(look(metrics, "target", "from_cache"), NONE)),
    ]
    seconds = look(metrics, "seconds") or {}
    timings = [(str(key), f"{fixed(value, 1)} s") for key, value in seconds.items()]
    versions = look(metrics, "versions") or {}
    tools = [(str(key), str(value or "not installed")) for key, value in versions.items()]
    lists = (("Corpus", corpus), ("Target", target), ("Time", timings), ("Versions", tools))
    return f'<footer class="cards">{"".join(listed(*each) for each in lists)}</footer>'
