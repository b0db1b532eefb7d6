"""Checkpoints in all five formats: those of `torch_port.formats`, and orbax, which needs jax.

Names and transposition come from `parity.names`, by name and never by shape. A draft's weights, map
and config cross bit for bit, whatever their dtype; a DSpark run's training state crosses too
(`parity.orbax_runs`). What jaxdraft has no place for (neutral config fields, the target's name and
rows, random states) is carried in documents and arrays that it does not read. All tensors of an
orbax checkpoint are in memory at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from parity.cases import Array
from parity.names import EAGLE3_TABLE, TABLE, to_flax, to_torch
from torch_port.errors import UserError
from torch_port.formats import convert as port_formats
from torch_port.formats.checkpoint import EMBEDDING, HEAD, MAP, Checkpoint, split_weights
from torch_port.formats.config_files import read_config
from torch_port.formats.convert import Options, detect_format
from torch_port.formats.target import TargetDirectory
from torch_port.formats.weights import Weights, tensor_ref

ORBAX = "orbax"
FORMATS = (*port_formats.FORMATS, ORBAX)
Progress = Callable[[int, int], None]
_SUFFIX = ".weight"  # a dot would split the names of carried arrays in orbax


def read_checkpoint(directory: Path, target: TargetDirectory | None = None) -> Checkpoint:
    """Read a checkpoint of any of the five formats, checked.

    Arguments: `target` for a speculators file that does not say how many layers it has.
    Raises UserError for whatever makes the checkpoint unfit, naming what and where.
    """
    if detect_format(directory) == ORBAX:
        return read_orbax(directory)
    return port_formats.read_checkpoint(directory, target)


def convert(
    source: Path,
    destination: Path,
    to: str,
    options: Options | None = None,
    progress: Progress = lambda done, total: None,
) -> tuple[Checkpoint, list[str]]:
    """Convert a checkpoint. Returns (what was read, what the new format does not hold).

    Raises UserError for an unknown format, a destination that exists, and whatever reading and
    writing refuse; nothing half-written stays.
    """
    if to not in FORMATS:
        raise UserError(f"--to {to}: unknown format; there are {', '.join(FORMATS)}")
    if os.path.lexists(destination):  # a dangling link too: nothing could be renamed onto it
        raise UserError(f"{destination} exists already; name a new directory")
    options = options or Options()
    checkpoint = read_checkpoint(source, options.target)
    if options.target is not None:
        options.target.check(checkpoint.config)
    if to == ORBAX:
        return checkpoint, write_orbax(checkpoint, destination)
    lost = port_formats.write_checkpoint(checkpoint, destination, to, options, progress)
    return checkpoint, lost


def read_orbax(directory: Path) -> Checkpoint:
    """Read an orbax checkpoint: a draft (jaxdraft's `save_draft`) or a DSpark run (its `save`).

    Raises UserError for what cannot be read, and for everything that `split_weights` finds.
    """
    from parity.orbax_runs import read_run

    with refusals(directory):
        from jaxdraft import stored

        if stored.holds(directory, "meaning"):
            return read_run(directory)
        return _read_draft(directory)


def write_orbax(checkpoint: Checkpoint, directory: Path) -> list[str]:
    """Write a checkpoint to orbax; the directory appears complete or not at all.

    A DSpark run's training state goes along; `jaxdraft.checkpoint.restore` continues it.
    Returns what orbax does not hold, one line each.
    Raises UserError when the directory exists, or when weights are not their rounded masters.
    """
    from parity.orbax_runs import holds_run, write_run

    with refusals(directory):
        if holds_run(checkpoint):
            write_run(checkpoint, directory)
            return []
        _write_draft(checkpoint, directory)
    if checkpoint.training is None:
        return []
    return [
        f"training state of step {checkpoint.training['step']}: orbax holds the one of DSpark "
        "drafts without a trainable head (jaxdraft trains no other in one piece)"
    ]


def _read_draft(directory: Path) -> Checkpoint:
    from jaxdraft.draft_checkpoint import load_draft, read_carried

    saved, (content, extra, arrays) = load_draft(directory), read_carried(directory)
    algorithm, config, neutral, notes = read_config(content, str(directory))
    weights = refs(to_torch(saved.params, table_of(algorithm)), directory)
    if saved.vocabulary is not None:
        weights |= refs({name: getattr(saved.vocabulary, name) for name in MAP}, directory)
    weights |= carried_refs(arrays, directory)
    own, head, embedding = split_weights(weights, algorithm, config, str(directory))
    return Checkpoint(
        format=ORBAX,
        algorithm=algorithm,
        config=config,
        weights=own,
        head=head,
        embedding=embedding,
        neutral=extra.get("neutral", neutral),
        verifier=extra.get("verifier"),
        notes=tuple(notes),
    )


def _write_draft(checkpoint: Checkpoint, directory: Path) -> None:
    from jaxdraft.draft_checkpoint import save_draft
    from jaxdraft.vocabulary import map_from_buffers

    arrays = {name: to_numpy(ref.load()) for name, ref in checkpoint.weights.items()}
    buffers = [arrays.pop(name) for name in MAP if name in arrays]
    save_draft(
        directory,
        checkpoint.config.to_hf(),
        to_flax(arrays, table_of(checkpoint.algorithm)),
        map_from_buffers(*buffers) if buffers else None,
        extra_document(checkpoint),
        carried_arrays(checkpoint),
    )


def table_of(algorithm: str) -> Any:
    """Return the name table of a family."""
    return EAGLE3_TABLE if algorithm == "eagle3" else TABLE


def extra_document(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return what the formats of the port say of a draft and jaxdraft has no place for."""
    return {"neutral": dict(checkpoint.neutral), "verifier": checkpoint.verifier}


def carried_arrays(checkpoint: Checkpoint) -> dict[str, Array]:
    """Return the target's rows that a checkpoint brings, by name without its `.weight`."""
    borrowed = {HEAD: checkpoint.head, EMBEDDING: checkpoint.embedding}
    return {
        name.removesuffix(_SUFFIX): to_numpy(ref.load())
        for name, ref in borrowed.items()
        if ref is not None
    }


def carried_refs(arrays: Mapping[str, Any], directory: Path) -> Weights:
    """Undo `carried_arrays`."""
    return refs({f"{name}{_SUFFIX}": array for name, array in arrays.items()}, directory)


def refs(arrays: Mapping[str, Any], directory: Path) -> Weights:
    """Describe NumPy arrays as the tensors of a checkpoint."""
    return {name: tensor_ref(to_tensor(a), f"{directory}: {name}") for name, a in arrays.items()}


def to_numpy(tensor: Tensor) -> Array:
    """Return a tensor's values as a NumPy array, bit for bit; bf16 as ml_dtypes has it.

    >>> to_numpy(torch.tensor([1.5], dtype=torch.bfloat16)).dtype.name
    'bfloat16'
    """
    values = tensor.detach().cpu().contiguous()
    if values.dtype != torch.bfloat16:
        return values.numpy()
    import ml_dtypes  # NumPy has no such type of its own; jax brings it

    return values.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


def to_tensor(array: Any) -> Tensor:
    """Return a NumPy array's values as a tensor, bit for bit; inverse of `to_numpy`."""
    values = np.array(array)  # its own memory: what orbax read may not be written to
    if values.dtype.name != "bfloat16":
        return torch.from_numpy(values)
    return torch.from_numpy(values.view(np.int16)).view(torch.bfloat16)


@contextmanager
def refusals(directory: Path) -> Iterator[None]:
    """Say jaxdraft's refusals as the port's, naming the directory, and a missing jax in a sentence.

    A KeyError is a name outside `parity.names` (it says so), or an absent field of a record.
    """
    hooks = sys.excepthook, sys.unraisablehook
    sys.excepthook = sys.unraisablehook = _say_nothing
    try:
        yield
    except UserError:
        raise
    except ModuleNotFoundError as error:
        raise UserError(
            f'{directory}: orbax needs jax ({error}); pip install "jaxdraft[spec]"'
        ) from None
    except (ValueError, NotImplementedError, KeyError) as error:
        words = str(error)
        if isinstance(error, KeyError):
            key = str(error.args[0])
            words = key if " " in key else f"{key} is missing in its record; copy it again"
        place = "" if str(directory) in words else f"{directory}: "
        raise UserError(place + words.replace("\n", " ")) from None
    finally:
        sys.excepthook, sys.unraisablehook = hooks


def _say_nothing(*_: Any) -> None:
    """When one array cannot be read, orbax's threads print a traceback for each of the others."""
