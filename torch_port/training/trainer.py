"""A training run from its run file to its last checkpoint, on one rank."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torch_port.data.batch import Batch
from torch_port.errors import NonFiniteError, UserError
from torch_port.planning import plan, read_facts, summary
from torch_port.run import LoadedRun
from torch_port.training.agreement import in_agreement
from torch_port.training.build import DTYPES, load_target, make_draft, read_draft
from torch_port.training.checkpoint_files import step_directory
from torch_port.training.checkpoints import CheckpointManager
from torch_port.training.distribution import Ranks, distribute, joined, step_collectives
from torch_port.training.inputs import open_inputs
from torch_port.training.metrics import MetricWindow
from torch_port.training.optimizer import MasterAdamW
from torch_port.training.output import TrainingLog
from torch_port.training.run_lock import only_run
from torch_port.training.signals import stop_signals
from torch_port.training.state import RunFacts
from torch_port.training.step import training_step
from torch_port.training.summary import summarise
from torch_port.training.validation import validate
from torch_port.training.watch import Watch
from torch_port.vocabulary.broadcast import broadcast_vocab_mapping

BEST = ("tau_probabilistic", "accept", "acc")  # what keep_best goes by: the first that is there


def run_training(loaded: LoadedRun, console: Console) -> None:
    """Train by a run file until its last step, or until a signal asks to stop; both save.

    A run whose directory holds checkpoints goes on from the newest complete one.
    Raises UserError for whatever forbids the run or ends it.
    """
    run = loaded.config
    verdicts = plan(read_facts(run))
    if any(verdict.status == "reject" for verdict in verdicts):
        texts = [f"{v.rule}: {v.text}" for v in verdicts if v.status == "reject"]
        raise UserError(f"{summary(verdicts)}. {'. '.join(texts)}")
    with (
        joined(run.distribution, run.training.device) as ranks,
        only_run(Path(run.training.out), ranks.rank, ranks.checkpoint_group),
        stop_signals() as stop,
    ):
        Trainer(loaded, ranks, console).train(stop)


class Trainer:
    """One run on one rank, built and ready to go on where its directory says."""

    def __init__(self, loaded: LoadedRun, ranks: Ranks, console: Console) -> None:
        run = loaded.config
        self.run, self.ranks, self.console = run, ranks, console
        self.out = Path(run.training.out)
        torch.manual_seed(run.training.seed + ranks.rank)
        with in_agreement(ranks.checkpoint_group):
            config = read_draft(run)
            self.target = load_target(run, config, ranks.device)
            self.inputs = open_inputs(
                run.data,
                config,
                self.target.fingerprint,
                ranks.rank,
                ranks.world_size,
                ranks.device.type,
            )
            draft = make_draft(run, config, self.target.tensors, ranks.device)
        broadcast_vocab_mapping(draft)
        self.draft: Any = distribute(draft, ranks)
        self.optimizer = MasterAdamW(
            self.draft.named_parameters(),
            run.optimizer,
            offload=run.distribution.offload_optimizer,
            guard_mode=run.training.spike_guard,
            lean=run.compute.adamw == "torch",
        )
        self.checkpoints = CheckpointManager(self.out / "checkpoints", run.checkpoints, ranks)
        self._told: int | None = None  # the checkpoint that was last said to be complete
        self.step = self._resume()

    def _facts(self) -> RunFacts:
        """What a checkpoint records of the run besides draft and optimizer, as it stands now."""
        return RunFacts(
            algorithm=self.run.algorithm,
            objective=self.run.objective,
            target=self.target.tensors,
            target_config=self.target.config,
            num_anchors=self.inputs.settings.num_anchors,
            data=self.inputs.loader.state(),
            fingerprint=self.target.fingerprint,
        )

    def _resume(self) -> int:
        """Go on from the newest complete checkpoint; return the steps that were taken."""
        newest = self.checkpoints.newest()
        if newest is None:
            return 0
        step, record = self.checkpoints.load(newest, self.draft, self.optimizer, self._facts())
        if record["num_anchors"] != self.inputs.settings.num_anchors:
            raise UserError(
                f"data.num_anchors is {self.inputs.settings.num_anchors}, but the checkpoint "
                f"{newest} was trained with {record['num_anchors']}; set it back, or start a new "
                "run from it (training.init_from)"
            )
        if record["data"] is None:
            raise UserError(
                f"{newest}: records no position in the data (it was converted?); start a new run "
                "from it (training.init_from)"
            )
        self.inputs.loader.restore(record["data"])
        return step

    def train(self, stop: Any) -> None:
        """Take the steps that are left, with logs, validations and checkpoints on their way."""
        run, total = self.run, self.run.optimizer.total_steps
        if self.step >= total:
            if self.ranks.rank == 0:
                self.console.print(
                    f"{self.out}: all {total} steps were taken already; raise "
                    "optimizer.total_steps in a new run that starts from it (training.init_from)",
                    highlight=False,
                )
            return
        loader = self.inputs.loader
        with TrainingLog(run, self.out, self.console, self.ranks) as log, self.checkpoints:
            about = summarise(
                run,
                self.draft,
                self.target.tensors,
                loader,
                mode=self.ranks.mode,
                device=self.ranks.device,
                collectives=step_collectives(self.draft, self.ranks, run.data.accumulation),
            )
            log.begin(about, total, loader.steps_per_epoch, self.step)
            batches = iter(loader)
            try:
                self._take_steps(batches, log, stop)
            finally:
                batches.close()  # type: ignore[attr-defined]
            self.checkpoints.wait()
            self._tell(log)

    def _take_steps(self, batches: Iterator[Batch], log: TrainingLog, stop: Any) -> None:
        """Train until the last step, or until the ranks agree to stop; the last save is begun."""
        training, total = self.run.training, self.run.optimizer.total_steps
        watch = Watch(self.out, training.stop_after_bad_steps, self.ranks, log.warn)
        window = MetricWindow()
        while self.step < total and not stop.requested(self.ranks):
            self._take_step(batches, window, log, watch)
            last = self.step == total
            if self.step % training.log_every == 0 or last:
                values = window.reduce(self.ranks)
                log.record(self.step, values)
                watch.metrics(self.step, values)
            self._after_step(log, watch, last)
            self._tell(log)
        if self.step < total:
            self._save(log, None)
            log.stopped(self.step)

    def _take_step(
        self, batches: Iterator[Batch], window: MetricWindow, log: TrainingLog, watch: Watch
    ) -> None:
        """Read a step's micro-batches and train on them."""
        began = time.perf_counter()
        micro, tokens = [], 0
        for _ in range(self.run.data.accumulation):
            micro.append(self._on_device(next(batches)))
            tokens += self.inputs.loader.tokens
        self.step += 1
        try:
            report = training_step(
                self.draft,
                self.optimizer,
                micro,
                self.target.tensors,
                self.run.objective,
                self.step,
            )
        except NonFiniteError as error:
            watch.bad_step(self.step, micro, error)
            return
        watch.good_step()
        seconds = time.perf_counter() - began
        window.add(report, tokens, seconds)
        log.step(report, tokens, seconds)

    def _on_device(self, batch: Batch) -> Batch:
        return batch.to(self.ranks.device, DTYPES[self.run.training.dtype])

    def _after_step(self, log: TrainingLog, watch: Watch, last: bool) -> None:
        """Validate and save, where they are due."""
        run = self.run
        save = self.step % run.checkpoints.every == 0 or last
        every = run.training.validate_every
        due = save if every == 0 else self.step % every == 0 or last
        metric = None
        if due and self.inputs.validation is not None:
            values = validate(
                self.draft,
                self.inputs,
                self.target.tensors,
                run.objective,
                self.ranks,
                self._on_device,
            )
            log.validation(self.step, values)
            watch.metrics(self.step, values)
            metric = next((values[name] for name in BEST if name in values), None)
        if save:
            self._save(log, metric)

    def _save(self, log: TrainingLog, metric: Any) -> None:
        self.checkpoints.save(self.step, self.draft, self.optimizer, self._facts(), metric)
        self._tell(log)

    def _tell(self, log: TrainingLog) -> None:
        """Say that a checkpoint is complete; one is written while steps go on."""
        done = self.checkpoints.completed
        if done is not None and done != self._told:
            self._told = done
            log.checkpoint(done, step_directory(self.checkpoints.directory, done))
