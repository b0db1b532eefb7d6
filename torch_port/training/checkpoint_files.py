"""A run's checkpoints on disk: their names, which of them is the newest, and which are kept."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from torch_port.data.atomic import is_temporary, remove_directory
from torch_port.errors import UserError
from torch_port.formats.port import read_port

_NAME = "step-[0-9]{8,}"
SAVE_FILE = "save.json"  # beside run.json: what only the keeping of checkpoints asks for


@dataclass(frozen=True)
class SavedStep:
    """One checkpoint: the steps that were taken before it, its directory, its metric if any."""

    step: int
    path: Path
    metric: float | None = None


def step_directory(directory: Path, step: int) -> Path:
    """Return where the checkpoint of a step lies.

    >>> str(step_directory(Path("out"), 500))
    'out/step-00000500'
    """
    return directory / f"step-{step:08}"


def saved_steps(directory: Path) -> list[SavedStep]:
    """Return the checkpoints of a directory, the oldest first. What has another name is none."""
    found = []
    for path in directory.glob("step-*") if directory.is_dir() else ():
        number = path.name.removeprefix("step-")
        if number.isdecimal() and len(number) >= 8 and path.is_dir():
            found.append(SavedStep(int(number), path, _metric(path)))
    return sorted(found, key=lambda saved: saved.step)


def write_save_file(place: Path, metric: float | None, world_size: int, mode: str) -> None:
    """Write what `saved_steps` reads, and by how many ranks the checkpoint was written."""
    kept = metric if metric is not None and math.isfinite(metric) else None
    content = {"metric": kept, "world_size": world_size, "mode": mode}
    (place / SAVE_FILE).write_text(json.dumps(content) + "\n", encoding="utf-8")


def _metric(path: Path) -> float | None:
    try:
        metric = json.loads((path / SAVE_FILE).read_bytes())["metric"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # keep-best has no use for it; whether it is whole is asked elsewhere
    number = type(metric) in (int, float) and math.isfinite(metric)
    return float(metric) if number else None


def newest_complete(directory: Path) -> Path | None:
    """Return the newest checkpoint of a directory, None when there is none.

    Raises UserError when it is damaged, naming what is and which older one could be used: to fall
    back without a word would train on for days from somewhere else.
    """
    found = saved_steps(directory)
    if not found:
        return None
    problem = _problem(found[-1])
    if problem is None:
        return found[-1].path
    older = next((s for s in reversed(found[:-1]) if _problem(s) is None), None)
    remedy = (
        f"remove {found[-1].path} to resume from step {older.step}, which is complete"
        if older is not None
        else "no other checkpoint there is complete; remove it to start from the beginning"
    )
    raise UserError(f"the newest checkpoint is damaged: {problem}; or {remedy}")


def _problem(saved: SavedStep) -> str | None:
    """Say what is wrong with a checkpoint, if something is; tensors' values are not read."""
    try:
        training = read_port(saved.path).training
    except UserError as error:
        return str(error)
    step = None if training is None else training["step"]
    if step != saved.step:
        return f"{saved.path}: its record is of step {step}; give it the name that it had"
    return None


def superfluous(
    found: Sequence[SavedStep], keep_last: int, keep_best: int, written: int
) -> list[SavedStep]:
    """Return the checkpoints that are neither of the newest nor of the best; never `written`.

    >>> found = [SavedStep(s, Path(), m) for s, m in ((1, 0.9), (2, None), (3, 0.2), (4, 0.3))]
    >>> [saved.step for saved in superfluous(found, keep_last=1, keep_best=1, written=4)]
    [2, 3]
    """
    newest = sorted(found, key=lambda saved: saved.step)[-keep_last:]
    measured = [(s.metric, s.step) for s in found if s.metric is not None]
    best = sorted(measured, reverse=True)[:keep_best]  # of equals the newer one
    kept = {saved.step for saved in newest} | {step for _, step in best} | {written}
    return [saved for saved in found if saved.step not in kept]


def remove(superfluous: Sequence[SavedStep]) -> None:
    """Delete checkpoints, each whole or not at all. Raises UserError when one cannot be."""
    for saved in superfluous:
        try:
            remove_directory(saved.path)
        except OSError as error:
            raise UserError(
                f"{saved.path}: cannot be removed ({error.strerror}), and checkpoints that stay "
                "would fill the disk; give this user the right to remove it"
            ) from None


def remove_temporaries(directory: Path) -> None:
    """Delete what saves that were killed left behind. No save may be under way."""
    for path in directory.iterdir():
        if is_temporary(path, _NAME):
            shutil.rmtree(path, ignore_errors=True)
