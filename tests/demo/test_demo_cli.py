"""`torch-port demo` as a process: a tiny run to its report, and what it refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

TINY = """
import sys
from pathlib import Path
from rich.console import Console
from torch_port.demo.recipe import Recipe
from torch_port.demo.run import run_demo

recipe = Recipe(
    name="tiny", max_modules=60, heldout_percent=25, vocab_size=400, max_length=64, hidden_size=32,
    intermediate_size=48, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
    target_steps=3, target_batch=4, target_lr=1e-3, target_warmup=1, capture_train=12,
    capture_heldout=6, draft_vocab_size=100, block_size=4, markov_rank=8, anchors=4,
    draft_steps=6, draft_batch=2, draft_warmup=2, parity_steps=2, tau_gain=-1.0,
)
agrees = run_demo(recipe, Path(sys.argv[1]), False, Console())
sys.exit(0 if agrees else 1)
"""


def run(arguments: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment,
    )


@pytest.fixture(scope="module")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    root = tmp_path_factory.mktemp("demo")
    out = root / "out"
    done = run(["-W", "error", "-c", TINY, str(out)], TORCH_PORT_CACHE=str(root / "cache"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return out, done.stdout


def test_run_leaves_report_metrics_drafts_and_map(tiny_run: tuple[Path, str]) -> None:
    out, _ = tiny_run
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["vocabulary"]["size"] == 100
    for name, rows in (("pruned", 100), ("full", metrics["vocabulary"]["of"])):
        weights = load_file(out / name / "model.safetensors")
        assert len(weights["markov_head.markov_w2.weight"]) == rows
        assert ("t2d" in weights) == (name == "pruned")
        run_metrics = metrics["runs"][name]
        assert [point["step"] for point in run_metrics["curve"]] == list(range(1, 7))
        assert run_metrics["heldout"]["trained"] != run_metrics["heldout"]["untrained"]
    html = (out / "report.html").read_text()
    assert html.rstrip().endswith("</html>")


def test_pruned_step_needs_less_memory(tiny_run: tuple[Path, str]) -> None:
    """Fault: full-V logits in the pruned step."""
    runs = json.loads((tiny_run[0] / "metrics.json").read_text())["runs"]
    assert runs["pruned"]["peak_bytes"] < runs["full"]["peak_bytes"]


def test_specification_agrees(tiny_run: tuple[Path, str]) -> None:
    """Fault: a comparison that did not run and is reported as agreement."""
    out, stdout = tiny_run
    parity = json.loads((out / "metrics.json").read_text())["parity"]
    assert parity["ran"]
    assert parity["agrees"]
    names = [check["name"] for check in parity["checks"]]
    assert len(names) == 3 * (3 + 1) + 2 * 2
    assert sum("stored log normaliser" in name for name in names) == 3
    assert sum("every gradient" in name for name in names) == 3
    assert len(parity["trajectory"]) == 2
    assert re.search(r"parity: ok .*every gradient", stdout)


def test_a_wrong_number_is_found(
    tiny_run: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: `parity demo` agreeing whatever the numbers say. One gradient moves by 1e-6."""
    import parity.checks.losses
    from parity.demo import check_demo
    from parity.vectors import answer_case

    def wrong(case, side, dtype):
        answer = answer_case(case, side, dtype)
        if side == "port":
            answer.gradients["fc.weight"][0, 0] += 1e-6
        return answer

    monkeypatch.setattr(parity.checks.losses, "answer_case", wrong)
    result = check_demo(tiny_run[0], lambda text: None)
    failed = [check["name"] for check in result["checks"] if not check["passed"]]
    assert not result["agrees"]
    assert len(failed) == 3
    assert all("every gradient" in name for name in failed)


def test_a_case_that_cannot_be_compared_fails(tiny_run: tuple[Path, str]) -> None:
    """Fault: a side that refuses or breaks off counted as agreement, or ending in a traceback."""
    out, _ = tiny_run
    case = out / "parity" / "full-trained" / "case.json"
    before = case.read_text()
    document = json.loads(before)
    document["config"]["dflash_config"]["markov_head_type"] = "lstm"
    steps = out / "parity" / "training" / "tensors.safetensors"
    held = steps.read_bytes()
    tensors = load_file(steps)
    try:
        case.write_text(json.dumps(document))
        tensors["steps/1/loss_mask"].zero_()
        save_file(tensors, steps)
        done = run(["-m", "parity", "demo", str(out)])
    finally:
        case.write_text(before)
        steps.write_bytes(held)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert re.search(r"FAIL full, trained.*not built", done.stdout)
    assert re.search(r"FAIL AdamW steps, float64: not compared.*no supervised", done.stdout)
    assert not json.loads((out / "parity.json").read_text())["agrees"]


def cli(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_port", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env=os.environ | {"TORCH_PORT_CACHE": str(cwd / "cache")},
    )


def test_output_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    """Faults: an earlier run mixed with a new one; somebody's files removed by --overwrite."""
    held = tmp_path / "held"
    held.mkdir()
    (held / "demo-run.json").write_text('{"command": "torch-port demo"}')
    done = cli("demo", "--quick", "--out", "held", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("Error: --out held already holds a run")
    assert "--overwrite" in done.stderr
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "thesis.tex").write_text("years of work")
    (foreign / "demo-run.json").write_text('{"algorithm": "dspark"}')  # a marker of somebody else
    done = cli("demo", "--quick", "--out", "foreign", "--overwrite", cwd=tmp_path)
    assert done.returncode == 2
    assert "no run of the demo" in done.stderr
    assert (foreign / "thesis.tex").read_text() == "years of work"
    (tmp_path / "file").write_text("")
    done = cli("demo", "--out", "file", cwd=tmp_path)
    assert done.returncode == 2
    assert "is a file" in done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "foreign", "held"]


def test_unusable_cache_leaves_the_earlier_run_alone(tmp_path: Path) -> None:
    """Faults: --overwrite removing a run before anything was checked; a half-made new directory."""
    held = tmp_path / "held"
    held.mkdir()
    (held / "demo-run.json").write_text('{"command": "torch-port demo"}')
    (held / "report.html").write_text("the earlier report")
    (tmp_path / "cache").write_text("a file where the cache should be")
    for out in (["--out", "held", "--overwrite"], ["--out", "fresh"], []):
        done = cli("demo", "--quick", *out, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith("Error: ")
        assert "TORCH_PORT_CACHE" in done.stderr
    assert (held / "report.html").read_text() == "the earlier report"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache", "held"]


def test_help_teaches(tmp_path: Path) -> None:
    done = cli("demo", "--help", cwd=tmp_path)
    assert done.returncode == 0
    for word in ("--quick", "--out", "--overwrite", "TORCH_PORT_CACHE", "Exit status"):
        assert word in done.stdout


def test_every_run_gets_its_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the README's command failing the second time, within the same second even."""
    from torch_port.demo.output import open_output

    monkeypatch.chdir(tmp_path)
    made = {open_output(None, False, "tiny") for _ in range(3)}
    assert len(made) == 3
    assert all((directory / "demo-run.json").is_file() for directory in made)
    replaced = tmp_path / "again"
    open_output(replaced, False, "tiny")
    (replaced / "old").mkdir()
    open_output(replaced, True, "tiny")
    assert [p.name for p in replaced.iterdir()] == ["demo-run.json"]


@pytest.mark.parametrize(("trained", "learned"), [(1.6, True), (1.2, False)])
def test_a_draft_that_did_not_learn_is_no_success(trained: float, learned: bool) -> None:
    """Fault: an exit status of 0 whatever training did. τ 1.1 untrained, a gain of 0.3 asked."""
    import io
    from types import SimpleNamespace

    from rich.console import Console

    from torch_port.demo.recipe import FULL
    from torch_port.demo.run import _learned

    said = io.StringIO()
    heldout = {"untrained": {"tau": 1.1}, "trained": {"tau": trained}}
    run_ = SimpleNamespace(metrics={"heldout": heldout})
    assert _learned(run_, FULL, Console(file=said)) is learned
    assert ("NOT" in said.getvalue()) is not learned
