"""The tensors of a checkpoint directory, by name and one at a time: safetensors or torch's .bin.

Nothing is read before it is asked for, and what is asked for is a view of the file (mmap): a draft
of any size is converted in the memory of its largest tensor.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torch_port.errors import UserError

# safetensors' names of the dtypes that a draft or its training state may have.
DTYPES = {
    "BOOL": torch.bool,
    "I64": torch.int64,
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
LAYOUT_KEY = "layout_sha256"  # in a file's metadata: what `layout_digest` says of its header

_LARGEST_HEADER = 10**8  # safetensors' own limit
_UNREADABLE = (OSError, SafetensorError, RuntimeError, ValueError, KeyError, EOFError, TypeError)


@dataclass(frozen=True)
class TensorRef:
    """One tensor that can be loaded: its dtype (safetensors' name), shape, and where it is from.

    `place`: the file and the offset at which its bytes lie in one piece, where they do.
    """

    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], Tensor]
    where: str
    place: tuple[Path, int] | None = None

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        size = torch.empty(0, dtype=DTYPES[self.dtype]).element_size()
        for extent in self.shape:
            size *= extent
        return size


Weights = dict[str, TensorRef]


def tensor_ref(tensor: Tensor, where: str) -> TensorRef:
    """Wrap a tensor that is in memory. Raises UserError for a dtype that no draft has."""
    if tensor.dtype not in DTYPE_NAMES:
        raise _wrong_dtype(where, str(tensor.dtype).removeprefix("torch."))
    return TensorRef(DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), lambda: tensor, where)


def layout_digest(entries: Iterable[tuple[str, str, Iterable[int]]]) -> str:
    """Return the sha256 of what a header says: (name, dtype, shape) of every tensor, in order.

    A header whose bytes were changed can still be a header, with two names exchanged say; the file
    would load and mean something else.
    """
    listed = [[name, dtype, list(shape)] for name, dtype, shape in entries]
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def header_digest(path: Path) -> str:
    """Return the sha256 of a safetensors file's header bytes, its length among them.

    Raises UserError when the file is shorter than its header.
    """
    try:
        with open(path, "rb") as stream:
            size = stream.read(8)
            header = stream.read(min(int.from_bytes(size, "little"), _LARGEST_HEADER))
    except OSError as error:
        raise _damaged(path, error) from None
    return hashlib.sha256(size + header).hexdigest()


def read_weights(directory: Path, wanted: Callable[[str], bool] = lambda name: True) -> Weights:
    """Find the wanted tensors of a checkpoint directory, by name; none is read yet.

    `model.safetensors`, or the files that `model.safetensors.index.json` names; else the same with
    `pytorch_model.bin`, which is opened with weights_only=True.
    Raises UserError when there is none, a file is damaged or absent, or a tensor is in two files.
    """
    for stem, suffix, reader in (
        ("model", "safetensors", _safetensors),
        ("pytorch_model", "bin", _pickled),
    ):
        whole = directory / f"{stem}.{suffix}"
        index = directory / f"{stem}.{suffix}.index.json"
        if whole.is_file() and index.is_file():
            raise UserError(
                f"{directory}: both {whole.name} and {index.name} are there, and they may differ; "
                "remove the one that is left over"
            )
        if whole.is_file():
            return reader(whole, wanted)
        if index.is_file():
            return _sharded(directory, index, reader, wanted)
    raise UserError(
        f"{directory}: no weights: expected model.safetensors, model.safetensors.index.json, "
        "pytorch_model.bin or pytorch_model.bin.index.json"
    )


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises UserError, naming the file, when it is none."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; expected a JSON file") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: no JSON ({error}); copy the checkpoint again") from None
    if not isinstance(content, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


Wanted = Callable[[str], bool]


def _sharded(
    directory: Path, index: Path, reader: Callable[[Path, Wanted], Weights], wanted: Wanted
) -> Weights:
    placed = read_json(index).get("weight_map")
    if not isinstance(placed, Mapping) or not placed:
        raise UserError(f"{index}: names no weight_map; copy the checkpoint again")
    placed = {str(tensor): file for tensor, file in placed.items() if wanted(str(tensor))}
    names = sorted({str(name) for name in placed.values()})
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise UserError(f"{index}: names a file outside of its directory: {outside[0]}")
    weights: Weights = {}
    for name in names:
        for tensor, ref in reader(directory / name, wanted).items():
            if placed.get(tensor) != name:
                raise UserError(
                    f"{index}: {tensor} is in {name}, the index says {placed.get(tensor)}; copy "
                    "the checkpoint again"
                )
            weights[tensor] = ref
    absent = sorted(set(placed) - set(weights))
    if absent:
        raise UserError(f"{index}: names {absent[0]}, which {placed[absent[0]]} does not hold")
    return weights


def _safetensors(path: Path, wanted: Wanted) -> Weights:
    return read_safetensors(path, wanted)[0]


def read_safetensors(
    path: Path, wanted: Wanted = lambda name: True
) -> tuple[Weights, dict[str, str]]:
    """Find the tensors of one safetensors file; none is read yet. Returns them and its metadata.

    Raises UserError for a damaged file, one whose header was changed after this package wrote it,
    and a dtype that no draft has.
    """
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            parts = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            entries = {n: (part.get_dtype(), tuple(part.get_shape())) for n, part in parts.items()}
            order = file.offset_keys()
        begins = _offsets(path)
    except _UNREADABLE as error:
        raise _damaged(path, error) from None
    digest = metadata.get(LAYOUT_KEY)
    if digest is not None and digest != layout_digest((n, *entries[n]) for n in order):
        raise UserError(
            f"{path}: its header was changed after it was written (names, dtypes or shapes differ "
            "from what the file says of itself); copy the checkpoint again"
        )
    weights: Weights = {}
    for name, (dtype, shape) in entries.items():
        if not wanted(name):
            continue
        if dtype not in DTYPES:
            raise _wrong_dtype(f"{path}: {name}", dtype)
        opener, place = _opener(path, name), (path, begins[name])
        weights[name] = TensorRef(dtype, shape, opener, f"{path}: {name}", place)
    return weights, metadata


def _offsets(path: Path) -> dict[str, int]:
    """Where each tensor's bytes begin in a file whose header the library has checked."""
    with open(path, "rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(size))
    return {
        name: 8 + size + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _opener(path: Path, name: str) -> Callable[[], Tensor]:
    def load() -> Tensor:
        try:
            with safe_open(path, "pt") as file:
                tensor: Tensor = file.get_tensor(name)
        except _UNREADABLE as error:
            raise _damaged(path, error) from None
        return tensor

    return load


def _pickled(path: Path, wanted: Wanted) -> Weights:
    try:
        with open(path, "rb") as stream:
            zipped = stream.read(2) == b"PK"  # else as torch wrote before 1.6: it cannot be mapped
        content = torch.load(path, weights_only=True, mmap=zipped, map_location="cpu")
    except Exception as error:  # noqa: BLE001 (a damaged pickle raises errors of any class)
        raise _damaged(path, error) from None
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise UserError(f"{path}: expected tensors by name, found something else; nothing is read")
    content = {name: value for name, value in content.items() if wanted(name)}
    odd = [n for n, t in content.items() if t.layout != torch.strided or t.device.type != "cpu"]
    if odd:
        raise UserError(f"{path}: {odd[0]} is no plain tensor (sparse, or without values)")
    return {name: tensor_ref(value.detach(), f"{path}: {name}") for name, value in content.items()}


def _wrong_dtype(where: str, dtype: str) -> UserError:
    return UserError(
        f"{where} is of dtype {dtype}: quantised weights (W8A8 and others) are not read; convert "
        "from the draft in bf16 or float32"
    )


def _damaged(path: Path, error: Exception) -> UserError:
    first = (str(error) or type(error).__name__).split("\n", 1)[0]
    return UserError(f"{path}: cannot be read ({first}); copy the checkpoint again")


def pieces(tensor: Tensor, limit: int) -> Iterator[Tensor]:
    """Yield a contiguous tensor's bytes as uint8 views of at most `limit` bytes."""
    flat = tensor.contiguous().view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0)
    yield from flat.split(limit) if flat.numel() else ()
