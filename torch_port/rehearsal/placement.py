"""Where tensors are in a rehearsed step: what is left on the host, moved to it, or waited for.

Inside a step everything is on the device: the batch came there before, and the four numbers of the
host checks leave together, by the one documented sync of `training_step`.
"""

from __future__ import annotations

import ast
import inspect
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from torch_port.drawing.text import size
from torch_port.rehearsal.operators import COMMUNICATION, Findings, in_step, short, tensors_of
from torch_port.rehearsal.trace import ROOT, Finding, OperatorCall
from torch_port.training.step import training_step

_ONCE = ("host tensor", "upload", "sync")  # what a first step may do for all later ones
_CONSTANT = "aten::lift_fresh.default"  # torch.tensor's: the copy to the device follows
_COPIES = ("aten::_to_copy.default", "aten::copy_.default")
# Their answer is a Python number, or they compare values to give one.
_SYNCS = {
    "aten::_local_scalar_dense.default": "the host asks for a value",
    "aten::item.default": "the host asks for a value",
    "aten::equal.default": "the host asks whether two tensors are equal",
    "aten::is_nonzero.default": "the host asks for a truth value",
    "aten::allclose.default": "the host asks whether two tensors are close",
}


class Placement:
    """Finds host tensors, copies and syncs inside the steps."""

    def __init__(self, device: str = "npu") -> None:
        self.device = device
        self._findings = Findings()
        self._steps: set[str] = set()

    def before(self, call: OperatorCall) -> None:
        """Look at where the arguments are, before a mix of places stops the operator."""
        if not in_step(call) or call.func.namespace in COMMUNICATION or self.device == "cpu":
            return
        self._steps.add(call.phase.split(":")[0])
        inputs = tensors_of(call.args, call.kwargs)
        host = [x for x in inputs if x.device.type == "cpu"]
        device = [x for x in inputs if x.device.type == self.device]
        if call.name in _SYNCS:
            if device:
                self._sync(call, _SYNCS[call.name])
        elif call.name in _COPIES:
            self._copy(call, host, device)
        elif host and device:
            self._mixed(call, host)
        elif call.name != _CONSTANT and any(x.dim() for x in host):
            self._host_work(call, host)

    def after(self, call: OperatorCall) -> None:
        """Look at a host tensor that an operator without inputs makes."""
        if self.device == "cpu" or not in_step(call) or tensors_of(call.args, call.kwargs):
            return
        made = [x for x in tensors_of(call.result) if x.device.type == "cpu" and x.dim()]
        if made:
            self._host_work(call, made)

    def finding(self) -> list[Finding]:
        """Return what is not where it should be.

        What the first step alone does, such as a table that is kept for later ones, is noted and
        not wrong. Of the documented sync the transfers are counted, not the numbers in them.
        """
        return [self._weighed(finding) for finding in self._findings.list()]

    def _weighed(self, finding: Finding) -> Finding:
        steps = self._findings.steps(finding)
        if finding.kind == "sync" and not finding.wrong:
            return replace(finding, count=len(steps))
        if finding.kind in _ONCE and len(self._steps) > 1 and set(steps) == {"step 1"}:
            text = f"{finding.text.split(';')[0]}; first step alone"
            return replace(finding, text=text, wrong=False)
        return finding

    def _sync(self, call: OperatorCall, reason: str) -> None:
        if call.where in documented_syncs():
            text = (
                "the one sync of a step, after backward: the numbers of its host checks; documented"
            )
            self._findings.add("sync", call, text, wrong=False)
            return
        self._findings.add(
            "sync",
            call,
            f"{short(call.name)}: {reason}, so it waits for all work of the device; keep the value "
            "on the device, or let it cross with the step's own four numbers",
        )

    def _copy(self, call: OperatorCall, host: list[Tensor], device: list[Tensor]) -> None:
        """A copy: to the host it is a sync; from it, an upload that the step waits for."""
        source = call.args[1] if call.name.startswith("aten::copy_") else call.args[0]
        to = call.kwargs.get("device")
        lands = call.args[0].device if call.name.startswith("aten::copy_") else to
        lands = source.device if lands is None else torch.device(lands)
        came, went = source.device.type, lands.type
        if came == self.device and went == "cpu":
            self._sync(call, f"{_told(source)} goes to the host")
        elif came == "cpu" and went == self.device:
            nbytes = source.numel() * source.element_size()
            self._findings.add(
                "upload",
                call,
                f"{_told(source)} is copied from the host inside the step ({size(nbytes)}), and "
                "the host waits for the device; move it with the batch, or keep it on the device",
            )
        elif came == went == "cpu" and source.dim():
            self._host_work(call, [source])

    def _mixed(self, call: OperatorCall, host: list[Tensor]) -> None:
        shaped = [x for x in host if x.dim()]
        if shaped:
            self._findings.add(
                "host tensor",
                call,
                f"{short(call.name)} takes {_told(shaped[0])} on the host beside tensors on the "
                "device, which refuses that; move it with the batch, or make it on the device",
            )
        else:
            self._findings.add(
                "host scalar",
                call,
                f"{short(call.name)} takes {_told(host[0])} of no dimension on the host: the "
                "device is handed its value",
                wrong=False,
            )

    def _host_work(self, call: OperatorCall, host: list[Tensor]) -> None:
        self._findings.add(
            "host tensor",
            call,
            f"{short(call.name)} works on {_told(host[0])} on the host inside the step, while the "
            "device waits; prepare it with the batch, or make it on the device",
        )


def _told(x: Tensor) -> str:
    return f"a {str(x.dtype).removeprefix('torch.')} tensor {list(x.shape)}"


@cache
def documented_syncs() -> frozenset[str]:
    """Return the lines, as `file:line`, of `training_step`'s `.tolist()`: its only sync."""
    file = inspect.getsourcefile(training_step)
    assert file is not None
    lines, start = inspect.getsourcelines(training_step)
    name = Path(file).relative_to(ROOT).as_posix()
    found: set[str] = set()
    for node in ast.walk(ast.parse("".join(lines))):
        if isinstance(node, ast.Attribute) and node.attr == "tolist":
            last = node.end_lineno or node.lineno
            found |= {f"{name}:{start + line - 1}" for line in range(node.lineno, last + 1)}
    return frozenset(found)
