"""The port with its pieces cut small: its walks in chunks are walked on the suite's cases too.

A chunk of 256 queries, a slice of 1024 head rows or a pack of 32 blocks is the whole of a small
case, and what goes wrong from the second one on would not be seen (a reviewer's fault was not).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

SIZES, SMALL = "sizes", "small"  # an entry of `Case.compute`, beside the ComputeConfig's


@contextmanager
def sizes_of(compute: Mapping[str, Any]) -> Iterator[None]:
    """Run the block with the port's pieces small, where the case's `compute` says so."""
    with ExitStack() as stack:
        if compute.get(SIZES) == SMALL:
            for owner, name, value in _smaller():
                stack.enter_context(mock.patch.object(owner, name, value))
        yield


def settings_of(compute: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ComputeConfig's settings of a case's `compute`."""
    return {name: value for name, value in compute.items() if name != SIZES}


def _smaller() -> list[tuple[Any, str, Any]]:
    from torch_port.models import blockwise, eagle3
    from torch_port.models.training_time_test import training_time_attention
    from torch_port.objective import eagle3 as eagle3_objective
    from torch_port.objective import evaluate, fused_batch, products, reductions
    from torch_port.objective.eagle3 import eagle3_terms
    from torch_port.objective.teacher import log_normalizer, normalizer_and_best
    from torch_port.objective.terms import slot_terms

    def few_rows(states: Any, head: Any, _rows: int, ids: Any) -> Any:
        return log_normalizer(states, head, 5, ids)

    return [
        (blockwise, "PACK", 2),
        (blockwise, "BLOCKS_PER_CALL", 2),
        (products, "SLICE", 16),
        (reductions, "_SEGMENT", 4),
        (eagle3, "training_time_attention", partial(training_time_attention, queries=3)),
        (eagle3_objective, "eagle3_terms", partial(eagle3_terms, chunk=4)),
        (eagle3_objective, "normalizer_and_best", partial(normalizer_and_best, rows=5)),
        (evaluate, "slot_terms", partial(slot_terms, chunk=1)),
        (fused_batch, "log_normalizer", few_rows),
    ]
