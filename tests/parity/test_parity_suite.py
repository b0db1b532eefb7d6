"""The suite agrees with itself on a small slice, and every check can fail."""

from dataclasses import replace

import numpy as np
import pytest

import parity.convert
import torch_port.blocks
import torch_port.models.backbone
import torch_port.training.step
import torch_port.verification
import torch_port.vocabulary.selection
from parity.checks.base import CHECKS, CheckResult, Measured, Plan, find_check, record
from parity.checks.batches import BLOCKS, compare_case, run_batches
from parity.checks.checkpoints import compare_conversions
from parity.checks.training import compare_runs, drawn_run
from parity.configurations import BY_NAME, CONFIGURATIONS
from parity.edges import EDGES, LOSS_ONLY, edges
from parity.shrink import smallest
from parity.sides import run_port, run_spec
from parity.stages import BLOCK_CELLS, port_staged, spec_staged
from parity.suite import run_suite, tasks

QUICK = Plan(cases=2, configurations=("dflash-pruned", "ties", "mistakes"))
VANILLA = Plan(cases=1, configurations=("pruned-vanilla",), first_only=True)


def test_a_slice_counts_what_it_compared() -> None:
    """Faults: a case that five checks look at counts five times, or an edge as a drawn case."""
    suite = run_suite(QUICK, ("vocabulary", "blocks", "losses", "metrics"), workers=0)
    assert [(f.check, f.configuration, f.text) for f in suite.findings] == []
    assert suite.agrees
    cases, number = suite.counts()
    assert cases == 2 + 2 * 2  # two batches, two maps of each kind
    assert number == sum(1 for _ in edges(BY_NAME["dflash-pruned"], 0))


def test_every_check_is_found_under_its_name() -> None:
    """Fault: a check that no command runs, or that says no clause."""
    for name in CHECKS:
        check = find_check(name)
        assert check.name == name
        assert check.clauses
        assert check.what
    run = {name for task in tasks(Plan(), CHECKS) for name in task.checks}
    assert run == set(CHECKS)


# --- Each check can fail ----------------------------------------------------------------------


def test_a_shifted_label_is_named_in_the_blocks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a suite that says "the loss differs" of a label read one position early."""
    monkeypatch.setattr(torch_port.blocks, "label_offset", lambda layout: 0)
    results = run_batches(VANILLA)
    assert results["blocks"].findings
    for result in results.values():
        for finding in result.findings:
            assert finding.stage in ("eval_mask", "labels"), finding.text
    assert results["losses"].findings
    assert "itself" in results["losses"].findings[0].text


def test_a_window_off_by_one_is_seen_cell_by_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a visibility matrix compared in the form that did not run."""
    from torch_port.models import blockwise

    monkeypatch.setattr(
        blockwise, "first_key", lambda anchor, window: 0 if not window else max(0, anchor - window)
    )
    plan = Plan(cases=3, configurations=("pruned-sliding",), first_only=True)
    (finding,) = BLOCKS.run(plan).findings
    # The band is as wide as the window, so that a wider one does not even fit.
    assert finding.stage.startswith(("visible blockwise", "blocks (port: ValueError"))


def test_a_biased_norm_is_named_in_the_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a tolerance in which an epsilon of 1e-6 instead of 1e-5, or bf16 norms, have room."""
    norm = torch_port.models.backbone.RMSNorm
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, x: forward(self, x) * (1 + 1e-7))
    results = run_batches(VANILLA)
    assert not results["blocks"].findings
    assert results["losses"].findings[0].stage == "hidden"
    # And too small for float32 to see: what float64 is for.
    case = BY_NAME["pruned-vanilla"].case(0, 0)
    assert any(m.fails for m in compare_case(case, "float64"))


def test_a_wrong_rate_is_seen_in_the_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a tolerance for training in which a rate off by one millionth has room."""
    right = torch_port.training.step.rate_at
    case = drawn_run("dflash-pruned", 0, 6)
    assert not any(m.fails for m in compare_runs(case)[0])
    monkeypatch.setattr(
        torch_port.training.step, "rate_at", lambda *asked: right(*asked) * (1 + 1e-6)
    )
    measured, curve = compare_runs(case)
    assert "parameter" in next(m.stage for m in measured if m.fails)
    assert len(curve) == 6


def test_a_transposition_both_ways_is_seen_in_the_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fault: a conversion judged by going there and back, which forgives a square matrix."""

    def turned(tree: dict[str, object], convert: object = None) -> dict[str, object]:
        attention = tree["layers_0"]["self_attn"]  # type: ignore[index]
        kernel = attention["o_proj"]["kernel"]
        assert kernel.shape[0] == kernel.shape[1]
        attention["o_proj"] = {"kernel": np.ascontiguousarray(np.asarray(kernel).T)}
        return tree

    to_flax, to_torch = parity.convert.to_flax, parity.convert.to_torch
    monkeypatch.setattr(parity.convert, "to_flax", lambda *a: turned(to_flax(*a)))
    monkeypatch.setattr(
        parity.convert, "to_torch", lambda tree, table: to_torch(turned(dict(tree)), table)
    )
    drawn = BY_NAME["dflash-pruned"].case(0, 0)
    case = replace(drawn, extra={"checkpoints": [["hf", "orbax"], ["orbax", "hf"]]})
    failed = [m.stage for m in compare_conversions(case) if m.fails]
    assert failed[0] == "orbax, evaluated by the spec: draft_logits"


def test_a_map_of_the_higher_id_and_a_wrong_residual_are_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faults: checks of map and decoding that pass whatever the port answers."""
    right = torch_port.vocabulary.selection._rank
    monkeypatch.setattr(
        torch_port.vocabulary.selection,
        "_rank",
        lambda scores, pins: right(scores[::-1], pins) if not pins.size else right(scores, pins),
    )
    plan = Plan(cases=20, configurations=("ties",), first_only=True)
    assert find_check("vocabulary").run(plan).findings[0].stage == "t2d"
    monkeypatch.setattr(torch_port.verification, "residual", lambda p, _: p)
    plan = Plan(cases=8, configurations=("vanilla",), first_only=True)
    assert find_check("decoding").run(plan).findings


# --- What is drawn ----------------------------------------------------------------------------


def test_edges_are_what_they_say() -> None:
    """Faults: an edge that no configuration has; ties that are none; a teacher that differs."""
    held = {
        name
        for c in CONFIGURATIONS
        for name, _ in edges(replace(c), 0)
        if c.name in ("pruned-vanilla", "one-anchor-none")
    }
    assert held == set(EDGES)
    cases = dict(edges(BY_NAME["pruned-vanilla"], 0))
    ties = run_spec(cases["ties of the draft"], "float64", spec_staged)
    logits = ties.tensors["draft_logits"][ties.tensors["eval_mask"]]
    assert ((logits == logits.max(-1, keepdims=True)).sum(-1) > 1).any()
    hot = run_port(cases["hot logits"], "float64", port_staged)
    assert np.abs(hot.tensors["draft_logits"]).max() > 1e3
    for name in ("nothing supervised", "all labels pruned"):
        assert run_port(cases[name], "float64").failure == "refused"
    equal = dict(edges(BY_NAME["one-anchor-none"], 0))["draft equals teacher"]
    assert equal.extra == {LOSS_ONLY: True}
    answer = run_spec(equal, "float64", spec_staged)
    # Float32 states: the teacher's are the draft's rounded.
    assert answer.stages["l1"][answer.tensors["eval_mask"]].max() < 1e-5
    assert not any(m.check == "gradients" for m in compare_case(equal, "float64"))


# --- Findings ---------------------------------------------------------------------------------


def test_a_finding_names_the_first_stage_of_the_flow() -> None:
    """Fault: a finding of gradients that hides the logits before them."""
    results = {name: CheckResult(name) for name in ("losses", "gradients")}
    measured = [
        Measured("losses", "hidden", 1e-12, 1e-10),
        Measured("losses", "draft_logits", 1e-3, 1e-10),
        Measured("gradients", "gradient of norm.weight", float("nan"), 1e-10),
    ]
    assert record(results, "c", None, measured)
    assert [r.findings[0].stage for r in results.values()] == ["draft_logits"] * 2
    assert not results["gradients"].agrees
    assert not CheckResult("losses").agrees  # nothing was compared
    assert set(BLOCK_CELLS) >= {"labels", "eval_mask"}


def test_shrinking_keeps_what_fails() -> None:
    """Faults: a smaller case that no longer fails; one that is not smaller."""
    case = BY_NAME["pruned-vanilla"].case(0, 1)
    anchors = np.array([[1, 2, 3, 4], [5, 6, 7, 8]])
    case = replace(case, tensors=case.tensors | {"batch/anchor_positions": anchors})
    small = smallest(case, lambda c: bool((c.tensors["batch/anchor_positions"] == 7).any()))
    assert small.tensors["batch/anchor_positions"].tolist() == [[7]]
    assert small.tensors["batch/input_ids"].shape == (1, 7 + 4 + 1)
    assert small.tensors["batch/hidden_states"].shape[:2] == (1, 12)
    assert smallest(case, lambda c: False) is case
