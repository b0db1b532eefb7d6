"""What a run trains and validates on: features that are checked against the run, then batches.

Nothing here opens a shard: lengths, trainability and what the features were captured from are in
their index (contracts §5).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torch_port.config import ANCHOR_FIRST
from torch_port.data.batch import Batch, collate
from torch_port.data.field_files import Features, open_features
from torch_port.data.loader import BatchSettings, FeatureLoader
from torch_port.data.order import Split
from torch_port.errors import UserError
from torch_port.run_sections import DataSection

_VALIDATION_EPOCH = 0  # its anchors are drawn once, so that all validations compare
_VALIDATION_DRAW = 0x76616C  # tells the draw of the validation split from an epoch's order


@dataclass(frozen=True)
class TrainingInputs:
    """A run's samples: `loader` gives this rank's training batches.

    `validation` and `validation_rows`: features and rows to validate on, None and () without.
    `longest`: the longest sample's tokens, of both.
    """

    loader: FeatureLoader
    validation: Features | None
    validation_rows: tuple[int, ...]
    longest: int
    settings: BatchSettings
    seed: int


def open_inputs(
    data: DataSection, config: Any, fingerprint: str, rank: int, world_size: int, device: str
) -> TrainingInputs:
    """Open a run's features for one rank.

    Arguments: the run's data section; the draft's config; the target's fingerprint (contracts §3);
    this rank and how many there are; the kind of device that batches go to.
    Raises UserError for features that no index describes, that are of another target or other
    layers, or longer than data.max_length, and for too few samples.
    """
    if data.producer != "files":
        raise UserError(
            f"data.producer is {data.producer!r}, but torch-port train reads features that are "
            "there already; capture them first (torch-port capture) and set it to 'files'"
        )
    features = open_features(Path(data.path))
    _check_origin(features, data.path, config, fingerprint)
    split = Split(data.batch_size, data.accumulation, world_size, rank)
    settings = _batch_settings(data, config)
    training, held = _validation_split(features, data)
    loader = FeatureLoader(
        features,
        split,
        settings,
        seed=data.seed,
        samples=training,
        workers=data.workers,
        prefetch=data.prefetch,
        device=device,
    )
    validation: Features | None = features if held else None
    if data.validation_path is not None:
        validation = open_features(Path(data.validation_path))
        _check_origin(validation, data.validation_path, config, fingerprint)
        held = list(range(len(validation)))
    rows = () if validation is None else _trainable_rows(validation, held)
    if validation is not None and not rows:
        raise UserError(
            "no sample that is kept for validation has an anchor candidate; raise "
            "data.validation_share, or name other features in data.validation_path"
        )
    longest = _check_lengths(features, loader.samples, data)
    if validation is not None:
        longest = max(longest, _check_lengths(validation, rows, data))
    return TrainingInputs(loader, validation, rows, longest, settings, data.seed)


def validation_batches(inputs: TrainingInputs, rank: int, world_size: int) -> Iterator[Batch]:
    """Yield this rank's validation batches, one sample each, equally many on every rank.

    A rank that has one sample less than others gets a copy of its last one, or of the first, in
    which nothing is supervised: it takes part in every forward pass and adds nothing.
    """
    rows, features = inputs.validation_rows, inputs.validation
    assert features is not None
    for start in range(0, len(rows), world_size):
        place = start + rank
        row = rows[place] if place < len(rows) else rows[0]
        batch = collate(
            [features[row]],
            [row],
            num_anchors=inputs.settings.num_anchors,
            seed=inputs.seed,
            epoch=_VALIDATION_EPOCH,
            vocab_size=inputs.settings.vocab_size,
            block_size=inputs.settings.block_size,
            block_layout=inputs.settings.block_layout,
        )
        yield batch if place < len(rows) else _blank(batch, inputs.settings)


def _blank(batch: Batch, settings: BatchSettings) -> Batch:
    nothing = replace(
        batch,
        loss_mask=torch.zeros_like(batch.loss_mask),
        block_keep_mask=torch.zeros_like(batch.block_keep_mask),
    )
    return nothing.laid_out(settings.block_size, settings.block_layout)


def _batch_settings(data: DataSection, config: Any) -> BatchSettings:
    """A draft without blocks (EAGLE3) reads no anchors: one is drawn, of a block of one slot."""
    block_size = getattr(config, "block_size", None)
    if block_size is None:
        return BatchSettings(1, config.vocab_size, 1, ANCHOR_FIRST)
    return BatchSettings(data.num_anchors, config.vocab_size, block_size, config.block_layout)


def _check_origin(features: Features, path: str, config: Any, fingerprint: str) -> None:
    """Refuse features that were captured from other layers or another target, where they say so."""
    told: dict[str, Any] = features.metadata
    layers = told.get("target_layer_ids")
    if layers is not None and list(layers) != list(config.target_layer_ids):
        raise UserError(
            f"{path}: captured are the target's layers {layers}, but the draft config's "
            f"target_layer_ids are {list(config.target_layer_ids)}; capture those layers, or name "
            "the draft that these are for"
        )
    captured = told.get("target_fingerprint")
    if captured is not None and captured != fingerprint:
        raise UserError(
            f"{path}: captured from a target whose embedding, head or config are others than those "
            "of target.path; name that target, or capture again"
        )


def _validation_split(features: Features, data: DataSection) -> tuple[list[int] | None, list[int]]:
    """Return the rows to train on (None: all) and those to validate on, drawn by the seed."""
    if data.validation_share == 0:
        return None, []
    order = np.random.default_rng([data.seed, _VALIDATION_DRAW]).permutation(len(features))
    count = max(1, round(len(features) * data.validation_share))
    return sorted(order[count:].tolist()), sorted(order[:count].tolist())


def _trainable_rows(features: Features, rows: Sequence[int]) -> tuple[int, ...]:
    if features.trainable is None:
        raise UserError(
            f"{features.path}: no index says which samples can be validated on; run torch-port "
            f"features check {features.path} --write-index"
        )
    return tuple(row for row in rows if features.trainable[row])


def _check_lengths(features: Features, rows: Sequence[int], data: DataSection) -> int:
    """Return the longest sample's tokens. Raises UserError when data.max_length is less."""
    assert features.lengths is not None
    lengths = [features.lengths[row] for row in rows]
    longest = max(lengths)
    if data.max_length is not None and longest > data.max_length:
        over = sum(length > data.max_length for length in lengths)
        raise UserError(
            f"data.max_length is {data.max_length}, but {over} of {len(lengths)} samples of "
            f"{features.path} are longer (the longest: {longest}); raise data.max_length, or "
            f"prepare with --max-length {data.max_length}"
        )
    return longest
