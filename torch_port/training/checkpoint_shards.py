"""The tensors of a checkpoint to files and back, each rank its own part.

torch.distributed.checkpoint plans what each rank writes and reads; here is what it plans with: who
writes what all ranks hold, the copies that are written while training goes on, and the files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from torch_port.data.atomic import sync
from torch_port.errors import UserError
from torch_port.formats.weights import tensor_ref
from torch_port.formats.writer import write_safetensors
from torch_port.training.shards import is_sharded, laid_out_as, local


def share(tensors: Mapping[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    """Return what this rank writes: its parts of sharded tensors, and its share of the others.

    Every rank holds the others whole. They are dealt out, the largest first, each to the rank that
    has the least of them; all ranks deal alike, so nothing has to be said. With ddp a rank copies
    and writes one part in `world_size`.

    >>> sizes = {"a": 6, "b": 3, "c": 2, "d": 1}
    >>> [list(share({n: torch.empty(k) for n, k in sizes.items()}, r, 2)) for r in (0, 1)]
    [['a'], ['b', 'c', 'd']]
    """
    mine = {name: tensor for name, tensor in tensors.items() if is_sharded(tensor)}
    load = [0] * world_size
    for name in sorted(tensors.keys() - mine.keys(), key=lambda n: (-tensors[n].nbytes, n)):
        owner = load.index(min(load))
        load[owner] += tensors[name].nbytes
        if owner == rank:
            mine[name] = tensors[name]
    return mine


class HostCopies:
    """Host memory that tensors are copied to, kept from one checkpoint to the next.

    New memory is handed out page by page: it took five times as long as the copy itself.
    """

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy tensors, or this rank's parts; what was taken before is overwritten."""
        copies = {}
        for name, tensor in tensors.items():
            part, held = local(tensor), self._held.get(name)
            if held is None or (held.shape, held.dtype) != (part.shape, part.dtype):
                pinned = part.device.type != "cpu"  # what a device writes to without a detour
                held = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=pinned)
                self._held[name] = held
            copies[name] = laid_out_as(held.copy_(part), tensor)
        return copies


class ShardWriter(HuggingFaceStorageWriter):
    """torch's safetensors storage, written tensor by tensor: a file per rank.

    torch's own makes two more copies of all that a rank writes, and holds the interpreter's lock
    meanwhile: a training step beside it stood still for seconds.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory), save_distributed=True)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's file, down to the disk."""
        tensors, begins = {}, {}
        for item in plan.items:
            assert item.tensor_data is not None  # nothing but tensors is given
            name, data = item.index.fqn, planner.resolve_data(item)
            assert isinstance(data, Tensor)
            part = local(data).detach().cpu()
            if not part.numel():  # of an axis that is shorter than the ranks are many
                continue
            tensors[name] = tensor_ref(part, name)
            begins[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
        if tensors:
            path = Path(self.path) / f"rank-{plan.storage_data['shard_index'] - 1:05}.safetensors"
            write_safetensors(path, tensors, {"DCP_SHARDING_INFO": json.dumps(begins)})
            sync(path)
        done: Future[list[WriteResult]] = Future()
        done.set_result([])
        return done


def write_shards(
    directory: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Write this rank's tensors into a directory that is there; all ranks call it.

    Raises CheckpointException on every rank when one of them failed.
    """
    dcp.save(
        dict(tensors),
        storage_writer=ShardWriter(directory),
        process_group=group,
        no_dist=group is None,
    )


def read_shards(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors, plain or sharded, from a checkpoint of any number of ranks; no collectives.

    Raises UserError when something cannot be read; tensors may have been filled in part then.
    """
    reader = HuggingFaceStorageReader(str(directory))
    try:
        dcp.load(dict(tensors), storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # noqa: BLE001 (of any class)
        failures = error.failures.values() if isinstance(error, CheckpointException) else ()
        cause = next((failure[0] for failure in failures), error)
        why = (str(cause) or type(cause).__name__).splitlines()[0]
        raise UserError(f"{directory}: cannot be read ({why}); copy the checkpoint again") from None
