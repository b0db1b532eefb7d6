"""What the tests of a run's log need: ranks, a summary, reports, a tiny draft and its batch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from torch_port.config import DraftConfig
from torch_port.data.batch import Batch, collate
from torch_port.models.dspark import DSparkDraft, FrozenTarget
from torch_port.objective.metrics import Pair
from torch_port.run import RunConfig, resolve
from torch_port.training.memory_estimate import MemoryEstimate
from torch_port.training.output import TrainingLog
from torch_port.training.step import StepReport
from torch_port.training.summary import RunSummary

GIB = 2**30
V, H = 32, 8


@dataclass(frozen=True)
class ToyRanks:
    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable


SUMMARY = RunSummary(
    algorithm="dspark",
    trained=1_234_567,
    frozen=2 * 248_320 * 5120,
    vocab_size=248_320,
    draft_vocab_size=64_000,
    map_file="runs/map.safetensors",
    coverage=0.9912,
    samples=1000,
    untrainable=7,
    steps_per_epoch=10,
    samples_per_step=96,
    tokens_per_step=65_000,
    ranks=8,
    mode="fsdp",
    device="npu:0",
    dtype="bfloat16",
    collectives=2,
    memory=MemoryEstimate(3 * GIB, 2 * GIB),
)


def toy_run(algorithm: str = "dspark", **sections: dict[str, Any]) -> RunConfig:
    values: dict[str, Any] = {
        "algorithm": algorithm,
        "draft": {"config": "draft"},
        "target": {"path": "target"},
        "data": {"path": "features"},
        "optimizer": {"peak_rate": 1e-3, "warmup_steps": 1, "total_steps": 20},
    }
    return resolve(values | sections)


def open_log(
    directory: Path, console: Console, start: int = 0, ranks: ToyRanks | None = None, **run: Any
) -> TrainingLog:
    """A log that has begun, of 20 steps, 10 an epoch."""
    log = TrainingLog(toy_run(**run), directory, console, ranks or ToyRanks())
    log.begin(SUMMARY, 20, 10, start)
    return log


def quiet() -> Console:
    return Console(quiet=True)


def pair(top: Any, bottom: Any, dtype: torch.dtype = torch.float32) -> Pair:
    return torch.tensor(top, dtype=dtype), torch.tensor(bottom, dtype=dtype)


def report(step: int, loss: float = 2.0, norm: float = 1.0, **more: Any) -> StepReport:
    metrics = more.pop("metrics", {"acc": pair(1, 2)})
    return StepReport(step, loss, norm, 1e-3, metrics, **more)


def draft(dtype: torch.dtype = torch.float32, **changes: Any) -> DSparkDraft:
    values: dict[str, Any] = {
        "vocab_size": V,
        "draft_vocab_size": V,
        "hidden_size": H,
        "intermediate_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "layer_types": ("full_attention",) * changes.get("num_hidden_layers", 2),
        "block_size": 4,
        "num_target_layers": 4,
        "target_layer_ids": (0, 2),
        "mask_token_id": 1,
        "markov_rank": 3,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    compute = changes.pop("compute", None)
    model = DSparkDraft(DraftConfig(**(values | changes)), compute)
    model.initialise(torch.Generator().manual_seed(0))
    return model.to(dtype)


def target(model: DSparkDraft, dtype: torch.dtype = torch.float32) -> FrozenTarget:
    shape = (model.config.vocab_size, model.config.hidden_size)
    g = torch.Generator().manual_seed(1)
    embed, head = (torch.randn(shape, generator=g).to(dtype) for _ in range(2))
    return FrozenTarget(embed, head)


def batch(model: DSparkDraft, S: int = 12, N: int = 3, dtype: torch.dtype = torch.float32) -> Batch:
    config, g = model.config, torch.Generator().manual_seed(2)
    layers = len(config.target_layer_ids)
    sample = {
        "input_ids": torch.randint(0, config.vocab_size, (S,), generator=g),
        "loss_mask": torch.ones(S),
        "hidden_states": torch.randn(S, layers * config.hidden_size, generator=g),
        "target_last_hidden_states": torch.randn(S, config.hidden_size, generator=g),
        "target_log_normalizer": torch.full((S,), 8.0),
    }
    made = collate(
        [sample],
        [0],
        num_anchors=N,
        seed=0,
        epoch=0,
        vocab_size=config.vocab_size,
        block_size=config.block_size,
    )
    return made.to(torch.device("cpu"), dtype)
