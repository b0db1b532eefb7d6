"""The portable twins of the seam's kernels (`device`): plain torch, any device, float64 too.

Each is described at the function of its name in `device`. Shape suffixes: Q queries, K keys,
A query heads, R kv heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

Stats = tuple[Tensor, Tensor]  # softmax maximum and sum of each query; their shape is the kernel's


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x · rsqrt(mean(x²) + eps) · weight, in float32 or better."""
    wide = _wide(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * weight).to(x.dtype)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the halves of the last axis."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up."""
    return F.silu(gate) * up


def _exponentials(
    q_1RMD: Tensor, k_1RKD: Tensor, hidden_QK: Tensor, largest_1RM1: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return exp(q·kᵀ − maximum), 0 where hidden, and the maximum; M = (A/R)·Q rows.

    The query heads of one kv head are rows of one product, so that k and v are never repeated.
    """
    score_1RMK = q_1RMD @ k_1RKD.mT
    score_1RMK.unflatten(2, (-1, len(hidden_QK))).masked_fill_(hidden_QK, -torch.inf)
    if largest_1RM1 is None:
        largest_1RM1 = score_1RMK.amax(-1, keepdim=True)
    return score_1RMK.sub_(largest_1RM1).exp_(), largest_1RM1


@torch.no_grad()
def attention_chunk(
    q_1AQD: Tensor, k_1RKD: Tensor, v_1RKD: Tensor, hidden_QK: Tensor, scale: float
) -> tuple[Tensor, Stats]:
    """Softmax attention of one chunk, with its maxima and sums."""
    R, D = k_1RKD.shape[1], k_1RKD.shape[3]
    # Widened before the products: scores rounded to bf16 would be off by 2⁻⁹ of themselves, which
    # the exponential turns into per cents. Fused kernels accumulate in float32 as well.
    q_1RMD = (_wide(q_1AQD) * scale).reshape(1, R, -1, D)
    exponential_1RMK, largest_1RM1 = _exponentials(q_1RMD, _wide(k_1RKD), hidden_QK, None)
    total_1RM1 = exponential_1RMK.sum(-1, keepdim=True)
    out_1RMD = exponential_1RMK @ _wide(v_1RKD) / total_1RM1
    return out_1RMD.view_as(q_1AQD).to(q_1AQD.dtype), (largest_1RM1, total_1RM1)


@torch.no_grad()
def attention_chunk_grad(
    q_1AQD: Tensor,
    k_1RKD: Tensor,
    v_1RKD: Tensor,
    hidden_QK: Tensor,
    scale: float,
    out_1AQD: Tensor,
    stats: Stats,
    grad_out_1AQD: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """With P the probabilities and dP = dO·vᵀ: dS = P ⊙ (dP − Σ dO⊙O), as Σ P⊙dP = Σ dO⊙O."""
    R, D = k_1RKD.shape[1], k_1RKD.shape[3]
    largest_1RM1, total_1RM1 = stats
    q_1RMD = (_wide(q_1AQD) * scale).reshape(1, R, -1, D)
    k, v = _wide(k_1RKD), _wide(v_1RKD)
    exponential_1RMK, _ = _exponentials(q_1RMD, k, hidden_QK, largest_1RM1)
    # The softmax's division by its sum is done on D-wide tensors instead of K-wide ones.
    grad_out_1RMD = _wide(grad_out_1AQD).reshape(1, R, -1, D) / total_1RM1
    out_1RMD = _wide(out_1AQD).reshape(1, R, -1, D)
    dv = exponential_1RMK.mT @ grad_out_1RMD
    grad_score_1RMK = grad_out_1RMD @ v.mT
    grad_score_1RMK.sub_((grad_out_1RMD * out_1RMD).sum(-1, keepdim=True)).mul_(exponential_1RMK)
    dq = (grad_score_1RMK @ k * scale).view_as(q_1AQD)
    dk = grad_score_1RMK.mT @ q_1RMD
    return dq.to(q_1AQD.dtype), dk.to(k_1RKD.dtype), dv.to(v_1RKD.dtype)


class TorchAdamW:
    """torch's AdamW; a gradient lives for the step only."""

    def __init__(
        self, groups: list[dict[str, Any]], betas: tuple[float, float], eps: float
    ) -> None:
        self._adamw = self._optimizer(groups, lr=0.0, betas=betas, eps=eps)

    def _optimizer(self, *groups: Any, **settings: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(*groups, **settings, foreach=True)

    @property
    def state(self) -> Any:
        """Per master: step, exp_avg, exp_avg_sq."""
        return self._adamw.state

    def _count(self, updates: int) -> Any:
        return torch.tensor(float(updates))  # a float32 scalar on the host, as torch's own is

    def step(self, rate: float, gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """One update of every master that has a gradient."""
        masters = []
        for master, gradient in gradients:
            master.grad = gradient
            masters.append(master)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        for master in masters:
            master.grad = None

    def restore(self, master: Tensor, first: Tensor, second: Tensor, updates: int) -> None:
        """Take over a master's moments, before the first step."""
        self._adamw.state[master] = {  # laid out like the master
            "step": self._count(updates),
            "exp_avg": torch.empty_like(master).copy_(first),
            "exp_avg_sq": torch.empty_like(master).copy_(second),
        }


class LeanAdamW(TorchAdamW):
    """torch's fused kernel: one pass over each master, without temporaries of the masters' size."""

    def _optimizer(self, *groups: Any, **settings: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(*groups, **settings, fused=True)

    def restore(self, master: Tensor, first: Tensor, second: Tensor, updates: int) -> None:
        """Take over a master's moments; the fused kernel counts on the master's device."""
        super().restore(master, first, second, updates)
        state = self._adamw.state[master]
        state["step"] = state["step"].to(master.device)
