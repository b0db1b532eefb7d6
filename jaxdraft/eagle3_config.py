"""What an EAGLE3 draft is (`Eagle3Config`) and how it is trained (`Eagle3Objective`); sheet §13."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from jaxdraft.checks import as_tuple, check_fields, check_sizes, check_target_layers, is_int
from jaxdraft.config import NotBuilt

CAPTURED_LAYERS = 3  # low, middle, high

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "num_target_layers",
)
_REAL = ("rms_norm_eps", "rope_theta")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# Fields of the schema with one value that is built; any other value changes the numbers.
_ONLY_BUILT: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "tie_word_embeddings": False,
}
_REQUIRED = frozenset({*_COUNTS, *_REAL, "num_hidden_layers", "eagle_config"})
_OPTIONAL = frozenset({"draft_vocab_size", "initializer_range", *_ONLY_BUILT}) - _REQUIRED
_EAGLE_REQUIRED = frozenset({_LAYER_IDS})
_EAGLE_OPTIONAL = frozenset({"use_aux_hidden_state"})


@dataclass(frozen=True)
class Eagle3Config:
    """The EAGLE3 draft of one checkpoint: one decoder layer and its own head (sheet §13).

    `draft_vocab_size` is resolved: K, with K = V for an unpruned draft. `target_layer_ids` are the
    three captured layers, low, middle, high: layer i means the output of decoder layer i, from 0.

    Raises:
        ValueError: a value is off or two fields contradict each other; the message names them.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float | int
    rope_theta: float | int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]
    initializer_range: float | int = 0.02

    def __post_init__(self) -> None:
        _check_config(self)

    @property
    def prunes(self) -> bool:
        """True when the draft vocabulary is smaller than the target's, K < V (sheet §1)."""
        return self.draft_vocab_size < self.vocab_size

    @classmethod
    def from_hf(cls, mapping: Mapping[str, Any]) -> "Eagle3Config":
        """Read the field's `config.json` of an EAGLE3 draft.

        Args:
            mapping: the parsed JSON; `draft_vocab_size` at the top level, the captured layers as
                `eagle_aux_hidden_state_layer_ids` under `eagle_config`.

        Returns:
            The config, with `draft_vocab_size` resolved to V where it is absent or null.

        Raises:
            ValueError: unknown, missing, off or contradicting fields, each named with its value
                and a remedy.
            NotBuilt: a value the schema allows and this specification does not cover.
        """
        check_fields("the draft config", mapping, _REQUIRED, _OPTIONAL)
        eagle = mapping["eagle_config"]
        if not isinstance(eagle, Mapping):
            raise ValueError(f"eagle_config: expected an object of draft fields, got {eagle!r}")
        check_fields("eagle_config", eagle, _EAGLE_REQUIRED, _EAGLE_OPTIONAL)
        for field, built in {**_ONLY_BUILT, "use_aux_hidden_state": True}.items():
            given = (eagle if field in eagle else mapping).get(field, built)
            if given != built or type(given) is not type(built):
                raise NotBuilt(f"{field} = {given!r} is not built; only {built!r} is")
        requested = mapping.get("draft_vocab_size")
        values = {
            **{field: mapping[field] for field in (*_COUNTS, *_REAL)},
            "draft_vocab_size": mapping["vocab_size"] if requested is None else requested,
            "target_layer_ids": as_tuple(_LAYER_IDS, eagle[_LAYER_IDS]),
            "initializer_range": mapping.get("initializer_range", 0.02),
        }
        # JSON may hold any type: refuse by name before an Eagle3Config with wrong types exists.
        _check_config(SimpleNamespace(**values))
        return cls(**values)


@dataclass(frozen=True)
class Eagle3Objective:
    """The training-time test: how many steps n it takes (sheet §13).

    Raises:
        ValueError: `steps` is no whole number from 1 up.
    """

    steps: int = 7

    def __post_init__(self) -> None:
        if not is_int(self.steps) or self.steps < 1:
            raise ValueError(f"steps: expected a whole number >= 1, got {self.steps!r}")


def _check_config(config: "Eagle3Config | SimpleNamespace") -> None:
    check_sizes(config, _COUNTS)
    check_target_layers(config, _LAYER_IDS)
    ids = config.target_layer_ids
    if len(ids) != CAPTURED_LAYERS or list(ids) != sorted(ids):
        raise ValueError(
            f"{_LAYER_IDS}: expected three layers in the order low, middle, high; got {list(ids)!r}"
        )
