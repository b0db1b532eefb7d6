"""Lower precision against float64 on the same inputs: what each side loses (sheet §11).

float32 of both sides is judged by the specification's float64, bf16 of the port by the same on the
bf16-rounded inputs. Argmax rows are left out: near a tie, rounding decides them.
"""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial

import numpy as np

from parity.cases import Array, Case
from parity.checks.base import Check, CheckResult, Measured, Plan, record
from parity.checks.drawn import Drawn, compare_drawn, counting
from parity.checks.rounding import ROUNDING_RUN, compare_rounding
from parity.compare import relative_error
from parity.configurations import BY_NAME, Configuration
from parity.sides import Answer, run_port, run_spec
from parity.stages import SLOT_STAGES, gradient_order, is_eagle3, port_staged, spec_staged
from parity.tolerances import BF16, FLOAT32
from parity.variations import Variation, variations

NAME = "precision"
QUICK, WHOLE = 4, 40  # random cases of each configuration
CHOSEN = ("pruned-vanilla", "full-rnn", "pruned-sliding", "dflash-pruned", "eagle3-pruned")
# bf16's errors are about 1e-2 of a draft's largest gradient (measured), whatever a tensor's own
# size: one that is below a tenth of the largest has no direction to judge.
_SMALL = 0.1


def run_precision(plan: Plan) -> CheckResult:
    """Draw cases with ordinary logits and compare the precisions."""
    result, started = CheckResult(NAME), time.process_time()
    configurations = [BY_NAME[name] for name in chosen(plan) if plan.wants(name)]
    count = plan.count(QUICK, WHOLE)
    counted = counting(plan, len(configurations) * count)
    for configuration in configurations:
        drawn = Drawn(
            configuration.name,
            variations(configuration.family),
            partial(_make, configuration, plan.seed),
            compare_precisions,
            dtype="float32",
        )
        compare_drawn({NAME: result}, drawn, plan, count, counted)
    if plan.wants(ROUNDING_RUN):
        record({NAME: result}, ROUNDING_RUN, None, compare_rounding(plan.seed))
    result.seconds = time.process_time() - started
    return result


def _make(configuration: Configuration, seed: int, number: int, variation: Variation) -> Case:
    calm = replace(variation, heat=0, states=0)  # what rounding costs hot logits is §11's no more
    return without_l1(configuration.case(seed, number, calm))


def chosen(plan: Plan) -> tuple[str, ...]:
    """Return the configurations of a plan: a quick one has two, unless it names others."""
    return CHOSEN[:2] if plan.quick and plan.configurations is None else CHOSEN


def without_l1(case: Case) -> Case:
    """Return the case with α_l1 = 0, where it has one.

    Near q = p̃ the L1's gradient is a sign that rounding decides (§8). Its values are compared.
    """
    if "l1_alpha" not in case.objective:
        return case
    objective = {"ce_alpha": 1.0, "l1_alpha": 0.0}
    return replace(case, objective=case.objective | objective)


def rounded_to_bf16(case: Case) -> Case:
    """Return the case with its floating tensors rounded to bf16; the loss mask stays."""
    return replace(
        case,
        tensors={
            name: _rounded(value)
            if np.issubdtype(value.dtype, np.floating) and name != "batch/loss_mask"
            else value
            for name, value in case.tensors.items()
        },
    )


def _rounded(value: Array) -> Array:
    import torch

    rounded: Array = torch.from_numpy(value).to(torch.bfloat16).float().numpy()
    return rounded


def compare_precisions(case: Case, dtype: str = "float32") -> list[Measured]:
    """Compare float32 of both sides, and bf16 of the port, with the spec's float64."""
    expected = run_spec(case, "float64", spec_staged)
    result: list[Measured] = []
    for side, run in (
        ("port", partial(run_port, answer=port_staged)),
        ("spec", partial(run_spec, answer=spec_staged)),
    ):
        result += _compare(f"{side} float32", run(case, dtype), expected)
    if is_eagle3(case):
        return result
    rounded = rounded_to_bf16(case)
    answer = run_port(rounded, "bfloat16", port_staged)
    return result + _compare_bf16(answer, run_spec(rounded, "float64", spec_staged))


def _refusal(what: str, got: Answer, expected: Answer) -> list[Measured] | None:
    if got.error is None and expected.error is None:
        return None
    agree = got.failure == expected.failure == "refused"
    stage = f"{what}: refusal ({got.error or 'answers'}; float64: {expected.error or 'answers'})"
    return [Measured(NAME, stage, 0.0 if agree else float("inf"), 0.0)]


def _forward(what: str, got: Answer, expected: Answer, allowed: float) -> list[Measured]:
    mask, result = expected.tensors["eval_mask"], []
    for name in SLOT_STAGES:
        pair = [(a.tensors | a.stages).get(name) for a in (got, expected)]
        if pair[0] is not None and pair[1] is not None:
            error = relative_error(pair[0][mask], pair[1][mask])
            result.append(Measured(NAME, f"{what}: {name}", error, allowed))
    error = relative_error(got.loss, expected.loss)
    return [*result, Measured(NAME, f"{what}: loss", error, allowed)]


def _compare(what: str, got: Answer, expected: Answer) -> list[Measured]:
    refused = _refusal(what, got, expected)
    if refused is not None:
        return refused
    result = _forward(what, got, expected, FLOAT32["forward"])
    for name in gradient_order(sorted(expected.gradients)):
        error = relative_error(got.gradients[name], expected.gradients[name])
        stage = f"{what}: gradient of {name}"
        result.append(Measured(NAME, stage, error, FLOAT32["gradients"]))
    return result


def _compare_bf16(got: Answer, expected: Answer) -> list[Measured]:
    refused = _refusal("port bf16", got, expected)
    if refused is not None:
        return refused
    result = _forward("port bf16", got, expected, BF16["forward"])
    largest = max(float(np.abs(g).max()) for g in expected.gradients.values())
    for name in gradient_order(sorted(expected.gradients)):
        gradient = expected.gradients[name]
        if np.abs(gradient).max() < _SMALL * largest:
            continue
        error = _turned(got.gradients[name], gradient)
        stage = f"port bf16: direction of the gradient of {name}"
        result.append(Measured(NAME, stage, error, BF16["gradient direction"]))
    return result


def _turned(got: Array, expected: Array) -> float:
    """1 − cosine of the angle between two gradients."""
    a, b = np.asarray(got, np.float64).ravel(), np.asarray(expected, np.float64).ravel()
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return 1.0 - float(a @ b) / size if size else float("inf")


CHECK = Check(
    NAME,
    "float32 of both sides, and bf16 of the port, against float64 on the same (rounded) inputs",
    ("§11",),
    run_precision,
    (
        "the L1's gradient: near q = p̃ a sign that rounding decides (its values are compared)",
        "bf16 of EAGLE3 drafts",
        "rows that are an argmax's: near a tie rounding decides them",
        "bf16 on a device: only the CPU's kernels are run",
        "sizes at which sums get long; docs/precision.md has those",
    ),
)
