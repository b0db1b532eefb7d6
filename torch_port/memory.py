"""Peak memory as this project measures it: bytes of live tensors, traced, above what was there.

One instrument everywhere, so that numbers compare: it sees every tensor an operator returns, on any
device, and none of an operator's own workspace or of the allocator's rounding.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Trace the live bytes of tensors made inside the block; `peak` is their maximum.

    Inputs and parameters that exist before the block do not count; views share their storage and
    count once.

    >>> with PeakMemory() as traced:
    ...     x = torch.zeros(1000)
    ...     y = x + 1
    ...     del x, y
    ...     z = torch.zeros(10)
    >>> traced.peak, traced.live
    (8000, 40)
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self._seen: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._outside: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run the operator, then account for storages that it made."""
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage not in self._seen:
                    self._outside.add(storage)
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._account(tensor.untyped_storage())
        return result

    def _account(self, storage: torch.UntypedStorage) -> None:
        if storage in self._seen or storage in self._outside:
            return
        size = storage.nbytes()
        self._seen.add(storage)
        weakref.finalize(storage, self._release, size)
        self.live += size
        self.peak = max(self.peak, self.live)

    def _release(self, size: int) -> None:
        self.live -= size
