"""Memory and speed of converting a draft: `python -m benchmarks.conversion --dir PLACE`.

A bf16 draft of 1.9 B parameters is written to disk in shards, a few MiB in memory at a time, and
beside it a target for what deepspec borrows. Then hf -> deepspec -> speculators -> port -> hf, each
in a process of its own whose anonymous memory (RssAnon: what cannot be dropped for a file's sake)
is read every 10 ms. After each conversion `cp` copies what was written, on the same disk, and both
are flushed; files are dropped from the page cache before each. Asked (issue 6): anonymous memory at
most 2 x the largest tensor + 1 GiB, and at least 70 % of the copy's speed. Needs 20 GB of disk.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

CHAIN = ("hf", "deepspec", "speculators", "port", "hf")
GIB, MIB = 2**30, 2**20
ASKED_SPEED = 0.7
_SIZES = {
    "vocab_size": 65536,
    "draft_vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 9,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
_SMALL = _SIZES | {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8}
_RANK = 256
_TARGET_LAYERS = 36

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    directory: Annotated[
        Path, typer.Option("--dir", help="Where to write; a directory of its own is made there.")
    ],
    small: Annotated[bool, typer.Option("--small", help="A draft of 0.2 B parameters.")] = False,
    repeats: Annotated[int, typer.Option(min=1, help="Measurements of each conversion.")] = 1,
    json_path: Annotated[Path | None, typer.Option("--json", help="Write the numbers.")] = None,
) -> None:
    """Measure conversions between the safetensors formats against a copy of the same bytes.

    Exit status: 0, 1 when a conversion uses more memory or time than asked, or changes a tensor.
    """
    console = Console()
    sizes = _SMALL if small else _SIZES
    needed = 5 * 2 * _parameters(sizes)
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise typer.BadParameter(
            f"{directory} has {free / GIB:.1f} GiB free; {needed / GIB:.1f} are needed"
        )
    with tempfile.TemporaryDirectory(dir=directory, prefix="conversion-") as name:
        report = _run(Path(name), sizes, repeats, console)
    report["command"] = shlex.join(["python", "-m", "benchmarks.conversion", *sys.argv[1:]])
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    raise typer.Exit(0 if report["as asked"] else 1)


# --- A draft and a target on disk ----------------------------------------------------------------


def draft_shapes(sizes: dict[str, int]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a pruned DSpark draft with a gated head, by contracts §4."""
    H, inner, D = sizes["hidden_size"], sizes["intermediate_size"], sizes["head_dim"]
    q, kv = sizes["num_attention_heads"] * D, sizes["num_key_value_heads"] * D
    V, K = sizes["vocab_size"], sizes["draft_vocab_size"]
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (H, 5 * H)}
    shapes |= {"hidden_norm.weight": (H,), "norm.weight": (H,)}
    for i in range(sizes["num_hidden_layers"]):
        at = f"layers.{i}."
        shapes |= {at + f"self_attn.{n}_proj.weight": (kv, H) for n in "kv"}
        shapes |= {at + "self_attn.q_proj.weight": (q, H), at + "self_attn.o_proj.weight": (H, q)}
        shapes |= {at + f"self_attn.{n}_norm.weight": (D,) for n in "qk"}
        shapes |= {at + f"mlp.{n}_proj.weight": (inner, H) for n in ("gate", "up")}
        shapes |= {at + "mlp.down_proj.weight": (H, inner)}
        shapes |= {at + f"{n}_layernorm.weight": (H,) for n in ("input", "post_attention")}
    shapes |= {
        "markov_head.markov_w1.weight": (V, _RANK),
        "markov_head.markov_w2.weight": (K, _RANK),
        "markov_head.gate_proj.weight": (_RANK, H + _RANK),
        "markov_head.gate_proj.bias": (_RANK,),
        "confidence_head.proj.weight": (1, H + _RANK),
        "confidence_head.proj.bias": (1,),
    }
    return shapes


def draft_config(sizes: dict[str, int]) -> dict[str, Any]:
    """The hf config of that draft."""
    nested = {
        "projector_type": "dspark",
        "attention_mode": "gqa" if sizes["num_attention_heads"] != 8 else "mha",
        "target_layer_ids": [1, 9, 17, 25, 33],
        "mask_token_id": sizes["vocab_size"] - 1,
        "markov_rank": _RANK,
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return sizes | {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "layer_types": ["full_attention"] * sizes["num_hidden_layers"],
        "sliding_window": None,
        "block_size": 7,
        "num_target_layers": _TARGET_LAYERS,
        "dflash_config": nested,
    }


def _parameters(sizes: dict[str, int]) -> int:
    return sum(_size(shape) for shape in draft_shapes(sizes).values())


def _size(shape: tuple[int, ...]) -> int:
    count = 1
    for extent in shape:
        count *= extent
    return count


def write_draft(directory: Path, sizes: dict[str, int]) -> None:
    """Write the draft, in shards of at most 1 GiB, and its map: every second id is kept."""
    V, K = sizes["vocab_size"], sizes["draft_vocab_size"]
    tensors = {name: ("BF16", shape, 2) for name, shape in draft_shapes(sizes).items()}
    tensors["t2d"], tensors["d2t"] = ("BOOL", (V,), 1), ("I64", (K,), 8)
    shards: list[dict[str, Any]] = [{}]
    for name, (dtype, shape, width) in tensors.items():
        if sum(w * _size(s) for _, s, w in shards[-1].values()) + width * _size(shape) > GIB:
            shards.append({})
        shards[-1][name] = (dtype, shape, width)
    values = {
        "t2d": b"\1\0" * K + b"\0" * (V - 2 * K),
        "d2t": b"".join(struct.pack("<q", i) for i in range(K)),  # draft id i is target id 2i
    }
    directory.mkdir()
    placed: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        write_file(directory / file, shard, values)
        placed |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(draft_config(sizes)))


def write_target(directory: Path, sizes: dict[str, int]) -> None:
    """Write a target that has an embedding and a head, and no more."""
    shape = (sizes["vocab_size"], sizes["hidden_size"])
    names = ("model.embed_tokens.weight", "lm_head.weight")
    directory.mkdir()
    write_file(directory / "model.safetensors", {n: ("BF16", shape, 2) for n in names}, {})
    config = {"num_hidden_layers": _TARGET_LAYERS, "hidden_size": shape[1]}
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))


def write_file(path: Path, tensors: dict[str, Any], values: dict[str, bytes]) -> None:
    """Write one safetensors file; values that are not given are a pattern of the tensor's own."""
    header, end = {}, 0
    order = sorted(tensors, key=lambda name: (-tensors[name][2], name))
    for name in order:
        dtype, shape, width = tensors[name]
        start, end = end, end + width * _size(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            start, end = header[name]["data_offsets"]
            for piece in _pattern(name, end - start) if name not in values else [values[name]]:
                stream.write(piece)
        stream.flush()
        os.fsync(stream.fileno())


def _pattern(name: str, size: int) -> Iterator[bytes]:
    import random

    block = random.Random(name).randbytes(MIB + 2)  # no multiple of a row: rows differ
    while size > 0:
        yield block[:size]
        size -= len(block)


# --- Measuring -----------------------------------------------------------------------------------


def drop_cache(directory: Path) -> None:
    """Drop a directory's clean pages, so that what reads it next reads the disk."""
    for file in directory.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def anonymous_bytes(pid: int) -> int:
    """RssAnon of a process; 0 when it is gone."""
    try:
        text = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    except OSError:
        return 0
    lines = [line for line in text.splitlines() if line.startswith("RssAnon:")]
    return int(lines[0].split()[1]) * 1024 if lines else 0


_CHILD = """
import json, sys, time
from pathlib import Path
from torch_port.formats.convert import Options, convert
from torch_port.formats.target import TargetDirectory
source, destination, to, target = sys.argv[1:]
began = time.perf_counter()
convert(Path(source), Path(destination), to, Options(TargetDirectory(Path(target))))
print(json.dumps(time.perf_counter() - began))
"""


def run_conversion(source: Path, destination: Path, to: str, target: Path) -> dict[str, float]:
    """Convert in a process of its own.

    Returns seconds (reading to the rename, flushed), seconds of the whole process, and its largest
    anonymous memory in bytes.
    """
    began = time.perf_counter()
    arguments = [sys.executable, "-c", _CHILD, str(source), str(destination), to, str(target)]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    peak = 0

    def watch() -> None:
        nonlocal peak
        while process.poll() is None:
            peak = max(peak, anonymous_bytes(process.pid))
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, _ = process.communicate()
    watcher.join()
    if process.returncode != 0:
        raise RuntimeError(f"the conversion to {to} failed with status {process.returncode}")
    whole = time.perf_counter() - began
    return {"seconds": json.loads(output), "process": whole, "anonymous": peak}


def run_copy(source: Path, destination: Path) -> float:
    """Copy a directory with cp and flush the copy; returns seconds."""
    began = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(destination)], check=True)
    subprocess.run(["sync", *map(str, destination.iterdir()), str(destination)], check=True)
    return time.perf_counter() - began


def bytes_of(directory: Path) -> int:
    """Size of a directory's files."""
    return sum(file.stat().st_size for file in directory.iterdir())


def _run(place: Path, sizes: dict[str, int], repeats: int, console: Console) -> dict[str, Any]:
    count = _parameters(sizes)
    console.print(f"writing a draft of {count / 1e9:.2f} B parameters, bf16, and its target")
    write_draft(place / "0-hf", sizes)
    write_target(place / "target", sizes)
    largest = 2 * max(
        *map(_size, draft_shapes(sizes).values()), sizes["vocab_size"] * sizes["hidden_size"]
    )
    rows = []
    for number, to in enumerate(CHAIN[1:], start=1):
        source = place / f"{number - 1}-{CHAIN[number - 1]}"
        row = _measure(source, place / f"{number}-{to}", to, place / "target", repeats)
        row["as asked"] = row["anonymous"] <= 2 * largest + GIB and row["ratio"] >= ASKED_SPEED
        rows.append({"pair": f"{CHAIN[number - 1]} -> {to}"} | row)
        console.print(_sentence(rows[-1]), highlight=False)
        if number > 1:
            shutil.rmtree(source)
    same = same_tensors(place / "0-hf", place / f"{len(CHAIN) - 1}-hf")
    _print(rows, largest, same, console)
    return {
        "parameters": count,
        "largest tensor": largest,
        "memory asked": 2 * largest + GIB,
        "speed asked": ASKED_SPEED,
        "conversions": rows,
        "tensors unchanged": same,
        "as asked": same and all(row["as asked"] for row in rows),
    }


def _measure(
    source: Path, destination: Path, to: str, target: Path, repeats: int
) -> dict[str, Any]:
    """Convert and copy, `repeats` times in turn; the last conversion stays. Medians."""
    conversions, copies = [], []
    for _ in range(repeats):
        if destination.exists():
            shutil.rmtree(destination)
        drop_cache(source)
        drop_cache(target)
        conversions.append(run_conversion(source, destination, to, target))
        drop_cache(destination)
        copies.append(run_copy(destination, destination.with_name("copy")))
        shutil.rmtree(destination.with_name("copy"))
    size = bytes_of(destination)
    middle = sorted(one["seconds"] for one in conversions)[repeats // 2]
    copied = sorted(copies)[repeats // 2]
    return {
        "bytes": size,
        "anonymous": max(one["anonymous"] for one in conversions),
        "convert MB/s": size / middle / 1e6,
        "copy MB/s": size / copied / 1e6,
        "ratio": copied / middle,
        "process seconds": sorted(one["process"] for one in conversions)[repeats // 2],
    }


def same_tensors(first: Path, second: Path) -> bool:
    """Whether two directories hold the same tensors, bit for bit; piece by piece."""
    from torch_port.formats.show import fingerprint
    from torch_port.formats.weights import read_weights

    return fingerprint(read_weights(first)) == fingerprint(read_weights(second))


def _sentence(row: dict[str, Any]) -> str:
    return (
        f"{row['pair']}: {row['bytes'] / 1e9:.2f} GB, {row['anonymous'] / GIB:.2f} GiB anonymous, "
        f"{row['convert MB/s']:.0f} MB/s, cp {row['copy MB/s']:.0f} MB/s"
    )


def _print(rows: list[dict[str, Any]], largest: int, same: bool, console: Console) -> None:
    limit = (2 * largest + GIB) / GIB
    table = Table(title=f"asked: anonymous <= {limit:.2f} GiB, speed >= {ASKED_SPEED:.0%} of cp")
    for name in ("conversion", "GB", "anonymous GiB", "MB/s", "cp MB/s", "of cp", "as asked"):
        table.add_column(name, justify="left" if name == "conversion" else "right")
    for row in rows:
        table.add_row(
            row["pair"],
            f"{row['bytes'] / 1e9:.2f}",
            f"{row['anonymous'] / GIB:.2f}",
            f"{row['convert MB/s']:.0f}",
            f"{row['copy MB/s']:.0f}",
            f"{row['ratio']:.0%}",
            "yes" if row["as asked"] else "NO",
        )
    console.print(table)
    console.print(f"hf -> ... -> hf gives every tensor's bytes: {'yes' if same else 'NO'}")


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.conversion")
