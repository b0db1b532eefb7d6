"""A tokenizer whose ids can be counted by hand, and corpora for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torch_port.cli import main
from torch_port.data.features import FeatureSample
from torch_port.vocabulary.counts import TokenCounts

# Words by white space: `a` … `d` are 4 … 7; the newline between turns is no token.
WORDS = ["<unk>", "user", "assistant", "system", "a", "b", "c", "d"]
START, END, V_TOK, V = 8, 9, 10, 16


def write_tokenizer(directory: Path, *extra_words: str, truncate: int | None = None) -> Path:
    """Write tokenizer.json into a new directory and return that."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*WORDS, *extra_words]
    model = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    if truncate is not None:
        tokenizer.enable_truncation(truncate)
    directory.mkdir()
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


def line(*turns: tuple[str, str], name: str = "x") -> str:
    """One line of JSONL."""
    conversations = [{"role": role, "content": content} for role, content in turns]
    return json.dumps({"id": name, "conversations": conversations}, ensure_ascii=False) + "\n"


def sample(
    ids: list[int], mask: list[float], states: Any, name: str = "x", width: int = 4
) -> FeatureSample:
    """A feature sample with final states [S, H] of one's choice."""
    S = len(ids)
    return FeatureSample(
        id=name,
        input_ids=torch.tensor(ids),
        loss_mask=torch.tensor(mask, dtype=torch.float32),
        hidden_states=torch.zeros(S, width),
        target_last_hidden_states=torch.as_tensor(states),
        target_log_normalizer=torch.zeros(S),
    )


def write_target(directory: Path, head: torch.Tensor, **config: Any) -> Path:
    """Write a target's config.json and head into a new directory and return that."""
    from safetensors.torch import save_file

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"vocab_size": len(head)} | config))
    save_file({"lm_head.weight": head}, directory / "model.safetensors")
    return directory


def found(counts: TokenCounts) -> dict[int, int]:
    """Counts by id, without the zeros."""
    return {int(i): int(counts.counts[i]) for i in np.nonzero(counts.counts)[0]}


Run = Callable[..., tuple[int, str, str]]
# b 4, c 3, <|im_end|> 3, a 1: eleven supervised tokens. Held-out: d 2, b 1, <|im_end|> 1.
TRAIN = [
    line(("user", "d d d"), ("assistant", "b c b c")),
    line(("assistant", "b c"), ("user", "d"), ("assistant", "b a")),
]
HELDOUT = line(("assistant", "d b d"))
COUNT = ["--tokenizer", "tok", "--chat-template", "chatml", "--max-length", "99"]


def runner(root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Make a directory with two corpora; return `vocab` in it: (exit status, output, errors)."""
    monkeypatch.chdir(root)
    monkeypatch.setenv("TORCH_PORT_CACHE", str(root / "cache"))
    monkeypatch.setenv("COLUMNS", "100")
    write_tokenizer(root / "tok")
    (root / "train.jsonl").write_text("".join(TRAIN))
    (root / "held.jsonl").write_text(HELDOUT)

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["torch-port", "vocab", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        written = capsys.readouterr()
        return int(ended.value.code or 0), written.out, written.err

    return call


def count(run: Run, corpus: str, out: str, *more: str) -> str:
    """Count a corpus of conversations; return what was printed."""
    status, output, errors = run(
        "count", corpus, *COUNT, "--vocab-size", str(V), "--workers", "1", "--out", out, *more
    )
    assert (status, errors) == (0, "")
    return output
