"""A DSpark run between the `port` format and orbax: the whole training state, both ways.

jaxdraft's parameters are the masters, so the port's weights must be the masters rounded. Numbers
that both sides have (steps, updates, objective, optimizer, guard) are read from the arrays and the
record that jaxdraft restores. What only the port has (random states, data position, the guard's sum
in float64, the weights' dtype) is carried in the `extra` document and used where it still agrees.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parity.cases import Array
from parity.convert import (
    ORBAX,
    carried_arrays,
    carried_refs,
    extra_document,
    refs,
    to_numpy,
    to_tensor,
)
from parity.names import to_flax, to_torch
from torch_port.config import DraftConfig, ObjectiveConfig
from torch_port.errors import UserError
from torch_port.formats.checkpoint import HEAD, MAP, Checkpoint, split_weights
from torch_port.formats.port import check_optimizer
from torch_port.formats.weights import DTYPES, Weights
from torch_port.models.registry import find_algorithm
from torch_port.training.optimizer_config import OptimizerConfig
from torch_port.training.resume import record, run_values

DSPARK = "dspark"
_MASTERS, _FIRST, _SECOND = "optimizer.masters.", "optimizer.exp_avg.", "optimizer.exp_avg_sq."


def holds_run(checkpoint: Checkpoint) -> bool:
    """Tell whether orbax can hold a checkpoint's training state, if it has one."""
    return (
        checkpoint.training is not None
        and checkpoint.algorithm == DSPARK
        and f"{_FIRST}{HEAD}" not in checkpoint.optimizer
        and f"{_MASTERS}{HEAD}" not in checkpoint.optimizer
    )


def write_run(checkpoint: Checkpoint, directory: Path) -> None:
    """Write a run so that `jaxdraft.checkpoint.restore` continues it.

    Raises UserError when a weight is not its master rounded, dtypes are mixed, or the record is not
    what the run's numbers give.
    """
    from jaxdraft import config as spec_config
    from jaxdraft import training as spec_training
    from jaxdraft.checkpoint import meaning
    from jaxdraft.saved_run import save_arrays

    saved = checkpoint.training
    assert saved is not None  # holds_run
    target, where = saved["target"], checkpoint.format
    _check_resume_record(checkpoint, saved)
    masters = _masters(checkpoint)
    dtypes = {array.dtype for array in masters.values()}
    if len(dtypes) != 1:
        raise UserError(
            f"{where}: masters of {sorted(map(str, dtypes))}; a run in orbax computes in one dtype"
        )
    dtype = dtypes.pop()
    content = meaning(
        spec_config.DraftConfig.from_hf(checkpoint.config.to_hf()),
        spec_config.ObjectiveConfig(**saved["objective"]),
        spec_training.OptimizerConfig(**_spec_optimizer(saved["optimizer"])),
        target["fingerprint"],
        target["config"],
        dtype,
        saved["num_anchors"],
    )
    extra = extra_document(checkpoint) | {"dtype": checkpoint.dtype, "training": saved}
    arrays = _run_arrays(checkpoint, saved, masters, dtype)
    save_arrays(directory, arrays, content, extra, carried_arrays(checkpoint))


def read_run(directory: Path) -> Checkpoint:
    """Read a run from orbax as the `port` format has it.

    Raises UserError for a record of another version, arrays that do not fit it, or a malformed map.
    """
    from jaxdraft import stored
    from jaxdraft.saved_run import read

    saved = read(directory)
    said, extra, where = saved.meaning, saved.extra, str(directory)
    _check_format(said, where)
    config = _config(said)
    optimizer, weights = _run_weights(saved.arrays, said, extra, directory)
    if config.prunes:
        weights |= refs({name: getattr(saved.arrays, name) for name in MAP}, directory)
    if stored.holds(directory, "carried"):
        weights |= carried_refs(stored.read_tree(directory, "carried"), directory)
    training, notes = _training(saved, config)
    own, head, embedding = split_weights(weights, DSPARK, config, where)
    check_optimizer(optimizer, own, training, where)
    return Checkpoint(
        format=ORBAX,
        algorithm=DSPARK,
        config=config,
        weights=own,
        head=head,
        embedding=embedding,
        neutral=extra.get("neutral", {}),
        verifier=extra.get("verifier"),
        training=training,
        optimizer=optimizer,
        notes=tuple(notes),
    )


# --- Port to orbax ---------------------------------------------------------------------------


def _check_resume_record(checkpoint: Checkpoint, saved: Mapping[str, Any]) -> None:
    """The record is made anew on the way back: it must be what the run's numbers give."""
    values = run_values(
        find_algorithm(DSPARK),
        checkpoint.config,
        ObjectiveConfig(**saved["objective"]),
        saved["target"]["fingerprint"],
    )
    made = record(values)
    differing = sorted(
        n for n in set(made) | set(saved["resume"]) if made.get(n) != saved["resume"].get(n)
    )
    if differing:
        raise UserError(
            f"{checkpoint.format}: the resume record's {differing[0]} is "
            f"{saved['resume'].get(differing[0])!r}, but the run's settings give "
            f"{made.get(differing[0])!r}; it was written by another version: save the run again"
        )


def _masters(checkpoint: Checkpoint) -> dict[str, Array]:
    """Return the masters by name. Raises UserError where a weight is not its master rounded."""
    masters, wrong = {}, []
    for name, ref in checkpoint.weights.items():
        if name in MAP:
            continue
        weight, stored = ref.load(), checkpoint.optimizer.get(f"{_MASTERS}{name}")
        master = weight if stored is None else stored.load()
        if not _equal_bits(master.to(weight.dtype), weight):
            wrong.append(name)
        masters[name] = to_numpy(master)
    if wrong:
        raise UserError(
            f"{', '.join(wrong[:3])}{' …' if len(wrong) > 3 else ''}: not the masters rounded to "
            f"{checkpoint.dtype}; orbax holds the masters alone, and these weights would be lost: "
            "save the run again, or convert it to hf first to carry the weights without the run"
        )
    return masters


def _equal_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def _run_arrays(
    checkpoint: Checkpoint, saved: Mapping[str, Any], masters: dict[str, Array], dtype: np.dtype
) -> Any:
    from jaxdraft.saved_run import RunArrays
    from jaxdraft.vocabulary import identity_map, map_from_buffers

    def moments(prefix: str) -> Any:
        found = {}
        for name, master in masters.items():
            ref = checkpoint.optimizer.get(f"{prefix}{name}")
            # None before the first update (check_optimizer saw to it): torch makes them later.
            array = np.zeros_like(master) if ref is None else to_numpy(ref.load())
            if array.dtype != dtype:
                raise UserError(
                    f"{prefix}{name}: {array.dtype} beside masters of {dtype}; a run in orbax "
                    "computes in one dtype"
                )
            found[name] = array
        return to_flax(found)

    buffers = [to_numpy(checkpoint.weights[n].load()) for n in MAP if n in checkpoint.weights]
    vocabulary = (
        map_from_buffers(*buffers) if buffers else identity_map(checkpoint.config.vocab_size)
    )
    guard = saved["guard"]
    return RunArrays(
        step=saved["step"],
        params=to_flax(masters),
        first_moments=moments(_FIRST),
        second_moments=moments(_SECOND),
        updates=saved["updates"],
        mean_log=_mean_log(guard, dtype),
        seen=guard["seen"],
        t2d=vocabulary.t2d,
        d2t=vocabulary.d2t,
    )


def _mean_log(guard: Mapping[str, Any], dtype: np.dtype) -> Any:
    """The guard's mean logarithm; its `mean_log` is there where dividing would not give it."""
    if not guard["seen"]:
        return dtype.type(0)
    mean = guard.get("mean_log")
    if mean is not None and mean * guard["seen"] == guard["log_sum"]:
        return dtype.type(mean)
    return dtype.type(guard["log_sum"] / guard["seen"])


def _spec_optimizer(numbers: Mapping[str, Any]) -> dict[str, Any]:
    given = dict(numbers)
    beta1, beta2 = given.pop("betas")
    return given | {"beta1": beta1, "beta2": beta2, "epsilon": given.pop("eps")}


# --- Orbax to port ---------------------------------------------------------------------------


def _part(said: Mapping[str, Any], part: str) -> dict[str, Any]:
    start = f"{part}."
    return {n.removeprefix(start): v for n, v in said.items() if n.startswith(start)}


def _check_format(said: Mapping[str, Any], where: str) -> None:
    from jaxdraft.checkpoint import FORMAT

    if said.get("format") != FORMAT:
        raise UserError(f"{where}: format {said.get('format')!r}, this version reads {FORMAT}")
    if said.get("draft.projector_type") != DSPARK:
        raise UserError(
            f"{where}: a run of projector_type {said.get('draft.projector_type')!r}; {DSPARK} is "
            "the one that jaxdraft trains"
        )


def _config(said: Mapping[str, Any]) -> DraftConfig:
    values = _part(said, "draft")
    for name in ("layer_types", "target_layer_ids"):
        values[name] = tuple(values[name])
    values.setdefault("draft_vocab_size", values["vocab_size"])  # recorded only when it prunes
    return DraftConfig(**values)


def _run_weights(
    arrays: Any, said: Mapping[str, Any], extra: Mapping[str, Any], directory: Path
) -> tuple[Weights, Weights]:
    """Return (masters and moments, weights), the weights in the dtype that the port trained in."""
    from jaxdraft import config as spec_config
    from jaxdraft.draft_checkpoint import check_params

    working = np.dtype(said["dtype"])
    spec = spec_config.DraftConfig.from_hf(_config(said).to_hf())
    parts = {"params": arrays.params, "mu": arrays.first_moments, "nu": arrays.second_moments}
    named = {}
    for part, tree in parts.items():
        check_params(tree, spec, f"{directory}: {part}")
        named[part] = to_torch(tree)
        odd = [n for n, a in named[part].items() if a.dtype != working]
        if odd:
            raise UserError(
                f"{directory}: {part} {odd[0]} is {named[part][odd[0]].dtype}, but {working} is "
                "recorded"
            )
    masters = {name: to_tensor(array) for name, array in named["params"].items()}
    dtype = DTYPES.get(extra.get("dtype", ""), next(iter(masters.values())).dtype)
    weights = {name: master.to(dtype) for name, master in masters.items()}
    optimizer = {}
    if next(iter(masters.values())).dtype != dtype:
        optimizer = {f"{_MASTERS}{name}": to_numpy(value) for name, value in masters.items()}
    if int(arrays.updates) or any(a.any() for p in ("mu", "nu") for a in named[p].values()):
        optimizer |= {f"{_FIRST}{name}": array for name, array in named["mu"].items()}
        optimizer |= {f"{_SECOND}{name}": array for name, array in named["nu"].items()}
    return refs(optimizer, directory), refs({n: to_numpy(w) for n, w in weights.items()}, directory)


def _training(saved: Any, config: DraftConfig) -> tuple[dict[str, Any], list[str]]:
    """Make run.json's `training` entry of a run in orbax. Returns (it, notes)."""
    arrays, said = saved.arrays, saved.meaning
    step, updates = int(arrays.step), int(arrays.updates)
    carried = saved.extra.get("training") or {}
    objective = ObjectiveConfig(**_part(said, "objective"))
    numbers = _part(said, "optimizer")
    betas = (numbers.pop("beta1"), numbers.pop("beta2"))
    optimizer = OptimizerConfig(betas=betas, eps=numbers.pop("epsilon"), **numbers)
    fingerprint = said["target.fingerprint"]
    here = (carried.get("step"), carried.get("updates")) == (step, updates)
    notes = []
    if not here and (carried.get("rng") or carried.get("data")):
        notes.append(
            f"random states and data position are of step {carried['step']}, the run is at step "
            f"{step}: left out"
        )
    content = {
        "step": step,
        "updates": updates,
        "guard": _guard(arrays, carried.get("guard"), np.dtype(said["dtype"])),
        "objective": objective.model_dump(mode="json"),
        "optimizer": optimizer.model_dump(mode="json"),
        "num_anchors": said["num_anchors"],
        "target": {
            "fingerprint": fingerprint,
            "config": _target_config(said, carried.get("target")),
        },
        "resume": record(run_values(find_algorithm(DSPARK), config, objective, fingerprint)),
        "rng": carried.get("rng") if here else None,
        "data": carried.get("data") if here else None,
    }
    made: dict[str, Any] = json.loads(json.dumps(content))
    return made, notes


def _guard(arrays: Any, carried: Mapping[str, Any] | None, dtype: np.dtype) -> dict[str, Any]:
    """The guard as the port has it: the carried sum where it still says the same."""
    mean, seen = dtype.type(arrays.mean_log), int(arrays.seen)
    if carried is not None and carried["seen"] == seen and _mean_log(carried, dtype) == mean:
        return dict(carried)
    made = {"log_sum": float(mean) * seen, "seen": seen}
    if _mean_log(made, dtype) != mean:  # float64 only: a float32 mean times a count is exact
        made["mean_log"] = float(mean)
    return made


def _target_config(said: Mapping[str, Any], carried: Mapping[str, Any] | None) -> dict[str, Any]:
    """The target's config: the carried one where it is of the recorded target."""
    from jaxdraft.checkpoint import target_facts

    recorded = _part(said, "target.config")
    if carried is not None and target_facts(carried["config"]) == recorded:
        return dict(carried["config"])
    return recorded
