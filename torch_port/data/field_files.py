"""The field's feature files: one `.ckpt` or `.ckpt.gz` a sample, a torch.save of a dict.

Keys as in contracts §5. Files are opened with weights_only=True; `.ckpt` is mapped, so that a part
of it costs its own bytes. Listing opens none; lengths are known once an index was written.

Shape suffixes: S tokens of a sample, L captured layers, H hidden size.
"""

from __future__ import annotations

import gzip
import io
import os
from pathlib import Path

import torch
from torch import Tensor

from torch_port.data.conversations import DataError
from torch_port.data.features import STATE_NAMES, TOKEN_NAMES, FeatureDirectory, FeatureSample
from torch_port.data.index import INDEX_NAME, read_index

SUFFIXES = (".ckpt", ".ckpt.gz")
_REQUIRED = (*TOKEN_NAMES, *STATE_NAMES[:2])
_OPTIONAL = STATE_NAMES[2]


class FieldDirectory:
    """Map-style reader of a directory of the field's files: in its index's order, else by name.

    Attributes:
        ids: per file, its sample's name: the index's, else the file's without the ending.
        lengths, supervised, trainable: per file, as its index says; None without an index.
        metadata: what the index's writer kept with it.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.files = _listed(self.path)
        self.ids = [_stem(name) for name in self.files]
        self.lengths: list[int] | None = None
        self.supervised: list[int] | None = None
        self.trainable: list[bool | None] | None = None
        self.metadata: dict[str, object] = {}
        if (self.path / INDEX_NAME).is_file():
            self._take_index()

    def _take_index(self) -> None:
        index = read_index(self.path)
        if sorted(index.shards) != self.files:
            raise DataError(
                f"{self.path}: its index is of {len(index.shards)} files, which are not the "
                f"{len(self.files)} that are there. Write it again: torch-port features check "
                "--write-index."
            )
        self.files = index.shards
        self.ids = [entry.id for entry in index.samples]
        self.lengths = [entry.length for entry in index.samples]
        self.supervised = [entry.supervised for entry in index.samples]
        self.trainable = [entry.trainable for entry in index.samples]
        self.metadata = index.metadata

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        """All tensors of file i; ids int64 and masks float32, states as they are stored.

        Raises IndexError, and DataError for a file that is missing, damaged, or holds other keys.
        """
        return read_file(self.path / self.files[i])


Features = FeatureDirectory | FieldDirectory


def open_features(path: str | Path) -> Features:
    """Open a feature directory of either kind; no file but an index is opened.

    Raises DataError when it is none.
    """
    path = Path(path)
    if _is_field(path):
        return FieldDirectory(path)
    return FeatureDirectory(path)


def read_file(path: Path) -> dict[str, Tensor]:
    """Read one `.ckpt` (mapped) or `.ckpt.gz`.

    Returns the tensors of contracts §5: `input_ids` int64, `loss_mask` float32, states as stored.
    Raises DataError for a file that is missing, damaged, or no dict of these tensors.
    """
    try:
        if path.name.endswith(".gz"):
            with gzip.open(path, "rb") as stream:
                content = torch.load(io.BytesIO(stream.read()), weights_only=True)
        else:
            content = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
    except Exception as error:  # noqa: BLE001 - a damaged file raises errors of any class
        first = (str(error) or type(error).__name__).strip().split("\n", 1)[0]
        raise DataError(f"{path}: cannot be read ({first}). Capture the sample again.") from None
    if not isinstance(content, dict) or not all(isinstance(v, Tensor) for v in content.values()):
        raise DataError(f"{path}: expected a dict of tensors. Capture the sample again.")
    absent = [name for name in _REQUIRED if name not in content]
    unknown = sorted(set(map(str, content)) - {*_REQUIRED, _OPTIONAL})
    if absent or unknown:
        told = f"{absent[0]} is absent" if absent else f"{unknown[0]} is unknown"
        raise DataError(f"{path}: {told}; expected {', '.join(_REQUIRED)}, maybe {_OPTIONAL}.")
    content["input_ids"] = content["input_ids"].long()
    content["loss_mask"] = content["loss_mask"].float()
    return content


def write_file(path: Path, sample: FeatureSample) -> None:
    """Write one sample as `.ckpt` or `.ckpt.gz`, by the name's ending."""
    tensors = {name: getattr(sample, name) for name in (*_REQUIRED, _OPTIONAL)}
    # Clones: torch.save writes a view's whole storage.
    content = {name: t.clone() for name, t in tensors.items() if t is not None}
    if not path.name.endswith(".gz"):
        torch.save(content, path)
        return
    plain = io.BytesIO()
    torch.save(content, plain)
    # Without the time, so that the same sample gives the same bytes.
    path.write_bytes(gzip.compress(plain.getbuffer(), 6, mtime=0))


def _is_field(path: Path) -> bool:
    try:
        with os.scandir(path) as found:
            return any(item.name.endswith(SUFFIXES) for item in found)
    except OSError:
        return False  # FeatureDirectory says what is wrong


def _listed(path: Path) -> list[str]:
    with os.scandir(path) as found:
        names = sorted(item.name for item in found if item.name.endswith(SUFFIXES))
    twice = len({_stem(name) for name in names}) < len(names)
    if twice:
        raise DataError(
            f"{path}: a sample is there as .ckpt and as .ckpt.gz. Remove one of the two."
        )
    return names


def _stem(name: str) -> str:
    return name.removesuffix(".gz").removesuffix(".ckpt")
