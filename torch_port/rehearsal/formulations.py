"""Which sizes fit a card, in the field's formulation and in this project's: `rehearse --table`.

One card, nothing sharded. The field's rows are its plain form: a dense mask, the objective in
checkpointed chunks of 128 blocks, nothing computed again, torch's AdamW on float32 masters. The
others are this project's: fused objective, blockwise attention, its NPU optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_port.device import NPU, use_kernels
from torch_port.portable import TorchAdamW
from torch_port.progress import stage
from torch_port.rehearsal.rehearse import MARGIN, Rehearsal, rehearse
from torch_port.rehearsal.variants import changed, with_length, with_vocabulary
from torch_port.run import RunConfig

FIELD_CHUNK = 128  # blocks
PRUNED = 64000


@dataclass(frozen=True)
class Case:
    """One row: the formulation, K (None: all of V), S, N, `compute.recompute` and `.adamw`."""

    field: bool
    vocabulary: int | None
    length: int
    anchors: int
    recompute: str
    adamw: str = "npu"


CASES = (
    Case(True, None, 2048, 512, "none"),
    Case(True, None, 4096, 1024, "none"),
    Case(True, PRUNED, 4096, 1024, "none"),
    Case(False, None, 4096, 1024, "none"),
    Case(False, None, 4096, 1024, "mlp"),
    Case(False, PRUNED, 8192, 2048, "mlp"),
    Case(False, PRUNED, 16384, 4096, "layer"),
    Case(False, PRUNED, 16384, 4096, "layer", "torch"),
)


def rehearse_case(case: Case, run: RunConfig, config: Any, hbm_bytes: int) -> Rehearsal:
    """Rehearse one row on one card."""
    run, config = with_vocabulary(run, config, case.vocabulary or config.vocab_size)
    run = with_length(run, case.length, case.anchors)
    run = changed(run, "distribution", mode="single")
    form = {"objective": "plain", "attention": "dense"} if case.field else {}
    run = changed(run, "compute", recompute=case.recompute, adamw=case.adamw, **form)
    settings: dict[str, Any] = {"config": config, "hbm_bytes": hbm_bytes, "coarse": True}
    if not case.field:
        return rehearse(run, **settings)
    with use_kernels(replace(NPU, fused_adamw=TorchAdamW)):
        return rehearse(run, objective_chunk=FIELD_CHUNK, **settings)


def show_table(run: RunConfig, config: Any, hbm_bytes: int, console: Console) -> None:
    """Rehearse every row and print them, with their peaks."""
    rehearsed: list[tuple[Case, Rehearsal]] = []
    cases = [case for case in CASES if (case.vocabulary or 0) <= config.vocab_size]
    with stage("rehearsing", len(cases), console) as progress:
        for index, case in enumerate(cases):
            rehearsed.append((case, rehearse_case(case, run, config, hbm_bytes)))
            progress.update(index + 1, f"S = {case.length}")
    console.print(_printed(rehearsed, config))
    console.print(
        f"One rank, every sample S tokens long and supervised throughout. fits: in "
        f"{hbm_bytes / 2**30:.4g} GiB less {100 * MARGIN:.0f} %, "
        f"{hbm_bytes * (1 - MARGIN) / 2**30:.2f} GiB.",
        highlight=False,
    )


def _printed(rehearsed: list[tuple[Case, Rehearsal]], config: Any) -> Table:
    """Lay out the rows; 80 columns hold them."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("formulation", "K", "S / N", "recompute", "adamw", "peak GiB", "fits", "peak in"):
        right = name in ("K", "S / N", "peak GiB")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    for case, rehearsal in rehearsed:
        memory = rehearsal.memory
        table.add_row(
            "field's" if case.field else "ours",
            f"{case.vocabulary or config.vocab_size}",
            f"{case.length} / {case.anchors}",
            case.recompute,
            "torch" if case.field else case.adamw,
            f"{memory.peak / 2**30:.1f}",
            Text("yes", "green") if rehearsal.fits else Text("no", "bold red"),
            memory.phase.split(": ")[-1],
        )
    return table
