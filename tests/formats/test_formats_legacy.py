"""Checkpoints of earlier and other writers: old names, old places, torch's .bin files, shards."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from format_toys import (
    CASES,
    LAYERS,
    Case,
    assert_same,
    deepspec_fields,
    draft_tensors,
    eagle3_fields,
    hf_fields,
    read_json,
    read_tensors,
    speculators_fields,
    write,
    write_draft,
    write_eagle3,
    write_target,
)
from torch import Tensor

from torch_port.errors import UserError
from torch_port.formats.config_files import field_layer_ids
from torch_port.formats.convert import convert, read_checkpoint
from torch_port.formats.target import TargetDirectory


def loaded(directory: Path) -> dict[str, Tensor]:
    return {name: ref.load() for name, ref in read_checkpoint(directory).weights.items()}


def change(directory: Path, **fields: Any) -> Path:
    """Set fields of config.json; None removes one, `inside` is for dflash_config."""
    config = read_json(directory / "config.json")
    inside = fields.pop("inside", {})
    for place, changes in ((config, fields), (config.get("dflash_config", {}), inside)):
        place.update(changes)
        for name in [n for n, v in changes.items() if v is None]:
            del place[name]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", ["gated", "rnn", "full vocabulary"])
def test_heads_under_logit_head_are_read_and_told(name: str, tmp_path: Path) -> None:
    """Faults: the old names refused as unknown, or kept in what is written."""
    tensors = draft_tensors(CASES[name])
    old = {("logit_head." + n if "head" in n else n): t for n, t in tensors.items()}
    heads = sum("head" in n for n in tensors)
    directory = write(tmp_path / "old", hf_fields(CASES[name]), old)
    checkpoint, _ = convert(directory, tmp_path / "new", "hf")
    assert any(f"{heads} weights under logit_head." in note for note in checkpoint.notes)
    assert_same(read_tensors(tmp_path / "new"), tensors)


def test_one_head_under_both_names_is_refused(tmp_path: Path) -> None:
    """Fault: the one read last wins."""
    tensors = draft_tensors(CASES["vanilla"])
    name = "markov_head.markov_w1.weight"
    tensors[f"logit_head.{name}"] = tensors[name] + 1
    directory = write(tmp_path / "both", hf_fields(CASES["vanilla"]), tensors)
    with pytest.raises(UserError, match=r"markov_w1\.weight is there twice"):
        read_checkpoint(directory)


@pytest.mark.parametrize("kind", ["hf", "deepspec"])
@pytest.mark.parametrize(
    ("nested", "top"),
    [({"rope_theta": 5e5}, None), ({"rope_theta": 5e5, "rope_type": "default"}, 5e5), ({}, 5e5)],
)
def test_rope_theta_is_read_wherever_it_stands(
    kind: str, nested: dict[str, Any], top: float | None, tmp_path: Path
) -> None:
    """Fault: a default base where the file says another: a draft that looks fine and is none."""
    directory = write_draft(tmp_path / "a", CASES["vanilla"], kind)
    change(directory, rope_theta=top, rope_parameters=nested)
    assert read_checkpoint(directory).config.rope_theta == 5e5


def test_eagle3_reads_rope_theta_under_rope_parameters(tmp_path: Path) -> None:
    """Fault: the other family's reader forgotten."""
    directory = write_eagle3(tmp_path / "a")
    change(directory, rope_theta=None, rope_parameters={"rope_theta": 7.0, "rope_type": "default"})
    assert read_checkpoint(directory).config.rope_theta == 7.0


@pytest.mark.parametrize(
    ("layers", "count", "ids"),
    [  # by hand: 1 + i·(layers − 4)/(count − 1), rounded half to even
        (36, 5, [1, 9, 17, 25, 33]),
        (28, 5, [1, 7, 13, 19, 25]),
        (64, 5, [1, 16, 31, 46, 61]),
        (36, 6, [1, 7, 14, 20, 27, 33]),
        (9, 3, [1, 4, 6]),  # 3.5 → 4
        (11, 3, [1, 4, 8]),  # 4.5 → 4
        (36, 1, [18]),
        (4, 1, [2]),
    ],
)
def test_the_fields_rule_for_missing_target_layers(layers: int, count: int, ids: list[int]) -> None:
    """Faults: rounding half up, the last layer among them, a single layer at the end."""
    assert field_layer_ids(layers, count) == ids


@pytest.mark.parametrize("kind", ["hf", "deepspec"])
def test_missing_target_layers_are_derived_and_told(kind: str, tmp_path: Path) -> None:
    """Faults: refused, or derived in silence."""
    case = Case(pruned=False, head="none")  # 2 layers
    fields = (hf_fields if kind == "hf" else deepspec_fields)(case) | {"num_target_layers": 9}
    (fields["dflash_config"] if kind == "hf" else fields).pop("target_layer_ids")
    directory = write_draft(tmp_path / "a", case, kind)
    (directory / "config.json").write_text(json.dumps(fields))
    checkpoint = read_checkpoint(directory)
    assert checkpoint.config.target_layer_ids == (1, 6)
    assert any("target_layer_ids [1, 6], derived" in note for note in checkpoint.notes)


def test_missing_eagle3_layers_are_derived_and_told(tmp_path: Path) -> None:
    """By hand for 36 layers: the second, the middle less one, the fourth last.

    Fault: DFlash's rule for another family."""
    fields = eagle3_fields() | {"num_target_layers": 36}
    del fields["eagle_config"]
    directory = write_eagle3(tmp_path / "a")
    (directory / "config.json").write_text(json.dumps(fields))
    checkpoint = read_checkpoint(directory)
    assert checkpoint.config.target_layer_ids == (1, 17, 32)
    assert any("[1, 17, 32], derived" in note for note in checkpoint.notes)


def test_newer_files_keep_block_size_inside(tmp_path: Path) -> None:
    """Faults: refused as missing; two places that differ accepted."""
    directory = write_draft(tmp_path / "a", CASES["dflash"])
    change(directory, block_size=None, inside={"block_size": 7})
    assert read_checkpoint(directory).config.block_size == 7
    change(directory, block_size=4)
    with pytest.raises(UserError, match=r"\['block_size'\] stand both"):
        read_checkpoint(directory)


def test_code_is_left_out_and_told(tmp_path: Path) -> None:
    """Fault: auto_map carried along: a server would run another package's file."""
    directory = change(write_draft(tmp_path / "a", CASES["vanilla"]), auto_map={"AutoModel": "x.Y"})
    checkpoint, _ = convert(directory, tmp_path / "b", "hf")
    assert any("auto_map left out" in note for note in checkpoint.notes)
    assert "auto_map" not in read_json(tmp_path / "b" / "config.json")


def test_neutral_fields_come_back_from_every_format(tmp_path: Path) -> None:
    """Fault: dropped on the way, or moved to another place."""
    extra = {
        "dtype": "bfloat16",
        "transformers_version": "5.0.0",
        "use_cache": False,
        "max_position_embeddings": 99,
        "bos_token_id": 3,
        "eos_token_id": [4, 5],
        "attention_dropout": 0.0,
    }
    case = Case(pruned=False, extra=extra)
    way = [write_draft(tmp_path / "hf", case)]
    for kind in ("speculators", "port", "hf"):
        way.append(tmp_path / f"{kind}2")
        convert(way[-2], way[-1], kind)
    assert read_json(way[-1] / "config.json") == hf_fields(case)


# --- Files ---------------------------------------------------------------------------------------


def as_bin(directory: Path, shards: int = 1, **how: Any) -> Path:
    """Replace model.safetensors by torch's pickled files."""
    tensors = read_tensors(directory)
    (directory / "model.safetensors").unlink()
    if shards == 1:
        torch.save(tensors, directory / "pytorch_model.bin", **how)
        return directory
    placed = {}
    for i in range(shards):
        name = f"pytorch_model-{i + 1:05}-of-{shards:05}.bin"
        part = dict(list(tensors.items())[i::shards])
        torch.save(part, directory / name, **how)
        placed |= dict.fromkeys(part, name)
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": placed}))
    return directory


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("old", [False, True])
def test_bin_files(shards: int, old: bool, tmp_path: Path) -> None:
    """Faults: shards forgotten; the layout from before torch 1.6, which cannot be mapped."""
    case = CASES["gated"]
    directory = as_bin(
        write_draft(tmp_path / "a", case), shards, _use_new_zipfile_serialization=not old
    )
    assert_same(loaded(directory), draft_tensors(case))


def test_parameters_and_views_in_bin_files(tmp_path: Path) -> None:
    """Faults: a tensor that wants gradients, or is no block of memory, cannot be written."""
    case = CASES["full vocabulary"]
    tensors = draft_tensors(case)
    directory = write(tmp_path / "a", hf_fields(case), tensors)
    (directory / "model.safetensors").unlink()
    odd: dict[str, Tensor] = {n: torch.nn.Parameter(t) for n, t in tensors.items()}
    odd["fc.weight"] = tensors["fc.weight"].T.contiguous().T
    torch.save(odd, directory / "pytorch_model.bin")
    convert(directory, tmp_path / "b", "hf")
    assert_same(read_tensors(tmp_path / "b"), tensors)


class Runs:
    """Pickles to a call: what an attacker's checkpoint holds."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_bin_file_does_not_run(zipped: bool, tmp_path: Path) -> None:
    """Fault: weights_only left out. The same file does run code for a plain unpickler."""
    directory = write_draft(tmp_path / "a", CASES["vanilla"])
    (directory / "model.safetensors").unlink()
    file = directory / "pytorch_model.bin"
    torch.save({"fc.weight": Runs(tmp_path / "ran")}, file, _use_new_zipfile_serialization=zipped)
    with pytest.raises(UserError, match=r"pytorch_model\.bin: cannot be read"):
        read_checkpoint(directory)
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Runs(tmp_path / "ran")))  # noqa: S301 (the trap itself works)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [[1, 2], {"model": {"fc.weight": torch.ones(2)}}, {"a": 1}])
def test_bin_files_of_something_else(content: Any, tmp_path: Path) -> None:
    """Fault: an AttributeError from the middle of the reader."""
    directory = write_draft(tmp_path / "a", CASES["vanilla"])
    (directory / "model.safetensors").unlink()
    torch.save(content, directory / "pytorch_model.bin")
    with pytest.raises(UserError, match="expected tensors by name"):
        read_checkpoint(directory)


def test_sparse_tensors_in_bin_files(tmp_path: Path) -> None:
    """Fault: an error of torch's while it is written."""
    directory = write_draft(tmp_path / "a", CASES["vanilla"])
    (directory / "model.safetensors").unlink()
    torch.save({"fc.weight": torch.eye(3).to_sparse()}, directory / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"fc\.weight"):
        read_checkpoint(directory)


@pytest.mark.parametrize("shards", [2, 5])
@pytest.mark.parametrize("kind", ["hf", "deepspec", "speculators"])
def test_sharded_safetensors(kind: str, shards: int, tmp_path: Path) -> None:
    """Fault: the first shard alone."""
    case = CASES["gated"]
    directory = write_draft(tmp_path / "a", case, kind, shards=shards)
    assert_same(loaded(directory), draft_tensors(case))


def test_two_copies_of_the_weights_are_refused(tmp_path: Path) -> None:
    """Fault: the whole file read, or the shards, and nothing said of the other ones."""
    directory = write_draft(tmp_path / "a", CASES["vanilla"], shards=2)
    write_draft(tmp_path / "b", CASES["vanilla"])
    (tmp_path / "b" / "model.safetensors").rename(directory / "model.safetensors")
    with pytest.raises(UserError, match="they may differ"):
        read_checkpoint(directory)


def test_speculators_without_the_number_of_target_layers(tmp_path: Path) -> None:
    """What the public package writes: the number comes from --target, or it is asked for.

    Fault: a guessed number, with which the last layer would pass."""
    case = CASES["vanilla"]
    fields = speculators_fields(case)
    del fields["num_target_layers"]
    directory = write_draft(tmp_path / "a", case, "speculators")
    (directory / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UserError, match=r"how many layers the target has.*--target"):
        read_checkpoint(directory)
    target = TargetDirectory(write_target(tmp_path / "t"))
    assert read_checkpoint(directory, target).config.num_target_layers == LAYERS


def test_an_index_that_names_what_no_file_holds(tmp_path: Path) -> None:
    """Fault: a shard that was cut short by a tensor nobody misses (an optional one)."""
    directory = write_draft(tmp_path / "a", CASES["vanilla"], "hf", shards=2)
    index = read_json(directory / "model.safetensors.index.json")
    index["weight_map"]["lm_head.weight"] = "model-00002-of-00002.safetensors"
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match=r"names lm_head\.weight, which model-00002"):
        read_checkpoint(directory)
