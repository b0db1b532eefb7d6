"""A training checkpoint as arrays and documents, without the run: what a converter needs.

`checkpoint` saves and restores a run. Here its directory is read and written by somebody who has
neither the target nor a run that would continue it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxdraft import stored
from jaxdraft.training import OptimizerConfig, SpikeGuard, make_optimizer


class RunArrays(NamedTuple):
    """A checkpoint's arrays, on the host.

    `step` counts skipped steps too, `updates` does not; `params` are the masters; then AdamW's
    moments m and v, the guard's two numbers, and the map's buffers.
    """

    step: Any
    params: Any
    first_moments: Any
    second_moments: Any
    updates: Any
    mean_log: Any
    seen: Any
    t2d: Any
    d2t: Any


class SavedRun(NamedTuple):
    """What a directory of `save` holds, read without a run that wants to continue it."""

    arrays: RunArrays
    meaning: dict[str, Any]
    extra: dict[str, Any]


def save_arrays(
    directory: Path,
    arrays: RunArrays,
    record: Mapping[str, Any],
    extra: Mapping[str, Any],
    carried: Mapping[str, Any] | None = None,
) -> None:
    """Write a checkpoint from arrays alone, as `save` writes a state; `restore` continues it.

    Args:
        directory: path that does not exist yet.
        arrays: all of them.
        record: what `meaning` gives.
        extra: a JSON document to carry.
        carried: arrays to carry, by name.

    Raises:
        ValueError: the directory exists.

    Source: contracts §3.
    """
    # The structure is optax's; only moments and count in it are arrays.
    numbers = OptimizerConfig(
        **{n.removeprefix("optimizer."): v for n, v in record.items() if n.startswith("optimizer.")}
    )
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, np.float32), arrays.params)
    clip, adam, *rest = jax.eval_shape(make_optimizer(numbers).init, abstract)
    adam = adam._replace(
        count=np.asarray(arrays.updates, adam.count.dtype),
        mu=arrays.first_moments,
        nu=arrays.second_moments,
    )
    dtype = np.dtype(record["dtype"])
    whole = np.int64 if dtype == np.float64 else np.int32  # jax's own, with and without x64
    guard: tuple[Any, Any] = np.asarray(arrays.mean_log, dtype), np.asarray(arrays.seen, whole)
    state = {
        "step": np.asarray(arrays.step, whole),
        "params": arrays.params,
        "optimizer_state": (clip, adam, *rest),
        "guard": SpikeGuard(*guard),
        "t2d": arrays.t2d,
        "d2t": arrays.d2t,
    }
    trees = {"state": state} | ({"carried": dict(carried)} if carried else {})
    stored.write(directory, trees, {"meaning": dict(record), "extra": dict(extra)})


def read(directory: Path) -> SavedRun:
    """Read a checkpoint without continuing it: to show or to convert it.

    Args:
        directory: what `save` wrote.

    Returns:
        NumPy arrays as they are in the file, what they mean, and the carried document.

    Raises:
        ValueError: no checkpoint is there, it cannot be read, or an array of a state is missing.

    Source: contracts §3.
    """
    check_place(directory)
    tree = stored.read_tree(directory, "state")
    try:
        adam = tree["optimizer_state"][1]
        arrays = RunArrays(
            tree["step"],
            tree["params"],
            adam["mu"],
            adam["nu"],
            adam["count"],
            tree["guard"]["mean_log"],
            tree["guard"]["seen"],
            tree["t2d"],
            tree["d2t"],
        )
    except (KeyError, IndexError, TypeError) as error:
        raise ValueError(f"{directory}: a training state without {error}; copy it again") from None
    return SavedRun(arrays, stored.read_document(directory, "meaning"), read_extra(directory))


def read_extra(directory: Path) -> dict[str, Any]:
    """The document that a checkpoint carries; give it to `save` when the run has gone on.

    Args:
        directory: what `save` wrote.

    Returns:
        The JSON object; an empty one where there is none.
    """
    there = stored.holds(directory, "extra")
    extra: dict[str, Any] = stored.read_document(directory, "extra") if there else {}
    return extra


def check_place(directory: Path) -> None:
    """Refuse a directory that holds no run.

    Args:
        directory: what `save` wrote.

    Raises:
        ValueError: it is something else, or is not there.
    """
    if not stored.holds(directory, "meaning"):
        raise ValueError(
            f"{directory}: expected a checkpoint that `save` wrote, found none; check the path"
        )
