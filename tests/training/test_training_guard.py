"""The spike guard's modes, and an offloaded optimizer, in one process."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rank_cases import CASES, RATES, frozen, micro_batches, train
from torch import Tensor
from toys import draft

from torch_port.training.guard import SpikeGuard
from torch_port.training.optimizer import MasterAdamW
from torch_port.training.step import training_step

NORMS = (1.0, 4.0, 20.1, 20.1, 0.0, 20.0)  # the mean is 2, and its limit 20, until the last


@pytest.mark.parametrize(
    ("mode", "spikes", "taken"),
    [
        ("off", [False] * 6, [True] * 6),
        ("observe", [False, False, True, True, False, False], [True] * 6),
        ("skip", [False, False, True, True, False, False], [True, True, False, False, True, True]),
    ],
)
def test_the_modes_by_hand(mode: Any, spikes: list[bool], taken: list[bool]) -> None:
    """Field-note 19. Faults: an observed spike enters the mean, and hides the next one; "off" keeps
    a mean; looking at a norm remembers it."""
    guard = SpikeGuard(10.0, mode)
    assert [guard.mode, guard.log_sum, guard.seen] == [mode, 0, 0]
    seen, admitted = [], []
    for norm in NORMS:
        seen.append(guard.is_spike(norm))
        assert guard.is_spike(norm) == seen[-1]
        admitted.append(guard.admits(norm))
    assert (seen, admitted) == (spikes, taken)
    kept = [] if mode == "off" else [1.0, 4.0, 20.0]
    assert guard.seen == len(kept)
    assert guard.log_sum == pytest.approx(sum(map(math.log, kept)), rel=1e-15)


def test_the_mode_may_change_in_the_middle() -> None:
    """Fault: a mean that one mode keeps in another form than the other."""
    guard = SpikeGuard(10.0, "observe")
    assert [guard.admits(n) for n in (1.0, 4.0, 100.0)] == [True] * 3
    guard.mode = "skip"
    assert [guard.admits(n) for n in (20.1, 19.9)] == [False, True]
    guard.mode = "off"
    assert guard.admits(1e9)


def test_four_spikes_of_858_steps() -> None:
    """Field-note 19, its numbers: 10× a running mean sees all four, and none beside them.

    Norms that fall from 3 to 0.5 and scatter by a factor of up to 2.
    """
    g = torch.Generator().manual_seed(0)
    scatter = (torch.rand(862, generator=g, dtype=torch.float64) * 2 - 1) * math.log(2)
    norms = [3 * (0.5 / 3) ** (i / 862) * math.exp(s) for i, s in enumerate(scatter.tolist())]
    spikes = (100, 101, 400, 800)
    for at in spikes:
        norms[at] *= 60
    guard = SpikeGuard(10.0)
    assert [i for i, norm in enumerate(norms) if not guard.admits(norm)] == list(spikes)


def test_reports_of_an_observed_spike() -> None:
    """Faults: a spike that is not reported; moments of an observed step that stay."""
    case, model = CASES["pruned"], draft()
    optimizer = MasterAdamW(model.named_parameters(), RATES, guard_mode="observe")
    loud = case.objective.model_copy(update={"l1_alpha": 1e5})
    reports = []
    for step, objective in enumerate((case.objective, loud, case.objective), start=1):
        batches = micro_batches(case, step, 0, 1, torch.float64)
        reports.append(
            training_step(model, optimizer, batches, frozen(torch.float64), objective, step)
        )
    assert [(r.taken, r.spike) for r in reports] == [(True, False), (True, True), (True, False)]
    assert (optimizer.updates, optimizer.guard.seen) == (3, 2)


# --- Offloading ----------------------------------------------------------------------------------


def state(optimizer: MasterAdamW) -> dict[str, list[Tensor]]:
    moments = optimizer.moments()
    return {
        name: [parameter.detach(), master.detach(), *moments[name]]
        for name, parameter, master in zip(
            optimizer.names, optimizer.parameters, optimizer.masters, strict=True
        )
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_offloading_moves_no_number(dtype: torch.dtype) -> None:
    """Faults: masters that are the parameters after all; the update of another order or precision;
    weights that do not come back; a state of one kind that the other cannot take."""
    case, states, optimizers = CASES["pruned"], [], []
    for offload in (False, True):
        model = case.draft().to(dtype)
        optimizers.append(train(model, case, 0, 1, dtype, steps=4, offload=offload))
        states.append(state(optimizers[-1]))
    for name, usual in states[0].items():
        assert all(torch.equal(a, b) for a, b in zip(states[1][name], usual, strict=True)), name
    offloaded = optimizers[1]
    for parameter, master in zip(offloaded.parameters, offloaded.masters, strict=True):
        assert parameter.data_ptr() != master.data_ptr()
        assert master.dtype == torch.float32
    resumed = case.draft().to(dtype)
    with torch.no_grad():
        for parameter, there in zip(resumed.parameters(), optimizers[0].parameters, strict=True):
            parameter.copy_(there)
    optimizer = MasterAdamW(resumed.named_parameters(), RATES, offload=True)
    tensors = {}
    for name, (_, master, first, second) in states[0].items():
        if dtype != torch.float32:  # a float32 run's checkpoint holds weights and moments alone
            tensors[f"optimizer.masters.{name}"] = master
        tensors |= {f"optimizer.exp_avg.{name}": first, f"optimizer.exp_avg_sq.{name}": second}
    optimizer.restore(tensors, 4)
    for name, usual in states[0].items():
        pairs = zip(state(optimizer)[name], usual, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs), name


def test_an_offloaded_float64_run_has_float64_masters() -> None:
    """Fault: masters of float32 where the weights are wider."""
    optimizer = MasterAdamW(draft().named_parameters(), RATES, offload=True)
    assert {m.dtype for m in optimizer.masters} == {torch.float64}
