"""Draft and objective configuration: the field's `hf` schema, read strictly.

A config that says something this version would ignore is refused, because an ignored field is a
draft that differs from the one its author trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from torch_port.errors import NotBuiltError, UserError
from torch_port.setting_errors import explain

LayerType = Literal["full_attention", "sliding_attention"]
FULL: LayerType = "full_attention"
SLIDING: LayerType = "sliding_attention"
HEAD_TYPES = ("vanilla", "gated", "rnn")

# Where the slots of a block predict (spec sheet §3): slot k predicts x[a+1+k], or x[a+k].
BlockLayout = Literal["anchor-first", "bonus-anchor"]
ANCHOR_FIRST: BlockLayout = "anchor-first"
BONUS_ANCHOR: BlockLayout = "bonus-anchor"
# By projector_type. A draft read in the other layout looks fine in every loss and is rejected
# almost always by the target.
_LAYOUTS: dict[str, BlockLayout] = {"dspark": ANCHOR_FIRST, "dflash": BONUS_ANCHOR}
_ARCHITECTURES = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel"}
# What a draft without heads says of them, where it says anything.
_NO_HEADS = {
    "markov_rank": 0,
    "markov_head_type": "none",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}

# Fields of the hf schema with one value that this family supports; any other value is refused.
_FIXED = {
    "model_type": ("qwen3",),
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "tie_word_embeddings": (False,),
}


def check_draft_vocab_size(value: object, vocab_size: int) -> int:
    """Resolve `draft_vocab_size` to K.

    Arguments: `value`, what a config or a user gave (`None` means V); `vocab_size`, V.
    Returns K with 1 ≤ K ≤ V.
    Raises UserError for bools, floats and other non-integers, for K < 1 and for K > V; nothing
    is coerced. Source: contracts §1.

    >>> check_draft_vocab_size(None, 16)
    16
    """
    if value is None:
        return vocab_size
    if isinstance(value, bool) or not isinstance(value, int):
        raise UserError(
            f"draft_vocab_size must be a whole number or null, not {value!r} "
            f"({type(value).__name__}); write the number of target ids to keep, 1 to {vocab_size}"
        )
    if not 1 <= value <= vocab_size:
        raise UserError(
            f"draft_vocab_size is {value}, but must lie in 1 … {vocab_size} (the target's "
            "vocab_size); leave it out, or null, for an unpruned draft"
        )
    return value


class Settings(BaseModel):
    """A frozen set of settings that refuses unknown names; a bad value is one `UserError`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(explain(error, type(self).__name__, type(self))) from None


class DraftConfig(Settings):
    """Sizes and options of one DSpark or DFlash draft, flat and checked.

    `projector_type` says which, and with it the layout of the blocks: a DFlash draft has no heads,
    and γ inputs give it γ − 1 predictions. `draft_vocab_size` is K, already resolved;
    `markov_head_type` is "none" exactly when `markov_rank` is 0. Source: spec sheet §1, §3, §5, §6;
    contracts §4 for the file's schema.
    """

    projector_type: Literal["dspark", "dflash"] = "dspark"
    vocab_size: int = Field(ge=1)
    draft_vocab_size: int
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_hidden_layers: int = Field(ge=1)
    num_attention_heads: int = Field(ge=1)
    num_key_value_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2, multiple_of=2)
    rms_norm_eps: float = Field(gt=0)
    rope_theta: float = Field(gt=0)
    layer_types: tuple[LayerType, ...]
    sliding_window: int | None = Field(default=None, ge=1)
    block_size: int = Field(ge=1)
    num_target_layers: int = Field(ge=1)
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    mask_token_id: int = Field(ge=0)
    markov_rank: int = Field(ge=0)
    markov_head_type: Literal["vanilla", "gated", "rnn", "none"]
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    initializer_range: float = Field(default=0.02, gt=0)

    @property
    def prunes(self) -> bool:
        """True when the draft predicts fewer ids than the target has (K < V)."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def block_layout(self) -> BlockLayout:
        """Where the slots of a block predict (§3): part of the checkpoint's contract."""
        return _LAYOUTS[self.projector_type]

    @property
    def predictions(self) -> int:
        """How many slots of a block are trained and proposed: γ, or γ − 1 after a bonus anchor."""
        return self.block_size - (self.block_layout == BONUS_ANCHOR)

    @model_validator(mode="after")
    def _consistent(self) -> DraftConfig:
        check_draft_vocab_size(self.draft_vocab_size, self.vocab_size)
        problems = [text for wrong, text in self._rules() if wrong]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _rules(self) -> list[tuple[bool, str]]:
        markov = self.markov_rank > 0
        layers = target_layer_problem(self.target_layer_ids, self.num_target_layers)
        headless = self.projector_type == "dflash"
        return [
            (
                headless and any(getattr(self, name) != x for name, x in _NO_HEADS.items()),
                "a dflash draft has no Markov head and no confidence head; set markov_rank to 0 "
                "and enable_confidence_head to false, or leave them out",
            ),
            (
                self.predictions < 1,
                f"block_size {self.block_size} leaves a dflash draft no slot to predict, as slot 0 "
                "holds the anchor; use 2 or more",
            ),
            (
                self.num_attention_heads % self.num_key_value_heads != 0,
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})",
            ),
            (
                len(self.layer_types) != self.num_hidden_layers,
                f"layer_types names {len(self.layer_types)} layers, num_hidden_layers is "
                f"{self.num_hidden_layers}; give one type per layer",
            ),
            (
                SLIDING in self.layer_types and self.sliding_window is None,
                "a sliding_attention layer needs sliding_window; set it to the window's width",
            ),
            (
                self.mask_token_id >= self.vocab_size,
                f"mask_token_id {self.mask_token_id} is no row of the {self.vocab_size}-row target",
            ),
            (layers is not None, f"target_layer_ids: {layers}"),
            (
                markov != (self.markov_head_type != "none"),
                f"markov_rank {self.markov_rank} does not go with markov_head_type "
                f"{self.markov_head_type!r}; rank 0 means no Markov head",
            ),
            (
                self.confidence_head_with_markov and not (self.enable_confidence_head and markov),
                "confidence_head_with_markov needs enable_confidence_head, and markov_rank > 0 "
                "because it reads W1",
            ),
        ]

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> DraftConfig:
        """Read the field's `config.json` (see contracts §4).

        Arguments: `raw`, the parsed file.
        Returns the checked config.
        Raises NotBuiltError for a layout, head or layer type that this version does not have;
        UserError for unknown, missing or inconsistent fields, naming each with its value.
        """
        nested = raw.get("dflash_config") if isinstance(raw, Mapping) else None
        if not isinstance(nested, Mapping):
            raise UserError("draft config: dflash_config is missing, or no mapping")
        flat = {name: value for name, value in raw.items() if name != "dflash_config"}
        if not all(isinstance(name, str) for name in (*flat, *nested)):
            raise UserError("draft config: field names must be strings")
        twice = sorted(set(flat) & set(nested))
        if twice:
            raise UserError(f"draft config: {twice} stand both at the top and in dflash_config")
        flat.update(nested)
        _refuse_not_built(flat)
        mode = flat.pop("attention_mode", "gqa")
        heads, kv_heads = flat.get("num_attention_heads"), flat.get("num_key_value_heads")
        if mode not in ("gqa", "mha") or (mode == "mha" and heads != kv_heads):
            raise UserError(
                f"attention_mode {mode!r} does not go with {heads} heads and {kv_heads} kv heads; "
                "use 'gqa', or 'mha' with equal numbers"
            )
        if flat["projector_type"] == "dflash":
            flat = _NO_HEADS | flat
        if flat.get("markov_rank") == 0:
            flat["markov_head_type"] = "none"
        if type(flat.get("vocab_size")) is int:  # anything else is refused below, by name
            flat["draft_vocab_size"] = check_draft_vocab_size(
                flat.get("draft_vocab_size"), flat["vocab_size"]
            )
        for name in ("layer_types", "target_layer_ids"):
            if isinstance(flat.get(name), list):
                flat[name] = tuple(flat[name])
        return cls(**flat)

    def to_hf(self) -> dict[str, Any]:
        """Write the config in the field's schema; `from_hf` of it gives an equal config."""
        values = self.model_dump(mode="json")
        nested = ("target_layer_ids", "mask_token_id", *_NO_HEADS, "projector_type")
        inner = {name: values.pop(name) for name in nested}
        if self.projector_type == "dflash":
            inner = {name: value for name, value in inner.items() if name not in _NO_HEADS}
        elif self.markov_rank == 0:
            inner["markov_head_type"] = "vanilla"  # the schema has no "none": rank 0 says it
        mode = "mha" if self.num_attention_heads == self.num_key_value_heads else "gqa"
        fixed: dict[str, Any] = {"architectures": [_ARCHITECTURES[self.projector_type]]}
        fixed |= {name: allowed[0] for name, allowed in _FIXED.items()}
        return fixed | values | {"dflash_config": inner | {"attention_mode": mode}}


def target_layer_problem(ids: Sequence[int], num_layers: int) -> str | None:
    """Say what is wrong with the target layers to capture, or None.

    Layer i means the *output* of decoder layer i, 0-based. The last one is refused: transformers
    hands its output out normalised, so a server could not supply it. Source: contracts §4.

    >>> target_layer_problem([0, 2], 4) is None
    True
    """
    listed = list(ids)
    if not listed:
        problem = "none is named"
    elif len(set(listed)) < len(listed):
        problem = f"{listed} repeats a layer"
    elif min(listed) < 0 or max(listed) >= num_layers:
        problem = f"{listed} is out of range"
    elif num_layers - 1 in listed:
        problem = f"{listed} has the last layer, whose output comes out normalised"
    else:
        return None
    return f"{problem}; name distinct layers from 0 to {num_layers - 2} of {num_layers}"


def _refuse_not_built(flat: dict[str, Any]) -> None:
    """Take the fields with a single supported value out of `flat`, or say what is not built."""
    projector = flat.get("projector_type")
    if not isinstance(projector, str) or projector not in _LAYOUTS:
        raise NotBuiltError(
            f"projector_type {projector!r} is not built; 'dspark' (anchor-first) and 'dflash' "
            "(bonus-anchor) are"
        )
    named = flat.pop("architectures", [_ARCHITECTURES[projector]])
    if named != [_ARCHITECTURES[projector]]:
        raise NotBuiltError(
            f"architectures {named!r} is not built with projector_type {projector!r}; "
            f"[{_ARCHITECTURES[projector]!r}] is"
        )
    for name, allowed in _FIXED.items():
        value = flat.pop(name, allowed[0])
        if value not in allowed:
            raise NotBuiltError(f"{name} {value!r} is not built; {allowed[0]!r} is")
    head = flat.get("markov_head_type", "none" if projector == "dflash" else None)
    known = (*HEAD_TYPES, "none") if projector == "dflash" else HEAD_TYPES
    if head not in known:  # whatever the rank: a type that is not known is not skipped
        raise NotBuiltError(f"markov_head_type {head!r} is not built; {', '.join(HEAD_TYPES)} are")
    layer_types = flat.get("layer_types")
    for layer_type in layer_types if isinstance(layer_types, list | tuple) else ():
        if layer_type not in (FULL, SLIDING):
            raise NotBuiltError(f"layer_types {layer_type!r} is not built; {FULL}, {SLIDING} are")


class ObjectiveConfig(Settings):
    """Weights of the three terms and the decay along the block. Source: spec sheet §3.6, §8.

    `loss_decay_gamma` null means no decay; `detach_confidence` keeps the confidence term's
    gradient out of the backbone and of W1.
    """

    ce_alpha: float = Field(default=0.1, ge=0)
    l1_alpha: float = Field(default=0.9, ge=0)
    confidence_alpha: float = Field(default=1.0, ge=0)
    loss_decay_gamma: float | None = Field(default=None, gt=0)
    detach_confidence: bool = False


class DFlashObjectiveConfig(Settings):
    """What weighs a DFlash draft's cross entropy along the block. Source: spec sheet §12.

    `loss_decay_gamma`: exp(−(k−1)/it) at slot k; null means no decay. `dpace` replaces the decay by
    weights read off the draft's own probabilities: "cumulative", "continuation", or their product
    "both"; `beta`, read by it alone and 0.5 unless given, is how much of each probability is taken
    as 1. Without `dpace` it is null.
    """

    loss_decay_gamma: float | None = Field(default=None, gt=0)
    dpace: Literal["none", "cumulative", "continuation", "both"] = "none"
    beta: float | None = Field(default=None, gt=0, le=1)

    @model_validator(mode="before")
    @classmethod
    def _default_beta(cls, values: dict[str, Any]) -> dict[str, Any]:
        with_dpace = values.get("dpace", "none") != "none"
        return values | {"beta": 0.5} if with_dpace and values.get("beta") is None else values

    @model_validator(mode="after")
    def _consistent(self) -> DFlashObjectiveConfig:
        if self.dpace == "none" and self.beta is not None:
            raise ValueError(
                f"beta {self.beta} would be ignored, because dpace is 'none'; leave out beta, or "
                "set dpace to 'cumulative', 'continuation' or 'both'"
            )
        if self.dpace != "none" and self.loss_decay_gamma is not None:
            raise ValueError(
                f"dpace {self.dpace!r} replaces the decay; leave out loss_decay_gamma "
                f"({self.loss_decay_gamma}), or dpace"
            )
        return self
