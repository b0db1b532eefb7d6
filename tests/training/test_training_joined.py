"""Joining the ranks: what torchrun's environment, the mode and the device may be together."""

from __future__ import annotations

import re
import sys
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from torch_port.errors import UserError
from torch_port.run_sections import DistributionSection
from torch_port.training import distribution
from torch_port.training.distribution import Ranks, distribute, joined

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = dict(zip(NAMES, ("0", "8", "0", "localhost", "1"), strict=True))


@pytest.fixture
def torchrun(monkeypatch: pytest.MonkeyPatch):
    """Set torchrun's variables, changed as asked; a value of None is left out."""

    def set_all(**changes: str | None) -> None:
        for name in NAMES:
            monkeypatch.delenv(name, raising=False)
        for name, value in (TORCHRUN | changes).items():
            if value is not None:
                monkeypatch.setenv(name, value)

    set_all(**dict.fromkeys(NAMES))
    return set_all


def join(mode: str, device: str = "cpu") -> Ranks:
    with joined(DistributionSection(mode=mode, timeout_seconds=1), device) as ranks:
        assert not dist.is_initialized()
        return ranks


@pytest.mark.parametrize("mode", ["auto", "single"])
@pytest.mark.parametrize("device", ["auto", "cpu"])
def test_alone(torchrun, mode: str, device: str) -> None:
    """Faults: a process group, or a collective, for one process; another draft than the given."""
    ranks = join(mode, device)
    assert ranks == Ranks(0, 1, 0, torch.device("cpu"), "single", None)
    draft = torch.nn.Linear(2, 2)
    assert distribute(draft, ranks) is draft


def test_other_variables_of_a_cluster_are_no_torchrun(torchrun) -> None:
    """Fault: MASTER_ADDR, which schedulers set in every container, makes a run wait for others."""
    torchrun(RANK=None, WORLD_SIZE=None, LOCAL_RANK=None)
    assert join("auto").mode == "single"


def test_one_process_of_torchrun_may_be_single(torchrun) -> None:
    torchrun(WORLD_SIZE="1")
    assert join("single").mode == "single"


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_ranks_without_torchrun(torchrun, mode: str) -> None:
    """Fault: torch's own error about a missing variable, or a run that is alone unnoticed."""
    with pytest.raises(UserError, match=f"mode is {mode}, but .* torchrun --nproc-per-node"):
        join(mode)


def test_single_under_torchrun(torchrun) -> None:
    """Fault: eight runs in one directory, each as if it were alone."""
    torchrun()
    with pytest.raises(UserError, match="mode is single, but torchrun started 8 processes"):
        join("single")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"LOCAL_RANK": None, "MASTER_PORT": None}, "but not LOCAL_RANK, MASTER_PORT"),
        ({"WORLD_SIZE": "eight"}, "whole numbers .*'eight'"),
    ],
)
def test_half_of_torchruns_environment(torchrun, changes: dict, words: str) -> None:
    """Faults: a default local rank of 0, which puts all processes of a node on one card."""
    torchrun(**changes)
    with pytest.raises(UserError, match=words):
        join("auto")


def test_an_npu_without_torch_npu(torchrun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a fall-back to the CPU that nobody asked for."""
    monkeypatch.setitem(sys.modules, "torch_npu", None)
    with pytest.raises(UserError, match=re.escape('pip install -e ".[npu]"')):
        join("auto", "npu")
    assert join("auto", "auto").device.type == "cpu"


def test_more_ranks_than_cards(torchrun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: two ranks on one card; the current device left at the first."""
    current = []
    module = SimpleNamespace(device_count=lambda: 2, set_device=current.append)
    monkeypatch.setattr(torch, "get_device_module", lambda kind: module)
    assert distribution._device("cuda", 1) == torch.device("cuda", 1)
    assert current == [1]
    with pytest.raises(UserError, match="local rank 2 needs card 2, but 2 are visible"):
        distribution._device("cuda", 2)


def test_a_device_of_no_backend(torchrun) -> None:
    with pytest.raises(UserError, match="device is meta; choose one of auto, cpu, cuda"):
        join("auto", "meta")


def test_backends_follow_the_device() -> None:
    """Fault: nccl asked for on an Ascend machine."""
    assert distribution.BACKENDS == {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
