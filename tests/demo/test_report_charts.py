"""The report's charts: where points, axes and labels land."""

import math
import xml.etree.ElementTree as ET

import pytest
from report_pages import SVG, page_of, svgs

from torch_port.drawing.svg import (
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
