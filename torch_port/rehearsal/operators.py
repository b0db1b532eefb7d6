"""Every operator of a rehearsed step, against those that torch_npu registers for the NPU.

The list, `aten_ops_torch_npu_2.13.txt`, holds one aten operator a line, `name` or `name.overload`,
as torch_npu 2.13 registers them. An operator is

- "native": it is on the list, or torch_npu's own;
- "by .out overload": its functional or in-place form is not, another overload of the same name is,
  which torch's structured form calls;
- "decomposed": torch has a kernel for every device, made of other operators;
- "CPU fallback": none of these. torch_npu copies its tensors to the host, computes there and copies
  the result back.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import torch
from torch import Tensor

from torch_port.rehearsal.trace import Finding, OperatorCall

Kind = Literal["native", "by .out overload", "decomposed", "CPU fallback"]

LIST = "aten_ops_torch_npu_2.13.txt"
COMMUNICATION = {"c10d", "_c10d_functional", "_c10d_functional_autograd"}

_VALUE_DEPENDENT = {
    "aten::nonzero": "its length is the number of elements that are not zero",
    "aten::nonzero_numpy": "its length is the number of elements that are not zero",
    "aten::argwhere": "its length is the number of elements that are not zero",
    "aten::masked_select": "its length is the number of True in the mask",
    "aten::_unique": "its length is the number of distinct values",
    "aten::_unique2": "its length is the number of distinct values",
    "aten::unique_dim": "its length is the number of distinct values",
    "aten::unique_consecutive": "its length is the number of distinct values",
}
# These share a dispatch key with torch's structured operators, but are made of others; so are all
# whose names end in _copy or _scatter.
_WRITTEN_OUT = {
    *("as_strided_", "bernoulli", "copy", "diag_embed", "linalg_pinv", "new_empty_strided"),
    *("pixel_shuffle", "pixel_unshuffle", "select_backward", "_trilinear"),
}
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
_SCATTERS = ("scatter_add", "scatter_reduce", "index_put", "_index_put_impl", "index_add")


@cache
def listed_operators() -> frozenset[str]:
    """Return the list's operators, as `name` or `name.overload`.

    >>> "mm" in listed_operators(), "argmax" in listed_operators()
    (True, False)
    """
    text = (files("torch_port.rehearsal") / LIST).read_text(encoding="utf-8")
    return frozenset(line for line in text.split("\n") if line and not line.startswith("#"))


@cache
def _listed_names() -> frozenset[str]:
    return frozenset(operator.split(".")[0] for operator in listed_operators())


@cache
def classify(name: str) -> Kind:
    """Return what becomes of an operator on the NPU; `name` as in "aten::sum.dim_IntList".

    >>> classify("aten::mm"), classify("aten::argmax"), classify("aten::zeros_like")
    ('native', 'by .out overload', 'decomposed')
    >>> classify("aten::special_bessel_j0")
    'CPU fallback'
    """
    name = name.removesuffix(".default")
    namespace, operator = name.split("::")
    if namespace == "npu" or (namespace == "aten" and operator in listed_operators()):
        return "native"
    # An in-place form shares its .out with the functional one.
    relative = operator.split(".")[0].removesuffix("_") in _listed_names() and namespace == "aten"
    if _has_kernel(name, "CompositeExplicitAutogradNonFunctional"):
        base = operator.split(".")[0]
        if base.endswith(("_copy", "_scatter")) or base in _WRITTEN_OUT:
            return "decomposed"
        return "by .out overload" if relative else "CPU fallback"  # a structured one: its .out
    keys = ("CompositeImplicitAutograd", "CompositeExplicitAutograd")
    if any(_has_kernel(name, key) for key in keys):
        return "decomposed"
    if namespace != "aten" and _has_kernel(name, "PrivateUse1"):
        return "decomposed"  # FSDP2's own, made of aten operators for such devices
    return "by .out overload" if relative else "CPU fallback"


def _has_kernel(name: str, key: str) -> bool:
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


@dataclass
class OperatorCount:
    """How often an operator ran in one step, on which dtypes, and the first line that asked."""

    name: str
    kind: Kind
    where: str
    count: int = 0
    dtypes: set[str] = field(default_factory=set)


class Findings:
    """Findings, one per kind, operator and line, with the number of calls and their steps."""

    def __init__(self) -> None:
        self._texts: dict[tuple[str, str, str, bool], str] = {}
        self._steps: dict[tuple[str, str, str, bool], Counter[str]] = {}

    def add(self, kind: str, call: OperatorCall, text: str, wrong: bool = True) -> None:
        """Note a call."""
        key = (kind, call.name, call.where, wrong)
        self._texts.setdefault(key, text)
        self._steps.setdefault(key, Counter())[call.phase.split(":")[0]] += 1

    def list(self) -> list[Finding]:
        """Return them in the order in which they were first met."""
        return [
            Finding(*key[:3], text, self._steps[key].total(), key[3])
            for key, text in self._texts.items()
        ]

    def steps(self, finding: Finding) -> Counter[str]:
        """Return how often a finding was met in each step ("step 1"), and before ("set-up")."""
        return self._steps[finding.kind, finding.name, finding.where, finding.wrong]


def tensors_of(*values: Any) -> list[Tensor]:
    """Return the tensors among arguments or results: by themselves, or in lists and dicts."""
    found: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found += tensors_of(*value)
        elif isinstance(value, dict):
            found += tensors_of(*value.values())
    return found


def in_step(call: OperatorCall) -> bool:
    """Return whether a call belongs to a step proper, and not to set-up or to moving a batch."""
    return _is_step(call.phase)


@cache
def _is_step(phase: str) -> bool:
    return phase.startswith("step") and not phase.endswith("batch")


class Operators:
    """Counts operators that touch the device, and finds those that do not belong there."""

    def __init__(self, device: str = "npu") -> None:
        self.device = device
        self.by_step: dict[str, dict[str, OperatorCount]] = {}
        self._findings = Findings()

    def before(self, call: OperatorCall) -> None:
        """Look for what keeps an operator from having a shape at all, before it is asked for."""
        reason = _value_dependent(call)
        if reason is not None and self._on_device(call.args, call.kwargs):
            self._findings.add(
                "data-dependent shape",
                call,
                f"{short(call.name)}: {reason}, so the host waits for the device; make an index on "
                "the host, or use torch.where",
            )

    def after(self, call: OperatorCall) -> None:
        """Count the call, and look at what it is and at its dtypes."""
        if call.func.namespace in COMMUNICATION:
            return
        device = self._on_device(call.args, call.kwargs, call.result)
        if not device:
            return
        self._count(call, device)
        if in_step(call) and classify(call.name) == "CPU fallback":
            self._findings.add(
                "CPU fallback",
                call,
                f"{short(call.name)} is not registered for the NPU: it runs on the host, with a "
                "copy of its tensors there and back; write it with listed operators",
            )
        if any(x.dtype == torch.float64 for x in device):
            self._findings.add(
                "float64",
                call,
                f"{short(call.name)} has a float64 tensor on the device, which has none; make it "
                "float32, or compute it on the host",
            )
        self._int64_scatter(call)

    def finding(self) -> list[Finding]:
        """Return what does not belong on the device."""
        return self._findings.list()

    def of_last_step(self) -> list[OperatorCount]:
        """Return the last step's operators, the most frequent first."""
        if not self.by_step:
            return []
        last = self.by_step[max(self.by_step)]
        return sorted(last.values(), key=lambda counted: -counted.count)

    def _on_device(self, *values: Any) -> list[Tensor]:
        return [x for x in tensors_of(*values) if x.device.type == self.device]

    def _count(self, call: OperatorCall, device: list[Tensor]) -> None:
        if not in_step(call):
            return
        step = self.by_step.setdefault(call.phase.split(":")[0], {})
        counted = step.get(call.name)
        if counted is None:
            counted = OperatorCount(call.name, classify(call.name), call.where)
            step[call.name] = counted
        counted.count += 1
        counted.dtypes |= {str(x.dtype).removeprefix("torch.") for x in device}

    def _int64_scatter(self, call: OperatorCall) -> None:
        base = call.name.split("::")[1].split(".")[0].removesuffix("_")
        if base == "bincount":
            scatters = True
        elif base in _SCATTERS:
            target = call.args[0]
            accumulates = not base.endswith("index_put") or (call.args[3:4] or [False])[0]
            scatters = isinstance(target, Tensor) and target.dtype == torch.int64 and accumulates
        else:
            scatters = False
        if scatters:
            self._findings.add(
                "int64 scatter",
                call,
                f"{short(call.name)} adds int64 values up on the device's scalar core, which is "
                "slow; count on the host",
            )


def _value_dependent(call: OperatorCall) -> str | None:
    """Return why the shape of a call's result depends on values, or None where it does not."""
    base = call.name.split(".")[0]
    if base in _INDEXING:
        indices = tensors_of(call.args[1])
        if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
            return "a boolean index selects as many elements as it has True"
    if call.name == "aten::repeat_interleave.Tensor" and _output_size(call) is None:
        return "its length is the sum of the repeats; give output_size"
    return _VALUE_DEPENDENT.get(base)


def _output_size(call: OperatorCall) -> Any:
    return call.kwargs.get("output_size", (call.args[1:2] or (None,))[0])


def short(name: str) -> str:
    """Return an operator's name without namespace `aten` and overload `default`.

    >>> short("aten::mm.default"), short("npu::npu_swiglu.default")
    ('mm', 'npu::npu_swiglu')
    """
    return name.removeprefix("aten::").removesuffix(".default")
