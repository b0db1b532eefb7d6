"""A whole run from its run file: what it starts from, what it refuses, how it goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from torch_port.data.features import FeatureDirectory, FeatureSample, write_features
from torch_port.errors import UserError
from torch_port.formats.convert import read_checkpoint
from torch_port.run import load_run
from torch_port.training.log_files import read_log
from torch_port.training.run_lock import LOCK
from torch_port.training.soak import _finish
from torch_port.training.toy_run import LAYERS, K, V, write_toy_run
from torch_port.training.trainer import run_training
from torch_port.vocabulary.files import save_map
from torch_port.vocabulary.mapping import buffers_from_kept

QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of one toy run, which no test changes."""
    return write_toy_run(tmp_path_factory.mktemp("toy") / "run")


def train(run_file: Path, out: Path, *overrides: str) -> None:
    run_training(load_run(run_file, [f"training.out={out}", *overrides]), QUIET)


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    place = out / "checkpoints" / f"step-{step:08d}"
    return {
        name: tensor
        for path in sorted(place.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def record(out: Path, step: int) -> dict[str, Any]:
    text = (out / "checkpoints" / f"step-{step:08d}" / "run.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def losses(out: Path) -> dict[int, float]:
    return {r["step"]: r["loss"] for r in read_log(out / "log.jsonl", "train")}


def test_a_run_that_was_stopped_goes_on_as_if_it_was_not(toy: Path, tmp_path: Path) -> None:
    """Fault: data position, moments, schedule or guard begin anew on a resume (field-note 13)."""
    each = ("training.log_every=1", "checkpoints.every=6", "checkpoints.keep_last=9")
    train(toy, tmp_path / "whole", "optimizer.total_steps=12", *each)
    train(toy, tmp_path / "cut", "optimizer.total_steps=12", *each)
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step-00000012")  # as if killed at 6 … 11
    train(toy, tmp_path / "cut", "optimizer.total_steps=12", *each)
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    one, other = weights(tmp_path / "whole", 12), weights(tmp_path / "cut", 12)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    # Position in the data, schedule, guard, random states: all that is no tensor.
    assert record(tmp_path / "whole", 12) == record(tmp_path / "cut", 12)
    rates = [r["rate"] for r in read_log(tmp_path / "cut" / "log.jsonl", "train")]
    assert rates[:4] == pytest.approx([2.5e-3, 5e-3, 7.5e-3, 1e-2])  # peak 1e-2, warm-up of 4
    assert rates[6] < rates[5] < rates[4] < 1e-2


def test_training_lowers_the_loss(toy: Path, tmp_path: Path) -> None:
    """Fault: gradients do not reach the weights, or their sign is wrong."""
    train(toy, tmp_path / "out", "training.log_every=10")
    found = losses(tmp_path / "out")
    assert found[40] < found[10]


def test_a_finished_run_is_left_alone(toy: Path, tmp_path: Path) -> None:
    """Fault: a run that is started again after its last step takes more of them."""
    train(toy, tmp_path / "out", "optimizer.total_steps=5")
    files = [p for p in (tmp_path / "out").rglob("*") if p.is_file() and p.name != LOCK]
    before = {p: p.stat().st_mtime_ns for p in files}
    train(toy, tmp_path / "out", "optimizer.total_steps=5")
    assert before == {p: p.stat().st_mtime_ns for p in before}


def test_validation_samples_are_not_trained_on(toy: Path, tmp_path: Path) -> None:
    """Fault: the split leaks: 24 samples, a share of 0.15 keeps 4 of them."""
    train(toy, tmp_path / "out", "optimizer.total_steps=5")
    start = read_log(tmp_path / "out" / "log.jsonl", "start")[0]
    assert start["samples"] == 20
    assert start["steps_per_epoch"] == 10
    [validated] = read_log(tmp_path / "out" / "log.jsonl", "validation")
    assert 1.0 <= validated["tau_probabilistic"] <= 4.0


def test_init_from_starts_with_those_weights_and_that_map(toy: Path, tmp_path: Path) -> None:
    """Fault: a warm start draws new weights (its loss would begin where a new draft's does)."""
    quick = ("training.log_every=1", "checkpoints.every=100")
    train(toy, tmp_path / "first", *quick)
    place = tmp_path / "first" / "checkpoints" / "step-00000040"
    again = ("optimizer.total_steps=5", f"training.init_from={place}", *quick)
    train(toy, tmp_path / "second", *again)
    first, second = losses(tmp_path / "first"), losses(tmp_path / "second")
    assert second[1] < first[1]
    kept = torch.randperm(V, generator=torch.Generator().manual_seed(9))[:K].sort().values
    assert not torch.equal(buffers_from_kept(kept, V)[0], weights(tmp_path / "first", 40)["t2d"])
    other = tmp_path / "other.safetensors"
    facts: dict[str, Any] = {"corpus_fingerprint": "x", "tokenizer_fingerprint": "x"}
    save_map(other, *buffers_from_kept(kept, V), coverage=1.0, **facts)
    with pytest.raises(UserError, match="map"):  # field-note 1
        train(toy, tmp_path / "third", *again, f"vocabulary.map={other}")


def test_a_run_trains_a_head_of_its_own(toy: Path, tmp_path: Path) -> None:
    """Fault: the head starts from noise, stays out of the checkpoint, or never moves."""
    own = ("training.trainable_head=true", "optimizer.total_steps=5")
    train(toy, tmp_path / "out", *own)
    state = weights(tmp_path / "out", 5)
    target = load_file(toy.parent / "target" / "model.safetensors")["lm_head.weight"]
    started = target[state["t2d"]]
    moved = (state["lm_head.weight"] - started).abs().max()
    assert 0 < moved < 0.1  # five steps at rates up to 1e-2


def test_two_processes_validate_as_one(toy: Path, tmp_path: Path) -> None:
    """Faults: a rank without a sample adds one, ratios are averaged, denominators are a rank's own.

    Five samples over two ranks: one rank has none in the last pass. Losses differ by float32's
    rounding of sums alone; a mean of the ranks' ratios is off by 1e-2.
    """
    common = ["data.validation_share=0.2", "optimizer.total_steps=5", "training.dtype=float64"]
    each = {1: "data.accumulation=4", 2: "data.accumulation=2"}
    found = {}
    for processes, accumulation in each.items():
        out = tmp_path / str(processes)
        _finish(toy, [*common, accumulation, f"training.out={out}"], processes)
        [found[processes]] = read_log(out / "log.jsonl", "validation")
    assert found[1]["loss"] > 0
    for name in ("loss", "tau_probabilistic", "acc", "accept_position", "draft_vocab_coverage"):
        assert found[2][name] == pytest.approx(found[1][name], rel=1e-9), name


def refused(run_file: Path, out: Path, words: str, *overrides: str) -> None:
    with pytest.raises(UserError, match=words):
        train(run_file, out, *overrides)
    assert not out.exists()  # nothing half-written


def test_what_would_train_on_the_wrong_thing_is_refused(toy: Path, tmp_path: Path) -> None:
    """Fault: features of other layers, another target or too long a sample are trained on."""
    out, features = tmp_path / "out", FeatureDirectory(toy.parent / "features")
    names = ("input_ids", "loss_mask", "hidden_states", "target_last_hidden_states")
    samples = [FeatureSample(str(i), *(features[i][n] for n in names)) for i in range(8)]
    write_features(tmp_path / "layers", samples, metadata={"target_layer_ids": [1, 2]})
    words = r"layers \[1, 2\], but the draft config's target_layer_ids are \[0, 2\]"
    refused(toy, out, words, f"data.path={tmp_path / 'layers'}")
    about = {"target_layer_ids": list(LAYERS), "target_fingerprint": "0" * 64}
    write_features(tmp_path / "target", samples, metadata=about)
    refused(toy, out, "captured from a target whose", f"data.path={tmp_path / 'target'}")
    refused(toy, out, r"data\.max_length is 16, but \d+ of 20 samples", "data.max_length=16")
    refused(toy, out, "there already; capture them first", "data.producer=inline")


def test_a_pruned_draft_without_a_map_is_refused(toy: Path, tmp_path: Path) -> None:
    """Fault: it silently becomes ids 0 … K − 1 (field-note 2)."""
    refused(toy, tmp_path / "out", "vocabulary.map is not set", "vocabulary.map=null")


def test_another_mask_token_does_not_resume(toy: Path, tmp_path: Path) -> None:
    """Fault: mask_token_id changed between save and resume is accepted silently (17)."""
    out = tmp_path / "out"
    train(toy, out, "optimizer.total_steps=5")
    config = json.loads((toy.parent / "draft" / "config.json").read_text())
    config["dflash_config"]["mask_token_id"] = 5
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="mask_token_id is 63 in the checkpoint and 5 in this run"):
        train(toy, out, "optimizer.total_steps=5", f"draft.config={tmp_path / 'config.json'}")
    with pytest.raises(UserError, match="num_anchors is 3, but the checkpoint"):
        train(toy, out, "optimizer.total_steps=5", "data.num_anchors=3")


def test_keep_best_keeps_the_best_of_validation(toy: Path, tmp_path: Path) -> None:
    """Fault: keep_best goes by the loss, by the worst, or by nothing."""
    train(toy, tmp_path / "out", "checkpoints.keep_last=1", "checkpoints.keep_best=1")
    found = read_log(tmp_path / "out" / "log.jsonl", "validation")
    best = max(found, key=lambda record: record["tau_probabilistic"])["step"]
    there = {p.name for p in (tmp_path / "out" / "checkpoints").iterdir()}
    assert there == {f"step-{best:08d}", "step-00000040"}


def test_a_checkpoint_of_a_run_is_a_draft_for_all(toy: Path, tmp_path: Path) -> None:
    """Fault: what training writes is no port checkpoint that convert and show can read."""
    train(toy, tmp_path / "out", "optimizer.total_steps=5", "training.dtype=bfloat16")
    checkpoint = read_checkpoint(tmp_path / "out" / "checkpoints" / "step-00000005")
    assert (checkpoint.format, checkpoint.dtype) == ("port", "BF16")
    assert checkpoint.training is not None
    assert checkpoint.training["step"] == 5


def test_a_missing_target_is_one_clear_error(toy: Path, tmp_path: Path) -> None:
    """Fault: a traceback, or a run directory that was begun."""
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    refused(toy, tmp_path / "out", "no such directory", f"target.path={tmp_path / 'no'}")
