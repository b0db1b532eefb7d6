"""Two optimizer steps of a run on a virtual device: the real model, objective, optimizer and step.

rehearse(run, device="npu", world_size=1, hbm_bytes=64 * 2**30, observers=[...]) -> Rehearsal
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch_port.rehearsal.trace import Finding, Observer
from torch_port.run import RunConfig

MARGIN = 0.08  # of a card's memory that is left to kernels' workspace and to fragmentation


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found. `memory` is None until it is measured."""

    device: str
    world_size: int
    hbm_bytes: int
    seconds: float
    memory: Any = None
    findings: list[Finding] = field(default_factory=list)


def rehearse(
    run: RunConfig,
    *,
    device: str = "npu",
    world_size: int = 1,
    hbm_bytes: int = 64 * 2**30,
    observers: Sequence[Observer] = (),
) -> Rehearsal:
    """Rehearse two optimizer steps; `observers` look at every operator of both."""
    raise NotImplementedError
