"""A run's log on disk: JSON lines and TensorBoard's event files, both continued after a kill.

Every JSON line has a `kind` and a `step`. A run that goes on from step n first takes the lines of
later steps away: it makes those steps again, and a reader gets each once.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from torch_port.data.atomic import atomic_file
from torch_port.training.metrics import Values

LOG_NAME = "log.jsonl"
# One value for each slot of a block, or for each step of EAGLE3's training-time test.
_PER_PLACE = {"_position": "slot", "_step": "step"}


def read_log(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """Return a log's records, in the order they were written; those of one kind, where asked.

    A last line that is half written (a run that is writing it, or was killed there) is left out.

    Raises ValueError for another line that is no record.
    """
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    records = [_record(line) for line in lines]
    for number, record in enumerate(records, start=1):
        if record is None:
            raise ValueError(f"{path}: line {number} is no JSON object with a step")
    return [r for r in records if r is not None and kind in (None, r.get("kind"))]


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse a line; None for what is no whole record."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(record, dict) and isinstance(record.get("step"), int)
    return record if whole and line.endswith(b"\n") else None


class JsonLines:
    """A file of one JSON object a line, each handed to the system as soon as it is written.

    A killed process loses no line that was written; a line is whole, or cut at the next start.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        """Open for appending after `last_step`; later steps' lines and broken ones are removed.

        The file is replaced as a whole (rename), so that a kill here leaves the old or the new.
        `removed` says how many lines went.
        """
        self.removed = 0
        if path.exists():
            lines = path.read_bytes().splitlines(keepends=True)
            kept = [line for line in lines if _upto(line, last_step)]
            self.removed = len(lines) - len(kept)
            if self.removed:
                with atomic_file(path) as stream:
                    stream.writelines(kept)
        self._file: IO[bytes] = open(path, "ab", buffering=0)  # noqa: SIM115 - until close()
        self._end = os.fstat(self._file.fileno()).st_size

    def write(self, record: Mapping[str, Any]) -> None:
        """Append a record. Numbers that are not finite become null, named under `not_finite`.

        Raises OSError; nothing of the record stays in the file then.
        """
        whole, bad = _finite(record)
        if bad:
            whole["not_finite"] = bad
        line = (json.dumps(whole, ensure_ascii=False, allow_nan=False) + "\n").encode()
        try:
            if self._file.write(line) < len(line):
                raise OSError(f"{self._file.name}: a line could be written in part only")
        except OSError:
            os.truncate(self._file.fileno(), self._end)  # else the next line would join this one
            raise
        self._end += len(line)

    def sync(self) -> None:
        """Have the system put on disk what was written: against a power cut, not a kill."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _upto(line: bytes, step: int) -> bool:
    record = _record(line)
    return record is not None and record["step"] <= step


def _finite(record: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replace what JSON has no number for by None; return the names where that was."""
    bad = []
    whole: dict[str, Any] = {}
    for name, value in record.items():
        values = value if isinstance(value, list) else [value]
        fine = [not isinstance(x, float) or math.isfinite(x) for x in values]
        if not all(fine):
            bad.append(name)
            values = [x if good else None for x, good in zip(values, fine, strict=True)]
        whole[name] = values if isinstance(value, list) else values[0]
    return whole, bad


class TensorBoard:
    """Event files: scalars of every metric, lists place by place (accept/slot_03)."""

    def __init__(self, directory: Path, last_step: int, first_slot: int = 0) -> None:
        """Begin a new event file; events after `last_step` in older ones are void from here on.

        `first_slot`: the slot that a per-slot list begins with (a DFlash block's first is 1).
        """
        # Here: it takes seconds to import. Without tensorflow it writes by its own small stub.
        from torch.utils.tensorboard import SummaryWriter

        self._first_slot = first_slot
        self._writer: Any = SummaryWriter(str(directory), purge_step=last_step + 1)

    def write(self, group: str, values: Values, step: int) -> None:
        """Write values under `group/name`; a list of the group "train" under its own name."""
        for name, value in values.items():
            for tag, number in _tagged(group, name, value, self._first_slot):
                self._writer.add_scalar(tag, number, step)

    def flush(self) -> None:
        """Write out what a thread still holds back."""
        self._writer.flush()

    def close(self) -> None:
        """Write out and close."""
        self._writer.close()


def _tagged(
    group: str, name: str, value: float | list[float], first_slot: int
) -> Iterator[tuple[str, float]]:
    """Yield (tag, number) of a value.

    >>> list(_tagged("train", "accept_position", [0.5, 0.25], 0))
    [('accept/slot_00', 0.5), ('accept/slot_01', 0.25)]
    >>> list(_tagged("validation", "acc", 0.5, 0))
    [('validation/acc', 0.5)]
    """
    if not isinstance(value, list):
        yield f"{group}/{name}", value
        return
    place, first = "place", 0
    for ending, word in _PER_PLACE.items():
        if name.endswith(ending):
            name, place = name.removesuffix(ending), word
            first = first_slot if word == "slot" else 0
    prefix = "" if group == "train" else f"{group}/"
    for index, number in enumerate(value, start=first):
        yield f"{prefix}{name}/{place}_{index:02d}", number
