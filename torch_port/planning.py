"""What can be refused before a model is built (contracts §2): one function for each rule.

A rule reads settings and what could be read of the files they name (`planning_facts`). What is not
on disk yet is no evidence: a rule that needs it says "unknown", and what would settle it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_port.config import target_layer_problem
from torch_port.models.registry import ALGORITHMS
from torch_port.planning_facts import DraftFacts, Facts, MapFacts, TargetFacts, read_facts

if TYPE_CHECKING:
    from torch_port.run import LoadedRun

__all__ = [
    "RULES",
    "DraftFacts",
    "Facts",
    "MapFacts",
    "TargetFacts",
    "Verdict",
    "plan",
    "read_facts",
    "show_plan",
]

Status = Literal["ok", "reject", "unknown"]


@dataclass(frozen=True)
class Verdict:
    """One rule's answer and the reason that the rule is there.

    `status`: "ok", "reject", or "unknown" where a file is not on disk yet; `needs` names those
    files by their settings.
    """

    rule: str
    status: Status
    text: str
    reason: str = ""
    needs: tuple[str, ...] = ()


# What a rule's function answers; the decorator adds its name and reason.
Answer = tuple[Status, str] | tuple[Status, str, tuple[str, ...]]

RULES: list[Callable[[Facts], Verdict]] = []


def _rule(name: str, reason: str) -> Callable[[Callable[[Facts], Answer]], Callable[..., Verdict]]:
    """Make a rule of a function: it answers with a whole `Verdict` and stands in RULES."""

    def register(check: Callable[[Facts], Answer]) -> Callable[[Facts], Verdict]:
        @functools.wraps(check)
        def rule(facts: Facts) -> Verdict:
            status, text, *needs = check(facts)
            return Verdict(name, status, text, reason, needs[0] if needs else ())

        RULES.append(rule)
        return rule

    return register


def _draft_file(facts: Facts) -> str:
    return f"draft.config {facts.draft_config}"


def _open_draft(facts: Facts) -> tuple[Status, str, tuple[str, ...]]:
    """Answer of a rule that wants a draft config which is absent or was refused."""
    file = _draft_file(facts)
    what = "is not on disk" if facts.config_problem is None else "is refused above"
    return "unknown", f"{file} {what}; no evidence against it", (file,)


@_rule("draft config", "the draft is built from it; a field that is misread is another draft")
def draft_config_is_read(facts: Facts) -> Answer:
    """Reject a draft config that is there and wrong; one that is not there yet is unknown."""
    if facts.config_problem is not None:
        return "reject", facts.config_problem
    file = _draft_file(facts)
    if facts.prunes is None:
        return "unknown", f"{file} is not on disk: whether the draft prunes is open", (file,)
    sizes = f"draft_vocab_size {facts.draft_vocab_size} of vocab_size {facts.vocab_size}"
    return "ok", f"{sizes}: {'pruned' if facts.prunes else 'unpruned'}"


@_rule("target", "embedding, head and captured states are the target's")
def target_is_there(facts: Facts) -> Answer:
    """Reject a target.path that is there and no model's directory; an absent one is unknown."""
    name = f"target.path {facts.target_path}"
    if facts.target_problem is not None:
        return "reject", facts.target_problem
    if facts.target is None:
        return "unknown", f"{name} is not on disk", (name,)
    return "ok", f"{name} holds config.json"


@_rule("data", "training reads its features there")
def data_is_there(facts: Facts) -> Answer:
    """Reject a data.path that is there and no directory; an absent one is unknown.

    No file in it is opened (contracts §5).
    """
    name = f"data.path {facts.data_path}"
    if facts.data_problem is not None:
        return "reject", facts.data_problem
    if not facts.data_there:
        later = "" if facts.producer == "files" else f" yet (data.producer is {facts.producer!r})"
        return "unknown", f"{name} is not on disk{later}", (name,)
    return "ok", f"{name} is a directory; its files are not opened here"


@_rule("map file", "the map says which target id every row of the draft's head is")
def map_file_is_read(facts: Facts) -> Answer:
    """Reject a map file that is there and holds no map; one that is not there yet is unknown."""
    if facts.map_problem is not None:
        return "reject", facts.map_problem
    if facts.map_path is None:
        return "ok", "no map"
    name = f"vocabulary.map {facts.map_path}"
    if facts.map is None:
        return "unknown", f"{name} is not on disk; torch-port vocab build makes one", (name,)
    return "ok", f"{facts.map.draft_vocab_size} of {facts.map.vocab_size} ids kept"


@_rule("1 map supported", "a map that the algorithm has no use for would be ignored silently")
def map_is_supported(facts: Facts) -> Answer:
    """Rule 1: a map given to an algorithm that supports none would be ignored."""
    if facts.map_path is not None and not facts.algorithm.supports_vocab_mapping:
        able = [a.name for a in ALGORITHMS.values() if a.supports_vocab_mapping]
        return (
            "reject",
            f"vocabulary.map is {facts.map_path}, but algorithm {facts.algorithm.name!r} supports "
            "no vocabulary map and it would be ignored; remove vocabulary.map, or set algorithm to "
            f"one of {', '.join(able)}",
        )
    return "ok", "no map" if facts.map_path is None else f"{facts.algorithm.name} takes a map"


@_rule("2 map and pruning agree", "an unpruned draft of this family has no buffers to hold a map")
def map_needs_pruning(facts: Facts) -> Answer:
    """Rule 2: a map given to an unpruned draft that has no buffers to hold it.

    A config that could not be read is no evidence: not rejected.
    """
    if facts.map_path is None and facts.prunes:
        return (
            "ok",
            "no map: the draft prunes and is refused in use until one is built and installed",
        )
    if facts.map_path is None:
        return "ok", "no map"
    if facts.algorithm.keeps_vocab_buffers_when_unpruned:
        return "ok", f"{facts.algorithm.name} always has buffers"
    if facts.prunes is None:
        return _open_draft(facts)
    if facts.prunes is False:
        return (
            "reject",
            f"vocabulary.map is {facts.map_path}, but {facts.draft_config} has draft_vocab_size "
            f"{facts.draft_vocab_size}, all of the target's {facts.vocab_size} ids. Set "
            f"draft_vocab_size in {facts.draft_config} to the number of ids that the map keeps, "
            "or remove vocabulary.map",
        )
    return "ok", "the draft prunes"


@_rule("3 one shared map", "two processes that each count what they see disagree about every id")
def separate_producer_has_a_map(facts: Facts) -> Answer:
    """Rule 3: two processes that each derive a map from what they see cannot share one."""
    if facts.producer != "separate":
        return "ok", f"data.producer is {facts.producer!r}: one process"
    if facts.map_path is not None:
        return "ok", "both processes read vocabulary.map"
    if facts.prunes:
        why = f"the draft prunes to draft_vocab_size {facts.draft_vocab_size}"
    elif facts.prunes is None and facts.algorithm.keeps_vocab_buffers_when_unpruned:
        why = (
            f"algorithm {facts.algorithm.name!r} always has a map, and the draft config "
            f"{facts.draft_config}, which could say that it holds all ids, cannot be read"
        )
    elif facts.prunes is None:
        return _open_draft(facts)
    else:
        return "ok", "the draft does not prune"
    return (
        "reject",
        "data.producer is 'separate' (another process makes the features), vocabulary.map is not "
        f"set, and {why}: the two processes cannot derive one shared map. Build one "
        "(torch-port vocab build) and set vocabulary.map, or set data.producer to 'files'",
    )


@_rule("4 sizes agree", "a map of another size or target gives every row another meaning")
def sizes_agree(facts: Facts) -> Answer:
    """Rule 4: pinned ids fit into K, and the map is of the draft config's V, K and pinned ids.

    V is the rows of the target's head. A tokenizer with fewer ids (V_tok < V) is normal, is not
    pruning, and is not looked at here.
    """
    problem = _pinned_problem(facts) or _map_problem(facts)
    if problem is not None:
        return "reject", problem
    missing = {}
    if facts.vocab_size is None:
        missing[_draft_file(facts)] = facts.config_problem
    if facts.map_path is not None and facts.map is None:
        missing[f"vocabulary.map {facts.map_path}"] = facts.map_problem
    if missing:
        texts = [
            f"{name} is {'not on disk' if problem is None else 'refused above'}"
            for name, problem in missing.items()
        ]
        return "unknown", " and ".join(texts), tuple(missing)
    return "ok", f"{len(set(facts.pinned))} pinned, K {facts.draft_vocab_size}"


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


@_rule("5 draft fits target", "the draft reads the target's states and uses its embedding and head")
def draft_fits_target(facts: Facts) -> Answer:
    """Rule 5: the draft config and the target's config.json mean the same target.

    Compared: vocab_size (the rows of the head, never the tokenizer's number of ids), hidden_size,
    the number of layers, and the captured layers against it.
    """
    target = facts.target
    problems = _target_problems(facts, target) if target is not None else []
    if problems:
        return "reject", "; ".join(problems)
    needs = []
    if facts.draft is None:
        needs.append(_draft_file(facts))
    if target is None:
        needs.append(f"target.path {facts.target_path}")
    if needs or target is None:
        return "unknown", f"{' and '.join(needs)} must be there and right first", tuple(needs)
    silent = [name for name in vars(target) if getattr(target, name) is None]
    if silent:
        file = f"{facts.target_path}/config.json"
        text = f"{file} does not say {', '.join(silent)}; what it says agrees"
        return "unknown", text, (f"{', '.join(silent)} in {file}",)
    return "ok", (
        f"vocab_size {target.vocab_size}, hidden_size {target.hidden_size}, "
        f"{target.num_hidden_layers} layers"
    )


def _target_problems(facts: Facts, target: TargetFacts) -> list[str]:
    """Name every size that differs, with both numbers."""
    draft, depth = facts.draft, target.num_hidden_layers
    compared = [("vocab_size", facts.vocab_size, target.vocab_size, "vocab_size")]
    if draft is not None:
        compared += [
            ("hidden_size", draft.hidden_size, target.hidden_size, "hidden_size"),
            ("num_target_layers", draft.num_target_layers, depth, "num_hidden_layers"),
        ]
    problems = [
        f"{facts.draft_config} has {name} {own}, but the target's config.json ({facts.target_path})"
        f" has {its_name} {its}"
        for name, own, its, its_name in compared
        if own is not None and its is not None and own != its
    ]
    # Within num_target_layers the layers were checked with the config; here against the target.
    if draft is not None and depth is not None and draft.num_target_layers != depth:
        layers = target_layer_problem(draft.target_layer_ids, depth)
        problems += [] if layers is None else [f"target_layer_ids: {layers} of the target"]
    if problems:
        problems.append("name the target that this draft is for, or correct the draft config")
    return problems


def plan(facts: Facts) -> list[Verdict]:
    """Ask every rule; none of them hides another's answer."""
    return [rule(facts) for rule in RULES]


def summary(verdicts: Sequence[Verdict]) -> str:
    """Say how many rules reject the run and how many are open, and what would settle those."""
    rejected = sum(verdict.status == "reject" for verdict in verdicts)
    unknown = [verdict for verdict in verdicts if verdict.status == "unknown"]
    text = (
        f"{rejected} of {len(verdicts)} rules reject this run" if rejected else "nothing rejected"
    )
    if unknown:
        needs = dict.fromkeys(need for verdict in unknown for need in verdict.needs)
        text += (
            f"; {len(unknown)} of {len(verdicts)} rules are unknown: plan again when these are on "
            f"disk and right: {', '.join(needs)}"
        )
    return text


def show_plan(run: LoadedRun, verdicts: Sequence[Verdict], console: Console) -> None:
    """Print the resolved run, with where each setting came from, and every rule's verdict."""
    settings = Table("setting", "value", "from", title="Run", title_justify="left")
    for name, (value, origin) in run.settings.items():
        shown = list(value) if isinstance(value, tuple) else value
        settings.add_row(name, Text(json.dumps(shown, ensure_ascii=False)), origin)
    rules = Table(
        "rule", "verdict", "finding, and why it is asked", title="Rules", title_justify="left"
    )
    for verdict in verdicts:
        style = {"ok": "green", "reject": "bold red", "unknown": "yellow"}[verdict.status]
        finding = Text.assemble(verdict.text, "\n", (f"(asked because {verdict.reason})", "dim"))
        rules.add_row(verdict.rule, Text(verdict.status, style), finding)
    console.print(settings, rules, sep="\n")
    console.print(summary(verdicts), highlight=False, markup=False)
