"""Both implementations on the same weights and batch: loss, metrics, gradients, slot tensors."""

from __future__ import annotations

from parity.cases import Case
from parity.compare import Comparison, compare_answers
from parity.vectors import answer_case

# The sheet's words (§8): the only answers besides numbers in which two sides can agree.
REFUSALS = ("no supervised target tokens", "no in-vocabulary target tokens")


def cross_check(case: Case, dtype: str) -> Comparison:
    """Compare the port's answer with the spec's on one case, in one dtype.

    Both refusing with the same one of §8's two errors is agreement: `refusal` holds its words. Any
    other answer that is missing is a problem: what was not compared does not agree.
    """
    port, spec = (answer_case(case, side, dtype) for side in ("port", "spec"))
    for words in REFUSALS:
        if all(a.failure == "refused" and words in (a.error or "") for a in (port, spec)):
            return Comparison(refusal=words)
    for side, answer in (("port", port), ("spec", spec)):
        if answer.error is not None:
            return Comparison(problem=f"{side} {answer.failure}: {answer.error}")
    result = compare_answers(port, spec)
    odd = set(port.metrics) ^ set(spec.metrics)
    if odd:
        result.problem = f"only one side has the metrics {', '.join(sorted(odd))}"
    return result
