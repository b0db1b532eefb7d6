"""Which functions serve a draft: one entry per algorithm, so that one step and loop train them all.

A draft class says its `algorithm`; what stands behind the name is here, because the models know
nothing of objectives. The functions of every family are called alike:

    prepare(draft, batch, target) -> prepared
        what must be known before the step's denominators are; for most the batch itself
    denominators(draft, prepared, objective) -> Tensor
        what a batch adds to the step's denominators, all in one vector; no forward pass
    reduce(draft, local) -> sums
        the vector summed over the ranks; `den` and `ce_den` of it are what `check` is asked about.
        Ranks must agree on number and order of collectives: they follow from the config alone
    check(den, ce_den, objective)
        raises §8's two errors on the step's sums, on the host
    forward(draft, prepared, target, objective, sums=None, ranks=1) -> outcome
        with `loss` (None without sums), `metrics`, and `numerators` for `whole_loss`
    whole_loss(draft, numerators, local, objective) -> Tensor
        the loss of several batches taken as one on this process, from their outcomes' numerators
        and the sum of their denominators; raises what `check` raises
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torch_port.config import DFlashObjectiveConfig, ObjectiveConfig, Settings
from torch_port.config_eagle3 import Eagle3Objective
from torch_port.data.batch import Batch
from torch_port.errors import UserError
from torch_port.models.block_draft import FrozenTarget
from torch_port.models.dflash import DFlashDraft
from torch_port.models.dspark import DSparkDraft
from torch_port.models.eagle3 import Eagle3Draft
from torch_port.objective import dflash, eagle3, evaluate
from torch_port.objective.loss import check_denominators, reduce_denominators


@dataclass(frozen=True)
class Family:
    """A draft class, its objective's settings, and the functions that train it."""

    draft: type[nn.Module]
    objective: type[Settings]
    prepare: Callable[..., Any]
    denominators: Callable[..., Tensor]
    reduce: Callable[..., Any]
    check: Callable[..., None]
    forward: Callable[..., Any]
    whole_loss: Callable[..., Tensor]


def _as_it_is(draft: nn.Module, batch: Batch, target: FrozenTarget) -> Batch:
    return batch


FAMILIES: dict[str, Family] = {
    "dspark": Family(
        draft=DSparkDraft,
        objective=ObjectiveConfig,
        prepare=_as_it_is,
        denominators=evaluate.batch_denominators,
        reduce=lambda draft, local: reduce_denominators(local, draft.prunes_vocabulary),
        check=check_denominators,
        forward=evaluate.forward_batch,
        whole_loss=evaluate.whole_loss,
    ),
    "dflash": Family(
        draft=DFlashDraft,
        objective=DFlashObjectiveConfig,
        prepare=_as_it_is,
        denominators=dflash.batch_denominators,
        reduce=dflash.reduce_denominators,
        check=dflash.check_denominators,
        forward=dflash.forward_batch,
        whole_loss=dflash.whole_loss,
    ),
    "eagle3": Family(
        draft=Eagle3Draft,
        objective=Eagle3Objective,
        prepare=eagle3.prepare_eagle3,
        denominators=eagle3.eagle3_denominators,
        reduce=eagle3.reduce_eagle3_denominators,
        check=eagle3.check_eagle3_denominators,
        forward=eagle3.forward_eagle3,
        whole_loss=eagle3.whole_eagle3_loss,
    ),
}


def family_of(draft: nn.Module, objective: Settings) -> Family:
    """Return what trains a draft.

    Raises UserError when the objective is another family's: its numbers would be read as others.
    """
    algorithm = getattr(draft, "algorithm", "")
    family = FAMILIES.get(algorithm)
    if family is None:
        raise UserError(
            f"{type(draft).__name__} names no algorithm that can be trained here; "
            f"{', '.join(FAMILIES)} can"
        )
    if not isinstance(objective, family.objective):
        raise UserError(
            f"a {algorithm} draft is trained with {family.objective.__name__}, not "
            f"{type(objective).__name__}"
        )
    return family
