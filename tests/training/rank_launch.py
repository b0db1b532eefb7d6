"""Real rank processes, started as torchrun starts them, and what they say to each other.

Each process gets torchrun's variables, calls one function of a module here and leaves its result in
a file. It leaves without Python's clean-up, in which a late thread of torch's own can abort.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HERE = Path(__file__).parent
PROCESS = """
import os, sys, traceback
sys.path[:0] = sys.argv[1:3]
import torch
torch.set_num_threads(1)
status = 1
try:
    module = __import__(sys.argv[3])
    torch.save(getattr(module, sys.argv[4])(), sys.argv[5])
    status = 0
except BaseException:
    traceback.print_exc()
sys.stderr.flush()
os._exit(status)
"""


def free_ports(count: int) -> list[int]:
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    return ports


def launch(module: str, function: str, ranks: int, folder: Path) -> list[Any]:
    """Run `module.function()` on so many ranks; return each one's result.

    PORTS lists more ports, for process groups that follow the first.
    """
    ports = [str(port) for port in free_ports(5)]
    processes = []
    for rank in range(ranks):
        environment = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": ports[0],
            "PORTS": ",".join(ports[1:]),
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "error::UserWarning:torch.distributed.fsdp",
        }
        arguments = [str(HERE), str(HERE.parent / "port"), module, function]
        with (folder / f"errors{rank}").open("w") as errors:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", PROCESS, *arguments, str(folder / f"rank{rank}")],
                    env=environment,
                    stderr=errors,
                )
            )
    try:
        statuses = [process.wait(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    said = [(folder / f"errors{rank}").read_text() for rank in range(ranks)]
    assert statuses == [0] * ranks, "\n".join(said)
    return [torch.load(folder / f"rank{rank}", weights_only=True) for rank in range(ranks)]


class RefusedError(RuntimeError):
    """What an older HCCL does not do."""


@dataclass
class Collectives(TorchDispatchMode):
    """Notes every collective of the default group: (name, dtype, number of elements of its input).

    With `refuse` it raises, as an older HCCL did, on gathers and on bools (field-note 35). Groups
    of their own (gloo, for checkpoints) may do both.
    """

    refuse: bool = False
    seen: list[tuple[str, str, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._note(func.__name__.split(".")[0].rstrip("_"), args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: Any, kwargs: Any) -> None:
        if name == "wait_tensor" or not self._default(args):
            return
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        # Outputs come first, inputs last, in c10d's operators.
        self.seen.append((name, str(tensors[-1].dtype), tensors[-1].numel()))
        if self.refuse and name in ("gather", "scatter"):
            raise RefusedError(f"no {name} here")
        if self.refuse and any(x.dtype == torch.bool for x in tensors):
            raise RefusedError("no bools here")

    def _default(self, args: Any) -> bool:
        for x in args:
            try:
                return dist.ProcessGroup.unbox(x).group_name == dist.group.WORLD.group_name
            except (TypeError, RuntimeError):
                continue
        return True
