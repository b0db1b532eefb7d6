"""Every size and step count of the demo, in two instances: FULL and QUICK."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

# Part of the fingerprint: raise it when a stage's code changes what it produces, else a cache
# of the older code would be taken for this one's.
_STAGES_VERSION = 1

_LIBRARIES = ("torch", "transformers", "tokenizers")


def _draft(default: Any) -> Any:
    """A field that only the draft reads: it does not change what the cache holds."""
    return field(default=default, metadata={"draft": True})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Sizes and steps of the demo. Fields above `draft_vocab_size` decide what is cached."""

    name: str
    seed: int = 0

    # Corpus and tokenizer.
    heldout_percent: int = 10
    max_modules: int | None = None
    max_answer_characters: int = 4000
    vocab_size: int = 8192
    max_length: int = 256

    # Target.
    hidden_size: int = 160
    intermediate_size: int = 448
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 32
    rope_theta: float = 10000.0
    target_steps: int
    target_batch: int
    target_lr: float
    target_warmup: int
    target_weight_decay: float = 0.1

    # Features.
    target_layer_ids: tuple[int, ...] = (0, 1, 2)
    capture_train: int
    capture_heldout: int
    capture_batch: int = 16

    # Draft: the lead's to tune.
    draft_vocab_size: int = _draft(2048)
    block_size: int = _draft(8)
    draft_layers: int = _draft(2)
    markov_rank: int = _draft(32)
    anchors: int = _draft(32)
    draft_steps: int = _draft(300)
    draft_batch: int = _draft(4)
    draft_lr: float = _draft(1e-3)
    draft_warmup: int = _draft(20)
    draft_seed: int = _draft(0)
    parity_steps: int = _draft(10)
    # What τ on held-out modules must gain by training for the demo to have worked.
    tau_gain: float = _draft(0.3)

    def fingerprint(self) -> str:
        """Name of everything the cache holds: corpus, tokenizer, target and features.

        Returns:
            sha256, in hexadecimal, over the fields that no draft field is, the interpreter's
            version (the corpus is its standard library) and those of the libraries that train.
        """
        fields = {
            entry.name: getattr(self, entry.name)
            for entry in dataclasses.fields(self)
            if not entry.metadata.get("draft")
        }
        material = {
            "stages": _STAGES_VERSION,
            "python": platform.python_version(),
            "libraries": {name: version(name) for name in _LIBRARIES},
            "recipe": fields,
        }
        return hashlib.sha256(json.dumps(material, sort_keys=True).encode()).hexdigest()


FULL = Recipe(
    name="full",
    target_steps=650,
    target_batch=16,
    target_lr=3e-3,
    target_warmup=60,
    capture_train=1500,
    capture_heldout=160,
)

QUICK = Recipe(
    name="quick",
    target_steps=140,
    target_batch=16,
    target_lr=3e-3,
    target_warmup=15,
    capture_train=200,
    capture_heldout=50,
    draft_steps=60,
    draft_warmup=8,
    parity_steps=4,
    tau_gain=0.1,
)
