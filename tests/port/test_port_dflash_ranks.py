"""DFlash and D-PACE on two ranks, as two processes, against one process with the whole batch."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from dflash_toys import OBJECTIVES, dflash_draft, holed_batch
from torch import Tensor
from toys import target

from torch_port.data.batch import Batch
from torch_port.training.step import accumulate_gradients

# It leaves without Python's clean-up: a thread of torch's own that comes late to it aborts the
# process. What went wrong before that still ends in a status of its own.
OTHER_RANK = """
import os
import sys

sys.path.insert(0, sys.argv[1])
from test_port_dflash_ranks import one_rank
one_rank(1, sys.argv[2])
os._exit(0)
"""
Result = tuple[list[tuple[int, ...]], Tensor, dict[str, Tensor]]


def gradients(batch: Batch, kind: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one step."""
    model = dflash_draft()
    loss = accumulate_gradients(model, [batch], target(), OBJECTIVES[kind])[0]
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(found) == len(list(model.parameters()))
    return loss, found


def one_rank(rank: int, meeting: str) -> dict[str, Result]:
    """Take rank's row through a step of each objective: shapes all-reduced, the ranks' mean loss,
    gradients."""
    where = {"init_method": f"file://{meeting}", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", **where, timeout=timedelta(seconds=90))
    seen: list[tuple[int, ...]] = []
    original = dist.all_reduce

    def counted(tensor: Tensor) -> None:
        seen.append(tuple(tensor.shape))
        original(tensor)

    whole, results = holed_batch(), {}
    mine = {n: None if x is None else x[rank : rank + 1] for n, x in vars(whole).items()}
    dist.all_reduce = counted
    try:
        for kind in OBJECTIVES:
            seen.clear()
            loss, found = gradients(Batch(**mine), kind)
            shapes = [*seen]
            original(loss)
            results[kind] = (shapes, loss / 2, found)
    finally:
        dist.all_reduce = original
    dist.barrier()  # a rank that leaves first tears down what the other still waits on
    dist.destroy_process_group()
    return results


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    """Faults: W missing or doubled; Σ w or D-PACE's B of one rank; a collective more than one per
    step, which one objective alone asks for.

    Real processes, this one and another: one alone cannot see a collective. The rows hold unlike
    numbers of blocks and kept labels. float64, sums in another order.
    """
    meeting = str(tmp_path / "meeting")
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_RANK, str(Path(__file__).parent), meeting],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    results = one_rank(0, meeting)
    assert other.wait(timeout=90) == 0
    assert results.keys() == OBJECTIVES.keys()
    for kind, (shapes, mean, found) in results.items():
        # The denominators; then the gradients, in one bucket.
        assert shapes == [(3,), (sum(x.numel() for x in found.values()),)]
        loss, expected = gradients(holed_batch(), kind)
        torch.testing.assert_close(mean, loss, rtol=1e-12, atol=0, msg=kind)
        for name, gradient in expected.items():
            bound = 1e-12 * gradient.abs().max().item()
            torch.testing.assert_close(
                found[name], gradient, rtol=0, atol=bound, msg=f"{kind}, {name}"
            )
