"""`torch-port train` and `torch-port soak`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from torch_port.errors import UserError


def train_command(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.yaml", help="The run file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[KEY=VALUE]...", help="Settings to override, as a.b=c."),
    ] = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Show what `torch-port plan` shows, and train nothing.")
    ] = False,
) -> None:
    """Train a draft by a run file; started again, go on where the newest checkpoint stands.

    On several devices or machines it is started by torchrun, a process for each device. SIGTERM and
    SIGINT save a checkpoint and end the run; a second SIGINT ends it at once. Everything is written
    below training.out: checkpoints, log.jsonl, TensorBoard's files.

    Exit status: 0 when the last step was taken or a signal was obeyed, 2 for an error, which is
    told in one line (with --plan: as `torch-port plan`).

    Example: torch-port train examples/tiny/train.yaml optimizer.peak_rate=1e-3

    Example: torchrun --nproc-per-node 8 -m torch_port train examples/qwen3-8b.yaml
    """
    if plan:
        from torch_port.planning import plan as ask
        from torch_port.planning import read_facts, show_plan
        from torch_port.run import load_run

        run = load_run(run_file, overrides or [])
        verdicts = ask(read_facts(run.config))
        show_plan(run, verdicts, Console())
        raise typer.Exit(1 if any(verdict.status == "reject" for verdict in verdicts) else 0)
    _leave(_train(run_file, overrides or []))


def _train(run_file: Path, overrides: list[str]) -> int:
    """Train; return the exit status. Of several ranks, rank 0 says what all know."""
    from torch_port.run import load_run
    from torch_port.training.agreement import OthersError
    from torch_port.training.trainer import run_training

    rank = int(os.environ.get("RANK", "0"))
    console = Console(quiet=rank != 0)
    try:
        run_training(load_run(run_file, overrides), console)
    except OthersError:
        return 2  # said by the rank that it is of
    except UserError as error:
        if os.environ.get("WORLD_SIZE", "1") == "1":
            raise
        text = f"Error (rank {rank}): {error}"
        Console(stderr=True).print(text, soft_wrap=True, highlight=False, markup=False)
        return 2
    return 0


def _leave(status: int) -> None:
    """End this process.

    Without the interpreter's clean-up, where several processes trained: threads of torch's own that
    end late can abort there, after all is saved, and torchrun would report a failed run.
    """
    if os.environ.get("WORLD_SIZE", "1") != "1":
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    raise typer.Exit(status)


def soak_command(
    kills: Annotated[int, typer.Option(min=1, help="How often the run is killed.")] = 300,
    processes: Annotated[int, typer.Option(min=1, help="Ranks of the run.")] = 2,
    mode: Annotated[
        Literal["fsdp", "ddp"], typer.Option(help="How the ranks share the work.")
    ] = "fsdp",
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="A new directory for the soak's runs.")
    ] = Path("runs/soak"),
    seed: Annotated[int, typer.Option(help="Of the moments of the kills.")] = 0,
) -> None:
    """Kill a tiny training run again and again, and compare all that it saves with one left alone.

    Try it on the file system that checkpoints go to: it finds checkpoints that are lost or half
    written, and runs that go on differently after a kill. Two seconds a kill, about.

    Exit status: 0, 1 when a checkpoint was lost, damaged or different, 2 for an error.

    Example: torch-port soak --kills 20 --out runs/soak
    """
    from torch_port.training.soak import soak

    console = Console()
    found = soak(out, kills, console, processes=processes, mode=mode, seed=seed)
    console.print(
        f"{found.kills} kills, {found.in_save} of them inside a save; {found.resumes} starts "
        f"from a checkpoint; the last step reached {found.rounds} times; {found.compared} "
        "checkpoints compared with the reference's, bit for bit",
        highlight=False,
        soft_wrap=True,
    )
    for problem in found.problems:
        console.print(problem, style="bold red", highlight=False, markup=False, soft_wrap=True)
    console.print(f"{len(found.problems)} lost, damaged or different", highlight=False)
    raise typer.Exit(1 if found.problems else 0)
