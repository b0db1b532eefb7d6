"""AdamW with float32 master weights, warm-up and cosine, clip by global norm (spec sheet §14)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from torch_port.device import fused_adamw
from torch_port.errors import UserError
from torch_port.training.guard import SpikeGuard
from torch_port.training.optimizer_config import OptimizerConfig

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
    """

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], config: OptimizerConfig) -> None:
        self.config = config
        self.guard = SpikeGuard(config.spike_multiple)
        self.names: list[str] = []
        self.parameters: list[nn.Parameter] = []
        self.masters: list[Tensor] = []
        groups: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, parameter in named:
            wide = torch.promote_types(parameter.dtype, torch.float32)
            master = parameter if parameter.dtype == wide else parameter.detach().to(wide)
            self.names.append(name)
            self.parameters.append(parameter)
            self.masters.append(master)
            groups[decays(name)].append(master)
        self._adamw = fused_adamw(
            [
                {"params": groups[True], "weight_decay": config.weight_decay},
                {"params": groups[False], "weight_decay": 0.0},
            ],
            config.betas,
            config.eps,
            self.masters[0].device,
        )

    def gradient_norm(self) -> Tensor:
        """Return the global norm of all gradients, on the device, in float32 or better."""
        # Row by row, then a sum: torch's norm of 2²⁴ float32 values in one go was off by 6e-4.
        rows = [
            torch.linalg.vector_norm(p.grad, dim=-1, dtype=m.dtype).flatten()
            for p, m in self._pairs()
            if p.grad is not None
        ]
        return torch.cat(rows).square().sum().sqrt()

    def apply(self, rate: float, norm: Tensor) -> None:
        """Clip by min(1, max_grad_norm/‖g‖), update the masters, cast to the parameters.

        Written out: torch's own clip adds 1e-6 to the norm. Nothing here syncs with the device.
        Gradients are released.
        """
        # A norm of 0 gives inf, and min(1, inf) is 1: no gradient is moved by a division by 0.
        factor = (self.config.max_grad_norm / norm).clamp(max=1.0)
        gradients = (
            (m, None if p.grad is None else p.grad.to(m.dtype) * factor) for p, m in self._pairs()
        )
        self._adamw.step(rate, gradients)
        with torch.no_grad():
            for parameter, master in self._pairs():
                if parameter is not master:
                    parameter.copy_(master)
        self.release_gradients()

    def release_gradients(self) -> None:
        """Drop every gradient."""
        for parameter in self.parameters:
            parameter.grad = None

    def moments(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return each parameter's first and second moment, by name (after the first step)."""
        state = self._adamw.state
        return {
            name: (state[master]["exp_avg"], state[master]["exp_avg_sq"])
            for name, master in zip(self.names, self.masters, strict=True)
            if master in state
        }

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

        Arguments: `optimizer.{masters,exp_avg,exp_avg_sq}.<parameter>`; how many updates were made.
        Raises UserError, changing nothing, when a tensor is missing or of another dtype or shape.
        """
        wanted: dict[str, Tensor] = {}
        for name, parameter, master in zip(self.names, self.parameters, self.masters, strict=True):
            parts = ("exp_avg", "exp_avg_sq") if updates else ()
            if parameter is not master:
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
        for name, master in zip(self.names, self.masters, strict=True):
            if f"optimizer.masters.{name}" in wanted:
                master.copy_(tensors[f"optimizer.masters.{name}"])
            if updates:
                first, second = (
                    tensors[f"optimizer.{p}.{name}"] for p in ("exp_avg", "exp_avg_sq")
                )
                self._adamw.restore(master, first, second, updates)

    def _pairs(self) -> list[tuple[nn.Parameter, Tensor]]:
        return list(zip(self.parameters, self.masters, strict=True))
