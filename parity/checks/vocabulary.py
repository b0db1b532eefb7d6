"""The same counts give the same map on both sides, and the same mistakes are refused (sheet §2)."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from parity.cases import Array, Case
from parity.checks.base import Check, CheckResult, Measured, Plan
from parity.checks.drawn import Drawn, compare_drawn, counting
from parity.compare import TOLERANCE, relative_error
from parity.sides import setup_jax
from parity.tolerances import EXACT

NAME = "vocabulary"
QUICK, WHOLE = 60, 600  # random cases of each configuration
_MASS_IDS = 11
_ROUNDING = 1e-15  # of a coverage: one division of two whole numbers


def run_vocabulary(plan: Plan) -> CheckResult:
    """Build maps from drawn counts on both sides, ties, pins, fill and V_tok included."""
    result, started = CheckResult(NAME), time.process_time()
    setup_jax()
    kinds = [kind for kind in KINDS if plan.wants(kind)]
    count = plan.count(QUICK, WHOLE)
    counted = counting(plan, len(kinds) * count)
    for kind in kinds:
        drawn = Drawn(kind, KINDS[kind], partial(_make, kind, plan.seed), compare_maps, tell=_told)
        if compare_drawn({NAME: result}, drawn, plan, count, counted) and plan.first_only:
            break
    result.seconds = time.process_time() - started
    return result


def _make(kind: str, seed: int, number: int, value: tuple[list[int], dict[str, Any]]) -> Case:
    counts, asked = value
    tensors = {"counts": np.array(counts, np.int64)}
    if kind == "mass":
        tensors |= _teacher(len(counts), np.array(asked["mask"]), seed, number)
    return Case(
        name=f"{kind} #{number}",
        path=Path(kind),
        config={},
        objective={},
        expect={},
        tensors=tensors,
        extra={NAME: asked},
    )


def _teacher(V: int, mask: Array, seed: int, number: int) -> dict[str, Array]:
    """Draw a teacher's states and head, by the run's seed and the case's number."""
    random = np.random.default_rng([23, seed, number])
    states, head = random.normal(size=(*mask.shape, 5)), random.normal(size=(V, 5))
    return {"states": states, "head": head, "mask": mask.astype(np.float64)}


def compare_maps(case: Case) -> list[Measured]:
    """Compare t2d, d2t, the derived index and the coverage of both sides, or that both refuse."""
    if "states" in case.tensors:
        return _compare_masses(case)
    if "ids" in case.extra[NAME]:
        return _compare_counting(case)
    port, spec = _answer(_port_map, case), _answer(_spec_map, case)
    told = [value for value in (port, spec) if isinstance(value, str)]
    if told:
        agree = len(told) == 2
        stage = f"refusal (port: {_short(port)}; spec: {_short(spec)})"
        return [Measured(NAME, stage, 0.0 if agree else float("inf"), EXACT)]
    assert not isinstance(port, str)
    assert not isinstance(spec, str)
    result = []
    for name in ("t2d", "d2t", "index"):
        same = port[name].dtype == spec[name].dtype and np.array_equal(port[name], spec[name])
        result.append(Measured(NAME, name, 0.0 if same else float("inf"), EXACT))
    error = abs(float(port["coverage"]) - float(spec["coverage"]))
    return [*result, Measured(NAME, "coverage", error, _ROUNDING)]


def _compare_counting(case: Case) -> list[Measured]:
    """Compare the port's counts with those of the tokens that the spec calls supervised."""
    import jax.numpy as jnp

    from jaxdraft.blocks import supervised
    from torch_port.vocabulary.counting import count_supervised_tokens

    ids, mask = (np.asarray(case.extra[NAME][name]) for name in ("ids", "mask"))
    V = len(case.tensors["counts"])
    on = np.asarray(supervised(jnp.asarray(mask)))
    expected = np.bincount(ids[on], minlength=V)
    got = count_supervised_tokens(zip(ids, mask.astype(np.float32), strict=True), V)
    same = np.array_equal(got, expected)
    return [Measured(NAME, "supervised counts", 0.0 if same else float("inf"), EXACT)]


def _compare_masses(case: Case) -> list[Measured]:
    """Compare the teacher's mass of every id, and the maps that both make of the port's."""
    import jax.numpy as jnp
    import torch

    from jaxdraft.vocabulary import build_map_by_mass, teacher_mass
    from torch_port.vocabulary.mass import TeacherMass
    from torch_port.vocabulary.selection import select_by_mass

    states, head, mask = (case.tensors[name] for name in ("states", "head", "mask"))
    port = TeacherMass(torch.from_numpy(head))
    for row, on in zip(states, mask, strict=True):
        port.add(torch.from_numpy(row), torch.from_numpy(on))
    got = port.total().numpy()
    spec = np.asarray(teacher_mass(*map(jnp.asarray, (states, mask, head))))
    size = case.extra[NAME]["size"]
    kept = np.flatnonzero(np.asarray(build_map_by_mass(got, size).t2d))
    same = np.array_equal(select_by_mass(got, size), kept)
    return [
        Measured(NAME, "teacher mass", relative_error(got, spec), TOLERANCE["float64"]),
        Measured(NAME, "map by mass", 0.0 if same else float("inf"), EXACT),
    ]


def _short(answer: dict[str, Array] | str) -> str:
    return answer if isinstance(answer, str) else "a map"


def _answer(make: Callable[..., dict[str, Array]], case: Case) -> dict[str, Array] | str:
    """Return a side's map, or what it said instead; an error that is no refusal says its type."""
    try:
        return make(case.tensors["counts"], **case.extra[NAME])
    except ValueError as error:  # the spec's, and the port's UserError
        return str(error)


def _port_map(
    counts: Array, size: int, pinned: list[int], tokenizer_size: int | None
) -> dict[str, Array]:
    import torch

    from torch_port.vocabulary.mapping import DraftVocabMappingMixin, buffers_from_kept
    from torch_port.vocabulary.selection import coverage, select_by_count

    kept = select_by_count(counts, size, pinned, tokenizer_size)
    t2d, d2t = buffers_from_kept(torch.from_numpy(kept), len(counts))
    # An unpruned draft has no buffers unless its family keeps them, as EAGLE3 does.
    kind = type("Holder", (DraftVocabMappingMixin,), {"keeps_vocab_buffers_when_unpruned": True})
    holder: Any = kind()
    holder.register_vocab_buffers(len(counts), size)
    holder.install_vocab_mapping(t2d, d2t)
    return {
        "t2d": t2d.numpy(),
        "d2t": d2t.numpy(),
        "index": holder.draft_vocab_index().numpy(),
        "coverage": np.asarray(coverage(kept, counts) if counts.any() else 0.0),
    }


def _spec_map(
    counts: Array, size: int, pinned: list[int], tokenizer_size: int | None
) -> dict[str, Array]:
    from jaxdraft.vocabulary import build_map, coverage

    found = build_map(counts, size, pinned, tokenizer_size)
    return {
        "t2d": np.asarray(found.t2d),
        "d2t": np.asarray(found.d2t),
        "index": np.asarray(found.index),
        "coverage": np.asarray(coverage(found, counts) if counts.any() else 0.0),
    }


def _told(case: Case) -> str:
    return f"{case.extra[NAME]} of counts {case.tensors['counts'].tolist()}"


# --- What is drawn ----------------------------------------------------------------------------


# Whole numbers up to 99: see parity/variations.py.
Value = tuple[list[int], dict[str, Any]]  # counts, and what is asked of both


def _counts_of(draw: st.DrawFn, ids: int, most: int) -> list[int]:
    return draw(st.lists(st.integers(0, most), min_size=ids, max_size=ids))


def _asked(draw: st.DrawFn, ids: int, pins: int = 0) -> dict[str, Any]:
    pinned = draw(st.lists(st.integers(0, ids - 1), min_size=pins, max_size=pins, unique=True))
    again = draw(st.integers(0, pins))  # an id that is named twice is one
    size = draw(st.integers(max(1, pins), ids))
    return {"size": size, "pinned": pinned + pinned[:again], "tokenizer_size": None}


@st.composite
def _counts(draw: st.DrawFn, most: int = 99) -> Value:
    V = draw(st.integers(2, 59))
    return _counts_of(draw, V, most), _asked(draw, V)


@st.composite
def _fill(draw: st.DrawFn) -> Value:
    """Fewer ids with a count than K; sometimes none has any."""
    V = draw(st.integers(4, 59))
    counts = [0] * V
    for id_ in draw(st.lists(st.integers(0, V - 1), unique=True, max_size=V // 2)):
        counts[id_] = draw(st.integers(1, 9))
    return counts, _asked(draw, V) | {"size": draw(st.integers(V // 2, V))}


@st.composite
def _pinned(draw: st.DrawFn) -> Value:
    V = draw(st.integers(8, 59))
    return _counts_of(draw, V, 4), _asked(draw, V, draw(st.integers(1, 5)))


@st.composite
def _padding(draw: st.DrawFn) -> Value:
    V = draw(st.integers(8, 59))
    ids = draw(st.integers(6, V))
    counts = _counts_of(draw, ids, 3) + [0] * (V - ids)
    return counts, _asked(draw, ids, draw(st.integers(0, 3))) | {"tokenizer_size": ids}


@st.composite
def _ends(draw: st.DrawFn) -> Value:
    """K = 1, K = V − 1, K = V."""
    V = draw(st.integers(2, 39))
    size = draw(st.sampled_from([1, V - 1, V]))
    return _counts_of(draw, V, 3), _asked(draw, V) | {"size": size}


@st.composite
def _mistakes(draw: st.DrawFn) -> Value:
    """Each a mistake that both must refuse."""
    V = draw(st.integers(6, 19))
    counts, asked = _counts_of(draw, V, 8), _asked(draw, V)
    wrong: list[dict[str, Any]] = [
        {"size": 0},
        {"size": -1},
        {"size": V + 1},
        {"size": 2.5},
        {"size": True},
        {"size": 1, "pinned": [0, 1]},
        {"pinned": [V]},
        {"pinned": [-1]},
        {"pinned": [1.5]},
        {"tokenizer_size": V + 1},
        {"tokenizer_size": 0},
        {"size": V, "tokenizer_size": V - 1},
        {"size": 1, "pinned": [V - 1], "tokenizer_size": V - 1},
    ]
    asked |= draw(st.sampled_from(wrong))
    if asked["tokenizer_size"] == V - 1:
        counts[V - 1] = draw(st.integers(0, 1))  # counted padding is a mistake of its own
    if draw(st.sampled_from([False, False, False, False, True])):
        counts[0] = -1
    return counts, asked


@st.composite
def _counting(draw: st.DrawFn) -> Value:
    """Token ids and loss masks of some rows instead of counts; 0.5 is not supervised, 0.6 is."""
    V, rows, length = draw(st.integers(2, 39)), draw(st.integers(1, 3)), 12
    token, on = st.integers(0, V - 1), st.sampled_from([0.0, 0.5, 0.6, 1.0])
    ids, mask = (
        draw(
            st.lists(
                st.lists(value, min_size=length, max_size=length), min_size=rows, max_size=rows
            )
        )
        for value in (token, on)
    )
    return [0] * V, {"ids": ids, "mask": mask}


@st.composite
def _mass(draw: st.DrawFn) -> Value:
    """Loss masks of two rows of a teacher's states; one size of each, as XLA compiles for it."""
    values = st.sampled_from([1.0, 0.6, 0.5, 0.0])
    rows = st.lists(st.lists(values, min_size=9, max_size=9), min_size=2, max_size=2)
    return [0] * _MASS_IDS, {"size": draw(st.integers(1, _MASS_IDS)), "mask": draw(rows)}


KINDS: dict[str, st.SearchStrategy[Value]] = {
    "counting": _counting(),
    "counts": _counts(),
    "ties": _counts(2),
    "fill": _fill(),
    "pinned ids": _pinned(),
    "padding rows": _padding(),
    "K at its ends": _ends(),
    "mistakes": _mistakes(),
    "mass": _mass(),
}

CHECK = Check(
    NAME,
    "the map built from counts: t2d, d2t, index, coverage; ties, pinned ids, fill, padding rows; "
    "supervised tokens counted, the teacher's mass summed; "
    "both refuse the same mistakes",
    ("§2",),
    run_vocabulary,
    (
        "maps by each side's own mass, whose sums round differently: both rank the port's",
        "the words of a refusal, which are each side's own",
    ),
)
