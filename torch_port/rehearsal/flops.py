"""Floating-point operations of a rehearsed step, by the part of the model that asks for them.

A matrix product of [m, k] by [k, n] counts 2·m·k·n (torch's own formulas); a fused attention call
counts its two products (and its gradient five: it computes the scores again), over every column
that it is given, masked or not. Element operations, one per element of a floating-point result, are
counted beside the products: of the optimizer they are all there is.

The part follows from the line: an operator of a backward pass, or of a layer that is computed
again, belongs to the part of its forward line.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from torch_port.rehearsal.operators import COMMUNICATION, in_step, tensors_of
from torch_port.rehearsal.trace import ROOT, Finding, OperatorCall

# (file, first part of the name inside it): the model's part; the first that fits.
PARTS = (
    ("torch_port/models/backbone.py", "MLP", "feed-forward"),
    ("torch_port/models/backbone.py", "DraftLayer._feed", "feed-forward"),
    ("torch_port/models/backbone.py", "Attention", "projections"),
    ("torch_port/models/backbone.py", "Backbone", "projections"),
    ("torch_port/models/backbone.py", "DraftLayer", "projections"),
    ("torch_port/models/backbone.py", "", "norms"),
    ("torch_port/models/blockwise.py", "", "attention"),
    ("torch_port/models/attention.py", "", "attention"),
    ("torch_port/models/training_time_test.py", "", "attention"),
    ("torch_port/models/eagle3.py", "", "projections"),
    ("torch_port/models/heads.py", "", "heads"),
    ("torch_port/models/block_draft.py", "BlockDraft.logits", "objective"),
    ("torch_port/objective/", "", "objective"),
    ("torch_port/training/", "", "optimizer"),
    # The seam's kernels and their twins, by the part that calls them.
    ("torch_port/device.py", "_npu_rms_norm", "norms"),
    ("torch_port/device.py", "_npu_rotary", "attention"),
    ("torch_port/device.py", "_npu_swiglu", "feed-forward"),
    ("torch_port/device.py", "_npu_attention_chunk", "attention"),
    ("torch_port/device.py", "_NpuAdamW", "optimizer"),
    ("torch_port/portable.py", "rms_norm", "norms"),
    ("torch_port/portable.py", "rotary", "attention"),
    ("torch_port/portable.py", "swiglu", "feed-forward"),
    ("torch_port/portable.py", "", "attention"),
)
ORDER = ("attention", "feed-forward", "projections", "objective", "heads", "norms", "optimizer")

# The gradients of torch_npu's operators run outside of this package: their part is in their name.
_OF_NPU = {"rms_norm": "norms", "rotary": "attention", "swiglu": "feed-forward"}
_ATTENTION = {"npu::npu_fusion_attention": 2, "npu::npu_fusion_attention_grad": 5}
# Results that no arithmetic made.
_VIEWS = {
    *("alias", "as_strided", "detach", "expand", "permute", "select", "slice", "split", "squeeze"),
    *("split_with_sizes", "t", "transpose", "unbind", "unsqueeze", "view", "_reshape_alias"),
    *("_unsafe_view", "lift_fresh", "reshape", "set_"),
}
_COPIES = {
    *("cat", "clone", "copy_", "gather", "index", "index_copy", "index_copy_", "index_put"),
    *("index_put_", "index_select", "repeat", "select_backward", "slice_backward", "stack"),
    "_to_copy",
}
_FACTORIES = {
    *("arange", "empty", "empty_like", "empty_strided", "fill_", "full", "full_like", "new_empty"),
    *("new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like"),
    *("scalar_tensor", "zero_", "zeros", "zeros_like"),
}
_NO_ARITHMETIC = frozenset(_VIEWS | _COPIES | _FACTORIES)


@dataclass
class Operations:
    """What a part costs in one step: products, and element operations beside them."""

    products: int = 0
    elements: int = 0

    @property
    def total(self) -> int:
        """Both together."""
        return self.products + self.elements


class Flops:
    """Counts floating-point operations by part and pass."""

    def __init__(self) -> None:
        self._steps: dict[str, dict[tuple[str, str], Operations]] = {}

    def before(self, call: OperatorCall) -> None:
        """Nothing is known before the result's shape."""

    def after(self, call: OperatorCall) -> None:
        """Count the call under its part."""
        if not in_step(call) or call.func.namespace in COMMUNICATION:
            return
        products = product_operations(call)
        elements = 0 if products else _element_operations(call)
        if not products and not elements:
            return
        step, direction = call.phase.split(": ")
        parts = self._steps.setdefault(step, defaultdict(Operations))
        part = "optimizer" if direction == "optimizer" else _part(call)
        parts[part, direction].products += products
        parts[part, direction].elements += elements

    def finding(self) -> list[Finding]:
        """Operations are counted, not judged."""
        return []

    def by_part(self) -> dict[str, Operations]:
        """Return the last step's operations, by part, in the model's order."""
        last = self._steps[max(self._steps)] if self._steps else {}
        sums: dict[str, Operations] = {}
        for (part, _), operations in last.items():
            total = sums.setdefault(part, Operations())
            total.products += operations.products
            total.elements += operations.elements
        known = [part for part in ORDER if part in sums]
        return {part: sums[part] for part in [*known, *sorted(sums.keys() - set(known))]}

    def total(self) -> int:
        """Return the last step's matrix products, in floating-point operations."""
        return sum(operations.products for operations in self.by_part().values())


def _part(call: OperatorCall) -> str:
    if call.func.namespace == "npu":
        for name, part in _OF_NPU.items():
            if name in call.name:
                return part
    return part_of(call.where)


def product_operations(call: OperatorCall) -> int:
    """Return the operations of a call's matrix products, 0 for an operator that has none."""
    base = call.name.rsplit(".", 1)[0]
    if base in _ATTENTION:
        q, k = call.args[0], call.args[1]
        return _ATTENTION[base] * 2 * q.numel() * k.shape[2]
    formula = flop_registry.get(_functional(call.func))
    if formula is None:
        return 0
    return int(formula(*call.args, **_settings(call.kwargs), out_val=call.result))


@cache
def _functional(func: Any) -> Any:
    """Return the operator whose formula serves: that of `mm` for mm.out, of `addmm` for addmm_."""
    import torch

    packet = func.overloadpacket
    name = packet.__name__.removesuffix("_")
    if func.namespace != "aten" or packet in flop_registry:
        return packet
    return getattr(torch.ops.aten, name, packet)


def _settings(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if name != "out"}


def _element_operations(call: OperatorCall) -> int:
    name = call.name.split("::")[1].split(".")[0]
    if name in _NO_ARITHMETIC:
        return 0
    if name.startswith("_foreach_"):
        return sum(_elements(x) for x in tensors_of(call.args[0]))
    results = [x for x in tensors_of(call.result) if x.is_floating_point()]
    # A reduction reads more than it writes.
    inputs = [x for x in tensors_of(call.args) if x.is_floating_point()]
    return max((_elements(x) for x in (*results, *inputs[:1])), default=0) if results else 0


def _elements(x: Tensor) -> int:
    return prod(x.shape)


@cache
def part_of(where: str) -> str:
    """Return the model's part that a line, `file:line`, belongs to."""
    file, _, line = where.rpartition(":")
    if not line.isdigit():
        return "other"
    inside = enclosing(file, int(line))
    for start, name, part in PARTS:
        if file.startswith(start) and inside.startswith(name):
            return part
    return "other"


@cache
def _spans(file: str) -> list[tuple[int, int, str]]:
    """Return (first line, last line, qualified name) of every function and class of a file."""
    found: list[tuple[int, int, str]] = []

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            name = f"{prefix}{child.name}" if named else ""  # type: ignore[attr-defined]
            if named:
                found.append((child.lineno, child.end_lineno or child.lineno, name))  # type: ignore[attr-defined]
            walk(child, f"{name}." if named else prefix)

    path = Path(ROOT) / file
    if path.is_file():
        walk(ast.parse(path.read_text(encoding="utf-8")), "")
    return found


def enclosing(file: str, line: int) -> str:
    """Return the qualified name of the innermost function or class around a line, or ""."""
    around = [span for span in _spans(file) if span[0] <= line <= span[1]]
    return min(around, key=lambda span: span[1] - span[0])[2] if around else ""
