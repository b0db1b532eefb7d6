"""The same counts give the same map on both sides, and the same mistakes are refused (sheet §2)."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from parity.cases import Array, Case
from parity.checks.base import Check, CheckResult, Measured, Plan, record
from parity.sides import setup_jax
from parity.tolerances import EXACT

NAME = "vocabulary"
QUICK, WHOLE = 60, 600  # random cases of each configuration
_ROUNDING = 1e-15  # of a coverage: one division of two whole numbers

Draw = Callable[[np.random.Generator], tuple[Array, dict[str, Any]]]


def run_vocabulary(plan: Plan) -> CheckResult:
    """Build maps from drawn counts on both sides, ties, pins, fill and V_tok included."""
    result, started = CheckResult(NAME), time.process_time()
    setup_jax()
    chosen = {name: draw for name, draw in KINDS.items() if plan.wants(name)}
    total = len(chosen) * plan.count(QUICK, WHOLE)
    for done, (configuration, case) in enumerate(_cases(chosen, plan), start=1):
        record({NAME: result}, configuration, case, compare_maps(case), text=_told(case))
        plan.progress(done, total)
        if plan.first_only and result.findings:
            break
    result.seconds = time.process_time() - started
    return result


def _cases(chosen: dict[str, Draw], plan: Plan) -> Iterator[tuple[str, Case]]:
    for configuration, draw in chosen.items():
        for number in range(plan.count(QUICK, WHOLE)):
            random = np.random.default_rng(
                [13, plan.seed, zlib.crc32(configuration.encode()), number]
            )
            counts, asked = draw(random)
            yield (
                configuration,
                Case(
                    name=f"{configuration} #{number}",
                    path=Path(configuration),
                    config={},
                    objective={},
                    expect={},
                    tensors={"counts": counts},
                    extra={NAME: asked},
                ),
            )


def compare_maps(case: Case) -> list[Measured]:
    """Compare t2d, d2t, the derived index and the coverage of both sides, or that both refuse."""
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


def _asked(random: np.random.Generator, ids: int, pins: int = 0) -> dict[str, Any]:
    size = int(random.integers(max(1, pins), ids + 1))
    pinned = random.choice(ids, pins, replace=False).tolist()
    pinned += pinned[: int(random.integers(pins + 1))]  # an id that is named twice is one
    return {"size": size, "pinned": pinned, "tokenizer_size": None}


def _counts(random: np.random.Generator) -> tuple[Array, dict[str, Any]]:
    V = int(random.integers(2, 60))
    return random.integers(0, 1000, V), _asked(random, V)


def _ties(random: np.random.Generator) -> tuple[Array, dict[str, Any]]:
    V = int(random.integers(2, 60))
    return random.integers(0, 3, V), _asked(random, V)


def _fill(random: np.random.Generator) -> tuple[Array, dict[str, Any]]:
    """Fewer ids with a count than K; sometimes none has any."""
    V = int(random.integers(4, 60))
    counts = np.zeros(V, np.int64)
    some = random.choice(V, int(random.integers(0, V // 2)), replace=False)
    counts[some] = random.integers(1, 9, len(some))
    return counts, _asked(random, V) | {"size": int(random.integers(V // 2, V + 1))}


def _pinned(random: np.random.Generator) -> tuple[Array, dict[str, Any]]:
    V = int(random.integers(8, 60))
    return random.integers(0, 5, V), _asked(random, V, int(random.integers(1, 6)))


def _padding(random: np.random.Generator) -> tuple[Array, dict[str, Any]]:
    V = int(random.integers(8, 60))
    ids = int(random.integers(6, V + 1))
    counts = random.integers(0, 4, V)
    counts[ids:] = 0
    return counts, _asked(random, ids, int(random.integers(0, 4))) | {"tokenizer_size": ids}


def _ends(random: np.random.Generator) -> tuple[Array, dict[str, Any]]:
    """K = 1, K = V − 1, K = V."""
    V = int(random.integers(2, 40))
    size = int(random.choice([1, max(1, V - 1), V]))
    return random.integers(0, 4, V), _asked(random, V) | {"size": size}


def _mistakes(random: np.random.Generator) -> tuple[Array, dict[str, Any]]:
    """Each a mistake that both must refuse."""
    V = int(random.integers(6, 20))
    counts, asked = random.integers(0, 9, V), _asked(random, V)
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
    asked |= wrong[int(random.integers(len(wrong)))]
    if asked["tokenizer_size"] == V - 1:
        counts[V - 1] = int(random.integers(2))  # counted padding is a mistake of its own
    if random.random() < 0.2:
        counts[0] = -1
    return counts, asked


def _counting(random: np.random.Generator) -> tuple[Array, dict[str, Any]]:
    """Token ids and loss masks of some rows instead of counts; 0.5 is not supervised, 0.6 is."""
    V, shape = int(random.integers(2, 40)), (int(random.integers(1, 4)), 12)
    ids, mask = random.integers(0, V, shape), random.choice([0.0, 0.5, 0.6, 1.0], shape)
    return np.zeros(V, np.int64), {"ids": ids.tolist(), "mask": mask.tolist()}


KINDS: dict[str, Draw] = {
    "counting": _counting,
    "counts": _counts,
    "ties": _ties,
    "fill": _fill,
    "pinned ids": _pinned,
    "padding rows": _padding,
    "K at its ends": _ends,
    "mistakes": _mistakes,
}

CHECK = Check(
    NAME,
    "the map built from counts: t2d, d2t, index, coverage; ties, pinned ids, fill, padding rows; "
    "both refuse the same mistakes",
    ("§2",),
    run_vocabulary,
    (
        "maps by the teacher's mass, whose sums round differently everywhere (§2 is by count)",
        "the words of a refusal, which are each side's own",
    ),
)
