"""The seam between model code and hardware: fused NPU kernels, each with a portable twin.

Model and training code call the functions of this module; which twin runs follows from the
tensor's device, or from `use_kernels`. This is the only file that names torch_npu: importing it
needs CANN's libraries, which exist on an Ascend machine only.

Facts marked [docs], [meta] and [optim] come from the torch_npu 2.13.0 wheel: `_op_plugin_docs.py`,
`op_plugin/meta/_meta_registrations.py` and `optim/`. All of its kernels here take float16, bfloat16
or float32 [docs]; no float64 may reach the device. The portable twins also take float64, in which
the tests compare.

Shape suffixes: Q queries, K keys, A query heads, R kv heads, D head dimension.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Protocol

import torch
from torch import Tensor

from torch_port import portable
from torch_port.errors import UserError
from torch_port.portable import Stats

NPU_PACKAGE = "torch_npu"


class AdamW(Protocol):
    """AdamW on masters of float32 or better, decoupled weight decay, bias-corrected moments."""

    @property
    def state(self) -> Any:
        """Per master, a dict with `exp_avg` and `exp_avg_sq` (after the first step)."""

    def step(self, rate: float, gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        """Update each master from its gradient; a master whose gradient is None stays.

        The gradients are taken over: the caller does not use them afterwards. They are asked for
        one by one, so that a generator can let go of what it made them from.
        """

    def restore(self, master: Tensor, first: Tensor, second: Tensor, updates: int) -> None:
        """Take over a master's moments after `updates` updates; before the first step."""


@dataclass(frozen=True)
class Kernels:
    """One implementation of every function of the seam. Each is described at its own function."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor, Tensor], Tensor]
    attention_chunk: Callable[[Tensor, Tensor, Tensor, Tensor, float], tuple[Tensor, Stats]]
    attention_chunk_grad: Callable[
        [Tensor, Tensor, Tensor, Tensor, float, Tensor, Stats, Tensor],
        tuple[Tensor, Tensor, Tensor],
    ]
    fused_adamw: Callable[[list[dict[str, Any]], tuple[float, float], float], AdamW]


# A module-level variable and no context variable: backward runs in threads of autograd's own.
_override: Kernels | None = None


def kernels_for(device: torch.device) -> Kernels:
    """Return the kernels for tensors on `device`: the NPU's on an NPU, else the portable ones.

    >>> kernels_for(torch.device("cpu")).name
    'portable'
    """
    if _override is not None:
        return _override
    return NPU if device.type == "npu" else PORTABLE


def device_named(name: str) -> torch.device:
    """Return the torch device a user's setting names, such as `cpu`, `cuda:1` or `npu:0`.

    torch knows the name `npu` only after torch_npu has been imported.
    Raises UserError for an NPU without torch_npu, and for a name that is no device.

    >>> device_named("cpu")
    device(type='cpu')
    """
    if name.split(":")[0] == "npu":
        _torch_npu()
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise UserError(f"{name!r} names no device; expected cpu, cuda, npu or npu:0") from error


@dataclass(frozen=True)
class Card:
    """One visible NPU: its name, and its memory in bytes."""

    name: str
    total: int
    free: int


def npu_version() -> str | None:
    """Return the installed version of the `npu` extra's package, or None; imports nothing of it."""
    try:
        return version(NPU_PACKAGE)
    except PackageNotFoundError:
        return None


def npu_cards() -> list[Card]:
    """Return the visible NPUs, in the order of their indices. Raises UserError as `device_named`.

    [torch_npu] its import adds `torch.npu`, with the functions of `torch.cuda`.
    """
    _torch_npu()
    npu: Any = vars(torch)["npu"]
    cards = []
    for index in range(npu.device_count()):
        free, total = npu.mem_get_info(index)
        cards.append(Card(npu.get_device_name(index), total, free))
    return cards


@contextmanager
def use_kernels(kernels: Kernels) -> Iterator[None]:
    """Use `kernels` on every device inside the block, in every thread.

    For the portable kernels on an NPU (to look for a kernel's fault), and for the NPU's kernels on
    a CPU with an emulated torch_npu (to test the wiring). Cover forward and backward by one block:
    the two twins' softmax statistics do not mix.

    >>> with use_kernels(NPU):
    ...     kernels_for(torch.device("cpu")).name
    'npu'
    """
    global _override
    before, _override = _override, kernels
    try:
        yield
    finally:
        _override = before


# --- The functions that models and training call -------------------------------------------------


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x · rsqrt(mean(x²) + eps) · weight over the last axis, in float32 or better (§5)."""
    return kernels_for(x.device).rms_norm(x, weight, eps)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (x_i, x_{i + D/2}) by the position's angle: x·cos + [−x₂ ; x₁]·sin (§5).

    Arguments: x [B, heads, positions, D]; cos and sin [1 or B, 1, positions, D].
    """
    return kernels_for(x.device).rotary(x, cos, sin)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) ⊙ up."""
    return kernels_for(gate.device).swiglu(gate, up)


def attention_chunk(
    q_1AQD: Tensor, k_1RKD: Tensor, v_1RKD: Tensor, hidden_QK: Tensor, scale: float
) -> tuple[Tensor, Stats]:
    """Attend with one mask for all heads; query head i reads kv head ⌊i·R/A⌋ (§5).

    Carries no gradient: an `autograd.Function` pairs it with `attention_chunk_grad`.

    Arguments: q [1, A, Q, D]; k and v [1, R, K, D]; `hidden_QK` bool, **True = hidden**, the NPU's
    polarity (the opposite of `scaled_dot_product_attention`'s). Every query must see a key: a row
    that is hidden whole gives NaN here and nothing that is documented on an NPU.
    Returns out [1, A, Q, D] and the softmax statistics for the backward pass, whose shape is the
    kernel's own.
    """
    kernels = kernels_for(q_1AQD.device)
    return kernels.attention_chunk(q_1AQD, k_1RKD, v_1RKD, hidden_QK, scale)


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
    """Return the gradients of q, k and v, from what `attention_chunk` was given and returned."""
    kernels = kernels_for(q_1AQD.device)
    return kernels.attention_chunk_grad(
        q_1AQD, k_1RKD, v_1RKD, hidden_QK, scale, out_1AQD, stats, grad_out_1AQD
    )


def fused_adamw(
    groups: list[dict[str, Any]],
    betas: tuple[float, float],
    eps: float,
    device: torch.device,
    lean: bool = False,
) -> AdamW:
    """Return AdamW over parameter groups of `params` (masters on `device`) and `weight_decay`.

    `lean`: on an NPU, torch's fused kernel (aten::_fused_adamw_, which torch_npu registers) in
    place of NpuFusedAdamW, whose buffers and temporaries are the masters' memory several times.
    """
    kernels = kernels_for(device)
    if lean and kernels is NPU:
        return portable.LeanAdamW(groups, betas, eps)
    return kernels.fused_adamw(groups, betas, eps)


# --- The NPU's kernels ---------------------------------------------------------------------------


def _torch_npu() -> Any:
    """Import torch_npu: here and nowhere else.

    Raises UserError naming the `npu` extra where the import fails.
    """
    try:
        return importlib.import_module("torch_npu")
    except (ImportError, OSError) as error:  # OSError: a CANN library that does not load
        raise UserError(
            f"an NPU was asked for and torch_npu cannot be imported ({error}); on an Ascend "
            'machine install the extra, pip install -e ".[npu]", and source CANN\'s set_env.sh; '
            "anywhere else choose the device cpu"
        ) from error


def _npu_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """[docs] npu_rms_norm(self, gamma, epsilon=1e-6) -> (y, rstd); self of 2 to 8 axes.

    "gamma: its data type must agree with self's": the wider of the two is used, as the portable
    product does.
    """
    dtype = torch.promote_types(x.dtype, weight.dtype)
    return _torch_npu().npu_rms_norm(x.to(dtype), weight.to(dtype), eps)[0].to(x.dtype)


def _npu_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[docs] npu_rotary_mul(input, r1, r2, rotary_mode='half'): r1·x + r2·[−x₂ ; x₁].

    All three of 4 axes; for input BNSD, r1 and r2 may be 11SD, B1SD or BNSD; D even and < 896,
    B and N < 1000. No gradient of cos and sin is asked for, so B·N ≤ 1024 does not apply.
    """
    return _torch_npu().npu_rotary_mul(x, cos, sin)


def _npu_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """[docs] npu_swiglu(x, dim=-1) = A·sigmoid(A)·B with A and B the halves of x along dim."""
    return _torch_npu().npu_swiglu(torch.cat([gate, up], dim=-1))


# [docs] atten_mask: bool or uint8, BNSS, B1SS, 11SS or SS; "True: does not take part in the
# computation", which is this module's polarity.
# [docs] sparse_mode 1, "allMask": the whole mask is given and pre_tockens and next_tockens (the
# wheel's spelling) are ignored; in mode 0 they would have to agree with the mask. keep_prob is 1 by
# default: no dropout, so seed, offset and numels (outputs 5 to 7) have nothing to say.
ALL_MASK = 1


@torch.no_grad()
def _npu_attention_chunk(
    q_1AQD: Tensor, k_1RKD: Tensor, v_1RKD: Tensor, hidden_QK: Tensor, scale: float
) -> tuple[Tensor, Stats]:
    """[docs] npu_fusion_attention(query, key, value, head_num, input_layout, …), 7 outputs.

    (attention_out, softmax_max, softmax_sum, reserved, seed, offset, numels). head_num is the
    *query's* number of heads: [meta] shapes the output [B, head_num, Sq, Dv] and both statistics
    [B, head_num, Sq, 8] float32. "Nq/Nkv must be a whole number", Nq ≤ 256, D ≤ 768.
    """
    outputs = _torch_npu().npu_fusion_attention(
        q_1AQD,
        k_1RKD,
        v_1RKD,
        q_1AQD.shape[1],
        "BNSD",
        atten_mask=hidden_QK[None, None],
        scale=scale,
        sparse_mode=ALL_MASK,
    )
    return outputs[0], (outputs[1], outputs[2])


@torch.no_grad()
def _npu_attention_chunk_grad(
    q_1AQD: Tensor,
    k_1RKD: Tensor,
    v_1RKD: Tensor,
    hidden_QK: Tensor,
    scale: float,
    out_1AQD: Tensor,
    stats: Stats,
    grad_out_1AQD: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """[meta] npu_fusion_attention_grad(query, key, value, dy, head_num, input_layout, *, …).

    The forward's `scale` is named `scale_value` here, its output 1 is `attention_in`; `softmax_in`
    is the reserved output 4 and left out. Returns (dq, dk, dv, dpse, dsink), the first three of
    the shapes of query, key and value.
    """
    softmax_max, softmax_sum = stats
    gradients = _torch_npu().npu_fusion_attention_grad(
        q_1AQD,
        k_1RKD,
        v_1RKD,
        grad_out_1AQD,
        q_1AQD.shape[1],
        "BNSD",
        atten_mask=hidden_QK[None, None],
        softmax_max=softmax_max,
        softmax_sum=softmax_sum,
        attention_in=out_1AQD,
        scale_value=scale,
        sparse_mode=ALL_MASK,
    )
    return gradients[0], gradients[1], gradients[2]


FIXED = (
    "NpuFusedAdamW fixes at its first step which parameters have one: freeze those that shall not "
    "learn (requires_grad) before training, or train with use_kernels(PORTABLE)"
)


class _NpuAdamW(portable.TorchAdamW):
    """NpuFusedAdamW, which sees its gradients' storage once.

    [optim] Its first step copies parameters and gradients into one buffer each, makes them views of
    it, and from then on reads that buffer: a gradient assigned later is never seen, and a parameter
    without a gradient in the first step is never updated. So the first step's gradients stay here
    as buffers that later ones are copied into (float32, as large as the masters), and the set of
    masters with a gradient may not change. Parameters are float32 or float16, else TypeError.
    State must be loaded before the first step: moments are moved into a buffer as well.
    A master whose memory others read (a float32 parameter's shard) has a twin that is updated in
    its place and copied back: it would be left behind in the old memory.
    """

    def _optimizer(self, groups: list[dict[str, Any]], **settings: Any) -> torch.optim.Optimizer:
        self._buffers: dict[Tensor, Tensor] = {}
        shared = [p for group in groups for p in group["params"] if _shares_memory(p)]
        self._twins = {p: p.detach().clone() for p in shared}
        own = [g | {"params": [self._twins.get(p, p) for p in g["params"]]} for g in groups]
        return _torch_npu().optim.NpuFusedAdamW(own, **settings)

    @property
    def state(self) -> Any:
        """Per master: step, exp_avg, exp_avg_sq."""
        of_twin = {twin: p for p, twin in self._twins.items()}
        return {of_twin.get(p, p): values for p, values in self._adamw.state.items()}

    def restore(self, master: Tensor, first: Tensor, second: Tensor, updates: int) -> None:
        super().restore(self._twins.get(master, master), first, second, updates)

    def _count(self, updates: int) -> int:
        return updates

    @torch.no_grad()
    def step(self, rate: float, gradients: Iterable[tuple[Tensor, Tensor | None]]) -> None:
        first, given = not self._buffers, 0
        for master, gradient in gradients:
            if gradient is None:
                continue
            given += 1
            own = self._twins.get(master, master)
            if own is not master:
                own.copy_(master)
            if first:  # laid out like its master: the buffer is walked by storage, not by index
                self._buffers[own] = torch.empty_like(own).copy_(gradient)
            elif own in self._buffers:
                self._buffers[own].copy_(gradient)
            else:
                raise UserError(f"a parameter {list(master.shape)} has its first gradient; {FIXED}")
        if given < len(self._buffers):
            raise UserError(f"{len(self._buffers) - given} parameters have no gradient; {FIXED}")
        if given:  # a first step without any gradient would fix the empty set
            super().step(rate, self._buffers.items())
            for master, twin in self._twins.items():
                if twin in self._buffers:
                    master.copy_(twin)


def _shares_memory(tensor: Tensor) -> bool:
    """Return whether others read a tensor's memory: a shard's, which FSDP2 gathers from."""
    return tensor._is_view() or tensor.untyped_storage().nbytes() != tensor.nbytes


PORTABLE = Kernels(
    "portable",
    portable.rms_norm,
    portable.rotary,
    portable.swiglu,
    portable.attention_chunk,
    portable.attention_chunk_grad,
    portable.TorchAdamW,
)
NPU = Kernels(
    "npu",
    _npu_rms_norm,
    _npu_rotary,
    _npu_swiglu,
    _npu_attention_chunk,
    _npu_attention_chunk_grad,
    _NpuAdamW,
)
