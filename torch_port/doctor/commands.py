"""The command `torch-port doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from torch_port.doctor.checks import Check, as_json, healthy, show

NO_CARD = "run it on a machine with a card"


def doctor_command(
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the lines as JSON too.")
    ] = None,
) -> None:
    """Say what this machine has and lacks for training on Ascend cards, line by line.

    Versions (Python, torch, torch_npu, CANN), environment variables, the visible cards and their
    memory, an all-reduce over them, each fused kernel beside its portable twin (forward and
    gradient), and one training step beside a shipped conformance vector. Each line is ok, missing,
    failed or skipped, with what to do. Without a card the step runs on the CPU.

    Exit status: 0 when every line is ok, else 1.

    Example: torch-port doctor --json doctor.json
    """
    checks = diagnose()
    show(checks, Console())
    if json_file is not None:
        text = json.dumps(as_json(checks), indent=1, ensure_ascii=False)
        json_file.write_text(text + "\n", encoding="utf-8")
    raise typer.Exit(0 if healthy(checks) else 1)


def diagnose() -> list[Check]:
    """Run every check that this machine allows; what needs a card is skipped without one."""
    # Imported here: they bring torch, and --help should be fast.
    import torch

    from torch_port.device import NPU, device_named
    from torch_port.doctor.environment import (
        check_cards,
        check_variables,
        check_versions,
        environment,
    )
    from torch_port.doctor.kernels import SMALL, cases, check_kernels
    from torch_port.doctor.ring import check_ring
    from torch_port.doctor.step import check_step

    variables = environment()
    checks = [*check_versions(variables), *check_variables(variables)]
    found, cards = check_cards()
    checks += found
    if not cards:
        checks.append(Check("ring", "HCCL all-reduce", "skipped", "no card", NO_CARD))
        for case in cases(SMALL):
            checks.append(Check("kernels", case.kernel, "skipped", "no card", NO_CARD))
        checks += check_step(torch.device("cpu"))
        checks.append(Check("step", "on a card", "skipped", "ran on the CPU above", NO_CARD))
        return checks
    card = device_named("npu:0")
    return [
        *checks,
        *check_ring("hccl", len(cards)),
        *check_kernels(NPU, card),
        *check_step(card),
    ]
