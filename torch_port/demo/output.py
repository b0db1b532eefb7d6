"""A demo run's output directory: its own, never somebody else's, and the weights left in it."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from torch_port.data.atomic import atomic_file
from torch_port.data.batch import Batch
from torch_port.errors import UserError
from torch_port.models.dspark import DSparkDraft, FrozenTarget

MARKER = "run.json"  # written first: it says that the directory is a run of ours


def open_output(out: Path | None, overwrite: bool, description: dict[str, Any]) -> Path:
    """Create the run's directory and mark it.

    Without `out` the run gets a new directory `runs/demo-<time>` of its own.

    Raises UserError when `out` holds a run and `overwrite` is off, or holds something that is no
    run (which is never removed), or cannot be written.
    """
    try:
        directory = _fresh_directory() if out is None else _claim(out, overwrite)
        write_json(directory / MARKER, description)
    except OSError as error:
        raise UserError(
            f"--out {out or 'runs'}: the directory cannot be written ({error.strerror}); "
            "choose a directory you may write to"
        ) from None
    return directory


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


def _claim(out: Path, overwrite: bool) -> Path:
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out} is a file; give a directory")
    if out.is_dir() and any(out.iterdir()):
        if not (out / MARKER).is_file():
            raise UserError(
                f"--out {out} holds files that are no run of the demo, and they are never removed; "
                "choose another directory"
            )
        if not overwrite:
            raise UserError(
                f"--out {out} already holds a run; choose another directory or add --overwrite"
            )
        for entry in out.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            else:
                entry.unlink()
    out.mkdir(parents=True, exist_ok=True)
    return out


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON atomically."""
    with atomic_file(path) as stream:
        stream.write((json.dumps(content, indent=1) + "\n").encode())


def save_case(
    directory: Path,
    draft: DSparkDraft,
    target: FrozenTarget,
    objective: dict[str, Any],
    batches: list[Batch],
    optimizer: dict[str, Any] | None = None,
) -> None:
    """Write weights, frozen target and batches as a case (design note vectors.md, no expectation).

    With `optimizer` the batches are the steps of a training run, else there is one batch. The
    stored normaliser stays out: the other side computes its own.
    """
    directory.mkdir(parents=True)
    tensors: dict[str, Tensor] = {f"weights/{n}": v for n, v in draft.state_dict().items()}
    tensors["target/embed_tokens.weight"] = target.embed_tokens
    tensors["target/lm_head.weight"] = target.lm_head
    names = ("input_ids", "loss_mask", "hidden_states", "target_last_hidden_states")
    for index, batch in enumerate(batches):
        place = "batch" if optimizer is None else f"steps/{index}"
        for name in (*names, "anchor_positions", "block_keep_mask"):
            tensors[f"{place}/{name}"] = getattr(batch, name)
    # Cloned: safetensors refuses tensors that share memory, and a tied head shares E's.
    save_file(
        {n: v.detach().clone() for n, v in tensors.items()}, directory / "tensors.safetensors"
    )
    case = {
        "format": 1,
        "name": directory.name,
        "config": draft.config.to_hf(),
        "objective": objective,
        "expect": {},
    }
    write_json(directory / "case.json", case | ({"optimizer": optimizer} if optimizer else {}))


def save_draft(directory: Path, draft: DSparkDraft) -> None:
    """Write a draft in the field's `hf` layout: config.json and model.safetensors."""
    directory.mkdir(parents=True)
    save_file(draft.state_dict(), directory / "model.safetensors", {"format": "pt"})
    write_json(directory / "config.json", draft.config.to_hf())
