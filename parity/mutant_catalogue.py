"""The catalogue of faults for `parity mutants`: what a mutant is, and where the lists are.

The faults of the specification are in `mutant_catalogue_spec`, those of the port in
`mutant_catalogue_port` and `mutant_catalogue_port_runs`; `mutant_catalogue_reviewed` has those that
reviewers planted on either side. A mutant that survives stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Mutant:
    """One fault: `old` becomes `new` in the source of `file` when that module is imported.

    `clause` is the sheet's; `checks` are those that should see it, the likeliest first;
    `configurations` narrows their quick cases to those that matter (empty: all of them).
    """

    name: str
    side: str
    clause: str
    what: str
    file: str
    old: str
    new: str
    checks: tuple[str, ...]
    configurations: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The dotted name of the module that the fault is in."""
        return self.file.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


class StaleError(ValueError):
    """A mutant whose source text is not where the catalogue says, or not only there."""


def mutate(mutant: Mutant, source: str) -> str:
    """Return a module's source with the fault in it.

    Raises StaleError unless the old text occurs exactly once, and the new one differs from it.
    """
    found = source.count(mutant.old)
    if found != 1:
        raise StaleError(
            f"{mutant.name}: its old text occurs {found} times in {mutant.file}, not once; the "
            "source has changed: write the fault anew"
        )
    return source.replace(mutant.old, mutant.new)


def check_fresh(mutants: tuple[Mutant, ...]) -> list[str]:
    """Return what is stale among the mutants, a line each."""
    lines = []
    for mutant in mutants:
        try:
            mutate(mutant, (ROOT / mutant.file).read_text(encoding="utf-8"))
        except (StaleError, OSError) as error:
            lines.append(str(error))
    return lines


def catalogue() -> tuple[Mutant, ...]:
    """Return all mutants, the specification's first."""
    from parity.mutant_catalogue_port import PORT
    from parity.mutant_catalogue_port_runs import PORT_RUNS
    from parity.mutant_catalogue_reviewed import REVIEWED
    from parity.mutant_catalogue_spec import SPEC
    from parity.mutant_catalogue_spec_runs import SPEC_RUNS

    return (*SPEC, *SPEC_RUNS, *PORT, *PORT_RUNS, *REVIEWED)


def markdown(mutants: tuple[Mutant, ...]) -> str:
    """Return the table of docs/mutants.md."""
    rows = ["| mutant | side | clause | what it does | seen by |", "|---|---|---|---|---|"]
    rows += [f"| `{m.name}` | {m.side} | {m.clause} | {m.what} | {m.checks[0]} |" for m in mutants]
    return "\n".join(rows) + "\n"
