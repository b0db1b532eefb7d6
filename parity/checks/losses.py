"""Both implementations on the same weights and batch: loss, metrics, gradients, slot tensors."""

from __future__ import annotations

from parity.cases import Case
from parity.compare import Comparison, compare_answers
from parity.sides import run_port, run_spec


def cross_check(case: Case, dtype: str) -> Comparison:
    """Compare the port's answer with the spec's on one case, in one dtype.

    A refusal by either side is a problem, not a pass: what was not compared does not agree.
    """
    port, spec = run_port(case, dtype), run_spec(case, dtype)
    for side, answer in (("port", port), ("spec", spec)):
        if answer.error is not None:
            return Comparison(problem=f"{side} refused: {answer.error}")
    result = compare_answers(port, spec)
    odd = set(port.metrics) ^ set(spec.metrics)
    if odd:
        result.problem = f"only one side has the metrics {', '.join(sorted(odd))}"
    return result
