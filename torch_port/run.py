"""The run file: everything a training run is told, as one strict schema (YAML + overrides).

A section is a class of settings and a field of `RunConfig`; later work adds more of them. Paths are
taken as they are written, relative to the working directory. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from torch_port.compute import ComputeConfig
from torch_port.config import Settings, explain
from torch_port.errors import UserError
from torch_port.models.registry import Algorithm, find_algorithm
from torch_port.settings_file import apply_overrides, read_settings, refuse_unknown, tuples
from torch_port.training.optimizer_config import OptimizerConfig

PathText = str  # kept as written, so that the resolved run shows what the file says
Origin = Literal["file", "override", "default"]


class DraftSection(Settings):
    """`config`: the draft's config.json, or a directory that holds it."""

    config: PathText = Field(min_length=1)


class TargetSection(Settings):
    """`path`: the target's directory (config, embedding, head, tokenizer)."""

    path: PathText = Field(min_length=1)


class DataSection(Settings):
    """Where the captured features come from.

    `path`: the feature directory. `producer`: "files" (made before this run), "inline" (this
    process captures them) or "separate" (another process makes them while this one trains).
    """

    path: PathText = Field(min_length=1)
    producer: Literal["files", "inline", "separate"] = "files"


class VocabularySection(Settings):
    """`map`: a vocabulary map's file; null means none. `pinned`: target ids to keep regardless."""

    map: PathText | None = Field(default=None, min_length=1)
    pinned: tuple[Annotated[int, Field(ge=0)], ...] = ()


class RunConfig(Settings):
    """A resolved run. `objective` is of the class that the algorithm's registry entry names."""

    algorithm: str
    draft: DraftSection
    target: TargetSection
    data: DataSection
    vocabulary: VocabularySection
    objective: Settings
    compute: ComputeConfig
    optimizer: OptimizerConfig


@dataclass(frozen=True)
class LoadedRun:
    """A run and, by dotted name, each setting's value and where it came from."""

    config: RunConfig
    settings: dict[str, tuple[Any, Origin]]


def section_classes(algorithm: Algorithm) -> dict[str, type[Settings]]:
    """Return the class of every section of a run with that algorithm."""
    classes = {
        name: field.annotation
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings)
    }
    return classes | {"objective": algorithm.objective_class()}


def load_run(path: Path, overrides: Sequence[str] = ()) -> LoadedRun:
    """Read a run file and overrides (`optimizer.peak_rate=6e-4`); nothing is coerced.

    Raises UserError for an unreadable file, an unknown name (with the nearest known one), a missing
    or wrong value; all wrong values are named at once.
    """
    values = read_settings(path)
    overridden = apply_overrides(values, overrides)
    try:
        config = resolve(values)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    settings: dict[str, tuple[Any, Origin]] = {
        "algorithm": (config.algorithm, "override" if "algorithm" in overridden else "file")
    }
    for section in section_classes(find_algorithm(config.algorithm)):
        given = values.get(section) or {}
        for name, value in getattr(config, section).model_dump().items():
            dotted = f"{section}.{name}"
            origin: Origin = "file" if name in given else "default"
            settings[dotted] = (value, "override" if dotted in overridden else origin)
    return LoadedRun(config, settings)


def resolve(values: Mapping[str, Any]) -> RunConfig:
    """Check nested settings and fill in defaults. Raises UserError, naming every wrong value."""
    if "algorithm" not in values:
        refuse_unknown(values, RunConfig.model_fields)
        raise UserError("algorithm is missing; set it to the draft family to train")
    algorithm = find_algorithm(values["algorithm"])
    classes = section_classes(algorithm)
    places = {
        field: f"{name}.{field}" for name, kind in classes.items() for field in kind.model_fields
    }
    refuse_unknown(values, RunConfig.model_fields, elsewhere=places)
    built: dict[str, Any] = {}
    problems: list[str] = []
    for name, kind in classes.items():
        try:
            built[name] = _section(name, kind, values.get(name), places)
        except UserError as error:
            problems.append(str(error))
    if problems:
        raise UserError("; ".join(problems))
    return RunConfig(algorithm=algorithm.name, **built)


def _section(name: str, kind: type[Settings], given: Any, places: Mapping[str, str]) -> Settings:
    """Build one section; an absent or empty one is all defaults."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise UserError(f"{name}: expected a section of settings, found {given!r}")
    refuse_unknown(given, kind.model_fields, name, places)
    section = kind.__new__(kind)
    try:
        # Past Settings.__init__, whose error names the class: here it is the section that counts.
        BaseModel.__init__(section, **{field: tuples(value) for field, value in given.items()})
    except ValidationError as error:
        raise UserError(explain(error, name)) from None
    return section
