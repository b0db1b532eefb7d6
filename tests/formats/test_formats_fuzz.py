"""Corrupted and inconsistent checkpoints: each is refused, or loads as the original.

Seeded. The oracle is the original itself: what loads must have its tensors, bit for bit, and its
config. A change that leaves a whole and consistent checkpoint of another meaning (another
mask_token_id) is counted apart: that is another checkpoint.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from format_corruptions import (
    CONFIGS,
    FILES,
    FOREIGN,
    HEADERS,
    OTHERS,
    RECORDS,
    SHARDED,
    Fault,
    swapped_names,
    truncated,
)
from format_toys import CASES, LAYERS, bits, read_json, write_draft, write_eagle3, write_target
from safetensors.torch import load_file, save_file

from torch_port.errors import UserError
from torch_port.formats.checkpoint import Checkpoint
from torch_port.formats.convert import Options, convert, read_checkpoint, write_checkpoint
from torch_port.formats.target import TargetDirectory
from torch_port.formats.weights import header_digest, tensor_ref

ROUNDS = int(os.environ.get("FORMATS_FUZZ_ROUNDS", "3"))  # more when looking for holes


# --- Checkpoints of ours, which carry a digest of their headers -----------------------------------


def originals(folder: Path) -> Iterator[Path]:
    """Every family in every format that holds it, written by us."""
    target = TargetDirectory(write_target(folder / "target"))
    for name in ("gated", "full vocabulary", "dflash"):
        first = write_draft(folder / f"{name}-by-hand", CASES[name])
        for kind in ("hf", "deepspec", "speculators", "port"):
            convert(first, folder / f"{name}-{kind}", kind, Options(target))
            yield folder / f"{name}-{kind}"
    first = write_eagle3(folder / "eagle3-by-hand")
    for kind in ("hf", "port"):
        convert(first, folder / f"eagle3-{kind}", kind)
        yield folder / f"eagle3-{kind}"


def everything(checkpoint: Checkpoint) -> tuple[Any, ...]:
    return (
        checkpoint.algorithm,
        checkpoint.config,
        checkpoint.neutral,
        checkpoint.verifier,
        checkpoint.training,
    )


def tensors(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    borrowed = {"lm_head.weight": checkpoint.head, "embed_tokens.weight": checkpoint.embedding}
    refs = checkpoint.weights | {n: r for n, r in borrowed.items() if r is not None}
    return {name: ref.load() for name, ref in (refs | checkpoint.optimizer).items()}


# --- The runs ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    OTHERS[:] = originals(tmp_path_factory.mktemp("fuzz"))
    return OTHERS


def outcome(directory: Path, original: Path) -> str:
    """'refused' or 'equal'; fails on every other error and on a difference."""
    want = read_checkpoint(original)
    try:
        got = read_checkpoint(directory)
        found = tensors(got)
    except UserError as error:
        message = str(error)
        assert "\n" not in message, message
        assert len(message) < 1200, message
        return "refused"
    wanted = tensors(want)
    assert everything(got) == everything(want)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name
    return "equal"


# Values that say what nothing else in a checkpoint says: changed, it is another checkpoint.
FREE = {
    "training",
    "mask_token_id",
    "block_size",
    "num_target_layers",
    "rope_theta",
    "rms_norm_eps",
    "initializer_range",
    "sliding_window",
    "name_or_path",
    "verifier",
    "proposal_methods",
    "default_proposal_method",
    "rope_scaling",  # null, neutral
    "architectures",  # of the verifier
    "target_layer_ids",
    "aux_hidden_state_layer_ids",
    "eagle_aux_hidden_state_layer_ids",
}


def of_another_meaning(told: str, directory: Path, original: Path) -> bool:
    """A whole checkpoint whose config says something else, in a field that stands alone."""
    if not any(f"'{name}'" in told for name in FREE):
        return False
    try:
        return everything(read_checkpoint(directory)) != everything(read_checkpoint(original))
    except UserError:
        return False


def corrupt(fault: Fault, originals: list[Path], folder: Path, rounds: int) -> Counter[str]:
    """Apply a fault to copies of checkpoints; returns how often each ended how."""
    seen: Counter[str] = Counter()
    for number, original in enumerate(originals * rounds):
        draw = random.Random(f"{fault.__name__} {number}")
        directory = folder / str(number) / original.name
        shutil.copytree(original, directory)
        told = "no fault drawn"
        try:
            told = fault(draw, directory)
            free = fault in (*CONFIGS, *RECORDS) and of_another_meaning(told, directory, original)
            seen["of another meaning" if free else outcome(directory, original)] += 1
        except BaseException as error:
            error.add_note(f"{original.name}, {fault.__name__} {number}: {told}")
            raise
        shutil.rmtree(folder / str(number))
    return seen


@pytest.mark.parametrize("fault", HEADERS + FILES + CONFIGS, ids=lambda f: f.__name__)
def test_corrupted_checkpoints(fault: Fault, checkpoints: list[Path], tmp_path: Path) -> None:
    """Every fault three times on each of 14 checkpoints of ours: 756.

    Faults: any error but UserError; a different draft without a word."""
    seen = corrupt(fault, checkpoints, tmp_path, ROUNDS)
    assert seen["refused"] >= 0.6 * seen.total()
    assert seen["of another meaning"] <= 0.1 * seen.total()


@pytest.mark.parametrize("fault", FOREIGN, ids=lambda f: f.__name__)
def test_corrupted_checkpoints_of_other_writers(fault: Fault, tmp_path: Path) -> None:
    """Without a digest of the header, in all formats that others write: 132.

    Fault: what the digest alone would have caught."""
    kinds = ["hf", "deepspec", "speculators"]
    foreign = [write_draft(tmp_path / f"rnn-{kind}", CASES["rnn"], kind) for kind in kinds]
    foreign += [write_eagle3(tmp_path / "eagle3-hf")]
    seen = corrupt(fault, foreign, tmp_path / "c", ROUNDS)
    assert seen["refused"] >= 0.5 * seen.total()  # `renamed` to logit_head.* is an old checkpoint


@pytest.mark.parametrize("fault", SHARDED, ids=lambda f: f.__name__)
def test_corrupted_shards(fault: Fault, tmp_path: Path) -> None:
    """Three shards and an index, no digests.

    Faults: an index believed, a shard left out, a tensor read from the file that is named."""
    kinds = ["hf", "speculators"]
    foreign = [write_draft(tmp_path / f"g-{k}", CASES["gated"], k, shards=3) for k in kinds]
    seen = corrupt(fault, foreign, tmp_path / "c", 2 * ROUNDS)
    assert seen["refused"] >= 0.9 * seen.total()


@pytest.mark.parametrize("kind", ["whole", "sharded"])
def test_truncated_bin_files(kind: str, tmp_path: Path) -> None:
    """Fault: an error of the zip reader's, or of the unpickler's."""
    original = write_draft(tmp_path / "bin-hf", CASES["rnn"])
    content = load_file(original / "model.safetensors")
    (original / "model.safetensors").unlink()
    file = original / "pytorch_model.bin"
    torch.save(content, file, _use_new_zipfile_serialization=kind == "whole")
    seen = corrupt(truncated, [original], tmp_path / "c", 8 * ROUNDS)
    assert seen["refused"] >= 0.9 * seen.total()


# --- Run records ---------------------------------------------------------------------------------


def training_checkpoint(folder: Path, dtype: torch.dtype) -> Path:
    """A port checkpoint with a run's state, of made-up values."""
    draft = read_checkpoint(write_draft(folder / "by-hand", CASES["vanilla"], dtype=dtype))
    parts = ("exp_avg", "exp_avg_sq") + (() if dtype == torch.float32 else ("masters",))
    g = torch.Generator().manual_seed(3)
    state = {
        f"optimizer.{part}.{name}": tensor_ref(torch.randn(ref.shape, generator=g), name)
        for part in parts
        for name, ref in draft.weights.items()
        if name not in ("t2d", "d2t")
    }
    training = {
        "step": 7,
        "updates": 6,
        "guard": {"log_sum": 0.25, "seen": 6},
        "objective": {"ce_alpha": 0.1},
        "optimizer": {"peak_rate": 1e-3},
        "num_anchors": None,
        "target": {"fingerprint": "ab", "config": {"num_hidden_layers": LAYERS}},
        "resume": {"algorithm": "dspark"},
        "rng": None,
        "data": None,
    }
    whole = replace(draft, training=training, optimizer=state)
    write_checkpoint(whole, folder / f"run-{dtype}"[:8] / "run-port", "port")
    return folder / f"run-{dtype}"[:8] / "run-port"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_state_in_port_and_out_of_hf(dtype: torch.dtype, tmp_path: Path) -> None:
    """port → port keeps every tensor and value; port → hf says what it leaves behind.

    Faults: moments or masters dropped; a loss without a word."""
    run = training_checkpoint(tmp_path, dtype)
    _, lost = convert(run, tmp_path / "again", "port")
    assert lost == []
    assert outcome(tmp_path / "again", run) == "equal"
    _, lost = convert(run, tmp_path / "hf", "hf")
    assert [line.split(":")[0] for line in lost] == ["training state of step 7"]


@pytest.mark.parametrize("fault", [*RECORDS, *HEADERS], ids=lambda f: f.__name__)
def test_corrupted_runs(fault: Fault, tmp_path: Path) -> None:
    """Port checkpoints with training state: 200.

    Faults: a record believed; an error when its step is shown; moments of other shapes."""
    runs = [training_checkpoint(tmp_path / str(d), d) for d in (torch.float32, torch.bfloat16)]
    seen = corrupt(fault, runs, tmp_path / "c", (20 if fault in RECORDS else 3) * ROUNDS // 3)
    assert seen["refused"] >= 0.5 * seen.total()


def dcp_parts(directory: Path, original: Path) -> None:
    """Write the tensors as two ranks save them: rows in two files, by the public format."""
    parts: tuple[dict[str, Any], ...] = ({}, {})
    places: tuple[dict[str, Any], ...] = ({}, {})
    for name, tensor in load_file(next(original.glob("*.safetensors"))).items():
        half = len(tensor) // 2
        for i, (rows, start) in enumerate(((tensor[:half], 0), (tensor[half:], half))):
            if len(rows):
                parts[i][name] = rows.clone()
                places[i][name] = {"saved_offsets": [start] + [0] * (tensor.dim() - 1)}
    for i, (part, place) in enumerate(zip(parts, places, strict=True)):
        info = {"DCP_SHARDING_INFO": json.dumps(place), "format": "pt"}
        save_file(part, directory / f"shard-{i + 1:05}-model-00001-of-00001.safetensors", info)


def test_tensors_that_ranks_saved_in_parts(tmp_path: Path) -> None:
    """Faults: a rank's rows taken for the whole; parts in the wrong order; a gap filled; a header
    that is not the one that run.json knows."""
    run = training_checkpoint(tmp_path, torch.bfloat16)
    parted = tmp_path / "parted"
    parted.mkdir()
    dcp_parts(parted, run)
    record = read_json(run / "run.json")

    def seal() -> None:
        headers = {p.name: header_digest(p) for p in parted.glob("*.safetensors")}
        (parted / "run.json").write_text(json.dumps(record | {"headers": headers}))

    seal()
    assert outcome(parted, run) == "equal"
    swapped_names(random.Random(0), parted)  # of files without a digest of their own
    with pytest.raises(UserError, match="its header was changed"):
        read_checkpoint(parted)
    dcp_parts(parted, run)
    seal()
    next(parted.glob("shard-00001*")).unlink()
    seal()
    with pytest.raises(UserError, match=r"gap|missing|shape"):
        read_checkpoint(parted)
