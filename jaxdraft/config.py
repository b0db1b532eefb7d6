"""What a draft is (`DraftConfig`) and what it is trained for (`ObjectiveConfig`)."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from jaxdraft.checks import (
    as_tuple,
    check_bool,
    check_fields,
    check_sizes,
    check_target_layers,
    is_int,
    is_real,
)

FULL_ATTENTION = "full_attention"
SLIDING_ATTENTION = "sliding_attention"
MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")
DSPARK = "dspark"
DFLASH = "dflash"
LAYOUTS = {DSPARK: "anchor-first", DFLASH: "bonus-anchor"}

_REQUIRED = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "rms_norm_eps",
        "rope_theta",
        "layer_types",
        "block_size",
        "num_target_layers",
        "dflash_config",
    }
)
_OPTIONAL = frozenset(
    {
        "architectures",
        "model_type",
        "draft_vocab_size",
        "sliding_window",
        "hidden_act",
        "attention_bias",
        "tie_word_embeddings",
        "initializer_range",
    }
)
_DFLASH_REQUIRED = frozenset({"projector_type", "target_layer_ids", "mask_token_id"})
_DFLASH_OPTIONAL = frozenset({"attention_mode"})
# Required of a dspark draft; a dflash draft may leave them out and can have no other values.
_NO_HEADS: dict[str, Any] = {
    "markov_rank": 0,
    "markov_head_type": "none",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "block_size",
    "num_target_layers",
)

# Fields of the schema with one value that is built; any other value changes the numbers.
_ARCHITECTURES = {DSPARK: ["DSparkDraftModel"], DFLASH: ["DFlashDraftModel"]}
_ONLY_BUILT: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}


class NotBuilt(NotImplementedError):  # noqa: N818 - a statement, not a fault
    """A value that the schema knows and this specification does not cover yet.

    The message names the field, the value and what is built instead.
    """


@dataclass(frozen=True)
class DraftConfig:
    """The draft of one checkpoint: sizes, layers, heads, layout (sheet §1, §4–§6).

    `draft_vocab_size` is resolved: K, with K = V for an unpruned draft. `markov_head_type` is
    "none" exactly when `markov_rank` is 0. `projector_type` decides the layout: "dspark" is
    anchor-first, "dflash" is bonus-anchor and has neither head.

    Raises:
        ValueError: a value is off or two fields contradict each other; the message names them.
        NotBuilt: a projector, layer or Markov head type outside this specification.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float | int
    rope_theta: float | int
    layer_types: tuple[str, ...]
    sliding_window: int | None
    block_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    markov_rank: int
    markov_head_type: str
    enable_confidence_head: bool
    confidence_head_with_markov: bool
    initializer_range: float | int = 0.02
    projector_type: str = DSPARK

    def __post_init__(self) -> None:
        _check_config(self)

    @property
    def prunes(self) -> bool:
        """True when the draft vocabulary is smaller than the target's, K < V (sheet §1)."""
        return self.draft_vocab_size < self.vocab_size

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any]) -> "DraftConfig":
        """Read the field's `config.json` schema (contracts §4, format `hf`).

        Args:
            mapping: the parsed JSON; `draft_vocab_size` at the top level, the draft's own
                fields under `dflash_config`.

        Returns:
            The config, with `draft_vocab_size` resolved to V where it is absent or null.

        Raises:
            ValueError: unknown, missing, off or contradicting fields, each named with its value
                and a remedy.
            NotBuilt: a value the schema allows and this specification does not cover.
        """
        check_fields("the draft config", mapping, _REQUIRED, _OPTIONAL)
        dflash = mapping["dflash_config"]
        if not isinstance(dflash, Mapping):
            raise ValueError(f"dflash_config: expected an object of draft fields, got {dflash!r}")
        heads = frozenset(_NO_HEADS)
        if dflash.get("projector_type") == DFLASH:
            check_fields("dflash_config", dflash, _DFLASH_REQUIRED, _DFLASH_OPTIONAL | heads)
        else:
            check_fields("dflash_config", dflash, _DFLASH_REQUIRED | heads, _DFLASH_OPTIONAL)
        _check_projector(dflash["projector_type"])
        _check_only_built(mapping, dflash["projector_type"])
        _check_attention_mode(mapping, dflash)
        top = {field: mapping[field] for field in _REQUIRED - {"dflash_config", "layer_types"}}
        own = {**_NO_HEADS, **{f: dflash[f] for f in heads & set(dflash)}}
        own |= {f: dflash[f] for f in ("projector_type", "mask_token_id")}
        own["markov_head_type"] = _resolved_head_type(own)
        if "initializer_range" in mapping:
            top["initializer_range"] = mapping["initializer_range"]
        requested = mapping.get("draft_vocab_size")
        values = {
            **top,
            **own,
            "draft_vocab_size": mapping["vocab_size"] if requested is None else requested,
            "sliding_window": mapping.get("sliding_window"),
            "layer_types": as_tuple("layer_types", mapping["layer_types"]),
            "target_layer_ids": as_tuple("target_layer_ids", dflash["target_layer_ids"]),
        }
        # JSON may hold any type: refuse by name before a DraftConfig with wrong types exists.
        _check_config(SimpleNamespace(**{"initializer_range": 0.02, **values}))
        return cls(**values)


@dataclass(frozen=True)
class ObjectiveConfig:
    """The coefficients of the loss (sheet §8) and of the position weights (§3.6).

    `loss_decay_gamma` is the sheet's decay; null means no decay. `detach_confidence` cuts both
    inputs of the confidence head from its gradient.

    Raises:
        ValueError: a negative or non-finite coefficient, a decay that is not positive, all named.
    """

    ce_alpha: float | int = 0.1
    l1_alpha: float | int = 0.9
    confidence_alpha: float | int = 1.0
    loss_decay_gamma: float | int | None = None
    detach_confidence: bool = False

    def __post_init__(self) -> None:
        for field in ("ce_alpha", "l1_alpha", "confidence_alpha"):
            value = getattr(self, field)
            if not (is_real(value) and value >= 0):
                raise ValueError(f"{field}: expected a finite number >= 0, got {value!r}")
        check_decay(self.loss_decay_gamma)
        check_bool("detach_confidence", self.detach_confidence)


def check_layout(config: DraftConfig, projector_type: str) -> None:
    """Refuse a draft of the other layout, whose numbers would look fine and mean nothing.

    Args:
        config: what the draft is.
        projector_type: the type whose layout the caller computes.

    Raises:
        ValueError: the config's `projector_type` is another one.

    Source: sheet §3, last paragraph.
    """
    if config.projector_type != projector_type:
        raise ValueError(
            f"projector_type: expected {projector_type!r} (the {LAYOUTS[projector_type]} layout), "
            f"got {config.projector_type!r} ({LAYOUTS[config.projector_type]}); the target rejects "
            "nearly all of a draft used with the other layout than it was trained with: use "
            f"the functions for {config.projector_type!r}"
        )


def check_decay(decay: float | int | None) -> None:
    """Refuse a `loss_decay_gamma` that is neither a positive number nor null (§3.6)."""
    if decay is not None and not (is_real(decay) and decay > 0):
        raise ValueError(
            f"loss_decay_gamma: expected a positive number, or null for no decay; got {decay!r}"
        )


def _check_projector(projector_type: object) -> None:
    if projector_type not in tuple(LAYOUTS):
        raise NotBuilt(
            f"projector_type = {projector_type!r} is not built; built are "
            + " and ".join(f"{name!r} ({layout})" for name, layout in LAYOUTS.items())
        )


def _check_only_built(mapping: Mapping[str, Any], projector_type: str) -> None:
    for field, built in {"architectures": _ARCHITECTURES[projector_type], **_ONLY_BUILT}.items():
        if field in mapping and mapping[field] != built:
            raise NotBuilt(
                f"{field} = {mapping[field]!r} is not built; only {built!r} is, beside "
                f"projector_type = {projector_type!r}"
            )


def _resolved_head_type(own: Mapping[str, Any]) -> Any:
    named = own["markov_head_type"]
    if named not in (*MARKOV_HEAD_TYPES, "none"):
        raise NotBuilt(
            f"markov_head_type = {named!r} is not built; built are {', '.join(MARKOV_HEAD_TYPES)}, "
            "and none with markov_rank 0"
        )
    # The field's configs keep a type beside rank 0; the rank decides (sheet §6, "none (r = 0)").
    return "none" if own["markov_rank"] == 0 else named


def _check_attention_mode(mapping: Mapping[str, Any], dflash: Mapping[str, Any]) -> None:
    mode = dflash.get("attention_mode", "gqa")
    if mode not in ("mha", "gqa"):
        raise NotBuilt(f"attention_mode = {mode!r} is not built; only 'mha' and 'gqa' are")
    heads, kv_heads = mapping["num_attention_heads"], mapping["num_key_value_heads"]
    if mode == "mha" and heads != kv_heads:
        raise ValueError(
            f"attention_mode 'mha' contradicts num_key_value_heads = {kv_heads!r} with "
            f"num_attention_heads = {heads!r}: make them equal or use 'gqa'"
        )


def _check_config(config: "DraftConfig | SimpleNamespace") -> None:
    _check_projector(config.projector_type)
    check_sizes(config, _COUNTS)
    _check_block(config)
    _check_layers(config)
    check_target_layers(config)
    _check_heads(config)


def _check_block(config: DraftConfig | SimpleNamespace) -> None:
    if config.projector_type == DFLASH and config.block_size < 2:
        raise ValueError(
            "block_size = 1 leaves projector_type 'dflash' nothing to predict: γ inputs give γ−1 "
            "predictions; choose 2 or more"
        )


def _check_layers(config: DraftConfig | SimpleNamespace) -> None:
    for layer_type in config.layer_types:
        if layer_type not in (FULL_ATTENTION, SLIDING_ATTENTION):
            raise NotBuilt(
                f"layer_types holds {layer_type!r}, which is not built; built are "
                f"{FULL_ATTENTION!r} and {SLIDING_ATTENTION!r}"
            )
    if len(config.layer_types) != config.num_hidden_layers:
        raise ValueError(
            f"layer_types names {len(config.layer_types)} layers but num_hidden_layers = "
            f"{config.num_hidden_layers}: name each layer once"
        )
    window = config.sliding_window
    if window is not None and (not is_int(window) or window < 1):
        raise ValueError(f"sliding_window: expected a whole number >= 1 or null, got {window!r}")
    if window is None and SLIDING_ATTENTION in config.layer_types:
        raise ValueError(
            f"sliding_window is null but layer_types holds {SLIDING_ATTENTION!r}: give the window"
        )


def _check_heads(config: DraftConfig | SimpleNamespace) -> None:
    V, mask, rank = config.vocab_size, config.mask_token_id, config.markov_rank
    if not is_int(mask) or not 0 <= mask < V:
        raise ValueError(f"mask_token_id: expected an id from 0 to {V - 1}, got {mask!r}")
    if not is_int(rank) or rank < 0:
        raise ValueError(f"markov_rank: expected a whole number >= 0, got {rank!r}")
    if config.markov_head_type not in (*MARKOV_HEAD_TYPES, "none"):
        raise NotBuilt(f"markov_head_type = {config.markov_head_type!r} is not built")
    if (rank == 0) != (config.markov_head_type == "none"):
        raise ValueError(
            f"markov_rank = {rank} contradicts markov_head_type = {config.markov_head_type!r}: "
            "'none' has rank 0 and every other type a rank above 0"
        )
    check_bool("enable_confidence_head", config.enable_confidence_head)
    check_bool("confidence_head_with_markov", config.confidence_head_with_markov)
    if config.confidence_head_with_markov and not (config.enable_confidence_head and rank):
        raise ValueError(
            "confidence_head_with_markov is true, which needs enable_confidence_head = true and "
            f"markov_rank > 0; got {config.enable_confidence_head} and {rank}: set it to false"
        )
    if config.projector_type == DFLASH and (rank or config.enable_confidence_head):
        raise ValueError(
            f"projector_type 'dflash' has no heads, but markov_rank = {rank} and "
            f"enable_confidence_head = {config.enable_confidence_head}: set 0 and false, or use "
            "projector_type 'dspark'"
        )
