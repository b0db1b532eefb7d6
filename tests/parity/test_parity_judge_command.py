"""The `parity judge` command, what it needs to be imported, and the public package through it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_parity_judge import PRUNED, ROOT, VECTORS, Bare, NumpyDraft, judged
from typer.testing import CliRunner

from parity.cli import app
from parity.conventions import Conventions
from parity.judge_report import markdown, overall


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("few")
    for name in (PRUNED, "decoding-greedy"):
        (place / name).symlink_to(VECTORS / name)
    return place


def test_command_writes_table_json_and_markdown(few: Path, tmp_path: Path) -> None:
    """Faults: an exit status of 0 whatever was found; files that say something else."""
    (tmp_path / "half.py").write_text(
        "from parity.conventions import Conventions\n"
        "from tests.parity.test_parity_judge import NumpyDraft, halved\n"
        "undeclared = NumpyDraft(halved)\n"
        "declared = NumpyDraft(halved, Conventions(l1='half'))\n"
    )
    sys.path.insert(0, str(tmp_path))
    try:
        files = ["--json", str(tmp_path / "j"), "--markdown", str(tmp_path / "m"), str(few)]
        runs = {
            name: CliRunner().invoke(app, ["judge", "--implementation", f"half:{name}", *files])
            for name in ("undeclared", "declared")
        }
    finally:
        sys.path.remove(str(tmp_path))
    assert {name: run.exit_code for name, run in runs.items()} == {"undeclared": 1, "declared": 0}
    assert (
        "not judged: whole cases, decode: the adapter has none (1 case)" in runs["declared"].output
    )
    said = json.loads((tmp_path / "j").read_text())
    assert said["verdict"] == "declared convention"
    assert said["declared"] == {"l1": "half"}
    row = "| declared convention | 1 | - |"
    assert row in (tmp_path / "m").read_text()


def test_command_says_in_a_line_why_it_cannot_run(few: Path, tmp_path: Path) -> None:
    """Faults: a traceback; a skipped implementation with the exit status of a right one."""
    for name, text in {
        "no.such:thing": "no.such cannot be imported here",
        "json:nothing": "json has no 'nothing'",
        "json:dumps": "is no adapter",
        "speculators": "skipped: the package speculators is not installed here",
        "specforge": "skipped: the package specforge is not installed here",
        "tests.parity.test_parity_judge_command:Odd": "known are 'sum', 'half'",
    }.items():
        done = CliRunner().invoke(app, ["judge", "--implementation", name, str(few)])
        assert (done.exit_code, text in done.output) == (2, True), (name, done.output)
    done = CliRunner().invoke(
        app, ["judge", "--implementation", "torch_port", str(tmp_path / "none")]
    )
    assert (done.exit_code, "no case found" in done.output) == (2, True)


class Odd(Bare):
    conventions = Conventions(l1="quarter")


def test_declared_conventions_that_no_case_shows_are_listed(few: Path) -> None:
    """Fault: a declaration that counts as confirmed by cases that cannot show it."""
    adapter = NumpyDraft(conventions=Conventions(window="anchor"))
    verdicts = judged(adapter, PRUNED)
    assert overall(verdicts) == "conforms"
    assert "Declared, and not visible in these cases: a window" in markdown(adapter, verdicts)


def test_judging_needs_neither_framework() -> None:
    """Fault: a judge that cannot be run where somebody else's implementation is."""
    absent = dict.fromkeys(["torch", "jax", "transformers", "pydantic"])
    code = f"import sys; sys.modules.update({absent!r}); import parity.judge_commands"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


PYTHON = os.environ.get("SPECULATORS_PYTHON", "")


@pytest.mark.skipif(not PYTHON, reason="SPECULATORS_PYTHON names no Python with speculators")
def test_the_public_package_differs_by_its_declared_conventions(tmp_path: Path) -> None:
    """Fault: an adapter that no longer fits the package, or conventions that are not its own."""
    shown = ["pruned-gated", "full-rnn-sliding", "dflash-pruned", "dpace-both"]
    for name in (*shown, "error-no-supervision"):
        (tmp_path / name).symlink_to(VECTORS / name)
    command = [PYTHON, "-m", "parity", "judge", "--implementation", "speculators"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "j"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = json.loads((tmp_path / "j").read_text())
    assert said["verdict"] == "declared convention"
    assert said["declared_but_not_visible"] == []
    assert {case["verdict"] for case in said["cases"]} == {"declared convention"}


PACKAGE = os.environ.get("SPECFORGE_PATH", "")


@pytest.mark.skipif(not PACKAGE, reason="SPECFORGE_PATH names no directory with specforge")
def test_the_public_trainer_conforms(tmp_path: Path) -> None:
    """Fault: an adapter that no longer fits the package, or hands over too little to judge."""
    shown = ["full-vanilla", "full-rnn-sliding", "dflash-full-nodecay", "pruned-vanilla"]
    for name in shown:
        (tmp_path / name).symlink_to(VECTORS / name)
    command = [sys.executable, "-m", "parity", "judge", "--implementation", "specforge"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "j"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), PACKAGE))},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    said = json.loads((tmp_path / "j").read_text())
    verdicts = {case["case"]: case["verdict"] for case in said["cases"]}
    assert verdicts == dict.fromkeys(shown[:3], "conforms") | {"pruned-vanilla": "not judged"}
