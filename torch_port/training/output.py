"""What a training run says while it runs: a terminal's bar or plain lines, JSON lines, TensorBoard.

Rank 0 writes; on other ranks every method returns at once.

Kinds of JSON lines: `start` (the summary, once for each start), `memory` (after the first step),
`train` (a log record: every metric over all ranks and the `steps` since the last one, with rate
and gradient norm of its own step), `validation`, `checkpoint`, `spike`, `warning`, `stopped`.
`epoch` is the share of epochs that were done.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from torch_port.run import RunConfig
from torch_port.training.log_files import LOG_NAME, JsonLines, TensorBoard
from torch_port.training.metrics import Ranks, Values
from torch_port.training.step import StepReport
from torch_port.training.summary import (
    RunSummary,
    first_step_memory,
    gib,
    peak_memory,
    show_summary,
)

LINE_EVERY = 5.0  # seconds between plain lines, beside those of log records
_FOLLOWED = {
    "loss": "loss",
    "tau_probabilistic": "τ",
    "acc": "acc",
    "draft_vocab_coverage": "coverage",
}


class TrainingLog:
    """A run's log, from `begin` to the end of the `with` block.

    A file that cannot be written is said once and ends no run: checkpoints are what must be kept,
    and they say so themselves when the disk is full.
    """

    def __init__(self, run: RunConfig, directory: Path, console: Console, ranks: Ranks) -> None:
        self.run, self.directory, self.ranks = run, directory, ranks
        self._console = console
        self._writes = ranks.rank == 0
        self._lines: JsonLines | None = None
        self._board: TensorBoard | None = None
        self._bar: Progress | None = None
        self._failed: set[str] = set()
        self._last: StepReport | None = None
        self._skipped = self._spikes = 0
        self._numbers = ""  # of the last record, for the bar

    def __enter__(self) -> TrainingLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        for file in (self._lines, self._board):
            if file is not None:
                self._try("log", file.close)

    def begin(
        self, summary: RunSummary, total_steps: int, steps_per_epoch: int, start_step: int
    ) -> None:
        """Open the files after `start_step` steps and show what is trained.

        Records of later steps, which a killed run left, are removed: they are made again.
        Raises OSError when the directory cannot be written: better now than after a day.
        """
        self._total, self._per_epoch, self._start = total_steps, steps_per_epoch, start_step
        self._done, self._memory = start_step, summary.memory
        self._began = self._line_at = time.monotonic()
        if not self._writes:
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self._lines = JsonLines(self.directory / LOG_NAME, start_step)
        if self.run.training.tensorboard:
            first_slot = 1 if self.run.algorithm == "dflash" else 0  # slot 0 holds the anchor
            self._board = TensorBoard(self.directory / "tensorboard", start_step, first_slot)
        show_summary(summary, total_steps, start_step, self._console)
        if self._lines.removed:
            self._print(
                f"{LOG_NAME}: lines after step {start_step} or cut short were removed "
                f"({self._lines.removed}); their steps are made again"
            )
        self._write("start", start_step, {"total_steps": total_steps, **summary.record()})
        if self._console.is_terminal:
            self._bar = _bar(self._console)
            self._task = self._bar.add_task(
                "training", total=total_steps, completed=start_step, epoch="", detail=""
            )
            self._bar.start()

    def step(self, report: StepReport, tokens: int, seconds: float) -> None:
        """Say that a step was made: `tokens` of this rank, and the time that it took."""
        if not self._writes:
            return
        first = self._done == self._start
        self._done, self._last = report.step, report
        if report.spike:
            self._spike(report)
        if first:
            text = first_step_memory(self._memory, self.ranks.device)
            self._print(text)
            measured, what = peak_memory(self.ranks.device)
            estimated = self._memory.peak
            values = {"measured_bytes": measured, "what": what, "estimated_bytes": estimated}
            self._write("memory", report.step, values)
        # Of several ranks a step's loss is rank 0's share alone; a record says the whole.
        alone = f"loss {_number(report.loss)}" if self.ranks.world_size == 1 else ""
        rate = tokens * self.ranks.world_size / max(seconds, 1e-9)
        detail = "  ".join(filter(None, [self._numbers or alone, f"{rate:,.0f} tokens/s"]))
        self._progress(detail)

    def _spike(self, report: StepReport) -> None:
        self._spikes += 1
        self._skipped += not report.taken
        done = "taken all the same (training.spike_guard: observe)"
        if not report.taken:
            done = "skipped, no weight and no moment moved"
        self._print(
            f"step {report.step}: gradient norm {report.gradient_norm:.4g} is a spike; {done}",
            "yellow",
        )
        values = {"gradient_norm": report.gradient_norm, "taken": report.taken}
        self._write("spike", report.step, values)

    def record(self, step: int, values: Values) -> None:
        """Write a log record: what the steps since the last one add up to over all ranks.

        Arguments: the step; what `MetricWindow.reduce` returns (nothing, where no step was finite).
        """
        if not self._writes:
            return
        memory, _ = peak_memory(self.ranks.device)
        numbers = dict(values)
        if self._last is not None:
            numbers |= {"rate": self._last.rate, "gradient_norm": self._last.gradient_norm}
        flags = {"skipped": self._skipped, "spikes": self._spikes, "memory_peak_bytes": memory}
        self._skipped = self._spikes = 0
        self._write("train", step, {**numbers, **flags})
        numbers.pop("steps", None)  # no curve
        self._scalars("train", {**numbers, "memory_peak_gib": memory / 2**30}, step)
        self._numbers = _shown(numbers)
        if self._bar is None:
            rate = numbers.get("tokens_per_second")
            speed = f"{rate:,.0f} tokens/s" if isinstance(rate, float) else ""
            self._line("  ".join(filter(None, [self._numbers, speed])))

    def validation(self, step: int, values: Values) -> None:
        """Write what a validation after `step` came to."""
        if not self._writes:
            return
        self._write("validation", step, dict(values))
        self._scalars("validation", values, step)
        self._print(f"step {step}: validation  {_shown(values)}")

    def checkpoint(self, step: int, path: Path) -> None:
        """Say that the checkpoint of `step` is complete; the log up to here goes to disk."""
        if not self._writes:
            return
        self._write("checkpoint", step, {"path": str(path)})
        self._print(f"step {step}: checkpoint {path}")
        for name, file in (("log", self._lines), ("tensorboard", self._board)):
            if isinstance(file, JsonLines):
                self._try(name, file.sync)
            elif file is not None:
                self._try(name, file.flush)

    def stopped(self, step: int) -> None:
        """Say that the run was asked to stop, and did after `step`."""
        if not self._writes:
            return
        self._write("stopped", step, {})
        self._print(f"step {step}: stopped; start the run again to go on from here")

    def warn(self, text: str) -> None:
        """Print a warning, and write it down with the step it came at."""
        if not self._writes:
            return
        self._print(f"warning: {text}", "yellow")
        self._write("warning", getattr(self, "_done", 0), {"text": text})

    # --- Files ---

    def _write(self, kind: str, step: int, values: dict[str, Any]) -> None:
        if self._lines is None:
            return
        lines, per_epoch = self._lines, max(1, self._per_epoch)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        head = {"kind": kind, "step": step, "epoch": round(step / per_epoch, 4), "time": now}
        self._try("log", lambda: lines.write({**head, **values}))

    def _scalars(self, group: str, values: Values, step: int) -> None:
        if self._board is not None:
            board = self._board
            self._try("tensorboard", lambda: board.write(group, values, step))

    def _try(self, name: str, write: Callable[[], None]) -> None:
        """Write; of several failures in a row only the first is said."""
        try:
            write()
        except (OSError, ValueError, RuntimeError) as error:
            if name not in self._failed:
                self._failed.add(name)
                what = LOG_NAME if name == "log" else "tensorboard's events"
                self._print(
                    f"warning: {what} cannot be written ({error}); training goes on without",
                    "yellow",
                )
        else:
            self._failed.discard(name)

    # --- The terminal ---

    def _print(self, text: str, style: str = "") -> None:
        self._console.print(escape(text), style=style or None, highlight=False, soft_wrap=True)

    def _progress(self, detail: str) -> None:
        if self._bar is not None:
            device = self.ranks.device
            if device.type != "cpu":
                detail += f"  peak {gib(peak_memory(device)[0])}"
            epoch = f"epoch {self._done / max(1, self._per_epoch):.2f}"
            self._bar.update(self._task, completed=self._done, epoch=epoch, detail=detail)
        elif (
            time.monotonic() - self._line_at >= LINE_EVERY
            and self._done % self.run.training.log_every != 0  # its record has a line
        ):
            self._line(detail)

    def _line(self, detail: str) -> None:
        """Print a plain line of progress."""
        now = time.monotonic()
        self._line_at = now
        left = (now - self._began) / max(1, self._done - self._start) * (self._total - self._done)
        epoch = self._done / max(1, self._per_epoch)
        eta = timedelta(seconds=round(left))
        self._print(f"step {self._done}/{self._total}  epoch {epoch:.2f}  {detail}  ETA {eta}")


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.fields[epoch]}"),
        BarColumn(bar_width=16),
        MofNCompleteColumn(),
        TextColumn("{task.fields[detail]}"),
        TextColumn("ETA"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def _shown(values: Values) -> str:
    """Write the values that a person follows.

    >>> _shown({"loss": 2.5, "draft_vocab_coverage": 0.95})
    'loss 2.5  coverage 95.0%'
    """
    parts = []
    for name, word in _FOLLOWED.items():
        if name in values:
            value = values[name]
            share = name == "draft_vocab_coverage" and isinstance(value, float)
            parts.append(f"{word} {value:.1%}" if share else f"{word} {_number(value)}")
    return "  ".join(parts)


def _number(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float | int) else "–"
