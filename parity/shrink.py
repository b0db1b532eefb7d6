"""Making a failing case smaller: one row, fewer blocks, a shorter sequence, while it fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from parity.cases import Case

# Each smaller shape is compiled anew by the spec, a few seconds: so many tries and no more.
TRIES, SECONDS = 14, 60.0


def smallest(case: Case, fails: Callable[[Case], bool]) -> Case:
    """Return the smallest case found that still fails; the case itself if none does."""
    deadline, tries = time.monotonic() + SECONDS, 0
    shrunk = True
    while shrunk:
        shrunk = False
        for smaller in _smaller(case):
            tries += 1
            if tries > TRIES or time.monotonic() > deadline:
                return case
            if fails(smaller):
                case, shrunk = smaller, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yield smaller cases, the boldest cuts first."""
    rows, seq = case.tensors["batch/input_ids"].shape
    if rows > 1:
        for row in range(rows):
            yield _cut(case, slice(row, row + 1))
    anchors = case.tensors.get("batch/anchor_positions")
    if anchors is not None and anchors.shape[1] > 1:
        blocks = anchors.shape[1]
        for block in range(blocks):
            yield _cut_blocks(case, np.array([block]))
        if blocks > 2:
            yield _cut_blocks(case, np.arange(blocks // 2))
            yield _cut_blocks(case, np.arange(blocks // 2, blocks))
    if anchors is not None:
        needed = int(anchors.max()) + int(case.config["block_size"]) + 1
        if needed < seq:
            yield _cut(case, slice(None), slice(needed))
    elif seq > 6:
        yield _cut(case, slice(None), slice(seq // 2))


def _cut(case: Case, rows: slice, tokens: slice | None = None) -> Case:
    """Cut the batch's rows, and the sequence of the tensors that have one."""
    of_blocks = ("batch/anchor_positions", "batch/block_keep_mask")
    batch = {n: v[rows] for n, v in case.tensors.items() if n.startswith("batch/")}
    if tokens is not None:
        batch |= {n: v[:, tokens] for n, v in batch.items() if n not in of_blocks}
    return replace(case, tensors=case.tensors | batch)


def _cut_blocks(case: Case, chosen: np.ndarray) -> Case:
    names = ("batch/anchor_positions", "batch/block_keep_mask")
    return replace(
        case, tensors=case.tensors | {name: case.tensors[name][:, chosen] for name in names}
    )
