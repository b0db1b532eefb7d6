"""What a check of the suite is, and what it answers."""

from __future__ import annotations

import importlib
from collections.abc import Callable
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
    seconds: float = 0.0

    @property
    def agrees(self) -> bool:
        """Whether something was compared and nothing disagreed."""
        return not self.findings and sum(self.cases.values()) > 0

    def saw(self, configuration: str, error: float, tolerance: float) -> None:
        """Count a case and keep the worst error of its configuration."""
        self.cases[configuration] = self.cases.get(configuration, 0) + 1
        self.worst[configuration] = max(error, self.worst.get(configuration, 0.0))
        self.tolerance[configuration] = tolerance


@dataclass(frozen=True)
class Check:
    """One check: what it compares, which clauses of the sheet it is for, what it does not see."""

    name: str
    what: str
    clauses: tuple[str, ...]
    run: Callable[[Plan], CheckResult]
    blind_spots: tuple[str, ...] = ()


def find_check(name: str) -> Check:
    """Return the check of that name: `CHECK_<NAME>` of the module that `_PLACES` says."""
    module, attribute = _PLACES[name]
    found: Any = getattr(importlib.import_module(module), attribute)
    assert isinstance(found, Check)
    return found


# One evaluation of a batch answers five checks, so they share a module.
_PLACES = {
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
