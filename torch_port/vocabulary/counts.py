"""Token counts with what they were made from: their file, and the cache of them. No torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from torch_port.data.atomic import atomic_file
from torch_port.errors import UserError
from torch_port.vocabulary.stable import stable_bytes

_FORMAT = "torch-port counts 2"
_METADATA = (
    "tokenizer_size",
    "samples",
    "truncated",
    "chat_template",
    "template_fingerprint",
    "max_length",
    "corpus_fingerprint",
    "tokenizer_fingerprint",
    "target_fingerprint",
)


@dataclass(frozen=True)
class TokenCounts:
    """Counts of one corpus.

    `counts` int64 [V] over supervised tokens; `mass` float64 [V], the teacher's summed
    probability, or None; `special_ids` and `byte_ids` int64, the tokenizer's ids worth pinning;
    `tokenizer_size` V_tok; `samples` read, of which `truncated` were cut. `chat_template` (its
    name), `template_fingerprint` and `max_length` say how conversations became tokens; they are
    empty and 0 for features, which hold tokens already. `corpus_fingerprint` is that of contracts
    §1; `contents` holds the sha256 of every file's content, or of every feature directory's tokens,
    whatever they are called and however they are counted. `target_fingerprint` is of the head
    behind `mass`, else empty.
    """

    counts: NDArray[np.int64]
    mass: NDArray[np.float64] | None
    special_ids: NDArray[np.int64]
    byte_ids: NDArray[np.int64]
    tokenizer_size: int
    samples: int
    truncated: int
    corpus_fingerprint: str
    tokenizer_fingerprint: str
    contents: tuple[str, ...]
    chat_template: str = ""
    template_fingerprint: str = ""
    max_length: int = 0
    target_fingerprint: str = ""

    @property
    def source(self) -> str:
        """How the tokens were made."""
        if not self.chat_template:
            return "features"
        return f"conversations, {self.chat_template}, max_length {self.max_length}"

    @property
    def supervised(self) -> int:
        """Supervised tokens of the corpus."""
        return int(self.counts.sum())

    @property
    def distinct(self) -> int:
        """Ids that occur at all."""
        return int(np.count_nonzero(self.counts))


def save_counts(path: Path, counts: TokenCounts) -> None:
    """Write a counts file (safetensors), complete or not at all. Its directory exists."""
    tensors = {name: getattr(counts, name) for name in ("counts", "special_ids", "byte_ids")}
    if counts.mass is not None:
        tensors["mass"] = counts.mass
    metadata = {name: str(getattr(counts, name)) for name in _METADATA}
    metadata["contents"] = json.dumps(counts.contents)
    content = stable_bytes(save(tensors, metadata | {"format": _FORMAT}))
    with atomic_file(path) as stream:
        stream.write(content)


def load_counts(path: Path) -> TokenCounts:
    """Read a counts file.

    Raises UserError for a file that is absent, damaged, of another kind, or inconsistent.
    """
    try:
        with safe_open(path, "np") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        _check_kind(metadata, tensors)
        counts = TokenCounts(
            counts=tensors["counts"],
            mass=tensors.get("mass"),
            special_ids=tensors["special_ids"],
            byte_ids=tensors["byte_ids"],
            tokenizer_size=int(metadata["tokenizer_size"]),
            samples=int(metadata["samples"]),
            truncated=int(metadata["truncated"]),
            contents=tuple(map(str, json.loads(metadata["contents"]))),
            chat_template=metadata["chat_template"],
            template_fingerprint=metadata["template_fingerprint"],
            max_length=int(metadata["max_length"]),
            corpus_fingerprint=metadata["corpus_fingerprint"],
            tokenizer_fingerprint=metadata["tokenizer_fingerprint"],
            target_fingerprint=metadata["target_fingerprint"],
        )
        _check(counts)
    except (OSError, SafetensorError, LookupError, TypeError, ValueError) as error:
        first_line = str(error).split("\n", 1)[0]
        if isinstance(error, KeyError):
            first_line = f"it lacks {error.args[0]}"
        raise UserError(
            f"{path}: no token counts could be read ({first_line}); "
            "expected a file that `torch-port vocab count --out` wrote"
        ) from None
    return counts


def cache_key(
    corpus_fingerprint: str, tokenizer_fingerprint: str, vocab_size: int, target_fingerprint: str
) -> str:
    """Return the sha256 of all that counts depend on (contracts §1).

    The corpus fingerprint covers files, chat template and maximum length.
    """
    parts = [_FORMAT, corpus_fingerprint, tokenizer_fingerprint, vocab_size, target_fingerprint]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def read_cache(directory: Path | None, key: str) -> TokenCounts | None:
    """Return cached counts, or None when there are none or their file is damaged."""
    if directory is None:
        return None
    try:
        return load_counts(_place(directory, key))
    except UserError:
        return None


def write_cache(directory: Path | None, key: str, counts: TokenCounts) -> None:
    """Keep counts for the next time; `directory` is made where it is missing.

    Raises UserError when it cannot be written.
    """
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        save_counts(_place(directory, key), counts)
    except OSError as error:
        raise UserError(
            f"{directory}: the cache of token counts cannot be written "
            f"({error.strerror or error}). Set TORCH_PORT_CACHE to a directory you may write to, "
            "or add --no-cache"
        ) from None


def _place(directory: Path, key: str) -> Path:
    return directory / f"{key}.safetensors"


def _check_kind(metadata: dict[str, str], tensors: dict[str, Any]) -> None:
    kind = metadata.get("format", "")
    if kind == _FORMAT:
        return
    if kind.startswith("torch-port counts"):
        raise ValueError("another version wrote it: count again")
    raise ValueError("it is a vocabulary map" if "t2d" in tensors else "it is of another kind")


def _check(counts: TokenCounts) -> None:
    """Refuse arrays that no counting could have made."""
    V = len(counts.counts)
    if counts.counts.dtype != np.int64 or counts.counts.ndim != 1 or (counts.counts < 0).any():
        raise ValueError(f"counts are {counts.counts.dtype} of shape {counts.counts.shape}")
    if not 1 <= counts.tokenizer_size <= V or counts.counts[counts.tokenizer_size :].any():
        raise ValueError(f"tokenizer_size {counts.tokenizer_size} does not fit the counts")
    if counts.mass is not None and (counts.mass.dtype != np.float64 or counts.mass.shape != (V,)):
        raise ValueError(f"mass is {counts.mass.dtype} of shape {counts.mass.shape}")
    for ids in (counts.special_ids, counts.byte_ids):
        if ids.dtype != np.int64 or (ids < 0).any() or (ids >= counts.tokenizer_size).any():
            raise ValueError("the ids to pin are no ids of the tokenizer")
