"""What a run trains, on what and where: shown before the first step, its memory after it."""

from __future__ import annotations

import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import nn

from torch_port.data.loader import FeatureLoader
from torch_port.models.block_draft import FrozenTarget
from torch_port.run import RunConfig
from torch_port.training.memory_estimate import MemoryEstimate, estimate_memory
from torch_port.vocabulary.files import load_map

GIB = 2**30


@dataclass(frozen=True)
class RunSummary:
    """What is true of a run from its first step on.

    `trained`, `frozen`: parameters of the draft and of the target's embedding and head.
    `draft_vocab_size` K of `vocab_size` V; `coverage`: the share of its corpus' supervised tokens
    that the map keeps, as the map's file says, or None where it does not.
    `untrainable`: samples without an anchor candidate, left out. `tokens_per_step`: of all ranks,
    padding left out, on average. `collectives`: of one optimizer step, None where it is not known.
    """

    algorithm: str
    trained: int
    frozen: int
    vocab_size: int
    draft_vocab_size: int
    map_file: str | None
    coverage: float | None
    samples: int
    untrainable: int
    steps_per_epoch: int
    samples_per_step: int
    tokens_per_step: int
    ranks: int
    mode: str
    device: str
    dtype: str
    collectives: int | None
    memory: MemoryEstimate

    def record(self) -> dict[str, Any]:
        """Return the summary as JSON values."""
        return asdict(self) | {"memory": asdict(self.memory)}


def summarise(
    run: RunConfig,
    draft: nn.Module,
    target: FrozenTarget,
    loader: FeatureLoader,
    *,
    mode: str,
    device: torch.device,
    collectives: int | None = None,
) -> RunSummary:
    """Collect a run's summary.

    Arguments: the run; its draft (sharded or not); the frozen target; this rank's loader; the mode
    that "auto" came out as; the device; how many collectives a step issues.
    Raises UserError when the vocabulary map's file cannot be read.
    """
    config: Any = draft.config
    lengths = loader.features.lengths
    assert lengths is not None  # a loader needs them
    used = [lengths[row] for row in loader.samples]
    split = loader.split
    length = run.data.max_length or max(used)
    shards = split.world_size if mode == "fsdp" else 1
    return RunSummary(
        algorithm=run.algorithm,
        trained=sum(p.numel() for p in draft.parameters() if p.requires_grad),
        frozen=target.embed_tokens.numel() + target.lm_head.numel(),
        vocab_size=config.vocab_size,
        draft_vocab_size=config.draft_vocab_size,
        map_file=run.vocabulary.map,
        coverage=_coverage(run.vocabulary.map),
        samples=len(used),
        untrainable=loader.untrainable,
        steps_per_epoch=loader.steps_per_epoch,
        samples_per_step=split.step_samples,
        tokens_per_step=round(sum(used) / len(used) * split.step_samples),
        ranks=split.world_size,
        mode=mode,
        device=str(device),
        dtype=run.training.dtype,
        collectives=collectives,
        memory=estimate_memory(run, draft, target, length, shards=shards),
    )


def _coverage(path: str | None) -> float | None:
    """The coverage that a map's metadata says; maps of the field have none."""
    if path is None:
        return None
    text = load_map(Path(path))[2].get("coverage")
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


def show_summary(summary: RunSummary, total_steps: int, start_step: int, console: Console) -> None:
    """Print the summary as a table."""
    table = Table("what", "value", title="Training", title_justify="left")
    for name, value in _rows(summary, total_steps, start_step):
        table.add_row(name, Text(value))
    console.print(table)


def _rows(s: RunSummary, total_steps: int, start_step: int) -> list[tuple[str, str]]:
    epochs = total_steps / s.steps_per_epoch
    left_out = f"; {s.untrainable} left out (no anchor candidate)" if s.untrainable else ""
    memory = f"{gib(s.memory.state)} of state on each rank"
    if s.memory.peak is not None:
        memory += f", about {gib(s.memory.peak)} at the peak (an estimate)"
    rows = [
        ("draft", f"{s.algorithm}, {s.trained:,} parameters trained"),
        ("target", f"{s.frozen:,} parameters of embedding and head, frozen"),
        ("vocabulary", _vocabulary(s)),
        ("samples", f"{s.samples:,}{left_out}"),
        (
            "steps",
            f"{total_steps:,} of {s.steps_per_epoch:,} an epoch: {epochs:.2f} epochs"
            + (f"; continued after step {start_step:,}" if start_step else ""),
        ),
        ("a step", f"{s.samples_per_step:,} samples, about {s.tokens_per_step:,} tokens"),
        ("ranks", f"{s.ranks}, {s.mode}, {s.device}, {s.dtype}"),
        ("memory", memory),
    ]
    if s.collectives is not None:
        rows.append(("collectives", f"{s.collectives} a step"))
    return rows


def _vocabulary(s: RunSummary) -> str:
    if s.draft_vocab_size == s.vocab_size:
        return f"all of the target's {s.vocab_size:,} ids"
    text = f"{s.draft_vocab_size:,} of {s.vocab_size:,} ids"
    if s.coverage is not None:
        text += f", {s.coverage:.2%} of the corpus' supervised tokens"
    return text + ("" if s.map_file is None else f" ({s.map_file})")


def peak_memory(device: torch.device) -> tuple[int, str]:
    """Return the peak memory so far in bytes, and what it is of.

    A device's own counter of allocated memory; where it has none (the CPU), the whole process, with
    Python, libraries and files mapped in.
    """
    counter = getattr(torch.get_device_module(device), "max_memory_allocated", None)
    if device.type != "cpu" and counter is not None:
        return int(counter(device)), "allocated on the device"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024), "of the whole process"


def first_step_memory(memory: MemoryEstimate, device: torch.device) -> str:
    """Say how the first step's measured peak compares with the estimate."""
    measured, what = peak_memory(device)
    text = f"peak memory after the first step: {gib(measured)} {what}"
    if memory.peak is None:
        return f"{text}; state alone is {gib(memory.state)}"
    return f"{text}; the estimate was {gib(memory.peak)} of tensors"


def gib(size: int) -> str:
    """Write a size for people.

    >>> gib(3 * 2**29), gib(5 * 2**20)
    ('1.5 GiB', '5 MiB')
    """
    return f"{size / GIB:.1f} GiB" if size >= GIB else f"{size / 2**20:.0f} MiB"
