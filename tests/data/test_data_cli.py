"""The commands of docs/data.md, one after the other, as a user types them."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from data_toys import drawn_lines, write_adding_target

from torch_port.cli import main
from torch_port.data.features import FeatureDirectory
from torch_port.data.field_files import FieldDirectory

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")

    def command(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["torch-port", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out + told.err

    return command


def test_from_conversations_to_features_and_back(run: Run, tmp_path: Path) -> None:
    """Faults: an option that is not passed on; a table that leaves out what was dropped; a problem
    that ends with status 0; an error of several lines."""
    lines = [*drawn_lines(4), {"id": "bad", "messages": []}]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_adding_target(tmp_path / "t")
    settings = ["--tokenizer", "t", "--chat-template", "chatml", "--workers", "1", "--out", "p"]
    status, told = run("data", "prepare", "c.jsonl", "--max-length", "20", *settings)
    assert status == 0, told
    assert told.count("dropped:") == 1
    assert max(FeatureDirectory("p").lengths) == 20
    assert run("data", "prepare", "c.jsonl", "--max-length", "21", *settings) == (
        2,
        "  fingerprint: done in 0:00\n"
        "Error: p: begun with other inputs (max_length was 20, is 21). Give the same ones to "
        "continue it, choose another path, or remove it.\n",
    )

    capturing = ["capture", "p", "--target", "t", "--out", "f", "--dtype", "float32"]
    more = ["--batch-tokens", "30", "--shard-tokens", "1", "--limit-gb", "1"]
    assert run(*capturing, "--layers", "1", *more)[0] == 0
    read = FeatureDirectory("f")
    assert len(list(Path("f").glob("*.safetensors"))) == len(read) == 4
    assert float(read[0]["hidden_states"][0, 0]) == pytest.approx(12.0, rel=1e-5)
    status, told = run(*capturing, "--layers", "1,3", *more)
    assert (status, told.count("\n")) == (2, 1)
    assert "the last layer" in told

    status, told = run("features", "check", "f")
    assert (status, "4 of 4" in told, "8, 1 layers, float32" in told) == (0, True, True)
    assert run("features", "convert", "f", "g", "--to", "ckpt.gz")[0] == 0
    assert FieldDirectory("g").ids == read.ids
    (tmp_path / "g" / "index.json").unlink()
    status, told = run("features", "check", "g", "--sample", "2")
    assert (status, "2 of 4" in told, "--write-index" in told) == (0, True, True)
    assert run("features", "check", "g", "--write-index")[0] == 0
    assert FieldDirectory("g").lengths == read.lengths
    damaged = dict(read[0]) | {"loss_mask": torch.zeros(3)}
    torch.save(damaged, tmp_path / "g" / f"{read.ids[0]}.ckpt.gz")  # no gzip
    status, told = run("features", "check", "g")
    assert (status, f"g/{read.ids[0]}.ckpt.gz: cannot be read" in told) == (1, True)
