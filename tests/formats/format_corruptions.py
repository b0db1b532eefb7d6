"""Ways to corrupt a checkpoint directory: each takes a random source and says what it did."""

from __future__ import annotations

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from format_toys import read_json
from safetensors.torch import load_file, save_file

Fault = Callable[[random.Random, Path], str]
OTHERS: list[Path] = []  # checkpoints whose files `of_another` takes

# What a format may lack: without it the checkpoint is whole.
OPTIONAL = {"lm_head.weight", "embed_tokens.weight"}


def header_of(file: Path) -> tuple[dict[str, Any], bytes]:
    content = file.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def write_header(file: Path, header: dict[str, Any], values: bytes) -> None:
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + values)


def tensor_file(draw: random.Random, directory: Path) -> Path:
    return draw.choice(sorted(directory.glob("*.safetensors")))


def names(header: dict[str, Any]) -> list[str]:
    return sorted(set(header) - {"__metadata__"})


# --- Faults --------------------------------------------------------------------------------------


def truncated(draw: random.Random, directory: Path) -> str:
    file = draw.choice(sorted(directory.iterdir()))
    size = draw.choice([0, 1, 7, 8, 9, draw.randrange(file.stat().st_size)])
    file.write_bytes(file.read_bytes()[:size])
    return f"{file.name} to {size}"


def longer(draw: random.Random, directory: Path) -> str:
    file = tensor_file(draw, directory)
    extra = bytes(draw.randrange(256) for _ in range(draw.choice([1, 8, 100])))
    file.write_bytes(file.read_bytes() + extra)
    return f"{len(extra)} bytes more"


def flipped_in_header(draw: random.Random, directory: Path) -> str:
    """1 to 3 bytes of the header, its length among them, become other ones, or lose one bit."""
    file = tensor_file(draw, directory)
    content = bytearray(file.read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    told = []
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        at = draw.randrange(8 + size) if draw.random() < 0.9 else draw.randrange(8)
        new = content[at] ^ (1 << draw.randrange(8)) if draw.random() < 0.5 else draw.randrange(256)
        told.append(f"{at}: {content[at]} to {new}")
        content[at] = new
    file.write_bytes(content)
    return ", ".join(told)


def digit_in_header(draw: random.Random, directory: Path) -> str:
    """A digit becomes another one: still JSON."""
    file = tensor_file(draw, directory)
    content = bytearray(file.read_bytes())
    (size,) = struct.unpack("<Q", content[:8])
    at = draw.choice([i for i in range(8, 8 + size) if chr(content[i]).isdigit()])
    content[at] = ord(draw.choice([digit for digit in "0123456789" if ord(digit) != content[at]]))
    file.write_bytes(content)
    return f"digit at {at}"


def swapped_names(draw: random.Random, directory: Path) -> str:
    """Two tensors exchange names, shapes alike where there are such."""
    file = tensor_file(draw, directory)
    header, values = header_of(file)
    first = draw.choice(names(header))
    alike = [
        n for n in names(header) if n != first and header[n]["shape"] == header[first]["shape"]
    ]
    second = draw.choice(alike or [n for n in names(header) if n != first])
    header[first], header[second] = header[second], header[first]
    write_header(file, header, values)
    return f"{first} and {second}"


def renamed(draw: random.Random, directory: Path) -> str:
    file = tensor_file(draw, directory)
    header, values = header_of(file)
    name = draw.choice(names(header))
    new = draw.choice(["x.weight", name + "_scale", "logit_head." + name, name.upper(), ""])
    header[new] = header.pop(name)
    write_header(file, header, values)
    return f"{name} to {new}"


def another_shape(draw: random.Random, directory: Path) -> str:
    file = tensor_file(draw, directory)
    header, values = header_of(file)
    entry = header[draw.choice(names(header))]
    old = entry["shape"]
    size = 1
    for extent in old:
        size *= extent
    more = [extent + 1 for extent in old]
    ways = [old[::-1], [size], [1, *old], [*old, 1], more, [], [0], [-1], [2**63]]
    entry["shape"] = draw.choice([way for way in ways if way != old])
    write_header(file, header, values)
    return f"{old} to {entry['shape']}"


DTYPES = ("F16", "BF16", "I16", "U16", "F32", "I32", "I8", "F8_E4M3", "BOOL", "I64", "F64", "X9")


def another_dtype(draw: random.Random, directory: Path) -> str:
    file = tensor_file(draw, directory)
    header, values = header_of(file)
    chosen = draw.choice([names(header), [draw.choice(names(header))]])  # all of them, or one
    old = header[chosen[0]]["dtype"]
    new = draw.choice([dtype for dtype in DTYPES if dtype != old])
    for name in chosen:
        if header[name]["dtype"] == old:
            header[name]["dtype"] = new
    write_header(file, header, values)
    return f"{old} to {new}"


def exchanged_offsets(draw: random.Random, directory: Path) -> str:
    """Two tensors exchange places: with equal sizes that is an exchange of names."""
    file = tensor_file(draw, directory)
    header, values = header_of(file)
    first = draw.choice(names(header))
    rest = [name for name in names(header) if name != first]
    alike = [name for name in rest if header[name]["shape"] == header[first]["shape"]]
    second = draw.choice(alike or rest)
    one, other = header[first], header[second]
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
    write_header(file, header, values)
    return f"{first}, {second}"


def broken_offsets(draw: random.Random, directory: Path) -> str:
    """A tensor's place overlaps another one's, or ends before it starts."""
    file = tensor_file(draw, directory)
    header, values = header_of(file)
    first, second = draw.sample(names(header), 2)
    how = draw.choice(["same", "shifted", "reversed"])
    start, end = header[first]["data_offsets"]
    other = header[second]["data_offsets"]
    ways = {"same": other, "shifted": [start + 2, end + 2], "reversed": [end, start]}
    header[first]["data_offsets"] = ways[how]
    write_header(file, header, values)
    return f"{how} {first}, {second}"


def no_tensor(draw: random.Random, directory: Path) -> str:
    """A tensor's entry and values are cut out: a consistent file that lacks it."""
    file = tensor_file(draw, directory)
    content = load_file(file)
    needed = sorted(set(content) - (set() if "deepspec" in directory.name else OPTIONAL))
    name = draw.choice(needed)
    del content[name]
    save_file(content, file, {"format": "pt"})
    return name


def file_gone(draw: random.Random, directory: Path) -> str:
    file = draw.choice(sorted(directory.iterdir()))
    file.unlink()
    return file.name


def not_a_file(draw: random.Random, directory: Path) -> str:
    file = draw.choice(sorted(directory.iterdir()))
    file.unlink()
    file.mkdir()
    return file.name


def of_another(draw: random.Random, directory: Path) -> str:
    """The tensor file of another checkpoint beside this config."""
    family = directory.name.split("-")[0]  # one of the same family would be a whole checkpoint
    others = [p for p in OTHERS if p.name.split("-")[0] != family]
    other = draw.choice(sorted(others))
    file = tensor_file(draw, directory)
    shutil.copy(next(other.glob("*.safetensors")), file)
    return other.name


def leaves(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON document."""
    if path:
        yield path
    listed = list(enumerate(node)) if isinstance(node, list) else []
    for key, value in list(node.items()) if isinstance(node, dict) else listed:
        yield from leaves(value, (*path, key))


STRANGE: list[Any] = [None, True, "", "x", -1, 0, 10**12, 10**40, 0.5]
STRANGE += [[], {}, [[]], {"a": 1}, ["x"], [None], [10**12]]


def strange_config(draw: random.Random, directory: Path) -> str:
    """A value of the config becomes one of another kind, or a number that no model has."""
    file = next(p for p in (directory / "config.json", directory / "run.json") if p.exists())
    content = read_json(file)
    path = draw.choice(list(leaves(content)))
    place = content
    for key in path[:-1]:
        place = place[key]
    old, place[path[-1]] = place[path[-1]], draw.choice(STRANGE)
    file.write_text(json.dumps(content))
    return f"{path}: {old!r} to {place[path[-1]]!r}"


def lost_or_new_field(draw: random.Random, directory: Path) -> str:
    file = next(p for p in (directory / "config.json", directory / "run.json") if p.exists())
    content = read_json(file)
    path = draw.choice([p for p in leaves(content) if isinstance(p[-1], str)])
    place = content
    for key in path[:-1]:
        place = place[key]
    value = place.pop(path[-1])
    if draw.random() < 0.6:
        place[draw.choice([path[-1] + "s", path[-1].upper(), "_" + path[-1]])] = value
    file.write_text(json.dumps(content))
    return str(path)


SIZES = [
    "vocab_size",
    "draft_vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "head_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "markov_rank",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "markov_head_type",
    "projector_type",
    "target_layer_ids",
    "layer_types",
]  # what the tensors' shapes and names contradict


def contradicted_size(draw: random.Random, directory: Path) -> str:
    """A size that the tensors contradict."""
    file = next(p for p in (directory / "config.json", directory / "run.json") if p.exists())
    content = read_json(file)
    found = [p for p in leaves(content) if p[-1] in SIZES]
    path = draw.choice(found)
    place = content
    for key in path[:-1]:
        place = place[key]
    old = place[path[-1]]
    if isinstance(old, bool):
        new: Any = not old
    elif isinstance(old, int):
        new = draw.choice([old + 1, old - 1, old * 2, old + 1000])
    elif isinstance(old, list):
        new = draw.choice([old[:-1], [*old, *old[-1:]], old + ["full_attention"] * 3])
    else:
        new = draw.choice([x for x in ("vanilla", "gated", "rnn", "dflash", "dspark") if x != old])
    place[path[-1]] = new
    file.write_text(json.dumps(content))
    return f"{path}: {old!r} to {new!r}"


def broken_json(draw: random.Random, directory: Path) -> str:
    file = draw.choice(sorted(directory.glob("*.json")))
    content = bytearray(file.read_bytes())
    how = draw.choice(["cut", "byte", "twice", "deep", "bytes"])
    if how == "cut":
        content = content[: draw.randrange(len(content))]
    elif how == "byte":
        content[draw.choice([0, len(content) // 2, len(content) - 2])] = 0xFF
    elif how == "twice":
        content = content * 2
    elif how == "deep":
        content = bytearray(b"[" * 100_000)
    else:
        content = bytearray(b"\x80\x02}")
    file.write_bytes(content)
    return f"{file.name} {how}"


def record_changed(draw: random.Random, directory: Path) -> str:
    """run.json: what is beside the draft's config."""
    file = directory / "run.json"
    content = read_json(file)
    key = draw.choice(["format", "version", "algorithm", "headers", "training", "draft"])
    if key == "headers" and draw.random() < 0.7:
        name, digest = next(iter(content["headers"].items()))
        ways = [{name: digest[:-1] + "x"}, {name + "x": digest}, {name: 3}, {name: digest, "b": ""}]
        content["headers"] = draw.choice(ways)
    elif key == "algorithm":
        content[key] = draw.choice(["dflash", "DSpark", "eagle3", "x", 3, None])
    else:
        content[key] = draw.choice([*STRANGE, "hf"])
    file.write_text(json.dumps(content))
    return f"{key}: {content[key]!r}"


def training_changed(draw: random.Random, directory: Path) -> str:
    """A value of the run's record is of another kind, or gone."""
    file = directory / "run.json"
    content = read_json(file)
    training = content["training"]
    key = draw.choice(["step", "updates", "guard", "objective", "optimizer", "target", "resume"])
    if draw.random() < 0.2:
        del training[key]
    else:
        kind = type(training[key])
        training[key] = draw.choice([x for x in STRANGE if type(x) is not kind or x == -1])
    file.write_text(json.dumps(content))
    return f"{key}: {training.get(key)!r}"


def lying_index(draw: random.Random, directory: Path) -> str:
    """The index of a sharded checkpoint says something else."""
    file = directory / "model.safetensors.index.json"
    content = read_json(file)
    placed = content["weight_map"]
    name = draw.choice(sorted(placed))
    files = sorted(set(placed.values()))
    how = draw.choice(["other file", "no file", "dropped", "added", "kind", "outside", "renamed"])
    if how == "other file":
        placed[name] = draw.choice([f for f in files if f != placed[name]])
    elif how == "no file":
        placed[name] = draw.choice(["model-9.safetensors", "", ".", "config.json", "model.bin"])
    elif how == "dropped":
        del placed[name]
    elif how == "added":
        placed[name + "x"] = placed[name]
    elif how == "kind":
        content["weight_map"] = draw.choice([[], {}, None, 3, "x", list(placed), {name: None}])
    elif how == "outside":
        placed[name] = draw.choice(["../a.safetensors", "/etc/passwd", "..", "x/" + files[0]])
    else:
        placed[name + ".weight"] = placed.pop(name)
    file.write_text(json.dumps(content))
    return f"{how} {name}"


def shard_of_another(draw: random.Random, directory: Path) -> str:
    """Two shards exchange names."""
    first, second = draw.sample(sorted(directory.glob("*.safetensors")), 2)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    return f"{first.name}, {second.name}"


def one_dtype(draw: random.Random, directory: Path) -> str:
    """One tensor's dtype becomes one of the same width."""
    file = tensor_file(draw, directory)
    header, values = header_of(file)
    entry = header[draw.choice(names(header))]
    alike = {"BF16": ["F16", "I16", "U16"], "BOOL": ["U8", "I8"], "I64": ["U64", "F64"]}
    old, entry["dtype"] = entry["dtype"], draw.choice(alike[entry["dtype"]])
    write_header(file, header, values)
    return f"{old} to {entry['dtype']}"


HEADERS: list[Fault] = [flipped_in_header, digit_in_header, swapped_names, renamed]
HEADERS += [another_shape, another_dtype, exchanged_offsets, broken_offsets]
FILES: list[Fault] = [truncated, longer, no_tensor, file_gone, not_a_file, of_another]
CONFIGS: list[Fault] = [strange_config, lost_or_new_field, contradicted_size, broken_json]
RECORDS: list[Fault] = [record_changed, training_changed]
# Faults that show in a checkpoint of another writer too, which carries no digest of its header:
# there two tensors of one shape that exchange their names are another checkpoint.
FOREIGN: list[Fault] = [flipped_in_header, digit_in_header, renamed, another_shape, one_dtype]
FOREIGN += [broken_offsets, truncated, longer, no_tensor, file_gone, not_a_file]
SHARDED: list[Fault] = [*FOREIGN, lying_index, shard_of_another]
