"""A run's metrics, and the page that the report makes of them: shared by the report's tests."""

import io
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from typing import Any

from rich.console import Console

from torch_port.demo.report import terminal_table, write_report

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


def example_metrics() -> dict[str, Any]:
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
