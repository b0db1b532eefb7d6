"""Short ways to an operator's result on a virtual device; anything else goes FakeTensorMode's way.

A rehearsed step dispatches a hundred thousand operators. FakeTensorMode takes 0.1 to 0.4 ms for
each, most of it to look at arguments that cannot occur here. A write returns what it wrote to, a
view asks torch's own meta kernel, and a function's result is made again from the shapes that
FakeTensorMode gave for the same shapes before. A test holds both ways equal.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

aten = torch.ops.aten
_VIEWS = {  # operators whose meta kernel is compiled
    aten.slice.Tensor,
    aten.select.int,
    aten.view.default,
    aten._unsafe_view.default,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.expand.default,
    aten.permute.default,
    aten.transpose.int,
    aten.t.default,
    aten.as_strided.default,
    aten.unbind.int,
    aten.split.Tensor,
}
_Way = Literal["write", "out", "view", "function", "other"]


@cache
def _way(func: Any) -> _Way:
    if func in _VIEWS:
        return "view"
    schema = func._schema
    if func.namespace not in ("aten", "npu") or torch.Tag.inplace_view in func.tags:
        return "other"
    if not any(a.alias_info for a in (*schema.arguments, *schema.returns)):
        return "function"
    written = [a.name for a in schema.arguments if a.alias_info and a.alias_info.is_write]
    if len(schema.returns) != 1 or len(written) != 1:
        return "other"
    if written == ["out"]:
        return "out"
    return "write" if written == [schema.arguments[0].name] else "other"


class Shortcuts:
    """Results by the shortest way, for one FakeTensorMode."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[Any, ...] | None] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the operator returns."""
        way = _way(func)
        if way == "function":
            return self._function(func, args, kwargs)
        result = NotImplemented
        if way == "view":
            result = _view(func, args, kwargs)
        elif way == "write":
            result = _written(args[0] if args else None, args)
        elif way == "out":
            target = kwargs["out"]
            if isinstance(target, torch.Tensor) and target.numel():  # an empty one may grow
                result = _written(target, args)
        return func(*args, **kwargs) if result is NotImplemented else result

    def _function(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            key = (func, _key(args), _key(tuple(kwargs.items())))
            known = self._known.get(key)
        except TypeError:  # something without a hash
            return func(*args, **kwargs)
        if known is not None:
            return _again(known)
        result = func(*args, **kwargs)
        if key not in self._known:
            self._known[key] = _recipe(result, args)
        return result


def _key(values: Any) -> tuple[Any, ...]:
    """Return what a result's shape can depend on."""
    key: list[Any] = []
    for x in values:
        if isinstance(x, FakeTensor):
            key.append((x.shape, x.stride(), x.dtype, x.fake_device))
        elif isinstance(x, (tuple, list)):
            key.append(_key(x))
        elif isinstance(x, torch.Tensor):
            raise TypeError
        else:
            key.append((type(x), x))  # 1, 1.0 and True are equal
    return tuple(key)


def _recipe(result: Any, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return how to make a result again, or None where it is not new memory, one tensor each."""
    several = isinstance(result, tuple)
    parts: list[Any] = []
    seen = {x.untyped_storage()._cdata for x in args if isinstance(x, torch.Tensor)}
    for x in result if several else (result,):
        if isinstance(x, FakeTensor):
            storage = x.untyped_storage()
            if storage._cdata in seen or x.constant is not None:
                return None
            seen.add(storage._cdata)
            if storage.nbytes() != _bytes(x):
                return None
            parts.append((x.fake_mode, x.fake_device, x.shape, x.stride(), x.dtype))
        elif isinstance(x, (int, float)) or x is None:
            parts.append(x)
        else:
            return None
    return (several, parts)


def _bytes(x: torch.Tensor) -> int:
    if x.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.element_size()


def _again(recipe: tuple[Any, ...]) -> Any:
    several, parts = recipe
    made = [_make(*part) if isinstance(part, tuple) else part for part in parts]
    return tuple(made) if several else made[0]


def _make(
    mode: Any, device: torch.device, shape: Any, stride: Any, dtype: torch.dtype
) -> FakeTensor:
    with torch._C._DisableTorchDispatch():
        plain = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    return FakeTensor(mode, plain, device)


def _written(target: Any, args: tuple[Any, ...]) -> Any:
    if not isinstance(target, FakeTensor) or not _all_on(target.fake_device, args):
        return NotImplemented
    return target


def _all_on(device: torch.device, args: tuple[Any, ...]) -> bool:
    """Whether all tensors that are more than a number are fake ones of that device."""
    for x in args:
        for t in x if isinstance(x, (tuple, list)) else (x,):
            if isinstance(t, torch.Tensor) and not (
                isinstance(t, FakeTensor) and (t.fake_device == device or t.dim() == 0)
            ):
                return False
    return True


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    base = args[0]
    if not isinstance(base, FakeTensor) or kwargs:
        return NotImplemented
    mode, device = base.fake_mode, base.fake_device
    with in_kernel_invocation_manager(mode):
        result = func(*args)
    if isinstance(result, torch.Tensor):
        return FakeTensor(mode, result, device)
    return [FakeTensor(mode, part, device) for part in result]
