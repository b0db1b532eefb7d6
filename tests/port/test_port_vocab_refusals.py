"""What `torch-port vocab` refuses, and how it says so: the setting, its value, the remedy."""

import re
from pathlib import Path

import pytest
import torch
from vocab_toys import (
    COUNT,
    TRAIN,
    Run,
    V,
    count,
    runner,
    sample,
    write_target,
    write_tokenizer,
)

from torch_port.data.features import write_features


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(tmp_path, monkeypatch, capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["count", "train.jsonl", "--out", "x"], "Missing option '--tokenizer'"),
        (["count", "train.jsonl", *COUNT[:4], "--vocab-size", "16"], "--max-length is not given"),
        (
            ["count", "train.jsonl", *COUNT[:2], "--vocab-size", "16"],
            "--chat-template is not given",
        ),
        (["count", "train.jsonl", *COUNT], "vocab_size is not known: give --vocab-size"),
        (["count", "train.jsonl", *COUNT, "--vocab-size", "9"], "10 ids, but vocab_size is 9"),
        (
            ["count", "train.jsonl", *COUNT, "--vocab-size", "0"],
            "--vocab-size is 0, but a head has at least 1 row; give the vocab_size",
        ),
        (["count", "no.jsonl", *COUNT, "--vocab-size", "16"], "no.jsonl: no such file"),
        (["count", "train.jsonl", "tok", *COUNT], "are mixed"),
        (["count", ".", *COUNT], "corpus . is a directory of JSONL files, and only feature"),
        (
            ["count", "empty.jsonl", *COUNT, "--vocab-size", "16"],
            "empty.jsonl: no conversation in it",
        ),
        (
            ["count", "train.jsonl", *COUNT, "--vocab-size", "16", "--workers", "0"],
            "--workers is 0",
        ),
        (["count", "tok", *COUNT[:2], "--vocab-size", "16", "--workers", "0"], "--workers is 0"),
        (["count", "tok", *COUNT], "--chat-template is chatml, but features hold tokens"),
        (["count", "tok", *COUNT[:2], "--vocab-size", "16"], "index of a feature directory"),
        (["count", "train.jsonl", *COUNT, "--teacher-mass"], "JSONL has none"),
        (["count", "tok", *COUNT[:2], "--teacher-mass"], "give --target DIR"),
        (["count", "train.jsonl", *COUNT, "--target", "tok"], "config.json"),
        (["sweep", "train.jsonl"], "no token counts could be read"),
        (["sweep", "c", "--sizes", "2,x"], "--sizes is '2,x', but 'x' is no whole number"),
        (
            ["sweep", "c", "--sizes", "11"],
            "--sizes is 11, but the tokenizer produces only 10 ids; give at most 10",
        ),
        (
            ["sweep", "c", "--sizes", "0"],
            "--sizes is 0, but a map keeps at least 1 id; give 2 … 10",
        ),
        (["sweep", "c", "--by", "luck"], "--by is 'luck'"),
        (["sweep", "c", "--by", "mass"], "--by mass needs the teacher's mass"),
        (["sweep", "c", "--heldout", "c"], "--heldout holds the training corpus itself"),
        (
            ["sweep", "c", "--heldout", "wide"],
            "--heldout was counted with --vocab-size 17, the training corpus with 16",
        ),
        (["sweep", "c", "--heldout", "other"], "--heldout was counted with --tokenizer "),
        (["sweep", "c", "--coverage", "99"], "--coverage is 99.0, but must lie above 0"),
        (["sweep", "c", "--svg", "none/c.svg"], "create none"),
        (["build", "c"], "each choose K, and neither is given; give one: --size"),
        (
            ["build", "c", "--size", "4", "--coverage", "0.9"],
            "each choose K, and both are given; give one: --size",
        ),
        (
            ["build", "c", "--size", "4", "--pin", "12"],
            "--pin 12: the tokenizer's ids are 0 … 9; leave it out",
        ),
        (["build", "c", "--size", "11"], "--size is 11, but the tokenizer produces only 10 ids"),
        (["build", "c", "--size", "0"], "--size is 0, but a map keeps at least 1 id; give 2 … 10"),
        (["build", "c", "--size", "4", "--pin", "-1,3,9000"], "--pin -1,9000: the tokenizer's ids"),
        (["build", "c", "--size", "4", "--out", "tok/m.pt"], "write --out tok/m.safetensors"),
        (["build", "c", "--size", "4", "--out", "tok"], "maps are written as .safetensors"),
        (["build", "c", "--size", "4", "--out", "old.safetensors"], "add --overwrite"),
        (
            ["build", "c", "--size", "4", "--out", "old.safetensors", "--overwrite"],
            "never replaced",
        ),
        (["count", "held.jsonl", *COUNT, "--out", "train.jsonl", "--overwrite"], "never replaced"),
        (["sweep", "c", "--svg", "train.jsonl", "--overwrite"], "never replaced"),
        (
            ["show", "c", "--first", "0"],
            "--first is 0, but at least 1 id is listed; give 1 or more",
        ),
        (
            ["show", "c"],
            "c holds token counts, not a vocabulary map; build one from it: torch-port",
        ),
        (["sweep", "old.safetensors"], "no token counts could be read"),
        (["show", "train.jsonl"], "no vocabulary map could be read"),
    ],
)
def test_bad_use_is_one_sentence_and_status_2(
    run: Run, tmp_path: Path, arguments: list[str], words: str
) -> None:
    """Faults: a traceback, a guess, or a message that does not name the setting."""
    count(run, "train.jsonl", "c")
    wide = ["--vocab-size", "17", "--workers", "1", "--out", "wide"]
    assert run("count", "held.jsonl", *COUNT, *wide)[0] == 0
    write_tokenizer(tmp_path / "tok2", "e")
    other = [*COUNT[2:], "--tokenizer", "tok2", "--vocab-size", "16", "--workers", "1"]
    assert run("count", "held.jsonl", *other, "--out", "other")[0] == 0
    (tmp_path / "old.safetensors").write_text("kept")
    (tmp_path / "empty.jsonl").write_text("\n \n")
    if arguments[0] in ("count", "build") and "--out" not in arguments:
        arguments = [*arguments, "--out", "x.safetensors"]
    status, _, errors = run(*arguments)
    assert status == 2
    assert words in re.sub(r"\s+", " ", errors.replace("│", " "))
    assert "Traceback" not in errors
    assert not (tmp_path / "x.safetensors").exists()
    assert (tmp_path / "old.safetensors").read_text() == "kept"
    assert (tmp_path / "train.jsonl").read_text() == "".join(TRAIN)


def test_a_map_of_another_tokenizer_is_not_decoded(run: Run, tmp_path: Path) -> None:
    """Fault: ids shown as words of a tokenizer in which they mean something else."""
    count(run, "train.jsonl", "c")
    write_tokenizer(tmp_path / "tok2", "e")
    assert run("build", "c", "--size", "4", "--out", "m.safetensors")[0] == 0
    status, _, errors = run("show", "m.safetensors", "--tokenizer", "tok2")
    assert status == 2
    assert "is not the one the map was made with" in errors
    status, output, errors = run("show", "m.safetensors", "--tokenizer", "nowhere")
    assert (status, output) == (2, "")  # before anything is printed
    assert "tokenizer nowhere: expected a tokenizer.json" in errors


def test_the_training_corpus_is_no_heldout_text(run: Run, tmp_path: Path) -> None:
    """Faults: the training corpus accepted because it was renamed, cut elsewhere, counted with the
    teacher's mass too, or came with a second file."""
    count(run, "train.jsonl", "c")
    (tmp_path / "renamed.jsonl").write_text("".join(TRAIN))
    count(run, "renamed.jsonl", "renamed")
    count(run, "held.jsonl", "short", "--max-length", "50")
    count(run, "renamed.jsonl", "cut", "--max-length", "50")
    both = [*COUNT, "--vocab-size", "16", "--workers", "1", "--out", "both"]
    assert run("count", "held.jsonl", "train.jsonl", *both)[0] == 0
    for heldout, words in (
        ("renamed", "holds the training corpus itself (equal contents)"),
        ("cut", "holds the training corpus itself (equal contents)"),
        ("both", "holds 1 of the training corpus' files or directories (equal contents)"),
        ("short", "counted with --max-length 50, the training corpus with 99, so"),
    ):
        status, _, errors = run("sweep", "c", "--heldout", heldout)
        assert status == 2, heldout
        assert f"--heldout {words}" in errors or f"--heldout was {words}" in errors
    rows = [sample([4, 5], [0, 1], torch.zeros(2, V))]
    write_features(tmp_path / "features", rows)
    write_target(tmp_path / "target", torch.eye(V))
    settings = ["features", "--tokenizer", "tok", "--target", "target"]
    assert run("count", *settings, "--out", "plain")[0] == 0
    assert run("count", *settings, "--teacher-mass", "--out", "massed")[0] == 0
    status, _, errors = run(
        "build", "massed", "--size", "4", "--heldout", "plain", "--out", "m.safetensors"
    )
    assert status == 2
    assert "--heldout holds the training corpus itself" in errors


def test_heldout_of_another_template_is_refused(run: Run, tmp_path: Path) -> None:
    """Fault: coverage of text that became other tokens. The names are equal, the texts are not."""
    turn = "{% for m in messages %}<|im_start|> {{ m.role }} {{ m.content }} <|im_end|>{% endfor %}"
    prompt = "{% if add_generation_prompt %}<|im_start|> assistant {% endif %}"
    for directory, template in (("a", turn + prompt), ("b", turn.replace(" <|", "<|") + prompt)):
        (tmp_path / directory).mkdir()
        (tmp_path / directory / "chat.jinja").write_text(template)
    settings = ["--vocab-size", "16", "--workers", "1", "--max-length", "99", "--tokenizer", "tok"]
    for corpus, directory in (("train", "a"), ("held", "b"), ("held", "a")):
        template = ["--chat-template", f"{directory}/chat.jinja", "--out", corpus + directory]
        assert run("count", f"{corpus}.jsonl", *settings, *template)[0] == 0
    status, _, errors = run("sweep", "traina", "--heldout", "heldb")
    assert status == 2
    assert re.search(
        r"with --chat-template chat\.jinja \(\w{12}\), the training .* \(\w{12}\)", errors
    )
    assert run("sweep", "traina", "--heldout", "helda")[0] == 0


def test_counts_of_another_version_say_so(run: Run, tmp_path: Path) -> None:
    """Fault: a bare KeyError for counts that an earlier version wrote, or that are damaged."""
    from safetensors.numpy import load_file, save_file

    count(run, "train.jsonl", "c")
    tensors = load_file(tmp_path / "c")
    for version, words in (("1", "another version wrote it: count again"), ("2", "it lacks")):
        save_file(tensors, tmp_path / "old", {"format": f"torch-port counts {version}"})
        status, _, errors = run("sweep", "old")
        assert status == 2
        assert words in errors
    for content in ({"t2d": torch.ones(4, dtype=torch.bool)}, [torch.ones(4)]):
        torch.save(content, tmp_path / "odd.pt")
        status, _, errors = run("show", "odd.pt")
        assert status == 2
        assert "it lacks d2t" in errors or "it holds a list, not tensors by name" in errors
