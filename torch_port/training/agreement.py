"""An error on one rank becomes an error on all: one that fails alone leaves the others waiting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from torch_port.errors import UserError


class OthersError(UserError):
    """What another rank failed with, and said itself."""


@contextmanager
def in_agreement(group: dist.ProcessGroup | None) -> Iterator[None]:
    """Run a block that every rank runs, without collectives inside; raise on all when one failed.

    Arguments: a group of gloo, which carries the messages; None without other ranks.
    Raises the rank's own error, after the others were told; OthersError on ranks that did not fail.
    What several ranks fail with alike, the first alone raises as its own.
    """
    if group is None:
        yield
        return
    problem: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - told to the other ranks, then raised again
        problem = error
    told: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, None if problem is None else str(problem), group=group)
    failed = [rank for rank, text in enumerate(told) if text is not None]
    if not failed:
        return
    rank = dist.get_rank(group)
    first = failed[0]
    if problem is not None and (rank == first or told[rank] != told[first]):
        raise problem
    named = ", ".join(map(str, failed))
    raise OthersError(f"rank {named} cannot go on: {told[first]}") from problem
