"""The demo's report: what it says, where its points land, and that it is whole and harmless."""

import copy
import io
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from torch_port.demo.report import terminal_table, write_report
from torch_port.demo.summary import comparison, headlines, verdict
from torch_port.demo.svg import (
    Axis,
    Marker,
    Series,
    line_chart,
    linear_ticks,
    log_ticks,
    nice_step,
    running_mean,
    spread,
)
from torch_port.errors import UserError

SVG = "{http://www.w3.org/2000/svg}"
VOID = {"meta", "br", "hr", "img", "link", "input"}
BAD_NUMBERS = (float("nan"), float("inf"), float("-inf"), None)


def evaluation(tau: float) -> dict[str, Any]:
    return {
        "loss": 1.5,
        "tau": tau,
        "acc": 0.25,
        "coverage": 0.9,
        "kept_mass": 0.8,
        "accept_position": [0.5, 0.25],
        "accuracy_position": [0.5, 0.25],
        "teacher_agreement": 0.5,
    }


def run(size: int, peak: int, before: float, after: float) -> dict[str, Any]:
    curve = [
        {"step": s, "loss": 2.0 / s, "tau": 1.0 + s / 10, "coverage": 0.9, "kept_mass": 0.8}
        for s in (1, 2, 3)
    ]
    return {
        "draft_vocab_size": size,
        "parameters": 1000,
        "steps": 3,
        "tokens_per_second": 10.0,
        "step_seconds": 0.5,
        "peak_bytes": peak,
        "curve": curve,
        "heldout": {"untrained": evaluation(before), "trained": evaluation(after)},
    }


@pytest.fixture
def metrics() -> dict[str, Any]:
    """A small run in which everything was measured and everything agrees."""
    curve = [{"size": k, "train": k / 8, "heldout": k / 10} for k in (1, 2, 4, 8)]
    checks = [
        {"name": "pruned: loss", "worst": 2e-14, "tolerance": 1e-10, "passed": True},
        {"name": "pruned: gradients", "worst": 5e-12, "tolerance": 1e-10, "passed": True},
    ]
    trajectory = [
        {"step": 1, "loss_port": 2.0, "loss_spec": 2.0, "worst_parameter": 1e-15},
        {"step": 2, "loss_port": 1.5, "loss_spec": 1.5 + 1e-12, "worst_parameter": 1e-14},
    ]
    return {
        "format": 1,
        "quick": True,
        "seed": 7,
        "started": "2026-01-02T03:04:05",
        "seconds": {"corpus": 1.0, "total": 12.0},
        "versions": {"python": "3.11.7", "torch": "2.13.0", "jax": None},
        "corpus": {"train_samples": 100, "fingerprint": "abcdef0123456789"},
        "target": {"parameters": 5000, "heldout_loss": 3.25, "from_cache": True},
        "vocabulary": {
            "size": 4,
            "of": 8,
            "pinned": 1,
            "coverage_train": 0.5,
            "coverage_heldout": 0.4,
            "curve": curve,
        },
        "runs": {"pruned": run(4, 2**20, 1.25, 2.5), "full": run(8, 2**22, 1.4, 2.75)},
        "parity": {
            "ran": True,
            "why_not": None,
            "agrees": True,
            "checks": checks,
            "trajectory": trajectory,
        },
    }


def page_of(metrics: dict[str, Any], tmp_path: Any) -> str:
    write_report(metrics, tmp_path / "report.html")
    return (tmp_path / "report.html").read_text(encoding="utf-8")


def said(metrics: dict[str, Any], width: int = 80) -> str:
    """What a terminal of this width shows."""
    paper = io.StringIO()
    Console(width=width, force_terminal=False, file=paper).print(terminal_table(metrics))
    return paper.getvalue()


class Page(HTMLParser):
    """Collects the tags, the attributes and the text, and insists on balanced tags."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def parsed(page: str) -> Page:
    parser = Page()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    return parser


def svgs(page: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, flags=re.S)]


def replace_numbers(value: Any, bad: Any) -> Any:
    """Every number of a nested structure but `format` replaced by `bad`."""
    if isinstance(value, dict):
        return {k: v if k == "format" else replace_numbers(v, bad) for k, v in value.items()}
    if isinstance(value, list):
        return [replace_numbers(item, bad) for item in value]
    return bad if isinstance(value, int | float) and not isinstance(value, bool) else value


# --- the page as a file


def test_the_page_is_well_formed_and_has_the_five_charts(metrics, tmp_path):
    """Fault: a tag left open, an unescaped &, or a chart left out of the page."""
    page = page_of(metrics, tmp_path)
    parsed(page)
    charts = svgs(page)
    assert [chart.findtext(f"{SVG}title") for chart in charts] == [
        "Training loss",
        "τ during training",
        "Coverage against the size of the draft vocabulary",
        "Acceptance per slot",
        "Two trainings from the same start",
    ]
    for chart in charts:
        assert chart.get("role") == "img"
        assert chart.get("viewBox") == "0 0 520 300"
        assert len(chart.findtext(f"{SVG}desc") or "") > 40


def test_the_page_loads_nothing(metrics, tmp_path):
    """Fault: a web font, a script, a style sheet or an image from elsewhere."""
    page = page_of(metrics, tmp_path)
    without_namespace = page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    for word in ("http://", "https://", "//cdn", "url(", "@import"):
        assert word not in without_namespace
    parser = parsed(page)
    assert not {"script", "link", "iframe", "img", "object"} & set(parser.tags)
    assert not {"src", "href", "srcset"} & {name for name, _ in parser.attributes}


@pytest.mark.parametrize("bad", BAD_NUMBERS)
def test_numbers_that_are_none_read_as_a_dash(metrics, tmp_path, bad):
    """Fault: a NaN or ∞ formatted as text, or used as a coordinate; a crash on None."""
    broken = replace_numbers(metrics, bad)
    page = page_of(broken, tmp_path)
    words = " ".join(parsed(page).words) + " ".join(said(broken).split())
    # In all of the page: a path's M or L stands right before its number.
    assert not re.search(r"(?<![a-z])(nan|NaN|inf|[iI]nfinity)(?![a-z])", page)
    assert not re.search(r"\b(nan|inf|infinity|none)\b", words, flags=re.I)
    assert "–" in words
    assert page.count("No data: nothing was measured for this chart.") == 5


def test_one_missing_point_breaks_the_line_and_nothing_else(metrics, tmp_path):
    """Fault: a missing value drawn as 0, or joined over as if it had been measured."""
    metrics["runs"]["pruned"]["curve"][1]["loss"] = float("nan")
    loss = svgs(page_of(metrics, tmp_path))[0]
    paths = [p.get("d", "") for p in loss.iter(f"{SVG}path") if p.get("class") == "line"]
    assert [path.count("M") for path in paths] == [2, 1]
    assert [path.count("L") for path in paths] == [0, 2]


def test_a_metrics_file_with_almost_nothing_still_gives_a_page(tmp_path):
    """Fault: a KeyError on a part that an interrupted or reduced run did not write."""
    page = page_of({"format": 1}, tmp_path)
    parsed(page)
    assert "NOT CHECKED" in page
    assert "NOT CHECKED" in said({"format": 1})


@pytest.mark.parametrize("place", ["started", "why_not", "check", "version", "fingerprint"])
def test_hostile_strings_stay_text(metrics, tmp_path, place):
    """Fault: a string of metrics.json put into the page unescaped."""
    hostile = "</title><script>alert('x')</script>\"&\x00\ud800"
    if place == "started":
        metrics["started"] = hostile
    elif place == "why_not":
        metrics["parity"] = {"ran": False, "why_not": hostile}
    elif place == "check":
        metrics["parity"]["checks"][1]["name"] = hostile
    elif place == "version":
        metrics["versions"][hostile] = hostile
    else:
        metrics["corpus"]["fingerprint"] = "<script>x"
    page = page_of(metrics, tmp_path)
    parser = parsed(page)
    assert "script" not in parser.tags
    assert "<script>" in "".join(parser.words)
    assert "\x00" not in page
    said(metrics)


def test_a_chart_escapes_every_string_it_is_given():
    """Fault: a series, axis or marker name that ends the SVG's markup."""
    evil = "<b>&\"'"
    series = [Series(evil, [(1.0, 1.0), (2.0, 2.0)], evil, evil)]
    axis = Axis(evil, text=lambda value: evil)
    root = ET.fromstring(line_chart(evil, evil, series, axis, axis, Marker(1.5, evil)))
    assert not list(root.iter(f"{SVG}b"))
    assert [t.text for t in root.iter(f"{SVG}title")] == [
        evil,
        f"{evil}: 1 at {evil} {evil}",
        f"{evil}: 2 at {evil} {evil}",
    ]


def test_the_file_is_replaced_whole_or_left_alone(metrics, tmp_path):
    """Fault: the old report truncated before the new one is known to be good."""
    path = tmp_path / "report.html"
    path.write_text("old")
    wrong = copy.deepcopy(metrics) | {"format": 2}
    with pytest.raises(UserError, match="expected 1, got 2"):
        write_report(wrong, path)
    assert path.read_text() == "old"
    write_report(metrics, path)
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.html"]


# --- what it says


def test_yes_when_every_check_passed(metrics, tmp_path):
    """Fault: the closest call taken by the raw error and not by error / tolerance."""
    metrics["parity"]["checks"].append(
        {"name": "float32: loss", "worst": 1e-7, "tolerance": 1e-4, "passed": True}
    )
    # 2e-14/1e-10 = 2e-4, 5e-12/1e-10 = 5e-2, 1e-7/1e-4 = 1e-3: the second is the closest.
    assert verdict(metrics) == (
        "YES",
        "The port and the specification agree: all 3 checks are within tolerance, the closest "
        "call being “pruned: gradients” (error 5e-12, 1e-10 allowed).",
    )
    assert '<p class="figure good">YES</p>' in page_of(metrics, tmp_path)
    assert "agree?  YES" in said(metrics)


def test_no_when_a_check_failed(metrics, tmp_path):
    """Fault: a page that says YES, or shows no failure, while a check is red."""
    metrics["parity"]["agrees"] = False
    metrics["parity"]["checks"][1].update(worst=0.5, passed=False)
    word, sentence = verdict(metrics)
    assert word == "NO"
    assert "1 of 2 checks failed" in sentence
    assert "“pruned: gradients” (error 5e-1, 1e-10 allowed)" in sentence
    page = page_of(metrics, tmp_path)
    assert '<p class="figure bad">NO</p>' in page
    assert page.count("✗ DIFFERS") == 1
    assert page.index("✗ DIFFERS") < page.index("✓ agrees")  # the failed ones come first
    assert "agree?  NO" in said(metrics)


def test_no_when_the_demo_says_so_without_a_failed_check(metrics):
    """Fault: the demo's own verdict ignored because all listed checks passed."""
    metrics["parity"]["agrees"] = False
    assert verdict(metrics)[0] == "NO"


def test_no_when_a_check_failed_although_agrees_is_true(metrics):
    """Fault: `agrees` believed against the table below it."""
    metrics["parity"]["checks"][0]["passed"] = False
    assert verdict(metrics)[0] == "NO"


@pytest.mark.parametrize("worst", [float("nan"), float("inf")])
def test_no_when_an_error_is_not_finite(metrics, worst):
    """Fault: NaN passes a check written as `not worst > tolerance`, or counts as a small error."""
    metrics["parity"]["checks"][1].update(worst=9.0, passed=False)
    metrics["parity"]["checks"][0].update(worst=worst, passed=True)
    word, sentence = verdict(metrics)
    assert word == "NO"
    assert "“pruned: loss” (error not finite, 1e-10 allowed)" in sentence


def test_not_checked_when_it_did_not_run(metrics, tmp_path):
    """Fault: an absent comparison reported as agreement (or as disagreement)."""
    metrics["parity"] = {
        "ran": False,
        "why_not": "jax is not installed",
        "agrees": None,
        "checks": [],
        "trajectory": [],
    }
    assert verdict(metrics) == (
        "NOT CHECKED",
        "The port was not compared with the specification: jax is not installed.",
    )
    page = page_of(metrics, tmp_path)
    assert '<p class="figure open">NOT CHECKED</p>' in page
    assert "jax is not installed" in page
    assert "NOT CHECKED" in said(metrics)


@pytest.mark.parametrize(("agrees", "checks"), [(None, True), (True, False)])
def test_not_checked_without_a_verdict_or_without_a_check(metrics, agrees, checks):
    """Fault: YES from an empty list of checks, where all() is true."""
    metrics["parity"]["agrees"] = agrees
    if not checks:
        metrics["parity"]["checks"] = []
    assert verdict(metrics)[0] == "NOT CHECKED"


def test_the_sentences_hold_the_right_numbers(metrics):
    """Fault: pruned and unpruned, or trained and untrained, exchanged; ratio upside down."""
    _, tau, memory, coverage = headlines(metrics)
    assert tau.figure == "1.25 → 2.50"
    assert "from 1.25 to 2.50 for the pruned draft" in tau.sentence
    assert "from 1.40 to 2.75 for the unpruned one" in tau.sentence
    # 1 MiB / 4 MiB
    assert memory.figure == "0.25×"
    assert "at 1.00 MiB with the pruned vocabulary and at 4.00 MiB" in memory.sentence
    assert coverage.figure == "40.0%"
    assert "4 kept ids of 8 cover 50.0%" in coverage.sentence
    assert "40.0% on held-out" in coverage.sentence


def test_the_comparison_holds_the_right_numbers(metrics):
    """Fault: a difference with the wrong sign, a gain against the other run's start."""
    rows = {row.name: (row.pruned, row.full, row.relation) for row in comparison(metrics)}
    assert rows["draft vocabulary"] == ("4", "8", "0.50×")
    assert rows["peak memory of a step"] == ("1.00 MiB", "4.00 MiB", "0.25×")
    assert rows["τ trained, held-out"] == ("2.50", "2.75", "−0.25")
    # 2.5 − 1.25 and 2.75 − 1.4
    assert rows["τ gained by training"] == ("+1.25", "+1.35", "")
    assert rows["coverage of held-out labels"] == ("90.0%", "90.0%", "+0.0 pt")


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal_table_fits_and_is_short(metrics, width):
    """Fault: a line that wraps or a number cut off with an ellipsis at 80 columns."""
    lines = said(metrics, width).splitlines()
    assert max(len(line.rstrip()) for line in lines) <= width
    assert len(lines) <= 16
    table = "\n".join(lines)
    assert "…" not in table
    for line in ("τ trained, held-out", "2.50", "2.75", "−0.25", "1.00 MiB", "4.00 MiB", "0.25×"):
        assert line in table


# --- where things are drawn


def test_points_land_where_the_hand_puts_them():
    """Fault: an axis upside down, a margin forgotten, a domain not widened to whole ticks.

    Plot area: x from 56 to 520 − 104 = 416, y from 300 − 48 = 252 (low) up to 32 (high). x spans
    0 … 10; y spans 0 … 0.9, steps of 0.2, hence 0 … 1. (5, 0.5) is the middle: (236, 142);
    (10, 0.9): 252 − 0.9·220 = 54.
    """
    series = [Series("a", [(0.0, 0.0), (5.0, 0.5), (10.0, 0.9)], "pruned")]
    root = ET.fromstring(line_chart("t", "d", series, Axis("x"), Axis("y"), None))
    path = next(p for p in root.iter(f"{SVG}path") if p.get("class") == "line")
    assert path.get("d") == "M56.0,252.0L236.0,142.0L416.0,54.0"
    ticks = [t.text for t in root.iter(f"{SVG}text") if t.get("class") == "tick"]
    assert ticks == ["0", "0.2", "0.4", "0.6", "0.8", "1", "0", "2", "4", "6", "8", "10"]


def test_logarithmic_axes_and_the_marker():
    """Fault: a log axis drawn linearly, the rule of K placed by value and not by logarithm.

    x spans 1 … 100, so 10 is the middle, 236. y spans 1e-4 … 1 in whole decades, so 1e-2 is the
    middle, 142. A y of 0 has no logarithm: a gap.
    """
    points = [(1.0, 1e-4), (10.0, 1e-2), (20.0, 0.0), (100.0, 1.0)]
    series = [Series("a", points, "parity")]
    x, y = Axis("K", log=True), Axis("y", log=True)
    marker = Marker(10.0, "K = 10", ((1e-2, "coverage"),))
    root = ET.fromstring(line_chart("t", "d", series, x, y, marker))
    path = next(p for p in root.iter(f"{SVG}path") if p.get("class") == "line")
    assert path.get("d") == "M56.0,252.0L236.0,142.0M416.0,32.0"
    rule = next(e for e in root.iter(f"{SVG}line") if e.get("class") == "rule")
    assert (rule.get("x1"), rule.get("x2")) == ("236.0", "236.0")
    ring = next(e for e in root.iter(f"{SVG}circle") if e.get("class") == "ring coverage")
    assert (ring.get("cx"), ring.get("cy")) == ("236.0", "142.0")


def test_the_marked_vocabulary_size_is_the_chosen_one(metrics, tmp_path):
    """Fault: the rule at V and not at K. K = 4 of 1 … 8: 56 + 360·log 4/log 8 = 296."""
    coverage = svgs(page_of(metrics, tmp_path))[2]
    rule = next(e for e in coverage.iter(f"{SVG}line") if e.get("class") == "rule")
    assert rule.get("x1") == "296.0"


def test_an_exact_match_is_drawn_on_the_logarithmic_axis(metrics, tmp_path):
    """Fault: a difference of 0 lost (log 0), so that perfect agreement shows an empty chart.

    Step 1 differs by 0, drawn at 1e-17, the lower end of the axis: (56, 252).
    """
    page = page_of(metrics, tmp_path)
    chart = svgs(page)[4]
    path = next(p for p in chart.iter(f"{SVG}path") if p.get("class") == "line")
    assert (path.get("d") or "").startswith("M56.0,252.0L416.0,")
    assert "1 of 2 losses are equal to the last bit" in page


@pytest.mark.parametrize(
    "points",
    [
        [(3.0, 2.0)],
        [(10.0, 100.0)],
        [(1.0, 0.0), (2.0, 0.0)],
        [(1.0, 0.1), (2.0, math.nextafter(0.1, 1))],
    ],
)
@pytest.mark.parametrize("log", [False, True])
def test_flat_and_single_points_are_drawn(points, log):
    """Fault: a division by a zero span; on a log axis zeros alone are no data, not a crash."""
    chart = line_chart(
        "t", "d", [Series("a", points, "full")], Axis("x", log), Axis("y", log), None
    )
    if log and all(y == 0 for _, y in points):
        assert "No data" in chart
    else:
        dots = [c for c in ET.fromstring(chart).iter(f"{SVG}circle")]
        assert len(dots) == len(points)
        assert all(56 <= float(dot.get("cx", "nan")) <= 416 for dot in dots)
        assert all(32 <= float(dot.get("cy", "nan")) <= 252 for dot in dots)


def test_whole_axes_have_no_half_slots():
    """Fault: slots 0, 0.2, 0.4 … on a block of two."""
    chart = line_chart(
        "t", "d", [Series("a", [(0.0, 1.0), (1.0, 2.0)], "full")], Axis("x", whole=True),
        Axis("y"), None,
    )  # fmt: skip
    texts = [t for t in ET.fromstring(chart).iter(f"{SVG}text") if t.get("class") == "tick"]
    assert [t.text for t in texts if t.get("text-anchor") == "middle"] == ["0", "1"]


@pytest.mark.parametrize(
    ("span", "step"), [(10, 2), (9, 2), (5, 1), (5.1, 2), (0.9, 0.2), (300, 100), (26, 10), (24, 5)]
)
def test_nice_steps(span, step):
    """Fault: a step that gives more than five intervals, or one that is not 1, 2, 5 × 10ⁿ."""
    assert nice_step(span) == step


def test_linear_ticks_against_hand_written_lists():
    """Fault: 0.6000000000000001, −0, an end tick lost to rounding, ticks outside the range."""
    assert linear_ticks(0.0, 1.0, 0.2) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert linear_ticks(1.0, 300.0, 100.0) == [100.0, 200.0, 300.0]
    assert [str(t) for t in linear_ticks(-0.1, 0.1, 0.1)] == ["-0.1", "0.0", "0.1"]
    assert linear_ticks(0.7, 0.9, 0.05) == [0.7, 0.75, 0.8, 0.85, 0.9]


def test_log_ticks_against_hand_written_lists():
    """Fault: a crowd of labels over many decades, none over few, an end tick lost to rounding."""
    assert log_ticks(64, 8192) == [100, 200, 500, 1000, 2000, 5000]
    assert log_ticks(1, 100) == [1, 2, 5, 10, 20, 50, 100]
    assert log_ticks(1e-4, 1) == [1e-4, 1e-3, 1e-2, 1e-1, 1]
    # 15 decades, at most 7 intervals: every third.
    assert log_ticks(1e-17, 1e-2) == [1e-17, 1e-14, 1e-11, 1e-8, 1e-5, 1e-2]


def test_labels_are_moved_apart_inside_the_plot():
    """Fault: labels on top of each other, in exchanged order, or pushed out at the bottom."""
    assert spread([100, 10, 102], gap=30, low=0, high=200) == [100, 10, 130]
    assert spread([195, 198, 190], gap=30, low=0, high=200) == [170, 200, 140]
    assert spread([-5], gap=30, low=0, high=200) == [0]


def test_running_mean_leaves_gaps_out():
    """Fault: a gap counted as 0, or a window that looks at one side only."""
    points = [(0.0, 1.0), (1.0, None), (2.0, 3.0), (3.0, 8.0)]
    assert running_mean(points, 3) == [(0.0, 1.0), (1.0, None), (2.0, 5.5), (3.0, 5.5)]
