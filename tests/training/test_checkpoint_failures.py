"""Checkpoints that are damaged, and saves that fail: told once, and nothing older is lost."""

from __future__ import annotations

import errno
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
from checkpoint_toys import ToyRun, held_back, names

from torch_port.errors import UserError
from torch_port.training import checkpoint_shards, checkpoints

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
