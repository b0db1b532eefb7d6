"""How vectors are read, compared, told of and emitted; test_parity_vectors_float*.py run them."""

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
from vector_runs import OWN

from parity import emit as emitting
from parity.cases import CaseError, list_cases, read_case
from parity.compare import compare_with_expectation, relative_error
from parity.sides import Answer, run_port, run_spec
from parity.vectors import run_case


def parity(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "parity", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
    )


def test_command_line_prints_a_line_per_case(tmp_path: Path) -> None:
    # Three cases: what every case says is the business of test_parity_vectors_float*.py.
    names = "dflash-pruned", "error-no-supervision", "pruned-vanilla"
    for name in names:
        shutil.copytree(OWN / name, tmp_path / name)
    how = "--side", "spec", "--dtype", "float32", "--objective", "plain"
    done = parity("vectors", tmp_path, *how)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines[-1] == "3 passed, 0 failed"
    assert [line.split()[1] for line in lines[1:-1]] == list(names)
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
    with pytest.raises(CaseError, match="no case found"):
        list_cases(tmp_path)


def test_the_chosen_form_is_the_one_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: `compute` read by nobody, so that the plain forms are never checked."""
    import torch_port.models.backbone as backbone
    import torch_port.objective.evaluate as evaluate

    def broken(*_: object) -> None:
        raise RuntimeError("this form ran")

    path, plain = OWN / "pruned-vanilla", {"objective": "plain", "attention": "dense"}
    monkeypatch.setattr(evaluate, "fused_objective", broken)
    assert "this form ran" in run_case(path, ["port"], "float64").comparisons["port"].problem
    assert run_case(path, ["port"], "float64", plain).passes
    monkeypatch.undo()
    monkeypatch.setattr(backbone, "blockwise_attention", broken)
    assert "this form ran" in run_case(path, ["port"], "float64").comparisons["port"].problem
    assert run_case(path, ["port"], "float64", plain).passes


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
    packages = {"jax", "jaxlib", "flax", "optax", "numpy", "safetensors"}
    assert manifest["packages"].keys() == packages


KINDS = (
    "pruned-gated",
    "full-rnn-sliding",
    "dpace-both",
    "eagle3-pruned",
    "training-pruned",
    "decoding-pruned",
    "error-no-supervision",
)


def test_emitting_twice_gives_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: a seed left out, an order of a set, a time in a file. One recipe of each kind."""
    chosen = [recipe for recipe in emitting.RECIPES if recipe.name in KINDS]
    monkeypatch.setattr(emitting, "RECIPES", chosen)
    for name in ("one", "two"):
        emitting.emit(tmp_path / name)
    first = {p.relative_to(tmp_path / "one"): p for p in (tmp_path / "one").rglob("*.*")}
    assert len(first) == 2 * len(KINDS) + 1
    for name, path in first.items():
        assert (tmp_path / "two" / name).read_bytes() == path.read_bytes(), name


SMALL = [recipe for recipe in emitting.RECIPES if recipe.name.startswith("error-")]


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A set of two cases, of which emit now writes the first alone; and a case of somebody else."""
    monkeypatch.setattr(emitting, "RECIPES", tuple(SMALL))
    directory = tmp_path / "set"
    emitting.emit(directory)
    shutil.copytree(OWN / "pruned-gated", directory / "outside")
    monkeypatch.setattr(emitting, "RECIPES", tuple(SMALL[:1]))
    return directory


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def test_overwriting_leaves_no_stale_case(earlier: Path) -> None:
    """Faults: a case of a recipe that is gone stays and is judged by; a foreign one is removed."""
    assert emitting.emit(earlier, overwrite=True) == [SMALL[0].name]
    assert names_in(earlier) == {SMALL[0].name, "outside", "MANIFEST.json"}
    manifest = json.loads((earlier / "MANIFEST.json").read_text())
    assert {name.split("/")[0] for name in manifest["files"]} == {SMALL[0].name}


def test_a_changed_stale_case_is_not_removed(earlier: Path) -> None:
    """Fault: somebody's work removed because it has the name of an old case."""
    stale = earlier / SMALL[1].name
    notes, case = stale / "notes.txt", stale / "case.json"
    before = case.read_bytes(), (earlier / "MANIFEST.json").read_bytes()
    notes.write_text("mine")
    with pytest.raises(CaseError, match=f"{SMALL[1].name} is a case that emit no longer writes"):
        emitting.emit(earlier, overwrite=True)
    notes.unlink()
    case.write_bytes(before[0] + b" ")
    with pytest.raises(CaseError, match="it has been changed since"):
        emitting.emit(earlier, overwrite=True)
    assert (earlier / "MANIFEST.json").read_bytes() == before[1]
    moved = earlier.parent / "elsewhere"
    case.write_bytes(before[0])
    stale.rename(moved)
    stale.symlink_to(moved)
    with pytest.raises(CaseError, match="it has been changed since"):
        emitting.emit(earlier, overwrite=True)
    assert names_in(moved) == {"case.json", "tensors.safetensors"}


def test_a_manifest_points_nowhere_else(earlier: Path) -> None:
    """Fault: files outside the set removed because a manifest names them."""
    other = earlier.parent / "other"
    shutil.copytree(earlier / SMALL[1].name, other)
    place = earlier / "MANIFEST.json"
    manifest = json.loads(place.read_text())
    for name in ("case.json", "tensors.safetensors"):
        digest = manifest["files"].pop(f"{SMALL[1].name}/{name}")
        manifest["files"][f"../other/{name}"] = digest
    place.write_text(json.dumps(manifest))
    assert emitting.stale_cases(earlier) == []
    place.write_text("[]")
    with pytest.raises(CaseError, match=r"MANIFEST\.json is no manifest of emit's"):
        emitting.stale_cases(earlier)


def test_a_weak_decoding_case_is_not_emitted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a decoding vector that any implementation passes, as none of its rounds tells."""

    def lacks(name: str, rounds: list[list[int]]) -> str:
        case = read_case(OWN / name)
        weak = Answer(tensors=case.group("expect") | {"rounds": np.array(rounds)})
        # What the case gives without its setting: the same tokens.
        monkeypatch.setattr(emitting, "answer_case", lambda *_: weak)
        with pytest.raises(RuntimeError, match="the case lacks") as told:
            emitting.check_decoding(case, weak)
        return str(told.value).split("the case lacks ")[1]

    never = "a whole block accepted, a rejection after an acceptance"
    assert lacks("decoding-greedy", [[3, 0, 1], [3, 0, 1]]) == never
    always = "a proposal rejected, a rejection after an acceptance"
    assert lacks("decoding-greedy", [[3, 3, 4], [2, 2, 2]]) == always
    good = [[3, 3, 4], [3, 1, 2], [2, 2, 2]]
    padded = "tokens that depend on tokenizer_size"
    assert lacks("decoding-padded-head", good) == padded
    whole = "a truncated block, tokens that depend on confidence_threshold"
    assert lacks("decoding-truncated", good) == whole
    ends = "an end of text accepted inside a block"
    assert lacks("decoding-ends", [*good[:2], [3, 2, 3]]) == ends


def setting(name: str, value: object):
    """Replace, or with None leave out, a setting of a decoding case."""

    def change(path: Path) -> None:
        content = json.loads((path / "case.json").read_text())
        content["decoding"] = {
            key: old
            for key, old in (content["decoding"] | {name: value}).items()
            if old is not None
        }
        (path / "case.json").write_text(json.dumps(content))

    return change


@pytest.mark.parametrize("side", ["port", "spec"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("decoding-padded-head", setting("tokenizer_size", None)),
        ("decoding-truncated", setting("confidence_threshold", None)),
        ("decoding-ends", setting("end_of_text", None)),
        ("decoding-greedy", setting("temperature", 1.0)),
    ],
)
def test_a_decoding_vector_tells(tmp_path: Path, name: str, change, side: str) -> None:
    """Faults: padding ids proposed, no truncation, tokens past the end, draws that matter at 0."""
    shutil.copytree(OWN / name, tmp_path / name)
    assert run_case(tmp_path / name, [side], "float32").passes
    change(tmp_path / name)
    assert not run_case(tmp_path / name, [side], "float32").passes
