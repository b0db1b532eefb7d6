"""Checkpoints of one process: what comes back, what is refused, what stays when writing fails."""

from __future__ import annotations

import errno
import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_toys import KEPT, OPTIMIZER, ToyRun, same
from safetensors.torch import load_file

from torch_port.errors import UserError
from torch_port.training import checkpoint_shards, checkpoints
from torch_port.training.checkpoint_files import SavedStep, superfluous
from torch_port.training.optimizer import OptimizerConfig


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


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


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let saves begin to write only when the event is set."""
    go, write = threading.Event(), checkpoints.write_shards

    def late(*args: Any) -> None:
        assert go.wait(30)
        write(*args)

    monkeypatch.setattr(checkpoints, "write_shards", late)
    yield go
    go.set()


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


# --- Damage --------------------------------------------------------------------------------------


def vanished(place: Path) -> str:
    file = next(place.glob("*.safetensors"))
    file.unlink()
    return rf"{file.name} is missing"


def truncated(place: Path) -> str:
    file = next(place.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size - 1)
    return rf"{file.name}: cannot be read"


def header_changed(place: Path) -> str:
    file = next(place.glob("*.safetensors"))
    file.write_bytes(file.read_bytes().replace(b'"dtype":"F32"', b'"dtype":"I32"', 1))
    return rf"{file.name}: its header was changed"


def record_cut(place: Path) -> str:
    record = place / "run.json"
    record.write_bytes(record.read_bytes()[:100])
    return r"run\.json: no JSON"


def renamed(place: Path) -> str:
    shutil.rmtree(place)
    shutil.copytree(place.parent / "step-00000001", place)
    return "its record is of step 1"


@pytest.mark.parametrize("damage", [vanished, truncated, header_changed, record_cut, renamed])
def test_a_damaged_newest_is_told_not_passed_over(
    damage: Callable[[Path], str], tmp_path: Path
) -> None:
    """Fault: days of training lost by a silent resume from an older checkpoint."""
    run = ToyRun(tmp_path, keep_last=3)
    for step in (1, 2, 3):
        run.train(step)
        run.save()
    newest = tmp_path / "step-00000003"
    words = damage(newest)
    for older, remedy in (
        (None, rf"remove {newest} to resume from step 2, which is complete"),
        ("step-00000002", rf"remove {newest} to resume from step 1, which is complete"),
        ("step-00000001", "no other checkpoint there is complete"),
    ):
        if older is not None:
            (tmp_path / older / "run.json").unlink()
        with pytest.raises(UserError, match=words) as raised:
            ToyRun(tmp_path).resume()
        assert str(newest) in str(raised.value)
        assert raised.match(remedy)


# --- Writing fails -------------------------------------------------------------------------------


@contextmanager
def small_files() -> Iterator[None]:
    """No file may grow beyond 2 KB: the system's own refusal, in the middle of a write."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@contextmanager
def failing(where: Any, name: str, number: int) -> Iterator[None]:
    """A function that writes fails as it does when the system refuses."""

    def fail(*args: Any, **settings: Any) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(where, name, fail)
        yield


REFUSALS: list[tuple[Callable[[], Any], str]] = [
    (small_files, r"larger than allowed here \(ulimit -f\)"),
    (lambda: failing(checkpoint_shards, "write_safetensors", errno.ENOSPC), "the disk is full"),
    (lambda: failing(checkpoint_shards, "write_safetensors", errno.EDQUOT), "the quota is used up"),
    (lambda: failing(checkpoints, "write_record", errno.ENOSPC), "the disk is full"),
    (lambda: failing(checkpoints, "publish_directory", errno.EIO), "Input/output error"),
    (lambda: failing(checkpoints, "remove_temporaries", errno.EROFS), "it is read-only: make it"),
    (lambda: failing(checkpoints, "temporary_name", errno.EACCES), "this user may not write"),
]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(("refusal", "words"), REFUSALS)
def test_a_save_that_fails_is_told_once_and_loses_nothing(
    refusal: Callable[[], Any], words: str, asynchronous: bool, tmp_path: Path
) -> None:
    """Disk full, quota, read-only, at each place of a save.

    Faults: an error that ends in a thread unseen; a half-written directory left; an older one
    deleted first; a save after it refused.
    """
    run = ToyRun(tmp_path, asynchronous=asynchronous, keep_last=1)
    run.train(1)
    run.save()
    run.train(2)
    with refusal(), pytest.raises(UserError, match=words) as raised:
        run.save()
    assert str(tmp_path) in str(raised.value)
    assert "checkpoint of step 2 was not written" in str(raised.value)
    run.checkpoints.wait()  # told once
    assert names(tmp_path) == ["step-00000001"]
    ToyRun(tmp_path).resume()
    run.save()
    assert names(tmp_path) == ["step-00000002"]


def test_a_failed_save_is_told_by_the_next_one(tmp_path: Path) -> None:
    run = ToyRun(tmp_path)
    run.train(1)
    with failing(checkpoint_shards, "write_safetensors", errno.ENOSPC):
        run.save(wait=False)
        run.train(2)
        with pytest.raises(UserError, match="the checkpoint of step 1 was not written; the disk"):
            run.save()
    assert names(tmp_path) == []


def test_a_directory_that_may_not_be_written(tmp_path: Path) -> None:
    """The system's own refusal; root, whom it refuses nothing, takes off that right meanwhile."""
    run = ToyRun(tmp_path / "run", asynchronous=False)
    run.train(1)
    tmp_path.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="this user may not write: give the right"):
            run.save()
    finally:
        if root:
            os.seteuid(0)
        tmp_path.chmod(0o755)
    run.save()
    assert names(tmp_path / "run") == ["step-00000001"]


def test_an_old_checkpoint_that_cannot_be_removed_is_told(tmp_path: Path) -> None:
    """Faults: a disk that fills because nothing said that nothing is deleted; the step, which was
    written, taken for lost."""
    run = ToyRun(tmp_path, keep_last=1, keep_best=0)
    run.train(1)
    run.save()
    run.train(2)
    from torch_port.training import checkpoint_files

    with (
        failing(checkpoint_files, "remove_directory", errno.EACCES),
        pytest.raises(UserError, match=r"step-00000001: cannot be removed \(Permission denied\)"),
    ):
        run.save()
    run.save()
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    run.train(3)
    run.save()
    assert names(tmp_path) == ["step-00000003"]


def test_the_end_of_a_run_waits_for_its_last_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults: a process that ends under its own save; a failed last save that nobody hears of; an
    error of the run replaced by the save's."""
    run = ToyRun(tmp_path)
    with held_back(monkeypatch) as go, run.checkpoints:
        run.train(1)
        run.save(wait=False)
        threading.Timer(0.2, go.set).start()
    assert names(tmp_path) == ["step-00000001"]

    def end(error: Exception | None) -> None:
        with run.checkpoints:
            run.train(run.step + 1)
            run.save(wait=False)
            if error is not None:
                raise error

    with failing(checkpoint_shards, "write_safetensors", errno.ENOSPC):
        with pytest.raises(UserError, match="the disk is full"):
            end(None)
        with pytest.raises(ZeroDivisionError) as raised:
            end(ZeroDivisionError())
    assert "the disk is full" in raised.value.__notes__[0]
