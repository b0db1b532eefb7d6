"""Somebody else's implementation against conformance vectors, stage by stage.

An implementation comes as an adapter: an object with a few functions of NumPy arrays (`Adapter`).
Where a number differs from a vector's, the judge asks whether a known convention explains it
(`parity.conventions`); only what none explains is a fault. Needs neither torch nor jax.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from parity.adapter import DraftOutputs, NotJudged, Objective, computes_in, without_answers
from parity.cases import Array, Case, CaseError, list_cases, read_case
from parity.compare import TOLERANCE, relative_error
from parity.conventions import DRAFTING, SHEET, Conventions, draft_candidates, family
from parity.judge_numbers import explain_numbers
from parity.judge_verdicts import (
    BAD,
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

_OUTPUTS = ("hidden", "draft_logits", "confidence_logits")


def judge(adapter: Any, directory: Path) -> Iterator[CaseVerdict]:
    """Yield a verdict on every case below `directory`.

    Raises CaseError when there is none, or one cannot be read; ValueError for a declaration that
    is not known.
    """
    for case in [read_case(path) for path in list_cases(directory)]:
        yield judge_case(adapter, case)


def judge_case(
    adapter: Any, case: Case, shown: Case | None = None, explain: bool = True
) -> CaseVerdict:
    """Judge one case.

    Arguments: `shown` is what the adapter gets instead of the case (a mutant of it); `explain`,
    whether conventions that are not declared are tried.
    """
    seen = without_answers(shown or case)
    if not case.expect:
        raise CaseError(f"{case.path}: the case holds no expectation to compare with")
    if "optimizer" in case.extra:
        return CaseVerdict(case.name, NOT_JUDGED, detail="a training run: adapters have none")
    if "decoding" in case.extra:
        return _judge_decoding(adapter, case, seen)
    kind = family(case)
    if kind not in getattr(adapter, "families", ("dspark",)):
        return CaseVerdict(case.name, NOT_JUDGED, detail=f"the adapter has no {kind} drafts")
    answers = _ask(adapter, seen)
    if answers.broke and not _refused_rightly(case, answers):
        return CaseVerdict(case.name, BROKE_OFF, *_where(answers.broke))
    tolerance = TOLERANCE[computes_in(adapter)]
    declared = _that_apply(adapter.conventions, case)
    drafted, draft = _explain_draft(case, answers, declared, tolerance, explain)
    bad = first_over(draft, tolerance)
    if bad is not None:
        text = f"{bad} is off by {draft[bad]:.1e}; no known convention explains it"
        return verdict_on(case, FAULT, bad, draft, answers, text)
    if answers.objective is None and answers.refused is None:
        return _draft_alone(case, answers, declared, drafted, draft)
    found = explain_numbers(declared, drafted, case, answers, draft, tolerance, explain)
    return _judge_gradients(adapter, case, seen, found, tolerance)


def _that_apply(declared: Conventions, case: Case) -> Conventions:
    """Return what is declared, without what only sliding layers have where there are none."""
    if "sliding_attention" in (case.config.get("layer_types") or []):
        return declared
    return replace(declared, **{name: getattr(SHEET, name) for name in DRAFTING})


def _draft_alone(
    case: Case,
    answers: Answers,
    declared: Conventions,
    drafted: Conventions,
    draft: dict[str, float],
) -> CaseVerdict:
    """Judge a draft whose adapter has no objective."""
    told = tuple(drafted.told())
    if not draft:
        reasons = [text for text in answers.unjudged if ": " in text]
        text = "; ".join(dict.fromkeys(text.split(": ", 1)[1] for text in reasons))
        return verdict_on(case, NOT_JUDGED, None, draft, answers, text or "it gave nothing")
    if drafted != declared.drafting():
        return verdict_on(case, UNDECLARED, "hidden", draft, answers, "not declared", told)
    return verdict_on(case, DECLARED if told else CONFORMS, None, draft, answers, "", told)


def _refused_rightly(case: Case, answers: Answers) -> bool:
    """Whether what broke off is judged with the numbers: a refusal where one is expected."""
    if "error" not in case.expect:
        return False
    return answers.refused is not None or case.expect["error"] in (answers.broke or "")


def _where(broke: str) -> tuple[str, tuple[str, ...], str]:
    stage, text = broke.split(": ", 1)
    return stage, (), text


def _ask(adapter: Any, case: Case) -> Answers:
    """Call the adapter's two functions; what they raise is an answer too."""
    answers = Answers()
    for stage in ("draft_outputs", "objective"):
        function = getattr(adapter, stage, None)
        if function is None:
            answers.unjudged.append(f"{stage}: the adapter has none")
            continue
        try:
            value = function(without_answers(case))
        except NotJudged as reason:
            answers.unjudged.append(f"{stage}: {reason}")
            continue
        except Exception as error:  # noqa: BLE001 (a case must not end the run)
            if stage == "objective":
                answers.refused = error
            answers.broke = answers.broke or f"{stage}: {raised(error)}"
            continue
        if stage == "draft_outputs" and isinstance(value, DraftOutputs):
            answers.outputs = value
        elif stage == "objective" and isinstance(value, Objective):
            answers.objective = value
        else:
            wanted = "DraftOutputs" if stage == "draft_outputs" else "Objective"
            answers.broke = f"{stage}: returned {type(value).__name__}, not {wanted}"
    return answers


def _explain_draft(
    case: Case, answers: Answers, declared: Conventions, tolerance: float, explain: bool
) -> tuple[Conventions, dict[str, float]]:
    """Return the draft's conventions and errors at slots that count; without any, the declared's.

    A vector holds what the sheet's draft says; under another convention it is computed.
    """
    expected = {n: v for n, v in case.group("expect").items() if n in _OUTPUTS}
    for name in expected:
        if getattr(answers.outputs, name) is None:
            answers.unjudged.append(name)
    first = None
    for tried in draft_candidates(declared):
        said = expected
        if expected and tried != SHEET:
            said = draft_outputs(case, tried.window, tried.own_block)
        errors = _draft_errors(case, answers, expected, said)
        first = errors if first is None else first
        if first_over(errors, tolerance) is None:
            return tried, errors
        if not explain or _that_apply(Conventions(window="anchor"), case) == SHEET:
            break
    assert first is not None  # the declared conventions are always tried
    return declared.drafting(), first


def _draft_errors(
    case: Case, answers: Answers, names: Iterable[str], said: Mapping[str, Array]
) -> dict[str, float]:
    errors = dict[str, float]()
    for name in (name for name in _OUTPUTS if name in names):
        got = getattr(answers.outputs, name)
        if got is not None and np.shape(got) != said[name].shape:
            errors[name] = float("inf")
        elif got is not None:
            mask = case.group("expect")["eval_mask"].astype(bool)
            errors[name] = relative_error(np.asarray(got)[mask], said[name][mask])
    return errors


# --- Gradients and decoding -------------------------------------------------------------------


def _judge_gradients(
    adapter: Any, case: Case, seen: Case, found: CaseVerdict, tolerance: float
) -> CaseVerdict:
    """Compare the gradients where the loss is the sheet's: a vector has no others."""
    expected = {
        n.removeprefix("grad/"): v for n, v in case.group("expect").items() if n.startswith("grad/")
    }
    if not expected or found.verdict in BAD:
        return found
    if found.conventions:
        reason = "gradients: the vectors' are of the sheet's loss"
        return replace(found, unjudged=(*found.unjudged, reason))
    if getattr(adapter, "gradients", None) is None:
        return replace(found, unjudged=(*found.unjudged, "gradients: the adapter has none"))
    try:
        got = dict(adapter.gradients(without_answers(seen)))
    except NotJudged as reason:
        return replace(found, unjudged=(*found.unjudged, f"gradients: {reason}"))
    except Exception as error:  # noqa: BLE001
        return replace(found, verdict=BROKE_OFF, stage="gradients", detail=raised(error))
    odd = sorted(set(got) ^ set(expected))
    errors = {
        f"gradient {name}": relative_error(got[name], value)
        for name, value in expected.items()
        if name in got
    }
    judged = replace(
        found,
        errors=dict(found.errors) | errors,
        verdict=CONFORMS if found.verdict == NOT_JUDGED else found.verdict,
    )
    bad = first_over(errors, tolerance)
    if odd:
        detail = f"gradients of other parameters than the vector's: {', '.join(odd)}"
        return replace(judged, verdict=FAULT, stage="gradients", detail=detail)
    if bad is not None:
        detail = f"{bad} is off by {errors[bad]:.1e}"
        return replace(judged, verdict=FAULT, stage="gradients", detail=detail)
    return judged


def _judge_decoding(adapter: Any, case: Case, seen: Case) -> CaseVerdict:
    """Compare tokens and rounds, which must be equal: the draws are given."""
    if getattr(adapter, "decode", None) is None:
        return CaseVerdict(case.name, NOT_JUDGED, detail="decode: the adapter has none")
    try:
        got = dict(adapter.decode(without_answers(seen)))
    except NotJudged as reason:
        return CaseVerdict(case.name, NOT_JUDGED, detail=f"decode: {reason}")
    except Exception as error:  # noqa: BLE001
        return CaseVerdict(case.name, BROKE_OFF, "decode", detail=raised(error))
    expected = case.group("expect")
    known = {name: value for name, value in expected.items() if got.get(name) is not None}
    unjudged = tuple(sorted(set(expected) - set(known)))
    if not known:
        return CaseVerdict(case.name, NOT_JUDGED, detail="decode: gave nothing")
    errors = {
        name: 0.0 if np.array_equal(got[name], value) else float("inf")
        for name, value in sorted(known.items())
    }
    bad = first_over(errors, 0.0)
    if bad is None:
        return CaseVerdict(case.name, CONFORMS, errors=errors, unjudged=unjudged)
    detail = f"other {bad} with the same draws"
    return CaseVerdict(case.name, FAULT, bad, (), detail, errors, unjudged)
