"""The search for the longest samples that fit, and the two commands."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rehearsal_toys import toy_config, toy_run
from rich.console import Console
from typer.testing import CliRunner

from torch_port.cli import app
from torch_port.errors import UserError
from torch_port.rehearsal.commands import bytes_of, vocabularies
from torch_port.rehearsal.fit import STEP, Frontier, Longest, chart, longest, show_frontier
from torch_port.rehearsal.rehearse import MARGIN
from torch_port.rehearsal.variants import changed, with_vocabulary

GIB = 2**30
USABLE = 64 * GIB * (1 - MARGIN)
runner = CliRunner()


def frontier(largest: int = 32768, hbm: int = 64 * GIB) -> Frontier:
    run = changed(toy_run(), "data", max_length=4096, num_anchors=1024)
    return Frontier(run, toy_config(), hbm, 8, largest)


def search(
    monkeypatch: pytest.MonkeyPatch, passes: Callable[[int], float], update: float, largest: int
) -> tuple[Longest, list[int]]:
    """Search with peaks given by functions of the length, in GiB."""
    asked: list[int] = []

    def peak(self: Frontier, case: object, length: int) -> tuple[int, int]:
        asked.append(length)
        return int(max(passes(length), update) * GIB), int(passes(length) * GIB)

    monkeypatch.setattr(Frontier, "peak", peak)
    return longest(frontier(largest), (48, "none", 1)), asked


@pytest.mark.parametrize(
    "passes",
    [
        lambda s: 40 + s / 1000,
        lambda s: 40 + s / 1000 + (s / 12000) ** 2,
        lambda s: 40 + 0.9 * s**0.32,
        lambda s: 10 + s / 700,
        lambda s: 58.8 + s / 10000,
    ],
    ids=["line", "bent up", "bent down", "steep", "nearly full"],
)
def test_longest_fits_and_a_step_more_does_not(
    monkeypatch: pytest.MonkeyPatch, passes: Callable[[int], float]
) -> None:
    """Faults: an interpolation taken for a rehearsal, a limit off by one step, the margin lost."""
    found, asked = search(monkeypatch, passes, 50.0, 32768)
    best = max((s for s in range(0, 32769, STEP) if s and passes(s) * GIB <= USABLE), default=0)
    assert found.length == best
    assert len(asked) == len(set(asked)) <= 7  # a table has 24 such searches
    assert best in asked or not best
    assert found.anchors == best // 4


def test_ends_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: an endless search where nothing fits, or all does; an optimizer that alone is too
    large taken for samples that are too long."""
    found, _ = search(monkeypatch, lambda s: 1.0, 2.0, 8192)
    assert (found.length, found.bounded) == (8192, True)
    found, _ = search(monkeypatch, lambda s: 1.0, 60.0, 8192)
    assert (found.length, found.anchors, found.bounded) == (0, 0, False)
    assert found.peak == 60 * GIB


def test_sizes_of_the_buffers_follow_the_vocabulary() -> None:
    """Fault: a pruned draft rehearsed with the objective's buffers of the full one."""
    run, config = with_vocabulary(toy_run(objective_buffer_mib=512.0), toy_config(), 12)
    assert config.draft_vocab_size == 12
    assert run.compute.objective_buffer_mib == 128  # 12 of 48


def test_sizes_on_the_command_line() -> None:
    """Faults: GB taken as 10⁹ bytes, a size that is no number, more ids than the target has."""
    assert bytes_of("64GB") == bytes_of("64") == bytes_of("64 GiB") == 64 * GIB
    assert vocabularies("16000, v,64000", 248320) == [248320, 64000, 16000]
    for text in ("", "64TB", "0GB", "-1"):
        with pytest.raises(UserError, match="is no memory size"):
            bytes_of(text)
    for text in ("V,x", "0", "300000"):
        with pytest.raises(UserError, match="is no draft vocabulary"):
            vocabularies(text, 248320)


def test_table_and_chart_show_every_setting() -> None:
    """Fault: a setting that is lost, or that is shown as another's."""
    found = [
        Longest(k, r, c, 1024 * (i + 1), 256 * (i + 1), 50 * GIB, i == 3, 4)
        for i, (k, r, c) in enumerate(
            (k, r, c) for c in (1, 8) for r in ("none", "mlp") for k in (48, 12)
        )
    ]
    console = Console(width=80, record=True)
    show_frontier(found, console)
    text = " ".join(console.export_text().split())
    assert "1024 (50.0)" in text
    assert "≥ 4096 (50.0)" in text
    assert "an anchor to 4 tokens" in text
    assert text.count("8, fsdp") == 2
    drawn = chart(found)
    for name in ("recompute none", "recompute mlp", "8 cards, fsdp", "one card"):
        assert name in drawn


def tiny_run(path: Path) -> Path:
    """A run file whose draft config is there, and nothing else."""
    config = path / "config.json"
    config.write_text(json.dumps(toy_config().to_hf()), encoding="utf-8")
    run = path / "run.yaml"
    run.write_text(
        f"""
algorithm: dspark
draft: {{config: {config}}}
target: {{path: none}}
data: {{path: none, max_length: 24, num_anchors: 4}}
optimizer: {{peak_rate: 1e-3, warmup_steps: 1, total_steps: 10}}
""",
        encoding="utf-8",
    )
    return run


def test_rehearse_command(tmp_path: Path) -> None:
    """Faults: a report that needs the target or the features, a status that does not follow from
    the verdict, a file that is not written, a place that a terminal of 80 columns cuts."""
    run, out = tiny_run(tmp_path), tmp_path / "r.json"
    done = runner.invoke(
        app,
        [
            "rehearse",
            str(run),
            "data.num_anchors=3",
            "--json",
            str(out),
            "--html",
            str(tmp_path / "r.html"),
        ],
        env={"COLUMNS": "80"},
    )
    assert done.exit_code == 0, done.output
    assert re.search(r"fits in 64 GiB less 8 %: yes", done.output)
    assert max(map(len, done.output.splitlines())) == 80
    assert "…" not in done.output
    report = json.loads(out.read_text(encoding="utf-8"))
    assert report["run"]["anchors"] == 3
    assert report["memory"]["peak"] > 0
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    small = runner.invoke(app, ["rehearse", str(run), "--hbm", "0.00001GB"])
    assert small.exit_code == 1
    assert "no, " in small.output


def test_fit_command(tmp_path: Path) -> None:
    """Faults: workers that cannot be started from the command, settings that get lost between
    processes, a chart that is not written."""
    run, svg, out = tiny_run(tmp_path), tmp_path / "f.svg", tmp_path / "f.json"
    done = runner.invoke(
        app,
        [
            *("fit", str(run), "data.num_anchors=1", "--sizes", "V", "--largest", "512"),
            *("--world-size", "1", "--svg", str(svg), "--json", str(out)),
        ],
    )
    assert done.exit_code == 0, done.output
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [(f["recompute"], f["length"], f["anchors"], f["bounded"]) for f in found] == [
        (recompute, 512, 21, True) for recompute in ("none", "mlp", "layer")
    ]
    assert svg.read_text(encoding="utf-8").startswith("<svg")
