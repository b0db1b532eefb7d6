"""Files and directories that exist complete or not at all."""

from __future__ import annotations

import os
import re
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
    temporary = temporary_name(path)
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
    temporary = temporary_name(path)
    temporary.mkdir()
    try:
        yield temporary
        publish_directory(temporary, path)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def publish_directory(temporary: Path, path: Path) -> None:
    """Give a filled temporary directory its name, once all that it holds is on the disk.

    Raises:
        FileExistsError: `path` exists already; the temporary directory stays as it is.
    """
    _sync_tree(temporary)
    try:
        os.rename(temporary, path)
    except OSError as error:
        if path.exists():  # another process was faster; its directory stays
            raise FileExistsError(f"{path} exists already") from error
        raise
    sync(path.parent)


def remove_directory(path: Path) -> None:
    """Delete a directory that others may read: under its name it is there whole, or not at all.

    Raises:
        OSError: it cannot be renamed, or not all of it can be removed.
    """
    temporary = temporary_name(path)
    os.rename(path, temporary)
    shutil.rmtree(temporary)


def temporary_name(path: Path) -> Path:
    """Return a fresh hidden name in the same directory, hence on the same file system."""
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")


def is_temporary(path: Path, name: str) -> bool:
    """Tell whether a path is a temporary one of what is to be called `name` (a regular expression).

    >>> is_temporary(Path("a/.step-5.0123456789abcdef0123456789abcdef.tmp"), "step-[0-9]+")
    True
    """
    return re.fullmatch(rf"\.{name}\.[0-9a-f]{{32}}\.tmp", path.name) is not None


def _sync_tree(root: Path) -> None:
    """Flush every file and directory below `root`: a rename must not overtake its contents."""
    for directory, _, names in os.walk(root):
        for name in names:
            sync(Path(directory, name))
        sync(Path(directory))


def sync(path: Path) -> None:
    """Flush a file or a directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
