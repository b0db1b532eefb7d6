"""EAGLE3 in the loop that trains every family: learning, accumulation, ranks, errors, memory."""

import math
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from eagle3_toys import SIZES, eagle3_batch, eagle3_draft
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import target, toy_map

from torch_port.config import ObjectiveConfig
from torch_port.config_eagle3 import Eagle3Config, Eagle3Objective
from torch_port.data.batch import Batch
from torch_port.errors import UserError
from torch_port.evaluation import evaluate
from torch_port.memory import PeakMemory
from torch_port.models.dspark import FrozenTarget
from torch_port.models.eagle3 import Eagle3Draft
from torch_port.models.training_time_test import training_time_attention
from torch_port.objective.eagle3 import eagle3_terms, prepare_eagle3
from torch_port.training.loop import train
from torch_port.training.optimizer import MasterAdamW, OptimizerConfig, decays
from torch_port.training.step import accumulate_gradients, training_step

OBJECTIVE = Eagle3Objective(steps=3)


def optimizer_config(**changes: float) -> OptimizerConfig:
    return OptimizerConfig(**({"peak_rate": 1e-2, "warmup_steps": 2, "total_steps": 30} | changes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_few_steps_learn_and_evaluate(dtype: torch.dtype) -> None:
    """Faults: an update with the wrong sign; a frozen embedding among the trained weights.

    The reported loss is the evaluated one before the step, to the precision of the dtype.
    """
    model = Eagle3Draft(Eagle3Config(**SIZES)).to(dtype)
    model.initialise(torch.Generator().manual_seed(0))
    model.install_vocab_mapping(*toy_map())
    wide = target()
    frozen = FrozenTarget(wide.embed_tokens.to(dtype), wide.lm_head.to(dtype))
    model.copy_head(frozen.lm_head)
    b = eagle3_batch().to(torch.device("cpu"), dtype)
    before = evaluate(model, [b], frozen, OBJECTIVE)
    embedding = frozen.embed_tokens.clone()
    losses: list[float] = []
    optimizer = train(
        model,
        [b] * 30,
        frozen,
        OBJECTIVE,
        optimizer_config(peak_rate=2e-2),
        lambda report, *_: losses.append(report.loss),
    )
    assert before["loss"] == pytest.approx(losses[0], rel=1e-5)  # float32 sums
    after = evaluate(model, [b], frozen, OBJECTIVE)
    assert losses[-1] < 0.8 * losses[0]
    assert after["accept"] > before["accept"]
    assert torch.equal(frozen.embed_tokens, embedding)
    assert not [name for name in optimizer.names if "embed" in name]
    assert not decays("midlayer.input_layernorm.weight")
    assert not decays("midlayer.hidden_norm.weight")
    assert decays("lm_head.weight")


def test_accumulation_equals_one_batch() -> None:
    """Fault: each micro-batch divided by its own B·S."""
    whole = eagle3_batch()
    parts = [
        whole.first(1),
        Batch(**{n: None if x is None else x[1:] for n, x in vars(whole).items()}),
    ]
    results = []
    for micro_batches in ([whole], parts):
        model = eagle3_draft()
        loss, den, ce_den, _ = accumulate_gradients(model, micro_batches, target(), OBJECTIVE)
        results.append(
            (torch.stack([loss, den, ce_den]), {n: p.grad for n, p in model.named_parameters()})
        )
    (one, gradients), (two, accumulated) = results
    torch.testing.assert_close(two, one, rtol=1e-13, atol=0)  # float64 sums in another order
    for name, gradient in gradients.items():
        assert gradient is not None
        scale = gradient.abs().max().item()
        torch.testing.assert_close(accumulated[name], gradient, rtol=0, atol=1e-12 * scale)
    parts_loss = evaluate(eagle3_draft(), parts, target(), OBJECTIVE)["loss"]
    assert parts_loss == pytest.approx(one[0].item(), rel=1e-13)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("mask", "no supervised target tokens"),
        ("map", "no in-vocabulary target tokens"),
        ("features", "gradient norm nan"),
    ],
)
def test_bad_step_is_one_error_and_touches_nothing(spoil: str, words: str) -> None:
    """Faults: a step that trains on nothing unnoticed; NaN written into the weights."""
    b, frozen, model = eagle3_batch(), target(), eagle3_draft()
    if spoil == "mask":
        b.loss_mask.zero_()
    elif spoil == "map":  # id 1, which is pruned, wins everywhere
        frozen.lm_head.zero_()[1] = b.target_last_hidden_states.new_ones(8)
        b.target_last_hidden_states.abs_()
    else:
        b.hidden_states[0, 0, 0] = torch.nan
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = MasterAdamW(model.named_parameters(), optimizer_config())
    with pytest.raises(UserError, match=words):
        training_step(model, optimizer, [b], frozen, OBJECTIVE, 1)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    good = training_step(model, optimizer, [eagle3_batch()], target(), OBJECTIVE, 1)
    assert math.isfinite(good.loss)


def test_another_familys_objective_is_refused() -> None:
    """Fault: DSpark's numbers read as EAGLE3's."""
    with pytest.raises(UserError, match="Eagle3Objective"):
        evaluate(eagle3_draft(), [eagle3_batch()], target(), ObjectiveConfig())


# It leaves without Python's clean-up: a thread of torch's own that comes late to it aborts the
# process ("terminate called without an active exception", two of five runs of all tests). What went
# wrong before that still ends in a status of its own.
OTHER_RANK = """
import os
import sys

sys.path.insert(0, sys.argv[1])
from test_port_eagle3_training import one_rank
one_rank(1, sys.argv[2])
os._exit(0)
"""


def one_rank(rank: int, meeting: str) -> tuple[list[tuple[int, ...]], dict[str, Tensor | None]]:
    """Take rank's row through a step of two ranks: shapes all-reduced, gradients."""
    where = {"init_method": f"file://{meeting}", "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", **where, timeout=timedelta(seconds=90))
    seen: list[tuple[int, ...]] = []
    original = dist.all_reduce

    def counted(tensor: Tensor) -> None:
        seen.append(tuple(tensor.shape))
        original(tensor)

    whole, model = eagle3_batch(), eagle3_draft()
    mine = {n: None if x is None else x[rank : rank + 1] for n, x in vars(whole).items()}
    dist.all_reduce = counted
    try:
        accumulate_gradients(model, [Batch(**mine)], target(), OBJECTIVE)
    finally:
        dist.all_reduce = original
    dist.barrier()  # a rank that leaves first tears down what the other still waits on
    dist.destroy_process_group()
    return seen, {name: parameter.grad for name, parameter in model.named_parameters()}


def test_two_ranks_equal_one_process(tmp_path: Path) -> None:
    """Faults: W missing or doubled, B·S of one rank, a collective more than one per step.

    Real processes, this one and another: one alone cannot see a collective. float64, sums in
    another order.
    """
    meeting = str(tmp_path / "meeting")
    here = str(Path(__file__).parent)
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_RANK, here, meeting],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    shapes, gradients = one_rank(0, meeting)
    assert other.wait(timeout=90) == 0
    # The denominators; then the gradients, in one bucket.
    assert shapes == [(3,), (sum(x.numel() for x in gradients.values()),)]
    model = eagle3_draft()
    accumulate_gradients(model, [eagle3_batch()], target(), OBJECTIVE)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(
            gradients[name], parameter.grad, rtol=0, atol=1e-12 * scale, msg=name
        )


class Largest(TorchDispatchMode):
    """The most elements that any tensor made inside has."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.itemsize)
        return result


def wide_case(S: int, V: int = 3000, K: int = 1500) -> tuple[Eagle3Draft, Batch, FrozenTarget]:
    changes = {"vocab_size": V, "kept": tuple(range(0, 2 * K, 2))}
    model = eagle3_draft(**changes)
    g = torch.Generator().manual_seed(5)
    E, U = (torch.randn(V, 8, generator=g, dtype=torch.float64) for _ in range(2))
    return model, eagle3_batch([[1.0] * S], length=S), FrozenTarget(E, U)


def test_no_tensor_over_sequence_and_vocabulary() -> None:
    """Faults: logits of all positions at once, of the teacher over V or of a step over K; scores of
    all queries at once. Twice the sequence takes only tensors without a K or V more."""
    peaks = []
    for S in (1000, 2000):
        model, b, frozen = wide_case(S)
        model.draft_head(frozen.lm_head)
        states = [torch.randn(1, S, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
        with Largest() as largest, PeakMemory() as traced:
            terms = eagle3_terms(model, states, prepare_eagle3(model, b, frozen), frozen)
            torch.autograd.backward(terms.ce.sum())
        assert largest.elements <= max(S * 1024, 256 * 1500)  # one slice of the scan, or one chunk
        peaks.append(traced.peak)
    # The scan's slice, twice while it is exponentiated, and less than 300 floats per position.
    assert peaks[1] - peaks[0] < 1000 * (2 * 1024 + 300) * 8
    with Largest() as largest:
        q = torch.randn(1, 2, 1000, 4, dtype=torch.float64, requires_grad=True)
        kv = [(torch.randn(1, 1, 1000, 4, dtype=torch.float64),) * 2 for _ in range(3)]
        training_time_attention(q, kv, 100).sum().backward()
    assert largest.elements <= 2 * 100 * 1002
