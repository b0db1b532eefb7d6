"""`parity convert | show | diff`: checkpoints in all five formats."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_port.formats.commands import COUNTS, TARGET, WITH_HEAD, report, written_mebibytes

if TYPE_CHECKING:
    from torch_port.formats.checkpoint import Checkpoint
    from torch_port.formats.show import Difference

_SHOWN = 40  # rows of a table of differences; the rest is counted


def convert_command(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A checkpoint, of any format.")],
    destination: Annotated[Path, typer.Argument(metavar="DST", help="A directory to create.")],
    to: Annotated[str, typer.Option("--to", help="port, orbax, hf, deepspec or speculators.")],
    target: Annotated[Path | None, TARGET] = None,
    with_head: Annotated[bool, WITH_HEAD] = False,
) -> None:
    """Convert a draft checkpoint between all formats, bit for bit, and say what the new one lacks.

    The format of SRC is detected. Between port and orbax a DSpark run's whole training state goes
    along (masters, moments, step, guard, schedule), so that a run changes framework and goes on.
    Weights keep their dtype; what a format needs of the target comes from --target.

    Exit status: 0, 2 for a checkpoint that cannot be read or converted.

    Example: parity convert runs/demo/step-20 in-jax --to orbax
    """
    from parity.convert import convert
    from torch_port.formats.convert import Options
    from torch_port.formats.target import TargetDirectory

    _quiet_libraries()
    options = Options(None if target is None else TargetDirectory(target), with_head)
    with written_mebibytes(destination) as progress:
        checkpoint, lost = convert(source, destination, to, options, progress)
    report(checkpoint.notes, lost, f"{source} ({checkpoint.format}) -> {destination} ({to})")


def show_command(
    path: Annotated[Path, typer.Argument(metavar="CKPT", help="A checkpoint, of any format.")],
    target: Annotated[Path | None, TARGET] = None,
    counts: Annotated[Path | None, COUNTS] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show what a checkpoint is: format, layout, sizes, map, heads, dtype, step, fingerprints.

    As torch-port show, and orbax too. The weights' sha256 is equal for equal drafts in any format.

    Exit status: 0, 2 for a checkpoint that cannot be read.

    Example: parity show in-jax
    """
    from torch_port.formats.show import print_summary, summary

    checkpoint = _read(path, target)
    if as_json:
        print(json.dumps(summary(checkpoint, counts), indent=2, ensure_ascii=False))
    else:
        print_summary(checkpoint, Console(), counts)


def diff_command(
    first: Annotated[Path, typer.Argument(metavar="A", help="A checkpoint, of any format.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another, of any format.")],
    target: Annotated[Path | None, TARGET] = None,
) -> None:
    """Compare two checkpoints: config, names, map, training record, and every tensor's values.

    Bytes are compared, so -0.0 and 0.0 differ (by 0). A head or an embedding that only one of the
    two has is a difference of names. The formats may differ: what they say is compared.

    Exit status: 0 when nothing differs, 1 when something does, 2 for what cannot be read.

    Example: parity diff runs/demo/step-20 in-jax
    """
    from torch_port.formats.show import differences

    pair = _read(first, target), _read(second, target)
    found = [*differences(*pair), *_training_differences(*pair)]
    if not found:
        print("no difference")
        return
    table = Table("what", f"A ({pair[0].format})", f"B ({pair[1].format})", "largest difference")
    for row in islice(found, _SHOWN):
        size = "" if row.size is None else f"{row.size:.3g}"
        table.add_row(Text(row.name), Text(row.first), Text(row.second), Text(size))
    Console().print(table)
    more = f", {_SHOWN} of them shown" if len(found) > _SHOWN else ""
    print(f"{len(found)} difference{'s' if len(found) > 1 else ''}{more}")
    raise typer.Exit(1)


def _training_differences(first: Checkpoint, second: Checkpoint) -> Iterator[Difference]:
    """Yield how two training records differ; one that only one side has is one difference."""
    from torch_port.formats.show import Difference

    if first.training is None or second.training is None:
        if first.training is not second.training:
            texts = ["absent" if c.training is None else "there" for c in (first, second)]
            yield Difference("training state", texts[0], texts[1])
        return
    a, b = _flat(first.training), _flat(second.training)
    for name in sorted(set(a) | set(b)):
        if name not in a or name not in b or a[name] != b[name]:
            texts = [json.dumps(side[name]) if name in side else "absent" for side in (a, b)]
            yield Difference(f"training {name}", texts[0], texts[1])


def _flat(record: dict[str, object]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in record.items():
        if isinstance(value, dict) and name not in ("rng", "data"):  # states are long, not telling
            flat |= {f"{name}.{inner}": inside for inner, inside in value.items()}
        else:
            flat[name] = value
    return flat


def _quiet_libraries() -> None:
    """What is wrong is said in one line; orbax's own warnings beside it tell a user nothing."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _read(path: Path, target: Path | None) -> Checkpoint:
    from parity.convert import read_checkpoint
    from torch_port.formats.target import TargetDirectory

    _quiet_libraries()
    return read_checkpoint(path, None if target is None else TargetDirectory(target))
