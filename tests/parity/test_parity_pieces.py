"""Two pretended ranks, and pieces rounded once: what these comparisons are made to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from parity.checks.ranks import compare_ranks
from parity.checks.rounding import compare_rounding
from torch_port import device, portable
from torch_port.objective import loss


def failed(measured: list[Any]) -> list[str]:
    return [m.stage for m in measured if m.fails]


def test_two_equal_ranks_are_one_rank() -> None:
    """Faults: this comparison red for a right step, or comparing nothing."""
    measured = compare_ranks(0)
    assert not failed(measured)
    assert any("trained markov_head.markov_w1.weight" in m.stage for m in measured)


def test_one_collective_more_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a reduction that one process cannot see, in the step of every rank."""
    whole: Callable[..., int] = loss.world_size

    def chatty() -> int:
        ranks = whole()
        if ranks > 1:
            dist.all_reduce(torch.zeros(1))
        return ranks

    monkeypatch.setattr("torch_port.training.step.world_size", chatty)
    assert failed(compare_ranks(0)) == [
        "pruned-vanilla: 3 collectives beside the gradients', not 2",
        "full-vanilla: 2 collectives beside the gradients', not 1",
    ]


def test_a_piece_in_bf16_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a norm that rounds on the way; the whole draft's bf16 tolerance would hide it."""
    assert not failed(compare_rounding(0))
    hasty = replace(
        device.PORTABLE,
        rms_norm=lambda x, w, eps: portable.rms_norm(x, torch.ones_like(w), eps) * w,
    )
    monkeypatch.setattr(device, "PORTABLE", hasty)
    assert failed(compare_rounding(0)) == ["RMSNorm"]
