"""Vocabulary map files: safetensors with t2d, d2t and what they were made from (contracts §1)."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from torch_port.data.atomic import atomic_file
from torch_port.errors import UserError
from torch_port.vocabulary.mapping import check_map
from torch_port.vocabulary.stable import stable_bytes

# What a damaged, foreign or hostile file makes the readers raise.
_UNREADABLE = (
    OSError,
    SafetensorError,
    LookupError,
    EOFError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


def save_map(
    path: Path,
    t2d_V: Tensor,
    d2t_K: Tensor,
    *,
    corpus_fingerprint: str,
    tokenizer_fingerprint: str,
    coverage: float,
    details: Mapping[str, str] | None = None,
) -> None:
    """Write a map with its metadata, atomically.

    `details` is kept beside the metadata of contracts §1 (how the ids were chosen).

    Raises UserError when the map is malformed: nothing is written then.
    """
    check_map(t2d_V, d2t_K, len(t2d_V), len(d2t_K))
    metadata = dict(details or {}) | {
        "vocab_size": str(len(t2d_V)),
        "draft_vocab_size": str(len(d2t_K)),
        "corpus_fingerprint": corpus_fingerprint,
        "tokenizer_fingerprint": tokenizer_fingerprint,
        "coverage": repr(coverage),
    }
    content = stable_bytes(save({"t2d": t2d_V, "d2t": d2t_K}, metadata))
    with atomic_file(path) as stream:
        stream.write(content)


def load_map(path: Path) -> tuple[Tensor, Tensor, dict[str, str]]:
    """Read a map file: (t2d bool [V], d2t int64 [K], metadata).

    `.pt` files of the field hold the same two tensors and are read with weights_only=True.
    Raises UserError for an unreadable file, one of another kind (counts) or a malformed map.
    """
    metadata: dict[str, str] = {}
    try:
        if path.suffix == ".pt":
            tensors = torch.load(path, weights_only=True, map_location="cpu")
        else:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        t2d, d2t = _buffers(path, tensors, metadata)
        if not (
            isinstance(t2d, Tensor) and isinstance(d2t, Tensor) and t2d.dim() == d2t.dim() == 1
        ):
            raise TypeError("t2d and d2t must be vectors")
        if any(x.is_meta or x.layout != torch.strided for x in (t2d, d2t)):
            raise TypeError("t2d and d2t must be plain tensors with values")
    except UserError:
        raise
    except _UNREADABLE as error:
        first_line = str(error).split("\n", 1)[0]
        raise UserError(
            f"{path}: no vocabulary map could be read ({first_line}); "
            "expected a safetensors or .pt file with t2d (bool [V]) and d2t (int64 [K])"
        ) from None
    check_map(t2d, d2t, len(t2d), len(d2t))
    for name, size in (("vocab_size", len(t2d)), ("draft_vocab_size", len(d2t))):
        if metadata.get(name, str(size)) != str(size):
            raise UserError(
                f"{path}: its metadata says {name} {metadata[name]}, its tensors {size}; "
                "the file was changed by hand, build the map again"
            )
    return t2d, d2t, metadata


def _buffers(path: Path, tensors: object, metadata: Mapping[str, str]) -> tuple[object, object]:
    """Pick t2d and d2t out of what a file holds, and say what it is where it holds neither."""
    if metadata.get("format", "").startswith("torch-port counts"):
        raise UserError(
            f"{path} holds token counts, not a vocabulary map; build one from it: torch-port vocab "
            f"build {path} --size K --out map.safetensors"
        )
    if not isinstance(tensors, dict):
        raise TypeError(f"it holds a {type(tensors).__name__}, not tensors by name")
    missing = [name for name in ("t2d", "d2t") if name not in tensors]
    if missing:
        raise TypeError(f"it lacks {' and '.join(missing)}")
    return tensors["t2d"], tensors["d2t"]
