"""Bytes that the system copies from file to file, and what is done where it cannot."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from torch_port.errors import UserError
from torch_port.formats import writer
from torch_port.formats.weights import read_safetensors

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4),
    "b": torch.tensor([True, False, True]),
    "c": torch.randn(5, 7).bfloat16(),
    "empty": torch.zeros(0, 3),
    "one": torch.tensor(2.5),
}


def refuses(*_: Any) -> int:
    raise OSError(errno.EXDEV, "across file systems")


@pytest.mark.parametrize("how", ["copied", "a byte at a time", "refused", "refused half way"])
def test_every_way_of_copying_gives_the_same_bytes(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults: a short copy taken for a whole one; what a refused copy left behind kept."""
    save_file(TENSORS, tmp_path / "source")
    real, calls = os.copy_file_range, [0]

    def half(source: int, destination: int, count: int, offset: int) -> int:
        calls[0] += 1
        if how == "refused half way" and calls[0] % 2 == 0:
            refuses()
        return real(source, destination, 1, offset)

    if how != "copied":
        fake = refuses if how == "refused" else half
        monkeypatch.setattr(os, "copy_file_range", fake)
    refs = read_safetensors(tmp_path / "source")[0]
    writer.write_safetensors(tmp_path / "copy", refs)
    got = load_file(tmp_path / "copy")
    assert set(got) == set(TENSORS)
    for name, value in TENSORS.items():
        assert got[name].dtype == value.dtype
        assert torch.equal(got[name], value), name


def test_a_source_that_became_shorter_is_refused(tmp_path: Path) -> None:
    """Fault: the rest of a file that was cut meanwhile written as whatever comes."""
    save_file({"big": torch.zeros(1000)}, tmp_path / "source")
    refs = read_safetensors(tmp_path / "source")[0]
    whole = (tmp_path / "source").read_bytes()
    (tmp_path / "source").write_bytes(whole[:-100])
    with pytest.raises(UserError, match=r"copy the checkpoint again|convert again"):
        writer.write_safetensors(tmp_path / "copy", refs)
