"""Processes that count. No torch."""

from __future__ import annotations

from torch_port.data.parallel import in_processes
from torch_port.errors import UserError

__all__ = ["check_workers", "in_processes"]


def check_workers(workers: int) -> None:
    """Refuse fewer than one process."""
    if workers < 1:
        raise UserError(
            f"--workers is {workers}, but at least 1 process must count; give 1 or more, or leave "
            "it out to use all cores"
        )
