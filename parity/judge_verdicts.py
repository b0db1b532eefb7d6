"""What the judge says of a case, and what an adapter said to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from parity.adapter import DraftOutputs, Objective
from parity.cases import Case

CONFORMS, DECLARED, UNDECLARED = "conforms", "declared convention", "another convention"
FAULT, BROKE_OFF, NOT_JUDGED = "fault", "broke off", "not judged"
BAD = (FAULT, BROKE_OFF, UNDECLARED)  # the worst first


@dataclass(frozen=True)
class CaseVerdict:
    """What the judge says of one case.

    `stage` is the first that differs; `errors` of all stages that were compared, against what the
    verdict's conventions come to; `unjudged` what could not be compared, with reasons.
    """

    case: str
    verdict: str
    stage: str | None = None
    conventions: tuple[str, ...] = ()
    detail: str = ""
    errors: Mapping[str, float] = field(default_factory=dict)
    unjudged: tuple[str, ...] = ()

    @property
    def worst(self) -> float:
        """Return the largest error, 0 where nothing was compared."""
        return max(self.errors.values(), default=0.0)


@dataclass
class Answers:
    """What an adapter said of a case, or how it broke off."""

    outputs: DraftOutputs = field(default_factory=DraftOutputs)
    objective: Objective | None = None
    refused: Exception | None = None  # raised by `objective`
    broke: str | None = None
    unjudged: list[str] = field(default_factory=list)


def first_over(errors: Mapping[str, float], tolerance: float) -> str | None:
    """Return the first stage whose error is no number within the tolerance."""
    return next((stage for stage, error in errors.items() if not error <= tolerance), None)


def verdict_on(
    case: Case,
    verdict: str,
    stage: str | None,
    errors: Mapping[str, float],
    answers: Answers,
    detail: str = "",
    conventions: tuple[str, ...] = (),
) -> CaseVerdict:
    """Make a verdict that lists what the answers left unjudged."""
    unjudged = tuple(answers.unjudged)
    return CaseVerdict(case.name, verdict, stage, conventions, detail, dict(errors), unjudged)


def raised(error: Exception) -> str:
    """Return an exception's type and first line."""
    first = str(error).strip().split("\n", 1)[0]
    return f"{type(error).__name__}: {first}"
