"""The fixed list of edges: contents that random draws would seldom or never give."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from parity.cases import Array, Case
from parity.configurations import COMPUTE, Configuration, with_tensors
from parity.exploring import drawn
from parity.recipes import B, S, V
from parity.variations import variations

LOSS_ONLY = "loss_only"  # in a case's `extra`: at the L1's kink gradients are not compared (§8)
_FIRST = 1_000_000  # their number, behind those of every drawn case
_ON, _ANCHORS, _KEEP = "batch/loss_mask", "batch/anchor_positions", "batch/block_keep_mask"
_IDS, _TEACHER = "batch/input_ids", "batch/target_last_hidden_states"

Edge = Callable[[Configuration, Case, np.random.Generator], Case | None]


def edges(configuration: Configuration, seed: int) -> Iterator[tuple[str, Case]]:
    """Yield (name, case) of every edge that a configuration can have."""
    strategy = variations(configuration.family)
    varied = drawn(strategy, f"edges/{configuration.name}/{seed}", len(EDGES))
    for number, (name, make) in enumerate(EDGES.items()):
        random = np.random.default_rng([11, zlib.crc32(f"{configuration.name}/{name}".encode())])
        case = configuration.case(seed, _FIRST + number, varied[number])
        if configuration.family == "dspark":
            alphas = {"ce_alpha": 0.1, "l1_alpha": 0.9}
            case = replace(case, objective=case.objective | alphas)
        edge = make(configuration, case, random)
        if edge is not None:
            yield name, replace(edge, name=f"{configuration.name}, {name}")


def _supervised(case: Case) -> Case:
    """Everything is supervised, every block is kept."""
    tensors = {_ON: np.ones((B, S), np.float32)}
    if _KEEP in case.tensors:
        tensors[_KEEP] = np.ones_like(case.tensors[_KEEP])
    return with_tensors(case, tensors)


def hot(configuration: Configuration, case: Case, random: np.random.Generator) -> Case:
    """Logits of thousands: every softmax is one-hot, and a naive one overflows."""
    names = ["target/lm_head.weight"]
    names += ["weights/lm_head.weight"] if configuration.family == "eagle3" else []
    return with_tensors(
        _supervised(case), {n: case.tensors[n] * np.float32(1e3 / _size(case, n)) for n in names}
    )


def _size(case: Case, name: str) -> float:
    return float(np.abs(case.tensors[name]).max())


def _pruned_ids(case: Case) -> Array | None:
    kept = case.tensors.get("weights/t2d")
    return None if kept is None or kept.all() else np.flatnonzero(~kept)


def pruned_labels(
    configuration: Configuration, case: Case, random: np.random.Generator
) -> Case | None:
    """No label is kept: both must refuse."""
    ids = _pruned_ids(case)
    if ids is None or configuration.family == "eagle3":
        return None
    return with_tensors(_supervised(case), {_IDS: random.choice(ids, (B, S))})


def pruned_labels_without_ce(
    configuration: Configuration, case: Case, random: np.random.Generator
) -> Case | None:
    """No label is kept, and α_ce is 0: the term is 0 whatever its denominator."""
    case_ = pruned_labels(configuration, case, random)
    if case_ is None or configuration.family != "dspark":
        return None
    return replace(case_, objective=case_.objective | {"ce_alpha": 0.0, "l1_alpha": 1.0})


def unsupervised(configuration: Configuration, case: Case, random: np.random.Generator) -> Case:
    """Nothing is supervised: both must refuse. A mask of 0.5 is not supervised."""
    return with_tensors(case, {_ON: np.full((B, S), 0.5, np.float32)})


def dropped_row(
    configuration: Configuration, case: Case, random: np.random.Generator
) -> Case | None:
    """Every block of the first row is dropped: its queries see nothing, and nothing is NaN."""
    if configuration.family == "eagle3":
        return None
    case = _supervised(case)
    keep = case.tensors[_KEEP].copy()
    keep[0] = False
    return with_tensors(case, {_KEEP: keep})


def end_of_sequence(
    configuration: Configuration, case: Case, random: np.random.Generator
) -> Case | None:
    """Blocks that leave the sequence; one stands on its last token and predicts nothing."""
    if configuration.family == "eagle3":
        return None
    anchors = case.tensors[_ANCHORS].copy()
    blocks = anchors.shape[1]
    anchors[0] = [S - 2, S - 3, S - 1, S - 4][:blocks]
    anchors[1] = [S - 2, 0, 0, S - 2][:blocks]
    return with_tensors(_supervised(case), {_ANCHORS: anchors})


def first_anchor(
    configuration: Configuration, case: Case, random: np.random.Generator
) -> Case | None:
    """Anchors at 0 see no context at all; at 1, one position."""
    if configuration.family == "eagle3":
        return None
    anchors = case.tensors[_ANCHORS].copy()
    anchors[0], anchors[1] = 0, [1, 0, 2, 1][: anchors.shape[1]]
    return with_tensors(_supervised(case), {_ANCHORS: anchors})


def mask_holes(configuration: Configuration, case: Case, random: np.random.Generator) -> Case:
    """Every third position is unsupervised: blocks end there (§3), or go on behind it (§12)."""
    mask = np.ones((B, S), np.float32)
    mask[0, 2::3], mask[1, 1::3] = 0, 0.5
    return with_tensors(_supervised(case), {_ON: mask})


def illegal_padding(
    configuration: Configuration, case: Case, random: np.random.Generator
) -> Case | None:
    """Padding whose ids are −1 and V, behind blocks that reach into it (field note 9)."""
    if configuration.family == "eagle3":
        return None
    case = _supervised(case)
    ids, mask, anchors = (case.tensors[n].copy() for n in (_IDS, _ON, _ANCHORS))
    length = S // 2
    mask[:, length:] = 0
    ids[0, length:], ids[1, length:] = -1, V
    anchors[:] = np.sort(random.integers(1, length, anchors.shape))
    anchors[:, -1] = length - 2
    return with_tensors(case, {_IDS: ids, _ON: mask, _ANCHORS: anchors})


def unread_states(
    configuration: Configuration, case: Case, random: np.random.Generator
) -> Case | None:
    """Captured states behind every anchor, which no block sees, are NaN."""
    if configuration.family == "eagle3":
        return None
    case = _supervised(case)
    states, anchors = case.tensors["batch/hidden_states"].copy(), case.tensors[_ANCHORS].copy()
    anchors[:] = np.sort(random.integers(1, S // 2, anchors.shape))
    states[:, S // 2 :] = np.nan
    return with_tensors(case, {"batch/hidden_states": states, _ANCHORS: anchors})


def unread_targets(
    configuration: Configuration, case: Case, random: np.random.Generator
) -> Case | None:
    """Target states that no counted slot is taught by are no numbers (field note 9).

    In the plain form: the fused one never reads them.
    """
    if configuration.family == "eagle3":
        return None
    case = _supervised(case)
    mask, states, anchors = (case.tensors[n].copy() for n in (_ON, _TEACHER, _ANCHORS))
    mask[:, S // 2 :], states[:, S // 2 :] = 0, np.nan
    anchors[:] = np.sort(random.integers(1, S // 2, anchors.shape))
    case = replace(case, compute=COMPUTE[1])
    return with_tensors(case, {_ON: mask, _TEACHER: states, _ANCHORS: anchors})


def same_anchor(
    configuration: Configuration, case: Case, random: np.random.Generator
) -> Case | None:
    """Blocks at one anchor, and at neighbours: they overlap and must not see each other."""
    if configuration.family == "eagle3" or configuration.one_anchor:
        return None
    anchors = case.tensors[_ANCHORS].copy()
    anchors[0], anchors[1] = [6, 6, 7, 8], [9, 8, 7, 6]
    return with_tensors(_supervised(case), {_ANCHORS: anchors})


def teacher_ties(configuration: Configuration, case: Case, random: np.random.Generator) -> Case:
    """Teacher logits of small whole numbers: many are equal, and the lower id must win."""
    head = random.integers(-1, 2, case.tensors["target/lm_head.weight"].shape)
    states = np.zeros(case.tensors[_TEACHER].shape)
    states[..., :3] = random.integers(-1, 2, (B, S, 3))
    return with_tensors(
        _supervised(case),
        {"target/lm_head.weight": head.astype(np.float32), _TEACHER: states.astype(np.float32)},
    )


def draft_ties(
    configuration: Configuration, case: Case, random: np.random.Generator
) -> Case | None:
    """Draft logits that are whole numbers (a head of zeros, a bias of ±1 products): ties again."""
    w1, w2 = (f"weights/markov_head.markov_{n}.weight" for n in ("w1", "w2"))
    nested = case.config.get("dflash_config", {})
    if w1 not in case.tensors or nested["markov_head_type"] != "vanilla":
        return None
    signs = {n: random.choice([-1.0, 1.0], case.tensors[n].shape) for n in (w1, w2)}
    head = case.tensors["target/lm_head.weight"].copy()
    kept = case.tensors.get("weights/t2d")
    head[slice(None) if kept is None else kept] = 0
    tied = {n: value.astype(np.float32) for n, value in signs.items()}
    # Every label is a kept id: one of those that are tied often enough to tell which one wins.
    tied[_IDS] = random.choice(np.arange(V) if kept is None else np.flatnonzero(kept), (B, S))
    return with_tensors(_supervised(case), tied | {"target/lm_head.weight": head})


def equal_teacher(
    configuration: Configuration, case: Case, random: np.random.Generator
) -> Case | None:
    """Draft and teacher say the same: the kink of the L1, so only the loss is compared (§8)."""
    if not configuration.one_anchor:
        return None
    from parity.sides import run_spec

    case = _supervised(case)
    anchors = random.integers(1, S - 6, case.tensors[_ANCHORS].shape)
    case = with_tensors(case, {_ANCHORS: anchors})
    answer = run_spec(case, "float64")
    if answer.error is not None:
        return case  # the comparison will say so
    states = case.tensors[_TEACHER].copy()
    for row in range(B):
        at = anchors[row, 0]
        hidden = answer.tensors["hidden"][row, 0]
        states[row, at : at + len(hidden)] = hidden
    return replace(with_tensors(case, {_TEACHER: states}), extra={LOSS_ONLY: True})


EDGES: dict[str, Edge] = {
    "hot logits": hot,
    "all labels pruned": pruned_labels,
    "all labels pruned, no ce": pruned_labels_without_ce,
    "nothing supervised": unsupervised,
    "a row of dropped blocks": dropped_row,
    "end of the sequence": end_of_sequence,
    "start of the sequence": first_anchor,
    "holes in the mask": mask_holes,
    "illegal ids at padding": illegal_padding,
    "states nothing reads": unread_states,
    "blocks at one anchor": same_anchor,
    "ties of the teacher": teacher_ties,
    "ties of the draft": draft_ties,
    "draft equals teacher": equal_teacher,
    "targets nothing reads": unread_targets,
}
