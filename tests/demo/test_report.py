"""The demo's report: what it says, and that it is whole and harmless."""

import copy
import re
import xml.etree.ElementTree as ET

import pytest
from report_pages import (
    BAD_NUMBERS,
    SVG,
    page_of,
    parsed,
    replace_numbers,
    said,
    svgs,
)

from torch_port.demo.report import write_report
from torch_port.demo.summary import comparison, headlines, verdict
from torch_port.drawing.svg import (
    Axis,
    Marker,
    Series,
    line_chart,
)
from torch_port.errors import UserError

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
