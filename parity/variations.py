"""What varies between the cases of a configuration, as hypothesis draws it.

Only whole numbers between −99 and 99 are drawn: beyond them hypothesis takes constants from
whatever modules of a checkout are imported, and a seed would no longer say what a run compares.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from parity.cases import Array, Case
from parity.recipes import B, N, S

_SPREAD = (2, 6, 11, 16, 1, 5, 9, 14)  # where blocks stand when nothing moves them
# (α_ce, α_l1, α_confidence)
_ALPHAS = ((0.1, 0.9, 1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.5), (0.5, 0.25, 2.0))


@dataclass(frozen=True)
class Variation:
    """Masks, anchors, coefficients, and how large the logits are; the defaults are the simplest.

    `heat` and `states` are tenths of powers of ten on the output heads and on the target's states.
    `holes` and `dropped` number positions and blocks through all rows; `padding` is the
    unsupervised end of each row. `moved` says how far each block stands from its usual place,
    around the sequence's end; with `as_sampled` the anchors are candidates of §3.1, in order.
    """

    heat: int = 0
    states: int = 0
    holes: tuple[int, ...] = ()
    padding: tuple[int, ...] = (0,) * B
    on: tuple[float, ...] = (1.0,) * B
    off: tuple[float, ...] = (0.0,) * B
    as_sampled: bool = False
    moved: tuple[int, ...] = (0,) * (B * N)
    dropped: tuple[int, ...] = ()
    alphas: tuple[float, float, float] = _ALPHAS[0]
    decay: int = 4  # in halves of a slot


def variations(family: str) -> st.SearchStrategy[Variation]:
    """Return the strategy of a family's variations ("dspark", "dflash" or "eagle3")."""
    few = st.lists(st.integers(0, B * S - 1), unique=True, max_size=6)
    many = st.lists(st.integers(0, B * S - 1), unique=True, min_size=S // 2, max_size=B * S // 2)
    drawn: dict[str, st.SearchStrategy[object]] = {
        "heat": st.integers(-10, 12),
        "states": st.integers(-7, 7),
        "holes": st.one_of(st.just([]), few, few, many).map(tuple),
        "padding": _each(st.just(0) | st.integers(1, S // 2), B),
        "on": _each(st.sampled_from([1.0, 0.6]), B),
        "off": _each(st.sampled_from([0.0, 0.5]), B),
    }
    if family != "eagle3":
        drawn |= {
            "as_sampled": st.booleans(),
            "moved": _each(st.integers(0, S - 2), B * N),
            "dropped": st.lists(st.integers(0, B * N - 1), unique=True, max_size=3).map(tuple),
        }
    if family == "dspark":
        drawn |= {"alphas": st.sampled_from(_ALPHAS), "decay": st.integers(1, 16)}
    return st.builds(Variation, **drawn)


def _each(strategy: st.SearchStrategy[object], count: int) -> st.SearchStrategy[tuple[object, ...]]:
    return st.lists(strategy, min_size=count, max_size=count).map(tuple)


def varied(case: Case, variation: Variation, family: str, blocks: int) -> Case:
    """Return a drawn case in a variation.

    Arguments: the case; the variation; the family; how many blocks a row has.
    """
    tensors = dict(case.tensors)
    heads = ["target/lm_head.weight"] + ["weights/lm_head.weight"] * (family == "eagle3")
    for name in heads:
        tensors[name] = tensors[name] * np.float32(10 ** (variation.heat / 10))
    states = "batch/target_last_hidden_states"
    tensors[states] = tensors[states] * np.float32(10 ** (variation.states / 10))
    tensors["batch/loss_mask"] = _mask(variation)
    objective = dict(case.objective)
    if family != "eagle3":
        tensors |= _anchors(variation, tensors["batch/loss_mask"], blocks)
    if family == "dspark":
        objective["ce_alpha"], objective["l1_alpha"], confidence = variation.alphas
        if objective["confidence_alpha"]:
            objective["confidence_alpha"] = confidence
        if objective["loss_decay_gamma"] is not None:
            objective["loss_decay_gamma"] = variation.decay / 2
    return replace(case, tensors=tensors, objective=objective)


def _mask(variation: Variation) -> Array:
    """Make a loss mask with holes and padding; 0.5 is not supervised, 0.6 is."""
    holes = np.isin(np.arange(B * S), variation.holes)
    supervised = ~holes.reshape(B, S)
    for row, padding in enumerate(variation.padding):
        supervised[row, S - padding :] = False
    on, off = (np.array(values)[:, None] for values in (variation.on, variation.off))
    return np.where(supervised, on, off).astype(np.float32)


def _anchors(variation: Variation, mask: Array, blocks: int) -> dict[str, Array]:
    """Place the blocks: at candidates, sorted and padded by 0 (§3.1), or anywhere."""
    places = (np.array(_SPREAD) + variation.moved) % (S - 1)
    anchors = places.reshape(B, N)[:, :blocks]
    dropped = np.isin(np.arange(B * N), variation.dropped)
    keep = ~dropped.reshape(B, N)[:, :blocks]
    if variation.as_sampled:
        on, keep = mask > 0.5, np.zeros((B, blocks), bool)
        for row in range(B):
            found = np.flatnonzero(on[row, :-1] & on[row, 1:])
            chosen = found[np.unique(anchors[row] % len(found))] if len(found) else found
            anchors[row] = 0
            anchors[row, : len(chosen)], keep[row, : len(chosen)] = chosen, True
    return {"batch/anchor_positions": anchors.astype(np.int64), "batch/block_keep_mask": keep}
