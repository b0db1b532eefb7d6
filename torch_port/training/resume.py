"""What a checkpoint records of its run, and when a resume is refused (contracts §3).

One table says it all: the key, when it is recorded, how it is compared, and what to do about a
difference. The vocabulary map itself is compared where it is loaded (`vocabulary.mapping`).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_port.config import Settings
from torch_port.errors import UserError
from torch_port.models.registry import Algorithm, find_algorithm

if TYPE_CHECKING:
    from torch import Tensor

Values = Mapping[str, Any]


@dataclass(frozen=True)
class ResumeKey:
    """One thing that a checkpoint's numbers depend on; `when` and `compare` name entries below."""

    name: str
    when: str
    compare: str
    remedy: str


def _prunes(values: Values) -> bool:
    return bool(values["draft_vocab_size"] < values["vocab_size"])


# When a key is recorded. "pruned" is what keeps earlier full-vocabulary checkpoints resumable: an
# unconditional draft_vocab_size would refuse them all, for a value that could only be V.
WHEN: dict[str, Callable[[Values], bool]] = {
    "always": lambda values: True,
    "blocks": lambda values: find_algorithm(values["algorithm"]).drafts_blocks,
    "dspark": lambda values: values["algorithm"] == "dspark",
    "dflash": lambda values: values["algorithm"] == "dflash",
    "dpace": lambda values: values.get("dpace", "none") != "none",
    "eagle3": lambda values: values["algorithm"] == "eagle3",
    "pruned": _prunes,
    "own head": lambda values: bool(values.get("trainable_head", False)),
}


def _equal(saved: Any, current: Any) -> bool:
    return type(saved) is type(current) and bool(saved == current)


def _same_number(saved: Any, current: Any) -> bool:
    """Compare settings that may be written 4 or 4.0, or be absent; True is no number."""
    kinds = {type(saved), type(current)}
    return (kinds <= {int, float} and float(saved) == float(current)) or _equal(saved, current)


COMPARE: dict[str, Callable[[Any, Any], bool]] = {"equal": _equal, "number": _same_number}

_DRAFT = "set it back in the draft config, or start a new run"
_OBJECTIVE = "set it back in the run's objective section, or start a new run"
_TARGET = "resume with the target that the draft was trained on, or start a new run"

RESUME_KEYS = (
    ResumeKey("algorithm", "always", "equal", "set algorithm back, or start a new run"),
    ResumeKey("layout", "always", "equal", "the slots would predict other tokens; " + _DRAFT),
    ResumeKey("target_fingerprint", "always", "equal", _TARGET),
    ResumeKey("target_layer_ids", "always", "equal", _DRAFT),
    ResumeKey("attention_mode", "always", "equal", _DRAFT),
    ResumeKey("rope_theta", "always", "number", _DRAFT),
    ResumeKey("rms_norm_eps", "always", "number", _DRAFT),
    ResumeKey("block_size", "blocks", "equal", _DRAFT),
    ResumeKey("mask_token_id", "blocks", "equal", _DRAFT),
    ResumeKey("layer_types", "blocks", "equal", _DRAFT),
    ResumeKey("sliding_window", "blocks", "equal", _DRAFT),
    ResumeKey("loss_decay_gamma", "blocks", "number", _OBJECTIVE),
    ResumeKey("markov_head_type", "dspark", "equal", _DRAFT),
    ResumeKey("markov_rank", "dspark", "equal", _DRAFT),
    ResumeKey("enable_confidence_head", "dspark", "equal", _DRAFT),
    ResumeKey("confidence_head_with_markov", "dspark", "equal", _DRAFT),
    ResumeKey("detach_confidence", "dspark", "equal", _OBJECTIVE),
    ResumeKey("ce_alpha", "dspark", "number", _OBJECTIVE),
    ResumeKey("l1_alpha", "dspark", "number", _OBJECTIVE),
    ResumeKey("confidence_alpha", "dspark", "number", _OBJECTIVE),
    ResumeKey("dpace", "dflash", "equal", _OBJECTIVE),
    ResumeKey("beta", "dpace", "number", _OBJECTIVE),
    # Other heads of the same total width have the same shapes, and here no per-head norm to tell.
    ResumeKey("num_attention_heads", "eagle3", "equal", _DRAFT),
    ResumeKey("steps", "eagle3", "equal", _OBJECTIVE),
    ResumeKey("step_decay", "eagle3", "number", _OBJECTIVE),
    ResumeKey("draft_vocab_size", "pruned", "equal", _DRAFT),
    ResumeKey(
        "trainable_head", "own head", "equal", "set it back, or start a new run: the head differs"
    ),
)


def run_values(
    algorithm: Algorithm,
    config: Settings,
    objective: Settings,
    target_fingerprint: str,
    trainable_head: bool = False,
) -> dict[str, Any]:
    """Return everything the table can ask for, by name, of one run."""
    values = config.model_dump() | objective.model_dump()
    heads, kv_heads = values["num_attention_heads"], values["num_key_value_heads"]
    return values | {
        "algorithm": algorithm.name,
        "layout": algorithm.layout,
        "attention_mode": "mha" if heads == kv_heads else "gqa",
        "target_fingerprint": target_fingerprint,
        "trainable_head": trainable_head,
    }


def record(values: Values) -> dict[str, Any]:
    """Return what a checkpoint of this run records, as JSON values.

    Raises UserError when a key that is due has no value.
    """
    due = [key.name for key in RESUME_KEYS if WHEN[key.when](values)]
    absent = [name for name in due if name not in values]
    if absent:
        raise UserError(
            f"resume record: no value for {', '.join(absent)}; a checkpoint without it could be "
            "resumed as something else: pass what run_values returns"
        )
    recorded: dict[str, Any] = json.loads(json.dumps({name: values[name] for name in due}))
    return recorded


def check_resume(saved: Values, current: Values) -> None:
    """Refuse to continue a checkpoint whose numbers mean something else in this run.

    Arguments: what `record` returned for the checkpoint, and for this run.
    Raises UserError naming every key that differs, both values, and the remedy.
    """
    known = {key.name: key for key in RESUME_KEYS}
    problems = [
        f"{name}: the checkpoint records it, this version does not know it; resume with the "
        "version that wrote the checkpoint"
        for name in saved
        if name not in known
    ]
    for key in RESUME_KEYS:
        if key.name not in saved and key.name not in current:
            continue
        same = (
            key.name in saved
            and key.name in current
            and COMPARE[key.compare](saved[key.name], current[key.name])
        )
        if not same:
            problems.append(
                f"{key.name} is {_shown(saved, key)} in the checkpoint and {_shown(current, key)} "
                f"in this run; {key.remedy}"
            )
    if problems:
        raise UserError("this run does not continue the checkpoint. " + ". ".join(problems))


def _shown(values: Values, key: ResumeKey) -> str:
    if key.name in values:
        return json.dumps(values[key.name])
    return "not set (full vocabulary)" if key.when == "pruned" else "not recorded"


# Where a target was read from, and by which version, say nothing about its numbers.
_NOT_THE_TARGET = {"_name_or_path", "transformers_version"}
_CHUNK_BYTES = 2**26


def target_fingerprint(embed_tokens: Tensor, lm_head: Tensor, config: Mapping[str, Any]) -> str:
    """Return the sha256 of a target: name, dtype, shape, bytes of E and U, and its config.

    Arguments: E [V, H], U [V, H], on any device; the target's parsed `config.json`.

    Hashed are, for `embed_tokens` and then `lm_head`: the UTF-8 text "name NUL dtype NUL shape NUL"
    (dtype as `float32` or `bfloat16`, shape as a JSON list, `[16, 8]`), then the values by rows,
    little-endian. Then the config as JSON text with sorted keys, where `_name_or_path` and
    `transformers_version` are left out at the top level. The specification has the same recipe, so
    that a run can go on there. Rows cross to the host in pieces. Source: contracts §3.
    """
    import torch  # here: the table above needs none

    total = hashlib.sha256()
    for name, tensor in (("embed_tokens", embed_tokens), ("lm_head", lm_head)):
        dtype = str(tensor.dtype).removeprefix("torch.")
        total.update("\0".join((name, dtype, json.dumps(list(tensor.shape)), "")).encode())
        row_bytes = max(1, tensor.element_size() * math.prod(tensor.shape[1:]))
        for rows in tensor.detach().split(max(1, _CHUNK_BYTES // row_bytes)):
            total.update(rows.contiguous().cpu().view(torch.uint8).numpy())
    kept = {name: value for name, value in config.items() if name not in _NOT_THE_TARGET}
    total.update(json.dumps(kept, sort_keys=True).encode())
    return total.hexdigest()
