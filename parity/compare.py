"""How two answers are compared, and the tolerances with their reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from parity.sides import Answer

# An error is relative to the tensor's largest magnitude, but to no less than this: a gradient that
# is 0 but for rounding would otherwise be compared with its own rounding (vectors.md).
FLOOR = 1e-2

# float64: two right programs differ by the order of their sums, about 1e-15 per tensor here; 1e-10
# leaves room for longer sums and is far below what any fault causes. float32: rounding 6e-8 times
# the depth of the network and the length of its sums (vectors.md).
TOLERANCE = {"float64": 1e-10, "float32": 2e-5}


def relative_error(got: ArrayLike, expected: ArrayLike) -> float:
    """Return max|got − expected| / max(max|expected|, FLOOR); infinite for shapes or NaN.

    >>> relative_error([1.0, 2.0], [1.0, 4.0])
    0.5
    """
    a, b = np.asarray(got, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if a.shape != b.shape or not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    if a.size == 0:
        return 0.0
    return float(np.abs(a - b).max() / max(np.abs(b).max(), FLOOR))


@dataclass
class Comparison:
    """The errors of one answer against what was expected, by kind and by name."""

    errors: dict[str, dict[str, float]] = field(
        default_factory=lambda: {"loss": {}, "metrics": {}, "gradients": {}, "tensors": {}}
    )
    problem: str | None = None  # what could not be compared, in words
    refusal: str | None = None  # both sides refused the case, in these words of the sheet

    def worst(self, kind: str) -> float:
        """Return the largest error of a kind, 0 where nothing of it was compared."""
        return max(self.errors[kind].values(), default=0.0)

    def worst_named(self) -> tuple[str, float]:
        """Return (name, error) of the largest error of all."""
        flat = {f"{kind} {n}": e for kind, named in self.errors.items() for n, e in named.items()}
        return max(flat.items(), key=lambda item: item[1]) if flat else ("nothing", 0.0)

    def passes(self, tolerance: float) -> bool:
        """Return whether everything was compared and lies within the tolerance."""
        return self.problem is None and self.worst_named()[1] <= tolerance


def compare_with_expectation(
    answer: Answer, expect: Mapping[str, Any], tensors: Mapping[str, NDArray[Any]]
) -> Comparison:
    """Compare an answer with a vector's `expect` and its `expect/…` tensors.

    Slots whose evaluation mask is False are not compared (vectors.md).
    """
    result = Comparison()
    if not expect:
        result.problem = "the case holds no expectation to compare with"
        return result
    if "error" in expect:
        if answer.error is None:
            result.problem = f"expected the error {expect['error']!r}, got loss {answer.loss}"
        elif expect["error"] not in answer.error or answer.failure != "refused":
            result.problem = f"expected the error {expect['error']!r}, got {answer.error!r}"
        return result
    if answer.error is not None:
        result.problem = f"{answer.failure}: {answer.error}"
        return result
    expected = Answer(
        loss=expect["loss"],
        metrics={n: (np.asarray(p[0]), np.asarray(p[1])) for n, p in expect["metrics"].items()},
        gradients={n.removeprefix("grad/"): v for n, v in tensors.items() if n.startswith("grad/")},
        tensors={n: v for n, v in tensors.items() if not n.startswith("grad/")},
    )
    return compare_answers(answer, expected, result)


def compare_answers(
    answer: Answer, expected: Answer, result: Comparison | None = None
) -> Comparison:
    """Compare everything `expected` holds; something absent from `answer` is a problem."""
    result = result or Comparison()
    result.errors["loss"]["loss"] = relative_error(answer.loss, expected.loss)
    for name, (numerator, denominator) in expected.metrics.items():
        pair = answer.metrics.get(name)
        if pair is None:
            result.problem = f"metric {name} is missing"
            continue
        result.errors["metrics"][name] = max(
            relative_error(pair[0], numerator), relative_error(pair[1], denominator)
        )
    if set(answer.gradients) != set(expected.gradients):
        odd = sorted(set(answer.gradients) ^ set(expected.gradients))
        result.problem = f"gradients of other parameters than expected: {', '.join(odd)}"
    for name, gradient in expected.gradients.items():
        if name in answer.gradients:
            result.errors["gradients"][name] = relative_error(answer.gradients[name], gradient)
    _compare_tensors(answer, expected, result)
    return result


def _compare_tensors(answer: Answer, expected: Answer, result: Comparison) -> None:
    mask = expected.tensors.get("eval_mask")
    for name, value in expected.tensors.items():
        got = answer.tensors.get(name)
        if got is None or got.shape != value.shape:
            result.problem = f"tensor {name} is missing or has another shape"
        elif mask is None or name == "eval_mask":
            result.errors["tensors"][name] = relative_error(got, value)
        else:
            result.errors["tensors"][name] = relative_error(got[mask], value[mask])
