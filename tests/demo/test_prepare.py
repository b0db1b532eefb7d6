"""Tokenizer, target, cache and the whole preparation, with tiny sizes."""

import dataclasses
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from torch_port.cache import default_cache_root
from torch_port.data.conversations import Sample
from torch_port.demo import prepare as prepare_module
from torch_port.demo.cache import cached_stage
from torch_port.demo.prepare import STAGES, prepare
from torch_port.demo.recipe import FULL, QUICK, Recipe
from torch_port.demo.target import evaluate_target, load_target, train_target
from torch_port.demo.tokenizer import SPECIAL_TOKENS, SpecialIds, special_ids, train_tokenizer
from torch_port.errors import UserError

TINY = Recipe(
    name="tiny",
    heldout_percent=50,
    max_modules=60,
    vocab_size=400,
    max_length=64,
    hidden_size=32,
    intermediate_size=48,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    target_steps=5,
    target_batch=8,
    target_lr=1e-2,
    target_warmup=2,
    capture_train=12,
    capture_heldout=5,
    capture_batch=4,
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def prepared(root):
    calls = []
    result = prepare(TINY, root, lambda *call: calls.append(call))
    return result, calls


def test_preparation_from_nothing(prepared):
    # Faults: a stage that reports nothing, features of another target than the one returned,
    # V taken from the tokenizer, samples without an anchor kept.
    result, calls = prepared
    assert not result.from_cache
    assert [name for name in dict.fromkeys(call[0] for call in calls)] == list(STAGES)
    assert [call[1:3] for call in calls if call[0] == "target"][1:-1] == [
        (i, 5) for i in range(1, 6)
    ]
    assert result.vocab_size == 400 == result.target_config["vocab_size"]
    assert result.tokenizer_vocab_size <= 400
    assert result.embedding.shape == result.head.shape == (400, 32)
    assert result.embedding.dtype == result.head.dtype == torch.float32
    assert not torch.equal(result.embedding, result.head)
    assert (len(result.train), len(result.heldout)) == (12, 5)
    assert result.samples_train.kept >= 12
    for features in (result.train, result.heldout):
        assert max(features.lengths) <= 64
        for i in range(len(features)):
            item = features[i]
            mask = item["loss_mask"] > 0.5
            assert (mask[1:] & mask[:-1]).any()
            assert item["hidden_states"].shape == (features.lengths[i], 3 * 32)
            exact = torch.logsumexp(
                item["target_last_hidden_states"].double() @ result.head.double().T, -1
            )
            # float32 logits of order 1, summed over 32 products and 400 rows.
            torch.testing.assert_close(
                item["target_log_normalizer"].double(), exact, rtol=1e-5, atol=1e-5
            )
    modules = [{name.split(":")[0] for name in side.ids} for side in (result.train, result.heldout)]
    assert not modules[0] & modules[1]


def test_second_preparation_comes_from_the_cache(prepared, root, monkeypatch):
    # Fault: a cache that is built again, or that imports and loads the model for nothing.
    def fail(*_args, **_options):
        raise AssertionError("the cache was there")

    for name in ("train_target", "load_target", "build_corpus", "train_tokenizer"):
        monkeypatch.setattr(prepare_module, name, fail)
    again = prepare(TINY, root)
    assert again.from_cache
    assert again.target == prepared[0].target
    assert torch.equal(again.head, prepared[0].head)
    # A draft field does not change what is cached.
    assert prepare(dataclasses.replace(TINY, draft_steps=1), root).directory == again.directory


def test_saved_target_is_the_captured_one(prepared):
    # Fault: features of a model that differs from the saved one (weights before the last step).
    result, _ = prepared
    model, loaded = load_target(result.directory / "target")
    assert loaded == result.target
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    item = result.heldout[0]
    with torch.no_grad():
        out = model(input_ids=item["input_ids"][None], output_hidden_states=True)
    # Batched and single float32 runs: a few ulp of states of order 1.
    close = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(
        item["hidden_states"], torch.cat(out.hidden_states[1:4], -1)[0], **close
    )
    torch.testing.assert_close(item["target_log_normalizer"], out.logits[0].logsumexp(-1), **close)


@pytest.mark.parametrize("damage", ["cut", "missing", "no manifest"])
def test_half_written_target_is_not_used(prepared, tmp_path, damage):
    # Fault: a cache that trusts a directory for being there. Later stages, made from the
    # damaged one, are stale with it.
    import shutil

    source = prepared[0].directory
    directory = tmp_path / source.relative_to(source.parents[1])
    shutil.copytree(source, directory)
    weights = directory / "target" / "model.safetensors"
    if damage == "cut":
        weights.write_bytes(weights.read_bytes()[:100])
    elif damage == "missing":
        weights.unlink()
    else:
        (directory / "target" / "complete.json").unlink()
    again = prepare(TINY, tmp_path)
    assert again.cached == {"corpus": True, "tokenizer": True, "target": False, "features": False}
    # Same recipe, seed and machine: the same weights, bit for bit.
    for name, tensor in load_file(source / "target" / "model.safetensors").items():
        assert torch.equal(tensor, load_file(weights)[name]), name


def test_interrupted_stage_leaves_no_directory(tmp_path):
    # Fault: a stage directory that exists after its build died.
    def build(directory: Path):
        (directory / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_stage(tmp_path / "stage", build)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_cache_names_its_setting(tmp_path, monkeypatch):
    # Fault: a traceback about some path below the user's home.
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="TORCH_PORT_CACHE"):
        cached_stage(tmp_path / "file" / "stage", lambda directory: None)
    monkeypatch.setenv("TORCH_PORT_CACHE", str(tmp_path))
    assert default_cache_root() == tmp_path
    monkeypatch.delenv("TORCH_PORT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache_root() == tmp_path / "xdg" / "torch-port"


def test_fingerprint_follows_the_recipe():
    # Fault: a field outside the fingerprint, so that a cache of other sizes is used.
    base = FULL.fingerprint()
    assert base != QUICK.fingerprint()
    for entry in dataclasses.fields(Recipe):
        value = getattr(FULL, entry.name)
        changed = {
            type(None): lambda _: 3,
            str: lambda v: v + "x",
            tuple: lambda v: v[:-1],
        }.get(type(value), lambda v: v + 1)(value)
        same = dataclasses.replace(FULL, **{entry.name: changed}).fingerprint() == base
        draft = entry.name.startswith(("draft_", "markov_", "parity_")) or entry.name in (
            "block_size",
            "anchors",
            "tau_gain",
        )
        assert same == draft, entry.name


def test_fingerprint_follows_library_versions(monkeypatch):
    # Fault: a target of another torch or transformers taken for this one's.
    base = FULL.fingerprint()
    monkeypatch.setattr("torch_port.demo.recipe.version", lambda name: "0")
    assert FULL.fingerprint() != base


def test_tokenizer_has_every_byte_and_is_deterministic(tmp_path):
    # Fault: bytes unseen in training that encode to nothing; ids that change from run to run.
    texts = ["def f(x):\n    return x\n", "class A:\n    pass\n"] * 4
    files = []
    for name in ("a.json", "b.json"):
        tokenizer = train_tokenizer(texts, 300)
        tokenizer.save(str(tmp_path / name))
        files.append(json.loads((tmp_path / name).read_text()))
    assert files[0] == files[1]
    assert special_ids(tokenizer).all() == (0, 1, 2, 3, 4)
    assert [tokenizer.id_to_token(i) for i in range(5)] == list(SPECIAL_TOKENS)
    text = "".join(map(chr, range(1, 0x250))) + "漢字 🎉\x00"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.get_vocab_size() >= 256 + 5


def test_target_learns_and_evaluates_like_transformers():
    # Faults: padding or the last position counted as labels, labels not shifted, a rate of 0.
    ids = [np.array([5, 6, 7, 8, 9][: 2 + i % 4], dtype=np.int64) for i in range(12)]
    samples = [Sample(str(i), row, np.ones(len(row), np.float32)) for i, row in enumerate(ids)]
    recipe = dataclasses.replace(
        TINY, vocab_size=16, target_steps=40, target_batch=5, target_weight_decay=0.0
    )
    seen = []
    before = torch.random.get_rng_state()
    model, result = train_target(
        samples, samples, SpecialIds(0, 1, 2, 3, 4), recipe, lambda *call: seen.append(call)
    )
    assert torch.equal(torch.random.get_rng_state(), before)  # the caller's generator is its own
    assert seen[0][2] == pytest.approx(math.log(16), rel=0.1)  # uniform at the start
    # The next token is certain: what is learnt is a loss near 0.
    assert result.final_loss < 0.1
    assert result.heldout_top1_probability > 0.9
    total = count = 0.0
    for row in ids:
        ids_1S = torch.from_numpy(row)[None]
        total += model(input_ids=ids_1S, labels=ids_1S).loss.item() * (len(row) - 1)
        count += len(row) - 1
    # float32 means of losses near 0.01.
    assert evaluate_target(model, samples, 4)[0] == pytest.approx(total / count, rel=1e-3)
