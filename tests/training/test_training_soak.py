"""A run of two processes, killed four times; `torch-port soak` does it three hundred times."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from torch_port.formats.port import RUN_FILE
from torch_port.run import load_run
from torch_port.training.soak import Soaked, _check, soak
from torch_port.training.toy_run import write_toy_run
from torch_port.training.trainer import run_training


def test_four_kills_lose_and_change_nothing(tmp_path: Path) -> None:
    """Faults: a checkpoint is renamed before all of it is written; a resume repeats or skips a
    step; what a killed save leaves is taken for a checkpoint."""
    found = soak(tmp_path / "soak", 4, Console(quiet=True))
    assert found.problems == []
    assert found.kills == 4
    assert found.resumes >= 1  # a kill can come before the first checkpoint
    assert found.compared >= 4


def _flip_a_bit(place: Path) -> None:
    """The last bit of the last tensor; the recorded digests are of headers and still fit."""
    [file] = place.glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def _change_the_record(place: Path) -> None:
    text = (place / RUN_FILE).read_text()
    assert '"updates": 4' in text
    (place / RUN_FILE).write_text(text.replace('"updates": 4', '"updates": 3'))


def _lose_a_file(place: Path) -> None:
    [file] = place.glob("*.safetensors")
    file.unlink()


def test_the_soak_sees_a_checkpoint_that_is_wrong(tmp_path: Path) -> None:
    """Fault: the soak compares nothing, or too little: it passes whatever it is shown."""
    run_file = write_toy_run(tmp_path / "toy")
    whole = tmp_path / "whole"
    overrides = [f"training.out={whole}", "optimizer.total_steps=5", "checkpoints.every=4"]
    run_training(load_run(run_file, overrides), Console(quiet=True))
    reference = whole / "checkpoints" / "step-00000004"
    wanted = {reference.name: reference}
    spoilers: tuple[Callable[[Path], None], ...] = (_flip_a_bit, _change_the_record, _lose_a_file)
    for spoil in spoilers:
        out = tmp_path / spoil.__name__
        shutil.copytree(reference, out / "checkpoints" / reference.name)
        good, bad = Soaked(), Soaked()
        assert _check(out, wanted, good, {}) == 4
        assert good.problems == []
        spoil(out / "checkpoints" / reference.name)
        _check(out, wanted, bad, {})
        assert len(bad.problems) == 1, spoil
