"""The frozen head of a target in a local directory: its rows, its size, its fingerprint.

Shape suffixes: V target ids, H hidden size.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torch_port.errors import UserError

_HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"


def read_head(directory: Path) -> Tensor:
    """Read U [V, H] of a target in its stored dtype.

    The tensor `lm_head.weight`; where config.json says `tie_word_embeddings`, the embedding.

    Arguments: `directory` with config.json and model.safetensors, whole or with an index.
    Raises UserError when there is no such directory, no head, or a damaged file.
    """
    tied = _is_tied(_config(directory))
    files = _weight_files(directory)
    if tied:
        names = [name for name in files if name == _EMBEDDING or name.endswith(f".{_EMBEDDING}")]
        wanted = f"one {_EMBEDDING} (tie_word_embeddings is true)"
    else:
        names = [name for name in files if name == _HEAD]
        wanted = f"{_HEAD} (tie_word_embeddings is not true)"
    if len(names) != 1:
        raise UserError(
            f"--target {directory}: expected {wanted}, found {names or 'none'} among "
            f"{len(files)} tensors; give the target's own directory, with its config.json"
        )
    head = _tensor(files[names[0]], names[0])
    if head.dim() != 2 or not head.is_floating_point():
        raise UserError(
            f"--target {directory}: {names[0]} must be a matrix of floating numbers, not "
            f"{head.dtype} of shape {list(head.shape)}; quantized heads are not read"
        )
    return head


def head_fingerprint(head_VH: Tensor) -> str:
    """Return the sha256 over a head's dtype, shape and bytes."""
    digest = hashlib.sha256(f"{head_VH.dtype}\0{list(head_VH.shape)}\0".encode())
    for part in head_VH.split(4096):  # never a second copy of the whole head
        digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _config(directory: Path) -> dict[str, Any]:
    return _read_json(directory, "config.json")


def _is_tied(config: dict[str, Any]) -> bool:
    text = config.get("text_config")  # a multimodal target keeps its decoder's settings there
    inner = text.get("tie_word_embeddings") if isinstance(text, dict) else None
    return (config.get("tie_word_embeddings") if inner is None else inner) is True


def _weight_files(directory: Path) -> dict[str, Path]:
    """The file of every tensor."""
    whole = directory / "model.safetensors"
    if whole.is_file():
        try:
            with safe_open(whole, "pt") as file:
                return dict.fromkeys(file.keys(), whole)
        except (OSError, SafetensorError) as error:
            raise _damaged(whole, error) from None
    index = _read_json(directory, "model.safetensors.index.json").get("weight_map")
    if not isinstance(index, dict):
        raise UserError(f"--target {directory}: its weight index names no weight_map")
    return {name: directory / str(file) for name, file in index.items()}


def _tensor(file: Path, name: str) -> Tensor:
    try:
        with safe_open(file, "pt") as opened:
            tensor: Tensor = opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise _damaged(file, error) from None
    return tensor


def _read_json(directory: Path, name: str) -> dict[str, Any]:
    try:
        content = json.loads((directory / name).read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(
            f"--target {directory}: expected a model's local directory with {name}, found: "
            f"{getattr(error, 'strerror', None) or error}; nothing is downloaded"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"--target {directory}: {name} holds no object")
    return content


def _damaged(file: Path, error: Exception) -> UserError:
    return UserError(f"--target: {file} cannot be read ({error}); copy the target again")
