"""What a run must not pass over: low coverage, numbers that are not finite, steps that fail so.

A saved batch is looked at with `python -m torch_port.training.watch FILE`.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from torch_port.data.atomic import atomic_file
from torch_port.data.batch import Batch
from torch_port.errors import NonFiniteError, UserError
from torch_port.training.metrics import Ranks, Values

LEAST_COVERAGE = 0.95
_FORMAT = "torch-port bad batch 1"
# The share of supervised labels, or (EAGLE3) of teacher's first choices, that the draft can say.
_COVERAGE = ("draft_vocab_coverage", "teacher_argmax_kept")


class Watch:
    """Warns of metrics once each, and ends a run after `limit` bad steps in a row, on all ranks."""

    def __init__(
        self, directory: Path, limit: int, ranks: Ranks, warn: Callable[[str], None]
    ) -> None:
        """Watch a run.

        Args:
            directory: where a bad batch is saved: the run's.
            limit: `training.stop_after_bad_steps`.
            ranks: the ranks of the run.
            warn: takes a warning's text; `TrainingLog.warn`.
        """
        self.directory, self.limit, self.ranks, self.warn = directory, limit, ranks, warn
        self.bad = 0
        self._told_coverage = False
        self._not_finite: set[str] = set()

    def metrics(self, step: int, values: Values) -> None:
        """Look at a log record: warn of low coverage once, of a metric whenever it turns bad."""
        for name in _COVERAGE:
            value = values.get(name, 1.0)
            if isinstance(value, float) and value < LEAST_COVERAGE and not self._told_coverage:
                self._told_coverage = True
                self.warn(
                    f"{name} is {value:.2%} at step {step}, below {LEAST_COVERAGE:.0%}: the rest "
                    "of the supervised tokens the draft can never propose. Build a larger map "
                    "(torch-port vocab sweep shows what each size covers), or count a corpus that "
                    "is like the training data"
                )
        bad = {name for name, value in values.items() if not _is_finite(value)}
        new = sorted(bad - self._not_finite)
        self._not_finite = bad
        if new:
            self.warn(f"not finite at step {step}: {', '.join(new)}")

    def good_step(self) -> None:
        """Say that a step was finite: bad ones before it no longer count."""
        self.bad = 0

    def bad_step(self, step: int, batches: Sequence[Batch], error: NonFiniteError) -> None:
        """Say that a step was not finite; warn, or end the run with its micro-batches saved.

        Arguments: the step; this rank's micro-batches; what `training_step` raised. Every rank
        calls it for the same steps, because the norm that was looked at is the reduced one.
        Raises UserError at the limit, on every rank, after all have saved.
        """
        self.bad += 1
        if self.bad < self.limit:
            self.warn(f"{error} ({self.bad} in a row; the run ends after {self.limit})")
            return
        path = self.directory / bad_batch_name(step, self.ranks.rank)
        try:
            save_bad_batch(path, batches, step=step, rank=self.ranks.rank, problem=str(error))
            look = f"look at it: python -m torch_port.training.watch {path}"
            if self.ranks.world_size > 1:
                look += f" (and rank1 … rank{self.ranks.world_size - 1} beside it)"
            saved = f"its micro-batches are in {path}; {look}"
        except OSError as failure:
            saved = f"its micro-batches could not be saved ({failure})"
        if self.ranks.world_size > 1:
            # A rank that ends first has torchrun end the others, who may still be writing.
            dist.barrier()
        raise UserError(
            f"{self.bad} steps in a row were not finite (training.stop_after_bad_steps is "
            f"{self.limit}); the last: {error}. {saved}"
        ) from error


def _is_finite(value: float | list[float]) -> bool:
    return all(map(math.isfinite, value if isinstance(value, list) else [value]))


def bad_batch_name(step: int, rank: int) -> str:
    """Return the name of a rank's file.

    >>> bad_batch_name(120, 3)
    'bad-batch-step-00000120-rank3.safetensors'
    """
    return f"bad-batch-step-{step:08d}-rank{rank}.safetensors"


def save_bad_batch(
    path: Path, batches: Sequence[Batch], *, step: int, rank: int, problem: str
) -> None:
    """Write a step's micro-batches of one rank, atomically; bytes as they were on the device.

    Layouts are not written, but what they are found again from. Raises OSError.
    """
    tensors: dict[str, Tensor] = {}
    layouts: list[tuple[int, str] | None] = []
    for index, batch in enumerate(batches):
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, Tensor):
                # Cloned: safetensors refuses tensors that share memory.
                tensors[f"{index}.{field.name}"] = value.detach().cpu().contiguous().clone()
        layout = batch.layout
        layouts.append(None if layout is None else (layout.block_size, layout.block_layout))
    about = {"step": step, "rank": rank, "layouts": layouts, "problem": problem}
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path) as stream:
        stream.write(save(tensors, {"format": _FORMAT, "about": json.dumps(about)}))


def load_bad_batch(path: Path) -> tuple[list[Batch], dict[str, Any]]:
    """Read what `save_bad_batch` wrote: micro-batches on the host; `step`, `rank` and `problem`.

    A batch comes back with its layout, ready for `training_step`.
    Raises UserError for another file.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: no saved batch could be read ({error})") from None
    if metadata.get("format") != _FORMAT:
        raise UserError(
            f"{path}: no saved batch; expected a bad-batch-step-….safetensors of a training run"
        )
    about = json.loads(metadata["about"])
    batches = []
    for index, laid_out in enumerate(about.pop("layouts")):
        values: dict[str, Any] = {
            field.name: tensors.get(f"{index}.{field.name}")
            for field in fields(Batch)
            if field.name != "layout"
        }
        batch = Batch(**values)
        batches.append(batch if laid_out is None else batch.laid_out(*laid_out))
    return batches, about


def show_bad_batch(path: Path, console: Console) -> None:
    """Print what a saved batch holds, tensor by tensor, and where it is not finite."""
    batches, about = load_bad_batch(path)
    title = f"step {about['step']}, rank {about['rank']}: {about['problem']}"
    table = Table("batch", "tensor", "dtype", "shape", "not finite", "least", "largest")
    for index, batch in enumerate(batches):
        for field in fields(batch):
            value = getattr(batch, field.name)
            if isinstance(value, Tensor):
                row = (str(value.dtype).removeprefix("torch."), str(list(value.shape)))
                table.add_row(str(index), field.name, *row, *_numbers(value))
    console.print(title, table, sep="\n", markup=False, highlight=False)


def _numbers(value: Tensor) -> tuple[str, str, str]:
    """Return (where it is not finite, its least and largest finite value)."""
    wide = value.double()
    fine = wide.isfinite()
    bad = int((~fine).sum())
    where = "–"
    if bad:
        first = (~fine).nonzero()[0].tolist()
        where = f"{bad:,}, the first at {first}"
    finite = wide[fine]
    if len(finite) == 0:
        return where, "–", "–"
    return where, f"{finite.min().item():.4g}", f"{finite.max().item():.4g}"


def main() -> None:
    """Show the saved batch that the command line names."""
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m torch_port.training.watch BAD-BATCH.safetensors")
    try:
        show_bad_batch(Path(sys.argv[1]), Console())
    except UserError as error:
        raise SystemExit(f"Error: {error}") from None


if __name__ == "__main__":
    main()
