"""Faults for any implementation: its input is changed, the expectation is not.

An implementation that reads W1 by draft ids answers like a right one that is handed a W1 with its
rows moved. So a fault of its source becomes a change of the case, and the judge must go red on what
the adapter hands over: what stays green shows where it hands over too little, or the cases do not
look.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parity.cases import Array, Case
from parity.conventions import family
from parity.judge import judge_case
from parity.judge_verdicts import BAD, NOT_JUDGED

Change = Callable[[Case], Case | None]


@dataclass(frozen=True)
class JudgeMutant:
    """One fault: `change` returns the case as it must be shown, None where it does not apply."""

    name: str
    change: Change


@dataclass(frozen=True)
class MutantVerdict:
    """What the judge said: the case in which it went red and the stage; `applied` to how many."""

    name: str
    case: str | None
    stage: str | None
    applied: int


def _tensor(name: str, change: Callable[[Array], Array]) -> Change:
    def apply(case: Case) -> Case | None:
        if name not in case.tensors:
            return None
        return replace(case, tensors=case.tensors | {name: change(case.tensors[name])})

    return apply


def _weights(ending: str, change: Callable[[Array], Array]) -> Change:
    def apply(case: Case) -> Case | None:
        names = [n for n in case.tensors if n.startswith("weights/") and n.endswith(ending)]
        changed = {n: np.ascontiguousarray(change(case.tensors[n])) for n in names}
        same = all(np.array_equal(changed[n], case.tensors[n]) for n in names)
        fits = all(changed[n].shape == case.tensors[n].shape for n in names)
        return None if same or not fits else replace(case, tensors=case.tensors | changed)

    return apply


def _swap(one: str, other: str) -> Change:
    def apply(case: Case) -> Case | None:
        def renamed(name: str) -> str:
            return name.replace(one, "\0").replace(other, one).replace("\0", other)

        tensors = {renamed(n): v for n, v in case.tensors.items()}
        if set(tensors) != set(case.tensors):
            return None
        same = all(np.array_equal(v, case.tensors[n]) for n, v in tensors.items())
        return None if same else replace(case, tensors=tensors)

    return apply


def _config(name: str, change: Callable[[Any], Any]) -> Change:
    def apply(case: Case) -> Case | None:
        if not case.config.get(name):
            return None
        return replace(case, config=case.config | {name: change(case.config[name])})

    return apply


def _alpha(name: str, change: Callable[[Any], Any]) -> Change:
    def apply(case: Case) -> Case | None:
        if not case.objective.get(name):
            return None
        return replace(case, objective=case.objective | {name: change(case.objective[name])})

    return apply


def _w1_by_draft_id(case: Case) -> Case | None:
    """Row v holds what a reader by draft id would find: W1[index[v]], row 0 for pruned ids."""
    t2d, name = case.tensors.get("weights/t2d"), "weights/markov_head.markov_w1.weight"
    if t2d is None or name not in case.tensors:
        return None
    index = np.where(t2d, np.cumsum(t2d) - 1, 0)
    return replace(case, tensors=case.tensors | {name: case.tensors[name][index]})


def _captured_layers_swapped(case: Case) -> Case | None:
    name = "batch/hidden_states"
    layers = len(case.config["dflash_config"]["target_layer_ids"])
    if layers < 2:
        return None
    parts = np.split(case.tensors[name], layers, -1)
    return replace(case, tensors=case.tensors | {name: np.concatenate(parts[::-1], -1)})


def _heads_by_group(ending: str) -> Change:
    """Query head i reads kv head i mod groups: the rows of the heads, in that order."""

    def apply(case: Case) -> Case | None:
        heads, groups = case.config["num_attention_heads"], case.config["num_key_value_heads"]
        order = np.arange(heads).reshape(groups, -1).T.reshape(-1)

        def change(rows: Array) -> Array:
            return rows.reshape(heads, -1, rows.shape[-1])[order].reshape(rows.shape)

        return _weights(ending, change)(case)

    return apply


def _confidence_inputs(case: Case) -> Case | None:
    name, H = "weights/confidence_head.proj.weight", case.config["hidden_size"]
    if name not in case.tensors or case.tensors[name].shape[-1] == H:
        return None
    w = case.tensors[name]
    return replace(case, tensors=case.tensors | {name: np.concatenate([w[:, H:], w[:, :H]], -1)})


def _mask_token(case: Case) -> Case | None:
    head = case.config["dflash_config"]
    other = (head["mask_token_id"] + 1) % case.config["vocab_size"]
    return replace(case, config=case.config | {"dflash_config": head | {"mask_token_id": other}})


def _late(values: Array) -> Array:
    return np.roll(values, 1, axis=1)


def _early(values: Array) -> Array:
    return np.roll(values, -1, axis=1)


MUTANTS = (
    JudgeMutant("W1 is read by draft ids", _w1_by_draft_id),
    JudgeMutant("captured layers in the other order", _captured_layers_swapped),
    JudgeMutant("draft layers 0 and 1 exchanged", _swap("layers.0.", "layers.1.")),
    JudgeMutant("q_norm and k_norm exchanged", _swap("q_norm", "k_norm")),
    JudgeMutant("gate and up exchanged", _swap("gate_proj.weight", "up_proj.weight")),
    JudgeMutant("a norm's weight left at 1", _weights("hidden_norm.weight", np.ones_like)),
    JudgeMutant("a norm's weight read as 1 + w", _weights("layernorm.weight", lambda w: w + 1)),
    JudgeMutant("o_proj transposed", _weights("o_proj.weight", np.transpose)),
    JudgeMutant("query heads grouped the other way", _heads_by_group("q_proj.weight")),
    JudgeMutant("W2's rows in another order", _weights("markov_w2.weight", lambda w: w[::-1])),
    JudgeMutant("confidence head reads [e; h]", _confidence_inputs),
    JudgeMutant(
        "confidence head without its bias", _weights("confidence_head.proj.bias", np.zeros_like)
    ),
    JudgeMutant("another mask token", _mask_token),
    JudgeMutant("norm epsilon ten times as large", _config("rms_norm_eps", lambda e: e * 10)),
    JudgeMutant("rotary base 1e6", _config("rope_theta", lambda _: 1e6)),
    JudgeMutant("window one too wide", _config("sliding_window", lambda w: w + 1)),
    JudgeMutant("anchors one late", _tensor("batch/anchor_positions", lambda a: a + 1)),
    JudgeMutant("dropped blocks kept", _tensor("batch/block_keep_mask", np.ones_like)),
    JudgeMutant("loss mask one early", _tensor("batch/loss_mask", _early)),
    JudgeMutant("loss mask one late", _tensor("batch/loss_mask", _late)),
    JudgeMutant("teacher states one late", _tensor("batch/target_last_hidden_states", _late)),
    JudgeMutant("captured states one late", _tensor("batch/hidden_states", _late)),
    JudgeMutant("head rows one off", _tensor("target/lm_head.weight", lambda u: np.roll(u, 1, 0))),
    JudgeMutant("no decay", _alpha("loss_decay_gamma", lambda _: None)),
    JudgeMutant("half of the L1 term", _alpha("l1_alpha", lambda a: a / 2)),
    JudgeMutant("no cross entropy", _alpha("ce_alpha", lambda _: 0.0)),
    JudgeMutant("no confidence term", _alpha("confidence_alpha", lambda _: 0.0)),
)


def run_mutants(
    adapter: Any, cases: Sequence[Case], mutants: Sequence[JudgeMutant] = MUTANTS
) -> list[MutantVerdict]:
    """Show the adapter every mutant of the DSpark batches that it passes, until one goes red."""
    passed = [c for c in cases if _usable(c) and _passes(adapter, c)]
    return [_try(adapter, mutant, passed) for mutant in mutants]


def _usable(case: Case) -> bool:
    odd = {"optimizer", "decoding", "eagle3"} & set(case.extra)
    return not odd and "loss" in case.expect and family(case) == "dspark"


def _passes(adapter: Any, case: Case) -> bool:
    return judge_case(adapter, case, explain=False).verdict not in (*BAD, NOT_JUDGED)


def _try(adapter: Any, mutant: JudgeMutant, cases: Sequence[Case]) -> MutantVerdict:
    applied = 0
    for case in cases:
        shown = mutant.change(case)
        if shown is None:
            continue
        applied += 1
        verdict = judge_case(adapter, case, shown, explain=False)
        if verdict.verdict in BAD:
            return MutantVerdict(mutant.name, case.name, verdict.stage, applied)
    return MutantVerdict(mutant.name, None, None, applied)


def mutant_lines(found: Sequence[MutantVerdict]) -> list[str]:
    """Return what stayed green or did not apply, a line each, and last the count."""
    applied = [v for v in found if v.applied]
    lines = [f"not seen: {v.name} ({v.applied} cases)" for v in applied if v.case is None]
    lines += [f"no case that it passes has it: {v.name}" for v in found if not v.applied]
    seen = sum(v.case is not None for v in applied)
    return [*lines, f"{seen} of {len(applied)} mutants detected"]
