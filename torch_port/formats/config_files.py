"""config.json of the `hf` and `deepspec` formats, to and from a draft's config.

Fields are known, neutral, or refused. Neutral ones (`transformers_version`, `use_cache`) change no
number of a draft; they are kept and written back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch_port.config import FULL, SLIDING, DraftConfig
from torch_port.config_eagle3 import CAPTURED, Eagle3Config
from torch_port.errors import UserError

# What these say of a draft is nothing that it computes.
NEUTRAL = frozenset(
    {
        "_name_or_path",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "max_position_embeddings",
        "max_window_layers",
        "pad_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)
# Fields with one value that changes nothing; any other one would.
_ONLY: dict[str, Any] = {"attention_dropout": 0, "rope_scaling": None}
_NESTED = (
    "projector_type",
    "attention_mode",
    "target_layer_ids",
    "mask_token_id",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
_MOST_LAYERS = 10_000
_EAGLE_IDS = "eagle_aux_hidden_state_layer_ids"

Config = DraftConfig | Eagle3Config


def read_config(
    raw: Mapping[str, Any], where: str
) -> tuple[str, Config, dict[str, Any], list[str]]:
    """Read a config of the `hf` or `deepspec` schema.

    Arguments: the parsed config.json; `where` names it in errors.
    Returns (algorithm, config, neutral fields, notes on what was derived).
    Raises UserError for unknown, missing or contradicting fields, and for quantised drafts.
    """
    values, notes = dict(raw), list[str]()
    try:
        refuse_quantised(values)
        drop_code(values, notes)
        neutral = take_neutral(values)
        merge_rope(values, notes)
        if is_eagle3(values):
            _derive_eagle3_layers(values, notes)
            eagle3 = Eagle3Config.from_hf(values)
            return "eagle3", eagle3, neutral, notes
        if "dflash_config" not in values:
            nested = {name: values.pop(name) for name in _NESTED if name in values}
            values["dflash_config"] = {"projector_type": "dspark"} | nested
        elif not isinstance(values["dflash_config"], Mapping):
            raise UserError("dflash_config: expected an object of draft fields")
        _fill_field_defaults(values, notes)
        config = DraftConfig.from_hf(values)
        return config.projector_type, config, neutral, notes
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def is_eagle3(values: Mapping[str, Any]) -> bool:
    """Tell an EAGLE3 draft's config from the DFlash family's."""
    named = values.get("architectures")
    return "eagle_config" in values or (
        isinstance(named, list) and any("Eagle3" in str(name) for name in named)
    )


def hf_config(config: Config, neutral: Mapping[str, Any]) -> dict[str, Any]:
    """Write a config in the `hf` schema, neutral fields beside it."""
    return dict(sorted((dict(neutral) | config.to_hf()).items()))


def deepspec_config(config: Config, neutral: Mapping[str, Any]) -> dict[str, Any]:
    """Write a config in the `deepspec` schema: all draft fields at the top level.

    Raises UserError for EAGLE3, which that format does not know.
    """
    if isinstance(config, Eagle3Config):
        raise UserError("deepspec holds DSpark and DFlash drafts, no EAGLE3 ones; use hf")
    values = config.to_hf()
    nested = values.pop("dflash_config")
    return dict(sorted((dict(neutral) | values | nested).items()))


def refuse_quantised(values: Mapping[str, Any]) -> None:
    """Refuse a config that says its weights are quantised."""
    for name in ("quantization_config", "compression_config", "quantize"):
        if values.get(name) is not None:
            raise UserError(
                f"{name} is set: quantised weights (W8A8 and others) are not read; convert from "
                "the draft in bf16 or float32"
            )


def drop_code(values: dict[str, Any], notes: list[str]) -> None:
    """Leave out `auto_map`, which names Python files of another package: nothing here runs code."""
    if values.pop("auto_map", None) is not None:
        notes.append("auto_map left out: it names code, and no code is taken along")


def take_neutral(values: dict[str, Any]) -> dict[str, Any]:
    """Take the neutral fields out of a config, and those that have their one neutral value."""
    neutral = {name: values.pop(name) for name in sorted(NEUTRAL & set(values))}
    for name, allowed in _ONLY.items():
        if name not in values:
            continue
        if values[name] != allowed:
            raise UserError(f"{name} is {values[name]!r}, which is not built; {allowed!r} is")
        neutral[name] = values.pop(name)
    if isinstance(values.get("use_sliding_window"), bool):
        if has_sliding_layers(values) and not values["use_sliding_window"]:
            raise UserError("use_sliding_window is false, but layer_types has sliding layers")
        if "layer_types" in values or not values["use_sliding_window"]:
            neutral["use_sliding_window"] = values.pop("use_sliding_window")
    return neutral


def has_sliding_layers(values: Mapping[str, Any]) -> bool:
    """Whether layer_types names a sliding layer; one that is no list is refused later, by name."""
    kinds = values.get("layer_types")
    return isinstance(kinds, list) and SLIDING in kinds


def merge_rope(values: dict[str, Any], notes: list[str]) -> None:
    """Bring `rope_parameters` (transformers 5) to `rope_theta`; refuse other rotations."""
    nested = values.pop("rope_parameters", None)
    if nested is None:
        return
    if not isinstance(nested, Mapping) or set(nested) - {"rope_theta", "rope_type"}:
        raise UserError(f"rope_parameters {nested!r} is not built; rope_theta alone is")
    if nested.get("rope_type", "default") != "default":
        raise UserError(f"rope_type {nested['rope_type']!r} is not built; 'default' is")
    theta = nested.get("rope_theta", values.get("rope_theta"))
    if values.setdefault("rope_theta", theta) != theta:
        raise UserError(
            f"rope_theta is {values['rope_theta']} at the top level and {theta} under "
            "rope_parameters; which one was the draft trained with?"
        )
    if "rope_theta" in nested:
        notes.append("rope_theta was under rope_parameters")


def field_layer_ids(num_target_layers: int, count: int) -> list[int]:
    """Return the target layers that the field captures when a DFlash config names none.

    `count` layers evenly from layer 1 to num_target_layers − 3, rounded half to even; a single one
    is the middle layer.

    >>> field_layer_ids(36, 5)
    [1, 9, 17, 25, 33]
    """
    if count == 1:
        return [num_target_layers // 2]
    first, last = 1, num_target_layers - 3
    return [round(first + i * (last - first) / (count - 1)) for i in range(count)]


def layer_count(values: Mapping[str, Any]) -> int | None:
    """Return num_hidden_layers, or None where it is no number (refused later, by name).

    Raises UserError for a number that would fill the memory with a list of layer types.
    """
    layers = values.get("num_hidden_layers")
    if type(layers) is not int:
        return None
    if not 0 <= layers <= _MOST_LAYERS:
        raise UserError(f"num_hidden_layers is {layers}; expected 1 to {_MOST_LAYERS}")
    return layers


def _fill_field_defaults(values: dict[str, Any], notes: list[str]) -> None:
    """Derive by the field's rule what old configs leave out, and say so."""
    nested = dict(values["dflash_config"])
    for name in ("block_size", *_NESTED):  # newer files keep block_size inside
        if name == "block_size" and name in nested and name not in values:
            values[name] = nested.pop(name)
    layers, target_layers = layer_count(values), values.get("num_target_layers")
    if "projector_type" not in nested:
        named = values.get("architectures")
        nested["projector_type"] = "dflash" if named == ["DFlashDraftModel"] else "dspark"
        notes.append(f"projector_type {nested['projector_type']!r}, from architectures")
    if "target_layer_ids" not in nested and type(layers) is type(target_layers) is int:
        nested["target_layer_ids"] = field_layer_ids(target_layers, layers)
        notes.append(
            f"target_layer_ids {nested['target_layer_ids']}, derived by the field's rule: as many "
            "as the draft has layers, evenly from layer 1 to the third last"
        )
    if "layer_types" not in values and type(layers) is int and not values.get("sliding_window"):
        values["layer_types"] = [FULL] * layers
        notes.append("layer_types: all full_attention, as there is no sliding_window")
    values["dflash_config"] = nested


def _derive_eagle3_layers(values: dict[str, Any], notes: list[str]) -> None:
    eagle, count = values.get("eagle_config"), values.get("num_target_layers")
    empty = eagle is None or (isinstance(eagle, Mapping) and eagle.get(_EAGLE_IDS) is None)
    if empty and type(count) is int:
        ids = [1, count // 2 - 1, count - 4]
        values["eagle_config"] = dict(eagle or {}) | {_EAGLE_IDS: ids}
        notes.append(
            f"{_EAGLE_IDS} {ids}, derived by the field's rule: {CAPTURED} layers, the second, the "
            "middle and the fourth last"
        )
