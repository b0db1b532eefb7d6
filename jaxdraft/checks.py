"""What the configs of all drafts refuse alike: types, counts, sizes, captured layers, fields."""

import math
from collections.abc import Mapping
from typing import Any


def is_int(value: object) -> bool:
    """Whether a setting is a whole number; booleans are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_real(value: object) -> bool:
    """Whether a setting is a finite number; booleans are none."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_bool(field: str, value: object) -> None:
    """Refuse what is neither true nor false."""
    if not isinstance(value, bool):
        raise ValueError(f"{field}: expected true or false, got {value!r}")


def as_tuple(field: str, value: object) -> tuple[Any, ...]:
    """A list of the config as a tuple; anything else is refused."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{field}: expected a list, got {value!r}")
    return tuple(value)


def check_fields(
    where: str, mapping: Mapping[str, Any], required: frozenset[str], optional: frozenset[str]
) -> None:
    """Refuse unknown fields and missing ones, naming each."""
    unknown = {field: mapping[field] for field in sorted(set(mapping) - required - optional)}
    if unknown:
        raise ValueError(
            f"{where} has unknown fields {unknown!r}: remove them (known: "
            f"{', '.join(sorted(required | optional))})"
        )
    missing = sorted(required - set(mapping))
    if missing:
        raise ValueError(f"{where} lacks {', '.join(missing)}: add them")


def check_sizes(config: Any, counts: tuple[str, ...]) -> None:
    """Refuse sizes that are off or contradict each other; `counts` names those from 1 up."""
    for field in counts:
        value = getattr(config, field)
        if not is_int(value) or value < 1:
            raise ValueError(f"{field}: expected a whole number >= 1, got {value!r}")
    K, V = config.draft_vocab_size, config.vocab_size
    if not is_int(K) or not 1 <= K <= V:
        raise ValueError(
            f"draft_vocab_size: expected a whole number from 1 to vocab_size = {V}, got {K!r}; "
            "leave it out (or null) for an unpruned draft"
        )
    for field in ("rms_norm_eps", "rope_theta", "initializer_range"):
        value = getattr(config, field)
        if not is_real(value) or value <= 0:
            raise ValueError(f"{field}: expected a positive number, got {value!r}")
    if config.head_dim % 2:
        raise ValueError(
            f"head_dim: the rotary embedding needs an even number, got {config.head_dim}"
        )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ValueError(
            f"num_key_value_heads = {config.num_key_value_heads} does not divide "
            f"num_attention_heads = {config.num_attention_heads}: choose a divisor"
        )


def check_target_layers(config: Any, field: str = "target_layer_ids") -> None:
    """Refuse captured layers that are none, twice the same, or the last (contracts §4).

    `field` is what the config file calls `target_layer_ids`.
    """
    ids, last = config.target_layer_ids, config.num_target_layers - 1
    if not ids or not all(is_int(i) and 0 <= i <= last for i in ids):
        raise ValueError(
            f"{field}: expected layers from 0 to {last - 1} (num_target_layers = "
            f"{last + 1}, the last one excluded), got {list(ids)!r}"
        )
    if last in ids:
        raise ValueError(
            f"{field} holds {last}, the target's last layer, whose states come back "
            f"normalised: choose layers up to {last - 1}"
        )
    if len(set(ids)) != len(ids):
        raise ValueError(f"{field} has duplicates: {list(ids)!r}; name each layer once")
