"""The collectives of a training run over the cards of this machine, in processes of its own.

`python -m torch_port.doctor.ring BACKEND ELEMENTS` is one rank, started by torchrun; rank 0 prints
a line of JSON. `check_ring` starts the ranks and reads it. What is sent is what training sends
(`training.distribution`), and a bool, which it does not send.
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
    "a ring needs the cards' network (hccn_tool -i N -link -g), free ports and fitting HCCL_* "
    "variables; run `python -m torch.distributed.run --standalone --nproc-per-node N -m "
    "torch_port.doctor.ring hccl 1024` to see the ranks' own words"
)
BOOL = "all-reduce, bool"


def check_ring(backend: str, ranks: int, elements: int = ELEMENTS) -> list[Check]:
    """Send over `ranks` processes of this machine with `backend`; a line for each collective.

    A refused bool is no fault: the port sends none.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "torch_port.doctor.ring"]
    name = f"{ranks} ranks of {backend}"
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
    return [_line(ranks, sent, answer) for sent, answer in json.loads(answers[-1]).items()]


def _line(ranks: int, sent: str, answer: dict[str, Any]) -> Check:
    error = answer["error"]
    if sent == BOOL:
        said = "accepted" if error is None else f"rejected ({error})"
        return Check("ring", sent, "ok", f"{said}; the port sends none")
    if error is not None:
        return Check("ring", sent, "failed", error, REMEDY)
    if answer["got"] != answer["expected"]:
        text = f"over {ranks} ranks: {answer['got']} came out, not {answer['expected']}"
        return Check("ring", sent, "failed", text, REMEDY)
    text = f"{ranks} ranks, {answer['mib']:.3g} MiB in {1e3 * answer['seconds']:.1f} ms"
    return Check("ring", sent, "ok", text)


def main(backend: str, elements: int) -> None:
    """Be one rank: every collective once to make the ring, then again, timed."""
    import torch
    import torch.distributed as dist

    from torch_port.device import device_named

    local = int(os.environ["LOCAL_RANK"])
    device = device_named(f"npu:{local}" if backend == "hccl" else "cpu")
    if device.type == "npu":
        torch.accelerator.set_device_index(local)  # the group takes the device that is current
    dist.init_process_group(backend)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, total = float(rank + 1), ranks * (ranks + 1) / 2
    part = elements // ranks * ranks

    def full(dtype: torch.dtype, value: float, size: int = part) -> torch.Tensor:
        return torch.full((size,), value, dtype=dtype, device=device)

    def all_reduce() -> tuple[list[float], list[float]]:
        values = full(torch.float32, mine)
        dist.all_reduce(values)
        return values[-1:].tolist(), [total]

    def broadcast() -> tuple[list[float], list[float]]:
        values = full(torch.uint8, 7 if rank == 0 else 0)
        dist.broadcast(values, 0)
        return values[-1:].tolist(), [7]

    def all_gather() -> tuple[list[float], list[float]]:
        values = full(torch.bfloat16, 0.0)
        dist.all_gather_into_tensor(values, full(torch.bfloat16, mine, part // ranks))
        return values[:: part // ranks].tolist(), [float(n + 1) for n in range(ranks)]

    def reduce_scatter() -> tuple[list[float], list[float]]:
        values = full(torch.float32, 0.0, part // ranks)
        dist.reduce_scatter_tensor(values, full(torch.float32, mine))
        return values[-1:].tolist(), [total]

    def flags() -> tuple[list[float], list[float]]:
        values = torch.ones(8, dtype=torch.bool, device=device)
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
        return [float(flag) for flag in values[-1:].tolist()], [1.0]

    sent = {
        "all-reduce, float32": (all_reduce, 4),
        "broadcast, uint8": (broadcast, 1),
        "all-gather, bfloat16": (all_gather, 2),
        "reduce-scatter, float32": (reduce_scatter, 4),
        BOOL: (flags, 0),
    }
    answers = {name: _timed(send, size * part) for name, (send, size) in sent.items()}
    if rank == 0:
        print(json.dumps(answers), flush=True)
    sys.stdout.flush()
    os._exit(0)  # past the group's destructors, which can wait for ranks that are gone


def _timed(send: Any, nbytes: int) -> dict[str, Any]:
    try:
        send()
        started = time.perf_counter()
        got, expected = send()  # reads a value, which waits for the device
        seconds = time.perf_counter() - started
    except Exception as error:  # noqa: BLE001 (whatever a backend raises is the answer)
        return {"error": str(error).strip().split("\n", 1)[0][:160]}
    mib = nbytes / 2**20
    return {"error": None, "got": got, "expected": expected, "seconds": seconds, "mib": mib}


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
