"""What can be refused before a model is built (contracts §2): one function for each rule.

A rule reads settings and what could be read of the files they name. What could not be read is None
and no evidence: a rule that needs it says "unknown".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_port.config import DraftConfig
from torch_port.errors import UserError
from torch_port.models.registry import (
    ALGORITHMS,
    Algorithm,
    find_algorithm,
    prunes_vocabulary,
    read_draft_config,
    vocabulary_sizes,
)

if TYPE_CHECKING:
    from torch_port.run import LoadedRun, RunConfig


@dataclass(frozen=True)
class MapFacts:
    """A vocabulary map that could be read: V, K and the kept ids."""

    vocab_size: int
    draft_vocab_size: int
    kept: frozenset[int]


@dataclass(frozen=True)
class Facts:
    """What the rules look at.

    `prunes` as `prunes_vocabulary` answers; `vocab_size` and `draft_vocab_size` are V and K of the
    draft config, None where it is not on disk; `map` is None without a map file on disk. A
    `_problem` says why a file that is there could not be used.
    """

    algorithm: Algorithm
    draft_config: str = "config.json"
    producer: str = "files"
    map_path: str | None = None
    pinned: tuple[int, ...] = ()
    prunes: bool | None = None
    vocab_size: int | None = None
    draft_vocab_size: int | None = None
    config_problem: str | None = None
    map: MapFacts | None = None
    map_problem: str | None = None


@dataclass(frozen=True)
class Verdict:
    """One rule's answer: "ok", "reject", or "unknown" where a file is not on disk yet."""

    rule: str
    status: Literal["ok", "reject", "unknown"]
    text: str


def draft_config_is_read(facts: Facts) -> Verdict:
    """Reject a draft config that is there and wrong; one that is not there yet is unknown."""
    rule = "draft config"
    if facts.config_problem is not None:
        return Verdict(rule, "reject", facts.config_problem)
    if facts.prunes is None:
        return Verdict(
            rule,
            "unknown",
            f"draft.config {facts.draft_config} is not on disk: whether the draft prunes is open",
        )
    sizes = f"draft_vocab_size {facts.draft_vocab_size} of vocab_size {facts.vocab_size}"
    return Verdict(rule, "ok", f"{sizes}: {'pruned' if facts.prunes else 'unpruned'}")


def map_is_supported(facts: Facts) -> Verdict:
    """Rule 1: a map given to an algorithm that supports none would be ignored."""
    rule = "1 map supported"
    if facts.map_path is not None and not facts.algorithm.supports_vocab_mapping:
        able = [a.name for a in ALGORITHMS.values() if a.supports_vocab_mapping]
        return Verdict(
            rule,
            "reject",
            f"vocabulary.map is {facts.map_path}, but algorithm {facts.algorithm.name!r} supports "
            "no vocabulary map and it would be ignored; remove vocabulary.map, or set algorithm to "
            f"one of {', '.join(able)}",
        )
    return Verdict(rule, "ok", "no map" if facts.map_path is None else facts.algorithm.name)


def map_needs_pruning(facts: Facts) -> Verdict:
    """Rule 2: a map given to an unpruned draft that has no buffers to hold it.

    A config that could not be read is no evidence: not rejected.
    """
    rule = "2 map and pruning agree"
    if facts.map_path is None and facts.prunes:
        text = "no map: the draft prunes and is refused in use until one is built and installed"
        return Verdict(rule, "ok", text)
    if facts.map_path is None or facts.algorithm.keeps_vocab_buffers_when_unpruned:
        return Verdict(rule, "ok", "no map" if facts.map_path is None else "always has buffers")
    if facts.prunes is None:
        return Verdict(rule, "unknown", "the draft config is not on disk; no evidence against it")
    if facts.prunes is False:
        return Verdict(
            rule,
            "reject",
            f"vocabulary.map is {facts.map_path}, but {facts.draft_config} has draft_vocab_size "
            f"{facts.draft_vocab_size}, all of the target's {facts.vocab_size} ids. Set "
            f"draft_vocab_size in {facts.draft_config} to the number of ids that the map keeps, "
            "or remove vocabulary.map",
        )
    return Verdict(rule, "ok", "the draft prunes")


def separate_producer_has_a_map(facts: Facts) -> Verdict:
    """Rule 3: two processes that each derive a map from what they see cannot share one."""
    rule = "3 one shared map"
    if facts.producer != "separate" or facts.map_path is not None:
        return Verdict(rule, "ok", f"data.producer is {facts.producer!r}")
    if facts.prunes:
        why = f"the draft prunes to draft_vocab_size {facts.draft_vocab_size}"
    elif facts.prunes is None and facts.algorithm.keeps_vocab_buffers_when_unpruned:
        why = (
            f"algorithm {facts.algorithm.name!r} always has a map, and the draft config "
            f"{facts.draft_config}, which could say that it holds all ids, cannot be read"
        )
    elif facts.prunes is None:
        return Verdict(rule, "unknown", "the draft config is not on disk; it may not prune")
    else:
        return Verdict(rule, "ok", "the draft does not prune")
    return Verdict(
        rule,
        "reject",
        "data.producer is 'separate' (another process makes the features), vocabulary.map is not "
        f"set, and {why}: the two processes cannot derive one shared map. Build one "
        "(torch-port vocab build) and set vocabulary.map, or set data.producer to 'files'",
    )


def sizes_agree(facts: Facts) -> Verdict:
    """Rule 4: pinned ids fit into K, and the map is of the draft config's V, K and pinned ids.

    V is the rows of the target's head. A tokenizer with fewer ids (V_tok < V) is normal, is not
    pruning, and is not looked at here.
    """
    rule = "4 sizes agree"
    if facts.map_problem is not None:
        return Verdict(rule, "reject", facts.map_problem)
    problem = _pinned_problem(facts) or _map_problem(facts)
    if problem is not None:
        return Verdict(rule, "reject", problem)
    if facts.vocab_size is None or (facts.map_path is not None and facts.map is None):
        missing = "draft config" if facts.vocab_size is None else "map"
        return Verdict(rule, "unknown", f"the {missing} is not on disk")
    return Verdict(rule, "ok", f"{len(facts.pinned)} pinned, K {facts.draft_vocab_size}")


def _pinned_problem(facts: Facts) -> str | None:
    pinned = sorted(set(facts.pinned))
    K = facts.draft_vocab_size
    V = facts.vocab_size
    if K is None and facts.map is not None:
        K, V = facts.map.draft_vocab_size, facts.map.vocab_size
    if K is not None and len(pinned) > K:
        return (
            f"vocabulary.pinned names {len(pinned)} ids, but draft_vocab_size is {K}; raise "
            f"draft_vocab_size to at least {len(pinned)} or pin fewer ids"
        )
    if V is not None and pinned and pinned[-1] >= V:
        return (
            f"vocabulary.pinned names id {pinned[-1]}, but vocab_size is {V}; ids go from 0 to "
            f"{V - 1}: are they of another tokenizer?"
        )
    absent = [] if facts.map is None else [i for i in pinned if i not in facts.map.kept]
    if absent:
        return (
            f"vocabulary.pinned names id {absent[0]} ({len(absent)} such ids), which the map "
            f"{facts.map_path} does not keep; build the map again with these pinned ids, or remove "
            "them from vocabulary.pinned"
        )
    return None


def _map_problem(facts: Facts) -> str | None:
    if facts.map is None or facts.vocab_size is None or facts.draft_vocab_size is None:
        return None
    if facts.map.vocab_size != facts.vocab_size:
        return (
            f"the map {facts.map_path} is of {facts.map.vocab_size} target ids, but "
            f"{facts.draft_config} has vocab_size {facts.vocab_size} (the rows of the target's "
            "head); build the map for this target"
        )
    # Of an unpruned draft without buffers, rule 2 says what is wrong.
    has_buffers = facts.prunes or facts.algorithm.keeps_vocab_buffers_when_unpruned
    if has_buffers and facts.map.draft_vocab_size != facts.draft_vocab_size:
        return (
            f"the map {facts.map_path} keeps {facts.map.draft_vocab_size} ids, but "
            f"{facts.draft_config} has draft_vocab_size {facts.draft_vocab_size}; set "
            f"draft_vocab_size to {facts.map.draft_vocab_size}, or build a map of "
            f"{facts.draft_vocab_size} ids"
        )
    return None


RULES: tuple[Callable[[Facts], Verdict], ...] = (
    draft_config_is_read,
    map_is_supported,
    map_needs_pruning,
    separate_producer_has_a_map,
    sizes_agree,
)


def plan(facts: Facts) -> list[Verdict]:
    """Ask every rule; none of them hides another's answer."""
    return [rule(facts) for rule in RULES]


def read_facts(run: RunConfig) -> Facts:
    """Read what the rules need from the run and from the files it names, where they are on disk."""
    algorithm = find_algorithm(run.algorithm)
    sizes: tuple[int, int] | None = None
    prunes, config_problem = None, None
    try:
        raw = read_draft_config(run.draft.config)
        prunes = prunes_vocabulary(raw)
        if raw is not None:
            sizes = vocabulary_sizes(raw)
            _check_draft_config(algorithm, raw)
    except UserError as error:
        config_problem = str(error)
    vocabulary_map, map_problem = None, None
    if run.vocabulary.map is not None and Path(run.vocabulary.map).exists():
        try:
            vocabulary_map = _read_map(Path(run.vocabulary.map))
        except UserError as error:
            map_problem = f"vocabulary.map: {error}"
    return Facts(
        algorithm=algorithm,
        draft_config=run.draft.config,
        producer=run.data.producer,
        map_path=run.vocabulary.map,
        pinned=run.vocabulary.pinned,
        prunes=prunes,
        vocab_size=None if sizes is None else sizes[0],
        draft_vocab_size=None if sizes is None else sizes[1],
        config_problem=config_problem,
        map=vocabulary_map,
        map_problem=map_problem,
    )


def _check_draft_config(algorithm: Algorithm, raw: dict[str, object]) -> None:
    """Refuse a config of another family. Its own fields are read by the class that has them."""
    if algorithm.config_class() is not DraftConfig:
        return  # EAGLE3's files are read by the formats, which are not built yet
    projector = DraftConfig.from_hf(raw).projector_type
    if projector != algorithm.name:
        raise UserError(
            f"algorithm is {algorithm.name!r}, but the draft config's projector_type is "
            f"{projector!r}, which predicts other slots; set algorithm to {projector!r}, or name "
            "another draft.config"
        )


def _read_map(path: Path) -> MapFacts:
    from torch_port.vocabulary.files import load_map  # brings torch: only where a map is on disk

    t2d, d2t, _ = load_map(path)
    return MapFacts(len(t2d), len(d2t), frozenset(t2d.nonzero().squeeze(1).tolist()))


def show_plan(run: LoadedRun, verdicts: Sequence[Verdict], console: Console) -> None:
    """Print the resolved run, with where each setting came from, and every rule's verdict."""
    settings = Table("setting", "value", "from", title="Run", title_justify="left")
    for name, (value, origin) in run.settings.items():
        shown = list(value) if isinstance(value, tuple) else value
        settings.add_row(name, Text(json.dumps(shown, ensure_ascii=False)), origin)
    rules = Table("rule", "verdict", "why", title="Rules", title_justify="left")
    for verdict in verdicts:
        style = {"ok": "green", "reject": "bold red", "unknown": "yellow"}[verdict.status]
        rules.add_row(verdict.rule, Text(verdict.status, style), Text(verdict.text))
    console.print(settings, rules, sep="\n")
    rejected = [verdict for verdict in verdicts if verdict.status == "reject"]
    console.print(
        f"{len(rejected)} of {len(verdicts)} rules reject this run"
        if rejected
        else "nothing rejected",
        highlight=False,
    )
