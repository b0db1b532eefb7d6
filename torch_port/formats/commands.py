"""`torch-port convert | export | show | diff`: checkpoints in the formats that need no jax."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torch_port.progress import stage

TARGET = typer.Option(
    "--target",
    metavar="DIR",
    help="The target's directory, for what a format borrows: embedding, head rows, layers.",
)
COUNTS = typer.Option(
    "--counts",
    metavar="FILE",
    help="Counts of a corpus (torch-port vocab count): what the map covers of it.",
)
WITH_HEAD = typer.Option("--with-head", help="hf: write the K-row head too.")


def convert_command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint, of any format.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A directory to create.")],
    to: Annotated[str, typer.Option("--to", help="port, hf, deepspec or speculators.")],
    target: Annotated[Path | None, TARGET] = None,
    with_head: Annotated[bool, WITH_HEAD] = False,
) -> None:
    """Convert a draft checkpoint, bit for bit, and say what the new format does not hold.

    The format of SRC is detected. Weights keep their dtype. What the format needs of the target and
    SRC does not have comes from --target; nothing is made up. orbax needs jax: parity convert.

    Exit status: 0, 2 for a checkpoint that cannot be read or converted.

    Example: torch-port convert runs/demo/draft-pruned exported --to deepspec --target TARGET
    """
    from torch_port.formats.convert import Options, convert
    from torch_port.formats.target import TargetDirectory

    options = Options(None if target is None else TargetDirectory(target), with_head)
    with written_mebibytes(destination) as progress:
        checkpoint, lost = convert(source, destination, to, options, progress)
    report(checkpoint.notes, lost, f"{source} ({checkpoint.format}) -> {destination} ({to})")


def export_command(
    source: Annotated[Path, typer.Argument(metavar="CKPT", help="A checkpoint, of any format.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A directory to create.")],
    to: Annotated[str, typer.Option("--to", help="speculators, hf or deepspec.")],
    target: Annotated[Path | None, TARGET] = None,
    verifier: Annotated[
        str | None,
        typer.Option(help="speculators: the target's name there (default: the --target path)."),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--speculative-tokens", help="speculators: drafts per round (default: all of a block)."
        ),
    ] = None,
) -> None:
    """Write a draft so that a server loads it as it is: weights, K-row head, map, config.

    A pruned draft carries its own head rows and d2t. A server that shared the target's full head
    with it would accept about 1 % of its tokens, without an error.

    Exit status: 0, 2 for a checkpoint that cannot be exported.

    Example: torch-port export CKPT served --to speculators --target TARGET
    """
    from torch_port.errors import UserError
    from torch_port.formats.convert import Options, convert
    from torch_port.formats.target import TargetDirectory

    if to not in ("speculators", "hf", "deepspec"):
        raise UserError(f"--to {to}: no serving format; there are speculators, hf, deepspec")
    place = None if target is None else TargetDirectory(target)
    options = Options(place, True, tokens, verifier)
    with written_mebibytes(destination) as progress:
        checkpoint, lost = convert(source, destination, to, options, progress)
    report(checkpoint.notes, lost, f"exported {source} to {destination} ({to})")


def show_command(
    path: Annotated[Path, typer.Argument(metavar="CKPT", help="A checkpoint, of any format.")],
    target: Annotated[Path | None, TARGET] = None,
    counts: Annotated[Path | None, COUNTS] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a checkpoint is: format, layout, sizes, map, heads, dtype, step, fingerprints.

    Everything is checked as a conversion checks it. orbax needs jax: parity show.

    Exit status: 0, 2 for a checkpoint that cannot be read.
    """
    from torch_port.formats.convert import read_checkpoint
    from torch_port.formats.show import print_summary, summary
    from torch_port.formats.target import TargetDirectory

    checkpoint = read_checkpoint(path, None if target is None else TargetDirectory(target))
    if as_json:
        print(json.dumps(summary(checkpoint, counts), indent=2, ensure_ascii=False))
    else:
        print_summary(checkpoint, Console(), counts)


@contextmanager
def written_mebibytes(destination: Path) -> Iterator[Callable[[int, int], None]]:
    """Show how much of a checkpoint is written; yields what takes (bytes done, bytes in all)."""
    with stage(f"writing {destination.name}, MiB", 1, Console(stderr=True)) as progress:
        yield lambda done, total: progress.update(done >> 20, total=max(total >> 20, 1))


def report(notes: tuple[str, ...], lost: list[str], done: str) -> None:
    """Print what reading derived, what was left behind, and what was done."""
    console = Console()
    for note in notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    for line in lost:
        console.print(f"left behind: {line}", highlight=False, markup=False, soft_wrap=True)
    console.print(done, highlight=False, markup=False, soft_wrap=True)
