"""The index of a sharded directory: where each sample lies, how long it is, whether it can train.

The field of a prepared directory (ids and masks) and of a feature directory (with states) alike:
`index.json` beside the shards. No torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from torch_port.anchors import is_trainable
from torch_port.data.conversations import DataError

INDEX_NAME = "index.json"


class Entry(BaseModel):
    """A sample's place (`shard`, first row) and size, and its supervised positions.

    `trainable` says whether it has an anchor candidate (spec sheet §3.1); indices written before
    that was recorded do not say.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    id: str
    shard: int
    start: int
    length: int
    supervised: int
    trainable: bool | None = None


class Index(BaseModel):
    """The index file. `normalizer` says whether the shards hold `target_log_normalizer`."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    format: int
    shards: list[str]
    metadata: dict[str, Any]
    samples: list[Entry]
    normalizer: bool = True


def entry(sample_id: str, loss_mask: NDArray[np.generic], shard: int = 0, start: int = 0) -> Entry:
    """Return a sample's entry, from its loss mask [S]."""
    mask = loss_mask.astype(np.float32)
    return Entry(
        id=sample_id,
        shard=shard,
        start=start,
        length=len(mask),
        supervised=int((mask > 0.5).sum()),
        trainable=is_trainable(mask),
    )


@contextmanager
def _no_collection() -> Iterator[None]:
    """Without garbage collection: among 100,000 new entries it takes as long as reading them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def read_index(directory: Path) -> Index:
    """Return the checked index of a directory. Raises DataError for none, or a bad one."""
    path = directory / INDEX_NAME
    try:
        content = path.read_bytes()
        with _no_collection():
            index = Index.model_validate_json(content)
    except OSError as error:
        problem = str(error.strerror)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    else:
        if all(0 <= sample.shard < len(index.shards) for sample in index.samples):
            return index
        problem = "a sample in a shard that it does not name"
    raise DataError(
        f"{path}: expected the index of a feature directory, found: {problem}. "
        "Check the path, or write the features again."
    )
