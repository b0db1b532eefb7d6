"""The mutants' runner, its catalogue, and a slice of it."""

import hashlib
import re
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from parity import mutant_commands
from parity.cli import app
from parity.configurations import BY_NAME as CONFIGURATIONS
from parity.mutant_catalogue import (
    ROOT,
    Mutant,
    StaleError,
    catalogue,
    check_fresh,
    markdown,
    mutate,
)
from parity.mutant_commands import conclude
from parity.mutants import Verdict, run_mutants

BY_NAME = {mutant.name: mutant for mutant in catalogue()}
# One of each side, in three checks; none needs more than one compilation.
SLICE = ("count-ties-to-higher-id", "label-shift", "decay-per-two-slots", "map-shifted-by-one")
NO_OP = Mutant(
    name="no-op",
    side="spec",
    clause="§2",
    what="nothing",
    file="jaxdraft/vocabulary.py",
    old="PRUNED = -100\n",
    new="PRUNED = -(50 + 50)\n",
    checks=("vocabulary",),
    configurations=("ties",),
)
ENDS = replace(NO_OP, name="ends", new="import os\n\nos._exit(3)\n")
KILLS = replace(NO_OP, name="kills", new="import os\n\nos.kill(os.getppid(), 9)\nos._exit(1)\n")
STALE = replace(NO_OP, name="stale", old="no such text")
# With two workers something always comes after the one that kills its worker.
MUTATED = [KILLS, ENDS, STALE, NO_OP, *(BY_NAME[name] for name in SLICE)]


def _digests() -> dict[str, str]:
    return {m.file: hashlib.sha256((ROOT / m.file).read_bytes()).hexdigest() for m in MUTATED}


@pytest.fixture(scope="module")
def verdicts() -> dict[str, Verdict]:
    """Verdicts of the slice, of a fault that is none, and of one that ends the process.

    The same two workers serve them all: a fault must not outlive its own process.
    """
    before = _digests()
    found = run_mutants(MUTATED, jobs=2, others=False)
    assert _digests() == before  # nothing on disk changes
    return {verdict.mutant.name: verdict for verdict in found}


@pytest.mark.parametrize("name", SLICE)
def test_a_fault_is_seen_by_its_check(verdicts: dict[str, Verdict], name: str) -> None:
    """Fault: a runner that injects nothing, or a check that no longer looks there."""
    verdict = verdicts[name]
    assert verdict.detected_by == BY_NAME[name].checks[0], (verdict.finding, verdict.note)
    assert verdict.finding


def test_a_fault_that_is_none_survives(
    verdicts: dict[str, Verdict], capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: a runner that calls everything detected; a survivor that the report leaves out."""
    verdict = verdicts["no-op"]
    assert verdict.detected_by is None
    assert verdict.note == "ran vocabulary"
    assert conclude([verdict, verdicts["label-shift"]]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("open finding: no-op (spec, §2) survives: nothing")
    assert lines[-1] == "1 of 2 mutants detected"
    assert conclude([verdicts["label-shift"]]) == 0


def test_a_process_that_ends_is_no_detection(verdicts: dict[str, Verdict]) -> None:
    """Fault: a crash counted as detected though no check said anything; a run that hangs on it."""
    verdict = verdicts["ends"]
    assert verdict.detected_by is None
    assert verdict.note == "no verdict: the process ended with status 3"


def test_a_dead_worker_is_replaced(verdicts: dict[str, Verdict]) -> None:
    """Fault: after one process that died (out of memory, say) no later mutant has a verdict."""
    verdict = verdicts["kills"]
    assert verdict.detected_by is None
    assert verdict.note == "no verdict: the worker ended with status -9"
    assert all(verdicts[name].detected_by is not None for name in SLICE)


def test_a_text_that_goes_stale_during_the_run_is_no_detection(
    verdicts: dict[str, Verdict],
) -> None:
    """Fault: the exception of an edit that could not be made, taken for a disagreement by a check.

    Seen: a source was edited while the mutants ran, and "losses" had detected the mutant.
    """
    verdict = verdicts["stale"]
    assert verdict.detected_by is None
    assert verdict.note is not None
    assert verdict.note.startswith("stale: its old text occurs 0 times")


@pytest.mark.parametrize(
    ("old", "times"), [("no such text", 0), ("import jax", 2), ("np.bool_", None)]
)
def test_stale_text_is_refused(old: str, times: int | None) -> None:
    """Fault: a mutant whose text is gone (nothing is injected), or is there twice (which one?)."""
    stale = replace(NO_OP, old=old)
    source = (ROOT / stale.file).read_text(encoding="utf-8")
    assert source.count(old) != 1
    assert times is None or source.count(old) == times
    with pytest.raises(StaleError, match=f"occurs {source.count(old)} times in jaxdraft/voc"):
        mutate(stale, source)


def test_the_command_refuses_a_stale_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a run that reports "detected" of mutants whose source has moved on."""
    stale = replace(STALE, name="no-op")
    monkeypatch.setattr(mutant_commands, "catalogue", lambda: (NO_OP, stale))
    result = CliRunner().invoke(app, ["mutants"])
    assert result.exit_code == 2
    assert "no-op: its old text occurs 0 times in jaxdraft/vocabulary.py" in result.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "nobody"], "--only nobody: there is no such mutant"),
        (["--only", "label-shift", "--side", "port"], "leave no mutant"),
    ],
)
def test_the_command_refuses_what_is_not_there(arguments: list[str], words: str) -> None:
    """Fault: a misspelt name runs nothing and ends with "0 of 0 mutants detected", status 0."""
    result = CliRunner().invoke(app, ["mutants", *arguments])
    assert result.exit_code == 2
    assert words in result.output


def test_the_catalogue_covers_the_sheet() -> None:
    """Fault: a clause without a mutant; one fault under two names; a text that went stale."""
    mutants = catalogue()
    assert len({m.name for m in mutants}) == len(mutants) >= 60
    assert len({(m.file, m.old, m.new) for m in mutants}) == len(mutants)
    clauses = {int(re.match(r"§(\d+)", m.clause).group(1)) for m in mutants}
    assert clauses >= set(range(2, 15))
    assert check_fresh(mutants) == []
    packages = {(m.side, m.file.split("/")[0]) for m in mutants}
    assert packages == {("spec", "jaxdraft"), ("port", "torch_port"), ("port", "parity")}


def test_mutants_look_at_nothing_that_a_quick_run_spares() -> None:
    """Fault: one that only a narrowed run sees, on a configuration that quick runs leave out."""
    named = {name for mutant in catalogue() for name in mutant.configurations}
    assert len(named & set(CONFIGURATIONS)) > 10
    assert [name for name in named & set(CONFIGURATIONS) if not CONFIGURATIONS[name].quick] == []


def test_the_document_is_the_catalogue() -> None:
    """Fault: a table of yesterday's mutants; `parity mutants --list` writes it."""
    text = (ROOT / "docs" / "mutants.md").read_text(encoding="utf-8")
    assert text.endswith("\n" + markdown(catalogue()))
