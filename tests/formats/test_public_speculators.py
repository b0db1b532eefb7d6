"""Exports against the public `speculators` package: it loads them and computes our numbers.

The package pins older transformers, so it lives in an environment of its own, whose Python
SPECULATORS_PYTHON names (docs/formats.md says how to make it). Without one these are skipped.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from torch_port.blocks import make_blocks
from torch_port.config import DraftConfig
from torch_port.formats.convert import Options, convert, write_checkpoint
from torch_port.formats.load import load_draft
from torch_port.formats.port import memory_checkpoint
from torch_port.formats.target import TargetDirectory
from torch_port.models.block_draft import FrozenTarget
from torch_port.models.registry import find_algorithm
from torch_port.vocabulary.mapping import buffers_from_kept

PYTHON = os.environ.get("SPECULATORS_PYTHON", "")
pytestmark = pytest.mark.skipif(
    not PYTHON, reason="SPECULATORS_PYTHON names no Python that has the public speculators package"
)
SCRIPT = Path(__file__).with_name("public_speculators.py")
V, K, H, S = 24, 7, 16, 20
KEPT = [0, 3, 4, 9, 12, 15, 20]
ANCHORS = [2, 5, 6, 13]  # overlapping blocks among them
SIZES: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": H,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
}
# float32 on both sides, sums in another order: 1e-6 of a tensor's maximum, and some room.
TOLERANCE = 1e-5


def draft_config(**changes: Any) -> DraftConfig:
    values = SIZES | {
        "draft_vocab_size": K,
        "num_hidden_layers": 2,
        "rope_theta": 10000.0,
        "layer_types": ("full_attention",) * 2,
        "block_size": 4,
        "num_target_layers": 4,
        "target_layer_ids": (0, 2),
        "mask_token_id": 3,
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return DraftConfig(**(values | changes))


BARE = {
    "markov_rank": 0,
    "markov_head_type": "none",
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
CASES = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "full": {"draft_vocab_size": V},
    "plain-confidence": {"confidence_head_with_markov": False},
    "dflash": {"projector_type": "dflash", **BARE},
    "dflash-full": {"projector_type": "dflash", "draft_vocab_size": V, **BARE},
}


@pytest.fixture(scope="module")
def target_directory(tmp_path_factory: pytest.TempPathFactory) -> TargetDirectory:
    path = tmp_path_factory.mktemp("public") / "target"
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(num_hidden_layers=4, tie_word_embeddings=False, **SIZES))
    model.save_pretrained(path)
    return TargetDirectory(path)


def exported(config: DraftConfig, target: TargetDirectory, path: Path) -> Path:
    """A draft with weights large enough that every path matters, exported for a server."""
    draft = find_algorithm(config.projector_type).draft_class()(config)
    draft.initialise(torch.Generator().manual_seed(5))
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if not name.endswith("norm.weight"):
                parameter.mul_(10)
    if config.prunes:
        draft.install_vocab_mapping(*buffers_from_kept(torch.tensor(KEPT), V))
    checkpoint = memory_checkpoint(config.projector_type, config, draft.state_dict())
    write_checkpoint(checkpoint, path, "speculators", Options(target))
    return path


def blocks() -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(7)
    return {
        "input_ids": torch.randint(0, V, (1, S), generator=g),
        "hidden_states": torch.randn(1, S, 2 * H, generator=g),
        "last": torch.randn(1, S, H, generator=g),
        "anchors": torch.tensor(ANCHORS),
    }


@pytest.fixture(scope="module")
def answered(
    tmp_path_factory: pytest.TempPathFactory, target_directory: TargetDirectory
) -> tuple[Path, dict[str, Tensor]]:
    """Every case exported, loaded, answered and saved by the package, in one process of its own."""
    place = tmp_path_factory.mktemp("exports")
    given = blocks()
    save_file(given, place / "inputs")
    paths = [
        exported(draft_config(**CASES[case]), target_directory, place / case) for case in CASES
    ]
    done = subprocess.run(
        [PYTHON, str(SCRIPT), str(place / "inputs"), *map(str, paths)],
        capture_output=True,
        text=True,
        timeout=300,
        env={"PATH": os.environ["PATH"], "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return place, given


@torch.no_grad()
def ours(checkpoint: Path, given: dict[str, Tensor], target: TargetDirectory) -> dict[str, Tensor]:
    draft = load_draft(checkpoint, target)
    config = draft.config
    kept = torch.arange(V)
    frozen = FrozenTarget(
        target.embedding(V, H).load().detach(), target.head_rows(kept, V, H).load().detach()
    )
    anchors = given["anchors"][None]
    keep = torch.ones_like(anchors, dtype=torch.bool)
    mask = torch.ones(1, S)
    blocks = make_blocks(
        given["input_ids"],
        mask,
        anchors,
        keep,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        draft_index_V=draft.draft_vocab_index(),
        block_layout=config.block_layout,
    )
    hidden = draft(blocks, given["hidden_states"], anchors, keep, frozen)[0]
    e = draft.embed_previous(blocks.previous)
    e = None if e is None else e[0]
    # The target's rows, not the file's: those are what is judged.
    rows = draft.output_head(frozen.lm_head)
    result = {"hidden": hidden, "logits": draft.logits(hidden, e, rows)}
    confidence = draft.confidence(hidden, e, detach=False)
    return result if confidence is None else result | {"confidence": confidence}


def same(got: dict[str, Tensor], expected: dict[str, Tensor], slots: slice) -> None:
    assert set(got) == set(expected)
    for name, value in expected.items():
        gap = (got[name][:, slots] - value[:, slots]).abs().max() / value.abs().max()
        assert gap < TOLERANCE, (name, gap)


@pytest.mark.parametrize("case", CASES)
def test_package_loads_an_export_and_says_what_we_say(
    case: str,
    answered: tuple[Path, dict[str, Tensor]],
    target_directory: TargetDirectory,
    tmp_path: Path,
) -> None:
    """Faults: layer ids off by one, another layout, head rows of other ids, a head's weights lost.

    Then the package's own save, which we load: the same numbers again.
    """
    place, given = answered
    config = draft_config(**CASES[case])
    answer = load_file(place / f"{case}.answers")
    slots = slice(1 if config.projector_type == "dflash" else 0, None)  # slot 0 is not trained
    same(ours(place / case, given, target_directory), answer, slots)
    same(ours(place / f"{case}.saved", given, target_directory), answer, slots)
    back, _ = convert(place / f"{case}.saved", tmp_path / "hf", "hf", Options(target_directory))
    assert back.config == config
    # The package computes with what it is handed; which states a server captures, the file says.
    told = json.loads((place / case / "config.json").read_text())
    assert told["aux_hidden_state_layer_ids"] == [1, 3]  # outputs of layers 0 and 2
