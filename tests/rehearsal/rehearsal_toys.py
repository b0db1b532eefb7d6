"""A draft so small that its rehearsal takes a second or two, and what was found in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch_port
from torch_port.config import DraftConfig
from torch_port.rehearsal.rehearse import Rehearsal, rehearse
from torch_port.rehearsal.report import Looks
from torch_port.rehearsal.trace import Finding
from torch_port.run import RunConfig, resolve

V, K = 48, 12


def toy_config(**changes: Any) -> DraftConfig:
    """One layer, hidden 16, γ = 4."""
    nested: dict[str, Any] = {
        "projector_type": "dspark",
        "attention_mode": "gqa",
        "target_layer_ids": [0, 2],
        "mask_token_id": 1,
        "markov_rank": 3,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    top: dict[str, Any] = {
        "architectures": ["DSparkDraftModel"],
        "model_type": "qwen3",
        "vocab_size": V,
        "draft_vocab_size": V,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "layer_types": ["full_attention"],
        "sliding_window": None,
        "block_size": 4,
        "num_target_layers": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
    }
    for name, value in changes.items():
        (nested if name in nested else top)[name] = value
    return DraftConfig.from_hf(top | {"dflash_config": nested})


def toy_run(mode: str = "auto", **compute: Any) -> RunConfig:
    """S = 24, N = 4, two steps of a run whose files are not there."""
    return resolve(
        {
            "algorithm": "dspark",
            "draft": {"config": "none"},
            "target": {"path": "none"},
            "data": {"path": "none", "max_length": 24, "num_anchors": 4},
            "objective": {"loss_decay_gamma": 4.0},
            "compute": compute,
            "distribution": {"mode": mode},
            "optimizer": {"peak_rate": 1e-3, "warmup_steps": 1, "total_steps": 10},
        }
    )


def rehearsed(
    run: RunConfig | None = None, world_size: int = 1, **changes: Any
) -> tuple[Rehearsal, Looks]:
    """Rehearse the toy; return what the rehearsal and its observers saw."""
    looks = Looks.at("npu")
    rehearsal = rehearse(
        run or toy_run(),
        config=toy_config(**changes),
        world_size=world_size,
        observers=looks.observers(),
    )
    return rehearsal, looks


def wrong(rehearsal: Rehearsal) -> list[Finding]:
    """Return the findings that are wrong."""
    return [finding for finding in rehearsal.findings if finding.wrong]


def line_of(function: Callable[..., Any], text: str) -> str:
    """Return where a text stands in a function of the package, as `file:line`."""
    file = Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
    lines, start = inspect.getsourcelines(function)
    (at,) = (start + i for i, line in enumerate(lines) if text in line)
    return f"{file.relative_to(Path(torch_port.__file__).parents[1]).as_posix()}:{at}"
