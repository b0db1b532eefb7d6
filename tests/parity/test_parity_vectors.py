"""The vectors, ours and the outside judge's, on both sides in both dtypes; and how they fail."""

import hashlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from parity.cases import CaseError, list_cases, read_case
from parity.compare import compare_with_expectation, relative_error
from parity.sides import run_port, run_spec
from parity.vectors import run_case

OWN = Path(__file__).parent.parent / "vectors"


# What the specification has and the port has not yet: it must say so, and the case must fail.
NOT_BUILT_IN_PORT = {
    path.name for kind in ("dflash", "dpace", "decoding") for path in OWN.glob(f"{kind}-*")
}


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("side", ["port", "spec"])
def test_every_vector(vectors_directories: list[Path], side: str, dtype: str) -> None:
    """Faults: any of the six that issue 2 names, in either implementation."""
    failed = []
    for directory in vectors_directories:
        for path in list_cases(directory):
            result = run_case(path, [side], dtype)
            if side == "port" and path.parent == OWN and path.name in NOT_BUILT_IN_PORT:
                assert result.comparisons["port"].problem.startswith("not built"), path.name
            elif not result.passes:
                failed.append((path.name, result))
    assert not failed


def parity(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "parity", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_line_prints_a_line_per_case() -> None:
    done = parity("vectors", OWN, "--side", "spec", "--dtype", "float32", "--objective", "plain")
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    count = len(list_cases(OWN))
    assert lines[-1] == f"{count} passed, 0 failed"
    assert len(lines) == count + 2
    assert "refused as expected, 'no supervised target tokens'" in done.stdout


def spoiled(tmp_path: Path, name: str, **changes) -> Path:
    """A copy of one of our cases with something changed."""
    target = tmp_path / name
    shutil.copytree(OWN / name, target)
    document = json.loads((target / "case.json").read_text())
    for key, value in changes.items():
        if key == "tensors":
            tensors = load_file(target / "tensors.safetensors")
            tensors.update({n: change(tensors[n]) for n, change in value.items()})
            save_file(tensors, target / "tensors.safetensors")
        elif key == "config":
            document["config"]["dflash_config"].update(value)
        else:
            document[key].update(value)
    (target / "case.json").write_text(json.dumps(document))
    return target


def test_failures_are_counted_and_told(tmp_path: Path) -> None:
    """Faults: a failing case not reflected in the status; an unbuilt head skipped silently."""
    spoiled(tmp_path, "full-vanilla", expect={"loss": 1.0})
    spoiled(tmp_path, "pruned-gated", config={"markov_head_type": "lstm"})
    spoiled(tmp_path, "error-no-supervision", expect={"error": "something else"})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "case.json").write_text("{")
    shutil.copytree(OWN / "pruned-vanilla", tmp_path / "pruned-vanilla")
    done = parity("vectors", tmp_path, "--side", "port")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1] == "1 passed, 4 failed"
    assert re.search(r"FAIL full-vanilla .*worst: loss loss", done.stdout)
    assert re.search(r"FAIL pruned-gated .*not built: markov_head_type 'lstm'", done.stdout)
    assert re.search(r"FAIL error-no-supervision .*expected the error", done.stdout)
    assert re.search(r"FAIL broken .*no readable case", done.stdout)


def test_spec_reports_what_is_not_built(tmp_path: Path) -> None:
    path = spoiled(tmp_path, "pruned-gated", config={"markov_head_type": "lstm"})
    answer = run_spec(read_case(path), "float32")
    assert answer.failure == "not built"
    problem = compare_with_expectation(answer, {"loss": 0.0, "metrics": {}}, {}).problem
    assert problem is not None
    assert problem.startswith("not built")


@pytest.mark.parametrize(
    "name", ["expect/grad/fc.weight", "expect/hidden", "expect/accept_probability"]
)
def test_a_wrong_tensor_fails(tmp_path: Path, name: str) -> None:
    """Fault: a comparison that looks at the loss alone. One element moved by 1e-6."""

    first = tuple(np.argwhere(read_case(OWN / "pruned-vanilla").tensors["expect/eval_mask"])[0])

    def move(value: np.ndarray) -> np.ndarray:
        value = value.copy()
        value[(0, 0) if "grad" in name else first] += 1e-6
        return value

    path = spoiled(tmp_path, "pruned-vanilla", tensors={name: move})
    result = run_case(path, ["port"], "float64")
    assert not result.passes
    assert result.comparisons["port"].worst_named()[0].endswith(name.split("/")[-1])


def test_wrong_usage(tmp_path: Path) -> None:
    """Nothing to compare must not pass."""
    nothing = parity("vectors", tmp_path)
    assert nothing.returncode == 2
    assert "no case found" in nothing.stderr
    fused = parity("vectors", OWN, "--objective", "fused")
    assert fused.returncode == 2
    assert "--objective fused is not built yet" in fused.stderr
    with pytest.raises(CaseError, match="no case found"):
        list_cases(tmp_path)


def test_relative_error_by_hand() -> None:
    """Faults: NaN passing every comparison; a tiny tensor compared with its own rounding."""
    assert relative_error([3.0, -8.0], [3.0, -4.0]) == 1.0
    assert relative_error([1e-6], [0.0]) == pytest.approx(1e-4)  # the floor of 1e-2
    assert relative_error([np.nan], [0.0]) == np.inf
    assert relative_error([0.0], [np.nan]) == np.inf
    assert relative_error([[1.0]], [1.0]) == np.inf


def test_port_side_runs_without_jax() -> None:
    """Fault: parity importing jax for the port's side; an Ascend node has none."""
    code = (
        "import sys; sys.modules['jax'] = None; sys.modules['jaxdraft'] = None\n"
        "from pathlib import Path\n"
        "from parity.cases import read_case\n"
        "from parity.sides import run_port\n"
        f"case = read_case(Path({str(OWN / 'pruned-vanilla')!r}))\n"
        "assert run_port(case, 'float64').error is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert run_port(read_case(OWN / "pruned-vanilla"), "float64").error is None


def without(name: str):
    """Leave a tensor out of a case."""

    def change(path: Path) -> None:
        tensors = load_file(path / "tensors.safetensors")
        del tensors[name]
        save_file(tensors, path / "tensors.safetensors")

    return change


def document(**changes):
    """Replace top-level entries of a case.json."""

    def change(path: Path) -> None:
        content = json.loads((path / "case.json").read_text())
        (path / "case.json").write_text(json.dumps(content | changes))

    return change


BROKEN = {
    "no-embedding": without("target/embed_tokens.weight"),
    "no-weight": without("weights/fc.weight"),
    "no-map": without("weights/t2d"),
    "no-batch-tensor": without("batch/input_ids"),
    "objective-null": document(objective=None),
    "objective-unknown-key": document(objective={"surprise": 1}),
    "config-list": document(config=[1]),
    "expect-null": document(expect=None),
    "expect-scalar-metric": document(expect={"loss": 1.0, "metrics": {"acc": 1.0}}),
    "expect-nothing": document(expect={}),
    "not-utf8": lambda path: (path / "case.json").write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("side", ["port", "spec"])
def test_one_broken_case_does_not_end_the_run(tmp_path: Path, side: str) -> None:
    """Fault: a traceback in place of the case's line, and no closing count."""
    for name, change in BROKEN.items():
        shutil.copytree(OWN / "pruned-vanilla", tmp_path / name)
        change(tmp_path / name)
    results = [run_case(path, [side], "float32") for path in list_cases(tmp_path)]
    assert len(results) == len(BROKEN)
    assert not any(result.passes for result in results)


def test_emit_replaces_nothing_unasked(tmp_path: Path) -> None:
    """Fault: our answers written over an outside judge's cases of the same name."""
    (tmp_path / "full-vanilla").mkdir()
    done = parity("emit", tmp_path)
    assert done.returncode == 2
    assert "already holds full-vanilla" in done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["full-vanilla"]


def test_own_vectors_are_those_of_the_manifest() -> None:
    """Fault: a vector edited by hand, or a file that the manifest does not know."""
    manifest = json.loads((OWN / "MANIFEST.json").read_text())
    held = {p.relative_to(OWN).as_posix() for p in OWN.glob("*/*")}
    assert held == set(manifest["files"])
    for name, digest in manifest["files"].items():
        assert hashlib.sha256((OWN / name).read_bytes()).hexdigest() == digest, name
    assert manifest["packages"].keys() == {"jax", "jaxlib", "flax", "numpy"}


def test_emitting_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    """Fault: a seed left out, an order of a set, a time in a file."""
    from parity.emit import emit

    for name in ("one", "two"):
        emit(tmp_path / name)
    first = {p.relative_to(tmp_path / "one"): p for p in (tmp_path / "one").rglob("*.*")}
    assert len(first) == 2 * len(list_cases(OWN)) + 1
    for name, path in first.items():
        assert (tmp_path / "two" / name).read_bytes() == path.read_bytes(), name
