"""The `torch-port` command."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torch_port.data.commands import capture_command, data_app, features_app
from torch_port.doctor.commands import doctor_command
from torch_port.errors import UserError
from torch_port.formats.commands import convert_command, export_command, show_command
from torch_port.rehearsal.commands import fit_command, rehearse_command
from torch_port.training.commands import soak_command, train_command
from torch_port.vocabulary.commands import vocab_app

app = typer.Typer(
    help="Train speculative-decoding drafts with a pruned vocabulary.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Else the line breaks of a docstring's paragraph are kept, and a narrow terminal breaks twice.
    rich_markup_mode="markdown",
)
app.add_typer(vocab_app, name="vocab")
app.add_typer(data_app, name="data")
app.add_typer(features_app, name="features")
app.command("capture")(capture_command)
app.command("train")(train_command)
app.command("soak")(soak_command)
app.command("convert")(convert_command)
app.command("export")(export_command)
app.command("show")(show_command)
app.command("doctor")(doctor_command)
app.command("rehearse")(rehearse_command)
app.command("fit")(fit_command)


def _show_version(wanted: bool) -> None:
    if wanted:
        # Of the metadata: importing torch to say its version takes seconds.
        print(
            f"torch-port {version('jaxdraft')} (torch {version('torch')}, "
            f"Python {platform.python_version()})"
        )
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show versions."),
    ] = False,
) -> None:
    """Train speculative-decoding drafts with a pruned vocabulary."""


@app.command()
def demo(
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="A smaller run: about 1:20 min instead of under 7, on two cores."
        ),
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where to write; without it every run gets a new directory below runs/.",
        ),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace an earlier demo run in --out.")
    ] = False,
) -> None:
    """Train a pruned draft on real text, next to an unpruned one, and cross-check it.

    The text is the source of the installed Python standard library; nothing is downloaded. A tiny
    target model is trained once and cached (TORCH_PORT_CACHE, else the user's cache directory).
    Writes report.html, metrics.json, the drafts and their vocabulary map; compares losses,
    metrics, gradients and a short training run with the JAX specification when jax is there.

    Exit status: 0, 1 when port and specification disagree, 2 for bad input.

    Example: torch-port demo --quick --out runs/first
    """
    # Imported here: they bring torch, and --help should be fast.
    from torch_port.demo.recipe import FULL, QUICK
    from torch_port.demo.run import run_demo

    agrees = run_demo(QUICK if quick else FULL, out, overwrite, Console())
    raise typer.Exit(0 if agrees else 1)


@app.command("plan")
def plan_command(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to override, as a.b=c."),
    ] = None,
) -> None:
    """Show a run's resolved settings and what every planning rule says of it; builds no model.

    Looks at the draft config, the target's config.json, the map file, and whether the features'
    directory is there. What is not on disk yet is no error: the rules that need it answer
    "unknown", and the last line says what would settle them.

    Exit status: 0, 1 when a rule rejects the run, 2 for a run file that cannot be read or is wrong.

    Example: torch-port plan examples/run.yaml optimizer.peak_rate=3e-4
    """
    from torch_port.planning import plan, read_facts, show_plan
    from torch_port.run import load_run

    run = load_run(run_file, overrides or [])
    verdicts = plan(read_facts(run.config))
    show_plan(run, verdicts, Console())
    raise typer.Exit(1 if any(verdict.status == "reject" for verdict in verdicts) else 0)


def main() -> None:
    """Run the command line; a user's error is one line on stderr and exit status 2."""
    # OpenMP's threads spin while they wait. Beside another busy process that made training 14 times
    # slower (measured on 2 cores); a short spin costs nothing on an idle machine. Read at torch's
    # import, which comes later.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    try:
        app(prog_name="torch-port")
    except UserError as error:
        Console(stderr=True).print(f"Error: {error}", soft_wrap=True, highlight=False, markup=False)
        # Flushed by hand: a half-finished progress bar must not hide the message.
        sys.stderr.flush()
        raise SystemExit(2) from None
    except OSError as error:
        # A full disk, a directory that vanished: the system's own words and the place.
        where = f" ({error.filename})" if error.filename else ""
        print(f"Error: {error.strerror or error}{where}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
