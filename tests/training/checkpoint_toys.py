"""A toy run for the tests of checkpoints: real drafts, gradients drawn by the step's number.

With gradients that no forward pass makes, and no clipping, every number of ranks trains the same
bits: what a checkpoint brings from one to the other can be held to equality.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torch_port.config import DraftConfig, ObjectiveConfig
from torch_port.models.block_draft import FrozenTarget
from torch_port.models.dspark import DSparkDraft
from torch_port.run_sections import CheckpointsSection
from torch_port.training import checkpoints
from torch_port.training.checkpoints import CheckpointManager
from torch_port.training.distribution import Ranks, distribute
from torch_port.training.optimizer import MasterAdamW, OptimizerConfig, rate_at
from torch_port.training.state import RunFacts, training_tensors
from torch_port.vocabulary.mapping import buffers_from_kept

V, H = 16, 8
KEPT = (0, 3, 4, 9, 12)  # 5 rows of the head: no number of ranks divides them
SINGLE = Ranks(0, 1, 0, torch.device("cpu"), "single", None)
OPTIMIZER = OptimizerConfig(
    peak_rate=1e-2, warmup_steps=4, total_steps=20, max_grad_norm=float("inf")
)
_CONFIG = {
    "architectures": ["DSparkDraftModel"],
    "model_type": "qwen3",
    "vocab_size": V,
    "draft_vocab_size": len(KEPT),
    "hidden_size": H,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "block_size": 4,
    "num_target_layers": 4,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_OWN = {
    "projector_type": "dspark",
    "attention_mode": "gqa",
    "target_layer_ids": [0, 2],
    "mask_token_id": 1,
    "markov_rank": 3,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


class ToyRun:
    """A draft in bf16 with float32 masters on some ranks, and its checkpoints."""

    def __init__(
        self,
        directory: Path,
        ranks: Ranks = SINGLE,
        *,
        seed: int = 0,
        kept: tuple[int, ...] = KEPT,
        dtype: torch.dtype = torch.bfloat16,
        optimizer: OptimizerConfig = OPTIMIZER,
        offload: bool = False,
        config: dict[str, Any] | None = None,
        **section: Any,
    ) -> None:
        own = _OWN | (config or {})
        self.ranks, self.step = ranks, 0
        draft = DSparkDraft(DraftConfig.from_hf(_CONFIG | {"dflash_config": own}))
        draft.initialise(torch.Generator().manual_seed(seed))
        draft.install_vocab_mapping(*buffers_from_kept(torch.tensor(kept), V))
        self.draft: Any = distribute(draft.to(dtype), ranks)
        self.optimizer = MasterAdamW(self.draft.named_parameters(), optimizer, offload=offload)
        g = torch.Generator().manual_seed(1)
        target = FrozenTarget(torch.randn(V, H, generator=g), torch.randn(V, H, generator=g))
        self.facts = RunFacts("dspark", ObjectiveConfig(), target, {"model_type": "qwen3"})
        self.checkpoints = CheckpointManager(directory, CheckpointsSection(**section), ranks)

    def train(self, until: int) -> None:
        """Take steps. The gradients are the step's, whole on every rank, cut where they must be."""
        while self.step < until:
            self.step += 1
            g = torch.Generator().manual_seed(self.step)
            for parameter in self.optimizer.parameters:
                whole = torch.randn(parameter.shape, generator=g)
                parameter.grad_dtype = torch.float32
                parameter.grad = spread(whole, parameter)
            self.rate = rate_at(self.step, self.optimizer.config)
            self.optimizer.apply(self.rate, torch.ones(()))
            self.optimizer.guard.admits(float(self.step))

    def save(self, metric: float | None = None, wait: bool = True) -> None:
        self.checkpoints.save(self.step, self.draft, self.optimizer, self.facts, metric)
        if wait:
            self.checkpoints.wait()

    def load(self, directory: Path) -> dict[str, Any]:
        self.step, record = self.checkpoints.load(directory, self.draft, self.optimizer, self.facts)
        return record

    def resume(self) -> None:
        newest = self.checkpoints.newest()
        if newest is not None:
            self.load(newest)

    def tensors(self) -> dict[str, Tensor]:
        """All that a checkpoint holds, whole, on every rank (a collective)."""
        return {n: gathered(t) for n, t in training_tensors(self.draft, self.optimizer).items()}

    def guard(self) -> tuple[float, int]:
        return self.optimizer.guard.log_sum, self.optimizer.guard.seen


def spread(whole: Tensor, like: Any) -> Tensor:
    if not hasattr(like, "to_local"):
        return whole
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def gathered(tensor: Any) -> Tensor:
    whole = tensor.full_tensor() if hasattr(tensor, "to_local") else tensor
    return whole.clone()


def same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Equal names, dtypes, shapes and bits."""
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert (tensor.dtype, tensor.shape) == (right[name].dtype, right[name].shape), name
        assert torch.equal(tensor, right[name]), name


@contextmanager
def ranks_of(meeting: Path, rank: int, world_size: int, mode: Any) -> Iterator[Ranks]:
    """A process group of gloo by a file, as `joined` makes one by torchrun's environment."""
    where = {"init_method": f"file://{meeting}", "rank": rank, "world_size": world_size}
    dist.init_process_group("gloo", **where, timeout=timedelta(seconds=60))
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))
    yield Ranks(rank, world_size, rank, torch.device("cpu"), mode, group)
    dist.barrier(group=group)
    dist.destroy_process_group()


def start(work: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a process that runs `work`; forked from a clean one that has torch, not from this."""
    context = get_context("forkserver")
    # What takes long to import: once, instead of in every process.
    context.set_forkserver_preload(
        ["torch_port.training.checkpoints", "torch.distributed.fsdp", "torch._dynamo", "pytest"]
    )
    process = context.Process(target=_run, args=(work, *args), daemon=True)
    process.start()
    return process


def _run(work: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    try:
        work(*args)
    except BaseException:  # noqa: BLE001 (its text is all that the test sees of it)
        traceback.print_exc()
        os._exit(1)
    os._exit(0)  # without Python's clean-up, which a late thread of torch's can abort


def run_ranks(work: Callable[..., None], world_size: int, place: Path, *args: Any) -> None:
    """Run `work(rank, world_size, place, *args)` in as many processes; all must end well."""
    processes = [start(work, rank, world_size, place, *args) for rank in range(world_size)]
    end = time.monotonic() + 100
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * world_size


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@contextmanager
def held_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let saves begin to write only when the event is set."""
    go, write = threading.Event(), checkpoints.write_shards

    def late(*args: Any) -> None:
        assert go.wait(30)
        write(*args)

    monkeypatch.setattr(checkpoints, "write_shards", late)
    yield go
    go.set()
