"""An all-reduce over the cards of this machine, in processes of its own.

`python -m torch_port.doctor.ring BACKEND ELEMENTS` is one rank, started by torchrun; rank 0 prints
a line of JSON. `check_ring` starts the ranks and reads it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from torch_port.doctor.checks import Check

ELEMENTS = 16 * 2**20  # 64 MiB of float32
SECONDS = 180.0
REMEDY = (
    "HCCL_* variables, the cards' network (hccn_tool -i N -link -g) and free ports are what a ring "
    "needs; run `python -m torch.distributed.run --standalone --nproc-per-node N -m "
    "torch_port.doctor.ring hccl 1024` to see the ranks' own words"
)


def check_ring(backend: str, ranks: int, elements: int = ELEMENTS) -> list[Check]:
    """All-reduce float32 and bool over `ranks` processes of this machine with `backend`.

    A refused bool is no fault: the port reduces float32 alone.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "torch_port.doctor.ring"]
    name = f"all-reduce, {ranks} ranks"
    try:
        done = subprocess.run(
            [*command, backend, str(elements)], capture_output=True, text=True, timeout=SECONDS
        )
    except subprocess.TimeoutExpired:
        return [Check("ring", name, "failed", f"no answer within {SECONDS:.0f} s", REMEDY)]
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not answers:
        said = [line for line in done.stderr.splitlines() if "Error" in line] or ["no answer"]
        return [Check("ring", name, "failed", said[-1].strip(), REMEDY)]
    return _lines(name, json.loads(answers[-1]), ranks)


def _lines(name: str, answer: dict[str, Any], ranks: int) -> list[Check]:
    expected = ranks * (ranks + 1) / 2
    text = f"{answer['mib']:.0f} MiB of float32 in {1e3 * answer['seconds']:.1f} ms"
    if answer["sum"] != expected:
        text = f"the sum of 1 … {ranks} came out {answer['sum']}, not {expected}"
        return [Check("ring", name, "failed", text, REMEDY)]
    refused = answer["bool"]
    said = "accepted" if refused is None else f"rejected ({refused}); the port sends none"
    return [Check("ring", name, "ok", text), Check("ring", "bool all-reduce", "ok", said)]


def main(backend: str, elements: int) -> None:
    """Be one rank: reduce rank + 1 over all ranks, timed; then try a bool."""
    import torch
    import torch.distributed as dist

    from torch_port.device import device_named

    local = int(os.environ["LOCAL_RANK"])
    device = device_named(f"npu:{local}" if backend == "hccl" else "cpu")
    if device.type == "npu":
        torch.accelerator.set_device_index(local)  # the group takes the device that is current
    dist.init_process_group(backend)
    values = torch.full((elements,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(values.clone())  # the first call makes the ring
    dist.barrier()
    started = time.perf_counter()
    dist.all_reduce(values)
    total = float(values[-1])  # waits for the device
    seconds = time.perf_counter() - started
    refused = None
    try:
        flags = torch.ones(8, dtype=torch.bool, device=device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        flags.cpu()
    except Exception as error:  # noqa: BLE001 (whatever a backend raises is the answer)
        refused = str(error).strip().split("\n", 1)[0][:120]
    if dist.get_rank() == 0:
        answer = {"sum": total, "seconds": seconds, "mib": elements * 4 / 2**20, "bool": refused}
        print(json.dumps(answer), flush=True)
    sys.stdout.flush()
    os._exit(0)  # past the group's destructors, which can wait for ranks that are gone


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
