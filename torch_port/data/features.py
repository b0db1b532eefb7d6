"""Feature directories: captured target states in sharded safetensors with a JSON index.

Layout: `index.json` and `features-00000.safetensors`, … A shard holds the samples' rows one
after the other along the token axis, under the names of contracts §5; the index says for each
sample in which shard its rows begin. Rows are read as slices, so one sample costs its own bytes,
and ids and masks are read without the states.

Shape suffixes: S tokens of a sample, R rows of a shard, L captured layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from torch_port.data.atomic import atomic_directory
from torch_port.data.conversations import DataError
from torch_port.data.index import INDEX_NAME, Entry, Index, entry, read_index

TOKEN_NAMES = ("input_ids", "loss_mask")
STATE_NAMES = ("hidden_states", "target_last_hidden_states", "target_log_normalizer")
_NAMES = TOKEN_NAMES + STATE_NAMES


@dataclass(frozen=True)
class FeatureSample:
    """One sample of contracts §5, on the host.

    `input_ids` int64 [S], `loss_mask` float32 [S], `hidden_states` [S, L·H],
    `target_last_hidden_states` [S, H] after the final norm, `target_log_normalizer` float32 [S]:
    logsumexp of the target's logits over all V, or None where the capture did not store it.
    """

    id: str
    input_ids: Tensor
    loss_mask: Tensor
    hidden_states: Tensor
    target_last_hidden_states: Tensor
    target_log_normalizer: Tensor | None = None


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
    entries: list[Entry] = []
    shards: list[str] = []
    pending: list[FeatureSample] = []
    rows, with_normalizer = 0, True
    try:
        with atomic_directory(Path(directory)) as temporary:

            def close_shard() -> None:
                name = shard_name(len(shards))
                save_file(shard_tensors(pending), temporary / name)
                shards.append(name)
                pending.clear()

            for sample in samples:
                check_sample(sample)
                stored = sample.target_log_normalizer is not None
                if entries and stored != with_normalizer:
                    raise DataError(
                        f"sample {sample.id}: expected target_log_normalizer in all samples or in "
                        "none. Capture the samples again."
                    )
                with_normalizer = stored
                entries.append(entry(sample.id, sample.loss_mask.numpy(), len(shards), rows))
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
            index = Index(
                format=1,
                shards=shards,
                metadata=dict(metadata or {}),
                samples=entries,
                normalizer=with_normalizer,
            )
            (temporary / INDEX_NAME).write_text(index.model_dump_json(), encoding="utf-8")
    except FileExistsError:
        raise DataError(
            f"{directory}: expected a path that does not exist, found a file or directory. "
            "Choose another path, or remove it."
        ) from None


def shard_name(number: int) -> str:
    """Return the file name of a feature shard."""
    return f"features-{number:05d}.safetensors"


def shard_tensors(samples: Sequence[FeatureSample]) -> dict[str, Tensor]:
    """Return a shard's tensors: the rows of its samples, one after the other."""
    names = [name for name in _NAMES if getattr(samples[0], name) is not None]
    return {name: torch.cat([getattr(sample, name) for sample in samples]) for name in names}


class FeatureDirectory:
    """Map-style reader: `len(features)`, `features[i]`, and lengths without opening a shard.

    Attributes:
        ids, lengths, supervised: per sample, its name, tokens and supervised tokens.
        trainable: per sample, whether it has an anchor candidate; None where the index, an older
            one, does not say.
        places: per sample, the shard that holds it and its first row there.
        metadata: what the writer kept with the index.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._index = read_index(self.path)
        self.metadata = self._index.metadata
        self.ids = [entry.id for entry in self._index.samples]
        self.lengths = [entry.length for entry in self._index.samples]
        self.supervised = [entry.supervised for entry in self._index.samples]
        self.trainable = [entry.trainable for entry in self._index.samples]
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
            `target_last_hidden_states` [S, H], and `target_log_normalizer` [S] where it is stored.

        Raises:
            IndexError: i is out of range.
            DataError: the shard is missing or damaged.
        """
        return self._read(i, _NAMES if self._index.normalizer else _NAMES[:-1])

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


def check_sample(sample: FeatureSample) -> None:
    """Refuse a sample whose tensors do not have one length, or no rows at all."""
    tensors = {name: getattr(sample, name) for name in _NAMES}
    lengths = {name: len(tensor) for name, tensor in tensors.items() if tensor is not None}
    if len(set(lengths.values())) != 1 or 0 in lengths.values():
        raise DataError(
            f"sample {sample.id}: expected tensors of one length above 0, found {lengths}. "
            "Capture the sample again."
        )
