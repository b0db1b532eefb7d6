"""Damaged orbax directories: a refusal in one line or the right draft, nothing else (issue 6)."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from format_toys import CASES, H, bits, draft_tensors, hf_fields, write

from parity.convert import convert, read_checkpoint
from torch_port.errors import UserError


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft with some tensors large enough to lie in a file of their own values."""
    place, case = tmp_path_factory.mktemp("damage"), CASES["vanilla"]
    tensors = draft_tensors(case)
    shape = {"gate": (4096, H), "up": (4096, H), "down": (H, 4096)}
    g = torch.Generator().manual_seed(5)
    for i in range(case.layers):
        for name, extents in shape.items():
            drawn = torch.randn(extents, generator=g).bfloat16()
            tensors[f"layers.{i}.mlp.{name}_proj.weight"] = drawn
    fields = hf_fields(case) | {"intermediate_size": 4096, "use_cache": True}
    convert(write(place / "hf", fields, tensors), place / "whole", "orbax")
    return place / "whole"


def everything(directory: Path) -> Any:
    read = read_checkpoint(directory)
    tensors = {
        n: (r.dtype, r.shape, bits(r.load()).numpy().tobytes()) for n, r in read.weights.items()
    }
    return tensors, read.config, read.neutral, read.verifier, read.head, read.embedding


def damaged(data: bytearray, how: str, draw: random.Random) -> bytes:
    at = draw.randrange(max(len(data), 1))
    if how == "flip" and data:
        data[at] ^= 1 << draw.randrange(8)
    elif how == "zero":
        data[at : at + 8] = bytes(len(data[at : at + 8]))
    elif how == "cut":
        del data[at:]
    return bytes(data)


# When one array cannot be read, orbax's threads leave exceptions of the others behind.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("how", ["flip", "cut", "zero", "absent"])
def test_damage_is_refused_or_harmless(whole: Path, how: str, tmp_path: Path) -> None:
    """Faults: another value, name or setting read without a word (orbax itself reads a flipped bit
    of a value); a traceback of a library's.
    """
    expected, draw, seen = everything(whole), random.Random(how), Counter[str]()
    files = sorted(p.relative_to(whole) for p in whole.rglob("*") if p.is_file())
    # Where most bytes are, most flips fall on a disk; all others in turn.
    largest = max(files, key=lambda f: (whole / f).stat().st_size)
    for turn in range(16):
        copy = tmp_path / f"{turn}"
        shutil.copytree(whole, copy)
        file = copy / (largest if turn % 3 == 0 else files[turn % len(files)])
        if how == "absent":
            file.unlink()
        else:
            file.write_bytes(damaged(bytearray(file.read_bytes()), how, draw))
        found, refusal = outcome(copy)
        if refusal is None:
            assert found == expected, file
        else:
            assert "\n" not in refusal
            assert str(copy) in refusal
        seen["refused" if refusal else "the same"] += 1
        shutil.rmtree(copy)
    assert seen["refused"] >= 6, seen


def outcome(directory: Path) -> tuple[Any, str | None]:
    try:
        return everything(directory), None
    except UserError as error:
        return None, str(error)
