"""Writing safetensors tensor by tensor: the library's own writer wants all of them at once."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from torch_port.errors import UserError
from torch_port.formats.weights import (
    DTYPE_NAMES,
    LAYOUT_KEY,
    TensorRef,
    layout_digest,
    pieces,
)

_PIECE = 2**26  # bytes handed to the system at a time
_ALIGNMENT = 8  # safetensors pads its header to this


def write_safetensors(
    path: Path,
    tensors: Mapping[str, TensorRef],
    metadata: Mapping[str, str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> None:
    """Write tensors to a new file, one in memory at a time.

    Arguments: `metadata` goes beside "format" and the digest of the header; `progress(done, total)`
    is called with bytes. The same tensors give the same bytes.
    Raises UserError when a tensor is not what its reference says (its file changed meanwhile).
    Format: 8 bytes of header length, a JSON header padded with spaces, the values.
    """
    # Wider elements first, as the library does: every tensor starts on a multiple of its element.
    order = sorted(tensors, key=lambda name: (-_width(tensors[name]), name))
    listed = [(name, tensors[name].dtype, tensors[name].shape) for name in order]
    header: dict[str, Any] = {
        "__metadata__": dict(metadata or {}) | {"format": "pt", LAYOUT_KEY: layout_digest(listed)}
    }
    end = 0
    for name, dtype, shape in listed:
        start, end = end, end + tensors[name].nbytes
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "xb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        done = 0
        for name in order:
            done += _write_values(stream, tensors[name])
            progress(done, end)


def _width(ref: TensorRef) -> int:
    count = 1
    for extent in ref.shape:
        count *= extent
    return ref.nbytes // count if count else 0


def _write_values(stream: BinaryIO, ref: TensorRef) -> int:
    tensor = ref.load()
    if DTYPE_NAMES.get(tensor.dtype) != ref.dtype or tuple(tensor.shape) != ref.shape:
        raise UserError(f"{ref.where}: changed while it was read; convert again")
    if ref.place is not None and _copied(stream, *ref.place, ref.nbytes):
        return ref.nbytes
    for piece in pieces(tensor, _PIECE):
        stream.write(piece.numpy().data)
    return ref.nbytes


def _copied(stream: BinaryIO, source: Path, offset: int, count: int) -> bool:
    """Let the system copy bytes from file to file; False, with nothing written, where it cannot.

    Two thirds of the time of writing a mapped tensor, whose pages are faulted in one by one.
    """
    stream.flush()
    begin, done = stream.tell(), 0
    try:
        with open(source, "rb") as file:
            while done < count:
                moved = os.copy_file_range(
                    file.fileno(), stream.fileno(), min(count - done, _PIECE), offset + done
                )
                if moved == 0:
                    raise UserError(f"{source}: shorter than it was; convert again")
                done += moved
    except OSError:  # another file system, or one that cannot
        stream.seek(begin)
        stream.truncate()
        return False
    stream.seek(begin + count)
    return True
