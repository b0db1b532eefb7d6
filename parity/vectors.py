"""`parity vectors`: replay conformance vectors on either implementation, or on both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from parity.cases import Case, CaseError, list_cases, read_case
from parity.checks.decoding import port_decoding, spec_decoding
from parity.checks.eagle3 import port_eagle3, spec_eagle3
from parity.checks.training import PARAMETER_TOLERANCE, port_training, spec_training
from parity.compare import TOLERANCE, Comparison, compare_with_expectation
from parity.sides import Answer, run_port, run_spec

# What a case is besides one batch, by the entry of case.json that says so: its two answers.
_KINDS = {
    "optimizer": (port_training, spec_training),
    "decoding": (port_decoding, spec_decoding),
    "eagle3": (port_eagle3, spec_eagle3),
}


@dataclass(frozen=True)
class CaseResult:
    """One case's comparisons by side, or what kept it from being read."""

    name: str
    comparisons: dict[str, Comparison]
    tolerance: float
    unreadable: str | None = None
    expects_error: str | None = None

    @property
    def passes(self) -> bool:
        """Whether the case was read and every side is within the tolerance."""
        return self.unreadable is None and all(
            comparison.passes(self.tolerance) for comparison in self.comparisons.values()
        )


def run_case(
    path: Path, chosen: list[str], dtype: str, compute: Mapping[str, Any] | None = None
) -> CaseResult:
    """Run one case directory on the chosen sides; `compute` says how the port computes."""
    try:
        case: Case = replace(read_case(path), compute=compute or {})
    except CaseError as error:
        return CaseResult(path.name, {}, 0.0, unreadable=str(error))
    comparisons = {
        side: compare_with_expectation(
            answer_case(case, side, dtype), case.expect, case.group("expect")
        )
        for side in chosen
    }
    return CaseResult(
        case.name, comparisons, case_tolerance(case, dtype), expects_error=case.expect.get("error")
    )


def answer_case(case: Case, side: str, dtype: str) -> Answer:
    """Answer a case with one side: one batch, or the kind that the case says."""
    kind = next((name for name in _KINDS if name in case.extra), None)
    port, spec = _KINDS[kind] if kind else (None, None)
    return run_port(case, dtype, port) if side == "port" else run_spec(case, dtype, spec)


def case_tolerance(case: Case, dtype: str) -> float:
    """Return what a case is judged by: AdamW enlarges rounding, so a training run is allowed more.

    Its reason stands beside PARAMETER_TOLERANCE.
    """
    return PARAMETER_TOLERANCE[dtype] if "optimizer" in case.extra else TOLERANCE[dtype]


def run_vectors(
    directory: Path,
    chosen: list[str],
    dtype: str,
    console: Console,
    compute: Mapping[str, Any] | None = None,
) -> int:
    """Run every case below `directory`, a line each; return the number of failed cases.

    Raises CaseError when there is no case at all.
    """
    paths = list_cases(directory)
    console.print(
        f"{len(paths)} cases, {' and '.join(chosen)} in {dtype}; largest relative error of "
        f"loss, metrics, gradients, tensors (tolerance {TOLERANCE[dtype]:.0e}; training runs "
        f"{PARAMETER_TOLERANCE[dtype]:.0e})",
        highlight=False,
        soft_wrap=True,
    )
    failed = 0
    for path in paths:
        result = run_case(path, chosen, dtype, compute)
        failed += not result.passes
        console.print(_line(result), soft_wrap=True, highlight=False, markup=False)
    console.print(f"{len(paths) - failed} passed, {failed} failed", highlight=False)
    return failed


def _line(result: CaseResult) -> str:
    verdict = "ok  " if result.passes else "FAIL"
    parts = [f"{verdict} {result.name:<30}"]
    if result.unreadable:
        parts.append(result.unreadable)
    for side, comparison in result.comparisons.items():
        parts.append(f"{side}: {_describe(comparison, result)}")
    return "  ".join(parts)


def _describe(comparison: Comparison, result: CaseResult) -> str:
    if comparison.problem is not None:
        return comparison.problem
    if result.expects_error is not None:
        return f"refused as expected, {result.expects_error!r}"
    kinds = ("loss", "metrics", "gradients", "tensors")
    text = " ".join(f"{comparison.worst(kind):.1e}" for kind in kinds)
    if comparison.passes(result.tolerance):
        return text
    name, error = comparison.worst_named()
    return f"{text}  worst: {name} {error:.1e}"
