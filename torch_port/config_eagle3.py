"""EAGLE3's draft and objective configuration (spec sheet §13)."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from torch_port.config import Settings, check_draft_vocab_size, target_layer_problem

CAPTURED = 3  # low, middle and high target layer


class Eagle3Config(Settings):
    """Sizes and options of one EAGLE3 draft, flat and checked.

    `draft_vocab_size` is K, already resolved (`check_draft_vocab_size`); `target_layer_ids` names
    the low, middle and high layer whose states are fused, in that order. Source: spec sheet §13.
    """

    vocab_size: int = Field(ge=1)
    draft_vocab_size: int
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    rms_norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    num_target_layers: int = Field(ge=1)
    target_layer_ids: tuple[int, ...]
    initializer_range: float = Field(default=0.02, gt=0)

    @property
    def prunes(self) -> bool:
        """True when the draft predicts fewer ids than the target has (K < V)."""
        return self.draft_vocab_size < self.vocab_size

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_draft_vocab_size(self.draft_vocab_size, self.vocab_size)
        layers = target_layer_problem(self.target_layer_ids, self.num_target_layers)
        ascending = list(self.target_layer_ids) == sorted(self.target_layer_ids)
        rules = [
            (
                self.num_attention_heads % self.num_key_value_heads != 0,
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})",
            ),
            (layers is not None, f"target_layer_ids: {layers}"),
            (
                len(self.target_layer_ids) != CAPTURED or not ascending,
                f"target_layer_ids {list(self.target_layer_ids)} must be {CAPTURED} layers, "
                "ascending: fc reads the low, the middle and the high one in this order",
            ),
        ]
        problems = [text for wrong, text in rules if wrong]
        if problems:
            raise ValueError("; ".join(problems))
        return self


class Eagle3Objective(Settings):
    """Training-time test over `steps` steps; step i's loss weighs `step_decay`**i (§13)."""

    steps: int = Field(default=7, ge=1)
    step_decay: float = Field(default=0.8, gt=0)
