"""A run's training state as tensors and a record, to a `port` checkpoint and back (contracts §3).

The record holds all that is no tensor. `save_training` and `load_training` are of one process,
whose tensors are whole; `checkpoints` does the same for any number of ranks.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from torch_port.config import Settings
from torch_port.data.atomic import atomic_directory
from torch_port.errors import UserError
from torch_port.formats.checkpoint import EMBEDDING, HEAD, Checkpoint
from torch_port.formats.port import memory_checkpoint, read_port, write_record
from torch_port.formats.weights import DTYPES, Weights
from torch_port.models.block_draft import FrozenTarget
from torch_port.models.registry import find_algorithm
from torch_port.training.optimizer import MasterAdamW
from torch_port.training.resume import check_resume, record, run_values, target_fingerprint


@dataclass(frozen=True)
class RunFacts:
    """What a run's numbers depend on besides its draft and optimizer.

    `target_config`: the target's parsed config.json. `num_anchors`: N of the run's draws, or None.
    `rng` and `data`: random states by rank, and the loader's position, as JSON values.
    `fingerprint`: the target's, where it is known: it takes seconds of a large one.
    """

    algorithm: str
    objective: Settings
    target: FrozenTarget
    target_config: Mapping[str, Any]
    num_anchors: int | None = None
    rng: dict[str, Any] | None = None
    data: dict[str, Any] | None = None
    fingerprint: str | None = None

    def with_fingerprint(self) -> RunFacts:
        """Return these facts with the target's fingerprint computed, where it is not known."""
        if self.fingerprint is not None:
            return self
        target = self.target
        digest = target_fingerprint(target.embed_tokens, target.lm_head, self.target_config)
        return replace(self, fingerprint=digest)


def training_record(
    draft: Any, optimizer: MasterAdamW, step: int, facts: RunFacts
) -> dict[str, Any]:
    """Return run.json's `training` entry after `step` steps."""
    fingerprint = facts.with_fingerprint().fingerprint
    assert fingerprint is not None
    values = run_values(
        find_algorithm(facts.algorithm),
        draft.config,
        facts.objective,
        fingerprint,
        "lm_head.weight" in optimizer.names and facts.algorithm != "eagle3",
    )
    guard = optimizer.guard
    content = {
        "step": step,
        "updates": optimizer.updates,
        "guard": {"log_sum": guard.log_sum, "seen": guard.seen},
        "objective": facts.objective.model_dump(mode="json"),
        "optimizer": optimizer.config.model_dump(mode="json"),
        "num_anchors": facts.num_anchors,
        "target": {"fingerprint": fingerprint, "config": dict(facts.target_config)},
        "resume": record(values),
        "rng": facts.rng,
        "data": facts.data,
    }
    result: dict[str, Any] = json.loads(json.dumps(content))
    return result


def training_tensors(draft: nn.Module, optimizer: MasterAdamW) -> dict[str, Tensor]:
    """Return weights, vocabulary buffers, masters and moments by their names in a checkpoint."""
    tensors = {n: t for n, t in draft.state_dict().items() if isinstance(t, Tensor)}
    for name, parameter, master in zip(
        optimizer.names, optimizer.parameters, optimizer.masters, strict=True
    ):
        if parameter.dtype != master.dtype:  # else the parameter says it all, offloaded or not
            tensors[f"optimizer.masters.{name}"] = master
    for name, (first, second) in optimizer.moments().items():
        tensors[f"optimizer.exp_avg.{name}"] = first
        tensors[f"optimizer.exp_avg_sq.{name}"] = second
    return {name: tensor.detach() for name, tensor in tensors.items()}


def save_training(
    directory: Path, draft: nn.Module, optimizer: MasterAdamW, step: int, facts: RunFacts
) -> None:
    """Write a checkpoint; it appears complete or not at all.

    Raises UserError before a vocabulary map is installed; FileExistsError when the directory is
    there.
    """
    tensors = {name: tensor.cpu() for name, tensor in training_tensors(draft, optimizer).items()}
    described = memory_checkpoint(
        facts.algorithm,
        draft.config,
        tensors,
        training=training_record(draft, optimizer, step, facts),
    )
    with atomic_directory(directory) as place:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # "assuming a single process": it is one
            dcp.save(tensors, storage_writer=HuggingFaceStorageWriter(str(place)), no_dist=True)
        write_record(place, described)


def load_training(
    directory: Path, draft: nn.Module, optimizer: MasterAdamW, facts: RunFacts
) -> tuple[int, dict[str, Any]]:
    """Continue a checkpoint: fill draft and optimizer, bit for bit as they were saved.

    Returns (the steps that were taken, run.json's `training` entry).
    Raises UserError when the checkpoint holds no training state, another run's, or another map;
    nothing is changed then.
    """
    checkpoint = read_port(directory)
    saved = check_continues(directory, checkpoint, draft, optimizer, facts)
    weights = {name: ref.load() for name, ref in draft_weights(checkpoint, draft).items()}
    draft.load_state_dict(weights)
    optimizer.restore(
        {name: ref.load() for name, ref in checkpoint.optimizer.items()}, saved["updates"]
    )
    restore_guard(optimizer, saved)
    return saved["step"], saved


# Settings of the optimizer that may change on a resume: no number that is saved hangs on them.
CHANGEABLE = {"spike_multiple"}


def check_continues(
    directory: Path,
    checkpoint: Checkpoint,
    draft: nn.Module,
    optimizer: MasterAdamW,
    facts: RunFacts,
) -> dict[str, Any]:
    """Return the `training` entry of a checkpoint that this run can continue; nothing is changed.

    Raises UserError when the checkpoint holds no training state, another run's (contracts §3),
    other optimizer settings than CHANGEABLE ones, or weights of another dtype.
    """
    saved = checkpoint.training
    if saved is None:
        raise UserError(
            f"{directory}: holds a draft without training state; start a run from it (init_from)"
        )
    current = training_record(draft, optimizer, saved["step"], facts)
    check_resume(saved["resume"], current["resume"])
    there, here = saved["optimizer"], current["optimizer"]
    changed = sorted(k for k in there.keys() | here if there.get(k) != here.get(k))
    refused = [name for name in changed if name not in CHANGEABLE]
    if refused:
        name = refused[0]
        raise UserError(
            f"this run does not continue the checkpoint: optimizer.{name} is {there.get(name)!r} "
            f"there and {here.get(name)!r} here; set it back"
        )
    state = draft.state_dict()
    for name, ref in draft_weights(checkpoint, draft).items():
        if name not in state:
            raise UserError(f"{directory}: holds {name}, which this draft does not have")
        saved_dtype, dtype = DTYPES[ref.dtype], state[name].dtype
        if saved_dtype != dtype:
            raise UserError(f"{name} is {saved_dtype} in the checkpoint and {dtype} in this run")
    return saved


def draft_weights(checkpoint: Checkpoint, draft: nn.Module) -> Weights:
    """Return the tensors of a checkpoint that a draft takes: its own, and a head or embedding."""
    borrowed = {HEAD: checkpoint.head, EMBEDDING: checkpoint.embedding}
    names = draft.state_dict().keys()
    taken = {n: ref for n, ref in borrowed.items() if ref is not None and n in names}
    return checkpoint.weights | taken


def restore_guard(optimizer: MasterAdamW, saved: Mapping[str, Any]) -> None:
    """Give the spike guard what it had seen."""
    guard = saved["guard"]
    optimizer.guard.log_sum, optimizer.guard.seen = guard["log_sum"], guard["seen"]
