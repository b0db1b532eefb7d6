"""The run file: everything a training run is told, as one strict schema (YAML + overrides).

A section is a class of settings and a field of `RunConfig`; later work adds more of them. Paths are
taken as they are written, relative to the working directory. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from torch_port.compute import ComputeConfig
from torch_port.config import Settings
from torch_port.errors import UserError
from torch_port.models.registry import ALGORITHMS, Algorithm, find_algorithm
from torch_port.run_sections import (
    CheckpointsSection,
    DataSection,
    DistributionSection,
    DraftSection,
    TargetSection,
    TrainingSection,
    VocabularySection,
)
from torch_port.setting_errors import Problem, SettingsError, problems_of
from torch_port.settings_file import apply_overrides, read_settings, tuples, unknown_names
from torch_port.training.optimizer_config import OptimizerConfig

Origin = Literal["file", "override", "default"]


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
    training: TrainingSection
    distribution: DistributionSection
    checkpoints: CheckpointsSection


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

    Raises UserError for an unreadable file, an unknown name (with the known one that is near), a
    missing or wrong value; all of them are named at once, each with the file or the override that
    it came from.
    """
    values = read_settings(path)
    in_file = _dotted_names(values)
    overridden = apply_overrides(values, overrides)
    try:
        config = resolve(values)
    except SettingsError as error:
        texts: dict[str, list[str]] = {}
        for problem in error.problems:
            texts.setdefault(_origin(problem, path, in_file, overridden), []).append(problem.text)
        raise UserError("; ".join(f"{o}: {'; '.join(t)}" for o, t in texts.items())) from None
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


def _dotted_names(values: Mapping[str, Any]) -> set[str]:
    """Return the names that a file gives, sections and settings."""
    inner = {
        f"{section}.{name}"
        for section, given in values.items()
        if isinstance(given, Mapping)
        for name in given
    }
    return inner | {str(name) for name in values}


def _origin(problem: Problem, path: Path, in_file: set[str], overridden: Mapping[str, str]) -> str:
    """Say where a problem came from: an override is at fault before the file that it overrides."""
    for name, text in overridden.items():
        # An unknown section that only an override brings is the override's, too.
        sections = [n for n in problem.names if name.startswith(f"{n}.") and n not in in_file]
        if name in problem.names or sections:
            return f"override {text!r}"
    return str(path)


def resolve(values: Mapping[str, Any]) -> RunConfig:
    """Check nested settings and fill in defaults. Raises SettingsError with all that is wrong."""
    if "algorithm" not in values:
        problems = unknown_names(values, RunConfig.model_fields)
        text = f"algorithm is missing; set it to the draft family to train: {', '.join(ALGORITHMS)}"
        raise SettingsError([*problems, Problem(("algorithm",), text)])
    try:
        algorithm = find_algorithm(values["algorithm"])
    except UserError as error:
        raise SettingsError([Problem(("algorithm",), str(error))]) from None
    classes = section_classes(algorithm)
    places: dict[str, list[str]] = {}
    for name, kind in classes.items():
        for field in kind.model_fields:
            places.setdefault(field, []).append(f"{name}.{field}")
    problems = unknown_names(values, RunConfig.model_fields, elsewhere=places)
    built: dict[str, Any] = {}
    for name, kind in classes.items():
        try:
            built[name] = _section(name, kind, values.get(name), places)
        except SettingsError as error:
            found = error.problems
            problems += _with_owners(algorithm, found) if name == "objective" else found
    if problems:
        raise SettingsError(problems)
    return RunConfig(algorithm=algorithm.name, **built)


def _with_owners(algorithm: Algorithm, problems: Sequence[Problem]) -> list[Problem]:
    """Say of objective settings that only other families have whose they are, all of one at once.

    Such a problem is the algorithm's as much as the setting's: either may be the one to change.
    """
    own = algorithm.objective_class().model_fields
    owners: dict[str, tuple[str, ...]] = {}
    for other in ALGORITHMS.values():
        for field in other.objective_class().model_fields.keys() - own.keys():
            name = f"objective.{field}"
            owners[name] = (*owners.get(name, ()), repr(other.name))
    told: list[Problem] = []
    foreign: dict[tuple[str, ...], list[str]] = {}
    for problem in problems:
        name = "".join(problem.names[:1])
        if name in owners:
            foreign.setdefault(owners[name], []).append(name)
        else:
            told.append(problem)
    for families, names in foreign.items():
        is_, them = ("is", "it") if len(names) == 1 else ("are", "them")
        text = (
            f"{', '.join(names)} {is_} of algorithm {' and '.join(families)}; algorithm "
            f"{algorithm.name!r} has {', '.join(own)}: remove {them}, or set algorithm to "
            f"{' or '.join(families)}"
        )
        told.append(Problem((*names, "algorithm"), text))
    return told


def _section(
    name: str, kind: type[Settings], given: Any, places: Mapping[str, Sequence[str]]
) -> Settings:
    """Build one section; an absent or empty one is all defaults. Raises SettingsError."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        text = f"{name}: expected a section of settings, found {given!r}"
        raise SettingsError([Problem((name,), text)])
    problems = unknown_names(given, kind.model_fields, name, places)
    section = kind.__new__(kind)
    known = {field: tuples(value) for field, value in given.items() if field in kind.model_fields}
    try:
        # Past Settings.__init__, whose error names the class: here it is the section that counts.
        BaseModel.__init__(section, **known)
    except ValidationError as error:
        problems += problems_of(error, kind, name)
    if problems:
        raise SettingsError(problems)
    return section
