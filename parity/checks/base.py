"""What a check of the suite is, and what it answers."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from parity.cases import Case

# In the order of the data flow: a fault shows in its own check before it shows in later ones.
CHECKS = (
    "vocabulary",
    "blocks",
    "losses",
    "gradients",
    "metrics",
    "acceptance",
    "decoding",
    "training",
    "checkpoints",
    "precision",
)


@dataclass(frozen=True)
class Plan:
    """How much a run does: `quick` for the few cases of pytest and mutants, else the full set.

    `seed` makes the drawn cases; `progress(done, total)` counts a check's cases.
    """

    quick: bool = True
    seed: int = 0
    progress: Callable[[int, int], None] = lambda done, total: None
    configurations: tuple[str, ...] | None = None  # these alone; None is all
    cases: int | None = None  # random cases of each configuration, in the place of the check's own
    shrink: bool = False  # make the first disagreement of a configuration as small as it gets
    first_only: bool = False  # stop a configuration at its first disagreement (for mutants)

    def wants(self, configuration: str) -> bool:
        """Whether a configuration is asked for."""
        return self.configurations is None or configuration in self.configurations

    def count(self, quick: int, full: int) -> int:
        """Return how many random cases of a configuration to draw."""
        return self.cases if self.cases is not None else quick if self.quick else full


@dataclass(frozen=True)
class Measured:
    """One comparison: which check it belongs to, the tensor, its error and what is allowed."""

    check: str
    stage: str
    error: float
    tolerance: float

    @property
    def fails(self) -> bool:
        """Whether the error is beyond the tolerance, or no number."""
        return not self.error <= self.tolerance


@dataclass(frozen=True)
class Finding:
    """One disagreement: the smallest case found, and the first tensor that diverges in it.

    `stage` is that tensor's name along the data flow; `error` is relative as `compare` says,
    infinite for what cannot be compared; `case` is None where a check compares no case.
    """

    check: str
    configuration: str
    stage: str
    error: float
    tolerance: float
    text: str
    case: Case | None = None
    dtype: str = "float64"


@dataclass
class CheckResult:
    """What a check did: cases by configuration, the worst error of each, and disagreements."""

    name: str
    cases: dict[str, int] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)
    tolerance: dict[str, float] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    curves: dict[str, list[float]] = field(default_factory=dict)  # error by step (training)
    edges: int = 0  # how many of the cases are of the fixed list
    refused: int = 0  # how many both sides refused in the same words: no numbers to compare
    seconds: float = 0.0  # of CPU: the workers have one thread each

    @property
    def agrees(self) -> bool:
        """Whether something was compared and nothing disagreed."""
        return not self.findings and sum(self.cases.values()) > 0

    def saw(self, configuration: str, error: float, tolerance: float) -> None:
        """Count a case and keep the worst error of its configuration.

        Worst is what comes closest to its tolerance, which a few cases have wider than others.
        """
        self.cases[configuration] = self.cases.get(configuration, 0) + 1
        old = self.worst.get(configuration, 0.0), self.tolerance.get(configuration, 0.0)
        if (_share(error, tolerance), tolerance) > (_share(*old), old[1]):
            self.worst[configuration], self.tolerance[configuration] = error, tolerance
        self.worst.setdefault(configuration, error)
        self.tolerance.setdefault(configuration, tolerance)

    def add(self, other: CheckResult) -> None:
        """Take in what another run of the same check found, on other configurations."""
        self.cases |= other.cases
        self.worst |= other.worst
        self.tolerance |= other.tolerance
        self.findings += other.findings
        self.curves |= other.curves
        self.edges += other.edges
        self.refused += other.refused
        self.seconds += other.seconds


def _share(error: float, tolerance: float) -> float:
    """How much of its tolerance an error takes; an error where none is allowed is infinite."""
    if error == 0:
        return 0.0
    return error / tolerance if tolerance else float("inf")


def record(
    results: Mapping[str, CheckResult],
    configuration: str,
    case: Case | None,
    measured: Sequence[Measured],
    dtype: str = "float64",
    text: str = "",
) -> bool:
    """Count one case for every check of `results`; return whether something disagreed.

    Arguments: everything that was measured of the case, in the order of the data flow: the first
    stage that fails is what a finding names, whichever check it belongs to. `text` says the rest.
    """
    broken = next((m for m in measured if m.fails), None)
    for name, result in results.items():
        own = [m for m in measured if m.check == name]
        if not own:
            continue
        worst = max(own, key=lambda m: (_share(m.error, m.tolerance), m.tolerance))
        result.saw(configuration, worst.error, worst.tolerance)
        failed = [m for m in own if m.fails]
        if failed and broken is not None:
            told = f"{broken.stage} is the first tensor that differs"
            if broken not in own:
                told += f"; {name} itself: {failed[0].stage}"
            told += f" ({len(failed)} of {len(own)} of its comparisons fail)"
            result.findings.append(
                Finding(
                    name,
                    configuration,
                    broken.stage,
                    broken.error,
                    broken.tolerance,
                    f"{told}{': ' + text if text else ''}",
                    case,
                    dtype,
                )
            )
    return broken is not None


@dataclass(frozen=True)
class Check:
    """One check: what it compares, which clauses of the sheet it is for, what it does not see."""

    name: str
    what: str
    clauses: tuple[str, ...]
    run: Callable[[Plan], CheckResult]
    blind_spots: tuple[str, ...] = ()


def find_check(name: str) -> Check:
    """Return the check of that name: `CHECK_<NAME>` of the module that `PLACES` says."""
    module, attribute = PLACES[name]
    found: Any = getattr(importlib.import_module(module), attribute)
    assert isinstance(found, Check)
    return found


# One evaluation of a batch answers five checks, so they share a module.
PLACES = {
    "vocabulary": ("parity.checks.vocabulary", "CHECK"),
    "blocks": ("parity.checks.batches", "BLOCKS"),
    "losses": ("parity.checks.batches", "LOSSES"),
    "gradients": ("parity.checks.batches", "GRADIENTS"),
    "metrics": ("parity.checks.batches", "METRICS"),
    "acceptance": ("parity.checks.batches", "ACCEPTANCE"),
    "decoding": ("parity.checks.decoding", "CHECK"),
    "training": ("parity.checks.training", "CHECK"),
    "checkpoints": ("parity.checks.checkpoints", "CHECK"),
    "precision": ("parity.checks.precision", "CHECK"),
}
