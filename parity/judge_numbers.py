"""An objective's numbers against a case's, under one convention after another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from parity.adapter import MetricValue, Objective
from parity.cases import Array, Case
from parity.compare import FLOOR, relative_error
from parity.conventions import (
    DRAFTING,
    NAMES,
    SHEET,
    Conventions,
    Numbers,
    candidates,
    family,
    recompute,
)
from parity.judge_verdicts import (
    BROKE_OFF,
    CONFORMS,
    DECLARED,
    FAULT,
    NOT_JUDGED,
    UNDECLARED,
    Answers,
    CaseVerdict,
    first_over,
    raised,
    verdict_on,
)
from parity.plain_draft import draft_outputs

# Along the data flow: the first of these that differs is the stage of a fault.
_METRICS = (
    "draft_vocab_coverage",
    "teacher_kept_mass",
    "teacher_top1_prob",
    "draft_top1_prob",
    "teacher_agreement",
    "acc",
    "accuracy_position",
    "accept_position",
    "tau_probabilistic",
    "ce_position",
    "ce_loss",
    "l1_loss",
    "confidence_loss",
    "confidence_abs_error",
    "confidence_cumprod_bias",
)


def explain_numbers(
    declared: Conventions,
    drafted: Conventions,
    case: Case,
    answers: Answers,
    draft: dict[str, float],
    tolerance: float,
    explain: bool,
) -> CaseVerdict:
    """Find the conventions that explain what `objective` said; without any, the fault's stage.

    Arguments: `drafted`, the conventions that explained the draft's outputs, whose errors `draft`
    holds; `explain`, whether others than the declared are tried.
    """
    compare = _Comparer(case, answers, tolerance)
    drawn = {name: getattr(drafted, name) for name in DRAFTING}
    first = None
    for tried in candidates(replace(declared, **drawn)):
        errors = compare.errors(tried, whole=first is None)
        if first is None:
            first = errors
        if errors and first_over(errors, tolerance) is None:
            return _explained(declared, tried, compare, draft | errors, answers)
        if not errors or not explain or not compare.has_conventions:
            break
    assert first is not None  # the declared conventions are always tried
    if not first:  # an objective without anything in it
        return verdict_on(case, CONFORMS if draft else NOT_JUDGED, None, draft, answers)
    if answers.refused is not None:
        return verdict_on(case, BROKE_OFF, "objective", draft, answers, raised(answers.refused))
    bad = first_over(first, tolerance)
    detail = compare.detail(bad, first)
    return verdict_on(case, FAULT, bad, draft | first, answers, detail)


def _explained(
    declared: Conventions,
    found: Conventions,
    compare: _Comparer,
    errors: dict[str, float],
    answers: Answers,
) -> CaseVerdict:
    """Name the conventions without which the numbers would not be those."""
    needed = found
    for name in found.deviations():
        simpler = replace(needed, **{name: getattr(SHEET, name)})
        if name not in DRAFTING and compare.passes(simpler):
            needed = simpler
    told = tuple(needed.told())
    extra = [n for n in needed.deviations() if getattr(needed, n) != getattr(declared, n)]
    undone = [
        name
        for name, value in declared.deviations().items()
        if name not in extra and not _would_do(name, value, needed, compare)
    ]
    if not extra and (not undone or found == declared):
        verdict = DECLARED if told else CONFORMS
        return verdict_on(compare.case, verdict, None, errors, answers, "", told)
    parts = [f"not declared: {_words(name, needed)}" for name in extra]
    parts += [f"declared but not done: {_words(name, declared)}" for name in undone]
    stage = first_over(compare.errors(declared), compare.tolerance)
    return verdict_on(compare.case, UNDECLARED, stage, errors, answers, "; ".join(parts), told)


def _would_do(name: str, value: Any, needed: Conventions, compare: _Comparer) -> bool:
    """Whether a declared convention could be the implementation's, by what it said."""
    if name in DRAFTING:  # told from the draft's outputs
        return bool(getattr(needed, name) == value)
    return compare.passes(replace(needed, **{name: value}))


def _words(name: str, conventions: Conventions) -> str:
    return NAMES[name, getattr(conventions, name)]


class _Comparer:
    """The errors of one objective's numbers against the case's under any conventions."""

    def __init__(self, case: Case, answers: Answers, tolerance: float) -> None:
        self.case, self.answers, self.tolerance = case, answers, tolerance
        self.objective = answers.objective or Objective()
        # Only batches of blocks have conventions; EAGLE3's numbers are compared as they stand.
        self.has_conventions = family(case) != "eagle3"
        self._drafted: dict[Conventions, dict[str, Array]] = {}
        self._known: dict[Conventions, dict[Any, Any]] = {}
        if self.answers.objective is not None:
            self._list_unjudged()

    def _list_unjudged(self) -> None:
        wanted = self.case.expect.get("metrics", {})
        absent = [name for name in wanted if name not in self.objective.metrics]
        answers = self.answers
        if absent:
            answers.unjudged.append(f"metrics {', '.join(sorted(absent))}")
        odd = sorted(set(self.objective.metrics) - set(wanted)) if wanted else []
        answers.unjudged += [f"{name}: a metric that the vector has not" for name in odd]
        for name in ("accept_probability", "eval_mask", "loss"):
            if getattr(self.objective, name) is None and "error" not in self.case.expect:
                answers.unjudged.append(name)

    def passes(self, given: Conventions) -> bool:
        """Whether everything that was handed over is what the conventions come to."""
        errors = self.errors(given, whole=False)
        return bool(errors) and first_over(errors, self.tolerance) is None

    def numbers(self, given: Conventions) -> Numbers:
        """Return the case's numbers: the vector's own under the sheet's conventions."""
        if given != SHEET and self.has_conventions:
            said = self._draft(given)
            known = self._known.setdefault(given.drafting(), {})
            logits, confidence = said["draft_logits"], said.get("confidence_logits")
            return recompute(self.case, given, logits, confidence, known)
        expect, tensors = self.case.expect, self.case.group("expect")
        if "error" in expect:
            nothing = np.zeros(0)
            return Numbers(nothing, nothing, error=expect["error"])
        metrics = {n: (np.asarray(a), np.asarray(b)) for n, (a, b) in expect["metrics"].items()}
        mask, accept = tensors["eval_mask"].astype(bool), tensors["accept_probability"]
        return Numbers(mask, accept, metrics, expect["loss"])

    def _draft(self, given: Conventions) -> dict[str, Array]:
        key = given.drafting()
        if key not in self._drafted:
            self._drafted[key] = draft_outputs(self.case, key.window, key.own_block)
        return self._drafted[key]

    def errors(self, given: Conventions, whole: bool = True) -> dict[str, float]:
        """Return the error of every stage, along the data flow; else up to the first too large."""
        numbers = self.numbers(given)
        refused = self.answers.refused
        if refused is not None:
            words = numbers.error is not None and numbers.error in str(refused)
            return {"refusal": 0.0 if words else float("inf")}
        if numbers.error is not None:
            return {"refusal": float("inf")} if self.objective.loss is not None else {}
        errors = dict[str, float]()
        for stage, error in self._stages(numbers, given.epsilon):
            # What the metrics of a batch are that should be refused, nothing says.
            if "error" not in self.case.expect or stage == "loss":
                errors[stage] = error
            if not whole and not error <= self.tolerance:
                break
        return errors

    def _stages(self, numbers: Numbers, epsilon: float) -> Iterator[tuple[str, float]]:
        said = self.objective
        if said.eval_mask is not None:
            same = np.array_equal(np.asarray(said.eval_mask).astype(bool), numbers.eval_mask)
            yield "eval_mask", 0.0 if same else float("inf")
        if said.accept_probability is not None:
            got, mask = np.asarray(said.accept_probability), numbers.eval_mask
            error = float("inf")
            if got.shape == mask.shape:
                error = relative_error(got[mask], numbers.accept_probability[mask])
            yield "accept_probability", error
        for name in self._known_metrics():
            pair = numbers.metrics[name]
            # A difference of two sums over the denominator's slots: its rounding is theirs.
            size = float(pair[1]) if name == "confidence_cumprod_bias" else 0.0
            yield name, _metric_error(said.metrics[name], pair, epsilon, size)
        if said.loss is not None:
            yield "loss", relative_error(said.loss, numbers.loss)

    def _known_metrics(self) -> list[str]:
        """Return the metrics that both have, along the data flow.

        The sheet may have more than the vector: one older than a row is no judge of it.
        """
        order = {name: i for i, name in enumerate(_METRICS)}
        known = [n for n in self.objective.metrics if n in self.case.expect.get("metrics", {})]
        return sorted(known, key=lambda n: (order.get(n, len(order)), n))

    def detail(self, stage: str | None, errors: Mapping[str, float]) -> str:
        """Say of a fault what was expected."""
        if stage == "refusal":
            return (
                f"expected the error {self.case.expect.get('error')!r}, got loss "
                f"{self.objective.loss}"
            )
        more = [name for name, error in errors.items() if not error <= self.tolerance][1:]
        text = f"{stage} is off by {errors[stage or 'loss']:.1e}; no known convention explains it"
        return f"{text}; then {', '.join(more)}" if more else text


def _metric_error(
    got: MetricValue, pair: tuple[Array, Array], epsilon: float, size: float
) -> float:
    """Return the error of a metric; `size` is what its numerator's is relative to at least."""
    if isinstance(got, tuple | list):
        if len(got) != 2:
            return float("inf")
        error = relative_error(got[0], pair[0])
        own = max(float(np.abs(pair[0]).max(initial=0.0)), FLOOR)
        return max(error * own / max(own, size), relative_error(got[1], pair[1]))
    if pair[1].ndim or float(pair[1]) + epsilon == 0:
        return float("inf")
    return relative_error(got, float(pair[0]) / (float(pair[1]) + epsilon))
