"""Training checkpoints of the specification, with orbax: everything that a run needs to go on.

A checkpoint holds parameters, optimizer state, spike guard, vocabulary map and step as arrays, and
the configurations (the target's too) with the target's fingerprint as JSON. The target itself is
borrowed and never saved. An `extra` document is carried for whoever wrote it, and not read.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.typing import DTypeLike

from jaxdraft import stored
from jaxdraft.config import DraftConfig, ObjectiveConfig
from jaxdraft.draft_checkpoint import abstract_params
from jaxdraft.evaluate import Target, working_dtype
from jaxdraft.saved_run import check_place
from jaxdraft.training import (
    OptimizerConfig,
    TrainState,
    as_json,
    fresh_guard,
    make_optimizer,
)
from jaxdraft.vocabulary import VocabularyMap, check_same_map, map_from_buffers

# 2: the spike guard, the target's config, moments without the rate's own count. 3: another recipe
# of the target's fingerprint.
FORMAT = 3
# Where a target was read from, and by which version, say nothing about its numbers.
_NOT_THE_TARGET = ("_name_or_path", "transformers_version")


class CheckpointMismatchError(ValueError):
    """A checkpoint means something else than the run that wants to continue it."""


def target_fingerprint(target: Target, target_config: Mapping[str, Any]) -> str:
    """sha256 over name, dtype, shape and bytes of the target's embedding and head, and its config.

    The bytes that are hashed, in this order: for `embed_tokens`, then for `lm_head`, the text
    `{name}\\0{dtype}\\0{shape}\\0` in UTF-8, dtype like `float32` or `bfloat16` and shape a JSON
    list like `[16, 8]`, then the values, row after row, little-endian; then the config as JSON with
    sorted keys, without `_name_or_path` and `transformers_version` at its top.

    Args:
        target: E and U.
        target_config: the target's parsed config.json; the order of its keys does not matter.

    Returns:
        64 hexadecimal digits.

    Source: contracts §3.
    """
    digest = hashlib.sha256()
    for name, array in target._asdict().items():
        values = np.ascontiguousarray(array)
        digest.update(f"{name}\0{values.dtype.name}\0{json.dumps(values.shape)}\0".encode())
        digest.update(values.tobytes())
    digest.update(as_json(target_facts(target_config)).encode())
    return digest.hexdigest()


def target_facts(target_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a target's config says about its numbers: all but where it was read from, and by what.

    Args:
        target_config: the parsed config.json.

    Returns:
        The config without `_name_or_path` and `transformers_version`.
    """
    return {name: value for name, value in target_config.items() if name not in _NOT_THE_TARGET}


def meaning(
    config: DraftConfig,
    objective: ObjectiveConfig,
    optimizer: OptimizerConfig,
    target: Target | str,
    target_config: Mapping[str, Any],
    dtype: DTypeLike,
    num_anchors: int | None = None,
) -> dict[str, Any]:
    """What a checkpoint's numbers mean, by name: compared value by value on restore.

    Args:
        config: what the draft is; `draft_vocab_size` is recorded only when it prunes.
        objective: the coefficients.
        optimizer: the numbers of §14.
        target: E and U, or their `target_fingerprint` where only that is known.
        target_config: the target's parsed config.json.
        dtype: the working dtype.
        num_anchors: N of the run's draws (§3.1), or None.

    Returns:
        JSON values by key: `draft.hidden_size`, `objective.ce_alpha`, `target.config.rope_theta`.

    Source: contracts §3.
    """
    fingerprint = target if isinstance(target, str) else target_fingerprint(target, target_config)
    record: dict[str, Any] = {
        "format": FORMAT,
        "dtype": np.dtype(dtype).name,
        "target.fingerprint": fingerprint,
        "num_anchors": num_anchors,
    }
    parts = {
        "draft": asdict(config),
        "objective": asdict(objective),
        "optimizer": asdict(optimizer),
        # The fingerprint holds these too; one by one, a mismatch says which field it is.
        "target.config": json.loads(as_json(target_facts(target_config))),
    }
    for part, values in parts.items():
        for name, value in values.items():
            record[f"{part}.{name}"] = list(value) if isinstance(value, tuple) else value
    if not config.prunes:
        del record["draft.draft_vocab_size"]
    return record


def save(directory: Path, state: TrainState, extra: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint; it appears complete or not at all.

    Args:
        directory: path that does not exist yet.
        state: the state after `state.step` steps, on any number of devices.
        extra: a JSON document to carry (`read_extra` of the checkpoint that the run went on from).

    Raises:
        ValueError: the directory exists, or the state has no `target_config`.

    Source: contracts §3.
    """
    if state.target_config is None:
        raise ValueError(
            "target_config: a checkpoint records the config of the target that its draft was "
            "trained for, and the state has none; give the target's config.json to `start`"
        )
    record = meaning(
        state.config,
        state.objective,
        state.optimizer,
        state.target,
        json.loads(state.target_config),
        working_dtype(state.params),
        state.num_anchors,
    )
    stored.write(directory, {"state": _arrays(state)}, {"meaning": record, "extra": extra or {}})


def restore(
    directory: Path,
    config: DraftConfig,
    objective: ObjectiveConfig,
    optimizer: OptimizerConfig,
    target: Target,
    target_config: Mapping[str, Any],
    dtype: DTypeLike,
    vocabulary: VocabularyMap | None = None,
    num_anchors: int | None = None,
) -> TrainState:
    """Read a checkpoint onto the first device, wherever and on however many it was written.

    The tree of shapes is built from the config, not read from the file: orbax refuses to restore
    onto another number of devices without one, and a foreign tree must not be taken.

    Args:
        directory: what `save` wrote.
        config: the draft that is to go on.
        objective: its coefficients.
        optimizer: its numbers of §14.
        target: its E and U.
        target_config: the target's parsed config.json.
        dtype: its working dtype.
        vocabulary: the run's map where it has one of its own; must be the saved one.
        num_anchors: N of the run's draws (§3.1); must be the saved one.

    Returns:
        The state that was saved.

    Raises:
        CheckpointMismatchError: a recorded value differs, naming key, both values and the remedy.
        ValueError: no checkpoint is there, or its map is another one.

    Source: contracts §3; field notes 1 and 20.
    """
    directory = directory.absolute()
    wanted = meaning(config, objective, optimizer, target, target_config, dtype, num_anchors)
    check_place(directory)
    check_meaning(stored.read_document(directory, "meaning"), wanted)
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        shapes = abstract_arrays(config, optimizer, dtype)
        read = checkpointer.restore(
            directory, ocp.args.Composite(state=ocp.args.StandardRestore(shapes))
        )
    arrays = read["state"]
    offsets = np.asarray(arrays["d2t"]).astype(np.int64)  # int32 without x64
    saved = map_from_buffers(np.asarray(arrays["t2d"]), offsets)
    if vocabulary is not None:
        check_same_map(saved, vocabulary)
    return TrainState(
        step=arrays["step"],
        params=arrays["params"],
        optimizer_state=arrays["optimizer_state"],
        guard=arrays["guard"],
        target=target,
        vocabulary=saved,
        config=config,
        objective=objective,
        optimizer=optimizer,
        num_anchors=num_anchors,
        target_config=as_json(target_config),
    )


def check_meaning(saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse a checkpoint whose numbers mean something else.

    Args:
        saved: what the checkpoint recorded.
        wanted: what the run would record.

    Raises:
        CheckpointMismatchError: names every key that differs, with both values.

    Source: contracts §3.

    >>> check_meaning({"draft.block_size": 4}, {"draft.block_size": 4})
    """
    absent = "not recorded"
    differing = [
        f"{key}: the checkpoint has {saved.get(key, absent)!r}, the run {wanted.get(key, absent)!r}"
        for key in sorted(set(saved) | set(wanted))
        if saved.get(key, absent) != wanted.get(key, absent)
    ]
    if differing:
        raise CheckpointMismatchError(
            "the checkpoint does not belong to this run. "
            + "; ".join(differing)
            + ". Set the run to the checkpoint's values, or start anew"
        )


def abstract_arrays(config: DraftConfig, optimizer: OptimizerConfig, dtype: DTypeLike) -> Any:
    """The checkpoint's arrays as shapes on the first device, from the config alone.

    Args:
        config: what the draft is.
        optimizer: decides the shape of its state.
        dtype: the working dtype.

    Returns:
        A tree of `jax.ShapeDtypeStruct`.
    """
    params = abstract_params(config, dtype)
    tree = {
        "step": jax.ShapeDtypeStruct((), jnp.zeros((), int).dtype),
        "params": params,
        "optimizer_state": jax.eval_shape(make_optimizer(optimizer).init, params),
        "guard": jax.eval_shape(lambda: fresh_guard(dtype)),
        "t2d": jax.ShapeDtypeStruct((config.vocab_size,), bool),
        "d2t": jax.ShapeDtypeStruct((config.draft_vocab_size,), np.int64),
    }
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here), tree
    )


def _arrays(state: TrainState) -> dict[str, Any]:
    return {
        "step": state.step,
        "params": state.params,
        "optimizer_state": state.optimizer_state,
        "guard": state.guard,
        "t2d": np.asarray(state.vocabulary.t2d),
        # Without x64 a jitted step hands the map back as int32; the file holds int64 all the same.
        "d2t": np.asarray(state.vocabulary.d2t).astype(np.int64),
    }
