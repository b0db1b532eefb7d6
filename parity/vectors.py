"""`parity vectors`: replay conformance vectors on either implementation, or on both."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from parity.cases import Case, CaseError, list_cases, read_case
from parity.compare import TOLERANCE, Comparison, compare_with_expectation
from parity.sides import sides


@dataclass(frozen=True)
class CaseResult:
    """One case's comparisons by side, or what kept it from being read."""

    name: str
    comparisons: dict[str, Comparison]
    unreadable: str | None = None
    expects_error: str | None = None

    def passes(self, tolerance: float) -> bool:
        """Return whether the case was read and every side is within the tolerance."""
        return self.unreadable is None and all(
            comparison.passes(tolerance) for comparison in self.comparisons.values()
        )


def run_case(path: Path, chosen: list[str], dtype: str) -> CaseResult:
    """Run one case directory on the chosen sides."""
    try:
        case: Case = read_case(path)
    except CaseError as error:
        return CaseResult(path.name, {}, unreadable=str(error))
    comparisons = {
        side: compare_with_expectation(
            sides()[side](case, dtype), case.expect, case.group("expect")
        )
        for side in chosen
    }
    return CaseResult(case.name, comparisons, expects_error=case.expect.get("error"))


def run_vectors(directory: Path, chosen: list[str], dtype: str, console: Console) -> int:
    """Run every case below `directory`, a line each; return the number of failed cases.

    Raises CaseError when there is no case at all.
    """
    paths = list_cases(directory)
    tolerance = TOLERANCE[dtype]
    console.print(
        f"{len(paths)} cases, {' and '.join(chosen)} in {dtype}; largest relative error of "
        f"loss, metrics, gradients, tensors (tolerance {tolerance:.0e})",
        highlight=False,
        soft_wrap=True,
    )
    failed = 0
    for path in paths:
        result = run_case(path, chosen, dtype)
        failed += not result.passes(tolerance)
        console.print(_line(result, tolerance), soft_wrap=True, highlight=False, markup=False)
    console.print(f"{len(paths) - failed} passed, {failed} failed", highlight=False)
    return failed


def _line(result: CaseResult, tolerance: float) -> str:
    verdict = "ok  " if result.passes(tolerance) else "FAIL"
    parts = [f"{verdict} {result.name:<30}"]
    if result.unreadable:
        parts.append(result.unreadable)
    for side, comparison in result.comparisons.items():
        parts.append(f"{side}: {_describe(comparison, result.expects_error, tolerance)}")
    return "  ".join(parts)


def _describe(comparison: Comparison, expects_error: str | None, tolerance: float) -> str:
    if comparison.problem is not None:
        return comparison.problem
    if expects_error is not None:
        return f"refused as expected, {expects_error!r}"
    kinds = ("loss", "metrics", "gradients", "tensors")
    text = " ".join(f"{comparison.worst(kind):.1e}" for kind in kinds)
    if comparison.passes(tolerance):
        return text
    name, error = comparison.worst_named()
    return f"{text}  worst: {name} {error:.1e}"
