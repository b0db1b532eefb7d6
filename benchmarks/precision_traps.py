"""Single operations that lose accuracy, beside the form that the port uses instead.

Each function returns (what went wrong, what the port's form gives), on inputs drawn from one seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.precision_cases import Case, error
from torch_port.models.heads import lookup
from torch_port.objective import fused
from torch_port.objective.teacher import log_normalizer
from torch_port.training.optimizer import MasterAdamW, OptimizerConfig

BF16 = torch.bfloat16
Product = Callable[..., Tensor]


def _draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def l1_by_vector_norm(size: int) -> tuple[float, float]:
    """Σ|q − p̃| over K ids in float32: `vector_norm(·, 1)` against `abs().sum()`."""
    difference = _draw(32, size).softmax(-1) - _draw(32, size, seed=1).softmax(-1)
    want = difference.double().abs().sum(-1)
    bad = torch.linalg.vector_norm(difference, 1, dim=-1)
    return error(bad, want), error(difference.abs().sum(-1), want)


def ce_by_log_of_q(size: int) -> tuple[float, float]:
    """−log q[label] of every label, logits of deviation 16: from q, and from logits and maximum."""
    logits = 16 * _draw(8, size)
    want = -logits.double().log_softmax(-1)
    q = logits.softmax(-1)
    top = logits.amax(-1, keepdim=True)
    return error(-q.log(), want), error((top - logits) - q.amax(-1, keepdim=True).log(), want)


def mass_of_rounded_teacher(case: Case) -> tuple[float, float]:
    """Largest kept mass, all of V kept: teacher product rounded to bf16, and float32."""
    states, head = case.batch.target_last_hidden_states[0], case.target.lm_head
    normalizer = log_normalizer(states, head).unsqueeze(-1)
    exact = states.float() @ head.float().T
    rounded = (states @ head.T).float()
    return tuple(float((x - normalizer).exp().sum(-1).max()) for x in (rounded, exact))  # type: ignore[return-value]


def mass_by_unrounded_states(case: Case, rounded: Case) -> tuple[float, float]:
    """Largest kept mass, all of V kept: normaliser of the states before and after rounding."""
    head = rounded.target.lm_head
    states = rounded.batch.target_last_hidden_states[0]
    logits = states.float() @ head.float().T
    before = log_normalizer(case.batch.target_last_hidden_states[0], head.float())
    after = log_normalizer(states, head)
    return tuple(  # type: ignore[return-value]
        float((logits - n.unsqueeze(-1)).exp().sum(-1).max()) for n in (before, after)
    )


def row_gradient(times: int) -> tuple[float, float]:
    """Gradient of a bf16 embedding row that is read `times` times."""
    gradient = torch.rand(times, 64, generator=torch.Generator().manual_seed(0)).to(BF16)
    want = gradient.double().sum(0)
    index = torch.zeros(times, dtype=torch.int64)
    found = []
    for read in (lambda table: F.embedding(index, table), lambda table: lookup(table, index)):
        table = nn.Parameter(torch.zeros(4, 64, dtype=BF16))
        table.grad_dtype = torch.float32
        torch.autograd.backward(read(table), gradient)
        assert table.grad is not None
        found.append(error(table.grad[0], want))
    return found[0], found[1]


def norm_in_one_go(size: int) -> tuple[float, float]:
    """Global norm of a float32 gradient of `size` values: torch's own, and the optimizer's."""
    parameter = nn.Parameter(torch.zeros(size // 1024, 1024))
    parameter.grad = _draw(size // 1024, 1024)
    config = OptimizerConfig(peak_rate=1.0, warmup_steps=0, total_steps=1)
    optimizer = MasterAdamW([("fc.weight", parameter)], config)
    want = parameter.grad.double().square().sum().sqrt()
    torchs = torch.nn.utils.get_total_norm([parameter.grad])
    return error(torchs, want), error(optimizer.gradient_norm(), want)


def summed_micro_batches(count: int) -> tuple[float, float]:
    """A bf16 parameter's gradient over `count` micro-batches, kept in bf16 and in float32."""
    gradients = (1 + _draw(count, 4096)).to(BF16)
    want = gradients.double().sum(0)
    found = []
    for dtype in (BF16, torch.float32):
        parameter = nn.Parameter(torch.zeros(4096, dtype=BF16))
        parameter.grad_dtype = dtype
        for gradient in gradients:
            # A clone: autograd may keep the given tensor as the gradient and add to it.
            torch.autograd.backward(parameter.view_as(parameter), gradient.clone())
        assert parameter.grad is not None
        found.append(error(parameter.grad, want))
    return found[0], found[1]


# --- Three ways to the draft's logits ------------------------------------------------------------


def rounded_product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """The bf16 product as it comes, rounded, then widened."""
    assert out is not None
    return out.copy_(left @ right.T)


def split_product(left: Tensor, right: Tensor, out: Tensor | None = None) -> Tensor:
    """The bf16 product and, by a second one, what its rounding lost: addmm(−rounded, ·, ·)."""
    assert out is not None
    rounded = left @ right.T
    return out.copy_(rounded).add_(torch.addmm(-rounded, left, right.T))


@contextmanager
def logits_by(form: Product) -> Iterator[None]:
    """Let the fused objective make the draft's logits by another product; the teacher's stay."""
    original = fused._Walk._logits

    def logits(walk: fused._Walk, *arguments: Tensor) -> None:
        with patch.object(fused, "product", form):
            original(walk, *arguments)  # type: ignore[arg-type]

    with patch.object(fused._Walk, "_logits", logits):
        yield
