"""What runs on the ranks of the tests here; each function returns what its tests look at."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from emulated_npu import emulated_torch_npu
from rank_cases import (
    CASES,
    RATES,
    first_gradients,
    frozen,
    micro_batches,
    train,
    uneven,
    weights,
    whole,
    without_labels,
)
from rank_launch import Collectives
from torch import nn
from toys import KEPT, draft

from torch_port.device import NPU, use_kernels
from torch_port.evaluation import evaluate
from torch_port.run_sections import DistributionSection
from torch_port.training import distribution
from torch_port.training.distribution import (
    BUCKET_BYTES,
    Ranks,
    distribute,
    joined,
    step_collectives,
)
from torch_port.training.optimizer import MasterAdamW
from torch_port.training.shards import is_sharded, local
from torch_port.training.step import training_step
from torch_port.vocabulary.broadcast import broadcast_vocab_mapping

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
SECTION = DistributionSection(mode="fsdp", timeout_seconds=180)


# Who is compared with one process, by (case, mode, dtype).
OF_TWO = [
    ("pruned", "ddp", F64),
    ("pruned", "ddp", F32),
    ("pruned", "fsdp", F64),
    ("pruned", "fsdp", F32),
    ("full", "fsdp", F64),
    ("own head", "fsdp", F64),
    ("dflash", "fsdp", F64),
    ("eagle3", "fsdp", F64),
]
OF_FOUR = [
    ("pruned", "fsdp", F64),
    ("full", "ddp", F64),
    ("dflash", "ddp", F64),
    ("eagle3", "fsdp", F32),
]
OF_THREE = [
    ("pruned", "ddp", F64),
    ("pruned", "fsdp", F64),
    ("pruned", "fsdp", F32),
    ("pruned", "fsdp", BF16),
    ("eagle3", "ddp", F64),
    ("eagle3", "fsdp", F64),
]
SMALL_BUCKET = 2048  # bytes: the float32 runs' gradients take several


def spread(name: str, mode: str, ranks: Ranks, dtype: torch.dtype) -> Any:
    """A case's draft, spread; on other ranks than 0 it had other weights before."""
    distribution.BUCKET_BYTES = SMALL_BUCKET if dtype == F32 else BUCKET_BYTES
    model = CASES[name].draft().to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(ranks.rank)
    return distribute(model, replace(ranks, mode=mode))


def equality(
    ranks: Ranks, name: str, mode: str, dtype: torch.dtype, looks: bool = False
) -> dict[str, Any]:
    """First gradients and their collectives; weights after the steps, looked at in between."""
    case, model = CASES[name], spread(name, mode, ranks, dtype)
    batches = micro_batches(case, 0, ranks.rank, ranks.world_size, dtype)
    with Collectives() as collectives:
        optimizer = MasterAdamW(model.named_parameters(), RATES)
        training_step(model, optimizer, batches, frozen(dtype), case.objective, 1)
    model = spread(name, mode, ranks, dtype)
    gradients = first_gradients(model, batches, case)
    losses = {}

    def look(step: int) -> None:
        if looks and step % 5 == 0:  # gathered weights must not outlive the next step
            losses[step] = evaluate(model, batches, frozen(dtype), case.objective)["loss"]

    optimizer = train(model, case, ranks.rank, ranks.world_size, dtype, each=look)
    return {
        "gradients": gradients,
        "weights": weights(model),
        "losses": losses,
        "collectives": collectives.seen,
        "told": step_collectives(model, replace(ranks, mode=mode), len(batches)),
        "moments": {n: tuple(map(whole, pair)) for n, pair in optimizer.moments().items()},
        "elements": sum(p.numel() for p in optimizer._shards),
    }


def bf16(ranks: Ranks, mode: str) -> dict[str, Any]:
    """Field-note 14: bf16 weights for 50 steps; what their gradients and masters are."""
    case, model = CASES["pruned"], spread("pruned", mode, ranks, BF16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                local(parameter).fill_(1)
    batches = micro_batches(case, 0, ranks.rank, ranks.world_size, BF16)
    gradients = first_gradients(model, batches, case)
    if mode == "ddp":
        return {"gradients": gradients}
    slow = RATES.model_copy(update={"peak_rate": 1e-4, "warmup_steps": 0, "total_steps": 1000})
    optimizer = MasterAdamW(model.named_parameters(), slow)
    for step in range(1, 51):
        training_step(model, optimizer, batches, frozen(BF16), case.objective, step)
    return {
        "gradients": gradients,
        "weights": weights(model),
        "masters": {n: whole(m) for n, m in zip(optimizer.names, optimizer.masters, strict=True)},
        "sharded": [is_sharded(m) for m in optimizer.masters],
    }


def optimizers(ranks: Ranks, mode: str, dtype: torch.dtype) -> dict[str, Any]:
    """Weights and moments after four steps: as usual, offloaded, by the emulated NPU, resumed."""
    case, results = CASES["pruned"], {}

    def run(steps: int = 4, before: Any = None, **options: Any) -> tuple[nn.Module, MasterAdamW]:
        model = spread("pruned", mode, ranks, dtype)
        if before is not None:
            before(model)
        optimizer = train(model, case, ranks.rank, ranks.world_size, dtype, steps, **options)
        return model, optimizer

    def note(kind: str, model: nn.Module, optimizer: MasterAdamW) -> None:
        moments = {n: tuple(map(whole, pair)) for n, pair in optimizer.moments().items()}
        results[kind] = {"weights": weights(model), "moments": moments}

    note("usual", *run())
    note("offloaded", *run(offload=True))
    sys.modules["torch_npu"] = emulated_torch_npu()
    model = spread("pruned", mode, ranks, dtype)
    with use_kernels(NPU):  # its optimizer alone: the whole draft on it has tests of its own
        optimizer = MasterAdamW(model.named_parameters(), RATES)
    for step in range(1, 5):
        batches = micro_batches(case, step, ranks.rank, ranks.world_size, dtype)
        training_step(model, optimizer, batches, frozen(dtype), case.objective, step)
    del sys.modules["torch_npu"]
    note("npu", model, optimizer)
    results["resumed"] = _resumed(ranks, mode, dtype, run(2))
    return results


def _resumed(
    ranks: Ranks, mode: str, dtype: torch.dtype, half: tuple[nn.Module, MasterAdamW]
) -> dict[str, Any]:
    """Give two steps' state, whole, to another draft; take the last two steps there."""
    case, (first, saved) = CASES["pruned"], half
    tensors = {}
    for name, master in zip(saved.names, saved.masters, strict=True):
        tensors[f"optimizer.masters.{name}"] = whole(master)
        for part, moment in zip(("exp_avg", "exp_avg_sq"), saved.moments()[name], strict=True):
            tensors[f"optimizer.{part}.{name}"] = whole(moment)
    model = spread("pruned", mode, ranks, dtype)
    with torch.no_grad():
        for parameter, there in zip(model.parameters(), first.parameters(), strict=True):
            local(parameter).copy_(local(there))
    optimizer = MasterAdamW(model.named_parameters(), RATES)
    optimizer.restore(tensors, saved.updates)
    optimizer.guard = saved.guard
    for step in range(3, 5):
        batches = micro_batches(case, step, ranks.rank, ranks.world_size, dtype)
        training_step(model, optimizer, batches, frozen(dtype), case.objective, step)
    moments = {n: tuple(map(whole, pair)) for n, pair in optimizer.moments().items()}
    return {"weights": weights(model), "moments": moments}


def spikes(ranks: Ranks, mode: str, guard_mode: Any) -> dict[str, Any]:
    """Field-note 19: step 3's gradient stands out, on rank 0 alone; rank 1 has no labels at all."""
    case, model = CASES["pruned"], spread("pruned", mode, ranks, F64)
    optimizer = MasterAdamW(model.named_parameters(), RATES, guard_mode=guard_mode)
    reports, states = [], []
    for step in range(1, 5):
        batches = micro_batches(case, step, ranks.rank, ranks.world_size, F64)
        if ranks.rank:
            batches = without_labels(batches)
        alpha = {"l1_alpha": 1e5} if step == 3 else {}
        objective = case.objective.model_copy(update=alpha)
        report = training_step(model, optimizer, batches, frozen(F64), objective, step)
        reports.append((report.taken, report.spike, report.gradient_norm))
        moments = {n: tuple(map(whole, pair)) for n, pair in optimizer.moments().items()}
        states.append((weights(model), moments, optimizer.updates, optimizer.guard.seen))
    return {"reports": reports, "states": states, "mean": optimizer.guard.log_sum}


def refusing(ranks: Ranks, mode: str) -> dict[str, Any]:
    """Field-notes 35 and 16: spread, train and save where gathers and bools are refused."""
    case = CASES["pruned"]
    model = case.draft() if ranks.rank == 0 else draft(draft_vocab_size=5)
    if ranks.rank:
        model.clear_vocab_buffers()  # its map comes from rank 0
    with Collectives(refuse=True) as collectives, tempfile.TemporaryDirectory() as own:
        broadcast_vocab_mapping(model)
        model = distribute(model, replace(ranks, mode=mode))
        train(model, case, ranks.rank, ranks.world_size, F64, steps=2)
        shared = [own]
        dist.broadcast_object_list(shared, 0, group=ranks.checkpoint_group)
        writer = dcp.HuggingFaceStorageWriter(shared[0], save_distributed=True)
        dcp.save(model.state_dict(), storage_writer=writer, process_group=ranks.checkpoint_group)
        fresh = draft(seed=5)
        fresh.clear_vocab_buffers()
        fresh = distribute(fresh, replace(ranks, mode=mode))
        reader = dcp.HuggingFaceStorageReader(shared[0])
        dcp.load(fresh.state_dict(), storage_reader=reader, process_group=ranks.checkpoint_group)
        fresh.vocabulary_changed()
        dist.barrier(group=ranks.checkpoint_group)
    return {
        "saved": weights(model),
        "loaded": weights(fresh),
        "t2d": fresh.t2d,
        "d2t": fresh.d2t,
        "plain": [type(x).__name__ for x in (fresh.t2d, fresh.d2t)],
        "ids": fresh.to_target_ids(torch.arange(len(KEPT))),
        "collectives": collectives.seen,
    }


def two_ranks() -> dict[Any, Any]:
    results: dict[Any, Any] = {}
    with joined(SECTION, "cpu") as ranks:
        results["ranks"] = (ranks.rank, ranks.world_size, str(ranks.device), ranks.mode)
        for key in OF_TWO:
            results[key] = equality(ranks, *key, looks=True)
        for mode in ("ddp", "fsdp"):
            results["bf16", mode] = bf16(ranks, mode)
            results["refusing", mode] = refusing(ranks, mode)
        for dtype in (F32, BF16):
            results["optimizers", dtype] = optimizers(ranks, "fsdp", dtype)
        for pair in (("ddp", "skip"), ("fsdp", "off"), ("fsdp", "observe"), ("fsdp", "skip")):
            results["spikes", *pair] = spikes(ranks, *pair)
    results["left"] = not dist.is_initialized()
    return results


def an_error() -> dict[Any, Any]:
    """Rank 1 leaves its block with an error while rank 0 is in a collective."""
    results: dict[Any, Any] = {}
    began = time.monotonic()
    try:
        with joined(SECTION, "cpu") as ranks:
            if ranks.rank == 1:
                raise ZeroDivisionError
            dist.all_reduce(torch.ones(1))
    except (ZeroDivisionError, RuntimeError) as error:
        results["error"] = type(error).__name__
    results["seconds"] = time.monotonic() - began
    results["left again"] = not dist.is_initialized()
    return results


def three_ranks() -> dict[Any, Any]:
    """Field-note 15: 3, 30 and 0 supervised tokens, in two micro-batches of a step."""
    results: dict[Any, Any] = {}
    with joined(SECTION, "cpu") as ranks:
        for name, mode, dtype in OF_THREE:
            batches = uneven(name, dtype)[ranks.rank]
            model = spread(name, mode, ranks, dtype)
            with Collectives() as collectives:
                gradients = first_gradients(model, batches, CASES[name])
                optimizer = MasterAdamW(model.named_parameters(), RATES)
                report = training_step(
                    model, optimizer, batches, frozen(dtype), CASES[name].objective, 1
                )
            results["uneven", name, mode, dtype] = {
                "gradients": gradients,
                "weights": weights(model),
                "loss": report.loss,
                "collectives": collectives.seen,
                "tokens": sum(int((b.loss_mask > 0.5).sum()) for b in batches),
            }
    return results


def four_ranks() -> dict[Any, Any]:
    """One row each."""
    with joined(SECTION, "cpu") as ranks:
        return {("four", *key): equality(ranks, *key) for key in OF_FOUR}


def all_ranks() -> dict[Any, Any]:
    """Everything, in one launch of four: groups of four, three and two ranks, one after another."""
    rank, ports = int(os.environ["RANK"]), os.environ["PORTS"].split(",")
    results = four_ranks()
    for port, (size, work) in zip(
        ports, ((3, three_ranks), (2, two_ranks), (2, an_error)), strict=False
    ):
        if rank < size:
            os.environ |= {"MASTER_PORT": port, "WORLD_SIZE": str(size)}
            results |= work()
    return results
