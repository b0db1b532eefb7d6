"""`parity demo`: cross-check what `torch-port demo` left in its output directory.

The demo writes cases (weights, frozen target, batches; no expectation) below `DIR/parity`; here
both implementations answer them and the answers are compared. The two packages never meet in one
program but this.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parity.cases import Case, list_cases, read_case
from parity.checks.losses import cross_check
from parity.checks.training import (
    LOSS_TOLERANCE,
    PARAMETER_TOLERANCE,
    TrajectoryStep,
    trajectories,
)
from parity.compare import TOLERANCE

RESULT = "parity.json"
SAY_EVERY = 5.0  # seconds


def check_demo(directory: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Run every check of a demo's cases and write `DIR/parity.json`; return its content.

    Content: `agrees`, `checks` [{name, worst, tolerance, passed, detail}], `trajectory`.
    Raises CaseError when there is nothing to check.
    """
    checks: list[dict[str, Any]] = []
    trajectory: list[dict[str, Any]] = []
    for path in list_cases(directory / "parity"):
        case = read_case(path)
        if "optimizer" in case.extra:
            for dtype in ("float64", "float32"):
                steps = trajectories(case, dtype, _Progress(say, f"AdamW steps in {dtype}"))
                checks += _trajectory_checks(case, dtype, steps)
                trajectory = trajectory or [_row(step) for step in steps]
        else:
            say(f"{case.name}: loss, metrics and gradients on both sides in float64")
            checks += _answer_checks(case, "float64")
    result = {
        "agrees": all(check["passed"] for check in checks),
        "checks": checks,
        "trajectory": trajectory,
    }
    temporary = directory / (RESULT + ".tmp")
    temporary.write_text(json.dumps(result, indent=1))
    os.replace(temporary, directory / RESULT)
    return result


class _Progress:
    """Says how far a training comparison is, every few seconds."""

    def __init__(self, say: Callable[[str], None], name: str) -> None:
        self._say, self._name, self._last = say, name, time.monotonic()
        say(f"{name}: both sides start")

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._last > SAY_EVERY or done == total:
            self._last = time.monotonic()
            self._say(f"{self._name}: {done}/{total}")


def _answer_checks(case: Case, dtype: str) -> list[dict[str, Any]]:
    comparison = cross_check(case, dtype)
    label = case.name.replace("-", ", ") + f", {dtype}"
    if comparison.problem is not None:
        return [_check(f"{label}: not compared", float("inf"), 0.0, comparison.problem)]
    kinds = {"loss": "loss", "metrics": "metrics", "gradients": "every gradient"}
    return [
        _check(
            f"{label}: {text}",
            comparison.worst(kind),
            TOLERANCE[dtype],
            f"{len(comparison.errors[kind])} compared",
        )
        for kind, text in kinds.items()
    ]


def _trajectory_checks(case: Case, dtype: str, steps: list[TrajectoryStep]) -> list[dict[str, Any]]:
    worst = max(steps, key=lambda step: step.worst_error)
    label = f"{len(steps)} AdamW steps, {dtype}"
    return [
        _check(
            f"{label}: loss of every step",
            max(step.loss_error for step in steps),
            LOSS_TOLERANCE[dtype],
            "torch against optax, same start and batches",
        ),
        _check(
            f"{label}: every parameter after every step",
            worst.worst_error,
            PARAMETER_TOLERANCE[dtype],
            f"worst: {worst.worst_name} at step {worst.step}",
        ),
    ]


def _check(name: str, worst: float, tolerance: float, detail: str) -> dict[str, Any]:
    return {
        "name": name,
        "worst": worst,
        "tolerance": tolerance,
        "passed": worst <= tolerance,
        "detail": detail,
    }


def _row(step: TrajectoryStep) -> dict[str, Any]:
    return {
        "step": step.step,
        "loss_port": step.loss_port,
        "loss_spec": step.loss_spec,
        "worst_parameter": step.worst_error,
    }
