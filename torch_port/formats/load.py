"""A draft from a checkpoint of any format, ready for use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from torch_port.compute import ComputeConfig
from torch_port.errors import UserError
from torch_port.formats.checkpoint import EMBEDDING, HEAD, Checkpoint
from torch_port.formats.convert import read_checkpoint
from torch_port.formats.target import TargetDirectory
from torch_port.models.registry import find_algorithm


def load_draft(
    path: Path, target: TargetDirectory | None = None, compute: ComputeConfig | None = None
) -> Any:
    """Load a draft from a checkpoint directory of any format but orbax, its map installed.

    Arguments: `target` for a speculators file that does not say how many layers it has; `compute`,
    how the draft is to compute. Weights keep their dtype. A head or an embedding in the file is not
    loaded: training and evaluation borrow the target's (`Checkpoint.head` has it).
    Returns the draft. Raises UserError for whatever makes the checkpoint unfit.
    """
    return build_draft(read_checkpoint(path, target), compute)


def build_draft(
    checkpoint: Checkpoint, compute: ComputeConfig | None = None, trainable_head: bool = False
) -> Any:
    """Build the draft of a checkpoint that was read.

    `trainable_head`: the draft gets the checkpoint's head as a parameter of its own.
    Raises UserError when a head is asked for and the checkpoint has none.
    """
    if trainable_head and checkpoint.algorithm == "eagle3":
        trainable_head = False  # its head is a weight of its own already
    settings = {"trainable_head": True} if trainable_head else {}
    with torch.device("meta"):
        draft = find_algorithm(checkpoint.algorithm).draft_class()(
            checkpoint.config, compute, **settings
        )
    weights = {name: ref.load() for name, ref in checkpoint.weights.items()}
    if trainable_head:
        if checkpoint.head is None:
            raise UserError(f"{HEAD}: a head of the draft's own was asked for; the file has none")
        weights[HEAD] = checkpoint.head.load()
    dtype = next(w.dtype for w in weights.values() if w.is_floating_point())
    draft = draft.to(dtype).to_empty(device="cpu")
    if EMBEDDING in draft.state_dict():  # EAGLE3's: the target's, borrowed at its first use
        weights[EMBEDDING] = (
            draft.state_dict()[EMBEDDING]
            if checkpoint.embedding is None
            else checkpoint.embedding.load()
        )
    draft.load_state_dict(weights)
    return draft
