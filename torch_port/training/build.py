"""A run's draft and target, on this rank's device, from the files that its run file names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_port.errors import UserError
from torch_port.formats.checkpoint import Checkpoint
from torch_port.formats.convert import read_checkpoint
from torch_port.formats.load import build_draft
from torch_port.formats.target import TargetDirectory
from torch_port.models.block_draft import FrozenTarget
from torch_port.models.registry import Algorithm, find_algorithm, read_draft_config
from torch_port.run import RunConfig
from torch_port.training.resume import target_fingerprint
from torch_port.vocabulary.broadcast import broadcast_vocab_mapping
from torch_port.vocabulary.files import load_map

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class LoadedTarget:
    """The target's frozen tensors on the device, its parsed config and its fingerprint.

    The fingerprint is over the tensors as they are in the file, whatever a run computes in.
    """

    tensors: FrozenTarget
    config: dict[str, Any]
    fingerprint: str


def read_draft(run: RunConfig) -> Any:
    """Return the draft's config of its family's class. Raises UserError when it is not there."""
    raw = read_draft_config(run.draft.config)
    if raw is None:
        raise UserError(
            f"draft.config {run.draft.config}: nothing is there; write the draft's config.json "
            "(docs/training.md has one), or name another place"
        )
    return find_algorithm(run.algorithm).config_class().from_hf(raw)  # type: ignore[attr-defined]


def load_target(run: RunConfig, config: Any, device: torch.device) -> LoadedTarget:
    """Read E and U of the target's first V rows, and take them to the device in the run's dtype.

    Raises UserError when the target is not there, or of other sizes than the draft's config.
    """
    directory = TargetDirectory(Path(run.target.path))
    directory.check(config)
    V, H = config.vocab_size, config.hidden_size
    dtype = DTYPES[run.training.dtype]
    embedding = directory.embedding(V, H).load()
    head = directory.head_rows(torch.arange(V), V, H).load()
    tensors = FrozenTarget(
        embed_tokens=embedding.to(device, dtype, copy=True),
        lm_head=head.to(device, dtype, copy=True),
    )
    fingerprint = target_fingerprint(embedding, head, directory.config)
    return LoadedTarget(tensors, directory.config, fingerprint)


def make_draft(run: RunConfig, config: Any, target: FrozenTarget, device: torch.device) -> Any:
    """Build the draft that a new run starts with, its vocabulary map installed on every rank.

    From `training.init_from`, or drawn with `training.seed`: equal on all ranks. A head of its own
    starts from the target's kept rows, where the checkpoint has none.
    Raises UserError for a checkpoint of another draft, and for a draft that prunes without a map.
    """
    algorithm = find_algorithm(run.algorithm)
    if run.training.init_from is None:
        draft = _drawn(run, algorithm, config)
        from_file = None
    else:
        from_file = read_checkpoint(Path(run.training.init_from), None)
        draft = _from_checkpoint(run, from_file, config)
    draft = draft.to(device=device, dtype=DTYPES[run.training.dtype])
    _install_map(run, draft)
    _start_head(run, draft, target, from_file)
    return draft


def _drawn(run: RunConfig, algorithm: Algorithm, config: Any) -> Any:
    settings = {"trainable_head": True} if _own_head(run) else {}
    draft: Any = algorithm.draft_class()(config, run.compute, **settings)
    draft.initialise(torch.Generator().manual_seed(run.training.seed))
    return draft


def _own_head(run: RunConfig) -> bool:
    """EAGLE3's head is a weight of its own in any case."""
    return run.training.trainable_head and run.algorithm != "eagle3"


def _from_checkpoint(run: RunConfig, checkpoint: Checkpoint, config: Any) -> Any:
    """Refuse a checkpoint whose weights mean something else than the run's config says."""
    place = run.training.init_from
    if checkpoint.algorithm != run.algorithm:
        raise UserError(
            f"training.init_from {place}: a {checkpoint.algorithm} draft, but algorithm is "
            f"{run.algorithm!r}; set algorithm to {checkpoint.algorithm!r}, or start from another"
        )
    theirs, ours = checkpoint.config.model_dump(), config.model_dump()
    differing = [name for name in ours if theirs.get(name) != ours[name]]
    if differing:
        name = differing[0]
        raise UserError(
            f"training.init_from {place}: its {name} is {theirs.get(name)!r}, but draft.config "
            f"{run.draft.config} has {ours[name]!r} ({len(differing)} settings differ: "
            f"{', '.join(differing)}); name the draft config that it was trained with"
        )
    own = _own_head(run) and checkpoint.head is not None
    if _own_head(run) and not own:
        draft = _drawn(run, find_algorithm(run.algorithm), config)
        draft.load_state_dict(
            {n: ref.load() for n, ref in checkpoint.weights.items()} | _head_of(draft)
        )
        return draft
    return build_draft(checkpoint, run.compute, trainable_head=own)


def _head_of(draft: nn.Module) -> dict[str, torch.Tensor]:
    """The head that was drawn stays, until `_start_head` fills it."""
    return {"lm_head.weight": draft.state_dict()["lm_head.weight"]}


def _install_map(run: RunConfig, draft: Any) -> None:
    """Install the map of the run file; a map that a checkpoint brought must be the same.

    Rank 0's is what all ranks get: files that differ between nodes are refused on every rank.
    """
    if run.vocabulary.map is not None:
        t2d, d2t, _metadata = load_map(Path(run.vocabulary.map))
        draft.install_vocab_mapping(t2d, d2t)
    elif draft.prunes_vocabulary and run.training.init_from is None:
        raise UserError(
            f"the draft prunes to draft_vocab_size {draft.draft_vocab_size}, but vocabulary.map is "
            "not set: which ids its rows are cannot be guessed. Build a map (torch-port vocab "
            "build) and set vocabulary.map"
        )
    broadcast_vocab_mapping(draft)


def _start_head(
    run: RunConfig, draft: Any, target: FrozenTarget, checkpoint: Checkpoint | None
) -> None:
    """Start a head that is trained from the target's kept rows, unless a checkpoint brought it."""
    if checkpoint is not None and (checkpoint.head is not None or run.algorithm == "eagle3"):
        return
    if _own_head(run) or run.algorithm == "eagle3":
        draft.copy_head(target.lm_head)
