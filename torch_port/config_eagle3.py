"""EAGLE3's draft and objective configuration (spec sheet §13), and the field's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field, model_validator

from torch_port.config import Settings, check_draft_vocab_size, target_layer_problem
from torch_port.errors import NotBuiltError, UserError

CAPTURED = 3  # low, middle and high target layer

_FILE = "EAGLE3 draft config"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Fields of the file with one value that this family has; any other is another computation.
_FIXED: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
_AUXILIARY = {"use_aux_hidden_state": True}
_DEFAULT_ROPE = {"rope_type": "default"}
_NULLABLE = {"rope_scaling": Mapping}  # what a field says, whose one built value is null
_FLAT = "target_layer_ids"  # what the file calls `eagle_aux_hidden_state_layer_ids`
_OPTIONAL = {"draft_vocab_size", "initializer_range", *_FIXED} - {"num_hidden_layers"}


class Eagle3Config(Settings):
    """Sizes and options of one EAGLE3 draft, flat and checked.

    `draft_vocab_size` is K, already resolved (`check_draft_vocab_size`); `target_layer_ids` names
    the low, middle and high layer whose states are fused, in that order. Source: spec sheet §13;
    contracts §4.
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
        layers = _captured_problem(self.target_layer_ids, self.num_target_layers)
        rules = [
            (
                self.num_attention_heads % self.num_key_value_heads != 0,
                f"num_attention_heads ({self.num_attention_heads}) must be a multiple of "
                f"num_key_value_heads ({self.num_key_value_heads})",
            ),
            (layers is not None, f"target_layer_ids: {layers}"),
        ]
        problems = [text for wrong, text in rules if wrong]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        """Read the field's `config.json` of an EAGLE3 draft.

        Arguments: `raw`, the parsed file: `draft_vocab_size` at the top level (absent or null: V),
        the captured layers under `eagle_config`, `rope_theta` at the top level or under
        `rope_parameters`.
        Returns the checked config.
        Raises NotBuiltError for a layer or rotary embedding that this version does not have;
        UserError for unknown, missing or wrong fields, naming each with its value.
        """
        flat = _object(_FILE, raw)
        rope = flat.pop("rope_parameters", None)
        rope = _object("rope_parameters", {} if rope is None else rope)
        _check_names("rope_parameters", rope, set(), {"rope_theta", *_DEFAULT_ROPE})
        _one_rope_theta(flat, rope)
        required = {*cls.model_fields, "eagle_config", "num_hidden_layers"} - {_FLAT}
        _check_names(_FILE, flat, required - _OPTIONAL, _OPTIONAL)
        eagle = _object("eagle_config", flat.pop("eagle_config"))
        _check_names("eagle_config", eagle, {_LAYER_IDS}, set(_AUXILIARY))
        _take_fixed(flat, _FIXED)
        _take_fixed(eagle, _AUXILIARY)
        _take_fixed(rope, _DEFAULT_ROPE)
        if type(flat["vocab_size"]) is int:  # anything else is refused below, by name
            flat["draft_vocab_size"] = check_draft_vocab_size(
                flat.get("draft_vocab_size"), flat["vocab_size"]
            )
        ids, layers = eagle[_LAYER_IDS], flat["num_target_layers"]
        if not isinstance(ids, list | tuple) or not all(type(i) is int for i in ids):
            raise UserError(f"{_LAYER_IDS}: {ids!r} must be a list of {CAPTURED} layer numbers")
        problem = _captured_problem(ids, layers) if type(layers) is int else None
        if problem is not None:
            raise UserError(f"{_LAYER_IDS}: {problem}")
        return cls(**flat, target_layer_ids=tuple(ids))

    def to_hf(self) -> dict[str, Any]:
        """Write the config as the field's `config.json`; `from_hf` of it gives an equal config."""
        values = self.model_dump(mode="json")
        eagle = {_LAYER_IDS: values.pop(_FLAT)} | _AUXILIARY
        fixed = {name: list(x) if isinstance(x, list) else x for name, x in _FIXED.items()}
        return fixed | values | {"eagle_config": eagle}


class Eagle3Objective(Settings):
    """Training-time test over `steps` steps; step i's loss weighs `step_decay`**i (§13)."""

    steps: int = Field(default=7, ge=1)
    step_decay: float = Field(default=0.8, gt=0)


def _captured_problem(ids: Sequence[int], num_layers: int) -> str | None:
    """Say what is wrong with the three captured layers, or None."""
    problem = target_layer_problem(ids, num_layers)
    if problem is None and (len(ids) != CAPTURED or list(ids) != sorted(ids)):
        problem = (
            f"{list(ids)} must be {CAPTURED} layers, ascending: fc reads the low, the middle and "
            "the high one in this order"
        )
    return problem


def _object(where: str, given: object) -> dict[str, Any]:
    """Return a copy of an object of the file, or refuse what is none."""
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise UserError(f"{where}: {given!r} must be an object whose names are strings")
    return dict(given)


def _one_rope_theta(flat: dict[str, Any], rope: dict[str, Any]) -> None:
    """Move `rope_theta` from `rope_parameters` to the top level; two must be equal."""
    both = [where["rope_theta"] for where in (flat, rope) if "rope_theta" in where]
    if len(both) == 2 and both[0] != both[1]:
        raise UserError(
            f"rope_theta is {both[0]!r} at the top level and {both[1]!r} under rope_parameters; "
            "keep the one that the draft was trained with"
        )
    flat |= {name: rope.pop(name) for name in ("rope_theta",) if name in rope}


def _check_names(
    where: str, given: Mapping[str, Any], required: set[str], optional: set[str]
) -> None:
    """Refuse unknown fields and missing ones, naming each."""
    unknown = {name: given[name] for name in sorted(set(given) - required - optional)}
    if unknown:
        raise UserError(
            f"{where} has fields that would be ignored: {unknown!r}; remove them (known: "
            f"{', '.join(sorted(required | optional))})"
        )
    missing = sorted(required - set(given))
    if missing:
        raise UserError(f"{where} lacks {', '.join(missing)}; add what the draft was trained with")


def _take_fixed(given: dict[str, Any], fixed: Mapping[str, Any]) -> None:
    """Take the fields with one built value out of `given`, or say what is not built."""
    for name, built in fixed.items():
        value = given.pop(name, built)
        if type(value) is type(built) and value == built:
            continue
        if not isinstance(value, _NULLABLE.get(name, type(built))) or (
            isinstance(value, bool) and not isinstance(built, bool)
        ):
            raise UserError(f"{name} {value!r} is no value of this field; write {built!r}")
        raise NotBuiltError(f"{name} {value!r} is not built; {built!r} is")
