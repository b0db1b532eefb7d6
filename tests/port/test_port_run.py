"""The run file: strict values, overrides, unknown names, and where each setting came from."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from torch_port.config import ObjectiveConfig
from torch_port.errors import UserError
from torch_port.models.registry import ALGORITHMS
from torch_port.run import LoadedRun, RunConfig, load_run, section_classes
from torch_port.settings_file import parse_value

RUN = """
algorithm: dspark
draft: {config: c}
target: {path: t}
data: {path: d}
optimizer:
  peak_rate: 6e-4   # PyYAML alone reads this as a string
  warmup_steps: 4
  total_steps: 20
"""


def load(tmp_path: Path, text: str = RUN, *overrides: str) -> LoadedRun:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_run(path, overrides)


def test_resolved_run_and_origins(tmp_path: Path) -> None:
    """Faults: a default that is not the class's own; an override that does not win."""
    run = load(tmp_path, RUN, "optimizer.total_steps=30", "vocabulary.pinned=[1, 2]")
    assert run.config.optimizer.peak_rate == 0.0006
    assert run.config.optimizer.total_steps == 30
    assert run.config.vocabulary.pinned == (1, 2)
    assert run.config.objective == ObjectiveConfig()
    assert run.config.data.producer == "files"
    assert run.settings["optimizer.peak_rate"] == (0.0006, "file")
    assert run.settings["optimizer.total_steps"] == (30, "override")
    assert run.settings["vocabulary.pinned"] == ((1, 2), "override")
    assert run.settings["objective.l1_alpha"] == (0.9, "default")
    assert run.settings["algorithm"] == ("dspark", "file")
    assert len(run.settings) == 1 + sum(
        len(kind.model_fields) for kind in section_classes(ALGORITHMS["dspark"]).values()
    )


def test_objective_is_the_algorithms_own(tmp_path: Path) -> None:
    """Fault: α's in a run whose loss has none, ignored."""
    assert load(tmp_path, RUN, "algorithm=eagle3").config.objective.steps == 7
    assert load(tmp_path, RUN, "algorithm=dflash", "objective.dpace=both").config.algorithm == (
        "dflash"
    )
    with pytest.raises(
        UserError, match=r"objective\.l1_alpha is of algorithm 'dspark'; algorithm 'dflash'"
    ):
        load(tmp_path, RUN, "algorithm=dflash", "objective.l1_alpha=0.9")


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("optimizer.peek_rate=1", r"peek_rate is no setting; did you mean optimizer\.peak_rate\?"),
        ("peak_rate=1", r"peak_rate is no setting; did you mean optimizer\.peak_rate\?"),
        ("optimiser.eps=1", r"optimiser is no setting; did you mean optimizer\?"),
        ("data.pinned=[1]", r"data\.pinned is no setting; did you mean vocabulary\.pinned\?"),
        ("foo.bar=1", r"foo is no setting; a run file has algorithm, draft, .*, checkpoints$"),
        ("data.zzz=1", r"data\.zzz is no setting; data has path, producer, "),
        ("draft.path=x", r"draft\.path is no setting; did you mean target\.path or data\.path\?"),
        ("algorithm=dsprak", "did you mean 'dspark'"),
        ("algorithm=medusa", "'medusa' is not known; there are eagle3, dspark, dflash$"),
        ("algorithm=[dspark]", "is not known"),
        ("objective.beta=1", r"objective\.beta is of algorithm 'dflash'; algorithm 'dspark' has"),
        ("objective.steps=1", r"objective\.steps is of algorithm 'eagle3'; algorithm 'dspark' has"),
        ("optimizer.total_steps=20.0",
         r"optimizer\.total_steps is 20\.0; set optimizer\.total_steps to a whole number of"),
        ("optimizer.total_steps='20'", r"total_steps is '20'; .*leave out the quotes"),
        ("optimizer.total_steps=", r"total_steps is null; set .* to a whole number"),
        ("optimizer.peak_rate=true", r"peak_rate is true; set .* to a number above 0"),
        ("optimizer.warmup_steps=20",
         r"optimizer\.warmup_steps \(20\) must lie below optimizer\.total_steps \(20\)"),
        ("optimizer.betas=[0, x]", r"optimizer\.betas\[1\] is 'x'; set .* to a list of 2 numbers$"),
        ("objective.detach_confidence=on", r"detach_confidence is 'on'; .* \(true or false\)$"),
        ("objective.detach_confidence=1", r"detach_confidence is 1; set .* \(true or false\)$"),
        ("objective.loss_decay_gamma=0", r"loss_decay_gamma is 0; set .* number above 0 or null$"),
        ("vocabulary.pinned=[1.0]", r"vocabulary\.pinned\[0\] is 1\.0; .*whole numbers"),
        ("vocabulary.pinned=1", r"vocabulary\.pinned is 1; .* a list of whole numbers"),
        ("vocabulary.pinned=[0, -2]", r"pinned\[1\] is -2; .*whole numbers of at least 0"),
        ("vocabulary.map=''", r"vocabulary\.map is ''; .* a non-empty text or null"),
        ("vocabulary.map=7", r"vocabulary\.map is 7; set"),
        ("data.producer=both", r"data\.producer is 'both'; .* to 'files', 'inline' or 'separate'"),
        ("optimizer.total_steps=[]", r"total_steps is \[\]; set .* to a whole number of at least"),
        ("optimizer.eps=[[1], 2]", r"optimizer\.eps is \[\[1\], 2\]; set"),
        ("optimizer.peak_rate=.nan", r"peak_rate is nan; "),
        ("optimizer.eps=.inf", r"optimizer\.eps is inf; .* it must be finite"),
        ("optimizer=1", "name one setting of a section"),
        ("optimizer={eps: 1}", "name one setting of a section"),
        ("algorithm.x=1", "algorithm is a setting, no section"),
        ("optimizer.eps", "expected name=value"),
        ("=1", "expected name=value"),
        ("a..b=1", "expected name=value"),
        ("optimizer.eps=[", "no YAML value"),
    ],
)  # fmt: skip
def test_refused_by_name(tmp_path: Path, override: str, words: str) -> None:
    """Faults: a name that nobody reads; a value turned into another one; a far name suggested.

    Nor may the file be blamed for what an override says.
    """
    with pytest.raises(UserError, match=words) as caught:
        load(tmp_path, RUN, override)
    assert str(caught.value).startswith(f"override {override!r}: ")
    assert "Input should" not in str(caught.value)


def test_each_problem_names_where_it_is_from(tmp_path: Path) -> None:
    """Faults: an override blamed on the file, or the file's own fault on an override beside it."""
    bad = RUN.replace("warmup_steps: 4", "warmup_steps: none")
    with pytest.raises(UserError) as caught:
        load(tmp_path, bad, "optimizer.peak_rate=fast", "optimizer.eps=1e-6")
    assert str(caught.value) == (
        "override 'optimizer.peak_rate=fast': optimizer.peak_rate is 'fast'; set "
        f"optimizer.peak_rate to a number above 0; {tmp_path / 'run.yaml'}: optimizer.warmup_steps "
        "is 'none'; set optimizer.warmup_steps to a whole number of at least 0"
    )
    own = RUN + "objective: {ce_alpha: 0.1, l1_alpha: 0.9, loss_decay_gamma: 4.0}\n"
    with pytest.raises(UserError) as caught:  # the file is right for its own algorithm
        load(tmp_path, own, "algorithm=eagle3")
    assert str(caught.value) == (
        "override 'algorithm=eagle3': objective.ce_alpha, objective.l1_alpha are of algorithm "
        "'dspark'; algorithm 'eagle3' has steps, step_decay: remove them, or set algorithm to "
        "'dspark'; objective.loss_decay_gamma is of algorithm 'dspark' and 'dflash'; algorithm "
        "'eagle3' has steps, step_decay: remove it, or set algorithm to 'dspark' or 'dflash'"
    )
    with pytest.raises(UserError, match=r"^/.*run\.yaml: foo is no setting"):
        load(tmp_path, RUN + "foo: {a: 1}\n", "foo.b=1")


def test_all_wrong_values_are_named_at_once(tmp_path: Path) -> None:
    text = RUN.replace("6e-4", "fast").replace("{path: t}", "{}")
    with pytest.raises(
        UserError, match=r"target\.path is missing; set it to .*; optimizer\.peak_rate is 'fast'"
    ):
        load(tmp_path, text)
    with pytest.raises(UserError, match="algorithm is missing"):
        load(tmp_path, RUN.replace("algorithm: dspark", ""))
    with pytest.raises(UserError, match=r"algoritm is no setting; did you mean algorithm\?"):
        load(tmp_path, RUN.replace("algorithm:", "algoritm:"))
    with pytest.raises(UserError, match="data: expected a section of settings, found 3"):
        load(tmp_path, RUN.replace("{path: d}", "3"))
    assert load(tmp_path, RUN + "vocabulary:\n").config.vocabulary.map is None  # nothing under it


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "found nothing"),
        ("- a", "found list"),
        ("a: [", "no YAML value"),
        (RUN + "algorithm: eagle3\n", "'algorithm' is given twice"),
        ("optimizer: {eps: 1, eps: 2}", "'eps' is given twice"),
        ("? [1]\n: 2", "is no name"),
        ("a: !!python/object/apply:os.getcwd []", "tag tag:yaml.org,2002:python/object"),
        ("a: !!timestamp 7", "tag .*timestamp: write the value out"),
        ("a: \x00", "no YAML value"),
        ("a: &x [*x]", r"alias \*x: write the value out"),
        ("a: " + 5000 * "[", "no YAML value"),
        ("a: " + 5000 * "9", "no YAML value"),
    ],
)
def test_files_that_are_no_settings(tmp_path: Path, text: str, words: str) -> None:
    """Faults: the last of two values taken silently; an object built from a tag; a traceback."""
    with pytest.raises(UserError, match=words):
        load(tmp_path, text)
    with pytest.raises(UserError, match="No such file"):
        load_run(tmp_path / "absent.yaml")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00\xd8")
    with pytest.raises(UserError, match="no UTF-8"):
        load_run(tmp_path / "bytes.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("6e-4", 6e-4), ("1E3", 1000.0), (".5", 0.5), ("1.", 1.0), ("-.inf", -math.inf), ("+7", 7),
        ("010", 10), ("1:30", "1:30"), ("1_000", "1_000"), ("0x10", "0x10"), ("on", "on"),
        ("no", "no"), ("y", "y"), ("true", True), ("null", None), ("~", None), ("", None),
        ("2026-11-29", "2026-11-29"), ("'1'", "1"), ("e4", "e4"), ("[1, a]", [1, "a"]),
    ],
)  # fmt: skip
def test_plain_values_are_what_they_look_like(text: str, value: Any) -> None:
    """Fault: YAML 1.1's octal, sexagesimal, yes/no and dates, and 6e-4 as a string."""
    got = parse_value(text)
    assert got == value
    assert type(got) is type(value)


def test_example_run_file_resolves() -> None:
    """Fault: an example that the schema no longer knows."""
    example = Path(__file__).parents[2] / "examples" / "run.yaml"
    run = load_run(example)
    assert isinstance(run.config, RunConfig)
    assert run.config.optimizer.peak_rate == 6e-4
