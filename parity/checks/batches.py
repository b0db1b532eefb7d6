"""One evaluation of a batch by both sides, for five checks: blocks to gradients (sheet §3–§9).

Nothing is kept between runs: what is changed in either side shows at once.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from parity.cases import Array, Case
from parity.checks.base import Check, CheckResult, Measured, Plan, record
from parity.checks.drawn import Drawn, compare_drawn, counting, first_failure
from parity.checks.losses import REFUSALS
from parity.compare import TOLERANCE, relative_error
from parity.configurations import Configuration, chosen_configurations
from parity.edges import LOSS_ONLY, edges
from parity.recipes import V
from parity.shrink import smallest
from parity.sides import Answer, run_port, run_spec
from parity.stages import (
    BLOCK_CELLS,
    COUNTED_CELLS,
    SLOT_STAGES,
    gradient_order,
    is_eagle3,
    port_cells,
    port_staged,
    spec_cells,
    spec_staged,
)
from parity.tolerances import EXACT, batch_tolerance
from parity.variations import variations

NAMES = ("blocks", "losses", "gradients", "metrics", "acceptance")
QUICK, WHOLE = 6, 240  # random cases of each configuration
_MOST = 3  # edges that disagree, then a configuration is left: one fault fails all its cases

_ACCEPTANCE_STAGES = ("kept_mass", "teacher_top", "accept_probability")
_ACCEPTANCE_ROWS = (
    "tau_probabilistic",
    "accept_position",
    "teacher_kept_mass",
    "accept_step",
)


def run_batches(plan: Plan, names: Sequence[str] = NAMES) -> dict[str, CheckResult]:
    """Run some of the five checks on the same evaluations; return their results by name."""
    results = {name: CheckResult(name) for name in names}
    chosen = chosen_configurations(plan.quick, plan.configurations)
    started = time.process_time()
    count = plan.count(QUICK, WHOLE)
    counted = counting(plan, len(chosen) * count)
    for configuration in chosen:
        failed = _compare_edges(results, configuration, plan)
        if not (failed and plan.first_only):
            drawn = _drawn(results, configuration, plan)
            failed |= compare_drawn(results, drawn, plan, count, counted)
        if failed and plan.first_only:
            break
    for result in results.values():
        # Shared work: each check has its part of the time, so that they add up to the whole.
        result.seconds = (time.process_time() - started) / len(results)
    return results


def _compare_edges(
    results: Mapping[str, CheckResult], configuration: Configuration, plan: Plan
) -> bool:
    """Compare a configuration's edges; return whether one disagreed."""
    failures, names = 0, tuple(results)
    for _, case in edges(configuration, plan.seed):
        measured = _measure(results, case)
        for result in results.values():
            result.edges += 1
        first = first_failure(results, measured)
        if first is not None:
            failures += 1
            if failures == 1 and plan.shrink:
                case = smallest(case, partial(_fails_alike, first=first, names=names))
                measured = compare_case(case, "float64", names)
        record(results, configuration.name, case, measured, text=_size(case) if first else "")
        if failures == _MOST or (failures and plan.first_only):
            break
    return failures > 0


def _drawn(results: Mapping[str, CheckResult], configuration: Configuration, plan: Plan) -> Drawn:
    names = tuple(results)
    return Drawn(
        configuration.name,
        variations(configuration.family),
        partial(configuration.case, plan.seed),
        partial(_measure, results),
        again=lambda case, first: _compare_again(case, first, names),
        shrink=smallest,
        tell=_size,
    )


def _measure(results: Mapping[str, CheckResult], case: Case) -> list[Measured]:
    measured = compare_case(case, "float64", tuple(results))
    for result in results.values():
        result.refused += any(m.stage.startswith("refusal") and not m.fails for m in measured)
    return measured


def _size(case: Case) -> str:
    ids = case.tensors["batch/input_ids"]
    blocks = case.tensors.get("batch/anchor_positions")
    found = f"{case.name}: {len(ids)} rows of {ids.shape[1]} tokens"
    return found if blocks is None else f"{found}, {blocks.shape[1]} blocks a row"


def _compare_again(case: Case, first: Measured, names: Sequence[str]) -> list[Measured]:
    """Compare a smaller case, no further than it takes to see the stage that failed first."""
    if first.check == "blocks" and not is_eagle3(case):
        names = ("blocks",)  # without a draft, whose every shape compiles anew
    return compare_case(case, "float64", names)


def _fails_alike(case: Case, first: Measured, names: Sequence[str]) -> bool:
    again = _compare_again(case, first, names)
    return any(each.stage == first.stage and each.fails for each in again)


def compare_case(case: Case, dtype: str, names: Sequence[str] = NAMES) -> list[Measured]:
    """Run both sides on a case; return every comparison in the order of the data flow.

    An answer that only one side gives is a comparison with an infinite error. Both refusing with
    the same of §8's errors agree.
    """
    measured: list[Measured] = []
    if not is_eagle3(case):
        cells = run_port(case, dtype, port_cells), run_spec(case, dtype, spec_cells)
        measured += _compare_cells(*cells, dtype)
        if set(names) == {"blocks"}:
            return measured
    port, spec = run_port(case, dtype, port_staged), run_spec(case, dtype, spec_staged)
    said = [name for name in names if name != "blocks"] or ["blocks"]
    if port.error is not None or spec.error is not None:
        agree = any(
            all(a.failure == "refused" and words in (a.error or "") for a in (port, spec))
            for words in REFUSALS
        )
        stage = f"refusal (port: {port.error or 'answers'}; spec: {spec.error or 'answers'})"
        return measured + [
            Measured(name, stage, 0.0 if agree else float("inf"), EXACT) for name in said
        ]
    return measured + _compare_answers(case, port, spec, dtype)


def _compare_cells(port: Answer, spec: Answer, dtype: str) -> list[Measured]:
    """Compare the blocks cell by cell."""
    for side, answer in (("port", port), ("spec", spec)):
        if answer.error is not None:
            return [Measured("blocks", f"blocks ({side}: {answer.error})", float("inf"), EXACT)]
    result = []
    names = [*BLOCK_CELLS, *(name for name in spec.cells if name.startswith("visible"))]
    # Ids behind the end of the data may be anything; the port makes them legal, the spec leaves
    # them alone. They are read by nothing that counts, and compared where they are legal.
    for name in names:
        if name not in spec.cells:
            continue
        got, expected = port.cells[name], spec.cells[name]
        if name in ("labels", "previous", "inputs"):
            got, expected = _where_legal(got, expected)
        elif name in COUNTED_CELLS:
            mask = spec.cells["eval_mask"]
            got, expected = got[mask], expected[mask]
        tolerance = TOLERANCE[dtype] if name == "weights" else EXACT
        result.append(Measured("blocks", name, relative_error(got, expected), tolerance))
    return result


def _where_legal(got: Array, expected: Array) -> tuple[Array, Array]:
    if got.shape != expected.shape:
        return got, expected
    legal = (expected >= 0) & (expected < V)
    return got[legal], expected[legal]


def _compare_answers(case: Case, port: Answer, spec: Answer, dtype: str) -> list[Measured]:
    mask = spec.tensors["eval_mask"]
    logits = spec.tensors["draft_logits"][mask]
    allowed = batch_tolerance(case, dtype, float(np.abs(logits).max(initial=0.0)))
    error = relative_error(port.tensors["eval_mask"], mask)
    result = [Measured("blocks", "eval_mask", error, EXACT)]
    if port.tensors["eval_mask"].shape != mask.shape:
        return result
    result += _compare_slots(port, spec, mask, allowed)
    result += _compare_metrics(port, spec, allowed)
    result.append(Measured("losses", "loss", relative_error(port.loss, spec.loss), allowed))
    if LOSS_ONLY in case.extra:
        return result
    names = gradient_order(sorted(set(port.gradients) | set(spec.gradients)))
    for name in names:
        error = float("inf")
        if name in port.gradients and name in spec.gradients:
            error = relative_error(port.gradients[name], spec.gradients[name])
        result.append(Measured("gradients", f"gradient of {name}", error, allowed))
    return result


def _compare_slots(port: Answer, spec: Answer, mask: Array, allowed: float) -> list[Measured]:
    result = []
    for name in SLOT_STAGES:
        pair = [(a.tensors | a.stages).get(name) for a in (port, spec)]
        got, expected = pair
        if got is None and expected is None:
            continue
        error = float("inf")
        if got is not None and expected is not None and got.shape == expected.shape:
            error = relative_error(got[mask], expected[mask])
        check = "acceptance" if name in _ACCEPTANCE_STAGES else "losses"
        result.append(Measured(check, name, error, allowed))
    return result


def _compare_metrics(port: Answer, spec: Answer, allowed: float) -> list[Measured]:
    result = []
    for name in sorted(set(port.metrics) | set(spec.metrics)):
        error = float("inf")
        if name in port.metrics and name in spec.metrics:
            pairs = zip(port.metrics[name], spec.metrics[name], strict=True)
            error = max(relative_error(got, expected) for got, expected in pairs)
        check = "acceptance" if name in _ACCEPTANCE_ROWS else "metrics"
        result.append(Measured(check, f"metric {name}", error, allowed))
    return result


def _one(name: str, plan: Plan) -> CheckResult:
    return run_batches(plan, (name,))[name]


BLOCKS = Check(
    "blocks",
    "for given anchors in both layouts, cell by cell: candidates, positions, draft inputs, labels, "
    "draft labels, previous ids, teacher positions, evaluation mask, weights; who sees whom, in "
    "both forms of the port's attention",
    ("§3", "§4", "§12"),
    partial(_one, "blocks"),
    (
        "the draw of the anchors: each side has its own generator; the candidates are compared",
        "EAGLE3's visibility, which neither side has as a matrix in the same form: through its "
        "states alone",
        "labels and previous ids at padding whose ids are illegal: nothing that counts reads them",
    ),
)
LOSSES = Check(
    "losses",
    "states, logits, every term of every slot, D-PACE's weights, and the loss",
    ("§5", "§6", "§7", "§8", "§12", "§13"),
    partial(_one, "losses"),
    (
        "several ranks or micro-batches: one process, one batch (the port's own tests have two)",
        "the teacher's logits themselves: the port's fused form never holds them; seen through p's "
        "sum and maximum, α and the L1",
        "slots outside the evaluation mask, which are unspecified",
        "EAGLE3's cross entropy slot by slot: each step's sum is compared",
    ),
)
GRADIENTS = Check(
    "gradients",
    "the gradient of every parameter, output side first",
    ("§8", "§12", "§13"),
    partial(_one, "gradients"),
    ("where draft and teacher are made equal (the kink of the L1, §8): only the loss is compared",),
)
METRICS = Check(
    "metrics",
    "numerator and denominator of every row, per slot where it is per slot",
    ("§9", "§12", "§13"),
    partial(_one, "metrics"),
    ("the sums over ranks",),
)
ACCEPTANCE = Check(
    "acceptance",
    "α of every slot, the true teacher's kept mass and maximum, τ, acceptance by position",
    ("§7", "§8", "§9"),
    partial(_one, "acceptance"),
)
