"""What planning's rules look at: the run's settings and what could be read of the files it names.

Nothing is opened but configs and the map. What is not on disk is None, and no evidence; what is
there and cannot be used is a `_problem`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_port.errors import UserError
from torch_port.models.registry import (
    Algorithm,
    find_algorithm,
    prunes_vocabulary,
    read_config,
    read_draft_config,
    unusable_path,
    vocabulary_sizes,
)

if TYPE_CHECKING:
    from torch_port.run import RunConfig


@dataclass(frozen=True)
class MapFacts:
    """A vocabulary map that could be read: V, K and the kept ids."""

    vocab_size: int
    draft_vocab_size: int
    kept: frozenset[int]


@dataclass(frozen=True)
class DraftFacts:
    """What a checked draft config says of the target that it is for."""

    hidden_size: int
    num_target_layers: int
    target_layer_ids: tuple[int, ...]


@dataclass(frozen=True)
class TargetFacts:
    """What the target's config.json says; None where it does not say it as a whole number.

    `vocab_size` is the rows of the head, which may be more than the tokenizer has ids.
    """

    vocab_size: int | None = None
    hidden_size: int | None = None
    num_hidden_layers: int | None = None


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    `prunes` as `prunes_vocabulary` answers; `vocab_size` and `draft_vocab_size` are V and K of the
    draft config. These, `draft`, `map` and `target` are None where the file is not on disk or could
    not be used. `data_there`: data.path is a directory.
    """

    algorithm: Algorithm
    draft_config: str = "config.json"
    target_path: str = "target"
    data_path: str = "features"
    producer: str = "files"
    map_path: str | None = None
    pinned: tuple[int, ...] = ()
    prunes: bool | None = None
    vocab_size: int | None = None
    draft_vocab_size: int | None = None
    draft: DraftFacts | None = None
    config_problem: str | None = None
    map: MapFacts | None = None
    map_problem: str | None = None
    target: TargetFacts | None = None
    target_problem: str | None = None
    data_there: bool = False
    data_problem: str | None = None


def read_facts(run: RunConfig) -> Facts:
    """Read what the rules need from the run and from the files it names, where they are on disk."""
    algorithm = find_algorithm(run.algorithm)
    found: dict[str, Any] = {}
    for read in (_read_draft, _read_map, _read_target, _read_data):
        found |= read(run, algorithm)
    return Facts(
        algorithm=algorithm,
        draft_config=run.draft.config,
        target_path=run.target.path,
        data_path=run.data.path,
        producer=run.data.producer,
        map_path=run.vocabulary.map,
        pinned=run.vocabulary.pinned,
        **found,
    )


def _read_draft(run: RunConfig, algorithm: Algorithm) -> dict[str, Any]:
    problem = unusable_path("draft.config", run.draft.config)
    if problem is not None:
        return {"config_problem": problem}
    found: dict[str, Any] = {}
    try:
        raw = read_draft_config(run.draft.config)
        if raw is None:
            return found
        found["prunes"] = prunes_vocabulary(raw)
        found["vocab_size"], found["draft_vocab_size"] = vocabulary_sizes(raw)
        found["draft"] = _checked_draft(algorithm, raw)
    except UserError as error:
        # The reader's own prefix would say twice which file is meant.
        text = str(error).removeprefix(f"draft.config {run.draft.config}: ")
        text = text.removeprefix("draft config: ").removeprefix("DraftConfig: ")
        found["config_problem"] = f"draft.config {run.draft.config}: {text}"
    return found


def _checked_draft(algorithm: Algorithm, raw: dict[str, Any]) -> DraftFacts:
    """Read a config by its family's class, which refuses another family's; a twin is told by name.

    DSpark and DFlash share a class: there the file's projector_type decides.
    """
    config: Any = algorithm.config_class().from_hf(raw)  # type: ignore[attr-defined]
    projector = getattr(config, "projector_type", algorithm.name)
    if projector != algorithm.name:
        raise UserError(
            f"algorithm is {algorithm.name!r}, but the draft config's projector_type is "
            f"{projector!r}, which predicts other slots; set algorithm to {projector!r}, or name "
            "another draft.config"
        )
    return DraftFacts(config.hidden_size, config.num_target_layers, config.target_layer_ids)


def _read_map(run: RunConfig, _: Algorithm) -> dict[str, Any]:
    path = run.vocabulary.map
    if path is None:
        return {}
    problem = unusable_path("vocabulary.map", path)
    if problem is not None:
        return {"map_problem": problem}
    if not Path(path).exists():
        return {}
    from torch_port.vocabulary.files import load_map  # brings torch: only where a map is on disk

    try:
        t2d, d2t, _metadata = load_map(Path(path))
    except UserError as error:
        return {"map_problem": f"vocabulary.map: {error}"}
    kept = frozenset(t2d.nonzero().squeeze(1).tolist())
    return {"map": MapFacts(len(t2d), len(d2t), kept)}


def _read_target(run: RunConfig, _: Algorithm) -> dict[str, Any]:
    path = Path(run.target.path)
    problem = unusable_path("target.path", run.target.path)
    if problem is not None:
        return {"target_problem": problem}
    if not path.exists():
        return {}
    name = f"target.path {run.target.path}"
    if not path.is_dir():
        problem = f"{name} is no directory; name the one with the target's config.json and weights"
        return {"target_problem": problem}
    try:
        raw = read_config(path, "target.path")
    except UserError as error:
        return {"target_problem": str(error)}
    assert raw is not None  # a directory is there: no config.json in it is an error
    return {"target": target_facts(raw)}


def target_facts(raw: Mapping[str, Any]) -> TargetFacts:
    """Take the sizes out of a target's config.json.

    A multimodal target keeps those of its decoder under `text_config`; they go before the top's.

    >>> target_facts({"vocab_size": 20, "text_config": {"vocab_size": 16, "hidden_size": 8}})
    TargetFacts(vocab_size=16, hidden_size=8, num_hidden_layers=None)
    """
    text = raw.get("text_config")
    values = {**raw, **text} if isinstance(text, Mapping) else raw
    names = ("vocab_size", "hidden_size", "num_hidden_layers")
    return TargetFacts(**{n: values[n] for n in names if type(values.get(n)) is int})


def _read_data(run: RunConfig, _: Algorithm) -> dict[str, Any]:
    path = Path(run.data.path)
    problem = unusable_path("data.path", run.data.path)
    if problem is not None:
        return {"data_problem": problem}
    if not path.exists():
        return {}
    if not path.is_dir():
        return {
            "data_problem": f"data.path {run.data.path} is no directory; name the directory that "
            "holds the captured features, not one of its files"
        }
    return {"data_there": True}
