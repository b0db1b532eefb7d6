"""A stand-in for torch_npu 2.13.0 on the CPU, written from its documentation alone.

Sources, all from the wheel: `_op_plugin_docs.py` (semantics, dtypes, layouts, limits),
`op_plugin/meta/_meta_registrations.py` (shapes, returned tuples, the backward's signature) and
`optim/` (NpuFusedAdamW). Plain loops; knows nothing of torch_port. What the documentation refuses
or leaves undefined is refused here: an emulation that forgives hides a wiring fault. It cannot show
whether a real kernel keeps to its documentation, is fast, or rounds like this.
"""

from __future__ import annotations

import math
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
EVERYTHING = 2147483647  # default of pre_tockens and next_tockens (the wheel's spelling)
STAT_COLUMNS = 8  # softmax_max and softmax_sum are [B, head_num, Sq, 8]


class RefusedError(RuntimeError):
    """The documentation does not allow, or does not define, this call."""


def need(condition: bool, what: str) -> None:
    if not condition:
        raise RefusedError(what)


class EmulatedKernels:
    """The operators. `float64` allows what the hardware lacks, for comparisons to rounding."""

    def __init__(self, float64: bool) -> None:
        self.dtypes = (*FLOATS, torch.float64) if float64 else FLOATS
        self.calls: list[str] = []

    def _called(self, name: str, *tensors: Tensor) -> None:
        self.calls.append(name)
        for x in tensors:
            need(x.dtype in self.dtypes, f"{name} takes float16, bfloat16, float32, not {x.dtype}")

    def npu_rms_norm(
        self, input: Tensor, gamma: Tensor, epsilon: float = 1e-6
    ) -> tuple[Tensor, Tensor]:
        self._called("npu_rms_norm", input, gamma)
        need(2 <= input.dim() <= 8, f"npu_rms_norm takes 2 to 8 axes, not {input.dim()}")
        need(gamma.dtype == input.dtype, f"gamma is {gamma.dtype}, self {input.dtype}")
        need(gamma.shape == input.shape[input.dim() - gamma.dim() :], "gamma is no trailing shape")
        wide = wider(input)
        axes = tuple(range(input.dim() - gamma.dim(), input.dim()))
        rstd = 1 / torch.sqrt((wide * wide).mean(axes, keepdim=True) + epsilon)
        return (wide * rstd * wider(gamma)).to(input.dtype), rstd

    def npu_rotary_mul(
        self,
        input: Tensor,
        r1: Tensor,
        r2: Tensor,
        rotary_mode: str = "half",
        rotate: Tensor | None = None,
    ) -> Tensor:
        self._called("npu_rotary_mul", input, r1, r2)
        need(rotary_mode == "half" and rotate is None, "only the half mode is emulated")
        need(input.dim() == r1.dim() == r2.dim() == 4, "npu_rotary_mul takes 4 axes")
        B, N, S, D = input.shape
        allowed = {(1, 1, S, D), (B, 1, S, D), (B, N, S, D)}  # for input BNSD
        need(tuple(r1.shape) in allowed, f"r1 {tuple(r1.shape)} is none of 11SD, B1SD, BNSD")
        need(r2.shape == r1.shape, f"r2 {tuple(r2.shape)} is not shaped like r1")
        need(D % 2 == 0 and D < 896 and B < 1000 and N < 1000, f"sizes {tuple(input.shape)}")
        need(bool((r1.abs() <= 1).all() and (r2.abs() <= 1).all()), "r1, r2 outside −1 … 1")
        half = D // 2
        output = torch.empty_like(input)
        output[..., :half] = r1[..., :half] * input[..., :half] - r2[..., :half] * input[..., half:]
        output[..., half:] = r1[..., half:] * input[..., half:] + r2[..., half:] * input[..., :half]
        return output

    def npu_swiglu(self, input: Tensor, dim: int = -1) -> Tensor:
        self._called("npu_swiglu", input)
        need(1 <= input.dim() <= 8, f"npu_swiglu takes 1 to 8 axes, not {input.dim()}")
        need(input.shape[dim] % 2 == 0, f"axis {dim} of {tuple(input.shape)} has no two halves")
        half = input.shape[dim] // 2
        a, b = input.narrow(dim, 0, half), input.narrow(dim, half, half)
        return a * (1 / (1 + torch.exp(-a))) * b

    def npu_fusion_attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        head_num: int,
        input_layout: str,
        pse: Tensor | None = None,
        padding_mask: Tensor | None = None,
        atten_mask: Tensor | None = None,
        scale: float = 1.0,
        keep_prob: float = 1.0,
        pre_tockens: int = EVERYTHING,
        next_tockens: int = EVERYTHING,
        inner_precise: int = 0,
        prefix: list[int] | None = None,
        actual_seq_qlen: list[int] | None = None,
        actual_seq_kvlen: list[int] | None = None,
        sparse_mode: int = 0,
        gen_mask_parallel: bool = True,
        sync: bool = False,
        softmax_layout: str = "",
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:
        self._called("npu_fusion_attention", query, key, value)
        need(keep_prob == 1 and pse is None and padding_mask is None, "not emulated")
        need(prefix is None and actual_seq_qlen is None and actual_seq_kvlen is None, "no varlen")
        self._check_attention(query, key, value, head_num, input_layout)
        hidden = read_mask(query, key, atten_mask, sparse_mode, (pre_tockens, next_tockens))
        out = torch.empty_like(query)
        stats = wider(query).new_empty(2, *query.shape[:3], STAT_COLUMNS)
        group = head_num // key.shape[1]
        for b in range(query.shape[0]):
            for n in range(head_num):
                k, v = wider(key[b, n // group]), wider(value[b, n // group])
                score = scale * (wider(query[b, n]) @ k.T)
                score = torch.where(hidden[b, n], -math.inf, score)
                largest = score.max(dim=1).values
                weight = torch.exp(score - largest[:, None])
                out[b, n] = ((weight / weight.sum(1)[:, None]) @ v).to(query.dtype)
                stats[0, b, n] = largest[:, None]
                stats[1, b, n] = weight.sum(1)[:, None]
        return out, stats[0].detach(), stats[1].detach(), query.new_empty(0), 0, 0, 0

    def npu_fusion_attention_grad(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        dy: Tensor,
        head_num: int,
        input_layout: str,
        *,
        pse: Tensor | None = None,
        padding_mask: Tensor | None = None,
        atten_mask: Tensor | None = None,
        softmax_max: Tensor | None = None,
        softmax_sum: Tensor | None = None,
        softmax_in: Tensor | None = None,
        attention_in: Tensor | None = None,
        scale_value: float = 1.0,
        keep_prob: float = 1.0,
        pre_tockens: int = EVERYTHING,
        next_tockens: int = EVERYTHING,
        inner_precise: int = 0,
        seed: int = 0,
        offset: int = 0,
        numels: int = 0,
        prefix: list[int] | None = None,
        actual_seq_qlen: list[int] | None = None,
        actual_seq_kvlen: list[int] | None = None,
        sparse_mode: int = 0,
        gen_mask_parallel: bool = True,
        sync: bool = False,
        softmax_layout: str = "",
    ) -> tuple[Tensor, Tensor, Tensor, None, Tensor]:
        self._called("npu_fusion_attention_grad", query, key, value, dy)
        need(keep_prob == 1 and pse is None and padding_mask is None, "not emulated")
        need(prefix is None and actual_seq_qlen is None and actual_seq_kvlen is None, "no varlen")
        self._check_attention(query, key, value, head_num, input_layout)
        if attention_in is None or softmax_max is None or softmax_sum is None:
            raise RefusedError("the backward needs attention_in, softmax_max and softmax_sum")
        need(attention_in.shape == dy.shape == query.shape, "attention_in and dy are like query")
        need(attention_in.dtype == dy.dtype == query.dtype, "attention_in and dy are like query")
        for stat in (softmax_max, softmax_sum):
            need(stat.shape == (*query.shape[:3], STAT_COLUMNS), f"statistics {tuple(stat.shape)}")
            need(stat.dtype == wider(query).dtype, f"statistics of {stat.dtype}")
        hidden = read_mask(query, key, atten_mask, sparse_mode, (pre_tockens, next_tockens))
        dq, dk, dv = (torch.zeros_like(wider(x)) for x in (query, key, value))
        group = head_num // key.shape[1]
        for b in range(query.shape[0]):
            for n in range(head_num):
                q, k, v = wider(query[b, n]), wider(key[b, n // group]), wider(value[b, n // group])
                score = torch.where(hidden[b, n], -math.inf, scale_value * (q @ k.T))
                p = torch.exp(score - softmax_max[b, n, :, :1]) / softmax_sum[b, n, :, :1]
                g, o = wider(dy[b, n]), wider(attention_in[b, n])
                ds = p * (g @ v.T - (g * o).sum(1)[:, None])
                dq[b, n] = scale_value * (ds @ k)
                dk[b, n // group] += scale_value * (ds.T @ q)
                dv[b, n // group] += p.T @ g
        dtype = query.dtype
        return dq.to(dtype), dk.to(dtype), dv.to(dtype), None, torch.empty(0)

    def _check_attention(
        self, query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str
    ) -> None:
        need(input_layout in {"BSH", "SBH", "BSND", "BNSD", "TND"}, f"layout {input_layout!r}")
        need(input_layout == "BNSD", "only BNSD is emulated")
        need(query.dtype == key.dtype == value.dtype, "query, key and value must agree in dtype")
        need(key.shape == value.shape, "key and value must agree in shape")
        need(query.dim() == key.dim() == 4, "BNSD has 4 axes")
        B, Nq, _, D = query.shape
        need(key.shape[0] == B and key.shape[3] == D and 1 <= D <= 768, "B or D of the keys")
        need(head_num == Nq, f"head_num {head_num} is not the query's {Nq} heads")
        need(1 <= Nq <= 256, f"{Nq} heads")
        need(Nq % key.shape[1] == 0, f"{Nq} heads are no multiple of {key.shape[1]} kv heads")


def wider(x: Tensor) -> Tensor:
    """float64 stays, everything else computes in float32."""
    return x if x.dtype == torch.float64 else x.float()


def read_mask(
    query: Tensor, key: Tensor, mask: Tensor | None, sparse_mode: int, tokens: tuple[int, int]
) -> Tensor:
    """[B, N, Sq, Skv] bool, True = does not take part (the documentation's words)."""
    (B, N, Sq, _), Skv = query.shape, key.shape[2]
    need(sparse_mode in (0, 1), "only sparse_mode 0 (defaultMask) and 1 (allMask) are emulated")
    need(sparse_mode == 1 or tokens == (EVERYTHING, EVERYTHING), "mode 0: tokens must fit the mask")
    if mask is None:
        return torch.zeros(B, N, Sq, Skv, dtype=torch.bool)
    need(mask.dtype in (torch.bool, torch.uint8), f"atten_mask is bool or uint8, not {mask.dtype}")
    allowed = {(B, N, Sq, Skv), (B, 1, Sq, Skv), (1, 1, Sq, Skv), (Sq, Skv)}
    need(tuple(mask.shape) in allowed, f"atten_mask {tuple(mask.shape)} is none of {allowed}")
    hidden = (mask != 0).expand(B, N, Sq, Skv)
    need(not bool(hidden.all(-1).any()), "a row that is masked whole is not defined")
    return hidden


def combine(tensors: list[Tensor]) -> Tensor:
    """npu_combine_tensors: copy the storages into one buffer and make the tensors views of it."""
    for x in tensors:
        need(x.untyped_storage().nbytes() == x.numel() * x.element_size(), "a view of more storage")
    buffer = torch.cat([x.detach().as_strided((x.numel(),), (1,)) for x in tensors])
    offset = 0
    for x in tensors:
        x.data = buffer.as_strided(x.shape, x.stride(), offset)
        offset += x.numel()
    return buffer


def fused_adamw(dtypes: tuple[torch.dtype, ...]) -> type[torch.optim.Optimizer]:
    """NpuFusedAdamW: gradients, parameters and moments are combined once, at the first step."""

    class NpuFusedAdamW(torch.optim.Optimizer):
        def __init__(
            self,
            params: Any,
            lr: float = 1e-3,
            betas: tuple[float, float] = (0.9, 0.999),
            eps: float = 1e-8,
            weight_decay: float = 1e-2,
            amsgrad: bool = False,
        ) -> None:
            need(not amsgrad, "not emulated")
            super().__init__(
                params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
            )
            self.combined: list[list[Tensor] | None] = []

        def _combine(self, members: list[Tensor]) -> list[Tensor] | None:
            need(len({p.dtype for p in members}) < 2, "mixed dtypes are not emulated")
            for p in members:
                if p.dtype not in dtypes or p.dtype == torch.bfloat16:
                    raise TypeError(f"parameters must be either float32 or float16, not {p.dtype}")
                need(p.stride() == p.grad.stride(), "parameter and gradient are laid out unlike")
                state = self.state[p]
                state.setdefault("step", 0)
                for name in ("exp_avg", "exp_avg_sq"):
                    old = state.get(name)
                    state[name] = torch.zeros_like(p) if old is None else old.clone()
            if not members:
                return None
            moments = [[self.state[p][name] for p in members] for name in ("exp_avg", "exp_avg_sq")]
            parts = [members, [p.grad for p in members], *moments]
            return [combine(part) for part in parts]

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            if not self.combined:
                self.combined = [
                    self._combine([p for p in group["params"] if p.grad is not None])
                    for group in self.param_groups
                ]
            for group, buffers in zip(self.param_groups, self.combined, strict=True):
                members = [p for p in group["params"] if p.grad is not None]
                for p in members:
                    self.state[p]["step"] += 1
                if buffers is None:
                    continue
                p, g, m, v = buffers
                (b1, b2), t = group["betas"], self.state[members[0]]["step"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                m.copy_(b1 * m + (1 - b1) * g)
                v.copy_(b2 * v + (1 - b2) * g * g)
                deviation = (v / (1 - b2**t)).sqrt() + group["eps"]
                p.sub_(group["lr"] / (1 - b1**t) * m / deviation)

        def zero_grad(self, set_to_none: bool = False) -> None:
            need(not set_to_none, "set_to_none is not supported in fused optimizers")
            raise RefusedError("not emulated")

    return NpuFusedAdamW


def emulated_torch_npu(float64: bool = False) -> ModuleType:
    """Return a module to put at sys.modules["torch_npu"]; `module.calls` lists what was called."""
    kernels = EmulatedKernels(float64)
    module = ModuleType("torch_npu")
    for name in dir(kernels):
        if name.startswith("npu_"):
            setattr(module, name, getattr(kernels, name))
    module.calls = kernels.calls  # type: ignore[attr-defined]
    module.optim = SimpleNamespace(NpuFusedAdamW=fused_adamw(kernels.dtypes))  # type: ignore[attr-defined]
    return module
