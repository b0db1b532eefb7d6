"""`parity judge`: what it says of right adapters, of other conventions and of faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import examples.numpy_adapter as example
from parity.adapter import DraftOutputs, NotJudged, Objective, load_adapter
from parity.cases import Case, read_case
from parity.conventions import SHEET, Conventions
from parity.judge import judge_case
from parity.judge_mutants import MUTANTS, mutant_lines, run_mutants
from parity.judge_report import exit_status, overall
from parity.judge_verdicts import CaseVerdict

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "tests" / "vectors"


def vector(name: str) -> Case:
    return read_case(VECTORS / name)


def judged(adapter: Any, *names: str) -> list[CaseVerdict]:
    return [judge_case(adapter, vector(name)) for name in names]


class NumpyDraft(example.NumpyDraft):  # type: ignore[misc]  # the example is plain NumPy
    """The example, with what its objective says changed afterwards."""

    def __init__(
        self,
        change: Callable[[Objective], Objective] = lambda said: said,
        conventions: Conventions = SHEET,
    ) -> None:
        self.change, self.conventions = change, conventions

    def objective(self, case: Case) -> Objective:
        return self.change(super().objective(case))


# --- Verdicts -----------------------------------------------------------------------------------

PRUNED = "pruned-vanilla"


def test_a_third_implementation_conforms() -> None:
    """Fault: a judge that is red for whatever is not ours, or green without comparing."""
    names = [PRUNED, "pruned-gated", "full-rnn-sliding", "error-nothing-inside", "pruned-no-markov"]
    verdicts = judged(NumpyDraft(), *names)
    assert [v.verdict for v in verdicts] == ["conforms"] * len(names)
    assert {"hidden", "draft_logits", "eval_mask", "accept_probability", "loss"} <= set(
        verdicts[0].errors
    )
    assert "gradients: the adapter has none" in verdicts[0].unjudged
    assert exit_status(verdicts) == 0


def halved(said: Objective) -> Objective:
    """A loss and a term with half of the L1 distance; α_l1 is 0.9."""
    num, den = said.metrics["l1_loss"]
    assert said.loss is not None
    metrics = dict(said.metrics) | {"l1_loss": (num / 2, den)}
    return replace(said, loss=said.loss - 0.45 * num / den, metrics=metrics)


def test_half_of_l1_is_a_convention_and_must_be_declared() -> None:
    """Faults: an undeclared convention that passes; a convention that is called a fault."""
    (declared,) = judged(NumpyDraft(halved, Conventions(l1="half")), PRUNED)
    (undeclared,) = judged(NumpyDraft(halved), PRUNED)
    assert (declared.verdict, undeclared.verdict) == ("declared convention", "another convention")
    told = "half of the L1 distance (total variation)"
    assert declared.conventions == undeclared.conventions == (told,)
    assert undeclared.detail == f"not declared: {told}"
    assert undeclared.stage == "l1_loss"
    assert (exit_status([declared]), exit_status([undeclared])) == (0, 1)
    # The vectors' gradients are of the sheet's loss: they must not be called right or wrong.
    assert declared.unjudged[-1] == "gradients: the vectors' are of the sheet's loss"


def test_a_declared_convention_that_is_not_done_is_seen() -> None:
    """Fault: declaring everything, so that nothing is ever red."""
    (verdict,) = judged(NumpyDraft(conventions=Conventions(l1="half")), PRUNED)
    assert verdict.verdict == "another convention"
    assert verdict.detail == "declared but not done: half of the L1 distance (total variation)"


def test_the_loss_alone_must_fit_the_other_numbers() -> None:
    """Fault: each number explained by a convention of its own; the term is half, the loss not."""

    def change(said: Objective) -> Objective:
        return replace(halved(said), loss=said.loss)

    (verdict,) = judged(NumpyDraft(change, Conventions(l1="half")), PRUNED)
    assert (verdict.verdict, verdict.stage) == ("fault", "loss")


class ShiftedLabels(NumpyDraft):
    """Labels one too far; the draft's own input as it should be."""

    def draft_outputs(self, case: Case) -> DraftOutputs:
        unshifted: Case = case.extra.get("unshifted", case)
        return super().draft_outputs(unshifted)

    def objective(self, case: Case) -> Objective:
        ids = np.roll(case.tensors["batch/input_ids"], -1, axis=1)
        tensors = case.tensors | {"batch/input_ids": ids}
        return super().objective(replace(case, tensors=tensors, extra={"unshifted": case}))


def test_shifted_labels_are_a_fault_of_the_cross_entropy() -> None:
    """Fault: a judge that says only "the loss differs", or that a convention explains it."""
    (verdict,) = judged(ShiftedLabels(), PRUNED)
    assert (verdict.verdict, verdict.stage) == ("fault", "ce_loss")
    assert "no known convention" in verdict.detail
    assert verdict.detail.endswith("then loss")
    assert exit_status([verdict]) == 1


@pytest.mark.parametrize(
    ("conventions", "verdict"),
    [(SHEET, "another convention"), (Conventions(window="anchor"), "declared convention")],
)
def test_a_window_from_the_anchor_is_a_convention(conventions: Conventions, verdict: str) -> None:
    """Fault: a draft's convention that makes every later number a fault."""
    source = Path(example.__file__).read_text(encoding="utf-8")
    wrong = 'at > query - config["sliding_window"]'
    assert source.count(wrong) == 1
    scope: dict[str, Any] = {"__name__": "changed"}
    exec(source.replace(wrong, 'at >= a - config["sliding_window"]'), scope)
    adapter = scope["NumpyDraft"]()
    adapter.conventions = conventions
    sliding, plain = judged(adapter, "full-rnn-sliding", "full-vanilla")
    assert (sliding.verdict, plain.verdict) == (verdict, "conforms")
    assert sliding.conventions[0].startswith("a window counts from the anchor")


@pytest.mark.parametrize(
    ("name", "change", "stage"),
    [
        ("layers.0.self_attn.o_proj.weight", lambda w: w.T, "hidden"),
        ("markov_head.markov_w1.weight", lambda w: np.roll(w, 1, 0), "draft_logits"),
        ("confidence_head.proj.bias", lambda w: w + 0.1, "confidence_logits"),
    ],
)
def test_a_fault_of_the_draft_is_named_where_it_begins(
    name: str, change: Callable[[Any], Any], stage: str
) -> None:
    """Fault: naming the loss, which is the last to differ."""
    case = vector(PRUNED)
    tensors = case.tensors | {f"weights/{name}": change(case.tensors[f"weights/{name}"])}
    verdict = judge_case(NumpyDraft(), case, shown=replace(case, tensors=tensors))
    assert (verdict.verdict, verdict.stage) == ("fault", stage)


class Bare:
    """An adapter with nothing in it."""

    name, conventions = "bare", SHEET


class Raises(Bare):
    def objective(self, case: Case) -> Objective:
        raise KeyError("markov_w1")


class RaisesInDraft(NumpyDraft):
    def draft_outputs(self, case: Case) -> DraftOutputs:
        if "weights/t2d" in case.tensors:
            raise KeyError("markov_w1")
        return super().draft_outputs(case)

    def objective(self, case: Case) -> Objective:
        return NumpyDraft().objective(case)


class Passes(Bare):
    def objective(self, case: Case) -> Objective:
        raise NotJudged("no such head")


class GivesNothing(Bare):
    def draft_outputs(self, case: Case) -> DraftOutputs:
        return DraftOutputs()

    def objective(self, case: Case) -> Objective:
        return Objective()


class GivesNone(Bare):
    def objective(self, case: Case) -> Any:
        return None


def test_an_adapter_that_raises_broke_off() -> None:
    """Faults: an exception that ends the run, or that passes as "not judged"."""
    for adapter, text in ((Raises(), "KeyError: 'markov_w1'"), (GivesNone(), "returned NoneType")):
        verdicts = judged(adapter, PRUNED, "error-no-supervision")
        assert [v.verdict for v in verdicts] == ["broke off"] * 2
        assert text in verdicts[0].detail
        assert exit_status(verdicts) == 1
    verdicts = judged(RaisesInDraft(), PRUNED, "full-vanilla")
    assert [v.verdict for v in verdicts] == ["broke off", "conforms"]
    assert verdicts[0].stage == "draft_outputs"


def test_an_adapter_that_gives_nothing_does_not_conform() -> None:
    """Fault: nothing compared, hence nothing wrong, hence conforms."""
    for adapter in (Bare(), Passes(), GivesNothing()):
        verdicts = judged(adapter, PRUNED, "error-no-supervision", "decoding-greedy")
        assert {v.verdict for v in verdicts} == {"not judged"}
        assert overall(verdicts) == "nothing judged"
        assert exit_status(verdicts) == 2


def test_a_refusal_must_be_one_in_the_sheets_words() -> None:
    """Faults: a loss of 0 or NaN where nothing is supervised; any crash taken for the refusal."""

    class Zero(NumpyDraft):
        value = 0.0

        def objective(self, case: Case) -> Objective:
            return Objective(self.value)

    class NaN(Zero):
        value = float("nan")

    class Crash(NumpyDraft):
        def objective(self, case: Case) -> Objective:
            return Objective(1 / 0)

    added = Zero(conventions=Conventions(epsilon=1e-6))
    got = [judged(a, "error-no-supervision")[0] for a in (Zero(), added, NaN(), Crash())]
    assert [v.verdict for v in got] == [
        "another convention",
        "declared convention",
        "fault",
        "broke off",
    ]
    assert "added to denominators" in got[0].detail


def test_numbers_that_are_none_are_faults() -> None:
    """Faults: NaN that no comparison exceeds; a shape that broadcasts."""

    def nan(said: Objective) -> Objective:
        return replace(said, loss=float("nan"))

    def one(said: Objective) -> Objective:
        return replace(said, accept_probability=np.float64(0.5))

    for change, stage in ((nan, "loss"), (one, "accept_probability")):
        (verdict,) = judged(NumpyDraft(change), PRUNED)
        assert (verdict.verdict, verdict.stage) == ("fault", stage)


def test_answers_are_not_shown() -> None:
    """Fault: an adapter that hands the expectation back, and inputs spoilt for the next call."""
    seen = list[Case]()

    class Looks(NumpyDraft):
        def draft_outputs(self, case: Case) -> DraftOutputs:
            said = super().draft_outputs(case)
            seen.append(case)
            for value in case.tensors.values():
                value[...] = 0
            return said

        def objective(self, case: Case) -> Objective:
            seen.append(case)
            return Objective(case.expect.get("loss"))

    assert judged(Looks(), PRUNED)[0].verdict == "conforms"
    assert len(seen) == 2
    assert all(seen[1].tensors["batch/input_ids"].any(-1))
    assert all(not c.expect for c in seen)
    assert not any(name.startswith("expect/") for c in seen for name in c.tensors)


# --- The ready adapters, gradients and decoding -------------------------------------------------


def test_the_ports_adapter_conforms_with_gradients_and_decoding() -> None:
    """Fault: a ready adapter that hands over less than it has."""
    adapter = load_adapter("torch_port")
    names = [PRUNED, "dpace-both", "eagle3-one-step", "decoding-greedy", "error-nothing-inside"]
    verdicts = judged(adapter, *names)
    assert [v.verdict for v in verdicts] == ["conforms"] * len(names)
    assert [v.unjudged for v in verdicts] == [()] * len(names)
    assert sum(name.startswith("gradient ") for name in verdicts[0].errors) == 29


def test_wrong_and_missing_gradients_and_tokens_are_faults() -> None:
    """Faults: a gradient of the wrong sign, one that is left out, another token."""
    port = load_adapter("torch_port")

    class Wrong(Bare):
        families = port.families
        objective = staticmethod(port.objective)
        change: Callable[[dict[str, Any]], Any]

        def gradients(self, case: Case) -> Any:
            found = dict(port.gradients(case))
            type(self).change(found)
            return found

        def decode(self, case: Case) -> Any:
            tokens = port.decode(case)["tokens"].copy()
            tokens[-1] += 1
            return {"tokens": tokens}

    def negated(found: dict[str, Any]) -> None:
        found["norm.weight"] = -found["norm.weight"]

    def left_out(found: dict[str, Any]) -> None:
        del found["fc.weight"]

    for change, text in ((negated, "gradient norm.weight is off"), (left_out, "fc.weight")):
        Wrong.change = staticmethod(change)
        (verdict,) = judged(Wrong(), PRUNED)
        assert (verdict.verdict, verdict.stage) == ("fault", "gradients")
        assert text in verdict.detail
    (decoded,) = judged(Wrong(), "decoding-greedy")
    assert (decoded.verdict, decoded.stage) == ("fault", "tokens")
    assert decoded.unjudged == ("rounds",)


def test_the_specs_adapter_conforms() -> None:
    """Fault: an adapter that was never run."""
    (verdict,) = judged(load_adapter("jaxdraft"), "eagle3-one-step")  # compiles fastest
    assert (verdict.verdict, verdict.unjudged) == ("conforms", ())


# --- Mutants ------------------------------------------------------------------------------------


def test_every_mutant_is_seen_through_the_example() -> None:
    """Fault: a judge that is green whatever the implementation does."""
    cases = [vector(PRUNED), vector("full-rnn-sliding")]
    found = run_mutants(NumpyDraft(), cases)
    assert mutant_lines(found) == [f"{len(MUTANTS)} of {len(MUTANTS)} mutants detected"]
    assert len(MUTANTS) >= 25
    stages = {v.name: v.stage for v in found}
    assert stages["W1 is read by draft ids"] == "draft_logits"
    assert stages["teacher states one late"] == "accept_probability"
    assert stages["no confidence term"] == "loss"


def test_mutants_that_an_adapter_cannot_show_are_listed() -> None:
    """Fault: "all detected" for an adapter that hands over too little to see them."""

    class HiddenOnly(Bare):
        def draft_outputs(self, case: Case) -> DraftOutputs:
            said = NumpyDraft().draft_outputs(case)
            return DraftOutputs(hidden=said.hidden)

    lines = mutant_lines(run_mutants(HiddenOnly(), [vector(PRUNED)]))
    assert "not seen: W1 is read by draft ids (1 cases)" in lines
    assert "no case that it passes has it: window one too wide" in lines
    assert not any("anchors one late" in line for line in lines)
    green = sum(line.startswith("not seen") for line in lines)
    applied = len(MUTANTS) - sum(line.startswith("no case") for line in lines)
    assert lines[-1] == f"{applied - green} of {applied} mutants detected"
