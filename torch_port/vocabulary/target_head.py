"""The frozen head of a target in a local directory: its rows and its fingerprint.

Shape suffixes: V target ids, H hidden size.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from torch_port.errors import UserError
from torch_port.formats.target import TargetDirectory


def read_head(directory: Path) -> Tensor:
    """Read U [V, H] of a target in its stored dtype.

    Arguments: `directory` with config.json and weights, whole or with an index.
    Raises UserError when there is no such directory, no head, or a damaged file.
    """
    try:
        return TargetDirectory(directory).head().load()
    except UserError as error:
        raise UserError(f"--target: {error}") from None


def head_fingerprint(head_VH: Tensor) -> str:
    """Return the sha256 over a head's dtype, shape and bytes."""
    digest = hashlib.sha256(f"{head_VH.dtype}\0{list(head_VH.shape)}\0".encode())
    for part in head_VH.split(4096):  # never a second copy of the whole head
        digest.update(part.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
