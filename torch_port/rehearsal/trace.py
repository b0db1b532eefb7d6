"""Every operator of a rehearsal, with the line of this package that it came from, for observers.

An operator of a backward pass has no line of its own where autograd's C++ nodes run: its line is
that of the forward operator whose node runs, found by autograd's sequence numbers (a node is made
just before its operator is dispatched). Python nodes (`autograd.Function`) run their own lines.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any, Protocol

import torch
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorDeviceMismatchError,
    UnsupportedOperatorException,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from torch_port.errors import UserError
from torch_port.rehearsal.shortcuts import Shortcuts

HERE = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(HERE)
ROOT = os.path.dirname(PACKAGE)
BACKWARD = ("torch_port/training/", "outside ")  # where backward is called
ACCUMULATION = "gradients summed (autograd)"  # where AccumulateGrad runs: no line of ours


@dataclass(frozen=True)
class OperatorCall:
    """One dispatched operator.

    `name` is as in "aten::mm.default"; `result` is None before it ran. `where` is a line, as in
    "torch_port/objective/fused.py:123", of the forward pass in autograd's own nodes. `phase` is as
    in "step 1: forward", "step 1: backward", "step 1: optimizer".
    """

    name: str
    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    where: str
    phase: str


@dataclass(frozen=True)
class Finding:
    """What an observer has to say about an operator and a line, once for all `count` calls.

    `kind` is a short name ("host tensor", "fallback", "sync", "float64", "data-dependent shape");
    `wrong` is False for what is documented and only counted.
    """

    kind: str
    name: str
    where: str
    text: str
    count: int = 1
    wrong: bool = True


class Observer(Protocol):
    """Something that looks at operators as they are dispatched."""

    def before(self, call: OperatorCall) -> None:
        """Look at a call whose `result` is None."""

    def after(self, call: OperatorCall) -> None:
        """Look at the same call with its result."""

    def finding(self) -> list[Finding]:
        """Return what was found, at the end."""


class Trace(TorchDispatchMode):
    """Hands every operator to the observers. Enter it inside a FakeTensorMode.

    A value that the host asks for (`.item()`, `.tolist()`, `bool(t)`) is dispatched as
    `aten::_local_scalar_dense`; there is none, so the host gets 1. A tensor of the host beside one
    of the device, which stops a real step, is taken to the device so that the rehearsal goes on:
    observers see the operator as it was called.
    """

    def __init__(self, observers: Sequence[Observer]) -> None:
        super().__init__()
        self.observers = list(observers)
        self.phase = ""
        self._lines = _Lines()
        self._shortcuts = Shortcuts()
        self._forward: dict[int, str] = {}  # line of each autograd node, by its sequence number

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, and skipping it costs as much as some operators."""
        return False

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Name the phase of what is dispatched in the block."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before

    def where(self) -> str:
        """Return the line that the operator being dispatched belongs to."""
        node = torch._C._current_autograd_node()
        line = self._lines.current()
        if node is None or not line.startswith(BACKWARD):
            # Forward, a backward pass of our own, or a layer that is computed again. The node of
            # the operator being dispatched, if it has one, took the last number; the next operator
            # may have none and must not take its place.
            self._forward.setdefault(torch._C._autograd._get_sequence_nr() - 1, line)
            return line
        known = self._forward.get(node._sequence_nr())
        if known is not None:
            return known
        return ACCUMULATION if node.name().endswith("AccumulateGrad") else line

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operator between the observers."""
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # what it does with a rank's own part comes here again
        if func is torch.ops.prim.device.default:  # asked for at every node of a backward pass
            return args[0].fake_device if isinstance(args[0], FakeTensor) else func(*args)
        kwargs = kwargs or {}
        if args and type(args[0]) is torch.Tensor:  # a real one, as torch.tensor makes it
            args = (_fake(args[0]), *args[1:])
        if func.namespace == "prim":  # .device, .layout: no work
            return func(*args, **kwargs)
        name = func.name() if "." in func.name() else f"{func.name()}.default"
        where = self.where()
        call = OperatorCall(name, func, args, kwargs, None, where, self.phase)
        for observer in self.observers:
            observer.before(call)
        result = self._run(call)
        if self.observers:
            call = OperatorCall(name, func, args, kwargs, result, where, self.phase)
            for observer in self.observers:
                observer.after(call)
        return result

    def _run(self, call: OperatorCall) -> Any:
        if call.name == "aten::_local_scalar_dense.default":
            return _some_value(call.args[0].dtype)
        if call.name == "aten::equal.default":  # asked by checks, which pass
            return True
        try:
            return self._shortcuts.run(call.func, call.args, call.kwargs)
        except FakeTensorDeviceMismatchError:
            args, kwargs = _on_one_device(call)
            return call.func(*args, **kwargs)
        except (DynamicOutputShapeException, DataDependentOutputException) as error:
            raise UserError(
                f"{call.name} at {call.where}: the shape or the path of what follows depends on a "
                "tensor's values, so the device has to be waited for and nothing more can be "
                "rehearsed; make an index on the host, or use torch.where"
            ) from error
        except UnsupportedOperatorException as error:
            raise UserError(
                f"{call.name} at {call.where}: no shape rule is known for it, so it cannot be "
                "rehearsed; register a fake implementation (torch.library.register_fake)"
            ) from error


def _on_one_device(call: OperatorCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a call's arguments with the tensors of the host taken to the device of the others."""
    leaves = tree_leaves((call.args, call.kwargs))
    device = next(x.device for x in leaves if torch.is_tensor(x) and x.device.type != "cpu")

    def moved(x: Any) -> Any:
        return x.to(device) if torch.is_tensor(x) else x

    args, kwargs = tree_map(moved, (call.args, call.kwargs))
    return args, kwargs


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    """Return a fake tensor without the values, which no virtual device could take."""
    mode = detect_fake_mode()
    return tensor if mode is None else mode.from_tensor(tensor)


def _some_value(dtype: torch.dtype) -> bool | int | float:
    if dtype == torch.bool:
        return True
    return 1.0 if dtype.is_floating_point else 1


class _Lines:
    """Finds the innermost line of this package that is not of the rehearsal."""

    def __init__(self) -> None:
        self._ours: dict[CodeType, str | None] = {}

    def current(self) -> str:
        frame = sys._getframe(1)
        while frame is not None:
            code = frame.f_code
            name = self._ours.get(code, "")
            if name == "":
                name = self._ours[code] = _named(code.co_filename)
            if name is not None:
                return f"{name}:{frame.f_lineno}"
            frame = frame.f_back  # type: ignore[assignment]
        return "outside torch_port"


def _named(path: str) -> str | None:
    if path.startswith(PACKAGE + os.sep) and not path.startswith(HERE + os.sep):
        return os.path.relpath(path, ROOT)
    return None
