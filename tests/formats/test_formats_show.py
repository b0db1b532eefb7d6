"""What `show` says of a map's coverage."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from format_toys import CASES, KEPT, V, write_draft

from torch_port.errors import UserError
from torch_port.formats.convert import read_checkpoint
from torch_port.formats.show import summary
from torch_port.vocabulary.counts import TokenCounts, save_counts


def counted(path: Path, size: int) -> Path:
    """Counts of a corpus: 3 tokens of every kept id, 1 of every other."""
    counts = np.ones(size, np.int64)
    counts[list(KEPT)] = 3
    none = np.zeros(0, np.int64)
    facts = {"corpus_fingerprint": "c", "tokenizer_fingerprint": "t", "contents": ("x",)}
    save_counts(path, TokenCounts(counts, None, none, none, size, 1, 0, **facts))
    return path


def test_coverage_of_a_corpus(tmp_path: Path) -> None:
    """Faults: draft ids counted for target ids; the share of ids shown for that of tokens."""
    counts = counted(tmp_path / "counts", V)
    pruned = read_checkpoint(write_draft(tmp_path / "pruned", CASES["vanilla"]))
    inside, every = 3 * len(KEPT), 3 * len(KEPT) + V - len(KEPT)
    told = f"{inside / every:.2%} of {every} supervised tokens"
    assert summary(pruned, counts)["coverage"] == told
    full = read_checkpoint(write_draft(tmp_path / "full", CASES["full vocabulary"]))
    assert summary(full, counts)["coverage"] == f"100.00% of {every} supervised tokens"
    assert "coverage" not in summary(pruned)
    with pytest.raises(UserError, match=f"of {V + 1} ids, but the draft has vocab_size {V}"):
        summary(pruned, counted(tmp_path / "other", V + 1))
