"""The ranks of a run: how they find each other, and how a draft is spread over them.

Modes of `distribution.mode`:

- single: one process, no process group.
- ddp: every rank has the whole draft and optimizer. Gradients are averaged in float32 after the
  step's last micro-batch (`average_gradients`), in buckets of 64 MiB. torch's own
  DistributedDataParallel would reduce them in the parameters' bf16, and would have to be asked for
  everything that the objective calls besides the forward pass.
- fsdp: FSDP2. Each decoder layer, each head with large tables (Markov; a head that is trained) and
  the rest are units of their own. Parameters, masters, moments and gradients are sharded on their
  first axis; a layer is whole only while it runs. Gradients are reduced in float32 and stay
  float32, in every micro-batch: accumulating first would keep them whole on every rank.

The objective reads the heads' weights after the draft's forward pass and outside of any module
call, where FSDP2's hooks see nothing. So a forward hook on the draft gathers the heads (`unshard`)
when its hidden states are there. They stay whole until the backward pass has ended, where FSDP2
reduces and frees every unit that no hook of its own has; so does the root (fc, norms, confidence
head, EAGLE3's one layer, which runs several times per batch). What that costs at V = 248320,
r = 256 is 0.25 GB of bf16 tables and 0.5 GB of their gradients for the length of the objective.

Not sharded, whole on every rank: the target's embedding and head, EAGLE3's borrowed embedding, and
the vocabulary buffers (bool t2d, int64 d2t), which are no parameters.

Collectives of an optimizer step with a micro-batches, U units and L decoder layers among them,
in order. All are of the default group; sums only (no ReduceOp.AVG), no gather, no bool:

    all      objective   1 all-reduce of 1 number (dspark), and 1 more where it prunes;
                         1 all-reduce of 3 numbers (dflash, eagle3); float32
    ddp      gradients   1 all-reduce per bucket, float32, once per step
    fsdp     parameters  a · (U + L) all-gathers, the weights' dtype: each unit for the forward
                         pass, each decoder layer again for the backward pass
    fsdp     gradients   a · U reduce-scatters, float32
    fsdp     norm        1 all-reduce of 1 number, float32

At the start (`distribute`) every parameter is broadcast from rank 0, as bytes, in buckets, and fsdp
gathers each unit once. Every rank must take the same number of steps and of micro-batches.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torch_port.device import device_named
from torch_port.errors import UserError
from torch_port.objective.loss import world_size
from torch_port.run_sections import DistributionSection
from torch_port.training.shards import is_sharded

BUCKET_BYTES = 64 * 2**20
BACKENDS = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
TORCHRUN = "torchrun --nproc-per-node 8 -m torch_port train RUN.yaml"
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together.

    `checkpoint_group`: a gloo group of its own for objects and checkpoints, None on one rank.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    mode: Literal["single", "ddp", "fsdp"]
    checkpoint_group: dist.ProcessGroup | None


@contextmanager
def joined(section: DistributionSection, device: str) -> Iterator[Ranks]:
    """Join the process group that torchrun's environment names, and leave it at the end.

    Arguments: the run's section; `training.device`, "auto" or a device type. Each local rank gets
    the card of its number. The backend follows the device: gloo, nccl or hccl.
    At the end ranks wait for each other, so that none tears down what another still needs; after an
    error none waits.
    Raises UserError when mode, environment and device do not fit each other.
    """
    started = _started()
    mode = _mode(section.mode, started)
    place = _device(device, started[2])
    if mode == "single":
        yield Ranks(0, 1, 0, place, mode, None)
        return
    timeout = timedelta(seconds=section.timeout_seconds)
    dist.init_process_group(BACKENDS[place.type], timeout=timeout)
    try:
        group = dist.new_group(backend="gloo", timeout=timeout) if started[1] > 1 else None
        yield Ranks(*started, place, mode, group)
        if group is not None:
            dist.barrier(group=group)
    except BaseException:
        # The others may be in a collective that this rank will not come to: not to be waited for.
        if place.type != "cpu" and dist.group.WORLD is not None:
            with suppress(RuntimeError):  # a backend without it
                dist.group.WORLD.abort()
        raise
    finally:
        dist.destroy_process_group()


def _started() -> tuple[int, int, int]:
    """Return (rank, world size, local rank) as torchrun set them, (0, 0, 0) without it."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 0, 0, 0
    absent = [name for name in _NEEDED if name not in os.environ]
    if absent:
        raise UserError(
            f"RANK and WORLD_SIZE are set, but not {', '.join(absent)}: start the processes with "
            f"torchrun ({TORCHRUN}), which sets all of them, or unset both for a single process"
        )
    try:
        return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    except ValueError as error:
        raise UserError(
            f"RANK, WORLD_SIZE and LOCAL_RANK must be whole numbers ({error}); start the processes "
            f"with torchrun: {TORCHRUN}"
        ) from error


def _mode(asked: str, started: tuple[int, int, int]) -> Literal["single", "ddp", "fsdp"]:
    processes = started[1]
    if asked == "single" and processes > 1:
        raise UserError(
            f"distribution.mode is single, but torchrun started {processes} processes, which would "
            "all train the same run in the same directory; set it to auto, ddp or fsdp, or start "
            "one process without torchrun"
        )
    if asked in ("ddp", "fsdp") and not processes:
        raise UserError(
            f"distribution.mode is {asked}, but this process was not started by torchrun (RANK and "
            f"WORLD_SIZE are not set); start it with: {TORCHRUN} — or set the mode to auto"
        )
    if asked == "fsdp":
        return "fsdp"
    return "single" if asked == "single" or not processes else "ddp"


def _device(asked: str, local_rank: int) -> torch.device:
    """Return this rank's device, and make it the current one.

    "auto" is npu where torch_npu can be imported, else cuda where there is one, else cpu.
    """
    kind = _best_device() if asked == "auto" else device_named(asked).type
    if kind == "cpu":
        return torch.device("cpu")
    if kind not in BACKENDS:
        raise UserError(f"training.device is {asked}; choose one of auto, {', '.join(BACKENDS)}")
    module: Any = torch.get_device_module(kind)
    cards = module.device_count()
    if local_rank >= cards:
        raise UserError(
            f"training.device is {kind}: local rank {local_rank} needs card {local_rank}, but "
            f"{cards} are visible; start no more processes on a node than it has cards "
            "(--nproc-per-node), and look at ASCEND_RT_VISIBLE_DEVICES or CUDA_VISIBLE_DEVICES"
        )
    module.set_device(local_rank)
    return torch.device(kind, local_rank)


def _best_device() -> str:
    try:
        return device_named("npu").type
    except UserError:
        return "cuda" if torch.cuda.is_available() else "cpu"


def distribute(draft: nn.Module, ranks: Ranks) -> nn.Module:
    """Make a draft one that the ranks train together; returns the same module.

    Before: the draft is on its device in its dtype, and its vocabulary map is the same on every
    rank (`broadcast_vocab_mapping`). After: its parameters are rank 0's, and with fsdp sharded;
    make the optimizer now. The functions of its family, `evaluate` among them, are called as on one
    process, by every rank equally often.
    """
    if ranks.mode == "single" or (ranks.mode == "ddp" and ranks.world_size == 1):
        return draft
    _broadcast(draft)
    if ranks.mode == "fsdp":
        _shard(draft, ranks)
    return draft


@torch.no_grad()
def _broadcast(draft: nn.Module) -> None:
    """Give every rank rank 0's parameters. As bytes: no backend refuses them."""
    for bucket in _buckets(list(draft.parameters())):
        flat = torch.cat([p.flatten() for p in bucket])
        dist.broadcast(flat.view(torch.uint8), 0)
        for p, values in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.copy_(values.view_as(p))


def _shard(draft: Any, ranks: Ranks) -> None:
    """Shard a draft over all ranks, unit by unit (module docstring)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    wide = torch.promote_types(next(draft.parameters()).dtype, torch.float32)
    mesh = init_device_mesh(ranks.device.type, (ranks.world_size,), mesh_dim_names=("ranks",))
    settings: dict[str, Any] = {"mesh": mesh, "mp_policy": MixedPrecisionPolicy(reduce_dtype=wide)}
    for layer in getattr(draft, "layers", ()):
        fully_shard(layer, **settings)
    named = (getattr(draft, name, None) for name in ("markov_head", "lm_head"))
    heads: list[Any] = [h for h in named if h is not None]
    for head in heads:
        fully_shard(head, reshard_after_forward=False, **settings)
    fully_shard(draft, **settings)
    units: list[Any] = [module for module in draft.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_force_sum_reduction_for_comms(True)
        unit.set_reduce_scatter_unused_params(True)  # or a rank's collective would be a shorter one
        _keep_wide(unit, wide)
        unit.unshard()
        _keep_wide(unit, wide)
        unit.reshard()

    def gather_heads(*_: object) -> None:
        for head in heads:
            head.unshard()
        for unit in units:
            # FSDP2 would round a reduced gradient to the weights' dtype before it adds it up.
            unit._get_fsdp_state()._fsdp_param_group._orig_dtype = wide

    draft.register_forward_hook(gather_heads)


def _keep_wide(unit: nn.Module, wide: torch.dtype) -> None:
    """Let a unit's parameters, whole or sharded as they are now, have gradients of `wide`."""
    for parameter in unit.parameters():
        parameter.grad_dtype = wide


def step_collectives(draft: Any, ranks: Ranks, accumulation: int) -> int:
    """Return how many collectives of the default group an optimizer step issues (see the table).

    Arguments: a draft that was distributed; the ranks; micro-batches of a step.
    """
    if not dist.is_initialized():
        return 0
    objective = 2 if draft.algorithm == "dspark" and draft.prunes_vocabulary else 1
    if ranks.mode == "ddp":
        trained = [p for p in draft.parameters() if p.requires_grad]
        return objective + (sum(1 for _ in _buckets(trained)) if ranks.world_size > 1 else 0)
    from torch.distributed.fsdp import FSDPModule

    units = sum(isinstance(module, FSDPModule) for module in draft.modules())
    layers = len(getattr(draft, "layers", ()))
    return objective + accumulation * (2 * units + layers) + 1


@torch.no_grad()
def average_gradients(draft: nn.Module) -> None:
    """Average the gradients over the ranks, after the last micro-batch; nothing on one rank.

    Sharded gradients were reduced in the backward pass. Else: one all-reduce per bucket, in the
    gradients' float32 or better. A parameter without a gradient counts as one with zeros, so that
    every rank takes the same collectives. Gradients become views of their buckets.
    """
    ranks = world_size()
    parameters = [p for p in draft.parameters() if p.requires_grad]
    if ranks == 1 or any(is_sharded(p) for p in parameters):
        return
    for bucket in _buckets(parameters):
        flat = torch.cat([_gradient(p).flatten() for p in bucket])
        sizes = [p.numel() for p in bucket]
        for parameter, part in zip(bucket, flat.split(sizes), strict=True):
            parameter.grad = part.view_as(parameter)  # frees the old one before the next bucket
        dist.all_reduce(flat)
        flat /= ranks


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is not None:
        return parameter.grad
    return torch.zeros_like(parameter, dtype=parameter.grad_dtype)


def _buckets(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Cut parameters, in their order, into runs of one dtype, of up to `BUCKET_BYTES` in float32.

    A larger parameter is alone. The cut follows from the draft alone: ranks agree on it.
    """
    bucket: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        size = parameter.numel() * max(4, parameter.itemsize)
        if bucket and (held + size > BUCKET_BYTES or parameter.dtype != bucket[0].dtype):
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += size
    if bucket:
        yield bucket
