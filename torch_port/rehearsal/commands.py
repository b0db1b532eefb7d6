"""`torch-port rehearse` and `torch-port fit`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

from torch_port.errors import UserError

if TYPE_CHECKING:
    from torch_port.run import RunConfig

RunFile = Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings to override, as a.b=c."),
]
Hbm = Annotated[str, typer.Option("--hbm", help="A card's memory; 64GB is 64 GiB, as on an NPU.")]
WorldSize = Annotated[
    int, typer.Option("--world-size", min=1, help="Ranks; the rehearsal is rank 0's.")
]
JsonFile = Annotated[
    Path | None, typer.Option("--json", metavar="FILE", help="Write everything as JSON.")
]


def rehearse_command(
    run_file: RunFile,
    overrides: Overrides = None,
    device: Annotated[
        Literal["npu", "cpu"], typer.Option(help="npu, or cpu for the portable branch.")
    ] = "npu",
    world_size: WorldSize = 1,
    hbm: Hbm = "64GB",
    json_file: JsonFile = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Write a page with a memory timeline."),
    ] = None,
    table: Annotated[
        bool,
        typer.Option(
            "--table",
            help="Print instead which sizes and formulations of the run's draft fit.",
        ),
    ] = False,
) -> None:
    """Rehearse two optimizer steps on a virtual NPU: memory, placement, operators, collectives.

    The real model, objective, optimizer and step of the run file run in their NPU branch on tensors
    that have no memory. Needs the draft's config and data.max_length; no target, features, map or
    NPU. What it cannot know: kernels' time and workspace, fragmentation; 8 % of a card's memory are
    left to them.

    Exit status: 0, 1 when the run does not fit or would not run as it is, 2 for bad input.

    Example: torch-port rehearse examples/qwen3.6-27b-full.yaml --world-size 64 --html page.html
    """
    import json

    from torch_port.data.atomic import atomic_file
    from torch_port.rehearsal.page import write_page
    from torch_port.rehearsal.printing import show
    from torch_port.rehearsal.rehearse import rehearse
    from torch_port.rehearsal.report import Looks, naive_operations, passes, report_of
    from torch_port.training.build import read_draft

    run, console = _run(run_file, overrides), Console()
    config, card = read_draft(run), bytes_of(hbm)
    if table:
        from torch_port.rehearsal.formulations import show_table

        show_table(run, config, card, console)
        return
    looks = Looks.at(device)
    rehearsal = rehearse(
        run,
        config=config,
        device=device,
        world_size=world_size,
        hbm_bytes=card,
        observers=looks.observers(),
    )
    naive = naive_operations(run, config, device) if run.algorithm == "dspark" else None
    report = report_of(rehearsal, looks, described(run_file, run, config), naive)
    show(report, console)
    if json_file is not None:
        with atomic_file(json_file) as stream:
            stream.write(json.dumps(report, indent=1).encode() + b"\n")
        console.print(f"JSON: {json_file}", highlight=False)
    if html is not None:
        write_page(report, html)
        console.print(f"Page: {html}", highlight=False)
    raise typer.Exit(0 if passes(report) else 1)


def fit_command(
    run_file: RunFile,
    overrides: Overrides = None,
    hbm: Hbm = "64GB",
    world_size: WorldSize = 8,
    sizes: Annotated[
        str,
        typer.Option("--sizes", help="Draft vocabularies, V or numbers: V,64000,32000,16000."),
    ] = "V,64000,32000,16000",
    largest: Annotated[
        int, typer.Option("--largest", min=512, help="The longest samples that are looked at.")
    ] = 32768,
    workers: Annotated[
        int, typer.Option("--workers", min=1, help="Processes that share the search.")
    ] = 2,
    json_file: JsonFile = None,
    svg: Annotated[
        Path | None, typer.Option("--svg", metavar="FILE", help="Draw the frontier.")
    ] = None,
) -> None:
    """Find the longest samples that fit, by recomputation, sharding and draft vocabulary.

    Anchors grow with the samples, as many to a token as in the run file. Looks at one card that
    holds everything, and at --world-size cards that share parameters and optimizer (fsdp).

    Example: torch-port fit examples/qwen3.6-27b-k64000.yaml --hbm 64GB --svg frontier.svg
    """
    from torch_port.rehearsal.fit import Frontier, show_frontier, write_frontier
    from torch_port.training.build import read_draft

    run, console = _run(run_file, overrides), Console()
    config = read_draft(run)
    frontier = Frontier(run, config, bytes_of(hbm), world_size, largest)
    found = frontier.find(vocabularies(sizes, config.vocab_size), console, workers)
    show_frontier(found, console)
    write_frontier(found, json_file, svg, console)


def _run(run_file: Path, overrides: list[str] | None) -> RunConfig:
    from torch_port.run import load_run

    return load_run(run_file, overrides or []).config


def described(run_file: Path, run: RunConfig, config: object) -> dict[str, object]:
    """Return what a report says of the run that it is of."""
    data, compute = run.data, run.compute
    return {
        "file": str(run_file),
        "vocabulary": f"{getattr(config, 'draft_vocab_size', '?')} of "
        f"{getattr(config, 'vocab_size', '?')}",
        "tokens": data.max_length,
        "anchors": data.num_anchors,
        "batch": f"{data.batch_size} × {data.accumulation}",
        "objective": f"{compute.objective}, {compute.objective_buffer_mib:g} MiB",
        "attention": compute.attention,
        "recompute": compute.recompute,
        "distribution": run.distribution.mode,
    }


def bytes_of(text: str) -> int:
    """Return a card's memory in bytes: 64GB, 64GiB and 64 are 64 · 2³⁰, as cards are sold.

    Raises UserError for anything else.

    >>> bytes_of("64GB") == 64 * 2**30
    True
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:G|GB|GiB)?\s*", text, re.IGNORECASE)
    if found is None or float(found[1]) == 0:
        raise UserError(f"--hbm {text!r} is no memory size; write it as 64GB")
    return int(float(found[1]) * 2**30)


def vocabularies(text: str, vocab_size: int) -> list[int]:
    """Return the draft vocabularies that `--sizes` names, the largest first.

    Raises UserError for one that is no number from 1 to V.

    >>> vocabularies("V,100", 248320)
    [248320, 100]
    """
    sizes = []
    for part in text.split(","):
        name = part.strip()
        size = vocab_size if name.upper() == "V" else int(name) if name.isdigit() else 0
        if not 1 <= size <= vocab_size:
            raise UserError(
                f"--sizes {text!r}: {name!r} is no draft vocabulary; write V or a number from 1 to "
                f"{vocab_size}, separated by commas"
            )
        sizes.append(size)
    return sorted(set(sizes), reverse=True)
