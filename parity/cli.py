"""The `parity` command."""

from __future__ import annotations

import enum
import importlib.util
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from parity.cases import CaseError
from parity.checkpoint_commands import convert_command, diff_command, show_command
from parity.demo import check_demo
from parity.emit import emit as write_vectors
from parity.judge_commands import judge_command
from parity.mutant_commands import mutants_command
from parity.selection import compare_rules, markdown
from parity.suite_commands import replay_command, run_command
from parity.vectors import run_vectors
from torch_port.errors import UserError

app = typer.Typer(
    help="Cross-check jaxdraft (the specification) and torch_port (the production port).",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Else the line breaks of a docstring's paragraph are kept, and a narrow terminal breaks twice.
    rich_markup_mode="markdown",
)
app.command("convert")(convert_command)
app.command("run")(run_command)
app.command("replay")(replay_command)
app.command("show")(show_command)
app.command("diff")(diff_command)
app.command("judge")(judge_command)
app.command("mutants")(mutants_command)
console = Console()


class Side(enum.StrEnum):
    """Which implementation to run."""

    spec = "spec"
    port = "port"
    both = "both"


class Dtype(enum.StrEnum):
    """The floating type that a run computes in."""

    float64 = "float64"
    float32 = "float32"


class Objective(enum.StrEnum):
    """Which form of the port's objective to run."""

    plain = "plain"
    fused = "fused"


class Attention(enum.StrEnum):
    """Which form of the port's attention to run."""

    dense = "dense"
    blockwise = "blockwise"


def _show_versions(wanted: bool) -> None:
    if wanted:
        packages = ", ".join(f"{name} {_version(name)}" for name in ("torch", "jax"))
        print(f"parity {version('jaxdraft')} ({packages}, Python {platform.python_version()})")
        raise typer.Exit


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@app.callback()
def _root(
    show_versions: Annotated[
        bool,
        typer.Option("--version", callback=_show_versions, is_eager=True, help="Show versions."),
    ] = False,
) -> None:
    """Cross-check jaxdraft (the specification) and torch_port (the production port)."""


@app.command()
def vectors(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of case directories.")
    ],
    side: Annotated[Side, typer.Option(help="Implementation to run.")] = Side.both,
    dtype: Annotated[Dtype, typer.Option(help="Type to compute in.")] = Dtype.float64,
    objective: Annotated[
        Objective, typer.Option(help="The port's objective; the spec has only one.")
    ] = Objective.fused,
    attention: Annotated[
        Attention, typer.Option(help="The port's attention; the spec has only one.")
    ] = Attention.blockwise,
) -> None:
    """Replay conformance vectors: loss, metrics and every gradient against stored answers.

    One line per case; the exit status is 1 when a case fails and 2 when there is nothing to run.

    Example: parity vectors tests/vectors --side spec --dtype float32
    """
    chosen = ["port", "spec"] if side is Side.both else [side.value]
    _need_jax(chosen)
    try:
        compute = {"objective": objective.value, "attention": attention.value}
        failed = run_vectors(directory, chosen, dtype.value, console, compute)
    except CaseError as error:
        _stop(str(error))
    raise typer.Exit(1 if failed else 0)


@app.command()
def emit(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to write the cases.")],
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Replace cases of the same names; drop stale ones."),
    ] = False,
) -> None:
    """Write the project's own vectors: inputs from fixed seeds, answers from the specification.

    Cases that exist are refused unless --overwrite is given. Then those are replaced, and cases
    that an earlier emit wrote and this one does not are removed: those still as it wrote them.

    Example: parity emit tests/vectors --overwrite
    """
    _need_jax(["spec"])
    try:
        # Flushed: into a pipe, minutes of work would look like none.
        write_vectors(directory, overwrite, lambda name: print(f"wrote {name}", flush=True))
    except (CaseError, OSError) as error:
        _stop(str(error))


@app.command()
def demo(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Output of `torch-port demo`.")],
) -> None:
    """Cross-check what a demo run left: weights and batches through both implementations.

    Compares loss, metrics and every gradient in float64, and a short AdamW run of torch and optax
    step by step. Writes DIR/parity.json. The exit status is 1 when the two disagree.
    """
    _need_jax(["spec"])
    try:
        result = check_demo(directory, lambda text: console.print(text, highlight=False))
    except CaseError as error:
        _stop(str(error))
    for check in result["checks"]:
        verdict = "ok  " if check["passed"] else "FAIL"
        worst = "no number" if check["worst"] is None else f"{check['worst']:.1e}"
        console.print(
            f"{verdict} {check['name']}  {worst} "
            f"(tolerance {check['tolerance']:.0e}); {check['detail']}",
            soft_wrap=True,
            highlight=False,
            markup=False,
        )
    raise typer.Exit(0 if result["agrees"] else 1)


@app.command()
def selection(
    directory: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="A prepared demo in the cache: demo/full-… or quick-…."),
    ],
    sizes: Annotated[
        list[int] | None, typer.Option("--size", help="A draft vocabulary size; repeatable.")
    ] = None,
) -> None:
    """Compare two rules for choosing the draft vocabulary: by counts and by teacher probability.

    Prints a Markdown table of the mean kept mass of either map, on training and held-out samples.

    Example: parity selection ~/.cache/torch-port/demo/full-0123456789abcdef --size 1024
    """
    _need_jax(["spec"])
    last = [time.monotonic()]

    def progress(done: int, total: int) -> None:
        if time.monotonic() - last[0] > 5:
            last[0] = time.monotonic()
            Console(stderr=True).print(f"{done}/{total} samples", highlight=False)

    try:
        rows, _ = compare_rules(directory, sizes or [256, 512, 1024, 2048, 4096], progress)
    except ValueError as error:
        _stop(str(error))
    print(markdown(rows))


def _need_jax(chosen: list[str]) -> None:
    if "spec" in chosen and importlib.util.find_spec("jax") is None:
        _stop('the spec side needs jax; pip install "jaxdraft[spec]", or use --side port')


def _stop(message: str) -> NoReturn:
    Console(stderr=True).print(f"Error: {message}", highlight=False, soft_wrap=True, markup=False)
    raise typer.Exit(2)


def main() -> None:
    """Run the command line; a user's error is one line on stderr and exit status 2."""
    try:
        app(prog_name="parity")
    except (UserError, OSError) as error:
        Console(stderr=True).print(f"Error: {error}", highlight=False, soft_wrap=True, markup=False)
        raise SystemExit(2) from None


if __name__ == "__main__":
    main()
