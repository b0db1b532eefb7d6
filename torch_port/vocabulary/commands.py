"""`torch-port vocab`: count tokens, look at coverage, build a map, look at a map.

What a command needs is imported inside it: counting and sweeping start without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from torch_port.errors import UserError
from torch_port.vocabulary.printing import (
    decoded,
    fields,
    map_fields,
    print_counts,
    say,
    shares,
    sweep_table,
)

if TYPE_CHECKING:
    from torch_port.vocabulary.counts import TokenCounts
    from torch_port.vocabulary.sweep import Ranking

vocab_app = typer.Typer(
    help="Choose which of the target's ids a draft can say: count, sweep, build, show.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_Counts = Annotated[
    Path, typer.Argument(metavar="COUNTS", help="Counts of the training corpus, by `vocab count`.")
]
_Heldout = Annotated[
    Path | None,
    typer.Option(metavar="COUNTS", help="Counts of held-out text, to see what the map misses."),
]
_By = Annotated[
    str,
    typer.Option(
        metavar="count|mass",
        help="Rank ids by how often they occur, or by the probability the teacher gives them.",
    ),
]
_Pin = Annotated[
    str | None, typer.Option(metavar="ID,…", help="Keep these ids whatever they count.")
]
_PinSpecial = Annotated[
    bool,
    typer.Option("--pin-special/--no-pin-special", help="Keep the tokenizer's special tokens."),
]
_PinBytes = Annotated[
    bool,
    typer.Option(
        "--pin-bytes/--no-pin-bytes",
        help="Keep the 256 one-byte tokens: with them any text can be written.",
    ),
]
_Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing file.")]


@vocab_app.command()
def count(
    corpus: Annotated[
        list[Path],
        typer.Argument(metavar="CORPUS", help="JSONL files, or feature directories."),
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where to write the counts.")],
    tokenizer: Annotated[
        Path,
        typer.Option(metavar="PATH", help="The target's tokenizer.json, or its directory."),
    ],
    chat_template: Annotated[
        str | None,
        typer.Option(
            metavar="chatml|tokenizer|FILE",
            help="How conversations become text (JSONL only): chatml; tokenizer, the template "
            "beside --tokenizer; or a Jinja file.",
        ),
    ] = None,
    max_length: Annotated[
        int | None,
        typer.Option(metavar="TOKENS", help="Where training cuts a conversation (JSONL only)."),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(metavar="V", help="Rows of the target's head; or give --target."),
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The target's local directory (V, and its head)."),
    ] = None,
    teacher_mass: Annotated[
        bool,
        typer.Option(
            "--teacher-mass",
            help="Also sum the target's probabilities (feature directories, with --target).",
        ),
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Processes that count; all cores by default."),
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Count anew, and keep nothing in the cache.")
    ] = False,
    overwrite: _Overwrite = False,
) -> None:
    """Count the supervised tokens of a corpus: what every map is made from.

    Only what a draft is trained on counts: the assistant's answers of conversations (JSONL, one
    {"id": …, "conversations": [{"role": …, "content": …}, …]} a line), or the loss mask of
    feature directories. Tokenizer, chat template and maximum length decide which tokens the text
    becomes, so none of them is guessed. Counts are cached under the sha256 of all of them
    (TORCH_PORT_CACHE, else the user's cache directory).

    Example: torch-port vocab count train.jsonl --tokenizer target/ --chat-template chatml
    --max-length 4096 --vocab-size 248320 --out train.counts
    """
    from torch_port.cache import default_cache_root
    from torch_port.vocabulary import options
    from torch_port.vocabulary.counts import load_counts, save_counts
    from torch_port.vocabulary.tokens import tokenizer_facts

    console = Console()
    options.check_writable(out, "--out", overwrite, load_counts)
    from_features = options.are_features(corpus)
    options.check_count_options(from_features, chat_template, max_length, teacher_mass, target)
    processes = options.resolve_workers(workers)
    V = options.resolve_vocab_size(vocab_size, target)
    facts = tokenizer_facts(tokenizer)
    cache = None if no_cache else default_cache_root() / "counts"
    if from_features:
        from torch_port.vocabulary.feature_corpus import count_features

        head = None
        if teacher_mass and target is not None:
            from torch_port.vocabulary.target_head import read_head

            head = read_head(target)
        counts, cached = count_features(
            corpus, facts, V, console, workers=processes, head_VH=head, cache=cache
        )
    else:
        from torch_port.vocabulary.templates import resolve_template
        from torch_port.vocabulary.text_corpus import TextCorpus, count_text

        assert chat_template is not None
        assert max_length is not None
        template = resolve_template(chat_template, facts.file)
        text = TextCorpus(tuple(corpus), facts, template, max_length)
        counts, cached = count_text(text, V, console, workers=processes, cache=cache)
    save_counts(out, counts)
    print_counts(console, counts, cached)
    say(console, f"Counts: {out}")


@vocab_app.command()
def sweep(
    counts: _Counts,
    heldout: _Heldout = None,
    sizes: Annotated[
        str | None,
        typer.Option(metavar="K,…", help="Sizes of the table; powers of two by default."),
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            "--coverage", metavar="SHARE", help="Also the smallest K that covers this share."
        ),
    ] = None,
    by: _By = "count",
    pin: _Pin = None,
    pin_special: _PinSpecial = True,
    pin_bytes: _PinBytes = True,
    svg: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the coverage curves as SVG.")
    ] = None,
    overwrite: _Overwrite = False,
) -> None:
    """Print what maps of many sizes cover, from one count, and draw the curves.

    Coverage is the share of supervised tokens whose id is kept; what is not kept can never be
    proposed. Look at the held-out column: a map whose held-out coverage is far below the training
    one was counted on too narrow a corpus.

    Example: torch-port vocab sweep train.counts --heldout heldout.counts --sizes 16384,32768,65536
    --coverage 0.99 --svg coverage.svg
    """
    from torch_port.data.atomic import atomic_file
    from torch_port.vocabulary import options
    from torch_port.vocabulary import sweep as sweeping

    console = Console()
    if svg is not None:
        options.check_writable(svg, "--svg", overwrite, options.read_svg)
    given, ranking = _rank(counts, heldout, by, pin, pin_special, pin_bytes)
    wanted = (
        sweeping.default_sizes(ranking)
        if sizes is None
        else [
            options.check_size(size, "--sizes", ranking)
            for size in options.whole_numbers(sizes, "--sizes")
        ]
    )
    chosen = None if share is None else ranking.size_for(share)
    rows = sweeping.sweep(ranking, given, [*wanted, *([] if chosen is None else [chosen])])
    print_counts(console, given, None)
    console.print(sweep_table(rows, len(given.counts), chosen))
    if chosen is not None:
        say(console, f"Smallest K with a coverage of {share}: {chosen}")
    if svg is not None:
        with atomic_file(svg) as stream:
            stream.write(sweeping.coverage_chart(ranking, chosen).encode())
        say(console, f"Curves: {svg}")


@vocab_app.command()
def build(
    counts: _Counts,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The map file, .safetensors.")],
    size: Annotated[
        int | None, typer.Option(metavar="K", help="How many ids to keep (draft_vocab_size).")
    ] = None,
    share: Annotated[
        float | None,
        typer.Option(
            "--coverage",
            metavar="SHARE",
            help="Instead of --size: the smallest K that covers this share, such as 0.99.",
        ),
    ] = None,
    by: _By = "count",
    pin: _Pin = None,
    pin_special: _PinSpecial = True,
    pin_bytes: _PinBytes = True,
    heldout: _Heldout = None,
    overwrite: _Overwrite = False,
) -> None:
    """Build a vocabulary map and write it with what it was made from.

    Pinned ids come first, then the highest counts (ties to the lower id), then the lowest unused
    ids of the tokenizer; ids beyond the tokenizer are never kept. The same counts give the same
    map on every machine. A draft keeps its map for life: build once, then keep the file.

    Example: torch-port vocab build train.counts --coverage 0.99 --out map.safetensors
    """
    from torch_port.vocabulary import options
    from torch_port.vocabulary.build import write_map
    from torch_port.vocabulary.files import load_map

    console = Console()
    options.check_map_name(out)
    options.check_writable(out, "--out", overwrite, load_map)
    if (size is None) == (share is None):
        given_are = "neither is given" if size is None else "both are given"
        raise UserError(
            f"--size and --coverage each choose K, and {given_are}; give one: --size 32000, or "
            "--coverage 0.99"
        )
    given, ranking = _rank(counts, heldout, by, pin, pin_special, pin_bytes)
    if size is not None:
        options.check_size(size, "--size", ranking)
    else:
        assert share is not None
        size = ranking.size_for(share)
    kept = ranking.kept(size)
    row = write_map(out, given, ranking, size)
    say(
        console,
        f"Map: {out}\n  {size:,} of {len(given.counts):,} ids kept, {ranking.pins} pinned, "
        f"{row.unseen:,} that never occurred; first {kept[:8].tolist()}\n  coverage {shares(row)}",
    )


@vocab_app.command()
def show(
    file: Annotated[Path, typer.Argument(metavar="MAP", help="A .safetensors or .pt map file.")],
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="PATH", help="The target's tokenizer, to see the ids as text."),
    ] = None,
    first: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="List the map's N lowest ids; with --tokenizer also N ids spread evenly over it.",
        ),
    ] = 12,
) -> None:
    """Print what a map keeps and what it was made from.

    The field's .pt files ({"t2d", "d2t"}) are read without running code from them; they say
    nothing about their origin.

    Example: torch-port vocab show map.safetensors --tokenizer target/
    """
    from torch_port.vocabulary.files import load_map
    from torch_port.vocabulary.options import check_first

    check_first(first)
    console = Console()
    t2d, _, metadata = load_map(file)
    kept = t2d.nonzero().squeeze(1).tolist()
    # A wrong tokenizer is an error before anything is printed.
    table = None if tokenizer is None else decoded(kept, tokenizer, metadata, first)
    fields(console, map_fields(kept, len(t2d), metadata, first))
    if table is not None:
        console.print(table)


def _rank(
    counts: Path,
    heldout: Path | None,
    by: str,
    pin: str | None,
    pin_special: bool,
    pin_bytes: bool,
) -> tuple[TokenCounts, Ranking]:
    from torch_port.vocabulary.counts import load_counts
    from torch_port.vocabulary.options import whole_numbers
    from torch_port.vocabulary.sweep import rank

    given = load_counts(counts)
    ranking = rank(
        given,
        rule=by,
        pin=[] if pin is None else whole_numbers(pin, "--pin"),
        pin_special=pin_special,
        pin_bytes=pin_bytes,
        heldout=None if heldout is None else load_counts(heldout),
    )
    return given, ranking
