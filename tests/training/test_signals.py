"""SIGTERM and SIGINT: a request to stop, and all ranks stop after the same step."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from checkpoint_toys import SINGLE, ToyRun, ranks_of, run_ranks, start

from torch_port.formats.port import read_port
from torch_port.training.signals import stop_signals
from torch_port.training.toy_run import write_toy_run


def test_one_process(tmp_path: Path) -> None:
    """Faults: a process that dies of SIGTERM; handlers that stay after the run; a second SIGTERM,
    of torchrun's, taken for an order; a second SIGINT that is not."""
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with stop_signals() as stop:
        assert not stop.requested(SINGLE)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested(SINGLE)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGTERM
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested(SINGLE)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    with pytest.raises(ZeroDivisionError), stop_signals():
        raise ZeroDivisionError
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def three_ranks(rank: int, world_size: int, place: Path) -> None:
    """Rank 1 alone, then all ranks, are signalled after step 4, and save all the while."""
    with ranks_of(place / "meeting", rank, world_size, "ddp") as ranks:
        for signalled, last in (((1,), 5), ((0, 1, 2), 4)):
            run = ToyRun(place / str(last), ranks, keep_last=2)
            with stop_signals() as stop:
                while not stop.requested(ranks):
                    run.save(wait=False)
                    time.sleep(0.01 * rank)  # no two ranks come to a step's end at the same time
                    run.train(run.step + 1)
                    if run.step == 4 and rank in signalled:
                        os.kill(os.getpid(), signal.SIGTERM)
                run.save()
                assert stop.requested(ranks)
            stopped = [0] * world_size
            dist.all_gather_object(stopped, run.step)
            assert stopped == [last] * world_size


def test_all_ranks_stop_after_the_same_step(tmp_path: Path) -> None:
    """One that is signalled stops all, a step later; all that are, at once.

    Faults: a rank that stops alone, and the others wait for it; the agreement and a checkpoint's
    thread mixed up in one group; a step more than torchrun's 30 seconds have room for.
    """
    run_ranks(three_ranks, 3, tmp_path)
    for last in (4, 5):
        names = sorted(path.name for path in (tmp_path / str(last)).iterdir())
        assert names == [f"step-{last - 1:08}", f"step-{last:08}"]


def until_stopped(place: Path) -> None:
    with stop_signals() as stop:
        run = ToyRun(place, keep_last=9)
        (place / "ready").touch()
        with run.checkpoints:
            while not stop.requested(SINGLE):
                run.train(run.step + 1)
                run.save(wait=False)
                if run.step == 2:
                    os.kill(os.getpid(), signal.SIGTERM)  # while a save is under way
                    run.train(3)
            run.save()


def test_a_signal_during_a_save(tmp_path: Path) -> None:
    """Faults: the save under way cut short; the current step not saved; a status other than 0."""
    process = start(until_stopped, tmp_path)
    process.join(60)
    assert process.exitcode == 0
    (tmp_path / "ready").unlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000001",
        "step-00000002",
        "step-00000003",
    ]
    run = ToyRun(tmp_path)
    run.resume()
    assert run.step == 3


def in_session(number: int) -> list[int]:
    """The processes of a session: field 6 of /proc/PID/stat, behind the name in brackets."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == number and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


@pytest.mark.parametrize("killed", [False, True])
def test_a_signal_and_the_processes_that_read(killed: bool, tmp_path: Path) -> None:
    """SIGTERM to the whole process group, as torchrun sends it; SIGKILL to the process alone.

    The group's other processes get it first, and the run goes on for a while.
    Faults: readers that die of the first, and a run that ends with their error and saves nothing;
    readers that stay for ever after the second.
    """
    run_file = write_toy_run(tmp_path / "toy")
    saved = tmp_path / "toy" / "out" / "checkpoints"
    command = [sys.executable, "-m", "torch_port", "train", str(run_file)]
    command += ["data.workers=1", "optimizer.total_steps=100000", "checkpoints.every=10"]
    log = tmp_path / "log"
    with open(log, "wb") as stream:
        process = subprocess.Popen(
            command,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
            stdout=stream,
            stderr=stream,
        )

    def newest_after(step: int) -> int:
        end = time.monotonic() + 100
        while (newest := max((int(p.name[5:]) for p in saved.glob("step-*")), default=0)) <= step:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end
            time.sleep(0.01)
        return newest

    newest = newest_after(0)
    others = [pid for pid in in_session(process.pid) if pid != process.pid]
    assert len(others) > 1
    if killed:
        process.kill()
        process.wait(60)
    else:
        for pid in others:
            if os.getpgid(pid) == process.pid:
                os.kill(pid, signal.SIGTERM)
        newest_after(newest + 20)  # more than was read ahead
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        record = read_port(max(saved.glob("step-*"))).training
        assert record is not None
        assert f"step {record['step']}: stopped" in log.read_text()
    end = time.monotonic() + 30
    while in_session(process.pid):
        assert time.monotonic() < end
        time.sleep(0.05)
