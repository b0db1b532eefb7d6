"""`parity demo`: cross-check what `torch-port demo` left in its output directory.

The demo writes cases (weights, frozen target, batches; no expectation) below `DIR/parity`; here
both implementations answer them and the answers are compared. The two packages never meet in one
program but this.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from parity.cases import Case, as_dtype, list_cases, read_case
from parity.checks.losses import cross_check
from parity.checks.training import (
    LOSS_TOLERANCE,
    PARAMETER_TOLERANCE,
    TrajectoryStep,
    trajectories,
)
from parity.compare import TOLERANCE, relative_error
from parity.sides import setup_jax

RESULT = "parity.json"
SAY_EVERY = 5.0  # seconds
# A float32 logsumexp of values up to about 30: rounding 6e-8 of the largest, and of the products.
STORED_TOLERANCE = 2e-6


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
                say(f"AdamW steps in {dtype}: both sides start")
                try:
                    steps = trajectories(case, dtype, _Progress(say, f"AdamW steps in {dtype}"))
                except Exception as error:  # noqa: BLE001 (one side refused a step, or broke off)
                    name = f"AdamW steps, {dtype}: not compared"
                    checks.append(_check(name, math.inf, 0.0, f"{type(error).__name__}: {error}"))
                    continue
                checks += _trajectory_checks(dtype, steps)
                trajectory = trajectory or [_row(step) for step in steps]
        else:
            say(f"{case.name}: loss, metrics and gradients on both sides in float64")
            checks += _answer_checks(case, "float64")
            checks += _normaliser_checks(case)
    result = {
        "agrees": all(check["passed"] for check in checks),
        "checks": checks,
        "trajectory": trajectory,
    }
    temporary = directory / (RESULT + ".tmp")
    temporary.write_text(json.dumps(result, indent=1, allow_nan=False))
    os.replace(temporary, directory / RESULT)
    return result


class _Progress:
    """Says how far a training comparison is, every few seconds."""

    def __init__(self, say: Callable[[str], None], name: str) -> None:
        self._say, self._name, self._last = say, name, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() - self._last > SAY_EVERY or done == total:
            self._last = time.monotonic()
            self._say(f"{self._name}: {done}/{total}")


def _answer_checks(case: Case, dtype: str) -> list[dict[str, Any]]:
    comparison = cross_check(case, dtype)
    label = case.name.replace("-", ", ") + f", {dtype}"
    if comparison.refusal is not None:
        comparison.problem = f"both sides refused: {comparison.refusal}"
    if comparison.problem is not None:
        return [_check(f"{label}: not compared", math.inf, 0.0, comparison.problem)]
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


def _normaliser_checks(case: Case) -> list[dict[str, Any]]:
    """Compare the log normaliser that training read with one of the specification's arithmetic."""
    stored = case.tensors.get("stored/target_log_normalizer")
    if stored is None:
        return []
    setup_jax()
    from jax.nn import logsumexp

    frozen = as_dtype(case.tensors, "float64")
    head = frozen["target/lm_head.weight"]
    expected = logsumexp(frozen["batch/target_last_hidden_states"] @ head.T, axis=-1)
    # Padding rows hold zeros in the batch and no captured state.
    inside = frozen["batch/target_last_hidden_states"].any(axis=-1)
    error = relative_error(stored[inside], np.asarray(expected)[inside])
    name = f"{case.name.replace('-', ', ')}: stored log normaliser"
    return [_check(name, error, STORED_TOLERANCE, "float32 from the features, against float64")]


def _trajectory_checks(dtype: str, steps: list[TrajectoryStep]) -> list[dict[str, Any]]:
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
        "worst": worst if math.isfinite(worst) else None,  # JSON has no infinity
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
