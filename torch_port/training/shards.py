"""A tensor that is spread over ranks (a DTensor), and the part of it that this rank holds.

Plain tensors pass through every function here as they are. Nothing here imports DTensor's package,
which takes seconds, before a tensor is one.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor


def is_sharded(tensor: Tensor) -> TypeGuard[Any]:
    """Return whether a tensor is a DTensor."""
    return hasattr(tensor, "to_local")


@torch.no_grad()
def local(tensor: Tensor) -> Tensor:
    """Return this rank's part: the tensor's own memory, no copy; a plain tensor itself.

    The part may have no elements: where an axis is shorter than the ranks are many.
    """
    return tensor.to_local() if is_sharded(tensor) else tensor


@torch.no_grad()
def laid_out_as(part: Tensor, whole: Tensor) -> Tensor:
    """Return a tensor over `part`'s memory, spread as `whole` is, of which `part` is this rank's.

    The part may lie elsewhere than the mesh's device (offloaded to the host), which
    `DTensor.from_local` would copy it back to: an empty twin takes its memory instead.
    """
    if not is_sharded(whole):
        return part
    twin = torch.empty_like(whole, dtype=part.dtype, device=part.device)
    local(twin).set_(part.untyped_storage(), part.storage_offset(), part.size(), part.stride())
    return twin


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return this rank's part of `whole` (a plain tensor, or spread already), spread as `like`."""
    if is_sharded(like) and not is_sharded(whole):
        from torch.distributed.tensor import distribute_tensor

        # Every rank has all of it and takes its own part: nothing is sent.
        whole = distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
    return local(whole)


@torch.no_grad()
def host_copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Copy a tensor, or this rank's part of one, to host memory, pinned where a device reads it."""
    pinned = tensor.device.type != "cpu"
    copied = torch.empty_like(tensor, dtype=dtype, device="cpu", pin_memory=pinned)
    local(copied).copy_(local(tensor))
    return copied


def add_up(total: Tensor, tensors: list[Any]) -> Tensor:
    """Sum `total`, made of this rank's parts of `tensors`, over the ranks that they are spread on.

    One all-reduce where the first of them is sharded (all or none are), else none.
    """
    if tensors and is_sharded(tensors[0]):
        dist.all_reduce(total, group=tensors[0].device_mesh.get_group())
    return total
