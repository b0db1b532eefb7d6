"""The `port` format: a training checkpoint of torch.distributed.checkpoint, with run.json.

The tensors lie in the safetensors storage of torch.distributed.checkpoint
(`HuggingFaceStorageWriter/Reader`; its default storage unpickles metadata), whole or in one shard
per rank; run.json holds all that is no tensor. A checkpoint without training state is one with
`training` null: the draft alone.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_port.errors import UserError
from torch_port.formats.checkpoint import (
    EMBEDDING,
    HEAD,
    Checkpoint,
    split_weights,
)
from torch_port.formats.config_files import hf_config, read_config
from torch_port.formats.weights import (
    DTYPES,
    TensorRef,
    Weights,
    header_digest,
    read_json,
    read_safetensors,
    tensor_ref,
)

RUN_FILE = "run.json"
VERSION = 1
OPTIMIZER_PARTS = ("masters", "exp_avg", "exp_avg_sq")  # optimizer.<part>.<parameter>
_PREFIX = "optimizer."
_SHARDING = "DCP_SHARDING_INFO"  # the metadata entry of a file that holds parts
_RECORD = {"format", "version", "algorithm", "draft", "verifier", "headers", "training"}


def _whole(value: Any) -> bool:
    return type(value) is int and value >= 0


def _named(value: Any) -> bool:
    return isinstance(value, dict)


# What `training` holds, each with what it must be.
_TRAINING: dict[str, Callable[[Any], bool]] = {
    "step": _whole,  # optimizer steps, skipped ones too
    "updates": _whole,  # AdamW's own count: skipped steps do not raise it
    "guard": lambda x: (
        _named(x)
        and {"log_sum", "seen"} <= set(x) <= {"log_sum", "seen", "mean_log"}  # from orbax: exact
        and type(x.get("mean_log", 0.0)) is float
        and _whole(x["seen"])
        and type(x["log_sum"]) in (int, float)
        and math.isfinite(x["log_sum"])
    ),  # of the spike guard
    "objective": _named,
    "optimizer": _named,
    "num_anchors": lambda x: x is None or (_whole(x) and x > 0),
    "target": lambda x: _named(x) and set(x) == {"fingerprint", "config"} and _named(x["config"]),
    "resume": _named,  # what training.resume.record gives
    "rng": lambda x: x is None or _named(x),  # by rank
    "data": lambda x: x is None or _named(x),  # the loader's position
}


def read_port(directory: Path) -> Checkpoint:
    """Read a port checkpoint; tensors stay on disk until they are asked for.

    Raises UserError for a damaged or unknown record and for everything that `split_weights` finds.
    """
    where = str(directory)
    record = read_json(directory / RUN_FILE)
    if record.get("format") != "port" or record.get("version") != VERSION:
        raise UserError(
            f"{directory / RUN_FILE}: format {record.get('format')!r} version "
            f"{record.get('version')!r}; this version reads 'port' version {VERSION}"
        )
    _refuse_unknown(directory, record, _RECORD)
    draft = record.get("draft")
    if not isinstance(draft, dict):
        raise UserError(f"{directory / RUN_FILE}: draft must be an object, not {draft!r}")
    algorithm, config, neutral, notes = read_config(draft, str(directory / RUN_FILE))
    if record.get("algorithm") != algorithm:
        raise UserError(
            f"{directory / RUN_FILE}: algorithm is {record.get('algorithm')!r}, but the draft is "
            f"a {algorithm} one"
        )
    _check_headers(directory, record.get("headers"))
    training = record.get("training")
    if training is not None:
        _check_training(directory, training)
    tensors = read_storage(directory)
    optimizer = {n: tensors.pop(n) for n in list(tensors) if n.startswith(_PREFIX)}
    own, head, embedding = split_weights(tensors, algorithm, config, where)
    check_optimizer(optimizer, own, training, where)
    return Checkpoint(
        format="port",
        algorithm=algorithm,
        config=config,
        weights=own,
        head=head,
        embedding=embedding,
        neutral=neutral,
        verifier=record.get("verifier"),
        training=training,
        optimizer=optimizer,
        notes=tuple(notes),
    )


def _check_training(directory: Path, training: Any) -> None:
    """Refuse a record of a run that lacks something or holds what it cannot mean."""
    _refuse_unknown(directory, training, set(_TRAINING), complete=True)
    for name, fits in _TRAINING.items():
        if not fits(training[name]):
            raise UserError(
                f"{directory / RUN_FILE}: training.{name} is {str(training[name])[:100]}, which it "
                "cannot be; copy the checkpoint again"
            )
    if training["updates"] > training["step"]:
        raise UserError(
            f"{directory / RUN_FILE}: {training['updates']} updates in {training['step']} steps; "
            "copy the checkpoint again"
        )


def _check_headers(directory: Path, recorded: Any) -> None:
    """Refuse tensor files that are not the ones, or whose headers are not those, of the writing."""
    found = {path.name for path in directory.glob("*.safetensors")}
    if not isinstance(recorded, dict):
        raise UserError(f"{directory / RUN_FILE}: names no files; copy the checkpoint again")
    absent, foreign = sorted(set(recorded) - found), sorted(found - set(recorded))
    if absent or foreign:
        what = f"{absent[0]} is missing" if absent else f"{foreign[0]} is of another checkpoint"
        raise UserError(
            f"{directory}: {what}; {RUN_FILE} names {len(recorded)} files, found are {len(found)}; "
            "copy the checkpoint again"
        )
    for name, digest in recorded.items():
        if header_digest(directory / name) != digest:
            raise UserError(
                f"{directory / name}: its header was changed after it was written, or it is of "
                "another checkpoint; copy the checkpoint again"
            )


def write_record(directory: Path, checkpoint: Checkpoint) -> None:
    """Write run.json beside the tensor files of a port checkpoint, which are there already."""
    headers = {p.name: header_digest(p) for p in sorted(directory.glob("*.safetensors"))}
    content = port_record(checkpoint) | {"headers": headers}
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    (directory / RUN_FILE).write_text(text, encoding="utf-8")


def port_record(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return run.json's content for a checkpoint, without the digests of its files."""
    return {
        "format": "port",
        "version": VERSION,
        "algorithm": checkpoint.algorithm,
        "draft": hf_config(checkpoint.config, checkpoint.neutral),
        "verifier": checkpoint.verifier,
        "training": checkpoint.training,
    }


def port_tensors(checkpoint: Checkpoint) -> Weights:
    """Return all tensors of a port checkpoint, by name."""
    borrowed = {HEAD: checkpoint.head, EMBEDDING: checkpoint.embedding}
    present = {name: ref for name, ref in borrowed.items() if ref is not None}
    return checkpoint.weights | present | checkpoint.optimizer


Parts = list[tuple[tuple[int, ...], TensorRef]]  # where each begins in the whole tensor


def read_storage(directory: Path) -> Weights:
    """Find the tensors of a torch.distributed.checkpoint in safetensors storage.

    A tensor that ranks saved in parts is put together when it is asked for; a whole one stays a
    view of its file. Raises UserError when a file is damaged or there is no tensor.
    """
    parts: dict[str, Parts] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found, metadata = read_safetensors(path)
        begins = _begins(path, metadata)
        for name, ref in found.items():
            parts.setdefault(name, []).append((begins.get(name, (0,) * len(ref.shape)), ref))
    if not parts:
        raise UserError(f"{directory}: holds no tensors; copy the checkpoint again")
    return {name: _whole_tensor(directory, name, found) for name, found in parts.items()}


def _begins(path: Path, metadata: Mapping[str, str]) -> dict[str, tuple[int, ...]]:
    """Where each tensor of a file starts in the whole one, by torch.distributed.checkpoint."""
    if _SHARDING not in metadata:
        return {}
    try:
        told = json.loads(metadata[_SHARDING])
        return {name: tuple(map(int, entry["saved_offsets"])) for name, entry in told.items()}
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UserError(f"{path}: its {_SHARDING} cannot be read; copy it again") from None


def _whole_tensor(directory: Path, name: str, parts: Parts) -> TensorRef:
    """One tensor of which files hold parts.

    Not by the library's reader, which opens every file of the directory for every tensor.
    """
    begin, first = parts[0]
    if len(parts) == 1 and not any(begin):
        return first
    if any(ref.dtype != first.dtype or len(at) != len(ref.shape) for at, ref in parts):
        raise UserError(f"{directory}: the parts of {name} are no parts of one tensor")
    ends = [[b + e for b, e in zip(at, ref.shape, strict=True)] for at, ref in parts]
    shape = tuple(max(extents) for extents in zip(*ends, strict=True))
    filled = [at for at, ref in parts if math.prod(ref.shape)]
    held = sum(math.prod(ref.shape) for _, ref in parts)
    misplaced = len(set(filled)) < len(filled) or any(b < 0 for at in filled for b in at)
    if misplaced or held != math.prod(shape):
        raise UserError(f"{directory}: the parts of {name} leave a gap, or overlap")

    def load() -> Tensor:
        whole = torch.empty(shape, dtype=DTYPES[first.dtype])
        for (at, ref), end in zip(parts, ends, strict=True):
            whole[tuple(slice(b, e) for b, e in zip(at, end, strict=True))] = ref.load()
        return whole

    return TensorRef(first.dtype, shape, load, f"{directory}: {name}")


def check_optimizer(
    optimizer: Weights, own: Weights, training: Mapping[str, Any] | None, where: str
) -> None:
    """Check that optimizer tensors and weights belong together.

    Raises UserError for moments of unknown parameters, of other shapes, or missing for some.
    """
    if training is None:
        if optimizer:
            raise UserError(f"{where}: optimizer tensors, but run.json has no training state")
        return
    parameters = [name for name in own if name not in ("t2d", "d2t")]
    own_masters = own[parameters[0]].dtype in ("F32", "F64")
    parts = OPTIMIZER_PARTS[1 if own_masters else 0 :]
    wanted = {f"{_PREFIX}{part}.{name}": own[name] for part in parts for name in parameters}
    head = f"{_PREFIX}exp_avg.{HEAD}" in optimizer and HEAD not in own
    problems = [f"{name}: missing" for name in wanted if name not in optimizer]
    for name, ref in optimizer.items():
        if name not in wanted and not (head and name.endswith(HEAD)):
            problems.append(f"{name}: no such state")
        elif name in wanted and ref.shape != wanted[name].shape:
            problems.append(
                f"{name}: shape {list(ref.shape)}, not {list(wanted[name].shape)}; state that is "
                "not laid out like its parameter cannot be brought to other ranks"
            )
        elif ref.dtype not in ("F32", "F64"):
            problems.append(f"{name}: dtype {ref.dtype}; moments and masters are float32")
    if training["updates"] == 0 and not any("exp_avg" in name for name in optimizer):
        problems = [text for text in problems if "exp_avg" not in text]  # before the first step
    if problems:
        raise UserError(f"{where}: " + "; ".join(problems[:8]))


def _refuse_unknown(directory: Path, given: Any, known: set[str], complete: bool = False) -> None:
    if not isinstance(given, dict):
        raise UserError(f"{directory / RUN_FILE}: expected an object, found {given!r}")
    unknown, missing = sorted(set(given) - known), sorted(known - set(given))
    if unknown or (complete and missing):
        what = f"unknown fields {unknown}" if unknown else f"no {missing}"
        raise UserError(f"{directory / RUN_FILE}: {what}; written by another version?")


def memory_checkpoint(
    algorithm: str, config: Any, tensors: Mapping[str, Tensor], **rest: Any
) -> Checkpoint:
    """Describe a draft that is in memory: `tensors` by the names of contracts §4.

    Those on the meta device are described, and cannot be loaded.
    """
    refs = {
        name: tensor_ref(tensor if tensor.is_meta else tensor.detach().cpu(), name)
        for name, tensor in tensors.items()
    }
    optimizer = {n: refs.pop(n) for n in list(refs) if n.startswith(_PREFIX)}
    own, head, embedding = split_weights(refs, algorithm, config, "the draft in memory")
    return Checkpoint(
        format="memory",
        algorithm=algorithm,
        config=config,
        weights=own,
        head=head,
        embedding=embedding,
        optimizer=optimizer,
        **rest,
    )
