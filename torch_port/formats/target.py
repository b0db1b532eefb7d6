"""What a format needs of the target: embedding, kept rows of its head, number of layers.

Read from a local directory, whole or sharded, tied or not, a text model or the text part of a
multimodal one. Nothing is downloaded and nothing is made up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_port.config import DraftConfig
from torch_port.config_eagle3 import Eagle3Config
from torch_port.errors import UserError
from torch_port.formats.checkpoint import EMBEDDING, HEAD
from torch_port.formats.weights import DTYPES, TensorRef, Weights, read_json, read_weights


@dataclass(frozen=True)
class TargetDirectory:
    """A target on disk; each tensor is read when it is asked for."""

    path: Path

    @cached_property
    def config(self) -> dict[str, Any]:
        """The target's config.json. Raises UserError when there is none."""
        if not self.path.is_dir():
            raise UserError(
                f"target {self.path}: no such directory; give a local one (nothing is downloaded)"
            )
        return read_json(self.path / "config.json")

    @property
    def text_config(self) -> dict[str, Any]:
        """The decoder's settings: a multimodal config keeps them under text_config."""
        inner = self.config.get("text_config")
        return inner if isinstance(inner, dict) else self.config

    @property
    def num_layers(self) -> int:
        """The number of decoder layers. Raises UserError when the config does not say."""
        value = self.text_config.get("num_hidden_layers")
        if type(value) is not int:
            raise UserError(f"target {self.path}: config.json has no num_hidden_layers")
        return value

    def check(self, config: DraftConfig | Eagle3Config) -> None:
        """Raise UserError when this cannot be the target that a draft was trained for.

        Its rows may be more than the draft's vocab_size: padding.
        """
        told = self.text_config
        for name, wanted in (
            ("num_hidden_layers", config.num_target_layers),
            ("hidden_size", config.hidden_size),
        ):
            if name in told and told[name] != wanted:
                raise UserError(
                    f"target {self.path}: {name} is {told[name]!r}, but the draft was trained for "
                    f"a target of {wanted}; is it another target?"
                )

    @property
    def verifier(self) -> dict[str, Any]:
        """How a speculators config names this target."""
        return {
            "name_or_path": str(self.path),
            "architectures": list(self.config.get("architectures") or []),
        }

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        inner = self.text_config.get("tie_word_embeddings")
        return (self.config.get("tie_word_embeddings") if inner is None else inner) is True

    @cached_property
    def weights(self) -> Weights:
        """The target's embeddings and heads, none read yet; its layers may be quantised."""
        return read_weights(self.path, lambda name: name.endswith((EMBEDDING, HEAD)))

    def embedding(self, vocab_size: int, hidden_size: int) -> TensorRef:
        """Return E [V, H]. Raises UserError when there is none, or of another size."""
        ref = self._find(EMBEDDING)
        return self._rows(ref, vocab_size, hidden_size, torch.arange(vocab_size))

    def head_rows(self, kept_K: Tensor, vocab_size: int, hidden_size: int) -> TensorRef:
        """Return the kept rows of U, [K, H]. A tied target's head is its embedding."""
        return self._rows(self.head(), vocab_size, hidden_size, kept_K)

    def head(self) -> TensorRef:
        """Return all of U, padding rows too. Raises UserError when there is none."""
        return self._find(EMBEDDING if self.tied else HEAD)

    def _find(self, name: str) -> TensorRef:
        names = [n for n in self.weights if n == name or n.endswith(f".{name}")]
        if len(names) != 1:
            tied = "" if name == EMBEDDING else " (tie_word_embeddings is not true)"
            raise UserError(
                f"target {self.path}: expected one {name}{tied}, found {names or 'none'} among its "
                f"embeddings and heads {sorted(self.weights)}"
            )
        ref = self.weights[names[0]]
        if not DTYPES[ref.dtype].is_floating_point or len(ref.shape) != 2:
            raise UserError(f"{ref.where}: expected a matrix of floating numbers, not {ref.dtype}")
        return ref

    def _rows(self, ref: TensorRef, vocab_size: int, hidden: int, rows: Tensor) -> TensorRef:
        """Choose rows. Rows beyond V are padding of the target's and no id of the draft's."""
        if ref.shape[0] < vocab_size or ref.shape[1] != hidden:
            raise UserError(
                f"{ref.where}: shape {list(ref.shape)}, but the draft has vocab_size {vocab_size} "
                f"and hidden_size {hidden}; is it another target?"
            )
        if len(rows) == ref.shape[0]:
            return ref
        return TensorRef(
            ref.dtype,
            (len(rows), hidden),
            lambda: ref.load().index_select(0, rows),
            ref.where,
        )
