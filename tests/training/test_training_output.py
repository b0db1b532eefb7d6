"""A run's log: lines, JSON lines after kills and failed writes, TensorBoard's events."""

from __future__ import annotations

import io
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from output_toys import GIB, SUMMARY, ToyRanks, draft, open_log, quiet, report, target, toy_run
from rich.console import Console

from torch_port.data.order import Split
from torch_port.training import output
from torch_port.training.log_files import JsonLines, read_log
from torch_port.training.summary import show_summary, summarise

NO_BOARD: dict[str, Any] = {"training": {"tensorboard": False}}


def plain() -> tuple[Console, io.StringIO]:
    stream = io.StringIO()
    return Console(file=stream, width=200), stream


def steps(path: Path, kind: str = "train") -> list[int]:
    return [record["step"] for record in read_log(path, kind)]


# --- JSON lines ---


def test_a_record_says_all_of_its_steps(tmp_path: Path) -> None:
    """Faults: the last step's loss in place of the window's; flags of steps before the last record;
    a NaN that is no JSON."""
    with open_log(tmp_path, quiet(), **NO_BOARD) as log:
        log.step(report(1, norm=3.0), 10, 0.5)
        log.step(report(2, norm=90.0, taken=False, spike=True), 10, 0.5)
        log.record(2, {"loss": 2.5, "acc": float("nan"), "accept_position": [0.5, float("inf")]})
        log.step(report(3, norm=4.0), 10, 0.5)
        log.record(3, {"loss": 2.25})
        log.record(4, {})  # none of its steps was finite
        log.stopped(4)
    for line in (tmp_path / "log.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    start, memory, spike, first, second, third, stopped = read_log(tmp_path / "log.jsonl")
    assert (start["kind"], start["step"], start["trained"]) == ("start", 0, 1_234_567)
    assert memory["kind"] == "memory"
    assert memory["estimated_bytes"] == 5 * GIB
    assert 2**26 < memory["measured_bytes"] < 2**36  # bytes, not KiB
    assert (spike["kind"], spike["step"], spike["gradient_norm"], spike["taken"]) == (
        "spike",
        2,
        90.0,
        False,
    )
    assert (first["loss"], first["acc"], first["accept_position"]) == (2.5, None, [0.5, None])
    assert first["not_finite"] == ["acc", "accept_position"]
    assert (first["skipped"], first["spikes"], first["epoch"]) == (1, 1, 0.2)  # 10 steps an epoch
    assert (first["gradient_norm"], first["rate"]) == (90.0, 1e-3)
    assert (second["skipped"], second["spikes"], second["loss"]) == (0, 0, 2.25)
    assert "not_finite" not in second
    assert "loss" not in third
    assert (stopped["kind"], stopped["step"]) == ("stopped", 4)


KILLED = """
import sys
import time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from output_toys import open_log, quiet, report
log = open_log(Path(sys.argv[2]), quiet(), training={"tensorboard": False})
for step in range(1, 10**9):
    log.step(report(step), 10, 0.5)
    log.record(step, {"loss": float(step)})
    print(step, flush=True)
"""


def test_after_a_kill_each_step_is_there_once(tmp_path: Path) -> None:
    """Faults: records that lie in a buffer when the kill comes; those of the killed run doubled."""
    path = tmp_path / "log.jsonl"
    command = [sys.executable, "-c", KILLED, str(Path(__file__).parent), str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [int(child.stdout.readline()) for _ in range(40)]
        child.send_signal(signal.SIGKILL)
        said += map(int, child.stdout.read().split())
    assert child.returncode == -signal.SIGKILL
    written = steps(path)
    assert written == list(range(1, len(written) + 1))
    assert len(written) >= said[-1]
    with open_log(tmp_path, quiet(), start=10, **NO_BOARD) as log:
        for step in (11, 12):
            log.step(report(step), 10, 0.5)
            log.record(step, {"loss": -1.0})
    assert steps(path) == list(range(1, 13))
    losses = [record["loss"] for record in read_log(path, "train")]
    assert losses == [*map(float, range(1, 11)), -1.0, -1.0]
    assert steps(path, "start") == [0, 10]  # a reader sees that the run was continued


def test_a_half_written_last_line_is_cut(tmp_path: Path) -> None:
    """Faults: the next record glued to half a line; a whole line lost with it."""
    path = tmp_path / "log.jsonl"
    whole = b'{"kind": "train", "step": 1}\n{"kind": "train", "step": 2}\n'
    for rest in (b'{"kind": "tra', b"{", b'{"kind": "train", "step": 3}'):
        path.write_bytes(whole + rest)
        assert steps(path) == [1, 2]  # also for a reader that comes before the next start
        lines = JsonLines(path, last_step=5)
        assert lines.removed == 1
        lines.write({"kind": "train", "step": 4})
        lines.close()
        assert steps(path) == [1, 2, 4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.jsonl"]
    path.write_bytes(b"no record\n" + whole)
    with pytest.raises(ValueError, match="line 1 is no JSON object"):
        read_log(path)


def test_a_full_disk_ends_no_run_and_breaks_no_line(tmp_path: Path) -> None:
    """Faults: a run of days ended by its log; half a line that the next record joins."""
    console, shown = plain()
    path = tmp_path / "log.jsonl"
    log = open_log(tmp_path, console, **NO_BOARD)
    log.record(1, {"loss": 1.0})
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The system takes 20 more bytes of the file, then none.
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, before[1]))
    try:
        log.record(2, {"loss": 1.0})
        log.record(3, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    log.record(4, {"loss": 1.0})
    log.__exit__(None, None, None)
    assert steps(path) == [1, 4]
    assert path.read_bytes().count(b"\n") == len(read_log(path))
    assert shown.getvalue().count("log.jsonl cannot be written") == 1


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    """Fault: eight ranks in one file."""
    console, shown = plain()
    place = tmp_path / "run"
    with open_log(place, console, ranks=ToyRanks(rank=1, world_size=2)) as log:
        log.step(report(1, taken=False, spike=True), 10, 0.5)
        log.record(1, {"loss": 1.0})
        log.validation(1, {"loss": 1.0})
        log.checkpoint(1, place)
        log.warn("something")
    assert not place.exists()
    assert shown.getvalue() == ""


# --- Lines and table ---


def test_plain_lines_come_every_few_seconds_and_with_each_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults: a line a step in a log file of days; two at a record; an ETA that counts the steps
    before a resume as made in this run's time."""
    now = [1000.0]
    monkeypatch.setattr(output.time, "monotonic", lambda: now[0])
    console, shown = plain()
    every_14 = {"training": {"tensorboard": False, "log_every": 14}}
    with open_log(tmp_path, console, start=4, **every_14) as log:
        shown.truncate(0)
        for step in range(5, 20):
            now[0] += 1
            log.step(report(step), 10, 0.5)
            if step == 14:
                values = {"loss": 2.5, "tau_probabilistic": 1.75, "tokens_per_second": 4321.0}
                log.record(step, {**values, "accept_position": [0.5]})
    lines = [line for line in shown.getvalue().replace("\0", "").splitlines() if "ETA" in line]
    assert lines == [
        # 5 seconds for 5 of the run's 16 steps that were left: 11 more.
        "step 9/20  epoch 0.90  loss 2  20 tokens/s  ETA 0:00:11",
        "step 14/20  epoch 1.40  loss 2.5  τ 1.75  4,321 tokens/s  ETA 0:00:06",
        "step 19/20  epoch 1.90  loss 2.5  τ 1.75  20 tokens/s  ETA 0:00:01",
    ]


def test_a_terminal_gets_a_bar(tmp_path: Path) -> None:
    """Faults: no bar; a warning's [brackets] read as markup."""
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with open_log(tmp_path, console, **NO_BOARD) as log:
        log.step(report(1), 10, 0.5)
        log.warn("layer [bold]")
        log.record(1, {"loss": 2.5, "tau_probabilistic": 1.75})
        log.step(report(2), 10, 0.5)
    shown = stream.getvalue()
    assert "2/20" in shown
    assert "τ 1.75" in shown
    assert "warning: layer [bold]" in shown


def test_the_summary_says_what_is_trained() -> None:
    """Faults: frozen parameters counted as trained; padding or untrainable samples among a step's
    tokens; K and V swapped."""
    model = draft()
    loader = SimpleNamespace(
        features=SimpleNamespace(lengths=[10, 20, 30, 40]),
        samples=[0, 1, 3],
        untrainable=1,
        steps_per_epoch=5,
        split=Split(batch_size=3, accumulation=1, world_size=2),
    )
    cpu = torch.device("cpu")
    made = summarise(toy_run(), model, target(model), loader, mode="ddp", device=cpu)  # type: ignore[arg-type]
    # By hand: fc 16×8; two layers of q, o 16×8, k, v 8×8, three MLP matrices 8×12, norms 2×8 and
    # 2×4; hidden and final norm; W1 and W2 32×3; confidence 8 + 3 and a bias.
    layer = 2 * 128 + 2 * 64 + 3 * 96 + 16 + 8
    assert made.trained == 128 + 2 * layer + 16 + 2 * 96 + 12
    assert made.frozen == 2 * 32 * 8
    assert (made.samples, made.untrainable, made.samples_per_step) == (3, 1, 6)
    assert made.tokens_per_step == 140  # 6 of a mean of 70/3
    # float32: weights, gradients, two moments; and the target.
    assert made.memory.state == 16 * made.trained + 4 * made.frozen
    assert (made.map_file, made.coverage, made.mode, made.ranks) == (None, None, "ddp", 2)
    console, shown = plain()
    show_summary(SUMMARY, 25, 4, console)
    table = shown.getvalue()
    for text in (
        "1,234,567 parameters trained",
        "64,000 of 248,320 ids, 99.12% of the corpus' supervised tokens (runs/map.safetensors)",
        "1,000; 7 left out (no anchor candidate)",
        "25 of 10 an epoch: 2.50 epochs; continued after step 4",
        "96 samples, about 65,000 tokens",
        "8, fsdp, npu:0, bfloat16",
        "3.0 GiB of state on each rank, about 5.0 GiB at the peak",
        "2 a step",
    ):
        assert text in table


# --- TensorBoard ---


def scalars(directory: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return {
        tag: [(event.step, event.value) for event in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def test_tensorboard_has_every_metric_and_no_step_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults: per-slot acceptance missing or a slot off; steps of the killed run beside those that
    were made again; events held back when a checkpoint says that they are behind it."""
    values = {"loss": 2.0, "acc": 0.25, "accept_position": [0.5, 0.125]}
    from tensorboard.summary.writer.record_writer import RecordWriter

    write = RecordWriter.write

    def slowly(writer: RecordWriter, data: bytes) -> None:  # a thread of tensorboard's calls it
        time.sleep(0.005)
        write(writer, data)

    monkeypatch.setattr(RecordWriter, "write", slowly)
    log = open_log(tmp_path, quiet())  # not closed: as after a kill
    log.record(1, values)
    log.validation(1, {"tau_probabilistic": 1.5, "accept_position": [0.25, 0.0]})
    log.record(2, values)
    log.checkpoint(2, tmp_path / "checkpoint")
    before = scalars(tmp_path)
    assert before["accept/slot_00"] == [(1, 0.5), (2, 0.5)]
    assert before["accept/slot_01"] == [(1, 0.125), (2, 0.125)]
    assert before["validation/tau_probabilistic"] == [(1, 1.5)]
    assert before["validation/accept/slot_00"] == [(1, 0.25)]
    with open_log(tmp_path, quiet(), start=1) as again:
        again.record(2, {**values, "acc": 0.75})
        again.record(3, values)
    log.__exit__(None, None, None)
    after = scalars(tmp_path)
    assert after["train/acc"] == [(1, 0.25), (2, 0.75), (3, 0.25)]
    assert after["train/loss"] == [(1, 2.0), (2, 2.0), (3, 2.0)]
    assert "train/memory_peak_gib" in after


def test_a_dflash_blocks_first_prediction_is_slot_1(tmp_path: Path) -> None:
    """Fault: slot 0, which holds the anchor, said to be accepted; EAGLE3's steps called slots."""
    for algorithm, name, tags in (
        ("dflash", "accept_position", ["accept/slot_01", "accept/slot_02"]),
        ("eagle3", "accept_step", ["accept/step_00", "accept/step_01"]),
    ):
        with open_log(tmp_path / algorithm, quiet(), algorithm=algorithm) as log:
            log.record(1, {name: [0.5, 0.25]})
        found = scalars(tmp_path / algorithm)
        assert [found[tag] for tag in tags] == [[(1, 0.5)], [(1, 0.25)]]


def test_no_tensorboard_where_none_is_asked_for(tmp_path: Path) -> None:
    """Fault: the setting is not read."""
    with open_log(tmp_path, quiet(), **NO_BOARD) as log:
        log.record(1, {"loss": 1.0})
    assert [entry.name for entry in tmp_path.iterdir()] == ["log.jsonl"]
