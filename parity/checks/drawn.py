"""The drawn cases of a configuration, compared one after another until one disagrees."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis.strategies import SearchStrategy

from parity.cases import Case
from parity.checks.base import CheckResult, Measured, Plan, record
from parity.exploring import explore


@dataclass(frozen=True)
class Drawn:
    """How a configuration's cases are drawn and compared.

    `make(number, value)` makes the case of a drawn value, `measure` compares it. Of a case that
    disagrees hypothesis looks for a simpler value by `again`, which need measure no more than the
    stage that failed; then `shrink(case, alike)` may cut what hypothesis does not draw.
    """

    configuration: str
    strategy: SearchStrategy[Any]
    make: Callable[[int, Any], Case]
    measure: Callable[[Case], Sequence[Measured]]
    again: Callable[[Case, Measured], Sequence[Measured]] | None = None
    shrink: Callable[[Case, Callable[[Case], bool]], Case] | None = None
    dtype: str = "float64"
    tell: Callable[[Case], str] = lambda case: ""


def compare_drawn(
    results: Mapping[str, CheckResult],
    cases: Drawn,
    plan: Plan,
    count: int,
    counted: Callable[[], None] = lambda: None,
) -> bool:
    """Compare `count` drawn cases, or those up to the first that disagrees; return whether one did.

    Arguments: the checks' results, which are added to; what to draw; the plan, whose seed the draw
    follows from; how many; `counted()`, called after each case.
    """
    first: list[Measured] = []

    def visit(number: int, value: Any) -> bool:
        case = cases.make(number, value)
        measured = cases.measure(case)
        counted()
        failed = first_failure(results, measured)
        if failed is None:
            record(results, cases.configuration, case, measured, cases.dtype)
            return False
        first.append(failed)
        return True

    def alike(case: Case) -> bool:
        """Whether a simpler case fails in the stage that failed first."""
        measured = cases.measure(case) if cases.again is None else cases.again(case, first[0])
        return any(each.stage == first[0].stage and each.fails for each in measured)

    name = f"{cases.configuration}/{plan.seed}"  # whichever checks look at them
    simpler = (lambda number, value: alike(cases.make(number, value))) if plan.shrink else None
    found = explore(cases.strategy, name, count, visit, simpler)
    if found is None:
        return False
    case = cases.make(*found)
    if plan.shrink and cases.shrink is not None:
        case = cases.shrink(case, alike)
    record(results, cases.configuration, case, cases.measure(case), cases.dtype, cases.tell(case))
    return True


def counting(plan: Plan, total: int) -> Callable[[], None]:
    """Return what to call after each case, so that the plan's progress counts to `total`."""
    done = 0

    def counted() -> None:
        nonlocal done
        done += 1
        plan.progress(done, total)

    return counted


def first_failure(
    results: Mapping[str, CheckResult], measured: Sequence[Measured]
) -> Measured | None:
    """Return the first stage that fails, whichever check it is of; None where no asked one fails.

    A check that was not asked may be the only one to see a case: the search goes on then.
    """
    failed = [each for each in measured if each.fails]
    return failed[0] if any(each.check in results for each in failed) else None
