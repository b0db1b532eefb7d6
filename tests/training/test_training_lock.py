"""Two runs in one directory, of which the second is refused."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from torch_port.errors import UserError
from torch_port.run import load_run
from torch_port.training.run_lock import LOCK, only_run
from torch_port.training.toy_run import write_toy_run
from torch_port.training.trainer import run_training

_HOLD = """
import sys, time
from pathlib import Path
from torch_port.training.run_lock import only_run
with only_run(Path(sys.argv[1]), 0, None):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    """Faults: two runs write one directory; a killed run's lock stays; the error names nobody."""
    out = tmp_path / "out"
    first = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(out)], stdout=subprocess.PIPE, text=True
    )
    assert first.stdout is not None
    assert first.stdout.readline() == "held\n"
    run = load_run(write_toy_run(tmp_path / "toy"), [f"training.out={out}"])
    with pytest.raises(UserError, match=rf"training.out: .* in use .*process {first.pid} on "):
        run_training(run, Console(quiet=True))
    assert {path.name for path in out.iterdir()} == {LOCK}
    first.send_signal(signal.SIGKILL)
    first.wait()
    first.stdout.close()
    with only_run(out, 0, None):
        assert f"process {os.getpid()} on" in (out / LOCK).read_text()
    with only_run(out, 0, None):  # the block's end lets go
        pass


def test_other_ranks_hold_nothing(tmp_path: Path) -> None:
    """Fault: rank 1 is refused because rank 0 of its own run holds the directory."""
    with only_run(tmp_path, 0, None), only_run(tmp_path, 1, None):
        pass


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """Fault: a traceback of mkdir's."""
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(UserError, match=r"training.out: .*file: File exists; make it"),
        only_run(tmp_path / "file", 0, None),
    ):
        pass


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fault: training is impossible where the file system cannot lock."""

    def unsupported(lock: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    with pytest.warns(UserWarning, match="cannot be locked"), only_run(tmp_path, 0, None):
        pass
