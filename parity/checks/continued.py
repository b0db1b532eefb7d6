"""A training run that changes framework in the middle, after steps that the spike guard skipped.

Steps and updates differ then: a checkpoint that takes one for the other goes on with another bias
correction, and one whose guard forgets skips other steps.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

from parity.cases import Case
from parity.checks.base import Measured
from parity.checks.training import drawn_run, step_batches
from parity.compare import relative_error
from parity.names import to_torch
from parity.sides import (
    port_batch,
    port_draft,
    port_objective,
    setup_jax,
    spec_batch,
    spec_draft,
)
from parity.tolerances import EXACT, TRAINING

STATE_RUN = "a run with skipped steps"
CALM = {"peak_rate": 1e-4, "final_rate": 0.0, "max_grad_norm": 12.0}  # norms do not just fall
TURN, END = 8, 12  # the steps after which the run changes framework, and ends
_TARGET = {"model_type": "qwen3"}


def state_case(seed: int) -> Case:
    """Draw the run, with a guard that skips one of its first steps at least.

    Its multiple lies below the largest norm's, as a run without a guard shows it.
    """
    free = drawn_run("pruned-vanilla", seed, END, **CALM, spike_multiple=math.inf)
    port = _Port(free)
    norms = [port.step(step).gradient_norm for step in range(1, TURN + 1)]
    means = [math.exp(sum(map(math.log, norms[:n])) / n) for n in range(1, TURN)]
    highest = max(norm / mean for norm, mean in zip(norms[1:], means, strict=True))
    multiple = 1 + 0.5 * (highest - 1) if highest > 1.01 else 1.005
    return drawn_run("pruned-vanilla", seed, END, **CALM, spike_multiple=multiple)


def compare_continued(case: Case, name: str) -> list[Measured]:
    """Train in torch, save, convert to orbax, go on in JAX: beside a torch run that goes on.

    And beside one that the port itself resumes from its checkpoint, bit for bit.
    """
    setup_jax()
    port = _Port(case)
    for step in range(1, TURN + 1):
        port.step(step)
    with tempfile.TemporaryDirectory(prefix="parity-") as temporary:
        state = port.into_spec(Path(temporary))
        resumed = port.resumed(Path(temporary))
    measured = [Measured(name, "steps taken over", float(abs(int(state.step) - TURN)), EXACT)]
    from jaxdraft import training

    batches = step_batches(case)
    for step in range(TURN + 1, END + 1):
        port.step(step)
        state, _ = training.train_step(state, spec_batch(batches[step - 1], "float64"))
        wanted, found = port.parameters(), to_torch(state.params)
        worst = max((relative_error(found[n], wanted[n]), n) for n in wanted)
        stage = f"step {step}, continued: parameter {worst[1]}"
        measured.append(Measured(name, stage, worst[0], TRAINING["parameters"]))
        resumed.step(step)
        own = resumed.parameters()
        worst = max((relative_error(own[n], wanted[n]), n) for n in wanted)
        stage = f"step {step}, resumed by the port: parameter {worst[1]}"
        measured.append(Measured(name, stage, worst[0], EXACT))
    return measured


class _Port:
    """The port's run, in float64."""

    def __init__(self, case: Case) -> None:
        from torch_port.training.optimizer import MasterAdamW, OptimizerConfig

        self.case = case
        self.draft, self.target = port_draft(case, "float64")
        self.objective = port_objective(case, self.draft)
        numbers = dict(case.extra["optimizer"])
        betas = (numbers.pop("beta1"), numbers.pop("beta2"))
        config = OptimizerConfig(betas=betas, **numbers)
        self.optimizer = MasterAdamW(self.draft.named_parameters(), config)

    def step(self, step: int) -> Any:
        """Take a step; return its report."""
        from torch_port.training.step import training_step

        batch = port_batch(step_batches(self.case)[step - 1], "float64")
        return training_step(self.draft, self.optimizer, [batch], self.target, self.objective, step)

    def parameters(self) -> dict[str, Any]:
        return {name: p.detach().numpy() for name, p in self.draft.named_parameters()}

    def into_spec(self, place: Path) -> Any:
        """Save the run, convert it, and restore it as the specification's state."""
        from jaxdraft.checkpoint import restore
        from jaxdraft.config import ObjectiveConfig
        from jaxdraft.training import OptimizerConfig
        from parity.convert import convert
        from torch_port.training.state import RunFacts, save_training

        facts = RunFacts("dspark", self.objective, self.target, _TARGET)
        save_training(place / "port", self.draft, self.optimizer, TURN, facts)
        convert(place / "port", place / "orbax", "orbax")
        config, _, target, _ = spec_draft(self.case, "float64")
        numbers = dict(self.case.extra["optimizer"])
        numbers["epsilon"] = numbers.pop("eps")
        settings = config, ObjectiveConfig(**self.case.objective), OptimizerConfig(**numbers)
        return restore(place / "orbax", *settings, target, _TARGET, "float64")

    def resumed(self, place: Path) -> _Port:
        """Save the run as training does, and return another one that resumes it."""
        import torch

        from torch_port.run_sections import CheckpointsSection
        from torch_port.training.checkpoints import CheckpointManager
        from torch_port.training.distribution import Ranks
        from torch_port.training.state import RunFacts

        facts = RunFacts("dspark", self.objective, self.target, _TARGET)
        section = CheckpointsSection(asynchronous=False)
        alone = Ranks(0, 1, 0, torch.device("cpu"), "single", None)
        checkpoints = CheckpointManager(place / "checkpoints", section, alone)
        checkpoints.save(TURN, self.draft, self.optimizer, facts)
        other, newest = _Port(self.case), checkpoints.newest()
        assert newest is not None
        checkpoints.load(newest, other.draft, other.optimizer, facts)
        return other
