"""The words of the command lines: versions, help at any width, progress as it happens."""

from __future__ import annotations

import io
import itertools
import platform
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

import parity.cli
import parity.emit
import torch_port.cli
from parity.recipes import RECIPES

PROGRAMS = {"torch-port": torch_port.cli.app, "parity": parity.cli.app}


def commands(app: typer.Typer) -> list[list[str]]:
    """The words of every command and group."""
    found: list[list[str]] = []
    waiting = [([], get_command(app))]
    while waiting:
        words, command = waiting.pop()
        found.append(words)
        waiting += [([*words, n], c) for n, c in getattr(command, "commands", {}).items()]
    return found


def written(app: typer.Typer, *arguments: str, width: int = 80) -> str:
    sizes = {"COLUMNS": str(width), "TERMINAL_WIDTH": str(width)}
    result = CliRunner().invoke(app, arguments, env=sizes)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("program", PROGRAMS)
def test_help_fills_its_lines(program: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: a docstring's own line breaks kept, so that a narrow terminal breaks lines twice.

    A line is filled when the next line's first word would not fit into it.
    """
    monkeypatch.setattr("typer.rich_utils.MAX_WIDTH", width)
    app, looked_at = PROGRAMS[program], 0
    for words in commands(app):
        shown = written(app, *words, "--help", width=width)
        lines = [line.strip() for line in shown.split("╭─")[0].splitlines()]
        for line, following in itertools.pairwise(lines):
            assert len(line) <= width
            if line and following and not line.startswith("Usage"):
                filled = len(line) + 1 + len(following.split()[0])
                assert filled > width - 2, (words, line, following)
                looked_at += 1
    assert looked_at > 1


def test_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: no version to put into a report; a side that is not installed ends in a traceback."""
    python = platform.python_version()
    own, torch = version("jaxdraft"), version("torch")
    assert written(torch_port.cli.app, "--version") == (
        f"torch-port {own} (torch {torch}, Python {python})\n"
    )
    assert written(parity.cli.app, "--version") == (
        f"parity {own} (torch {torch}, jax {version('jax')}, Python {python})\n"
    )

    def without_jax(name: str) -> str:
        if name == "jax":
            raise PackageNotFoundError(name)
        return version(name)

    monkeypatch.setattr("parity.cli.version", without_jax)
    assert "jax not installed, Python" in written(parity.cli.app, "--version")


def test_emit_tells_of_each_case_when_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults: every line printed at the end; a line that waits in a buffer until then."""
    recipe = next(recipe for recipe in RECIPES if recipe.name == "error-no-supervision")
    monkeypatch.setattr(parity.emit, "RECIPES", [recipe])
    monkeypatch.setattr(parity.emit, "_write_manifest", lambda directory: None)
    pipe = io.BytesIO()
    out = io.TextIOWrapper(pipe)  # holds back what is not flushed, as a pipe's does
    monkeypatch.setattr(sys, "stdout", out)
    seen: list[tuple[bytes, bool]] = []

    def watched(directory: Path, overwrite: bool, wrote: Callable[[Path], object]) -> None:
        def then(case: Path) -> None:
            wrote(case)
            seen.append((pipe.getvalue(), (case / "case.json").exists()))

        parity.emit.emit(directory, overwrite, then)

    monkeypatch.setattr("parity.cli.write_vectors", watched)
    parity.cli.emit(tmp_path)
    assert seen == [(f"wrote {tmp_path / recipe.name}\n".encode(), True)]
