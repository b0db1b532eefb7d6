"""Directories written shard by shard: interrupted work goes on, other inputs are refused.

The first thing in such a directory is a record of what it is made from; the last is its index. A
shard appears complete or not at all, with its samples' entries in its own header, so whatever was
finished is known without a log. No torch.
"""

from __future__ import annotations

import fcntl
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from torch_port.data.atomic import atomic_file
from torch_port.data.conversations import DataError
from torch_port.data.index import INDEX_NAME, Index

_ABOUT = "about"  # the one key of a shard's metadata: several would be written in random order


@contextmanager
def claimed(directory: Path, record_name: str, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Create a directory for these inputs, or take it up again; no other process may write to it.

    Arguments: `directory`; `record_name`, the file that holds the inputs; `inputs`, JSON values.
    Raises DataError when the directory is something else's, was begun with other inputs, or is
    being written by another process.
    """
    record = directory / record_name
    # An empty directory that somebody made for it is fine.
    if not record.is_file() and directory.exists() and not _is_empty(directory):
        raise DataError(
            f"{directory}: exists and holds no {record_name}, so it is not an earlier run of "
            "this command. Choose another path, or remove it."
        )
    directory.mkdir(parents=True, exist_ok=True)
    if not record.is_file():
        with atomic_file(record) as stream:
            stream.write(json.dumps(dict(inputs), indent=1).encode())
    with open(record, "rb") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(
                f"{directory}: another process is writing it. Wait for it, or choose another path."
            ) from None
        except OSError:
            pass  # a file system without locks
        _compare(directory, record_name, held.read(), inputs)
        for left_over in directory.glob(".*.tmp"):  # of a process that was killed
            left_over.unlink()
        yield


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _compare(directory: Path, record_name: str, held: bytes, inputs: Mapping[str, Any]) -> None:
    try:
        before = json.loads(held)
    except ValueError:
        before = None
    if not isinstance(before, dict):
        raise DataError(f"{directory / record_name}: no JSON object. Remove the directory.")
    wanted = json.loads(json.dumps(dict(inputs)))
    different = [key for key in {**before, **wanted} if before.get(key) != wanted.get(key)]
    if different:
        told = ", ".join(
            f"{key} was {_short(before.get(key))}, is {_short(wanted.get(key))}"
            for key in different
        )
        raise DataError(
            f"{directory}: begun with other inputs ({told}). Give the same ones to continue it, "
            "choose another path, or remove it."
        )


def _short(value: Any, limit: int = 40) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def write_shard(
    path: Path, save: Callable[[str, dict[str, str]], None], about: Mapping[str, Any]
) -> None:
    """Write a shard under a temporary name, flush it and rename it.

    Arguments: `path`; `save(file name, metadata)`, which writes a safetensors file; `about`, JSON
    values that `read_about` gives back.
    """
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        save(str(temporary), {_ABOUT: json.dumps(dict(about))})
        with open(temporary, "rb") as stream:
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read_about(path: Path) -> dict[str, Any] | None:
    """Return what a finished shard says of itself, from its header; None when there is no shard.

    Raises DataError for a file that is damaged, or no shard of this package's.
    """
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="np") as file:
            about = json.loads((file.metadata() or {})[_ABOUT])
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise DataError(
            f"{path}: expected a finished shard, found: {error}. Remove the file to make it again."
        ) from None
    if not isinstance(about, dict):
        raise DataError(f"{path}: expected a finished shard. Remove the file to make it again.")
    return about


def write_index(
    directory: Path,
    shards: Sequence[str],
    entries: Sequence[Sequence[Mapping[str, Any]]],
    metadata: Mapping[str, Any],
) -> Index:
    """Write the index that completes a directory.

    Arguments: `directory`; names of its `shards`; `entries` of each shard's samples, as their
    shards keep them; `metadata`, JSON values.
    Returns the index.
    """
    samples = [{**one, "shard": shard} for shard, rows in enumerate(entries) for one in rows]
    index = Index.model_validate(
        {"format": 1, "shards": list(shards), "metadata": dict(metadata), "samples": samples}
    )
    with atomic_file(directory / INDEX_NAME) as stream:
        stream.write(index.model_dump_json().encode())
    return index
