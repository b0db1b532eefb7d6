"""A demo run's output directory: its own, never somebody else's, and the weights left in it."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from torch_port.data.atomic import atomic_directory, atomic_file
from torch_port.data.batch import Batch
from torch_port.errors import UserError
from torch_port.formats.convert import write_checkpoint
from torch_port.formats.port import memory_checkpoint
from torch_port.models.dspark import DSparkDraft, FrozenTarget

MARKER = "demo-run.json"  # written first: it says that the directory is a run of the demo
_COMMAND = "torch-port demo"


def check_output(out: Path | None, overwrite: bool) -> None:
    """Say before any work whether the run may write to `out`; nothing is touched.

    Raises UserError when `out` is a file, holds a run of the demo and `overwrite` is off, or holds
    anything that is no run of the demo (which is never removed).
    """
    if out is None or not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"--out {out} is a file; give a directory")
    if any(out.iterdir()):
        if not _is_demo_run(out):
            raise UserError(
                f"--out {out} holds files that are no run of the demo, and they are never removed; "
                "choose another directory"
            )
        if not overwrite:
            raise UserError(
                f"--out {out} already holds a run; choose another directory or add --overwrite"
            )


def open_output(out: Path | None, overwrite: bool, recipe_name: str) -> Path:
    """Create the run's directory, empty but for its marker.

    Without `out` the run gets a new directory `runs/demo-<time>` of its own.

    Raises UserError as `check_output`, and when the directory cannot be written.
    """
    check_output(out, overwrite)
    try:
        directory = _fresh_directory() if out is None else _emptied(out)
        write_json(directory / MARKER, {"command": _COMMAND, "recipe": recipe_name})
    except OSError as error:
        raise UserError(
            f"--out {out or 'runs'}: the directory cannot be written ({error.strerror}); "
            "choose a directory you may write to"
        ) from None
    return directory


def _is_demo_run(directory: Path) -> bool:
    try:
        content = json.loads((directory / MARKER).read_bytes())
    except (OSError, ValueError):
        return False
    return isinstance(content, dict) and content.get("command") == _COMMAND


def _fresh_directory() -> Path:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    number = 0
    while True:
        directory = Path("runs") / (f"demo-{stamp}" + (f"-{number}" if number else ""))
        try:
            directory.mkdir(parents=True)
        except FileExistsError:
            number += 1  # another run started in this second
        else:
            return directory


def _emptied(out: Path) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    for entry in out.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    return out


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON atomically."""
    with atomic_file(path) as stream:
        stream.write((json.dumps(content, indent=1, allow_nan=False) + "\n").encode())


def save_case(
    directory: Path,
    draft: DSparkDraft,
    target: FrozenTarget,
    objective: dict[str, Any],
    batches: list[Batch],
    optimizer: dict[str, Any] | None = None,
) -> None:
    """Write weights, frozen target and batches as a case (design note vectors.md, no expectation).

    With `optimizer` the batches are the steps of a training run, else there is one batch. Both
    sides compute the log normaliser themselves; the stored one goes along to be compared.
    """
    tensors: dict[str, Tensor] = {f"weights/{n}": v for n, v in draft.state_dict().items()}
    tensors["target/embed_tokens.weight"] = target.embed_tokens
    tensors["target/lm_head.weight"] = target.lm_head
    names = ("input_ids", "loss_mask", "hidden_states", "target_last_hidden_states")
    for index, batch in enumerate(batches):
        place = "batch" if optimizer is None else f"steps/{index}"
        for name in (*names, "anchor_positions", "block_keep_mask"):
            tensors[f"{place}/{name}"] = getattr(batch, name)
        if optimizer is None and batch.target_log_normalizer is not None:
            tensors["stored/target_log_normalizer"] = batch.target_log_normalizer
    case = {
        "format": 1,
        "name": directory.name,
        "config": draft.config.to_hf(),
        "objective": objective,
        "expect": {},
    } | ({"optimizer": optimizer} if optimizer else {})
    # Cloned: safetensors refuses tensors that share memory, and a tied head shares E's.
    copies = {name: value.detach().clone() for name, value in tensors.items()}
    with atomic_directory(directory) as temporary:
        save_file(copies, temporary / "tensors.safetensors", {"format": "pt"})
        write_json(temporary / "case.json", case)


def save_draft(directory: Path, draft: DSparkDraft) -> None:
    """Write a draft in the field's `hf` format: config.json and model.safetensors."""
    checkpoint = memory_checkpoint(draft.algorithm, draft.config, draft.state_dict())
    write_checkpoint(checkpoint, directory, "hf")
