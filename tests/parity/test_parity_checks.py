"""Both implementations through the same training run, closer than the suite's tolerance."""

import pytest

from parity.checks.training import drawn_run, trajectories
from parity.draw import draw_recipe
from parity.recipes import RECIPES
from parity.sides import run_port, run_spec

BY_NAME = {recipe.name: recipe for recipe in RECIPES}


@pytest.mark.parametrize("name", ["error-no-supervision", "error-nothing-inside"])
def test_both_refuse(name: str) -> None:
    """Fault: other words for a batch without anything to learn from."""
    case = draw_recipe(BY_NAME[name], 5)
    for run in (run_port, run_spec):
        error = run(case, "float64").error
        assert error is not None
        assert BY_NAME[name].error in error


@pytest.mark.parametrize("name", ["pruned-vanilla", "dpace-both"])
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
