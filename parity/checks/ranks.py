"""A step of two pretended ranks with one batch is the step of one rank (sheet §8).

No process group is needed: while the port takes its step, `torch.distributed` says that there are
two ranks, and its all-reduce doubles what it is given. With the same batch on both, denominators,
loss, gradients and weights must come out as those of one rank; and the collectives are counted.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

from parity.cases import Case
from parity.checks.base import Measured
from parity.compare import relative_error
from parity.configurations import BY_NAME
from parity.draw import draw_recipe
from parity.recipes import OPTIMIZER
from parity.sides import port_batch, port_draft, port_objective
from parity.tolerances import EXACT

NAME = "training"
RANKS_RUN = "two ranks"
# All-reduces of a step beside the gradients': one scalar, and one more in a pruned run.
COLLECTIVES = {"pruned-vanilla": 2, "full-vanilla": 1}
# Doubling and halving are exact; a sum in another order is not, and there is none.
_ROUNDING = 1e-12


def compare_ranks(seed: int) -> list[Measured]:
    """Take one step as one rank and as one of two, pruned and not; compare all that comes out."""
    measured = []
    for name, expected in COLLECTIVES.items():
        case = draw_recipe(BY_NAME[name].recipe, 1000 * seed + 3)
        one, two = _step(case, 1), _step(case, 2)
        assert not one.pop("collectives")
        # The gradients travel in one bucket, as long as all of them together.
        lengths = two.pop("collectives")
        gradients = sum(x.size for name, x in one.items() if name.startswith("trained"))
        beside = len(lengths) - lengths.count(gradients)
        stage = f"{name}: {beside} collectives beside the gradients', not {expected}"
        measured.append(Measured(NAME, stage, 0.0 if beside == expected else float("inf"), EXACT))
        for what, value in one.items():
            error = relative_error(two[what], value)
            measured.append(Measured(NAME, f"{name}, two ranks: {what}", error, _ROUNDING))
    return measured


def _step(case: Case, ranks: int) -> dict[str, Any]:
    from torch_port.training.optimizer import MasterAdamW, OptimizerConfig
    from torch_port.training.step import training_step

    numbers: dict[str, Any] = {n: v for n, v in OPTIMIZER.items() if n not in ("beta1", "beta2")}
    draft, target = port_draft(case, "float64")
    config = OptimizerConfig(betas=(0.9, 0.95), total_steps=4, **numbers)
    optimizer = MasterAdamW(draft.named_parameters(), config)
    calls: list[int] = []

    def all_reduce(tensor: Any, *_: Any, **__: Any) -> None:
        calls.append(tensor.numel())
        tensor.mul_(ranks)

    pretended = mock.patch.multiple(
        "torch.distributed",
        is_available=lambda: True,
        is_initialized=lambda: ranks > 1,
        get_world_size=lambda *_: ranks,
        all_reduce=all_reduce,
    )
    with pretended:
        batch = port_batch(case.group("batch"), "float64")
        report = training_step(draft, optimizer, [batch], target, port_objective(case, draft), 1)
    found: dict[str, Any] = {"loss": report.loss, "gradient norm": report.gradient_norm}
    found |= {f"trained {n}": p.detach().numpy() for n, p in draft.named_parameters()}
    return found | {"collectives": calls}
