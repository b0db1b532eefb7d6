"""What hypothesis draws for the suite: reproducible, fresh in each case, simple when it fails."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

import torch_port.models.backbone
import torch_port.vocabulary.selection
from parity.checks.base import Finding, Measured, Plan, find_check
from parity.checks.batches import run_batches
from parity.checks.decoding import _SETTINGS, KINDS, _make, port_decoding
from parity.configurations import BY_NAME
from parity.edges import edges
from parity.exploring import TRIES, drawn, explore
from parity.recipes import B, N
from parity.sides import run_port
from parity.variations import Variation, variations

_DRAW = """
from parity.checks.decoding import _SETTINGS
from parity.checks.vocabulary import KINDS
from parity.exploring import drawn
from parity.variations import variations
for strategy in (variations("dspark"), _SETTINGS, KINDS["pinned ids"]):
    print(drawn(strategy, "a name/7", 40))
"""


def test_a_draw_is_the_same_in_a_process_that_has_imported_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fault: values beyond 99, which hypothesis takes from the modules that are imported."""
    other = tmp_path / "other.py"  # constants that no other module has
    numbers = ", ".join(str(7 * n) for n in range(15, 140))
    other.write_text(f"NUMBERS = [{numbers}, 3.25, 0.125]\n" + _DRAW)
    environment = os.environ | {"TORCH_PORT_CACHE": str(tmp_path / "cache")}
    alone = subprocess.run(
        [sys.executable, str(other)],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment,
    ).stdout
    exec(_DRAW, {})
    assert capsys.readouterr().out == alone
    assert len(alone.splitlines()) == 3
    # hypothesis leaves nothing where the user stands.
    assert {path.name for path in tmp_path.iterdir()} <= {"other.py", "cache"}


def test_what_is_drawn_differs_from_case_to_case() -> None:
    """Faults: a strategy with few values; anchors at one place; masks without holes; no heat."""
    values = drawn(variations("dspark"), "one/0", 60)
    assert len(set(values)) == 60
    assert values[0] == Variation(decay=1)
    assert values != drawn(variations("dspark"), "two/0", 60)
    cases = [BY_NAME["pruned-vanilla"].case(0, n, value) for n, value in enumerate(values)]
    anchors = np.stack([case.tensors["batch/anchor_positions"] for case in cases])
    kept = np.stack([case.tensors["batch/block_keep_mask"] for case in cases])
    masks = np.stack([case.tensors["batch/loss_mask"] for case in cases])
    assert len(np.unique(anchors)) > 15
    assert 0 < kept.mean() < 1
    assert {0.0, 0.5} < {round(float(value), 1) for value in np.unique(masks)} <= {0, 0.5, 0.6, 1}
    heads = [np.abs(case.tensors["target/lm_head.weight"]).max() for case in cases]
    assert max(heads) > 50 * min(heads)
    assert len({case.objective["ce_alpha"] for case in cases}) > 2
    assert len({case.objective["loss_decay_gamma"] for case in cases}) > 5


def test_anchors_as_sampled_are_candidates_in_order() -> None:
    """Faults: a block at no candidate; a padded block that is kept; one row's mask for another."""
    for number, value in enumerate(drawn(variations("dflash"), "anchors/0", 80)):
        case = BY_NAME["dflash-pruned"].case(0, number, value)
        on = case.tensors["batch/loss_mask"] > 0.5
        anchors, keep = (
            case.tensors[f"batch/{name}"] for name in ("anchor_positions", "block_keep_mask")
        )
        if not value.as_sampled:
            assert (~keep).sum() == len(value.dropped)
            continue
        for row in range(B):
            chosen = anchors[row][keep[row]]
            assert list(chosen) == sorted(set(chosen))
            assert all(on[row, at] and on[row, at + 1] for at in chosen)
            assert not anchors[row][~keep[row]].any()
    assert Variation().moved == (0,) * (B * N)


def test_the_weights_of_every_case_are_its_own() -> None:
    """Faults: the simplest values, which come first, on the same weights; a case that drifts."""
    configuration = BY_NAME["pruned-vanilla"]
    cases = [configuration.case(seed, number) for seed, number in ((3, 5), (4, 5), (3, 6), (3, 5))]
    weights = [case.tensors["weights/fc.weight"] for case in cases]
    assert not np.array_equal(weights[0], weights[1])
    assert not np.array_equal(weights[0], weights[2])
    assert all(np.array_equal(v, cases[3].tensors[n]) for n, v in cases[0].tensors.items())
    forms = {tuple(sorted(map(str, configuration.case(0, n).compute.items()))) for n in range(8)}
    assert len(forms) == 8


# --- Looking for the simplest -------------------------------------------------------------------


def test_the_simplest_value_that_disagrees_is_returned() -> None:
    """Faults: the first value instead of the simplest; another number, which is another case."""
    numbers = []

    def wrong(number: int, value: list[int]) -> bool:
        numbers.append(number)
        return sum(value) > 100

    values = st.lists(st.integers(0, 99), max_size=20)
    first = explore(values, "sums", 100, wrong)
    assert first is not None
    found = explore(values, "sums", 100, wrong, wrong)
    assert found is not None
    assert found[0] == first[0] > 0
    assert sum(found[1]) == 101 or len(found[1]) < len(first[1])
    # Visited once each up to the first, then always as the case that disagreed.
    assert numbers.count(0) == 2
    assert set(numbers[2 * (first[0] + 1) :]) == {first[0]}
    assert len(numbers) <= 2 * (first[0] + 1) + TRIES


def test_simplifying_ends_when_its_tries_are_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: a budget that hypothesis takes for a flaky test; one that is not kept."""
    monkeypatch.setattr("parity.exploring.TRIES", 3)
    tries = []

    def alike(number: int, value: list[int]) -> bool:
        tries.append(value)
        return True

    found = explore(st.lists(st.integers(0, 99), min_size=9), "all", 50, _third, alike)
    assert found is not None
    assert found[0] == 3
    assert len(tries) == 3
    assert found[1] == tries[-1]


def _third(number: int, value: object) -> bool:
    return number == 3


def test_what_breaks_off_is_raised_and_never_simplified() -> None:
    """Faults: a crash reported as a disagreement, or lost; a crash while simplifying."""

    def broken(number: int, value: int) -> bool:
        raise KeyError(number)

    for alike in (None, broken):
        with pytest.raises(KeyError):
            explore(st.integers(0, 99), "broken", 9, broken, alike)
    assert explore(st.integers(0, 99), "broken", 9, _third, broken) == (
        3,
        drawn(st.integers(0, 99), "broken", 4)[3],
    )


def test_too_few_values_are_an_error() -> None:
    """Fault: a run that compares fewer cases than it was asked for, quietly."""
    with pytest.raises(RuntimeError, match="3 values, not 9"):
        drawn(st.integers(0, 2), "few", 9)


# --- In the checks ------------------------------------------------------------------------------


def _found(run: Callable[[Plan], Any], **plan: Any) -> Finding:
    finding: Finding = run(Plan(shrink=True, **plan)).findings[0]
    return finding


def test_a_wrong_tie_is_told_by_a_small_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a failing map of fifty ids, where three would do."""
    right = torch_port.vocabulary.selection._rank
    monkeypatch.setattr(
        torch_port.vocabulary.selection,
        "_rank",
        lambda scores, pins: right(scores[::-1], pins) if not pins.size else right(scores, pins),
    )
    finding = _found(find_check("vocabulary").run, cases=20, configurations=("ties",))
    assert finding.case is not None
    assert finding.case.tensors["counts"].tolist() in ([0, 0], [0, 1], [1, 0])
    assert finding.case.extra["vocabulary"]["size"] == 1


def test_a_batch_that_disagrees_is_made_plain_before_it_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faults: holes, padding and heat left in a case that fails without them."""
    norm = torch_port.models.backbone.RMSNorm
    forward = norm.forward
    monkeypatch.setattr(norm, "forward", lambda self, x: forward(self, x) * (1 + 1e-7))
    monkeypatch.setattr("parity.checks.batches.edges", lambda *asked: iter(()))
    monkeypatch.setattr("parity.shrink.TRIES", 2)  # each shape compiles anew
    # Not the very simplest, which is drawn first and would leave nothing to simplify.
    monkeypatch.setattr(
        "parity.checks.batches.variations",
        lambda family: variations(family).filter(lambda drawn: drawn.heat > 3),
    )
    plan = Plan(shrink=True, cases=3, configurations=("pruned-vanilla",))
    finding = run_batches(plan, ("losses",))["losses"].findings[0]
    assert finding.stage == "hidden"
    assert finding.case is not None
    tensors = finding.case.tensors
    assert tensors["batch/input_ids"].shape[0] == 1
    assert tensors["batch/block_keep_mask"].all()
    assert (tensors["batch/loss_mask"] == 1).all()


def test_what_only_another_check_sees_ends_no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: an edge that fails in its metrics alone ends `--only losses` without a finding."""
    edge = [Measured("metrics", "metric x", 1.0, 0.0), Measured("losses", "loss", 0.0, 0.0)]
    case = [Measured("gradients", "gradient of x", 1.0, 0.0), Measured("losses", "loss", 1.0, 0.0)]
    found = list(edges(BY_NAME["pruned-vanilla"], 0))
    monkeypatch.setattr("parity.checks.batches.edges", lambda *asked: iter(found))
    answers = itertools.chain([edge] * len(found), itertools.repeat(case))
    monkeypatch.setattr("parity.checks.batches.compare_case", lambda *asked: next(answers))
    plan = Plan(first_only=True, cases=3, configurations=("pruned-vanilla",))
    result = run_batches(plan, ("losses",))["losses"]
    assert result.cases == {"pruned-vanilla": len(found) + 1}
    assert [each.stage for each in result.findings] == ["gradient of x"]


def test_drawn_decodings_meet_their_end_of_text() -> None:
    """Fault: texts that never end by themselves, so that what is cut behind an end goes unseen."""
    ended = 0
    for kind in KINDS:
        for number, value in enumerate(drawn(_SETTINGS, f"{kind}/0", 6)):
            case = _make(kind, 0, number, value)
            answer = run_port(case, "float64", port_decoding)
            if answer.error is None:
                new = len(answer.tensors["tokens"]) - len(case.tensors["prompt"])
                ended += new < case.extra["decoding"]["limit"]
    assert ended >= 10
