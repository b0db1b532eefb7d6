"""Batches of captured features for training: in an order that can be told, saved and restored.

What a rank's next batch is follows from (seed, epoch, place) alone, so nothing that is read ahead
is part of a position.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from torch_port.config import ANCHOR_FIRST, BlockLayout
from torch_port.data.batch import Batch, collate
from torch_port.data.conversations import DataError
from torch_port.data.field_files import Features, open_features
from torch_port.data.order import Split, epoch_order, steps_per_epoch
from torch_port.data.parallel import end_with_parent
from torch_port.errors import UserError

_PINNED = ("cuda", "npu")  # devices that copy from pinned memory without waiting


@dataclass(frozen=True)
class BatchSettings:
    """What a batch is made with: N anchors a sample, V, γ, and where a block's slots predict."""

    num_anchors: int
    vocab_size: int
    block_size: int
    block_layout: BlockLayout = ANCHOR_FIRST


class FeatureLoader:
    """Endless batches of one rank, epoch after epoch.

    Every rank takes the same number of steps: samples without an anchor candidate are left out by
    the index, on all ranks alike, and an epoch ends for all with the last step that all can fill.

    Attributes:
        steps_per_epoch: optimizer steps of an epoch; each has `split.accumulation` batches.
        samples: the rows of the features that are trained on; `untrainable` were left out.
        epoch, step, micro: where the next batch is: epoch, optimizer step in it, batch in that.
        tokens: those of the last batch that was handed out, padding left out.
    """

    def __init__(
        self,
        features: Features,
        split: Split,
        settings: BatchSettings,
        *,
        seed: int,
        samples: Sequence[int] | None = None,
        workers: int = 0,
        prefetch: int = 2,
        device: str = "cpu",
    ) -> None:
        """Prepare to read; no sample is read yet.

        Args:
            features: an opened directory with an index.
            split: batch size, accumulation, ranks.
            settings: anchors, V and blocks.
            seed: of the order and the anchors.
            samples: rows to train on (a split of the data); all by default.
            workers: processes that read ahead; 0 reads in this one.
            prefetch: batches that each process reads ahead.
            device: where batches go; its kind decides whether they are pinned.

        Raises:
            UserError: no index, an index without trainability, too few samples, bad numbers.
        """
        if workers < 0 or prefetch < 1:
            raise UserError(
                f"workers is {workers} and prefetch {prefetch}; give at least 0 and at least 1"
            )
        self.features, self.split, self.settings, self.seed = features, split, settings, seed
        self.workers, self.prefetch = workers, prefetch
        self._pin = device.split(":")[0] in _PINNED
        self.samples, self.untrainable = _trainable(features, samples)
        assert features.lengths is not None
        self._lengths = [features.lengths[i] for i in self.samples]
        self.steps_per_epoch = steps_per_epoch(len(self.samples), split)
        self.epoch = self.step = self.micro = self.tokens = 0

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches without end, from the position on."""
        ahead: deque[int] = deque()  # tokens of the batches that are read ahead
        plans = self._plans(self.epoch, self.step, self.micro, ahead)
        for batch in self._read(plans):
            # Before the batch is handed out: a state saved while it is used is the next one's.
            self._advance()
            self.tokens = ahead.popleft()
            yield batch

    def state(self) -> dict[str, Any]:
        """Return the position after the last batch that was handed out, as JSON values."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "micro": self.micro,
            **self._identity(),
            "accumulation": self.split.accumulation,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; iterate anew afterwards.

        Other numbers of ranks, accumulated batches and samples of a batch are fine, as long as an
        optimizer step takes as many samples in all.

        Raises UserError for a position of other samples, another seed or another step size.
        """
        remedies = {
            "seed": "set the seed that the run began with",
            "step_samples": "keep batch_size × accumulation × ranks",
            "samples": "give the features that the run began with, with their index",
        }
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise UserError(
                    f"the data's position was saved with {name} {state.get(name)}, but it is "
                    f"{value}; {remedies[name]}"
                )
        if state["micro"] and state["accumulation"] != self.split.accumulation:
            raise UserError(
                f"the data's position is inside of a step of accumulation {state['accumulation']}, "
                f"but accumulation is {self.split.accumulation}; keep it, or save between steps"
            )
        self.epoch, self.step, self.micro = state["epoch"], state["step"], state["micro"]

    def _identity(self) -> dict[str, Any]:
        """What a position depends on."""
        return {
            "seed": self.seed,
            "step_samples": self.split.step_samples,
            "samples": self._digest,
        }

    @cached_property
    def _digest(self) -> str:
        """The sha256 of the samples' rows, names and lengths."""
        names = [self.features.ids[i] for i in self.samples]
        return hashlib.sha256(json.dumps([self.samples, names, self._lengths]).encode()).hexdigest()

    def _advance(self) -> None:
        self.micro += 1
        if self.micro == self.split.accumulation:
            self.micro, self.step = 0, self.step + 1
        if self.step == self.steps_per_epoch:
            self.step, self.epoch = 0, self.epoch + 1

    def _plans(self, epoch: int, step: int, micro: int, ahead: deque[int]) -> Iterator[_Plan]:
        while True:
            order = epoch_order(self._lengths, self.split, self.seed, epoch)
            flat = order.reshape(-1, self.split.batch_size)
            for places in flat[step * self.split.accumulation + micro :]:
                ahead.append(sum(self._lengths[place] for place in places))
                yield _Plan(epoch, tuple(self.samples[place] for place in places))
            epoch, step, micro = epoch + 1, 0, 0

    def _read(self, plans: Iterator[_Plan]) -> Iterator[Batch]:
        reader = _Reader(self.features.path, self.settings, self.seed)
        ahead: dict[str, Any] = {}
        if self.workers:
            # Not forked from this process, whose threads may hold locks.
            context = get_context("forkserver")
            context.set_forkserver_preload(["torch_port.data.loader"])
            _start_server()
            ahead = {
                "multiprocessing_context": context,
                "prefetch_factor": self.prefetch,
                "worker_init_fn": _stand_alone,
            }
        loader = DataLoader(
            reader,
            sampler=_Endless(plans),
            batch_size=None,  # a plan is a whole batch
            num_workers=self.workers,
            pin_memory=self._pin,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # else a draw from the global one, which training uses
            **ahead,
        )
        try:
            for batch in loader:
                if isinstance(batch, str):
                    raise DataError(batch)
                yield batch
        except (RuntimeError, ConnectionError, EOFError, FileNotFoundError) as error:
            # The latter three: it ended while it handed over a tensor, through a socket of its own.
            if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
                raise
            why = (str(error) or type(error).__name__).splitlines()[0]
            raise UserError(
                f"a process that reads features ended ({why}); lower the "
                "loader's workers or prefetch, or give more memory or /dev/shm"
            ) from None


def _start_server() -> None:
    """Start the process that readers are forked from, deaf to SIGTERM.

    torchrun signals a rank's whole process group, and a terminal its own: a run that is to save and
    stop would lose its readers, and end with that error instead. The server ends with this process.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # signals are the main thread's
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # what is ignored stays so in a child
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _stand_alone(_: int) -> None:
    """Take a reader out of the group that is signalled, and let it end with the training process.

    torch's own watch looks at the server, which stays as long as a reader does.
    """
    os.setpgrp()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()


@dataclass(frozen=True)
class _Plan:
    """One batch: its epoch, which the anchors hang on, and the features' rows."""

    epoch: int
    rows: tuple[int, ...]


class _Endless:
    """A sampler of plans."""

    def __init__(self, plans: Iterator[_Plan]) -> None:
        self._plans = plans

    def __iter__(self) -> Iterator[_Plan]:
        return self._plans


class _Reader(Dataset[Any]):
    """Makes batches; opens the features anew in every process."""

    def __init__(self, path: Path, settings: BatchSettings, seed: int) -> None:
        self._path, self._settings, self._seed = path, settings, seed
        self._features: Features | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_features": None}

    def __getitem__(self, plan: _Plan) -> Batch | str:
        """Return the batch, or the text of a user's error: a process cannot raise in one line."""
        try:
            if self._features is None:
                self._features = open_features(self._path)
            return collate(
                [self._features[i] for i in plan.rows],
                plan.rows,
                num_anchors=self._settings.num_anchors,
                seed=self._seed,
                epoch=plan.epoch,
                vocab_size=self._settings.vocab_size,
                block_size=self._settings.block_size,
                block_layout=self._settings.block_layout,
            )
        except UserError as error:
            return str(error)


def _as_it_is(batch: Any) -> Any:
    return batch


def _trainable(features: Features, samples: Sequence[int] | None) -> tuple[list[int], int]:
    """The rows to train on, and how many of those asked for cannot be."""
    remedy = f"run torch-port features check {features.path} --write-index"
    if features.lengths is None or features.trainable is None:
        raise UserError(f"{features.path}: no index says how long its samples are; {remedy}")
    rows = list(range(len(features))) if samples is None else [int(i) for i in samples]
    if len(set(rows)) < len(rows) or not all(0 <= i < len(features) for i in rows):
        raise UserError(
            f"{features.path}: samples must be distinct rows from 0 to {len(features) - 1}"
        )
    if any(features.trainable[i] is None for i in rows):
        raise UserError(
            f"{features.path}: its index is of an earlier version and does not say which samples "
            "can be trained on; write it again: torch-port features convert, or capture"
        )
    kept = [i for i in rows if features.trainable[i]]
    return kept, len(rows) - len(kept)
