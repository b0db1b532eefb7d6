"""What `torch-port vocab` prints: fields, the sweep's table, a map's ids as text. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from torch_port.errors import UserError

if TYPE_CHECKING:
    from torch_port.vocabulary.counts import TokenCounts
    from torch_port.vocabulary.sweep import SweepRow

_SHARES = ("coverage", "heldout_coverage", "kept_mass")  # metadata of map files


def print_counts(console: Console, counts: TokenCounts, cached: bool | None) -> None:
    """Print where counts come from and how many there are."""
    lines = [
        ("corpus", f"{counts.corpus_fingerprint[:16]}  ({counts.source})"),
        ("tokenizer", f"{counts.tokenizer_fingerprint[:16]}  ({counts.tokenizer_size:,} ids)"),
        ("samples", f"{counts.samples:,}, of which {counts.truncated:,} cut"),
        ("supervised tokens", f"{counts.supervised:,}"),
        ("ids that occur", f"{counts.distinct:,} of {len(counts.counts):,}"),
    ]
    if counts.mass is not None:
        lines.append(("teacher mass", f"of head {counts.target_fingerprint[:16]}"))
    if cached:
        lines.append(("from the cache", "yes, nothing has changed since it was counted"))
    fields(console, lines)


def sweep_table(rows: list[SweepRow], V: int, chosen: int | None) -> Table:
    """Return the table of a sweep; the row of `chosen` is bold.

    Columns that were not measured are left out.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    columns = ["K", "of V", "training"]
    columns += ["held-out"] if rows[0].heldout is not None else []
    columns += ["kept mass"] if rows[0].mass is not None else []
    for name in [*columns, "never seen"]:
        table.add_column(name, justify="right")
    for row in rows:
        shares = [share for share in (row.train, row.heldout, row.mass) if share is not None]
        table.add_row(
            f"{row.size:,}",
            f"{row.size / V:.2%}",
            *(f"{share:.3%}" for share in shares),
            f"{row.unseen:,}",
            style="bold" if row.size == chosen else None,
        )
    return table


def shares(row: SweepRow) -> str:
    """Say what a map covers."""
    text = f"{row.train:.3%} of training tokens"
    if row.heldout is not None:
        text += f", {row.heldout:.3%} of held-out ones"
    return text if row.mass is None else f"{text}; {row.mass:.3%} of the teacher's mass"


def decoded(kept: list[int], path: Path, metadata: dict[str, str], first: int) -> Table:
    """Return the first ids and as many spread over the map, as text.

    Raises UserError for a tokenizer that is not the map's.
    """
    from torch_port.vocabulary.tokens import load_tokenizer, tokenizer_facts

    facts, tokenizer = tokenizer_facts(path), load_tokenizer(path)
    made_with = metadata.get("tokenizer_fingerprint", facts.fingerprint)
    if made_with != facts.fingerprint:
        raise UserError(
            f"--tokenizer {facts.file} is not the one the map was made with (sha256 "
            f"{facts.fingerprint[:12]}, not {made_with[:12]}): its ids mean other tokens; give "
            "that one"
        )
    if kept[-1] >= facts.size:
        raise UserError(
            f"--tokenizer {facts.file} produces {facts.size} ids, but the map keeps id {kept[-1]}; "
            "give the tokenizer of the map's target"
        )
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for name in ("draft id", "target id"):
        table.add_column(name, justify="right")
    table.add_column("text")
    spread = (len(kept) * n // first for n in range(first))
    for draft_id in sorted({*range(min(first, len(kept))), *spread}):
        text = tokenizer.decode([kept[draft_id]], skip_special_tokens=False)
        table.add_row(f"{draft_id:,}", f"{kept[draft_id]:,}", Text(repr(text)))
    return table


def map_fields(
    kept: list[int], V: int, metadata: dict[str, str], first: int
) -> list[tuple[str, str]]:
    """Return what `show` says of a map, name by name."""
    lines = [
        ("V, the target's ids", f"{V:,}"),
        ("K, kept", f"{len(kept):,} ({len(kept) / V:.1%})"),
        ("first ids", ", ".join(map(str, kept[:first]))),
        ("last id", str(kept[-1])),
    ]
    for name, value in sorted(metadata.items()):
        if name not in ("vocab_size", "draft_vocab_size"):
            lines.append((name, _share(value) if name in _SHARES else value))
    return lines if metadata else [*lines, ("origin", "not recorded in this file")]


def _share(value: str) -> str:
    """A share of a map file as a percentage, or as it is where it is no number."""
    try:
        return f"{float(value):.2%}"
    except ValueError:
        return value


def fields(console: Console, lines: list[tuple[str, str]]) -> None:
    """Print names and values, a line each."""
    width = max(len(name) for name, _ in lines)
    for name, value in lines:
        say(console, f"  {name:<{width}}  {value}")


def say(console: Console, text: str) -> None:
    """Print text as it is: no markup, no line breaks of the console's own."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
