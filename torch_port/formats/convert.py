"""From one format to another: detect, read, write; nothing is guessed and nothing half-written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torch_port.config import DraftConfig
from torch_port.config_eagle3 import Eagle3Config
from torch_port.data.atomic import atomic_directory
from torch_port.errors import UserError
from torch_port.formats.checkpoint import (
    EMBEDDING,
    HEAD,
    Checkpoint,
    check_checkpoint_map,
    rename_legacy,
    split_weights,
)
from torch_port.formats.config_files import deepspec_config, hf_config, is_eagle3, read_config
from torch_port.formats.port import RUN_FILE, port_tensors, read_port, write_record
from torch_port.formats.speculators import read_speculators, speculators_config
from torch_port.formats.target import TargetDirectory
from torch_port.formats.weights import TensorRef, Weights, read_json, read_weights
from torch_port.formats.writer import write_safetensors

FORMATS = ("port", "hf", "deepspec", "speculators")  # parity adds orbax, which needs jax
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Options:
    """What a conversion may be told.

    `target`: the directory of the target, for what a format borrows of it. `with_head`: `hf` gets
    the K-row head. `speculative_tokens`: what a server proposes at a time (speculators).
    `verifier`: the target's name in a speculators config (default: the target directory).
    """

    target: TargetDirectory | None = None
    with_head: bool = False
    speculative_tokens: int | None = None
    verifier: str | None = None


def detect_format(directory: Path) -> str:
    """Tell which format a checkpoint directory is of.

    Raises UserError when it is none of them.
    """
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; expected a checkpoint's directory")
    if (directory / RUN_FILE).is_file():
        return "port"
    if (directory / "_CHECKPOINT_METADATA").exists() or (directory / "meaning").is_dir():
        return "orbax"
    if not (directory / "config.json").is_file():
        raise UserError(
            f"{directory}: no checkpoint: expected config.json, {RUN_FILE} or an orbax directory"
        )
    raw = read_json(directory / "config.json")
    if {"speculators_model_type", "transformer_layer_config"} & set(raw):
        return "speculators"
    if "dflash_config" in raw or is_eagle3(raw):
        return "hf"
    if "target_layer_ids" in raw or "block_size" in raw:
        return "deepspec"
    named = raw.get("architectures") or raw.get("model_type")
    raise UserError(
        f"{directory}: config.json is of no draft that is known ({named}): expected "
        "speculators_model_type, dflash_config, eagle_config or target_layer_ids"
    )


def read_checkpoint(directory: Path, target: TargetDirectory | None = None) -> Checkpoint:
    """Read a checkpoint of any format but orbax, checked; tensors stay on disk until asked for.

    Arguments: `target` for a speculators file that does not say how many layers it has.
    Raises UserError for whatever makes the checkpoint unfit, naming what and where.
    """
    kind = detect_format(directory)
    if kind == "orbax":
        raise UserError(
            f"{directory}: an orbax checkpoint, which needs jax: use parity convert or parity show"
        )
    if kind == "port":
        return read_port(directory)
    raw, where = read_json(directory / "config.json"), str(directory / "config.json")
    verifier: dict[str, Any] | None = None
    config: DraftConfig | Eagle3Config
    if kind == "speculators":
        layers = None if target is None else target.num_layers
        algorithm, config, neutral, verifier, notes = read_speculators(raw, layers, where)
    else:
        algorithm, config, neutral, notes = read_config(raw, where)
    weights, renamed = rename_legacy(read_weights(directory))
    own, head, embedding = split_weights(
        weights, algorithm, config, str(directory), _carried(kind, config)
    )
    return Checkpoint(
        format=kind,
        algorithm=algorithm,
        config=config,
        weights=own,
        head=head,
        embedding=embedding,
        neutral=neutral,
        verifier=verifier,
        notes=(*notes, *renamed),
    )


def _carried(kind: str, config: DraftConfig | Eagle3Config) -> tuple[str, ...]:
    """What a format always holds of the target; a file without it lost it on its way."""
    if kind == "deepspec":
        return HEAD, EMBEDDING
    return (HEAD,) if kind == "speculators" and config.prunes else ()


def write_checkpoint(
    checkpoint: Checkpoint,
    destination: Path,
    to: str,
    options: Options | None = None,
    progress: Progress = lambda done, total: None,
) -> list[str]:
    """Write a checkpoint in a format; the directory appears complete or not at all.

    Returns what the format does not hold of it, one line each.
    Raises UserError when the destination exists, or when the format needs what is not there.
    """
    options = options or Options()
    if to not in FORMATS:
        raise UserError(f"--to {to}: unknown format; there are {', '.join(FORMATS)}, and orbax")
    if os.path.lexists(destination):  # a dangling link too: nothing could be renamed onto it
        raise UserError(f"{destination} exists already; name a new directory")
    if options.target is not None:
        options.target.check(checkpoint.config)
    content, tensors, lost = _WRITERS[to](checkpoint, options)
    with atomic_directory(destination) as directory:
        name = "model-00001-of-00001" if to == "port" else "model"
        write_safetensors(directory / f"{name}.safetensors", tensors, progress=progress)
        if to == "port":
            write_record(directory, checkpoint)
        else:
            text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
            (directory / "config.json").write_text(text, encoding="utf-8")
    return lost


def convert(
    source: Path,
    destination: Path,
    to: str,
    options: Options | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[Checkpoint, list[str]]:
    """Convert a checkpoint. Returns (what was read, what the new format does not hold)."""
    options = options or Options()
    checkpoint = read_checkpoint(source, options.target)
    return checkpoint, write_checkpoint(checkpoint, destination, to, options, progress)


Written = tuple[dict[str, Any], Weights, list[str]]


def _port(checkpoint: Checkpoint, options: Options) -> Written:
    return {}, port_tensors(checkpoint), []  # its record is written last: it names the files


def _hf(checkpoint: Checkpoint, options: Options) -> Written:
    tensors, lost = dict(checkpoint.weights), _lost_training(checkpoint)
    if isinstance(checkpoint.config, Eagle3Config):
        if checkpoint.embedding is not None:
            tensors[EMBEDDING] = checkpoint.embedding
    elif options.with_head or _head_is_trained(checkpoint):
        tensors[HEAD] = _head(checkpoint, options)
    lost += _lost(checkpoint, tensors) + _lost_verifier(checkpoint)
    return hf_config(checkpoint.config, checkpoint.neutral), tensors, lost


def _deepspec(checkpoint: Checkpoint, options: Options) -> Written:
    content = deepspec_config(checkpoint.config, checkpoint.neutral)
    borrowed = {EMBEDDING: _embedding(checkpoint, options), HEAD: _head(checkpoint, options)}
    tensors = checkpoint.weights | borrowed
    lost = _lost_training(checkpoint) + _lost(checkpoint, tensors) + _lost_verifier(checkpoint)
    return content, tensors, lost


def _speculators(checkpoint: Checkpoint, options: Options) -> Written:
    verifier = dict(checkpoint.verifier or {})
    verifier |= options.target.verifier if options.target is not None else {}
    verifier |= {"name_or_path": options.verifier} if options.verifier is not None else {}
    content = speculators_config(
        checkpoint.config, checkpoint.neutral, verifier, options.speculative_tokens
    )
    tensors = dict(checkpoint.weights)
    # A server that shared the target's full head with a pruned draft would accept about 1 % of its
    # tokens, without an error: the K rows go along.
    if checkpoint.config.prunes or checkpoint.head is not None:
        tensors[HEAD] = _head(checkpoint, options)
    if checkpoint.embedding is not None:
        tensors[EMBEDDING] = checkpoint.embedding
    return content, tensors, _lost_training(checkpoint) + _lost(checkpoint, tensors)


_WRITERS: Mapping[str, Callable[[Checkpoint, Options], Written]] = {
    "port": _port,
    "hf": _hf,
    "deepspec": _deepspec,
    "speculators": _speculators,
}


def _head_is_trained(checkpoint: Checkpoint) -> bool:
    """A head that the draft trained itself is no copy of the target's."""
    return f"optimizer.exp_avg.{HEAD}" in checkpoint.optimizer


def _head(checkpoint: Checkpoint, options: Options) -> TensorRef:
    """The K-row head: the checkpoint's own, else the target's kept rows."""
    if checkpoint.head is not None:
        return checkpoint.head
    config = checkpoint.config
    kept = check_checkpoint_map(checkpoint.weights, config, checkpoint.format)
    rows = torch.arange(config.vocab_size) if kept is None else kept
    target = _target(options, HEAD)
    return target.head_rows(rows, config.vocab_size, config.hidden_size)


def _embedding(checkpoint: Checkpoint, options: Options) -> TensorRef:
    if checkpoint.embedding is not None:
        return checkpoint.embedding
    config = checkpoint.config
    return _target(options, EMBEDDING).embedding(config.vocab_size, config.hidden_size)


def _target(options: Options, name: str) -> TargetDirectory:
    if options.target is None:
        raise UserError(
            f"{name}: this format carries it and the source does not; give the target that the "
            "draft was trained for (--target DIR)"
        )
    return options.target


def _lost_training(checkpoint: Checkpoint) -> list[str]:
    if checkpoint.training is None:
        return []
    step = checkpoint.training["step"]
    return [f"training state of step {step}: optimizer moments, masters, schedule, random states"]


def _lost(checkpoint: Checkpoint, tensors: Weights) -> list[str]:
    borrowed = ((HEAD, checkpoint.head), (EMBEDDING, checkpoint.embedding))
    return [
        f"{name} {list(r.shape)}" for name, r in borrowed if r is not None and name not in tensors
    ]


def _lost_verifier(checkpoint: Checkpoint) -> list[str]:
    verifier = checkpoint.verifier or {}
    name, proposal = verifier.get("name_or_path"), verifier.get("proposal")
    lost = [] if name is None else [f"the target's name, {name}"]
    return lost + ([] if proposal is None else [f"how a server proposes: {json.dumps(proposal)}"])
