"""An interrupted conversion leaves no half directory, and does not stand in the way of the next."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from format_toys import (
    CASES,
    assert_same,
    borrowed,
    draft_tensors,
    read_tensors,
    write_draft,
    write_target,
)

from torch_port.formats.convert import FORMATS, Options, convert, read_checkpoint
from torch_port.formats.target import TargetDirectory

CASE = CASES["gated"]


def child(
    source: Path, target: Path, destination: Path, to: str, tensors: int, tell: Connection
) -> None:
    """Convert; after so many tensors say so and stand still."""
    count = 0

    def progress(done: int, total: int) -> None:
        nonlocal count
        count += 1
        if count == tensors or done == total:
            tell.send((done, total))
            time.sleep(60)

    convert(source, destination, to, Options(TargetDirectory(target)), progress)


@pytest.mark.parametrize(
    ("tensors", "to"), [(1, "hf"), *((5, to) for to in FORMATS), (10**6, "port")]
)
def test_a_killed_conversion(tensors: int, to: str, tmp_path: Path) -> None:
    """A process is killed, SIGKILL, between two tensors, and before config.json or run.json.

    Faults: written under its final name; a next try that takes over, or stumbles over, the rest."""
    source, target = write_draft(tmp_path / "a", CASE), write_target(tmp_path / "t")
    place = tmp_path / "out"
    place.mkdir()
    hear, tell = multiprocessing.Pipe(duplex=False)
    arguments = (source, target, place / "draft", to, tensors, tell)
    # Spawned: a fork of a process in which JAX has threads can hang.
    process = multiprocessing.get_context("spawn").Process(target=child, args=arguments)
    process.start()
    assert hear.poll(60)
    done, total = hear.recv()
    assert 0 < done <= total
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    (left,) = place.iterdir()  # what a killed process cannot clean up, under a hidden name
    assert left.name.startswith(".draft.")
    assert not (place / "draft").exists()
    convert(source, place / "draft", to, Options(TargetDirectory(target)))
    assert_same(
        {n: r.load() for n, r in read_checkpoint(place / "draft").weights.items()},
        draft_tensors(CASE),
    )
    head = borrowed(CASE)["lm_head.weight"]
    if to in ("deepspec", "speculators"):
        assert read_tensors(place / "draft")["lm_head.weight"].equal(head)
    assert sorted(p.name for p in place.iterdir()) == sorted([left.name, "draft"])


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), OSError(errno.ENOSPC, "No space left on device")]
)
def test_an_error_in_the_middle_leaves_nothing(
    to: str, error: BaseException, tmp_path: Path
) -> None:
    """Fault: a temporary directory of gigabytes after every Ctrl-C or full disk."""
    source, target = write_draft(tmp_path / "a", CASE), write_target(tmp_path / "t")

    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    place = tmp_path / "deep" / "out"
    with pytest.raises(type(error)):
        convert(source, place / "draft", to, Options(TargetDirectory(target)), progress)
    assert list(place.iterdir()) == []


def test_a_source_that_changes_meanwhile(tmp_path: Path) -> None:
    """Fault: a header written for other values than those that follow it."""
    from safetensors.torch import save_file

    from torch_port.errors import UserError

    source = write_draft(tmp_path / "a", CASE)
    other = draft_tensors(CASE) | {"fc.weight": draft_tensors(CASE)["fc.weight"].float()}

    def progress(done: int, total: int) -> None:
        save_file(other, source / "model.safetensors")

    with pytest.raises(UserError, match="changed while it was read"):
        convert(source, tmp_path / "b", "hf", None, progress)
    assert not (tmp_path / "b").exists()
