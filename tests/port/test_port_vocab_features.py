"""Counting arrays and features, the teacher's mass, what a tokenizer says, selection."""

import itertools
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from vocab_toys import V_TOK, V, found, sample, write_target, write_tokenizer

from torch_port.data.features import write_features
from torch_port.demo.tokenizer import SPECIAL_TOKENS, train_tokenizer
from torch_port.errors import UserError
from torch_port.vocabulary import counting, mass
from torch_port.vocabulary.counting import count_supervised_tokens
from torch_port.vocabulary.feature_corpus import count_features
from torch_port.vocabulary.mass import TeacherMass
from torch_port.vocabulary.selection import (
    coverage,
    coverage_curve,
    pinned_ids,
    rank_by_count,
    rank_by_mass,
    select_by_count,
    select_by_mass,
    size_for_coverage,
)
from torch_port.vocabulary.target_head import head_fingerprint, read_head
from torch_port.vocabulary.tokens import tokenizer_facts

QUIET = Console(quiet=True)
A, B, C, D = 4, 5, 6, 7


# --- arrays, features, the teacher's mass ---


def test_batches_of_samples_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the rest after the last full batch lost, or a batch counted twice."""
    monkeypatch.setattr(counting, "_TOGETHER", 5)
    random = np.random.default_rng(0)
    samples = [(random.integers(0, V, n), random.random(n)) for n in (3, 0, 4, 9, 30, 2)]
    samples.append((np.array([3]), np.ones(1)))  # waits alone, or nearly, when the others are done
    expected: Counter[int] = Counter()
    for ids, weights in samples:
        expected.update(int(i) for i, w in zip(ids, weights, strict=True) if w > 0.5)
    counts = count_supervised_tokens(samples, V)
    assert {i: int(c) for i, c in enumerate(counts) if c} == dict(expected)


def test_padding_ids_are_never_counted() -> None:
    """Faults: an id ≥ V_tok counted; ids at unsupervised positions looked at."""
    ids, on = np.array([1, 12, -1, 9]), np.array([1.0, 0.0, 0.0, 1.0])
    assert count_supervised_tokens([(ids, on)], V, V_TOK)[[1, 9]].tolist() == [1, 1]
    with pytest.raises(UserError, match=r"ids 1 … 12, but tokenizer_size is 10"):
        count_supervised_tokens([(ids, np.array([1.0, 1.0, 0.0, 1.0]))], V, V_TOK)


def test_features_counted_by_hand(tmp_path: Path) -> None:
    """Faults: prompts counted; a change of ids or masks taken for the same corpus."""
    facts = tokenizer_facts(write_tokenizer(tmp_path / "tok"))

    def features(name: str, ids: list[int], mask: list[float], states: float = 0.0) -> Path:
        rows = [
            sample([A, A], [0, 1], torch.zeros(2, 3)),
            sample(ids, mask, torch.full((3, 3), states)),
        ]
        write_features(tmp_path / name, rows)
        return tmp_path / name

    first = features("one", [A, B, 12], [1, 1, 0])
    counts, cached = count_features([first], facts, V, QUIET, cache=tmp_path / "cache")
    assert (found(counts), counts.samples, cached) == ({A: 2, B: 1}, 2, False)
    assert counts.mass is None
    same = features("same", [A, B, 12], [1, 1, 0], states=1.0)  # states are no part of a count
    assert count_features([same], facts, V, QUIET, cache=tmp_path / "cache")[1]
    # Read by samples (with a head) or by shards: one corpus, one fingerprint.
    massed, _ = count_features([first], facts, V, QUIET, head_VH=torch.zeros(V, 3))
    assert massed.corpus_fingerprint == counts.corpus_fingerprint
    assert found(massed) == found(counts)
    other = features("other", [B, A, 12], [1, 1, 0])  # same counts, another corpus
    masked = features("masked", [A, B, 12], [1, 0, 0])
    for path in (other, masked):
        assert not count_features([path], facts, V, QUIET, cache=tmp_path / "cache")[1]
    with pytest.raises(UserError, match="tokenizer_size is 10"):
        count_features([features("odd", [A, B, 12], [1, 1, 1])], facts, V, QUIET)
    with pytest.raises(UserError, match="given twice"):
        count_features([first, first], facts, V, QUIET)


def log_states(*probabilities: list[float]) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().float()


def test_teacher_mass_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: the teacher of position t taken at t; position 0 given one; samples running into
    each other; a buffer's rest lost. With U the identity, softmax(log p) is p itself."""
    head = torch.eye(4)
    p, q, r = [0.5, 0.25, 0.125, 0.125], [0.125, 0.125, 0.25, 0.5], [0.25] * 4
    first = sample([0, 1, 2], [1, 1, 0], log_states(p, q, r))  # position 1: p
    second = sample([0, 1, 2], [0, 1, 1], log_states(q, r, p))  # positions 1, 2: q, r
    for rows in (1, 2, 100):
        monkeypatch.setattr(mass, "_BUFFER_BYTES", 4 * 4 * rows)
        summed = TeacherMass(head)
        for one in (first, second):
            summed.add(one.target_last_hidden_states, one.loss_mask)
        # p + q + r; float32's rounding of log and exp: a few 1e-8 of each
        assert summed.total().tolist() == pytest.approx([0.875, 0.625, 0.625, 0.875], abs=1e-6)
    with pytest.raises(UserError, match="3 wide, --target's head 4"):
        TeacherMass(head).add(torch.zeros(2, 3), torch.ones(2))
    with pytest.raises(UserError, match="not finite"):
        TeacherMass(head).add(torch.full((2, 4), torch.nan), torch.ones(2))


def test_bf16_mass_is_that_of_the_stored_values() -> None:
    """Fault: logits rounded to bf16 (spec sheet §11). Against float64 on the rounded inputs."""
    random = torch.Generator().manual_seed(0)
    states = (3 * torch.randn(9, 8, generator=random)).bfloat16()
    head = torch.randn(V, 8, generator=random).bfloat16()
    summed = TeacherMass(head)
    summed.add(states, torch.ones(9))
    exact = (states[:-1].double() @ head.double().T).softmax(-1).sum(0)
    # float32 products and exponentials; rounding logits near 20 to bf16 would move them by 1e-2
    assert torch.allclose(summed.total(), exact, rtol=1e-5, atol=1e-6)


def test_mass_of_features_ranks_by_the_teacher(tmp_path: Path) -> None:
    """Faults: mass not cached or cached for another head; padding rows kept for their mass."""
    facts = tokenizer_facts(write_tokenizer(tmp_path / "tok"))
    p = torch.full((V,), 0.01)
    p[12], p[7], p[2] = 0.5, 0.26, 0.11  # 12 is padding: in the softmax, never kept
    rows = [sample([A, B], [0, 1], p.log().repeat(2, 1))]
    write_features(tmp_path / "f", rows)
    head = torch.eye(V)
    counts, _ = count_features(
        [tmp_path / "f"], facts, V, QUIET, head_VH=head, cache=tmp_path / "cache"
    )
    assert found(counts) == {B: 1}
    assert counts.mass is not None
    assert counts.mass.sum() == pytest.approx(1.0)
    assert select_by_mass(counts.mass, 2, tokenizer_size=V_TOK).tolist() == [2, 7]
    assert count_features(
        [tmp_path / "f"], facts, V, QUIET, head_VH=head, cache=tmp_path / "cache"
    )[1]
    other = head.flip(0)
    moved, cached = count_features(
        [tmp_path / "f"], facts, V, QUIET, head_VH=other, cache=tmp_path / "cache"
    )
    assert not cached
    assert moved.mass is not None
    assert moved.mass.argmax() == V - 1 - 12
    write_features(tmp_path / "g", [sample([A, B], [0, 1], p.flip(0).log().repeat(2, 1))])
    again, cached = count_features(
        [tmp_path / "g"], facts, V, QUIET, head_VH=head, cache=tmp_path / "cache"
    )
    assert not cached  # other states of the same tokens
    assert again.corpus_fingerprint == counts.corpus_fingerprint


def test_the_targets_head(tmp_path: Path) -> None:
    """Field-note 23: tied without a head key; untied with both; a config that decides."""
    from safetensors.torch import save_file

    head, embedding = torch.eye(3), 2 * torch.eye(3)
    both = {"lm_head.weight": head, "model.embed_tokens.weight": embedding}
    path = write_target(tmp_path / "t", head)
    save_file(both, path / "model.safetensors")
    assert torch.equal(read_head(path), head)
    (path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert torch.equal(read_head(path), embedding)
    (path / "config.json").write_text(
        '{"tie_word_embeddings": true, "text_config": {"tie_word_embeddings": false}}'
    )
    assert torch.equal(read_head(path), head)
    save_file({"model.embed_tokens.weight": embedding}, path / "model.safetensors")
    with pytest.raises(UserError, match=r"expected one lm_head\.weight"):
        read_head(path)
    (path / "model.safetensors").rename(path / "part.safetensors")
    (path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"model.embed_tokens.weight": "part.safetensors"}}'
    )
    (path / "config.json").write_text('{"tie_word_embeddings": true}')
    assert torch.equal(read_head(path), embedding)
    assert head_fingerprint(head) != head_fingerprint(embedding)
    assert head_fingerprint(head) != head_fingerprint(head.bfloat16())
    with pytest.raises(UserError, match=r"config\.json"):
        read_head(tmp_path)


# --- what a tokenizer says ---


def test_tokenizer_facts(tmp_path: Path) -> None:
    """Faults: V_tok by the number of entries (ids may have holes); letters taken for bytes."""
    from tokenizers import Tokenizer, models

    trained = train_tokenizer(["def f(x): return x"] * 3, 300)
    trained.save(str(tmp_path / "tokenizer.json"))
    facts = tokenizer_facts(tmp_path)
    assert facts.special_ids == tuple(range(len(SPECIAL_TOKENS)))
    assert len(facts.byte_ids) == 256
    encoded = trained.encode("é\x00", add_special_tokens=False).ids
    assert set(encoded) <= set(facts.byte_ids)
    names = {f"<0x{byte:02X}>": 2 * byte + 1 for byte in range(256)} | {"a": 0, "!": 600}
    Tokenizer(models.WordLevel(names, unk_token="a")).save(str(tmp_path / "fallback.json"))
    facts = tokenizer_facts(tmp_path / "fallback.json")
    assert facts.size == 601
    assert facts.byte_ids == tuple(range(1, 512, 2))
    write_tokenizer(tmp_path / "words")
    assert tokenizer_facts(tmp_path / "words").byte_ids == ()
    (tmp_path / "broken.json").write_text("{}")
    for path, words in (("broken.json", "tokenizers library"), ("none", "nothing is downloaded")):
        with pytest.raises(UserError, match=words):
            tokenizer_facts(tmp_path / path)


# --- selection ---


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.data())
def test_one_ranking_serves_every_size(values: list[int], data: st.DataObject) -> None:
    """Faults: a smallest K off by one, below the pins, or of another map than that K's."""
    counts = np.array(values, dtype=np.int64)
    pins = data.draw(st.sets(st.integers(0, len(values) - 1)))
    share = data.draw(st.sampled_from([0.01, 0.5, 0.9, 1.0]))
    if not counts.any():
        return
    curve = coverage_curve(rank_by_count(counts, pinned_ids(pins)), counts)
    sizes = range(max(1, len(pins)), len(values) + 1)
    maps = {size: select_by_count(counts, size, pins) for size in sizes}
    for size, kept in maps.items():
        assert curve[size - 1] == coverage(kept, counts)
    first = next(size for size, kept in maps.items() if coverage(kept, counts) >= share)
    assert size_for_coverage(curve, share, len(pins)) == first


def test_mass_selection_keeps_the_largest_mass() -> None:
    """Against every choice of K ids that holds the pin and no padding row."""
    values = np.random.default_rng(1).random(8)
    for size in (1, 2, 4):
        choices = [c for c in itertools.combinations(range(6), size) if 3 in c]
        best = max(choices, key=lambda ids: values[list(ids)].sum())
        kept = select_by_mass(values, size, pinned=[3], tokenizer_size=6)
        assert tuple(kept.tolist()) == best
    assert select_by_mass(np.zeros(4), 2).tolist() == [0, 1]
    for bad in (np.array([1, 2]), np.array([0.1, np.nan]), np.array([-0.1]), np.zeros((2, 2))):
        with pytest.raises(UserError, match="mass must be"):
            select_by_mass(bad, 1)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan"), 99.0])
def test_shares_that_are_none(share: float) -> None:
    with pytest.raises(UserError, match=f"coverage is {share}"):
        size_for_coverage(np.array([0.5, 1.0]), share, 0)
    with pytest.raises(UserError, match="no draft_vocab_size reaches"):
        size_for_coverage(np.array([0.5, 0.75]), 0.9, 0)


def test_all_ids_hold_all_of_the_mass() -> None:
    """Fault: a total added in another order than the curve, so that no K covers 1.0."""
    random = np.random.default_rng(0)
    for _ in range(20):
        mass = random.random(1000)
        curve = coverage_curve(rank_by_mass(mass, pinned_ids([])), mass)
        assert curve[-1] == 1.0
        assert size_for_coverage(curve, 1.0, 0) <= 1000
