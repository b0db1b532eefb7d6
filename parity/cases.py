"""Conformance cases on disk: `case.json` and `tensors.safetensors` (shared design, vectors.md)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

Array = NDArray[Any]
FORMAT = 1


class CaseError(ValueError):
    """A directory that is no case, or a case that lacks something."""


@dataclass(frozen=True)
class Case:
    """One case: configs as parsed, tensors as NumPy arrays under their names in the file."""

    name: str
    path: Path
    config: dict[str, Any]
    objective: dict[str, Any]
    expect: dict[str, Any]
    tensors: dict[str, Array]
    extra: dict[str, Any]
    # How the port computes, as settings of its ComputeConfig (and `small_sizes`); said by who runs
    # the case.
    compute: Mapping[str, Any] = field(default_factory=dict)

    def group(self, prefix: str) -> dict[str, Array]:
        """Return the tensors under `prefix/`, without the prefix."""
        start = prefix + "/"
        return {k.removeprefix(start): v for k, v in self.tensors.items() if k.startswith(start)}


def as_dtype(tensors: Mapping[str, Array], dtype: str) -> dict[str, Array]:
    """Cast the floating tensors to `dtype`, leaving ids and masks alone."""
    return {
        name: value.astype(dtype) if np.issubdtype(value.dtype, np.floating) else value
        for name, value in tensors.items()
    }


def read_case(path: Path) -> Case:
    """Read one case directory.

    Raises CaseError, naming the file and what is wrong with it.
    """
    try:
        document = json.loads((path / "case.json").read_text())
        tensors = load_file(path / "tensors.safetensors")
    except (OSError, ValueError, SafetensorError) as error:  # not JSON, not UTF-8: ValueErrors
        raise CaseError(f"{path}: no readable case ({error})") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise CaseError(f"{path}: case.json must be a mapping with format {FORMAT}")
    missing = [key for key in ("name", "config", "objective", "expect") if key not in document]
    if missing:
        raise CaseError(f"{path}: case.json lacks {', '.join(missing)}")
    odd = [key for key in ("config", "objective", "expect") if not isinstance(document[key], dict)]
    if odd:
        raise CaseError(f"{path}: in case.json {', '.join(odd)} must be mappings")
    _check_expectation(path, document["expect"])
    known = {key: document.pop(key) for key in ("name", "config", "objective", "expect")}
    document.pop("format")
    return Case(path=path, tensors=tensors, extra=document, **known)


def _check_expectation(path: Path, expect: dict[str, Any]) -> None:
    """Refuse an expectation that could not be compared; an empty one is a case without answers."""
    if not expect or isinstance(expect.get("error"), str):
        return
    metrics = expect.get("metrics")
    pairs = metrics.values() if isinstance(metrics, dict) else [None]
    if not isinstance(expect.get("loss"), int | float) or not all(
        isinstance(pair, list) and len(pair) == 2 for pair in pairs
    ):
        raise CaseError(
            f"{path}: expect must hold either an error (text), or a loss (number) and metrics "
            "{name: [numerator, denominator]}"
        )


def write_case(directory: Path, case: Case) -> None:
    """Write a case as a directory that `read_case` reads; its `compute` is not part of it."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: np.ascontiguousarray(value) for name, value in sorted(case.tensors.items())},
        directory / "tensors.safetensors",
    )
    document = {
        "format": FORMAT,
        "name": case.name,
        "config": case.config,
        "objective": case.objective,
        "expect": case.expect,
    } | case.extra
    (directory / "case.json").write_text(json.dumps(document, indent=1) + "\n")


def list_cases(directory: Path) -> list[Path]:
    """Return the case directories below `directory`, by name.

    Raises CaseError when there is none: a run that compares nothing must not pass.
    """
    found = sorted(p.parent for p in directory.glob("*/case.json"))
    if not found:
        raise CaseError(
            f"{directory}: no case found; expected NAME/case.json beside NAME/tensors.safetensors"
        )
    return found
