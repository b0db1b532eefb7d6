"""Both implementations on cases drawn at random, and through the same training run."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parity.cases import Case
from parity.checks.losses import cross_check
from parity.checks.training import drawn_run, trajectories
from parity.compare import TOLERANCE
from parity.draw import draw_recipe
from parity.recipes import RECIPES, B, N, S

BY_NAME = {recipe.name: recipe for recipe in RECIPES}
# One compilation each; contents, masks and anchors are fresh in every example.
CONFIGS = ("pruned-vanilla", "pruned-no-markov", "full-vanilla")
DFLASH = ("dflash-pruned", "dflash-full-nodecay", "dpace-both")


def random_case(name: str, seed: int, density: float) -> Case:
    case = draw_recipe(BY_NAME[name], seed)
    random = np.random.default_rng(seed)
    tensors = dict(case.tensors)
    tensors["batch/loss_mask"] = (random.random((B, S)) < density).astype(np.float32)
    tensors["batch/anchor_positions"] = random.integers(0, S - 1, (B, N))
    tensors["batch/block_keep_mask"] = random.random((B, N)) < 0.8
    return replace(case, tensors=tensors)


def weighed(case: Case, alphas: tuple[float, float, float]) -> Case:
    ce, l1, confidence = alphas
    objective = case.objective | {
        "ce_alpha": ce,
        "l1_alpha": l1,
        "confidence_alpha": confidence,
    }
    return replace(case, objective=objective)


@settings(max_examples=40)
@given(
    name=st.sampled_from(CONFIGS),
    seed=st.integers(0, 10_000),
    density=st.sampled_from([0.3, 0.7, 1.0]),
    alphas=st.sampled_from([(0.1, 0.9, 1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.5)]),
)
def test_losses_metrics_and_gradients(
    name: str, seed: int, density: float, alphas: tuple[float, float, float]
) -> None:
    """Fault: anything on which the two read the sheet differently where no vector looks.

    A case that one side alone refuses is a disagreement (a port that refused every batch with few
    kept labels went unseen before).

    float64: two right programs agree to about 1e-14; TOLERANCE has its reason beside it. Draft and
    teacher are unrelated random numbers, so the kink of the L1 is never near.
    """
    result = cross_check(weighed(random_case(name, seed, density), alphas), "float64")
    assert result.passes(TOLERANCE["float64"]), (result.problem, result.worst_named())


@settings(max_examples=30)
@given(
    name=st.sampled_from(DFLASH),
    seed=st.integers(0, 10_000),
    density=st.sampled_from([0.05, 0.3, 0.7, 1.0]),
)
def test_dflash_losses_metrics_and_gradients(name: str, seed: int, density: float) -> None:
    """Fault: as above, of §12. At a density of 0.05 most batches are ones to refuse.

    D-PACE divides by B, which is never 0: a port that trained on nothing there went unseen.
    """
    result = cross_check(random_case(name, seed, density), "float64")
    assert result.passes(TOLERANCE["float64"]), (result.problem, result.worst_named())


@pytest.mark.parametrize("name", ["error-no-supervision", "error-nothing-inside"])
def test_both_refuse(name: str) -> None:
    from parity.sides import run_port, run_spec

    case = draw_recipe(BY_NAME[name], 5)
    for run in (run_port, run_spec):
        error = run(case, "float64").error
        assert error is not None
        assert BY_NAME[name].error in error


@pytest.mark.parametrize("name", ["pruned-vanilla", "dflash-pruned", "dpace-both", "eagle3-pruned"])
def test_twelve_adamw_steps_follow_each_other(name: str) -> None:
    """Faults: schedule off by a step, decay on norms, clip with 1e-6, moments swapped; D-PACE's
    weights of the first step kept for all; a head or embedding trained on one side alone.

    Step 11 comes after step 2 only when batches are ordered as numbers. The bound is closer than
    the one for cases of any kind: these runs agree to 6e-15, and a bias of 1e-12 is no rounding.
    """
    case = drawn_run(name, 0, 12)
    steps = trajectories(case, "float64")
    assert [step.step for step in steps] == list(range(1, 13))
    assert steps[-1].loss_port != steps[0].loss_port
    assert max(step.loss_error for step in steps) <= 1e-12
    assert max(step.worst_error for step in steps) <= 1e-12
    assert max(step.moment_error for step in steps) <= 1e-12
