"""`parity run` and `parity replay`: exit status, files, and what the page says."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import torch_port.vocabulary.selection
from parity.checks.base import CheckResult, Finding
from parity.cli import app, main
from parity.report import describe, render
from parity.suite import SuiteResult
from torch_port.vocabulary.selection import Ids

RUN = ["run", "--quick", "--only", "vocabulary", "--workers"]


def turned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties to the higher id, in the port alone."""
    right = torch_port.vocabulary.selection._rank

    def wrong(scores: Ids, pins: Ids) -> Ids:
        ranked: Ids = len(scores) - 1 - right(scores[::-1], pins)
        return right(scores, pins) if pins.size else ranked

    monkeypatch.setattr(torch_port.vocabulary.selection, "_rank", wrong)


def test_a_run_writes_its_report_and_says_so(tmp_path: Path) -> None:
    """Faults: worker processes that lose cases; a page that loads something; no exit status."""
    result = CliRunner().invoke(app, [*RUN, "2", "--out", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "1 of 1 checks agree: 540 random cases" in result.output
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["agrees"] is True
    assert document["random_cases"] == 540
    page = (tmp_path / "report.html").read_text()
    assert re.search(r"(src|href)=|<script|url\(|@import", page) is None
    assert "YES" in page


def test_a_disagreement_is_saved_and_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults: exit status 0 for a disagreement; a replay that does not fail, or always does."""
    with monkeypatch.context() as patch:
        turned(patch)
        result = CliRunner().invoke(app, [*RUN, "0", "--out", str(tmp_path)])
        assert result.exit_code == 1
        command = re.findall(r"parity replay (\S+)", result.output)[0]
        again = CliRunner().invoke(app, ["replay", command])
        assert again.exit_code == 1
        assert "t2d is the first tensor that differs" in again.output
    mended = CliRunner().invoke(app, ["replay", f"{command}/case.json"])
    assert mended.exit_code == 0, mended.output
    # A later run that agrees leaves no failing case of an earlier one behind, and nothing else is
    # touched.
    (tmp_path / "failures" / "mine").mkdir()
    result = CliRunner().invoke(app, [*RUN, "0", "--out", str(tmp_path)])
    assert result.exit_code == 0
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["run", "--only", "loses"], "--only loses: no such check; there are vocabulary, blocks"),
        (["run", "--quick", "--out", "FILE"], "is a file; name a directory"),
        (["replay", "FILE"], "no readable case"),
    ],
)
def test_mistakes_are_one_line(
    asked: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Fault: minutes of work before the report cannot be written; a traceback."""
    file = tmp_path / "file"
    file.write_text("x")
    monkeypatch.setattr("sys.argv", ["parity", *(str(file) if a == "FILE" else a for a in asked)])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_the_page_shows_disagreements_mutants_and_blind_spots() -> None:
    """Faults: NaN in JSON; a survivor left out; text that breaks the page."""
    result = CheckResult("losses", {"a <b>": 3}, {"a <b>": float("inf")}, {"a <b>": 1e-10})
    result.findings = [
        Finding("losses", "a <b>", "hidden", float("inf"), 1e-10, "hidden & more", None)
    ]
    training = CheckResult("training", {"run": 1}, {"run": 1e-13}, {"run": 1e-8})
    training.curves = {"run": [1e-16, 1e-15]}
    suite = SuiteResult({"losses": result, "training": training}, True, 7, "now")
    document = describe(suite, {id(result.findings[0]): "parity replay x"})
    json.dumps(document, allow_nan=False)
    entries = [
        {"name": "shifted", "detected_by": "blocks"},
        {"name": "hidden one", "detected_by": None},
    ]
    page = render(document, {"entries": entries})
    for words in ("parity replay x", "hidden &amp; more", "a &lt;b&gt;", "1 of 2", "hidden one"):
        assert words in page, words
    assert ">NO<" in page
    assert "several ranks or micro-batches" in page  # a blind spot of losses
    assert "seed 7" in page
    assert "parity mutants" in render(document, None)
