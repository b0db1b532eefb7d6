"""Looking at feature files: shapes, dtypes, finite values, and what the index says of them.

Shape suffixes: S tokens of a sample, L captured layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from torch_port.data.atomic import atomic_file
from torch_port.data.conversations import DataError
from torch_port.data.features import STATE_NAMES, FeatureDirectory
from torch_port.data.field_files import Features, FieldDirectory, open_features
from torch_port.data.index import INDEX_NAME, Entry, Index, entry
from torch_port.progress import stage

_STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NORMALIZER = STATE_NAMES[2]


@dataclass(frozen=True)
class CheckResult:
    """What was looked at: samples checked of `total`, tokens, trainable ones, and the problems.

    `widths`: (L·H, H) that all samples share. `indexed`: an index says lengths.
    """

    total: int
    checked: int
    tokens: int
    trainable: int
    widths: tuple[int, int]
    state_dtype: str
    with_normalizer: bool
    indexed: bool
    problems: tuple[str, ...]


def check_features(
    path: Path, console: Console, *, sample: int | None = None, write_index: bool = False
) -> CheckResult:
    """Check every sample of a feature directory, or `sample` of them drawn at random.

    Looked at are names, shapes, dtypes, finite values, widths that all samples share, and length,
    supervised count and trainability against the index.

    Arguments: `path`; `sample`, how many; `write_index`, for a directory of the field's files:
    write what was found (needs all of them, without a problem).
    Returns the result; problems are in it, a line each.
    Raises DataError when the directory cannot be listed, is empty, or no index can be written.
    """
    features = open_features(path)
    if not len(features):
        raise DataError(f"{path}: expected at least one sample, found none.")
    if write_index and (sample is not None or not isinstance(features, FieldDirectory)):
        raise DataError(
            f"{path}: an index is written for a directory of .ckpt files, after all were checked. "
            "Leave out --sample, or --write-index."
        )
    rows = _rows(len(features), sample)
    seen = _Seen()
    if isinstance(features, FeatureDirectory):
        seen.problems += _overlaps(features)
    found: list[Entry] = []
    with stage("checking", len(rows), console) as progress:
        for done, i in enumerate(rows, start=1):
            one = _check_one(features, i, seen, against_index=not write_index)
            found += [one] if one is not None else []
            progress.update(done, f"{len(seen.problems)} problems")
    if write_index and not seen.problems:
        assert isinstance(features, FieldDirectory)
        _write_index(features, found, seen.with_normalizer is True)
    return CheckResult(
        total=len(features),
        checked=len(rows),
        tokens=sum(one.length for one in found),
        trainable=sum(one.trainable is True for one in found),
        widths=seen.widths or (0, 0),
        state_dtype=str(seen.dtype).removeprefix("torch."),
        with_normalizer=seen.with_normalizer is True,
        indexed=features.lengths is not None or write_index,
        problems=tuple(seen.problems),
    )


def _rows(count: int, sample: int | None) -> list[int]:
    if sample is None:
        return list(range(count))
    if sample < 1:
        raise DataError(f"--sample is {sample}. Give 1 or more, or leave it out for all.")
    drawn = np.random.default_rng(0).permutation(count)[:sample]
    return sorted(int(i) for i in drawn)


def _overlaps(features: FeatureDirectory) -> list[str]:
    """Samples that share rows, by the index."""
    spans = sorted(zip(features.places, features.lengths, features.ids, strict=True))
    return [
        f"sample {after[2]}: begins in its shard before {before[2]} ends; write the index again"
        for before, after in pairwise(spans)
        if before[0][0] == after[0][0] and before[0][1] + before[1] > after[0][1]
    ]


class _Seen:
    """What all samples must share, and the problems so far."""

    def __init__(self) -> None:
        self.widths: tuple[int, int] | None = None
        self.dtype: torch.dtype | None = None
        self.with_normalizer: bool | None = None
        self.problems: list[str] = []

    def compare(self, where: str, sample: Mapping[str, Tensor]) -> None:
        """Note what differs from the first sample's."""
        widths = tuple(sample[name].shape[1] for name in STATE_NAMES[:2])
        now = (widths, sample["hidden_states"].dtype, _NORMALIZER in sample)
        if self.widths is None:
            self.widths, self.dtype, self.with_normalizer = now  # type: ignore[assignment]
        if now != (self.widths, self.dtype, self.with_normalizer):
            self.problems.append(
                f"{where}: widths {list(widths)}, dtype and normaliser (as {now[1:]}) differ from "
                "the first sample's; capture all of them alike"
            )


def _check_one(features: Features, i: int, seen: _Seen, against_index: bool) -> Entry | None:
    where = f"sample {features.ids[i]}"
    try:
        sample = features[i]
    except DataError as error:
        seen.problems.append(str(error))
        return None
    wrong = sample_problems(sample)
    seen.problems += [f"{where}: {text}" for text in wrong]
    if wrong:
        return None
    seen.compare(where, sample)
    one = entry(features.ids[i], sample["loss_mask"].numpy())
    if against_index and features.lengths is not None:
        assert features.supervised is not None
        assert features.trainable is not None
        told = (features.lengths[i], features.supervised[i], features.trainable[i])
        # An index of before says nothing of training.
        is_ = (one.length, one.supervised, None if told[2] is None else one.trainable)
        if told != is_:
            seen.problems.append(
                f"{where}: the index says (length, supervised, trainable) {told}, the file {is_}; "
                "write the index again"
            )
    return one


def sample_problems(sample: Mapping[str, Tensor]) -> list[str]:
    """Return what is wrong with one sample's tensors, a text each."""
    problems = []
    S = len(sample["input_ids"])
    ranks = {"input_ids": 1, "loss_mask": 1, "hidden_states": 2, "target_last_hidden_states": 2}
    for name, tensor in sample.items():
        if tensor.dim() != ranks.get(name, 1) or len(tensor) != S or S == 0:
            problems.append(f"{name} has shape {list(tensor.shape)}, input_ids [{S}]")
    for name in STATE_NAMES[:2]:
        if sample[name].dtype not in _STATE_DTYPES:
            problems.append(f"{name} is {sample[name].dtype}, no floating type of states")
    if _NORMALIZER in sample and sample[_NORMALIZER].dtype != torch.float32:
        problems.append(f"{_NORMALIZER} is {sample[_NORMALIZER].dtype}, but must be float32")
    if problems:
        return problems
    H, width = sample["target_last_hidden_states"].shape[1], sample["hidden_states"].shape[1]
    if not H or width % H:
        problems.append(f"hidden_states are {width} wide, no multiple of {H}")
    for name, tensor in sample.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            problems.append(f"{name} has values that are not finite")
    if int(sample["input_ids"].min()) < 0:
        problems.append("input_ids has negative ids")
    return problems


def _write_index(features: FieldDirectory, found: list[Entry], with_normalizer: bool) -> None:
    index = Index(
        format=1,
        shards=features.files,
        metadata=features.metadata,
        samples=[one.model_copy(update={"shard": at}) for at, one in enumerate(found)],
        normalizer=with_normalizer,
    )
    with atomic_file(features.path / INDEX_NAME) as stream:
        stream.write(index.model_dump_json().encode())
