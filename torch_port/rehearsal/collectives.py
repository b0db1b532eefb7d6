"""The collectives of a rehearsed step, in their order: name, group, dtype, bytes, phase and line.

Every rank must issue the same ones in the same order, so they may depend on the run's settings
alone. They come from two places: the objective's denominators, and what shares gradients and
parameters (`torch_port/training/`, or torch's own FSDP2). One from anywhere else is a finding.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from torch_port.rehearsal.operators import COMMUNICATION, Findings, in_step, short, tensors_of
from torch_port.rehearsal.trace import ACCUMULATION, Finding, OperatorCall

# Where a step's collectives are written; FSDP2's come from its hooks, wherever a layer is called.
DOCUMENTED = (
    "torch_port/objective/loss.py",
    "torch_port/objective/dflash.py",
    "torch_port/objective/eagle3.py",
    "torch_port/training/",
    ACCUMULATION,
)
_SHARDING = os.path.join("torch", "distributed", "fsdp")
# HCCL refuses bools at times and has no float64.
_UNSENT = (torch.bool, torch.float64)
_WAITS = {"_c10d_functional::wait_tensor", "c10d::monitored_barrier_"}


@dataclass(frozen=True)
class Collective:
    """One collective: `bytes` are those of the larger side, input or output, on this rank."""

    phase: str
    name: str
    group: str
    dtype: str
    bytes: int
    where: str


@dataclass(frozen=True)
class CollectiveRow:
    """Like collectives of a phase, together."""

    phase: str
    name: str
    group: str
    dtype: str
    count: int
    bytes: int
    where: str


class Collectives:
    """Notes every collective in its order."""

    def __init__(self) -> None:
        self.all: list[Collective] = []
        self._findings = Findings()

    def before(self, call: OperatorCall) -> None:
        """Note a collective: its tensors are known before it runs."""
        base = call.name.rsplit(".", 1)[0]
        if call.func.namespace not in COMMUNICATION or base in _WAITS:
            return
        tensors = tensors_of(call.args, call.kwargs)
        self.all.append(
            Collective(
                call.phase,
                collective_name(base),
                _group(call),
                ", ".join(dict.fromkeys(str(x.dtype).removeprefix("torch.") for x in tensors)),
                max((_bytes(value) for value in call.args), default=0),
                call.where,
            )
        )
        if in_step(call):
            self._judge(call, {x.dtype for x in tensors})

    def after(self, call: OperatorCall) -> None:
        """Nothing more is known afterwards."""

    def finding(self) -> list[Finding]:
        """Return collectives from undocumented places, and those of dtypes that HCCL lacks."""
        return self._findings.list()

    def of_last_step(self) -> list[Collective]:
        """Return the last step's collectives in their order."""
        steps = [c.phase.split(":")[0] for c in self.all if c.phase.startswith("step")]
        return [c for c in self.all if steps and c.phase.split(":")[0] == max(steps)]

    def _judge(self, call: OperatorCall, dtypes: set[torch.dtype]) -> None:
        if not call.where.startswith(DOCUMENTED) and not _of_torch():
            self._findings.add(
                "extra collective",
                call,
                f"{short(call.name)} in the {call.phase.split(': ')[-1]}: no step of this project "
                "sends here, and ranks that do not all come by hang; reduce once per step, with "
                "the denominators or the gradients",
            )
        for dtype in sorted(dtypes & set(_UNSENT), key=str):
            self._findings.add(
                "collective dtype",
                call,
                f"{short(call.name)} of {str(dtype).removeprefix('torch.')}, which HCCL refuses; "
                "send float32, or int32 for flags",
            )


def collective_name(base: str) -> str:
    """Return a collective's plain name.

    >>> collective_name("c10d::allreduce_"), collective_name("c10d::_allgather_base_")
    ('allreduce', 'allgather_base')
    """
    return base.split("::")[1].strip("_")


def rows(collectives: list[Collective]) -> list[CollectiveRow]:
    """Put like collectives of a phase and line together, in the order of the first of each."""
    counted: Counter[tuple[str, str, str, str, str]] = Counter()
    total: Counter[tuple[str, str, str, str, str]] = Counter()
    for c in collectives:
        key = (c.phase.split(": ")[-1], c.name, c.group, c.dtype, c.where)
        counted[key] += 1
        total[key] += c.bytes
    return [
        CollectiveRow(phase, name, group, dtype, number, total[key], where)
        for key, number in counted.items()
        for phase, name, group, dtype, where in (key,)
    ]


def _of_torch() -> bool:
    """Return whether FSDP2 is sending: a frame of its own stands on the stack."""
    frame = sys._getframe(1)
    while frame is not None:
        if _SHARDING in frame.f_code.co_filename:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _bytes(value: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors_of(value))


def _group(call: OperatorCall) -> str:
    """Return a group's name and size: c10d carries the group, functional collectives its name."""
    for value in call.args:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            group = dist.ProcessGroup.unbox(value)
            return f"{group.group_name} ({group.size()})"
    names = [value for value in call.args if isinstance(value, str)]
    return names[-1] if names else ""
