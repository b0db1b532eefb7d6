"""Feature directories counted by several processes: the same result, bit for bit, in pieces."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from vocab_toys import V_TOK, V, sample, write_tokenizer

from torch_port.data.features import FeatureDirectory, FeatureSample, write_features
from torch_port.errors import UserError
from torch_port.vocabulary import feature_corpus, mass
from torch_port.vocabulary.counts import save_counts
from torch_port.vocabulary.feature_corpus import count_features
from torch_port.vocabulary.feature_pieces import feature_pieces, read_samples
from torch_port.vocabulary.tokens import TokenizerFacts, tokenizer_facts

QUIET = Console(quiet=True)
H = 6


def drawn(n: int, seed: int = 0) -> list[FeatureSample]:
    random = np.random.default_rng(seed)
    rows = []
    for name in range(n):
        S = int(random.integers(1, 9))
        states = torch.from_numpy(3 * random.standard_normal((S, H))).bfloat16()
        mask = (random.random(S) < 0.7).astype(float).tolist()
        rows.append(sample(random.integers(0, V_TOK, S).tolist(), mask, states, str(name)))
    return rows


@pytest.fixture
def facts(tmp_path: Path) -> TokenizerFacts:
    return tokenizer_facts(write_tokenizer(tmp_path / "tok"))


def by_hand(samples: list[FeatureSample]) -> list[int]:
    counts = [0] * V
    for one in samples:
        for token, supervised in zip(one.input_ids.tolist(), one.loss_mask.tolist(), strict=True):
            counts[token] += supervised > 0.5
    return counts


def test_any_number_of_workers_gives_the_same_file(
    tmp_path: Path, facts: TokenizerFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults: parts lost, taken twice or added as they come (the mass' last bits, the fingerprint);
    a sample at the border of a piece or shard skipped; sharding that changes a fingerprint."""
    monkeypatch.setattr(mass, "PIECE_ROWS", 16)
    first, second = drawn(60), drawn(9, seed=1)
    head = torch.from_numpy(np.random.default_rng(2).standard_normal((V, H))).bfloat16()
    for name, shard_rows in (("a", 37), ("b", 5), ("c", 1 << 20)):
        write_features(tmp_path / name, first, shard_rows=shard_rows)
    write_features(tmp_path / "second", second)
    files = set()
    for name, workers, piece_rows in (("a", 1, 1), ("b", 3, 11), ("c", 1, 1000)):
        counts, _ = count_features(
            [tmp_path / name, tmp_path / "second"],
            facts,
            V,
            QUIET,
            workers=workers,
            head_VH=head,
            piece_rows=piece_rows,
        )
        assert counts.counts.tolist() == by_hand(first + second)
        assert counts.samples == 69
        save_counts(tmp_path / "file", counts)
        files.add((tmp_path / "file").read_bytes())
    assert len(files) == 1
    assert counts.mass is not None
    exact = torch.zeros(V, dtype=torch.float64)
    for one in first + second:
        logits = one.target_last_hidden_states[:-1].double() @ head.double().T
        exact += logits.softmax(-1)[one.loss_mask[1:] > 0.5].sum(0)
    # float32 exponentials of a hundred positions: 1e-7 each
    assert np.allclose(counts.mass, exact.numpy(), rtol=1e-5)


def test_pieces_hold_every_sample_once_and_end_in_time(tmp_path: Path) -> None:
    """Faults: a piece as large as a shard (memory); a sample cut in two; rows of another shard."""
    samples = drawn(40)
    write_features(tmp_path / "f", samples, shard_rows=30)
    for rows in (1, 7, 29, 31, 1 << 20):
        pieces = feature_pieces([FeatureDirectory(tmp_path / "f")], rows)
        read = [one for piece in pieces for one in read_samples(piece, ("input_ids", "loss_mask"))]
        assert [ids.tolist() for ids, _ in read] == [one.input_ids.tolist() for one in samples]
        assert [on.tolist() for _, on in read] == [one.loss_mask.tolist() for one in samples]
        assert sum(piece.samples for piece in pieces) == 40
        assert all(piece.rows < rows + 8 for piece in pieces)  # a sample has at most 8 tokens
        assert all(piece.rows >= rows for piece in pieces[:-1])


def test_fingerprints_tell_samples_apart(tmp_path: Path, facts: TokenizerFacts) -> None:
    """Faults: a border between samples, or between ids and mask, that moves unseen."""
    zero = torch.zeros
    layouts = {
        "whole": [sample([1, 2, 3], [1, 1, 1], zero(3, H))],
        "split": [sample([1, 2], [1, 1], zero(2, H)), sample([3], [1], zero(1, H))],
        "order": [sample([3], [1], zero(1, H)), sample([1, 2], [1, 1], zero(2, H))],
    }
    contents, corpora = set(), set()
    for name, samples in layouts.items():
        write_features(tmp_path / name, samples)
        counts, _ = count_features([tmp_path / name], facts, V, QUIET)
        contents.add(counts.contents)
        corpora.add(counts.corpus_fingerprint)
    assert len(contents) == len(corpora) == 3


def test_progress_and_processes(
    tmp_path: Path, facts: TokenizerFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Field-note 18. Faults: silence; --workers that starts no process, or waits for a dead one."""
    monkeypatch.setattr("torch_port.progress.LINE_EVERY", 0.0)
    write_features(tmp_path / "f", drawn(20))
    console = Console(record=True, width=200, force_terminal=False, file=open(os.devnull, "w"))  # noqa: SIM115
    with console.file:
        count_features([tmp_path / "f"], facts, V, console, workers=2, piece_rows=10)
    text = console.export_text()
    assert "supervised tokens" in text
    assert "counting: done in" in text
    monkeypatch.setattr(feature_corpus, "_count", die)
    with pytest.raises(UserError, match="--workers is 2, lower it"):
        count_features([tmp_path / "f"], facts, V, QUIET, workers=2, piece_rows=10)
    with pytest.raises(UserError, match=r"--workers is 0, .*leave it out"):
        count_features([tmp_path / "f"], facts, V, QUIET, workers=0)


def die(piece: object) -> None:
    os._exit(3)


def test_a_short_shard_is_named(tmp_path: Path, facts: TokenizerFacts) -> None:
    """Fault: rows that the index promises and the file lacks, counted as if they were there."""
    from safetensors.torch import load_file, save_file

    write_features(tmp_path / "f", drawn(20))
    (shard,) = (tmp_path / "f").glob("*.safetensors")
    save_file({name: t[:-1].clone() for name, t in load_file(shard).items()}, shard)
    with pytest.raises(UserError, match=r"features-00000\.safetensors: expected .*Write the feat"):
        count_features([tmp_path / "f"], facts, V, QUIET)
    shard.unlink()
    with pytest.raises(UserError, match="expected a feature shard"):
        count_features([tmp_path / "f"], facts, V, QUIET)
