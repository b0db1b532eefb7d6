"""`torch-port data`, `torch-port capture` and `torch-port features`.

What a command needs is imported inside it: help and preparing start without torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from torch_port.data.check import CheckResult
    from torch_port.data.prepare import PrepareSummary

data_app = typer.Typer(
    help="Conversations to token ids and loss masks.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
features_app = typer.Typer(
    help="Look at captured features, and convert them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_PROBLEMS = 20  # printed at most


@data_app.callback()
def _data() -> None:
    """Conversations to token ids and loss masks."""


@data_app.command()
def prepare(
    corpus: Annotated[
        list[Path], typer.Argument(metavar="CORPUS.jsonl", help="Conversations, one a line.")
    ],
    tokenizer: Annotated[
        Path,
        typer.Option(metavar="PATH", help="The target's tokenizer.json, or its directory."),
    ],
    chat_template: Annotated[
        str,
        typer.Option(
            metavar="chatml|tokenizer|FILE",
            help="How conversations become text: chatml; tokenizer, the template beside "
            "--tokenizer; or a Jinja file.",
        ),
    ],
    max_length: Annotated[int, typer.Option(metavar="TOKENS", help="Where a conversation is cut.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write.")],
    workers: Annotated[
        int | None,
        typer.Option(metavar="N", help="Processes that encode; all cores by default."),
    ] = None,
) -> None:
    """Turn conversations into token ids and loss masks, and leave out what cannot be trained on.

    Each line is {"id": …, "conversations": [{"role": …, "content": …}, …]}; the keys messages, from
    and value and the roles human and gpt are read as well. Loss is on the assistant's answers. A
    conversation without two supervised tokens in a row within --max-length has no anchor, and is
    dropped, as is one that cannot be read: the table counts them, drops.jsonl lists them.

    Interrupted, the same command goes on. The bytes do not depend on --workers.

    Example: torch-port data prepare train.jsonl --tokenizer target/ --chat-template tokenizer
    --max-length 4096 --out prepared/train
    """
    from torch_port.data.parallel import resolve_processes
    from torch_port.data.prepare import DROPS_NAME, Corpus, prepare_corpus
    from torch_port.data.templates import resolve_template
    from torch_port.data.tokenizer import tokenizer_file

    console = Console()
    processes = resolve_processes(workers)
    file = tokenizer_file(tokenizer)
    template = resolve_template(chat_template, file)
    read = Corpus(tuple(corpus), file, template, max_length)
    summary = prepare_corpus(read, out, console, processes)
    console.print(_prepare_table(summary))
    if summary.dropped:
        _say(console, f"Dropped, one by one: {out / DROPS_NAME}")
    _say(console, f"Prepared: {out}")


def capture_command(
    prepared: Annotated[
        Path, typer.Argument(metavar="PREPARED", help="What `data prepare` wrote.")
    ],
    target: Annotated[Path, typer.Option(metavar="DIR", help="The target's local directory.")],
    layers: Annotated[
        str,
        typer.Option(metavar="I,…", help="Decoder layers whose outputs are taken, counted from 0."),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write.")],
    dtype: Annotated[
        str,
        typer.Option(metavar="bfloat16|float32", help="Of the model and the stored states."),
    ] = "bfloat16",
    batch_tokens: Annotated[
        int, typer.Option(metavar="N", help="Tokens of a forward pass, padding included.")
    ] = 8192,
    processes: Annotated[
        int, typer.Option(metavar="N", help="Processes, each with the whole model.")
    ] = 1,
    device: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="cpu, cuda or npu; several processes take one each, from 0 on."
        ),
    ] = "cpu",
    limit_gb: Annotated[
        float | None,
        typer.Option(metavar="GB", help="Refuse to start when the features take more."),
    ] = None,
    shard_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="Tokens of a shard; by default those of about 1 GiB."),
    ] = None,
) -> None:
    """Run a target over prepared samples and write the states that a draft trains on.

    Any causal LM that transformers loads from a local directory; no remote code is run. Of each
    token are stored the chosen layers' outputs, the final state after the norm, and the log
    normaliser over the whole vocabulary, in float32. Says first how much disk that takes.

    Interrupted, the same command goes on with the next shard.

    Example: torch-port capture prepared/ --target target/ --layers 2,17,32 --out features/
    """
    from torch_port.data.capture_run import CaptureSettings, capture_features
    from torch_port.data.parallel import resolve_processes
    from torch_port.vocabulary.options import whole_numbers

    console = Console()
    settings = CaptureSettings(
        prepared=prepared,
        target=target,
        directory=out,
        target_layer_ids=tuple(whole_numbers(layers, "--layers")),
        dtype=dtype,
        batch_tokens=batch_tokens,
        device=device,
        shard_tokens=shard_tokens,
    )
    workers = resolve_processes(processes, "--processes")
    capture_features(settings, console, processes=workers, limit_gb=limit_gb)
    _say(console, f"Features: {out}")


@features_app.command()
def check(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Features: shards, or the field's .ckpt files.")
    ],
    sample: Annotated[
        int | None,
        typer.Option(metavar="N", help="Check N samples drawn at random; all by default."),
    ] = None,
    write_index: Annotated[
        bool,
        typer.Option(
            "--write-index",
            help="Write the index of a directory of .ckpt files, which the loader needs.",
        ),
    ] = False,
) -> None:
    """Check features: shapes, dtypes, finite values, and what the index says of them.

    Exit status: 0, 1 when a sample has a problem, 2 when the directory cannot be read.

    Example: torch-port features check features/train --sample 100
    """
    from torch_port.data.check import check_features

    console = Console()
    result = check_features(directory, console, sample=sample, write_index=write_index)
    console.print(_check_table(result))
    for problem in result.problems[:_PROBLEMS]:
        _say(console, f"  {problem}")
    if len(result.problems) > _PROBLEMS:
        _say(console, f"  … and {len(result.problems) - _PROBLEMS} more")
    if not result.indexed:
        _say(console, "No index: the loader needs one (--write-index)")
    raise typer.Exit(1 if result.problems else 0)


@features_app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Features of either kind.")],
    destination: Annotated[
        Path, typer.Argument(metavar="DST", help="A directory that does not exist.")
    ],
    to: Annotated[
        str, typer.Option(metavar="sharded|ckpt|ckpt.gz", help="What to write.")
    ] = "sharded",
) -> None:
    """Convert the field's .ckpt (or .ckpt.gz) files to shards and back, and write the index.

    Files are opened with weights_only=True. States keep their bytes and dtype.

    Example: torch-port features convert field/ features/train
    """
    from torch_port.data.convert import convert_features

    console = Console()
    count = convert_features(source, destination, to, console)
    _say(console, f"{count:,} samples: {destination}")


def _prepare_table(summary: PrepareSummary) -> Table:
    table = _table("conversations", "count")
    dropped = sum(summary.dropped.values())
    table.add_row("read", f"{summary.kept + dropped:,}")
    table.add_row("kept", f"{summary.kept:,}")
    table.add_row("  of them cut at --max-length", f"{summary.truncated:,}")
    for reason, count in summary.dropped.items():
        table.add_row(f"dropped: {reason}", f"{count:,}")
    table.add_row("tokens", f"{summary.tokens:,}")
    table.add_row("  of them supervised", f"{summary.supervised:,}")
    table.add_row("shards", f"{summary.shards:,}")
    return table


def _check_table(result: CheckResult) -> Table:
    table = _table("features", "")
    states, H = result.widths
    table.add_row("samples checked", f"{result.checked:,} of {result.total:,}")
    table.add_row("tokens", f"{result.tokens:,}")
    table.add_row("trainable", f"{result.trainable:,}")
    if H:
        table.add_row("hidden size", f"{H:,}, {states // H} layers, {result.state_dtype}")
    table.add_row("log normaliser", "stored" if result.with_normalizer else "not stored")
    table.add_row("problems", f"{len(result.problems):,}")
    return table


def _table(first: str, second: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    table.add_column(first, overflow="fold")
    table.add_column(second, justify="right")
    return table


def _say(console: Console, text: str) -> None:
    """Print text as it is: no markup, no line breaks of the console's own."""
    console.print(text, highlight=False, markup=False, soft_wrap=True)
