"""Checkpoints of one process: what comes back, what is refused, which ones stay."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toys import KEPT, OPTIMIZER, ToyRun, held_back, names, same
from safetensors.torch import load_file

from torch_port.errors import UserError
from torch_port.training.checkpoint_files import SavedStep, superfluous
from torch_port.training.optimizer import OptimizerConfig


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_resumed_run_goes_on_bit_for_bit(asynchronous: bool, tmp_path: Path) -> None:
    """Field-notes 13 and 14: rate, masters and their dtype, moments, guard, random states.

    20 steps, warm-up 4, stop at 13. By hand: the rate at 14 is 1e-2·½(1 + cos(π·10/16)). Faults: a
    schedule that starts again; masters made anew from the bf16 weights; random states forgotten.
    """
    torch.manual_seed(5)
    whole = ToyRun(tmp_path, asynchronous=asynchronous)
    whole.train(13)
    whole.save()
    at_13, drawn = whole.tensors(), torch.rand(3)
    whole.train(14)
    assert whole.rate == pytest.approx(1e-2 * 0.5 * (1 - 0.3826834323650898), rel=1e-12)

    torch.manual_seed(6)
    again = ToyRun(tmp_path, seed=1)
    again.resume()
    assert again.step == 13
    same(again.tensors(), at_13)
    masters = [t for n, t in again.tensors().items() if n.startswith("optimizer.masters.")]
    assert len(masters) == len(again.optimizer.names)
    assert {master.dtype for master in masters} == {torch.float32}
    assert any(not torch.equal(m, m.bfloat16().float()) for m in masters)
    assert torch.equal(torch.rand(3), drawn)
    again.train(14)
    assert again.rate == whole.rate
    same(again.tensors(), whole.tensors())
    assert again.guard() == whole.guard()


def test_norms_of_ones_move_and_keep_moving_after_a_resume(tmp_path: Path) -> None:
    """Field-note 14: bf16 updates of 1e-4 rounded away, before a resume or after one."""
    slow = OPTIMIZER.model_copy(update={"peak_rate": 1e-4})
    first = ToyRun(tmp_path, optimizer=slow)
    first.train(10)
    first.save()
    second = ToyRun(tmp_path, optimizer=slow)
    second.resume()
    second.train(20)
    norms = {
        name: master
        for name, master in zip(second.optimizer.names, second.optimizer.masters, strict=True)
        if name.endswith("norm.weight")
    }
    held = first.tensors()
    assert norms
    for name, master in norms.items():
        before = held[f"optimizer.masters.{name}"]
        assert (before != 1).all(), name
        assert not torch.equal(master, before), name


def test_a_record_without_its_step_is_refused(tmp_path: Path) -> None:
    """Field-note 13, the other half: no step on record must not become step 0."""
    run = ToyRun(tmp_path)
    run.train(13)
    run.save()
    record = tmp_path / "step-00000013" / "run.json"
    content = json.loads(record.read_text())
    del content["training"]["step"]
    record.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"run\.json: no \['step'\]"):
        ToyRun(tmp_path).resume()


def test_another_mask_token_is_refused(tmp_path: Path) -> None:
    """Field-note 17: changed in the run file between save and resume, and accepted silently."""
    run = ToyRun(tmp_path)
    run.train(1)
    run.save()
    other = ToyRun(tmp_path, config={"mask_token_id": 2})
    with pytest.raises(UserError, match="mask_token_id is 1 in the checkpoint and 2 in this run"):
        other.resume()


def test_another_map_of_the_same_size_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    """Field-note 1 by this door: a read into the buffers passes no hook of load_state_dict."""
    run = ToyRun(tmp_path)
    run.train(1)
    run.save()
    other = ToyRun(tmp_path, kept=(1, *KEPT[1:]))
    before = other.tensors()
    with pytest.raises(UserError, match="another vocabulary map is installed"):
        other.resume()
    same(other.tensors(), before)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"spike_multiple": 3.0}, None),
        ({"total_steps": 40}, "total_steps is 20 there and 40 here"),
        ({"peak_rate": 0.5}, "peak_rate is 0.01 there and 0.5 here"),
    ],
)
def test_optimizer_settings_on_a_resume(
    change: dict[str, Any], refused: str | None, tmp_path: Path
) -> None:
    """Faults: a guard that cannot be loosened without a new run; a schedule that jumps."""
    run = ToyRun(tmp_path)
    run.train(3)
    run.save()
    changed = ToyRun(tmp_path, optimizer=OptimizerConfig(**(OPTIMIZER.model_dump() | change)))
    if refused:
        with pytest.raises(UserError, match=refused):
            changed.resume()
    else:
        changed.resume()
        assert changed.guard() == run.guard()
        assert changed.optimizer.guard.multiple == 3.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_optimizer_and_one_that_is_not(dtype: torch.dtype, tmp_path: Path) -> None:
    """Either goes on from the other's checkpoint. Fault: a float32 draft's masters on the host,
    which are its weights again, written as state that no other run knows."""
    whole = ToyRun(Path("nowhere"), dtype=dtype)
    for offload, until, seed in ((True, 2, 0), (False, 4, 7), (True, 6, 7)):
        run = ToyRun(tmp_path, dtype=dtype, offload=offload, seed=seed)
        run.resume()
        run.train(until)
        run.save()
        whole.train(until)
        same(run.tensors(), whole.tensors())


def test_weights_of_another_precision_are_refused(tmp_path: Path) -> None:
    run = ToyRun(tmp_path)
    run.train(1)
    run.save()
    with pytest.raises(UserError, match=r"is torch\.bfloat16 in the checkpoint and torch\.float32"):
        ToyRun(tmp_path, dtype=torch.float32).resume()


def test_state_that_is_laid_out_otherwise_is_refused(tmp_path: Path) -> None:
    """Contracts §3: a flattened optimizer state, as some shard it, cannot be resharded.

    Faults: such a checkpoint written, to be found out at the resume; one read as it is.
    """
    run = ToyRun(tmp_path)
    run.train(1)
    name, master = run.optimizer.names[0], run.optimizer.masters[0]
    run.optimizer.masters[0] = master.flatten()
    with pytest.raises(UserError, match=rf"{name}: optimizer state of shape .* laid out like"):
        run.save()
    run.optimizer.masters[0] = master
    run.save()
    file = next((tmp_path / "step-00000001").glob("*.safetensors"))
    assert load_file(file)[f"optimizer.exp_avg.{name}"].dim() == 2


def test_what_is_written_is_the_step_that_was_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults: tensors written after the next step changed them; a save that stops the training;
    the second save's copies taken into the first one's memory before that is written."""
    run = ToyRun(tmp_path, keep_last=9)
    with held_back(monkeypatch) as go:
        run.train(3)
        run.save(wait=False)
        at_3 = run.tensors()
        run.train(6)  # while nothing is written
        assert not (tmp_path / "step-00000003").exists()
        threading.Timer(0.2, go.set).start()
        run.save()  # the next one waits for the first
    assert names(tmp_path) == ["step-00000003", "step-00000006"]
    for step, expected in ((3, at_3), (6, run.tensors())):
        other = ToyRun(tmp_path, seed=1)
        other.load(tmp_path / f"step-{step:08}")
        assert other.step == step
        same(other.tensors(), expected)


def test_a_step_is_saved_once(tmp_path: Path) -> None:
    """SIGTERM right after a save, or after a resume: the step is there already. A directory of that
    name that this run did not write is another run's."""
    run = ToyRun(tmp_path)
    run.train(2)
    run.save()
    written = (tmp_path / "step-00000002").stat().st_ino
    run.save()
    resumed = ToyRun(tmp_path, seed=1)
    resumed.resume()
    resumed.save()
    assert (tmp_path / "step-00000002").stat().st_ino == written
    fresh = ToyRun(tmp_path)
    fresh.train(2)
    with pytest.raises(UserError, match="step-00000002 is there already, and not of this run"):
        fresh.save()


METRICS = {1: 0.5, 2: 0.9, 3: float("nan"), 4: 0.9, 5: None, 6: 0.1, 7: 0.2}


@pytest.mark.parametrize(
    ("last", "best", "kept"),
    [(1, 0, [7]), (2, 1, [4, 6, 7]), (1, 2, [2, 4, 7]), (3, 3, [1, 2, 4, 5, 6, 7])],
)
def test_the_newest_and_the_best_are_kept(
    last: int, best: int, kept: list[int], tmp_path: Path
) -> None:
    """By hand: of equals the newer is the better one; a step without a number is no best one.

    Faults: a best one deleted with the old ones; NaN taken for the highest; what is no checkpoint
    deleted.
    """
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-one").mkdir()
    run = ToyRun(tmp_path, keep_last=last, keep_best=best)
    for step, metric in METRICS.items():
        run.train(step)
        run.save(metric)
    assert names(tmp_path) == ["notes", *(f"step-{step:08}" for step in kept), "step-one"]


def test_the_one_just_written_is_never_superfluous() -> None:
    """Whatever is beside it: a newer step of another run, better ones."""
    found = [SavedStep(step, Path(), 1.0 - step) for step in (1, 2, 3)]
    assert [s.step for s in superfluous(found, keep_last=1, keep_best=0, written=2)] == [1]


def test_a_metric_survives_a_resume(tmp_path: Path) -> None:
    """Fault: the best one of the time before the resume forgotten, and deleted."""
    first = ToyRun(tmp_path, keep_last=1, keep_best=1)
    for step, metric in ((1, 0.9), (2, 0.1)):
        first.train(step)
        first.save(metric)
    second = ToyRun(tmp_path, keep_last=1, keep_best=1)
    second.resume()
    second.train(3)
    second.save(0.2)
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_leftovers_of_killed_saves_are_ignored_and_removed(tmp_path: Path) -> None:
    """Faults: a half-written directory taken for a checkpoint; the disk filled by them."""
    run = ToyRun(tmp_path)
    run.train(1)
    run.save()
    left = tmp_path / f".step-00000002.{'0' * 32}.tmp"
    shutil.copytree(tmp_path / "step-00000001", left)
    mine = tmp_path / ".mine.tmp"
    mine.mkdir()
    again = ToyRun(tmp_path, seed=1)
    again.resume()
    assert again.step == 1
    assert left.exists()  # whoever only looks removes nothing: another process may be writing it
    again.train(2)
    again.save()
    assert names(tmp_path) == [".mine.tmp", "step-00000001", "step-00000002"]
