"""What conventions do to the numbers: the sheet's give the vectors' answers, others theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from parity.cases import Case, list_cases, read_case
from parity.compare import TOLERANCE, relative_error
from parity.conventions import SHEET, Conventions, family, recompute
from parity.plain_draft import draft_outputs

ROOT = Path(__file__).resolve().parents[2]
VECTORS = ROOT / "tests" / "vectors"


def vector(name: str) -> Case:
    return read_case(VECTORS / name)


def batches(directories: list[Path]) -> list[Case]:
    cases = [read_case(path) for directory in directories for path in list_cases(directory)]
    odd = {"decoding", "optimizer", "eagle3"}
    return [case for case in cases if not odd & set(case.extra) and "loss" in case.expect]


def test_under_the_sheets_conventions_the_vectors_come_out(
    vectors_directories: list[Path],
) -> None:
    """Fault: formulas that are not the sheet's, so that a convention would explain any number."""
    cases = batches(vectors_directories)
    assert {family(case) for case in cases} == {"dspark", "dflash"}
    for case in cases:
        expected = case.group("expect")
        mask = expected["eval_mask"].astype(bool)
        said = draft_outputs(case, "sheet", "sheet")
        for name, value in said.items():
            error = relative_error(value[mask], expected[name][mask])
            assert error < TOLERANCE["float64"], (case.name, name)
        numbers = recompute(case, SHEET, said["draft_logits"], said.get("confidence_logits"))
        assert np.array_equal(numbers.eval_mask, mask)
        got = {"loss": numbers.loss, "accept": numbers.accept_probability[mask]}
        wanted = {"loss": case.expect["loss"], "accept": expected["accept_probability"][mask]}
        for name, (numerator, denominator) in case.expect["metrics"].items():
            got |= dict(zip((name, f"{name}/"), numbers.metrics[name], strict=True))
            wanted |= {name: numerator, f"{name}/": denominator}
        for name, value in wanted.items():
            assert relative_error(got[name], value) < TOLERANCE["float64"], (case.name, name)


def worked_example() -> tuple[Case, np.ndarray]:
    """docs/spec.md's block of three slots, six target ids, three kept; U is the identity."""
    teacher = [[0, -1, 2, 0.5, 0, 1], [1, 0, 0, -1, 2, 0], [0, 1, 1.5, 0, -0.5, 1], [0.0] * 6]
    tensors = {
        "weights/t2d": np.isin(np.arange(6), [0, 2, 5]),
        "target/lm_head.weight": np.eye(6),
        "batch/input_ids": np.array([[0, 2, 4, 5]]),
        "batch/loss_mask": np.ones((1, 4)),
        "batch/target_last_hidden_states": np.array([teacher]),
        "batch/anchor_positions": np.zeros((1, 1), int),
        "batch/block_keep_mask": np.ones((1, 1), bool),
    }
    config = {"vocab_size": 6, "block_size": 3, "dflash_config": {"projector_type": "dspark"}}
    objective = {"ce_alpha": 0.1, "l1_alpha": 0.9, "confidence_alpha": 0, "loss_decay_gamma": 2.0}
    logits = np.array([[[[0.0, 1.0, -1.0], [2.0, 0.0, 1.0], [0.5, 0.5, 1.5]]]])
    return Case("worked", Path(), config, objective, {}, tensors, {}), logits


@pytest.mark.parametrize(
    ("conventions", "metric", "value"),
    [
        ({}, "ce_loss", 0.4462902),
        ({"pruned_labels": "counted"}, "ce_loss", 0.3091917),
        ({"denominator": "slots"}, "ce_loss", 0.3052356),
        ({"decay_from": "slot 1"}, "ce_loss", 0.4619109),
        ({"label": "teacher"}, "ce_loss", 0.6207303),
        ({}, "l1_loss", 0.3562948),
        ({"l1": "half"}, "l1_loss", 0.1781474),
        ({"layout": "bonus-anchor"}, "ce_loss", 2.4076060),
        ({"layout": "bonus-anchor"}, "tau_probabilistic", 1.4769949),
        ({}, "tau_probabilistic", 2.0453460),
    ],
)
def test_conventions_give_the_numbers_of_the_documents_table(
    conventions: dict[str, Any], metric: str, value: float
) -> None:
    """Fault: a convention that is not what its name says. Numbers of docs/spec.md, 7 digits."""
    case, logits = worked_example()
    a, b = recompute(case, Conventions(**conventions), logits, None).metrics[metric]
    # Where pruned labels are left out of a denominator that counts slots, two of three are.
    assert float(a / b) == pytest.approx(value, abs=6e-8)


def test_renormalised_acceptance_and_one_denominator_of_the_documents_table() -> None:
    """Faults: the conditional teacher for acceptance in name only; a loss that ignores the rest."""
    case, logits = worked_example()
    true = recompute(case, SHEET, logits, None)
    other = recompute(case, Conventions(acceptance="renormalised"), logits, None)
    one = recompute(case, Conventions(pruned_labels="counted"), logits, None)
    assert true.accept_probability.mean() == pytest.approx(0.5143171, abs=6e-8)
    assert other.accept_probability.mean() == pytest.approx(0.7962611, abs=6e-8)
    assert (true.loss, one.loss) == pytest.approx((0.3652943, 0.3515845), abs=6e-8)
