"""What formats borrow of a target directory: embedding, kept head rows; never anything made up."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from format_toys import (
    CASES,
    KEPT,
    LAYERS,
    H,
    V,
    read_json,
    read_tensors,
    target_tensors,
    write,
    write_draft,
    write_target,
)
from safetensors.torch import save_file

from torch_port.errors import UserError
from torch_port.formats.convert import Options, convert
from torch_port.formats.target import TargetDirectory

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"


def deepspec(folder: Path, target: Path, name: str = "vanilla") -> dict[str, torch.Tensor]:
    """Convert the by-hand draft to deepspec with this target; return what was written."""
    draft = write_draft(folder / "draft", CASES[name])
    convert(draft, folder / "out", "deepspec", Options(TargetDirectory(target)))
    return read_tensors(folder / "out")


def check(written: dict[str, torch.Tensor], head_of: str, pruned: bool = True) -> None:
    tensors = target_tensors()
    rows = list(KEPT) if pruned else list(range(V))
    assert torch.equal(written[EMBEDDING], tensors[EMBEDDING])
    assert torch.equal(written[HEAD], tensors[head_of][rows])


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("text_part", [False, True])
@pytest.mark.parametrize("rows", [V, V + 8])
@pytest.mark.parametrize("name", ["vanilla", "full vocabulary"])
def test_untied_targets(shards: int, text_part: bool, rows: int, name: str, tmp_path: Path) -> None:
    """Whole and sharded; the text part of a multimodal one; rows padded beyond V (field-note 27).

    Faults: the embedding's rows as head, the vision tower's tensors, padding rows taken along.
    """
    target = write_target(tmp_path / "t", shards, rows=rows, text_part=text_part)
    check(deepspec(tmp_path, target, name), HEAD, pruned=name == "vanilla")


@pytest.mark.parametrize("head_key", [False, True])
@pytest.mark.parametrize("text_part", [False, True])
def test_tied_targets(head_key: bool, text_part: bool, tmp_path: Path) -> None:
    """Field-note 23: a tied config means the embedding, whether or not a head lies in the file.

    Faults: the setting ignored, or looked for at the outer level alone."""
    target = write_target(tmp_path / "t", tied=True, head_key=head_key, text_part=text_part)
    check(deepspec(tmp_path, target), EMBEDDING)


def test_tied_at_the_outer_level_of_a_multimodal_config(tmp_path: Path) -> None:
    """Fault: the inner level's absence read as untied."""
    target = write_target(tmp_path / "t", text_part=True, head_key=False)
    config = read_json(target / "config.json")
    del config["text_config"]["tie_word_embeddings"]
    config["tie_word_embeddings"] = True
    (target / "config.json").write_text(json.dumps(config))
    check(deepspec(tmp_path, target), EMBEDDING)


def refused(tmp_path: Path, target: Path, text: str, name: str = "vanilla") -> None:
    with pytest.raises(UserError, match=text) as caught:
        deepspec(tmp_path, target, name)
    assert str(target) in str(caught.value)
    assert [p.name for p in tmp_path.iterdir()] in ([["draft"], ["draft", "t"], ["t", "draft"]])


def test_an_untied_target_without_a_head_is_refused(tmp_path: Path) -> None:
    """Fault: the embedding taken for it."""
    target = write_target(tmp_path / "t", head_key=False)
    refused(tmp_path, target, r"expected one lm_head\.weight.*found none")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"layers": LAYERS + 1}, r"num_hidden_layers is 5, but.*of 4"),
        ({"hidden_size": H + 2}, r"hidden_size is 10, but.*of 8"),
    ],
)
def test_targets_of_other_sizes_by_their_config(
    changes: dict[str, Any], text: str, tmp_path: Path
) -> None:
    """Fault: another model of the same width: its layers are not those that were captured."""
    refused(tmp_path, write_target(tmp_path / "t", **changes), text)


@pytest.mark.parametrize("shape", [(V - 1, H), (V, H + 1)])
def test_targets_of_other_sizes_by_their_tensors(shape: tuple[int, int], tmp_path: Path) -> None:
    """Fault: rows out of range, or a head that fits no state."""
    config = read_json(write_target(tmp_path / "whole") / "config.json")
    tensors = {n: torch.zeros(shape, dtype=torch.bfloat16) for n in (f"model.{EMBEDDING}", HEAD)}
    (tmp_path / "whole" / "model.safetensors").unlink()
    (tmp_path / "whole" / "config.json").unlink()
    (tmp_path / "whole").rmdir()
    target = write(tmp_path / "t", config, tensors)
    refused(tmp_path, target, re.escape(f"shape {list(shape)}, but the draft has vocab_size 16"))


def test_two_embeddings_are_refused(tmp_path: Path) -> None:
    """Fault: the first of two towers."""
    config = read_json(write_target(tmp_path / "t") / "config.json")
    tensors = {f"{p}.{EMBEDDING}": target_tensors()[EMBEDDING] for p in ("model.a", "model.b")}
    target = write(tmp_path / "two" / "t", config, tensors | {HEAD: target_tensors()[HEAD]})
    with pytest.raises(UserError, match=r"expected one embed_tokens\.weight.*model\.a.*model\.b"):
        deepspec(tmp_path / "x", target)


def test_a_target_that_is_not_on_disk(tmp_path: Path) -> None:
    """Fault: a download, or a FileNotFoundError."""
    refused(tmp_path, tmp_path / "Qwen" / "Qwen3", "no such directory.*nothing is downloaded")


def test_a_quantised_target_is_refused(tmp_path: Path) -> None:
    """Fault: int8 codes written as a head."""
    config = read_json(write_target(tmp_path / "t") / "config.json")
    codes = {f"model.{EMBEDDING}": torch.zeros(V, H, dtype=torch.int8)}
    target = write(tmp_path / "two" / "t", config, codes)
    with pytest.raises(UserError, match="of dtype I8: quantised"):
        deepspec(tmp_path / "x", target)


def test_a_target_with_quantised_layers_lends_its_plain_head(tmp_path: Path) -> None:
    """Faults: refused for a layer that nothing reads; a quantised head taken for a plain one."""
    target = write_target(tmp_path / "target")
    tensors = read_tensors(target)
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.ones(4, 4, dtype=torch.int8)
    save_file(tensors, target / "model.safetensors")
    check(deepspec(tmp_path / "a", target), HEAD)
    tensors[HEAD] = torch.ones(V, H, dtype=torch.int8)
    save_file(tensors, target / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head\.weight is of dtype I8: quantised"):
        deepspec(tmp_path / "b", target)
