"""What a draft checkpoint is, whatever format it came in, and the checks that every one passes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from torch_port.config import DraftConfig
from torch_port.config_eagle3 import Eagle3Config
from torch_port.errors import UserError
from torch_port.formats.weights import DTYPE_NAMES, DTYPES, TensorRef, Weights
from torch_port.models.registry import find_algorithm
from torch_port.vocabulary.mapping import check_map

HEAD = "lm_head.weight"
EMBEDDING = "embed_tokens.weight"
MAP = ("t2d", "d2t")
_LEGACY_HEADS = "logit_head."


@dataclass(frozen=True)
class Checkpoint:
    """One draft: its family, config, tensors, and what else its file said.

    `weights` holds the draft's own tensors under the names of contracts §4, t2d and d2t among them.
    `head` [K, H] and `embedding` [V, H] are the target's (or a trained head), where the file has
    them; EAGLE3's are weights of its own. `neutral`: config fields that change no number, kept so
    that they come back. `verifier`: the target that a speculators file names, and its `proposal`
    where that is not the default. `training`: a port
    checkpoint's record of its run, with `optimizer` its tensors. `notes`: what reading derived or
    renamed, to be told.
    """

    format: str
    algorithm: str
    config: DraftConfig | Eagle3Config
    weights: Weights
    head: TensorRef | None = None
    embedding: TensorRef | None = None
    neutral: dict[str, Any] = field(default_factory=dict)
    verifier: dict[str, Any] | None = None
    training: dict[str, Any] | None = None
    optimizer: Weights = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def dtype(self) -> str:
        """The dtype of the draft's weights (safetensors' name)."""
        return next(ref.dtype for name, ref in self.weights.items() if name not in MAP)


def expected_shapes(
    algorithm: str, config: DraftConfig | Eagle3Config
) -> dict[str, tuple[int, ...]]:
    """Return every tensor that a draft of this config must have, with its shape.

    Built from the model itself on the meta device: no second list of names can go stale.
    Raises UserError for sizes that no tensor can have.
    """
    return dict(_expected_shapes(algorithm, config))


@lru_cache(maxsize=16)
def _expected_shapes(
    algorithm: str, config: DraftConfig | Eagle3Config
) -> dict[str, tuple[int, ...]]:
    try:
        with torch.device("meta"), _NoInitialisation():
            state = find_algorithm(algorithm).draft_class()(config).state_dict()
    except (RuntimeError, OverflowError, TypeError) as error:
        first = str(error).split("\n", 1)[0]
        raise UserError(f"the config's sizes make no draft ({first}); is a number wrong?") from None
    # EAGLE3's embedding is the target's, in its state dict but optional in a file.
    left_out = {EMBEDDING} if isinstance(config, Eagle3Config) else set()
    return {
        name: tuple(tensor.shape)
        for name, tensor in state.items()
        if isinstance(tensor, torch.Tensor) and name not in left_out
    }


class _NoInitialisation(TorchFunctionMode):
    """Skips what layers draw when they are made: on the meta device that imports a compiler."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            return kwargs.get("tensor", args[0] if args else None)
        return func(*args, **kwargs)


def rename_legacy(weights: Weights) -> tuple[Weights, list[str]]:
    """Give weights of earlier checkpoints, `logit_head.*`, today's names; say so."""
    old = [name for name in weights if name.startswith(_LEGACY_HEADS)]
    renamed: Weights = {}
    for name, ref in weights.items():
        new = name.removeprefix(_LEGACY_HEADS)
        if new in renamed or (new != name and new in weights):
            raise UserError(f"{ref.where}: {new} is there twice, with and without {_LEGACY_HEADS}")
        renamed[new] = ref
    notes = [f"{len(old)} weights under {_LEGACY_HEADS} (an earlier naming)"] if old else []
    return renamed, notes


def split_weights(
    weights: Weights,
    algorithm: str,
    config: DraftConfig | Eagle3Config,
    where: str,
    carried: Sequence[str] = (),
) -> tuple[Weights, TensorRef | None, TensorRef | None]:
    """Check names and shapes against the config; return (the draft's own, head, embedding).

    `carried`: which of head and embedding the format always has.
    Raises UserError naming every unknown, missing or misshapen weight at once, and a malformed
    vocabulary map. Nothing absent is made up.
    """
    K, V, H = config.draft_vocab_size, config.vocab_size, config.hidden_size
    layers = getattr(config, "num_hidden_layers", 1)
    if layers > len(weights):  # before a model of a million layers is built to name what is missing
        raise UserError(
            f"{where}: num_hidden_layers is {layers}, but there are {len(weights)} tensors in all"
        )
    try:
        expected = expected_shapes(algorithm, config)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    borrowed = {name: (rows, H) for name, rows in ((HEAD, K), (EMBEDDING, V))}
    optional = {name: shape for name, shape in borrowed.items() if name not in expected}
    problems = [f"{name}: missing" for name in (*expected, *carried) if name not in weights]
    for name, ref in weights.items():
        shape = expected.get(name, optional.get(name))
        if shape is None:
            problems.append(_unknown(name, config))
        elif ref.shape != shape:
            problems.append(_misshapen(name, ref, shape, config))
        elif ref.dtype != _dtype_of(name, ref.dtype):
            problems.append(
                f"{name}: dtype {ref.dtype}, but {_dtype_of(name, ref.dtype)} is expected"
            )
    halves = {ref.dtype for ref in weights.values()} & {"F16", "BF16"}
    if len(halves) == 2:
        problems.append("weights of both F16 and BF16: one of them is a changed header")
    if problems:
        more = f" (and {len(problems) - 8} more)" if len(problems) > 8 else ""
        raise UserError(f"{where}: " + "; ".join(problems[:8]) + more)
    own = {name: weights[name] for name in expected}
    check_checkpoint_map(own, config, where)
    return own, _borrowed(weights, HEAD, optional), _borrowed(weights, EMBEDDING, optional)


def _borrowed(
    weights: Weights, name: str, optional: Mapping[str, tuple[int, ...]]
) -> TensorRef | None:
    return weights.get(name) if name in optional else None


def _dtype_of(name: str, given: str) -> str:
    """The dtype that a tensor must have; weights may be of any floating one."""
    fixed = {"t2d": "BOOL", "d2t": "I64"}.get(name)
    if fixed is not None:
        return fixed
    return given if DTYPES[given].is_floating_point else "a floating type"


def _unknown(name: str, config: DraftConfig | Eagle3Config) -> str:
    layer = re.match(r"layers\.(\d+)\.", name)
    layers = getattr(config, "num_hidden_layers", None)
    if re.search(r"(scale|zero_point|qweight|qzeros|g_idx)", name):
        return f"{name}: of a quantised draft (W8A8 or other), which is not read"
    if layer and layers is not None and int(layer.group(1)) >= layers:
        return f"{name}: the config has num_hidden_layers {layers}"
    if name in MAP:
        return f"{name}: the config has no draft_vocab_size below vocab_size, so it has no map"
    return f"{name}: no weight of a {type(config).__name__} with these settings"


def _misshapen(
    name: str, ref: TensorRef, shape: tuple[int, ...], config: DraftConfig | Eagle3Config
) -> str:
    text = f"{name}: shape {list(ref.shape)}, but the config says {list(shape)}"
    if name in (HEAD, EMBEDDING) and ref.shape[1:] == shape[1:] and ref.shape[0] > shape[0]:
        rows = ref.shape[0]
        if name == HEAD and config.prunes and rows == config.vocab_size:
            return f"{text}: these are all of the target's rows, not the K kept ones"
        if rows > config.vocab_size:
            return (
                f"{text}: {rows - config.vocab_size} rows more than vocab_size "
                f"{config.vocab_size} are padding, no pruning; vocab_size is the number of rows "
                "of the target's head: set it to that"
            )
    return text


def check_checkpoint_map(
    weights: Weights, config: DraftConfig | Eagle3Config, where: str
) -> torch.Tensor | None:
    """Check t2d and d2t of a checkpoint; return the kept ids, int64 [K], or None without a map.

    Raises UserError for a malformed map, and for one that was never installed: a server would take
    the first K ids for it.
    """
    if "t2d" not in weights:
        return None
    t2d_V, d2t_K = weights["t2d"].load(), weights["d2t"].load()
    if not bool(t2d_V.any()):
        raise UserError(
            f"{where}: the draft prunes to {config.draft_vocab_size} ids, but its vocabulary map "
            "was never installed (t2d is all false); install the map and save the draft again"
        )
    try:
        check_map(t2d_V, d2t_K, config.vocab_size, config.draft_vocab_size)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    return torch.arange(config.draft_vocab_size) + d2t_K


def dtype_name(dtype: torch.dtype) -> str:
    """Return safetensors' name of a dtype."""
    return DTYPE_NAMES[dtype]
