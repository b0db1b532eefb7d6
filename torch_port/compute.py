"""How a step computes, as against what it computes: none of these settings moves a number.

(In bf16 up to rounding: docs/precision.md.) Every choice has a slow, plain form beside the default;
parity and the tests hold each pair equal.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from torch_port.config import Settings


class ComputeConfig(Settings):
    """Settings of the step's speed and memory.

    `objective`: "fused" (loss and gradient together, chunk by chunk) or "plain" (the reference).
    `attention`: "blockwise" (only the columns a query can see) or "dense" (one mask).
    `recompute`: what the backward pass computes again instead of keeping: "none", "mlp" (attention
    is kept, the feed-forward part is computed again) or "layer" (each layer whole).
    `objective_buffer_mib`: the fused objective's K-wide buffers all together, in MiB of 2²⁰ bytes.
    Its products want a few hundred slots at a time, 1.4 rows of K floats each: 32 MiB hold 350
    at K = 16k; take 128 at K = 64k, 512 at 248k. Larger buffers are a little faster.
    `adamw`: the kernel of the update on an NPU: "npu" (torch_npu's NpuFusedAdamW, which keeps a
    copy of the gradients and needs the masters' size twice while it updates) or "torch" (torch's
    own fused kernel, which needs neither). Elsewhere it is torch's in any case.
    """

    objective: Literal["fused", "plain"] = "fused"
    attention: Literal["blockwise", "dense"] = "blockwise"
    recompute: Literal["none", "mlp", "layer"] = "none"
    objective_buffer_mib: float = Field(default=32.0, gt=0)
    adamw: Literal["npu", "torch"] = "npu"
