"""Feature directories: captured target states in sharded safetensors with a JSON index.

Layout: `index.json` and `features-00000.safetensors`, … A shard holds the samples' rows one
after the other along the token axis, under the names of contracts §5; the index says for each
sample in which shard its rows begin. Rows are read as slices, so one sample costs its own bytes,
and ids and masks are read without the states.

Shape suffixes: S tokens of a sample, R rows of a shard, L captured layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torch_port.data.atomic import atomic_directory
from torch_port.data.conversations import DataError

INDEX_NAME = "index.json"
TOKEN_NAMES = ("input_ids", "loss_mask")
STATE_NAMES = ("hidden_states", "target_last_hidden_states", "target_log_normalizer")
_NAMES = TOKEN_NAMES + STATE_NAMES


@dataclass(frozen=True)
class FeatureSample:
    """One sample of contracts §5, on the host.

    `input_ids` int64 [S], `loss_mask` float32 [S], `hidden_states` [S, L·H],
    `target_last_hidden_states` [S, H] after the final norm, `target_log_normalizer` float32 [S]:
    logsumexp of the target's logits over all V.
    """

    id: str
    input_ids: Tensor
    loss_mask: Tensor
    hidden_states: Tensor
    target_last_hidden_states: Tensor
    target_log_normalizer: Tensor


class _Entry(BaseModel):
    """A sample's place (`shard`, first row) and size, and its supervised positions."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    id: str
    shard: int
    start: int
    length: int
    supervised: int


class _Index(BaseModel):
    """The index file."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    format: int
    shards: list[str]
    metadata: dict[str, Any]
    samples: list[_Entry]


def write_features(
    directory: str | Path,
    samples: Iterable[FeatureSample],
    *,
    metadata: Mapping[str, Any] | None = None,
    shard_rows: int = 32768,
) -> None:
    """Write samples as a feature directory, which appears complete or not at all.

    Args:
        directory: path to create.
        samples: consumed one by one; at most one shard is held in memory.
        metadata: JSON values to keep with the index (target layer ids, fingerprints).
        shard_rows: tokens after which a shard is closed; a sample is never split.

    Raises:
        DataError: the directory exists, a sample's shapes disagree, or there is no sample.

    Source: contracts §5.
    """
    entries: list[_Entry] = []
    shards: list[str] = []
    pending: list[FeatureSample] = []
    rows = 0
    try:
        with atomic_directory(Path(directory)) as temporary:

            def close_shard() -> None:
                name = f"features-{len(shards):05d}.safetensors"
                tensors = {
                    key: torch.cat([getattr(sample, key) for sample in pending]) for key in _NAMES
                }
                save_file(tensors, temporary / name)
                shards.append(name)
                pending.clear()

            for sample in samples:
                _check_sample(sample)
                entries.append(_entry(sample, shard=len(shards), start=rows))
                pending.append(sample)
                rows += len(sample.input_ids)
                if rows >= shard_rows:
                    close_shard()
                    rows = 0
            if pending:
                close_shard()
            if not entries:
                raise DataError(
                    f"{directory}: expected at least one sample, found none. "
                    "Raise max_length, or give conversations with assistant answers."
                )
            index = _Index(format=1, shards=shards, metadata=dict(metadata or {}), samples=entries)
            (temporary / INDEX_NAME).write_text(index.model_dump_json(), encoding="utf-8")
    except FileExistsError:
        raise DataError(
            f"{directory}: expected a path that does not exist, found a file or directory. "
            "Choose another path, or remove it."
        ) from None


class FeatureDirectory:
    """Map-style reader: `len(features)`, `features[i]`, and lengths without opening a shard.

    Attributes:
        ids, lengths, supervised: per sample, its name, tokens and supervised tokens.
        places: per sample, the shard that holds it and its first row there.
        metadata: what the writer kept with the index.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._index = _read_index(self.path)
        self.metadata = self._index.metadata
        self.ids = [entry.id for entry in self._index.samples]
        self.lengths = [entry.length for entry in self._index.samples]
        self.supervised = [entry.supervised for entry in self._index.samples]
        shards = [self.path / name for name in self._index.shards]
        self.places = [(shards[entry.shard], entry.start) for entry in self._index.samples]

    def __len__(self) -> int:
        return len(self._index.samples)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """All tensors of sample i, in the dtypes they were written with.

        Args:
            i: 0 … len − 1, or negative from the end.

        Returns:
            `input_ids` [S], `loss_mask` [S], `hidden_states` [S, L·H],
            `target_last_hidden_states` [S, H], `target_log_normalizer` [S].

        Raises:
            IndexError: i is out of range.
            DataError: the shard is missing or damaged.
        """
        return self._read(i, _NAMES)

    def tokens(self, i: int) -> dict[str, Tensor]:
        """`input_ids` [S] and `loss_mask` [S] of sample i; no state is read."""
        return self._read(i, TOKEN_NAMES)

    def final_states(self, i: int) -> dict[str, Tensor]:
        """`target_last_hidden_states` [S, H] of sample i, with its ids and mask; no layer's state.

        What summing the teacher's probability needs.
        """
        return self._read(i, (*TOKEN_NAMES, "target_last_hidden_states"))

    def iter_tokens(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (`input_ids` [R], `loss_mask` [R]) shard by shard: what counting tokens needs."""
        for name in self._index.shards:
            rows = _read_rows(self.path / name, slice(None), TOKEN_NAMES)
            yield rows["input_ids"], rows["loss_mask"]

    def _read(self, i: int, names: tuple[str, ...]) -> dict[str, Tensor]:
        entry = self._index.samples[i]
        shard = self.path / self._index.shards[entry.shard]
        return _read_rows(shard, slice(entry.start, entry.start + entry.length), names)


def _read_rows(shard: Path, rows: slice, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Rows of a shard's tensors; opened anew each time, so that readers can cross processes."""
    try:
        with safe_open(shard, framework="pt") as file:
            return {name: file.get_slice(name)[rows] for name in names}
    except (OSError, SafetensorError) as error:
        raise DataError(
            f"{shard}: expected a feature shard, found: {error}. Write the features again."
        ) from None


def _read_index(directory: Path) -> _Index:
    """The checked index of a feature directory."""
    path = directory / INDEX_NAME
    try:
        return _Index.model_validate_json(path.read_bytes())
    except OSError as error:
        problem = str(error.strerror)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
    raise DataError(
        f"{path}: expected the index of a feature directory, found: {problem}. "
        "Check the path, or write the features again."
    )


def _entry(sample: FeatureSample, shard: int, start: int) -> _Entry:
    return _Entry(
        id=sample.id,
        shard=shard,
        start=start,
        length=len(sample.input_ids),
        supervised=int((sample.loss_mask > 0.5).sum()),
    )


def _check_sample(sample: FeatureSample) -> None:
    """Refuse a sample whose tensors do not have one length, or no rows at all."""
    lengths = {name: len(getattr(sample, name)) for name in _NAMES}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise DataError(
            f"sample {sample.id}: expected tensors of one length above 0, found {lengths}. "
            "Capture the sample again."
        )
