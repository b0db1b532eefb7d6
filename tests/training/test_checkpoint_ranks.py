"""Checkpoints of several ranks, as processes: resharded, refused by all, killed at any moment."""

from __future__ import annotations

import errno
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_toys import KEPT, ToyRun, ranks_of, run_ranks, same, start
from torch import Tensor

from torch_port.errors import UserError
from torch_port.formats.convert import convert, read_checkpoint
from torch_port.formats.port import read_port
from torch_port.training import checkpoint_shards, checkpoints


def alone(until: int) -> dict[str, Tensor]:
    """What one process without a checkpoint has after so many steps."""
    run = ToyRun(Path("nowhere"))
    run.train(until)
    return run.tensors()


def two_ranks_save(rank: int, world_size: int, place: Path) -> None:
    for mode in ("ddp", "fsdp"):
        with ranks_of(place / f"meeting-{mode}", rank, world_size, mode) as ranks:
            run = ToyRun(place / f"two-{mode}", ranks)
            run.train(5)
            torch.manual_seed(100 + rank)
            run.save(wait=False)
            drawn = torch.rand(2)
            run.train(8)
            end = run.tensors()
            run.checkpoints.wait()
            # On the same ranks: bit for bit, each rank's random numbers among it.
            again = ToyRun(place / f"two-{mode}", ranks, seed=7)
            again.resume()
            assert torch.equal(torch.rand(2), drawn)
            t2d, d2t = again.draft.t2d, again.draft.d2t
            assert (t2d.dtype, d2t.dtype) == (torch.bool, torch.int64)
            assert t2d.nonzero().squeeze(1).tolist() == list(KEPT)
            assert d2t.tolist() == [kept - i for i, kept in enumerate(KEPT)]
            assert again.draft.kept_target_ids().tolist() == list(KEPT)
            again.train(8)
            same(again.tensors(), end)
            same(end, alone(8))


def four_ranks_go_on(rank: int, world_size: int, place: Path) -> None:
    with ranks_of(place / "meeting-4", rank, world_size, "fsdp") as ranks:
        for saved in ("two-ddp", "two-fsdp", "one"):
            run = ToyRun(place / "four", ranks, seed=7)
            torch.manual_seed(rank)
            drawn = torch.rand(2)
            torch.manual_seed(rank)
            run.load(place / saved / "step-00000005")
            assert torch.equal(torch.rand(2), drawn)  # other ranks: their generators are left alone
            same(run.tensors(), alone(5))
        run.train(8)
        run.save()


def two_ranks_go_on(rank: int, world_size: int, place: Path) -> None:
    for mode in ("fsdp", "ddp"):
        with ranks_of(place / f"last-{mode}", rank, world_size, mode) as ranks:
            run = ToyRun(place / "four", ranks, seed=7, offload=True)
            run.resume()
            same(run.tensors(), alone(8))
            one_fails_all_raise(run, rank, place)


def one_fails_all_raise(run: ToyRun, rank: int, place: Path) -> None:
    """What only rank 1 meets, in a save and in a load, both ranks tell."""
    mine = pytest.MonkeyPatch()

    def full(*args: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def torn(*args: Any) -> None:
        raise UserError("a shard is torn")

    run.train(run.step + 1)
    if rank == 1:
        mine.setattr(checkpoint_shards, "write_safetensors", full)
    with pytest.raises(UserError, match="was not written; the disk is full") as raised:
        run.save()
    mine.undo()
    texts = [""] * 2
    dist.all_gather_object(texts, str(raised.value))
    assert texts[0] == texts[1]
    assert [path.name for path in (place / "four").iterdir()] == ["step-00000008"]
    if rank == 1:
        mine.setattr(checkpoints, "read_shards", torn)
    with pytest.raises(UserError, match="a shard is torn"):
        run.resume()
    mine.undo()
    if rank == 1:  # as where each host has a disk of its own
        mine.setattr(Path, "is_dir", lambda path: path.name[0] != "." and os.path.isdir(path))
    with pytest.raises(UserError, match="rank 1 does not see what rank 0 wrote"):
        run.save()
    mine.undo()
    run.resume()
    assert run.step == 8


def test_a_checkpoint_goes_on_with_any_number_of_ranks(tmp_path: Path) -> None:
    """Field-note 16 and contracts §3: ddp and fsdp, 1, 2 and 4 ranks, in real processes.

    Masters, moments, buffers, weights: equal bits, against one process that was never saved. 5 rows
    of a head and 8 of a norm are cut unevenly, some ranks hold none of a tensor.
    Faults: a rank's part taken for the whole; padding written; replicas written by all; a bool
    buffer sharded; random states of another topology taken; an error of one rank that hangs the
    others, or leaves files behind.
    """
    one = ToyRun(tmp_path / "one")
    one.train(5)
    one.save()
    run_ranks(two_ranks_save, 2, tmp_path)
    run_ranks(four_ranks_go_on, 4, tmp_path)
    expected = {"one": 5, "two-ddp": 5, "two-fsdp": 5, "four": 8}
    for name, step in expected.items():
        run = ToyRun(tmp_path / name, seed=7)
        run.resume()
        assert run.step == step
        same(run.tensors(), alone(step))
    sizes = [path.stat().st_size for path in (tmp_path / "two-ddp").glob("*/rank-*")]
    total = sum(tensor.nbytes for tensor in alone(5).values())
    assert len(sizes) == 2
    assert sum(sizes) < total + 2 * 20_000  # the headers; not twice the state
    assert max(sizes) < 0.7 * sum(sizes)
    # The other readers: convert, show and load put the ranks' parts together.
    read = read_checkpoint(tmp_path / "four" / "step-00000008")
    whole = {name: ref.load() for name, ref in (read.weights | read.optimizer).items()}
    same(whole, alone(8))
    assert len(list((tmp_path / "four" / "step-00000008").glob("rank-*.safetensors"))) == 4
    convert(tmp_path / "four" / "step-00000008", tmp_path / "hf", "hf")
    weights = {name: ref.load() for name, ref in read_checkpoint(tmp_path / "hf").weights.items()}
    same(weights, {n: t for n, t in alone(8).items() if not n.startswith("optimizer.")})
    run_ranks(two_ranks_go_on, 2, tmp_path)


# --- Killed --------------------------------------------------------------------------------------

KILLS = 6


def endless(rank: int, world_size: int, place: Path, life: int) -> None:
    """Train and save without end, from the newest checkpoint on."""
    with ranks_of(place / f"meeting-{life}", rank, world_size, "ddp") as ranks:
        run = ToyRun(place / "run", ranks, keep_last=3)
        run.resume()
        same(run.tensors(), alone(run.step))
        while True:
            run.train(run.step + 1)
            run.save(wait=False)


def test_kills_at_any_moment_lose_no_checkpoint(tmp_path: Path) -> None:
    """SIGKILL of two ranks, one a moment before the other, mid-save for the most part.

    Faults: a checkpoint under its name before its last byte is there; the last complete one deleted
    before the next is; a leftover taken for a checkpoint; another state than the uninterrupted
    run's after a resume.
    """
    draw, newest, mid_save = random.Random(0), 0, 0
    directory = tmp_path / "run"
    for life in range(KILLS):
        ranks = [start(endless, rank, 2, tmp_path, life) for rank in range(2)]
        end = time.monotonic() + 60
        while steps(directory)[-1:] <= [newest]:  # until one more checkpoint is there
            assert all(process.is_alive() for process in ranks)
            assert time.monotonic() < end
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.1))
        for process in draw.sample(ranks, 2):
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            time.sleep(draw.choice([0, 0.01]))
        for process in ranks:
            process.join(30)
        mid_save += any(path.name.startswith(".") for path in directory.iterdir())
        found = steps(directory)
        for step in found:
            record = read_port(directory / f"step-{step:08}").training
            assert record is not None
            assert record["step"] == step
        assert found[-1] > newest
        newest = found[-1]
    assert mid_save
    run = ToyRun(directory, seed=7)
    run.resume()
    assert run.step == newest
    same(run.tensors(), alone(newest))
    run.train(newest + 1)
    run.save()
    assert not [path for path in directory.iterdir() if path.name.startswith(".")]


def steps(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in directory.glob("step-*"))
