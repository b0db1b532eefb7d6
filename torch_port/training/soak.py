"""The soak: a tiny run of several processes, killed again and again, must end as if it never was.

A reference run is never interrupted and keeps every checkpoint. The soaked run has the same files;
its processes are killed (SIGKILL, at moments drawn at random, all at once or one before the others,
as torchrun does it) and started again. After every kill each checkpoint that is there must be
complete and equal to the reference's of the same step, bit for bit, and the newest must not be
older than before. A soaked run that reaches its last step is begun anew.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file

from torch_port.errors import UserError
from torch_port.formats.port import RUN_FILE, read_port
from torch_port.progress import stage
from torch_port.training.toy_run import write_toy_run

STEPS, EVERY = 240, 4  # of a round, and between its checkpoints
_LIFE = 40  # steps that a run may take at most before it is killed
_MOST_SECONDS = 600.0  # of a run that nobody kills
_NOT_COMPARED = {"metric"}  # validation is reduced in the ranks' order of arrival


@dataclass
class Soaked:
    """What a soak saw.

    `kills`; `in_save`: kills that left an unfinished checkpoint behind; `resumes`: starts that went
    on from a checkpoint; `rounds`: times that the last step was reached; `compared`: checkpoints
    that were compared with the reference. `problems`: each lost, damaged or different checkpoint.
    """

    kills: int = 0
    in_save: int = 0
    resumes: int = 0
    rounds: int = 0
    compared: int = 0
    problems: list[str] = field(default_factory=list)


def soak(
    directory: Path,
    kills: int,
    console: Console,
    *,
    processes: int = 2,
    mode: str = "fsdp",
    seed: int = 0,
) -> Soaked:
    """Kill a toy run `kills` times and compare what it saved.

    Arguments: a new directory for the runs; how many kills; the console for progress; ranks of a
    run; `distribution.mode`; seed of the moments.
    Raises UserError when the directory is there or a run that nobody killed failed.
    """
    if directory.exists():
        raise UserError(f"{directory} exists; give a new directory for the soak's runs")
    run_file = write_toy_run(directory)
    common = [
        f"distribution.mode={mode if processes > 1 else 'single'}",
        f"optimizer.total_steps={STEPS}",
        f"checkpoints.every={EVERY}",
    ]
    reference = directory / "reference"
    kept = [*common, f"training.out={reference}", "checkpoints.keep_last=1000"]
    first, step = _timed(run_file, kept, reference, processes)
    wanted = {path.name: path for path in _complete(reference)}
    found, draw = Soaked(), random.Random(seed)
    out = directory / "soaked"
    overrides = [*common, f"training.out={out}", "checkpoints.keep_last=3"]
    newest, checked = 0, dict[str, int]()
    with stage("soak", kills, console) as progress:
        while found.kills < kills:
            found.resumes += newest > 0
            alive = _start(run_file, overrides, processes)
            if _kill_within(alive, draw.uniform(0.7 * first, first + _LIFE * step), draw):
                found.kills += 1
            before = newest
            newest = _check(out, wanted, found, checked)
            if newest < before:
                found.problems.append(f"kill {found.kills}: step {before} was there, {newest} is")
            if newest == STEPS:
                found.rounds += 1
                shutil.rmtree(out)
                newest, checked = 0, {}
            progress.update(found.kills, f"{found.compared} compared, {len(found.problems)} wrong")
    if newest:
        _finish(run_file, overrides, processes)
        _check(out, wanted, found, checked)
        found.rounds += 1
    return found


def _timed(
    run_file: Path, overrides: Sequence[str], out: Path, processes: int
) -> tuple[float, float]:
    """Run without a kill; return the seconds until its first checkpoint is there, and of a step."""
    began = time.monotonic()
    alive = _start(run_file, overrides, processes)
    while not _complete(out) and alive[0].exitcode is None:
        time.sleep(0.01)
    first = time.monotonic() - began
    _join(alive)
    return first, (time.monotonic() - began - first) / (STEPS - EVERY)


def _complete(out: Path) -> list[Path]:
    """The directories that bear a checkpoint's name."""
    return sorted((out / "checkpoints").glob("step-*"))


def _check(out: Path, wanted: dict[str, Path], found: Soaked, checked: dict[str, int]) -> int:
    """Compare what is there with the reference, each checkpoint once; return the newest step."""
    names = [path.name for path in _complete(out)]
    if (out / "checkpoints").is_dir():
        others = [p for p in (out / "checkpoints").iterdir() if p.name not in names and p.is_dir()]
        found.in_save += bool(others)
    for name in names:
        stamp = (out / "checkpoints" / name / RUN_FILE).stat().st_mtime_ns
        if checked.get(name) == stamp:
            continue
        checked[name] = stamp
        found.compared += 1
        difference = _difference(out / "checkpoints" / name, wanted[name])
        if difference is not None:
            found.problems.append(f"kill {found.kills}, {name}: {difference}")
    return max((int(name.removeprefix("step-")) for name in names), default=0)


def _difference(one: Path, reference: Path) -> str | None:
    """Say how two checkpoints differ; None when tensors and records are equal."""
    try:
        read_port(one)
        ours, theirs = _tensors(one), _tensors(reference)
    except (UserError, OSError, SafetensorError) as error:
        return f"cannot be read: {error}"
    if ours.keys() != theirs.keys():
        return f"holds {sorted(ours.keys() ^ theirs.keys())[:3]} or lacks them"
    for name, tensor in ours.items():
        same = tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name])
        if not same:
            return f"{name} differs"
    records = [_record(path) for path in (one, reference)]
    changed = [key for key in records[0] if records[0][key] != records[1].get(key)]
    return f"run.json's {changed[0]} differs" if changed else None


def _tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every stored tensor, or part of one, by file and name."""
    return {
        f"{path.name}: {name}": tensor
        for path in sorted(checkpoint.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }


def _record(checkpoint: Path) -> dict[str, Any]:
    training: dict[str, Any] = json.loads((checkpoint / RUN_FILE).read_text())["training"]
    return {key: value for key, value in training.items() if key not in _NOT_COMPARED}


def _finish(run_file: Path, overrides: Sequence[str], processes: int) -> None:
    """Run without a kill. Raises UserError when that fails."""
    _join(_start(run_file, overrides, processes))


def _join(alive: Sequence[BaseProcess]) -> None:
    for process in alive:
        process.join(_MOST_SECONDS)
    codes = [process.exitcode for process in alive]
    if any(code != 0 for code in codes):
        for process in alive:
            process.kill()
        raise UserError(f"a run that nobody killed ended with exit codes {codes}")


def _kill_within(alive: Sequence[BaseProcess], seconds: float, draw: random.Random) -> bool:
    """Kill the processes after a time; False when they had ended by themselves."""
    alive[0].join(seconds)
    if all(process.exitcode is not None for process in alive):
        return False
    for process in draw.sample(list(alive), len(alive)):
        if process.pid is not None and process.exitcode is None:
            os.kill(process.pid, signal.SIGKILL)
        if draw.random() < 0.3:
            time.sleep(draw.uniform(0, 0.2))
    for process in alive:
        process.join()
    return True


def _start(run_file: Path, overrides: Sequence[str], processes: int) -> list[BaseProcess]:
    """Start the ranks, each a process of its own. Imports are made once, in a server."""
    context = get_context("forkserver")
    # torch._dynamo: FSDP2 imports it when it is used, 1.2 s of every start.
    context.set_forkserver_preload(["torch_port.training.trainer", "torch._dynamo"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started: list[BaseProcess] = []
    for rank in range(processes):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "MASTER_PORT": port}
        arguments = (run_file, list(overrides), place if processes > 1 else {})
        process = context.Process(target=_train, args=arguments)
        process.start()
        started.append(process)
    return started


def _train(run_file: Path, overrides: list[str], place: dict[str, int]) -> None:
    """One rank of a run, in a process of its own."""
    from torch_port.run import load_run
    from torch_port.training.trainer import run_training

    os.environ |= {name: str(value) for name, value in place.items()}
    if place:
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    torch.set_num_threads(1)
    status = 0
    try:
        run_training(load_run(run_file, overrides), Console(quiet=True))
    except UserError as error:
        status = 2
        print(f"rank {place.get('RANK', 0)}: {error}", flush=True)
    except RuntimeError:
        status = 1  # of a collective whose other end was killed
    os._exit(status)  # torch's own threads can abort a process that cleans up
