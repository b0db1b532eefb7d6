"""Files and directories that exist complete or not at all."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name beside it and rename it when the block succeeds.

    Args:
        path: the file to write; its directory exists. An old file of this name is replaced.

    Yields:
        A binary stream. After an error in the block nothing is left behind.
    """
    temporary = _temporary_name(path)
    try:
        with open(temporary, "xb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Fill a directory under a temporary name beside it and rename it when the block succeeds.

    Args:
        path: the directory to create; missing parents are made.

    Yields:
        The temporary directory to write into. After an error in the block it is removed.

    Raises:
        FileExistsError: `path` exists already, empty or not (checked first, and at the rename).
    """
    if path.exists():
        raise FileExistsError(f"{path} exists already")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    temporary.mkdir()
    try:
        yield temporary
        _sync_tree(temporary)
        try:
            os.rename(temporary, path)
        except OSError as error:
            if path.exists():  # another process was faster; its directory stays
                raise FileExistsError(f"{path} exists already") from error
            raise
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _temporary_name(path: Path) -> Path:
    """A fresh hidden name in the same directory, hence on the same file system."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def _sync_tree(root: Path) -> None:
    """Flush every file and directory below `root`: a rename must not overtake its contents."""
    for directory, _, names in os.walk(root):
        for name in names:
            _sync(Path(directory, name))
        _sync(Path(directory))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
