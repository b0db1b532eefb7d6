"""What a step does, noted while it runs: operators, dtypes on a device, torch functions."""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Scan(TorchDispatchMode):
    """Note every operator, and the dtype of every tensor on the "device"."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.operators: set[str] = set()
        self.dtypes: dict[torch.dtype, set[str]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, result)):
            if isinstance(x, Tensor) and x.device.type == self.where:
                self.operators.add(str(func))
                self.dtypes.setdefault(x.dtype, set()).add(str(func))
        return result


class Functions(TorchFunctionMode):
    """Note the name of every torch function: a recurrent kernel is no operator on every device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.names.add(getattr(func, "__name__", ""))
        return func(*args, **(kwargs or {}))
