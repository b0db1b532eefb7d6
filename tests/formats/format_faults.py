"""Checkpoints with one thing wrong, and what a refusal is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from format_toys import (
    CASES,
    Case,
    draft_tensors,
    hf_fields,
    read_json,
    write,
    write_draft,
)
from torch import Tensor

from torch_port.errors import UserError
from torch_port.formats.convert import Options, convert

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
PRUNED = CASES["vanilla"]


def refuse(source: Path, text: str, to: str = "hf", options: Options | None = None) -> str:
    """Convert; expect one sentence with `text`, and nothing written."""
    place = source.parent / "destination"
    place.mkdir()
    with pytest.raises(UserError, match=text) as caught:
        convert(source, place / "out", to, options)
    assert list(place.iterdir()) == []
    message = str(caught.value)
    assert "\n" not in message
    return message


def with_tensors(folder: Path, case: Case = PRUNED, **changes: Tensor | None) -> Path:
    """A by-hand hf draft with tensors replaced, added or (None) left out; `_` stands for a dot."""
    tensors: dict[str, Any] = draft_tensors(case) | {
        n.replace("__", "."): t for n, t in changes.items()
    }
    return write(folder / "a", hf_fields(case), {n: t for n, t in tensors.items() if t is not None})


def with_config(folder: Path, kind: str = "hf", case: Case = PRUNED, **fields: Any) -> Path:
    directory = write_draft(folder / "a", case, kind)
    config = read_json(directory / "config.json")
    for name, value in fields.items():
        where, last = config, name
        if "__" in name:
            outer, last = name.split("__")
            where = config[outer]
        where[last] = value
    (directory / "config.json").write_text(json.dumps(config))
    return directory
