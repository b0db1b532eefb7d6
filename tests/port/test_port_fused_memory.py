"""What the fused objective's buffers take, and that nothing else is as wide."""

import re
import weakref

import pytest
import torch
from drawn import (
    HEAD_TYPES,
    HIDDEN,
    OBJECTIVE,
    Case,
    assert_same,
    denominators_of,
    mib,
    small_batch,
    step,
)
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import G, batch, draft, target

from torch_port.compute import ComputeConfig
from torch_port.errors import UserError
from torch_port.memory import PeakMemory
from torch_port.models.dspark import FrozenTarget
from torch_port.objective.evaluate import batch_objective, forward_batch, layout_blocks

DENSE = {"attention": "dense"}
PLAIN = ComputeConfig(objective="plain", **DENSE)
every_head = pytest.mark.parametrize("head", HEAD_TYPES)


@pytest.mark.parametrize("K", [5, 65, 70, 130])
def test_smallest_buffer_works_and_the_remedy_too(K: int) -> None:
    """Faults: a setting refused that is enough, or a remedy rounded down to one that is not (at
    K = 70 the nearest in four decimals is too little)."""
    changes = {"vocab_size": 150, "draft_vocab_size": K, "hidden_size": HIDDEN}
    case = Case(changes, OBJECTIVE, small_batch(150), 0)
    want = step(case, PLAIN)[1]
    assert_same(step(case, ComputeConfig(objective_buffer_mib=mib(4, K), **DENSE))[1], want)
    short = mib(4, K) - 1e-6
    with pytest.raises(UserError, match="objective_buffer_mib") as error:
        step(case, ComputeConfig(objective_buffer_mib=short, **DENSE))
    named = re.fullmatch(
        r"objective_buffer_mib is (\S+), but .* vocabulary of (\d+); raise it to (\S+) or more",
        str(error.value),
    )
    assert named
    assert float(named[1]) == pytest.approx(short, abs=2e-6)  # whole bytes
    assert int(named[2]) == K
    remedied = ComputeConfig(objective_buffer_mib=float(named[3]), **DENSE)
    assert_same(step(case, remedied)[1], want)


class AlongAxis(TorchDispatchMode):
    """Live bytes of tensors made inside whose last axis is `size`, and their peak.

    A transposed weight counts as well; views of what was there before do not.
    """

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size, self.live, self.peak = size, 0, 0
        self.shapes: list[tuple[int, ...]] = []
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._known.add(leaf.untyped_storage())
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[-1] != self.size:
                continue
            storage = leaf.untyped_storage()
            if storage in self._known:
                continue
            self._known.add(storage)
            self.shapes.append(tuple(leaf.shape))
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
            weakref.finalize(storage, self._release, storage.nbytes())
        return result

    def _release(self, size: int) -> None:
        self.live -= size


def objective_alone(
    K: int, N: int, compute: ComputeConfig, dtype: torch.dtype, every: int = 1, **changes
):
    """Return a function that runs the objective, forward and backward, on states that are there."""
    changes = {"vocab_size": K + 9, "draft_vocab_size": K, "hidden_size": HIDDEN} | changes
    case = Case(changes, OBJECTIVE, small_batch(K + 9, 1, every * N + G, N, every), 0)
    model, frozen = case.draft(compute).to(dtype), case.target()
    frozen = FrozenTarget(frozen.embed_tokens.to(dtype), frozen.lm_head.to(dtype))
    b = case.batch.to(torch.device("cpu"), dtype).laid_out(G)
    blocks, sums = layout_blocks(model, b), denominators_of(model, b)
    model.draft_head(frozen.lm_head)  # U_K and the list of pruned ids are made once per run
    model.pruned_target_ids()
    states = torch.randn(1, N, G, HIDDEN, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run(with_loss: bool = True) -> Tensor | None:
        leaf = states.clone().requires_grad_()
        given = (OBJECTIVE, sums if with_loss else None, 1)
        _, loss = batch_objective(model, leaf, blocks, b, frozen, *given)
        if loss is not None:
            torch.autograd.backward(loss)
        return loss

    return run


@pytest.mark.parametrize("K", [700, 2999])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("every", [1, 2, 4])
@every_head
def test_wide_bytes_stay_within_the_setting(
    head: str, every: int, dtype: torch.dtype, K: int
) -> None:
    """Faults: a K-wide temporary per chunk, two bf16 copies where one is counted, a float32 copy of
    a bf16 head, a buffer kept. 4, 2 or 1 slots to a position fill the buffers differently."""
    setting = 0.25
    compute = ComputeConfig(objective_buffer_mib=setting)
    run = objective_alone(K, 24, compute, dtype, every, **HEAD_TYPES[head])
    with AlongAxis(K) as wide:
        run()
    assert 0.5 * setting * 2**20 < wide.peak <= setting * 2**20  # used, and not exceeded
    assert wide.live == 0


def test_peak_does_not_grow_with_slots_times_vocabulary() -> None:
    """Fault: anything K-wide per slot. A slot may add its own few columns, far less than one row.

    Per slot in float32: H states and their gradients, r-wide codes, 11 columns of terms, indices.
    """
    K, peaks = 4099, {}
    compute = ComputeConfig(objective_buffer_mib=mib(40, K, 32))
    for N in (8, 64):
        run = objective_alone(K, N, compute, torch.float32)
        run()
        with PeakMemory() as traced:
            run()
        peaks[N] = traced.peak
    per_slot = (peaks[64] - peaks[8]) / (56 * G)
    assert per_slot < 0.05 * K * 4


def test_evaluation_does_no_gradient_work() -> None:
    """Faults: gradients computed without denominators or under no_grad; terms that differ then."""

    def weight_shaped(grad: bool, with_loss: bool) -> set[tuple[int, ...]]:
        run = objective_alone(700, 8, ComputeConfig(), torch.float32)
        with torch.set_grad_enabled(grad), AlongAxis(3) as seen:  # W2 is [K, 3]
            if grad:
                run(with_loss)
            else:
                run(False)
        return {shape for shape in seen.shapes if shape[0] == 700}

    assert weight_shaped(grad=True, with_loss=True) == {(700, 3)}
    assert weight_shaped(grad=True, with_loss=False) == set()
    assert weight_shaped(grad=False, with_loss=False) == set()
    model, b, frozen = draft(), batch(), target()
    trained = forward_batch(model, b, frozen, OBJECTIVE, denominators_of(model, b))
    evaluated = forward_batch(model, b, frozen, OBJECTIVE)
    assert evaluated.loss is None
    for name, value in vars(trained.terms).items():
        assert torch.equal(getattr(evaluated.terms, name), value), name
        assert not getattr(evaluated.terms, name).requires_grad
