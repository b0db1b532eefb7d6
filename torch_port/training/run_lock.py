"""One run at a time in a directory: two would write into each other's checkpoints and logs."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from torch_port.errors import UserError
from torch_port.training.agreement import in_agreement

LOCK = "run.lock"


@contextmanager
def only_run(out: Path, rank: int, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Hold `out` for this run as long as the block lasts; the kernel lets go of it for the killed.

    Arguments: the run's directory, made where it is not there, and removed again when the block
    raises before it writes; this rank, of which 0 holds the lock; a gloo group of all ranks, None
    without others.
    Raises UserError on all ranks when another run holds it, naming its process and machine. On a
    file system without locks it warns and holds nothing.
    """
    held: int | None = None
    was_there = out.exists()
    with in_agreement(group):
        if rank == 0:
            held = _take(out)
    try:
        yield
    except BaseException:
        if held is not None and not was_there:
            _forget(out)
        raise
    finally:
        if held is not None:
            os.close(held)


def _forget(out: Path) -> None:
    """Remove the directory of a run that was refused before it wrote anything."""
    if {path.name for path in out.iterdir()} == {LOCK}:
        (out / LOCK).unlink()
        out.rmdir()


def _take(out: Path) -> int | None:
    """Lock the directory's file; return what keeps it locked while it is open."""
    path = out / LOCK
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise UserError(
            f"training.out: {out}: {error.strerror}; make it a directory that this user may write"
        ) from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        holder = os.read(lock, 200).decode("utf-8", "replace").strip()
        os.close(lock)
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            warnings.warn(
                f"{path} cannot be locked here ({error.strerror}): start no second run in {out}",
                stacklevel=2,
            )
            return None
        raise UserError(
            f"training.out: {out} is in use by another run ({holder or 'which did not say who'}); "
            "wait for it, stop it, or set training.out to another directory"
        ) from None
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    return lock
