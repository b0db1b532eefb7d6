"""The report of a rehearsal: its numbers on the terminal, in the page and in the chart."""

import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from torch_port.drawing.areas import HEIGHT, LEFT, TOP, WIDTH, Layer, Limit, Span, stacked_chart
from torch_port.drawing.svg import Axis
from torch_port.rehearsal.memory import CATEGORIES, Held, MemoryReport, Point
from torch_port.rehearsal.page import _spans, page, write_page
from torch_port.rehearsal.printing import show, tera, verdict_lines
from torch_port.rehearsal.rehearse import Rehearsal
from torch_port.rehearsal.report import Looks, passes, report_of
from torch_port.rehearsal.trace import Finding

GiB = 2**30
SYNC = Finding("sync", "aten::_local_scalar_dense.default", "a.py:9", "one; documented", 2, False)
HOST = Finding("host tensor", "aten::mul.Tensor", "b.py:7", "mul takes <b>a mask</b> & more", 4)
TABLE = [
    Finding("upload", "aten::_to_copy.default", f"c.py:{n}", "x; first step alone", 1, False)
    for n in (3, 4)
]


def a_report(peak: float, *findings: Finding, usable: float = 58.88) -> dict[str, Any]:
    """A report with numbers made by hand: `peak` GiB, three quarters of it optimizer state."""
    sizes = dict.fromkeys(CATEGORIES, 0)
    sizes |= {"parameters": int(peak * GiB / 4), "optimizer state": int(peak * GiB * 3 / 4)}
    points = [Point(n, f"step {1 + n // 3}: forward", sizes) for n in range(6)]
    held = Held(int(peak * GiB / 4), 2, "parameters", (8, 4), "bfloat16", "aten::a", "d.py:1", "x")
    memory = MemoryReport(
        peak=int(peak * GiB),
        by_category=sizes,
        name="aten::add.Tensor",
        where="d.py:5",
        phase="step 2: optimizer",
        held=[held],
        persistent=GiB,
        host=0,
        by_phase={"step 1: forward": GiB, "step 2: forward": int(peak * GiB)},
        timeline=points,
    )
    rehearsal = Rehearsal("npu", 1, 64 * GiB, int(usable * GiB), 3.0, 99, memory, [*findings])
    return report_of(rehearsal, Looks.at("npu"), {"algorithm": "dspark", "K": 12}, naive=4 * 10**12)


def printed(report: dict[str, Any]) -> str:
    stream = io.StringIO()
    show(report, Console(file=stream, width=100))
    return stream.getvalue()


# --- The terminal --------------------------------------------------------------------------------


def test_the_verdict_by_hand() -> None:
    """Faults: the margin forgotten, or taken twice: 64 GiB less 8 % are 58.88."""
    fits, runs = (line.plain for line in verdict_lines(a_report(46.58)))
    assert fits == "fits in 64 GiB less 8 %: yes, 12.3 GiB free"
    assert runs == "runs on the device as it is: yes"
    report = a_report(62.0, HOST)
    fits, runs = (line.plain for line in verdict_lines(report))
    assert fits == "fits in 64 GiB less 8 %: no, 3.12 GiB too much"
    assert runs == "runs on the device as it is: no, 1 finding below"
    assert [passes(a_report(40.0)), passes(report), passes(a_report(40.0, HOST))] == [
        True,
        False,
        False,
    ]


def test_the_table_says_each_thing_once_and_fits() -> None:
    """Faults: a finding under no section; a noted one in red; a line beyond 100 columns."""
    text = printed(a_report(40.0, HOST, SYNC, *TABLE))
    for section in ("Memory", "Placement", "Operators", "Collectives", "Operations"):
        assert len(re.findall(rf"^{section} ", text, flags=re.MULTILINE)) == 1
    assert text.count("mul takes <b>a mask</b> & more") == 1
    assert "host tensor b.py:7 (4 calls)" in text
    assert "sync, documented: a.py:9" in text
    # Two lines of one file are one row: the first.
    assert "upload, first step alone: c.py:3" in text
    assert "c.py:4" not in text
    assert re.search(r"parameters +10\.0 GiB +█+ +25\.0%", text)
    assert re.search(r"optimizer state +30\.0 GiB +█+ +75\.0%", text)
    assert max(len(line) for line in text.split("\n")) <= 100


@pytest.mark.parametrize(
    ("operations", "text"), [(0, "0"), (131_000_000_000_000, "131"), (2_750_000_000_000, "2.75")]
)
def test_operations_are_told_in_units_of_a_trillion(operations: int, text: str) -> None:
    """Fault: a unit off by a thousand."""
    assert tera(operations) == text


# --- The page ------------------------------------------------------------------------------------


class Tags(HTMLParser):
    """Opened and closed tags; raises for one that is closed out of turn."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    """Faults: something loaded from elsewhere, a script, a tag left open, text not escaped."""
    report = json.loads(json.dumps(a_report(40.0, HOST, SYNC, *TABLE)))  # as --json writes it
    write_page(report, tmp_path / "report.html")
    html = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert html == page(report)
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    assert not tags.seen & {"script", "link", "img", "iframe"}
    assert {"svg", "table", "h2", "details"} <= tags.seen
    assert not re.search(r"src=|url\(|@import|href=", html)
    assert set(re.findall(r"https?://[^\"<]*", html)) <= {"http://www.w3.org/2000/svg"}
    assert "&lt;b&gt;a mask&lt;/b&gt; &amp; more" in html
    assert "<b>a mask" not in html
    assert "fits in 64 GiB less 8 %: yes, 18.9 GiB free" in html


def test_the_page_shows_the_cards_line_only_where_it_can_be_seen() -> None:
    """Fault: a toy's memory drawn as a flat line below a card's 64 GiB."""
    assert 'class="limit"' in page(a_report(40.0))
    assert 'class="limit"' not in page(a_report(0.5))


def test_a_phase_is_drawn_once() -> None:
    """Fault: with sharding, a stretch of “set-up” in the middle of each forward pass."""
    phases = ["set-up", "step 1: forward", "set-up", "step 1: forward", "step 1: backward"]
    points = [{"phase": phase, "operator": n} for n, phase in enumerate(phases)]
    spans = _spans(points, {"set-up": GiB})
    assert [(span.name, span.start, span.stop) for span in spans] == [
        ("set-up", 0, 1),
        ("step 1: forward", 1, 4),
        ("step 1: backward", 4, 4),
    ]
    assert spans[0].note == "(peak 1.00 GiB)"


# --- The chart -----------------------------------------------------------------------------------


def test_stacked_areas_by_hand() -> None:
    """Faults: layers drawn over each other instead of on top; the limit on another scale.

    The plot is 300 pixels high and spans 0 … 10: 30 pixels a unit. At x = 1 the first layer is 2,
    the second 3 on top of it.
    """
    chart = stacked_chart(
        "name",
        "what",
        [0.0, 1.0],
        [Layer("a", "one", [1.0, 2.0]), Layer("b", "two", [2.0, 3.0])],
        [Limit(10.0, "the limit")],
        [Span(0.0, 1.0, "a phase")],
        Axis("units"),
    )
    right, floor = WIDTH - 20, HEIGHT - 40
    assert (floor - TOP) / 10 == 30
    first, second = re.findall(r'<path class="area" d="M([^Z]*)Z"', chart)
    assert first.split("L") == [
        *(f"{LEFT}.0,{floor - 30}.0", f"{right}.0,{floor - 60}.0"),
        *(f"{right}.0,{floor}.0", f"{LEFT}.0,{floor}.0"),
    ]
    assert second.split("L")[:2] == [f"{LEFT}.0,{floor - 90}.0", f"{right}.0,{floor - 150}.0"]
    assert f'class="limit" x1="{LEFT}" x2="{right}" y1="{TOP}.0"' in chart
    assert "<title>b: at most 3</title>" in chart
    assert "a phase" in chart


def test_a_chart_of_nothing_says_so() -> None:
    """Fault: an empty frame, or an error, where nothing was measured."""
    assert "No data" in stacked_chart("n", "d", [], [], [], [], Axis("y"))
