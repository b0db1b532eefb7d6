"""AdamW with float32 master weights, warm-up and cosine, clip by global norm (spec sheet §14).

Parameters may be sharded (FSDP2's DTensors): masters and moments are then sharded alike, each rank
updates its own part, and the norm is of all parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn

from torch_port.device import fused_adamw
from torch_port.errors import UserError
from torch_port.training.guard import GuardMode, SpikeGuard
from torch_port.training.optimizer_config import OptimizerConfig
from torch_port.training.shards import add_up, host_copy, laid_out_as, local, part_of

__all__ = ["MasterAdamW", "OptimizerConfig", "decays", "rate_at"]


def rate_at(step: int, config: OptimizerConfig) -> float:
    """Return the learning rate of step t, counted from 1.

    peak·t/warm for t ≤ warm, then final + (peak − final)·½(1 + cos(π·(t − warm)/(total − warm)));
    past the last step it stays at final.

    >>> config = OptimizerConfig(peak_rate=1.0, warmup_steps=4, total_steps=20)
    >>> [rate_at(t, config) for t in (1, 4, 12, 20, 25)]
    [0.25, 1.0, 0.5, 0.0, 0.0]
    """
    peak, final = config.peak_rate, config.final_rate
    warm, total = config.warmup_steps, config.total_steps
    step = min(step, total)
    if step <= warm:
        return peak * step / warm
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


def decays(name: str) -> bool:
    """Return whether weight decay applies: never to norms, biases or W1.

    >>> decays("layers.0.mlp.up_proj.weight"), decays("layers.0.self_attn.q_norm.weight")
    (True, False)
    """
    module = name.rsplit(".", 2)[-2] if "." in name else name
    return not (name.endswith(".bias") or module.endswith("norm") or module == "markov_w1")


class MasterAdamW:
    """AdamW on float32 (or better) masters of a draft's parameters.

    Pure bf16 updates lose: at a rate of 1e-4 a norm weight of 1.0 never moves. Parameters that are
    float32 or better are their own masters.

    With `offload` masters and moments are in host memory, 12 bytes a parameter, and the update runs
    there: gradients cross to the host, which waits for them once more per step, and weights come
    back. It moves no number in float32 on the CPU. `guard_mode` is the spike guard's. `lean` is
    `compute.adamw: torch`: on an NPU, the kernel that needs less memory.

    `masters` and `moments()` are spread over ranks as the parameters are.
    """

    def __init__(
        self,
        named: Iterable[tuple[str, nn.Parameter]],
        config: OptimizerConfig,
        *,
        offload: bool = False,
        guard_mode: GuardMode = "skip",
        lean: bool = False,
    ) -> None:
        self.config = config
        self.guard = SpikeGuard(config.spike_multiple, guard_mode)
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        self.masters: list[Tensor] = []
        self._shards: list[Tensor] = []  # of the masters, on this rank: what AdamW knows
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, parameter in named:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            if offload:
                master = host_copy(parameter.detach(), wide)
            else:
                master = parameter if parameter.dtype == wide else parameter.detach().to(wide)
            self.names.append(name)
            self.parameters.append(parameter)
            self.masters.append(master)
            self._shards.append(local(master))
            if self._shards[-1].numel():  # a part without elements has nothing to learn
                groups[decays(name)].append(self._shards[-1])
        self._host = [_buffer(p, s) for p, s in self._pairs()] if offload else None
        self._adamw = fused_adamw(
            [
                {"params": groups[True], "weight_decay": config.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            config.betas,
            config.eps,
            self.masters[0].device,
            lean,
        )

    def gradient_norm(self) -> Tensor:
        """Return the global norm of all gradients, on the device, in float32 or better.

        With sharded gradients one all-reduce of one number: every rank gets the same norm.
        """
        given = [(p.grad, m) for p, m in self._pairs() if p.grad is not None]
        # Row by row, then a sum: torch's norm of 2²⁴ float32 values in one go was off by 6e-4.
        rows = [
            torch.linalg.vector_norm(local(grad), dim=-1, dtype=m.dtype).flatten()
            for grad, m in given
        ]
        total = torch.cat(rows).square().sum()
        return add_up(total, [grad for grad, _ in given]).sqrt()

    def apply(self, rate: float, norm: Tensor) -> None:
        """Clip by min(1, max_grad_norm/‖g‖), update the masters, cast to the parameters.

        Written out: torch's own clip adds 1e-6 to the norm. Nothing here syncs with the device,
        unless the optimizer is offloaded. Gradients are released.
        """
        # A norm of 0 gives inf, and min(1, inf) is 1: no gradient is moved by a division by 0.
        factor = (self.config.max_grad_norm / norm).clamp(max=1.0)
        gradients = self._clipped(factor)
        self._adamw.step(rate, gradients if self._host is None else self._on_host(gradients))
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter is not master:
                    local(parameter).copy_(local(master), non_blocking=True)
        self.release_gradients()

    def _clipped(self, factor: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Make each master's clipped gradient, one by one; this rank's parts."""
        for p, m in self._pairs():
            if m.numel():
                yield m, None if p.grad is None else local(p.grad).to(m.dtype) * factor

    def _on_host(
        self, gradients: Iterator[tuple[Tensor, Tensor | None]]
    ) -> list[tuple[Tensor, Tensor | None]]:
        """Take gradients to their buffers in host memory, and wait until all are there."""
        assert self._host is not None
        buffers = (b for b, m in zip(self._host, self._shards, strict=True) if m.numel())
        moved = [
            (m, None if grad is None else buffer.copy_(grad, non_blocking=True))
            for buffer, (m, grad) in zip(buffers, gradients, strict=True)
        ]
        device = self.parameters[0].device
        if device.type != "cpu":
            torch.get_device_module(device).current_stream().synchronize()
        return moved

    def release_gradients(self) -> None:
        """Drop every gradient."""
        for parameter in self.parameters:
            parameter.grad = None

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return each parameter's first and second moment, by name (after the first step)."""
        state, result = self._adamw.state, {}
        for name, master, shard in zip(self.names, self.masters, self._shards, strict=True):
            if shard in state:
                parts = state[shard]["exp_avg"], state[shard]["exp_avg_sq"]
            elif state and not shard.numel():
                parts = torch.empty_like(shard), torch.empty_like(shard)
            else:
                continue
            result[name] = (laid_out_as(parts[0], master), laid_out_as(parts[1], master))
        return result

    @property
    def updates(self) -> int:
        """How many updates were made, which a skipped step is not: the bias correction's count.

        Raises UserError when parameters differ in it: one number could not restore them.
        """
        counts = {int(state["step"]) for state in self._adamw.state.values()}
        if len(counts) > 1:
            raise UserError(
                f"parameters have had {sorted(counts)} updates: some had no gradient in some "
                "steps, and a checkpoint holds one count for all; freeze them (requires_grad_)"
            )
        return counts.pop() if counts else 0

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Take over masters and moments of a checkpoint, bit for bit; call before the first step.

        Arguments: `optimizer.{masters,exp_avg,exp_avg_sq}.<parameter>`, whole or spread as the
        masters are; how many updates were made. A master of its parameter's own dtype
        (an offloaded float32 one) is no part of a checkpoint: the parameter must be loaded before.
        Raises UserError, changing nothing, when a tensor is missing or of another dtype or shape.
        """
        wanted: dict[str, Tensor] = {}
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            parts = ("exp_avg", "exp_avg_sq") if updates else ()
            if parameter.dtype != master.dtype:
                parts = ("masters", *parts)
            wanted |= {f"optimizer.{part}.{name}": master for part in parts}
        for name, master in wanted.items():
            given = tensors.get(name)
            if given is None or (given.dtype, given.shape) != (master.dtype, master.shape):
                found = "nothing" if given is None else f"{given.dtype} {list(given.shape)}"
                raise UserError(
                    f"{name}: expected {master.dtype} {list(master.shape)}, found {found}; the "
                    "checkpoint is of another draft or precision"
                )
        for name, parameter, master, shard in zip(
            self.names, self.parameters, self.masters, self._shards, strict=True
        ):
            if f"optimizer.masters.{name}" in wanted:
                shard.copy_(part_of(tensors[f"optimizer.masters.{name}"], master))
            elif parameter is not master:
                shard.copy_(local(parameter))
            if updates and shard.numel():
                first, second = (
                    part_of(tensors[f"optimizer.{p}.{name}"], master)
                    for p in ("exp_avg", "exp_avg_sq")
                )
                self._adamw.restore(shard, first, second, updates)

    def _pairs(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Return each parameter with this rank's part of its master."""
        return list(zip(self.parameters, self._shards, strict=True))


def _buffer(parameter: nn.Parameter, shard: Tensor) -> Tensor:
    """Make a place in host memory for an offloaded master's gradient."""
    return torch.empty_like(shard, pin_memory=parameter.device.type != "cpu")
