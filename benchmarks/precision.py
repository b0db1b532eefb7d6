"""`python -m benchmarks.precision`: the error of each term against float64, by precision and K."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
SIZES = (1 << 10, 1 << 12, 1 << 14, 1 << 16)
QUICK_SIZES = (1 << 8, 1 << 9)


@dataclass(frozen=True)
class Table:
    """A titled table of strings."""

    title: str
    columns: list[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """Write it as Markdown."""
        lines = [f"**{self.title}**", ""]
        for row in (self.columns, ["---"] * len(self.columns), *self.rows):
            lines.append("| " + " | ".join(row) + " |")
        return "\n".join(lines) + "\n"


@app.command()
def main(
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the tables here, as Markdown.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Toy sizes: does it run? The numbers mean little.")
    ] = False,
) -> None:
    """Measure errors against float64: objective, attention, a whole step, and known traps.

    An error is the largest difference from float64 on the same inputs (for bf16: on the inputs
    rounded to bf16), relative to the tensor's largest magnitude. Seeds are fixed: a machine prints
    the same numbers every time. On the CPU; takes minutes.

    Exit status: 0 whatever the numbers are; 2 for bad options.

    Example: python -m benchmarks.precision --out precision.md
    """
    # Imported here: they bring torch, and --help should be fast.
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=160)  # nothing is cut off in a file
    if out is not None and not out.parent.is_dir():
        raise typer.BadParameter(f"{out.parent} is no directory", param_hint="--out")
    tables = []
    for table in _tables(QUICK_SIZES if quick else SIZES, quick):
        tables.append(table)
        _show(table, console)
    if out is not None:
        out.write_text("\n".join(t.markdown() for t in tables), encoding="utf-8")


def _show(table: Table, console: Console) -> None:
    from rich.table import Table as Shown

    shown = Shown(title=table.title, title_justify="left")
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if index else "left", no_wrap=True)
    for row in table.rows:
        shown.add_row(*row)
    console.print(shown)


def _tables(sizes: tuple[int, ...], quick: bool) -> Iterator[Table]:
    from benchmarks.precision_cases import KINDS

    for kind in KINDS:
        yield from _objective_tables(kind, sizes, quick)
    yield _product_table(sizes[-2], quick)
    yield _step_table(sizes[1], quick)
    yield _attention_table(32 if quick else 512)
    yield _trap_table(sizes[-2], quick)


def _pair(*values: float) -> str:
    return " / ".join(f"{value:.0e}" for value in values)


def _objective_tables(kind: str, sizes: tuple[int, ...], quick: bool) -> Iterator[Table]:
    import torch

    from benchmarks.precision_cases import (
        FUSED,
        PLAIN,
        errors,
        make_case,
        objective_values,
        reference_objective,
    )

    cells: dict[torch.dtype, dict[str, list[str]]] = {torch.float32: {}, torch.bfloat16: {}}
    for size in sizes:
        case = make_case(size, kind, quick)
        exact = {}
        for dtype, rows in cells.items():
            own = case.to(dtype).stored()
            exact[dtype] = reference_objective(own)
            columns = [errors(objective_values(own, c), exact[dtype]) for c in (PLAIN, FUSED)]
            if dtype == torch.bfloat16:
                columns.append(errors(exact[dtype], exact[torch.float32]))
            for name in exact[dtype]:
                rows.setdefault(name, []).append(_pair(*(column[name] for column in columns)))
    for dtype, rows in cells.items():
        name = str(dtype).removeprefix("torch.")
        what = "plain / fused" + (" / input rounding" if dtype == torch.bfloat16 else "")
        columns_shown = [what, *(f"K = {size}" for size in sizes)]
        shown = [[term, *values] for term, values in rows.items()]
        yield Table(f"Objective, {kind} logits, {name}", columns_shown, shown)


def _product_table(size: int, quick: bool) -> Table:
    import torch

    from benchmarks.precision_cases import (
        FUSED,
        KINDS,
        errors,
        make_case,
        objective_values,
        reference_objective,
    )
    from benchmarks.precision_traps import logits_by, rounded_product, split_product

    rows: dict[str, list[str]] = {}
    for kind in KINDS:
        case = make_case(size, kind, quick).to(torch.bfloat16).stored()
        exact = reference_objective(case)
        found = []
        for form in (rounded_product, split_product):
            with logits_by(form):
                found.append(errors(objective_values(case, FUSED), exact))
        found.append(errors(objective_values(case, FUSED), exact))
        for name in exact:
            rows.setdefault(name, []).append(_pair(*(f[name] for f in found)))
    return Table(
        f"Draft logits, bf16, fused, K = {size}",
        ["rounded / split / float32", *KINDS],
        [[name, *values] for name, values in rows.items()],
    )


def _step_table(size: int, quick: bool) -> Table:
    import torch

    from benchmarks.precision_cases import (
        FUSED,
        PLAIN,
        errors,
        make_case,
        reference_step,
        step_values,
    )

    rows: dict[str, list[str]] = {}
    columns = ["plain, dense / fused, blockwise"]
    for kind in ("cool", "hot"):
        case = make_case(size, kind, quick)
        for dtype in (torch.float32, torch.bfloat16):
            columns.append(f"{kind}, {str(dtype).removeprefix('torch.')}")
            own = case.to(dtype).stored()
            exact = reference_step(own)
            found = [errors(step_values(own, compute), exact) for compute in (PLAIN, FUSED)]
            for name in exact:
                rows.setdefault(name, []).append(_pair(*(f[name] for f in found)))
    shown = [[name, *values] for name, values in rows.items()]
    return Table(f"Whole step through two layers, K = {size}", columns, shown)


def _attention_table(sequence: int) -> Table:
    import torch

    from benchmarks.precision_attention import attention_errors

    rows: dict[str, list[str]] = {}
    columns = ["dense / blockwise"]
    for kind, heat in (("cool", 1.0), ("hot", 8.0)):
        for dtype in (torch.float32, torch.bfloat16):
            columns.append(f"{kind}, {str(dtype).removeprefix('torch.')}")
            found = attention_errors(sequence, heat, dtype)
            for name, values in found.items():
                rows.setdefault(name, []).append(_pair(*values))
    shown = [[name, *values] for name, values in rows.items()]
    return Table(f"Attention, S = {sequence}, 32 blocks of 8", columns, shown)


def _trap_table(size: int, quick: bool) -> Table:
    import torch

    from benchmarks import precision_traps as traps
    from benchmarks.precision_cases import make_case

    hot = make_case(QUICK_SIZES[0] if quick else SIZES[1], "hot", quick)
    low = hot.to(torch.bfloat16)
    many = 1 << 14 if quick else 1 << 24
    found = {
        f"Σ abs(q − p̃), K = {size}: vector_norm / abs().sum()": traps.l1_by_vector_norm(size),
        f"ce, K = {size}, deviation 16: log q / logits and maximum": traps.ce_by_log_of_q(size),
        "bf16 row read 1000 times: F.embedding / lookup": traps.row_gradient(1000),
        "32 micro-batches' gradients: kept in bf16 / float32": traps.summed_micro_batches(32),
        f"norm of {many} gradients: in one go / row by row": traps.norm_in_one_go(many),
    }
    rows = [[name, _pair(*values)] for name, values in found.items()]
    masses = {
        "largest kept mass (exactly 1): teacher product bf16 / float32": (
            traps.mass_of_rounded_teacher(low)
        ),
        "the same: normaliser of unrounded / stored states": (
            traps.mass_by_unrounded_states(hot, low)
        ),
    }
    rows += [[name, " / ".join(f"{x:.7f}" for x in values)] for name, values in masses.items()]
    return Table("Traps: the form to avoid / the port's", ["operation", "error, or mass"], rows)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.precision")
