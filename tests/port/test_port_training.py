"""Optimizer, step and loop: numbers by hand, accumulation, errors, masters, ranks."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from toys import batch, draft, target

from torch_port.compute import ComputeConfig
from torch_port.config import ObjectiveConfig
from torch_port.errors import UserError
from torch_port.evaluation import evaluate
from torch_port.models.attention import rotary_tables
from torch_port.training.guard import SpikeGuard
from torch_port.training.loop import train
from torch_port.training.optimizer import MasterAdamW, OptimizerConfig, decays, rate_at
from torch_port.training.step import accumulate_gradients, training_step

OBJECTIVE = ObjectiveConfig(loss_decay_gamma=3.0)


def config(**changes: float) -> OptimizerConfig:
    return OptimizerConfig(**({"peak_rate": 1e-2, "warmup_steps": 2, "total_steps": 10} | changes))


def test_schedule_by_hand() -> None:
    """Faults: t counted from 0 (rate(1) = 0); the last step not at `final`."""
    c = config(peak_rate=1.0, final_rate=0.2, warmup_steps=4, total_steps=12)
    assert [rate_at(t, c) for t in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert rate_at(8, c) == pytest.approx(0.6, abs=1e-15)  # half way: cos(π/2) = 0
    assert rate_at(12, c) == pytest.approx(0.2, abs=1e-15)
    assert rate_at(1, config(peak_rate=1.0, warmup_steps=0, total_steps=1)) == 0.0


def test_two_adamw_steps_by_hand() -> None:
    """Faults: no bias correction, ε inside the root, decay coupled, moments swapped."""
    w = nn.Parameter(torch.tensor([[2.0]], dtype=torch.float64))
    optimizer = MasterAdamW(
        [("fc.weight", w)], config(weight_decay=0.1, max_grad_norm=1e9, eps=1e-2)
    )
    value, m, v = 2.0, 0.0, 0.0
    for t, (gradient, rate) in enumerate([(0.5, 0.1), (-0.2, 0.3)], start=1):
        w.grad = torch.tensor([[gradient]], dtype=torch.float64)
        optimizer.apply(rate, optimizer.gradient_norm())
        m, v = 0.9 * m + 0.1 * gradient, 0.95 * v + 0.05 * gradient**2
        step = (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.95**t)) + 1e-2)
        value = value * (1 - rate * 0.1) - rate * step
        assert w.item() == pytest.approx(value, rel=1e-14)
    assert [x.item() for x in optimizer.moments()["fc.weight"]] == pytest.approx([m, v])


@pytest.mark.parametrize(("limit", "factor"), [(1.0, 0.2), (5.0, 1.0), (50.0, 1.0)])
def test_clip_adds_nothing_to_the_norm(limit: float, factor: float) -> None:
    """Fault: torch's own clip, which divides by ‖g‖ + 1e-6. Gradient (3, 4), norm 5."""
    parameters = [nn.Parameter(torch.zeros(1, dtype=torch.float64)) for _ in range(2)]
    named = [("a.bias", parameters[0]), ("b.bias", parameters[1])]
    optimizer = MasterAdamW(named, config(max_grad_norm=limit))
    for parameter, gradient in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([gradient], dtype=torch.float64)
    optimizer.apply(0.1, optimizer.gradient_norm())
    first = optimizer.moments()["b.bias"][0].item()
    assert first == pytest.approx(0.1 * 4.0 * factor, rel=1e-15)


def test_zero_gradient_is_no_nan() -> None:
    p = nn.Parameter(torch.ones(1))
    optimizer = MasterAdamW([("a.bias", p)], config())
    p.grad = torch.zeros(1)
    optimizer.apply(0.1, optimizer.gradient_norm())
    assert p.item() == 1.0


def test_weight_decay_spares_norms_biases_and_w1() -> None:
    names = dict(draft(markov_head_type="gated").named_parameters())
    spared = {name for name in names if not decays(name)}
    assert spared == {
        name
        for name in names
        if name.endswith((".bias", "norm.weight")) or "layernorm" in name or "w1" in name
    }
    assert "markov_head.markov_w2.weight" not in spared
    assert len(spared) == 2 + 4 * 2 + 3


def test_norm_weights_move_with_bf16_parameters() -> None:
    """Field-note 14: 50 steps at 1e-4; pure bf16 updates leave every norm at exactly 1.0."""
    p = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    optimizer = MasterAdamW([("norm.weight", p)], config())
    assert optimizer.masters[0].dtype == torch.float32
    for _ in range(50):
        p.grad = torch.ones_like(p)
        optimizer.apply(1e-4, optimizer.gradient_norm())
    assert (p < 1).all()
    torch.testing.assert_close(  # Adam's step is the rate when the gradient never changes
        optimizer.masters[0], torch.full((8,), 1 - 50e-4), rtol=1e-5, atol=0
    )


def test_accumulation_equals_one_batch() -> None:
    """Fault: each micro-batch divided by its own denominator. Rows hold 10 and 4 labels."""
    whole = batch()
    parts = [
        type(whole)(**{n: None if v is None else v[i : i + 1] for n, v in vars(whole).items()})
        for i in range(2)
    ]
    results = []
    for micro_batches in ([whole], parts):
        model = draft()
        loss, den, ce_den, _ = accumulate_gradients(model, micro_batches, target(), OBJECTIVE)
        results.append((loss, den, ce_den, {n: p.grad for n, p in model.named_parameters()}))
    (loss, den, ce_den, one), (loss2, den2, ce_den2, two) = results
    torch.testing.assert_close(  # sums in another order: rounding of float64
        torch.stack([loss2, den2, ce_den2]), torch.stack([loss, den, ce_den]), rtol=1e-13, atol=0
    )
    for name, gradient in one.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(two[name], gradient, rtol=0, atol=1e-12 * scale, msg=name)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("mask", "no supervised target tokens"),
        ("labels", "no in-vocabulary target tokens"),
        ("features", "gradient norm nan"),
    ],
)
def test_bad_step_is_one_error_and_touches_nothing(spoil: str, words: str) -> None:
    """Faults: NaN written into the weights or the moments before the check."""
    b = batch()
    if spoil == "mask":
        b = type(b)(**{**vars(b), "loss_mask": torch.zeros_like(b.loss_mask)})
    elif spoil == "labels":
        b = type(b)(**{**vars(b), "input_ids": torch.full_like(b.input_ids, 1)})  # 1 is pruned
    else:
        b.hidden_states[0, 0, 0] = torch.nan
    model = draft()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    optimizer = MasterAdamW(model.named_parameters(), config())
    with pytest.raises(UserError, match=words):
        training_step(model, optimizer, [b], target(), OBJECTIVE, 1)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert optimizer.moments() == {}
    assert all(p.grad is None for p in model.parameters())
    good = training_step(model, optimizer, [batch()], target(), OBJECTIVE, 1)
    assert math.isfinite(good.loss)


def test_a_few_steps_learn() -> None:
    """Fault: an update with the wrong sign. The loss of one repeated batch falls."""
    losses: list[float] = []
    train(
        draft(scale=1.0),
        [batch()] * 30,
        target(),
        OBJECTIVE,
        config(peak_rate=3e-2, total_steps=30),
        lambda report, *_: losses.append(report.loss),
    )
    assert losses[-1] < losses[0] - 0.3


WORKER = """
import os
import sys
import torch
import torch.distributed as dist

sys.path.insert(0, sys.argv[4])
from toys import batch, draft, target
from torch_port.config import ObjectiveConfig
from torch_port.training.step import accumulate_gradients

rank, prunes = int(sys.argv[1]), sys.argv[3] == "pruned"
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
whole = batch()
mine = {n: None if v is None else v[rank : rank + 1] for n, v in vars(whole).items()}
model = draft() if prunes else draft(draft_vocab_size=None)
scalars = []
original = dist.all_reduce
def counted(tensor, *a, **k):
    if tensor.dim() == 0:
        scalars.append(tensor.dtype)
    return original(tensor, *a, **k)
dist.all_reduce = counted
loss, den, ce_den, _ = accumulate_gradients(
    model, [type(whole)(**mine)], target(), ObjectiveConfig(loss_decay_gamma=3.0)
)
torch.save(
    {"scalars": len(scalars), "grads": {n: p.grad for n, p in model.named_parameters()}},
    sys.argv[2] + f".{rank}",
)
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # without Python's clean-up, in which a late thread of torch's own can abort
"""


@pytest.mark.parametrize(("kind", "collectives"), [("full", 1), ("pruned", 2)])
def test_two_ranks_equal_one_process(tmp_path: Path, kind: str, collectives: int) -> None:
    """Faults: W missing or doubled, denominators per rank, one collective more or less.

    Real processes: one cannot see a collective. float64, sums in another order.
    """
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    meeting = tmp_path / f"meeting-{kind}"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, worker, str(rank), meeting, kind, Path(__file__).parent],
            env=environment,
        )
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0, 0]
    model = draft() if kind == "pruned" else draft(draft_vocab_size=None)
    accumulate_gradients(model, [batch()], target(), OBJECTIVE)
    for rank in range(2):
        result = torch.load(f"{meeting}.{rank}", weights_only=True)
        assert result["scalars"] == collectives
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(
                result["grads"][name], parameter.grad, rtol=0, atol=1e-12 * scale, msg=name
            )


@pytest.mark.parametrize("form", ["fused", "plain"])
def test_evaluating_in_inference_mode_leaves_training_possible(form: str) -> None:
    """Fault: rotary tables or head rows first made in inference mode: autograd refuses them."""
    model, b, frozen = draft(), batch(), target()
    model.compute = ComputeConfig(objective=form)
    rotary_tables.cache_clear()
    with torch.inference_mode():
        evaluate(model, [b], frozen, OBJECTIVE)
    optimizer = MasterAdamW(model.named_parameters(), config())
    training_step(model, optimizer, [b], frozen, OBJECTIVE, 1)


def test_spike_guard_by_hand() -> None:
    """Faults: an arithmetic mean (limit 25), a spike entering the mean, ≥ for >, a norm of 0."""
    guard = SpikeGuard(10.0)
    assert [guard.admits(n) for n in (1.0, 4.0, 0.0)] == [True] * 3  # mean 2, not 2.5
    assert [guard.admits(n) for n in (20.1, 20.1)] == [False] * 2
    assert guard.admits(20.0)
    assert (guard.seen, guard.log_sum) == (3, pytest.approx(math.log(80), rel=1e-15))
    never = SpikeGuard(math.inf)
    assert [never.admits(n) for n in (1.0, 1e30)] == [True] * 2


def test_a_spike_is_skipped_whole() -> None:
    """Faults: moments moved or counted by a skipped step, gradients kept, the schedule held up."""
    model, twin, b, frozen = draft(), draft(), batch(), target()
    first = MasterAdamW(model.named_parameters(), config(max_grad_norm=math.inf))
    second = MasterAdamW(twin.named_parameters(), config(max_grad_norm=math.inf))
    spiked = OBJECTIVE.model_copy(update={"l1_alpha": 1e4})
    assert training_step(model, first, [b], frozen, OBJECTIVE, 1).taken
    training_step(twin, second, [b], frozen, OBJECTIVE, 1)
    skipped = training_step(model, first, [b], frozen, spiked, 2)
    assert not skipped.taken
    assert skipped.gradient_norm > 1e3
    assert all(p.grad is None for p in model.parameters())
    report = training_step(model, first, [b], frozen, OBJECTIVE, 3)
    assert report.rate == rate_at(3, first.config)
    training_step(twin, second, [b], frozen, OBJECTIVE, 3)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
