"""Checkpoints of a run on any number of ranks: saved beside the training, kept, found, loaded."""

from __future__ import annotations

import errno
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from torch_port.data.atomic import publish_directory, temporary_name
from torch_port.errors import UserError
from torch_port.formats.checkpoint import MAP, Checkpoint
from torch_port.formats.port import memory_checkpoint, read_port, write_record
from torch_port.formats.weights import DTYPES
from torch_port.run_sections import CheckpointsSection
from torch_port.training.agreement import in_agreement
from torch_port.training.checkpoint_files import (
    newest_complete,
    remove,
    remove_temporaries,
    saved_steps,
    step_directory,
    superfluous,
    write_save_file,
)
from torch_port.training.checkpoint_shards import HostCopies, read_shards, share, write_shards
from torch_port.training.optimizer import MasterAdamW
from torch_port.training.random_state import random_states, restore_random_states
from torch_port.training.shards import is_sharded
from torch_port.training.state import (
    RunFacts,
    check_continues,
    draft_weights,
    restore_guard,
    training_record,
    training_tensors,
)

if TYPE_CHECKING:
    from torch_port.training.distribution import Ranks

T = TypeVar("T")

_REMEDIES = {
    errno.ENOSPC: "the disk is full: free space there, or lower checkpoints.keep_last or keep_best",
    errno.EDQUOT: "the quota is used up: free space, or lower checkpoints.keep_last or keep_best",
    errno.EROFS: "it is read-only: make it writable, or set training.out to another place",
    errno.EACCES: "this user may not write: give the right, or set training.out to another place",
    errno.EPERM: "this user may not write: give the right, or set training.out to another place",
    errno.EFBIG: "a file would be larger than allowed here (ulimit -f): raise the limit",
}


@dataclass(frozen=True)
class _Captured:
    """One step's state as it is written: nothing in it changes any more."""

    step: int
    metric: float | None
    tensors: dict[str, Tensor]  # this rank's, on the host
    rng: dict[str, str]
    described: Checkpoint | None  # on rank 0


class CheckpointManager:
    """The checkpoints of one run, in `directory/step-00000500`; all ranks call each method.

    A checkpoint is complete or not there: ranks write into a temporary directory, rank 0 writes
    run.json when all have finished, and gives it its name. Who is killed meanwhile leaves a
    temporary directory, which the next save removes. Asynchronous saves are written by a thread
    from copies on the host, one at most at a time; the ranks' threads talk over a gloo group of
    their own, as two threads in one group take each other's messages. A save that failed is told by
    the next `save` or `wait`, on all ranks, and touches nothing that was saved before.

    As a context manager it waits at the end, whatever ends the block but an interrupt.
    """

    def __init__(self, directory: Path, section: CheckpointsSection, ranks: Ranks) -> None:
        """Arguments: where checkpoints lie; how they are kept; the ranks, with a gloo group."""
        self.directory, self.section, self.ranks = directory, section, ranks
        self._group = ranks.checkpoint_group
        self._writers = None if self._group is None else dist.new_group(backend="gloo")
        self._copies = HostCopies()
        self._thread: Thread | None = None
        self._failed: UserError | None = None
        self._at: int | None = None  # the step that was last saved or loaded
        self.completed: int | None = None  # the step whose checkpoint was last written, whole
        # Each rank reads for itself, and one process writes without a group. (A filter: to catch
        # warnings is no matter of a thread.)
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninit")

    def save(
        self,
        step: int,
        draft: Any,
        optimizer: MasterAdamW,
        facts: RunFacts,
        metric: float | None = None,
    ) -> None:
        """Save the state after `step` steps; asynchronously, when the section says so.

        Arguments: `facts`, whose `rng` is not used (each rank's states are read here) and whose
        `fingerprint` spares a computation; `metric`, by which keep-best goes, higher is better.
        A step that is on disk already, saved or loaded by this manager, is not written again.
        Raises UserError: an earlier save failed; no vocabulary map is installed; an optimizer
        layout that cannot be resharded; and, synchronously, whatever writing meets.
        """
        self.wait()
        if step == self._at:
            return
        with in_agreement(self._group):
            captured = self._capture(step, draft, optimizer, facts, metric)
        self._at = step
        if self.section.asynchronous:
            self._thread = Thread(target=self._write_aside, args=(captured,), daemon=True)
            self._thread.start()
        else:
            self._write_aside(captured)
            self.wait()

    def wait(self) -> None:
        """Wait for the save that is under way. Raises UserError when it failed, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        failed, self._failed = self._failed, None
        if failed is not None:
            if self.completed != self._at:  # else an older one could not be removed
                self._at = None
            raise failed

    def newest(self) -> Path | None:
        """Return the newest complete checkpoint's directory, None when there is none.

        Raises UserError when the newest one is damaged, naming what is damaged and the newest one
        that is not.
        """
        self.wait()
        return self._on_rank_0(lambda: newest_complete(self.directory), self._group)

    def load(
        self, directory: Path, draft: Any, optimizer: MasterAdamW, facts: RunFacts
    ) -> tuple[int, dict[str, Any]]:
        """Continue a checkpoint of any number of ranks: fill this rank's draft and optimizer.

        Bit for bit as they were saved. With as many ranks as it was saved by, each rank's random
        generators go on, too; else they are left alone.
        Returns (the steps that were taken, run.json's `training` entry).
        Raises UserError on all ranks, as `check_continues` does, for another vocabulary map, and
        for an optimizer state of another layout; nothing is changed then. A file that cannot be
        read raises it later, and leaves draft and optimizer half filled.
        """
        self.wait()
        with in_agreement(self._group):
            checkpoint = read_port(directory)
            saved = check_continues(directory, checkpoint, draft, optimizer, facts)
            check_layout(optimizer)
            tensors = _to_fill(directory, checkpoint, draft, optimizer, saved["updates"])
        with in_agreement(self._group), torch.no_grad():
            read_shards(directory, tensors)
            draft.vocabulary_changed()
            optimizer.restore(tensors, saved["updates"])
            restore_guard(optimizer, saved)
            rng = saved["rng"] or {}
            if len(rng) == self.ranks.world_size and str(self.ranks.rank) in rng:
                restore_random_states(rng[str(self.ranks.rank)], self.ranks.device)
        if directory.resolve() == step_directory(self.directory, saved["step"]).resolve():
            self._at = saved["step"]
        return saved["step"], saved

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self.wait()
        elif issubclass(kind, Exception):
            try:
                self.wait()
            except UserError as failed:
                assert error is not None
                error.add_note(str(failed))  # what ended the run counts more

    def _capture(
        self, step: int, draft: Any, optimizer: MasterAdamW, facts: RunFacts, metric: float | None
    ) -> _Captured:
        check_layout(optimizer)
        tensors = training_tensors(draft, optimizer)
        described = None
        if self.ranks.rank == 0:
            shapes = {
                name: t if name in MAP else torch.empty(t.shape, dtype=t.dtype, device="meta")
                for name, t in tensors.items()
            }
            described = memory_checkpoint(
                facts.algorithm,
                draft.config,
                shapes,
                training=training_record(draft, optimizer, step, facts),
            )
        mine = share(tensors, self.ranks.rank, self.ranks.world_size)
        if self.section.asynchronous:
            mine = self._copies.take(mine)  # the next step changes what they are copies of
        return _Captured(step, metric, mine, random_states(self.ranks.device), described)

    def _write_aside(self, captured: _Captured) -> None:
        """Write a checkpoint and remember what went wrong."""
        try:
            self._write(captured)
        except (Exception, CheckpointException) as error:  # noqa: BLE001 (told by `wait`)
            self._failed = self._explained(captured.step, error)

    def _write(self, captured: _Captured) -> None:
        step, group = captured.step, self._writers
        rng = _gathered(captured.rng, group)
        place = self._on_rank_0(lambda: self._begin(step), group, step)
        try:
            with in_agreement(group):
                if not place.is_dir():
                    raise UserError(
                        f"{self.directory}: rank {self.ranks.rank} does not see what rank 0 wrote "
                        "there; checkpoints must lie on storage that all hosts share"
                    )
            write_shards(place, captured.tensors, group)
            self._on_rank_0(lambda: self._complete(place, captured, rng), group, step)
            self.completed = step
        except (Exception, CheckpointException):
            if self.ranks.rank == 0:
                shutil.rmtree(place, ignore_errors=True)
            raise
        self._on_rank_0(lambda: self._prune(step), group, step)

    def _begin(self, step: int) -> Path:
        self.directory.mkdir(parents=True, exist_ok=True)
        remove_temporaries(self.directory)
        final = step_directory(self.directory, step)
        if final.exists():
            raise UserError(
                f"{final} is there already, and not of this run; resume from the newest checkpoint "
                "there, or set training.out to another place"
            )
        place = temporary_name(final)
        place.mkdir()
        return place

    def _complete(self, place: Path, captured: _Captured, rng: dict[str, Any]) -> None:
        described = captured.described
        assert described is not None
        assert described.training is not None
        write_save_file(place, captured.metric, self.ranks.world_size, self.ranks.mode)
        write_record(place, replace(described, training=described.training | {"rng": rng}))
        publish_directory(place, step_directory(self.directory, captured.step))

    def _prune(self, step: int) -> None:
        found = saved_steps(self.directory)
        remove(superfluous(found, self.section.keep_last, self.section.keep_best, step))

    def _on_rank_0(
        self, work: Callable[[], T], group: dist.ProcessGroup | None, step: int | None = None
    ) -> T:
        """Return on all ranks what rank 0 found, or raise its error on all of them."""
        told: list[Any] = [None, None]
        if self.ranks.rank == 0:
            try:
                told[0] = work()
            except Exception as error:  # noqa: BLE001 (the other ranks wait for an answer)
                told[1] = str(self._explained(step, error))
        if group is not None:
            dist.broadcast_object_list(told, group_src=0, group=group)
        if told[1] is not None:
            raise UserError(told[1])
        result: T = told[0]
        return result

    def _explained(self, step: int | None, error: BaseException) -> UserError:
        """Return the UserError that says what went wrong, the same on every rank."""
        if isinstance(error, UserError):
            return error
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            failures = [failure[0] for _, failure in sorted(error.failures.items())]
            cause = next((f for f in failures if isinstance(f, OSError | UserError)), failures[0])
        why = (str(cause) or type(cause).__name__).splitlines()[0]
        if isinstance(cause, OSError) and cause.errno is not None:
            why = _REMEDIES.get(cause.errno, f"{cause.strerror}: look at the storage")
        what = (
            "cannot be read" if step is None else f"the checkpoint of step {step} was not written"
        )
        explained = UserError(
            f"{self.directory}: {what}; {why}. What was saved before is untouched"
        )
        explained.__cause__ = error
        return explained


def _gathered(rng: dict[str, str], group: dist.ProcessGroup | None) -> dict[str, Any]:
    states = [rng]
    if group is not None:
        states = [{}] * dist.get_world_size(group)
        dist.all_gather_object(states, rng, group=group)
    return {str(rank): state for rank, state in enumerate(states)}


def check_layout(optimizer: MasterAdamW) -> None:
    """Refuse masters that are not spread over ranks as their parameters are.

    A checkpoint holds a tensor of the parameter's shape for each; it could not say what a flattened
    or padded part is part of. Raises UserError.
    """
    for name, parameter, master in zip(
        optimizer.names, optimizer.parameters, optimizer.masters, strict=True
    ):
        alike = parameter.shape == master.shape and is_sharded(parameter) == is_sharded(master)
        placements = {type(p).__name__ for p in getattr(parameter, "placements", ())}
        if not alike or not placements <= {"Shard", "Replicate"}:
            raise UserError(
                f"{name}: optimizer state of shape {list(master.shape)} for a parameter of "
                f"{list(parameter.shape)} ({', '.join(sorted(placements)) or 'not sharded'}); only "
                "state that is laid out like its parameter, whole or in parts of one axis, can be "
                "brought to another number of ranks"
            )


def _to_fill(
    directory: Path, checkpoint: Checkpoint, draft: Any, optimizer: MasterAdamW, updates: int
) -> dict[str, Tensor]:
    """Return this rank's tensors that a checkpoint fills, by name; moments are new ones.

    Raises UserError for another vocabulary map, and what is missing or of another dtype or shape.
    """
    weights, state = draft_weights(checkpoint, draft), draft.state_dict()
    if "t2d" in weights:
        draft.check_new_map(weights["t2d"].load(), weights["d2t"].load())
    tensors = {name: t.detach() for name, t in state.items() if isinstance(t, Tensor)}
    for name, parameter, master in zip(
        optimizer.names, optimizer.parameters, optimizer.masters, strict=True
    ):
        if parameter.dtype != master.dtype:
            tensors[f"optimizer.masters.{name}"] = master.detach()
        for part in ("exp_avg", "exp_avg_sq") if updates else ():
            tensors[f"optimizer.{part}.{name}"] = torch.empty_like(master.detach())
    refs = weights | checkpoint.optimizer
    for name, tensor in tensors.items():
        ref = refs.get(name)
        if ref is None or (DTYPES[ref.dtype], ref.shape) != (tensor.dtype, tuple(tensor.shape)):
            found = "nothing" if ref is None else f"{DTYPES[ref.dtype]} {list(ref.shape)}"
            raise UserError(
                f"{directory}: {name}: expected {tensor.dtype} {list(tensor.shape)}, found "
                f"{found}; the checkpoint is of another draft or precision"
            )
    return tensors
