"""The fused objective against the plain one, and what only a fused one can get wrong."""

from dataclasses import replace

import pytest
import torch
from drawn import (
    HEAD_TYPES,
    HIDDEN,
    OBJECTIVE,
    Case,
    assert_same,
    cases,
    denominators_of,
    gradients,
    mib,
    small_batch,
    step,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from toys import KEPT, G, H, V, batch, config, target, toy_map

from torch_port.blocks import slot_weights
from torch_port.compute import ComputeConfig
from torch_port.config import ObjectiveConfig
from torch_port.data.batch import Batch
from torch_port.errors import UserError
from torch_port.models.dspark import DSparkDraft, FrozenTarget
from torch_port.objective.evaluate import (
    batch_denominators,
    batch_objective,
    forward_batch,
    layout_blocks,
)
from torch_port.objective.loss import reduce_denominators

DENSE = {"attention": "dense"}
PLAIN = ComputeConfig(objective="plain", **DENSE)
FUSED = ComputeConfig(**DENSE)
every_head = pytest.mark.parametrize("head", HEAD_TYPES)
SMALL = {"vocab_size": 70, "draft_vocab_size": 65, "hidden_size": HIDDEN}
both_objectives = pytest.mark.parametrize("compute", [PLAIN, FUSED], ids=["plain", "fused"])


def toy(compute: ComputeConfig, trainable_head: bool = False, **changes) -> DSparkDraft:
    """The toy draft, optionally with a head of its own that has left the target's rows."""
    model = DSparkDraft(config(**changes), compute, trainable_head).double()
    g = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.4, generator=g)
    if model.prunes_vocabulary:
        model.install_vocab_mapping(*toy_map())
    return model


# --- Equality ------------------------------------------------------------------------------------


@settings(max_examples=120)
@given(case=cases(), rows=st.sampled_from([5, 8, 12, 20, 1000]))
def test_fused_equals_plain(case: Case, rows: int) -> None:
    """Loss, sums, metric pairs, terms and gradients, float64: sums in another order, 1e-12.

    Faults: the L1 gradient's sign, its mean Σ q⊙s left out, the label subtracted at another id, the
    bias or the teacher of another position, the kept mass ignored, pruned labels in the CE factor,
    a chunk or a group cut wrong (5 rows: one slot and one position at a time).
    """
    K = case.changes["draft_vocab_size"]
    chunked = ComputeConfig(objective_buffer_mib=mib(rows, K), **DENSE)
    assert_same(step(case, chunked)[1], step(case, PLAIN)[1])


@every_head
@pytest.mark.parametrize("bits", [32, 16])
def test_low_precision_follows_float64(head: str, bits: int) -> None:
    """Against float64 on the same rounded numbers; chunks of one slot.

    Faults: a sum over chunks held in bf16, the bf16 copy of one chunk used for another. The states
    and the logit gradient are rounded once: bf16 2⁻⁹ each, sums of some 10 of them: 0.02 of the
    largest gradient. float32: 2⁻²⁴ likewise, and exp's own error: 1e-5.
    """
    dtype, tolerance = {32: (torch.float32, 1e-5), 16: (torch.bfloat16, 0.02)}[bits]
    device, rows = torch.device("cpu"), ComputeConfig(objective_buffer_mib=mib(6, len(KEPT), 32))
    b = batch().to(device, dtype)
    frozen = FrozenTarget(target().embed_tokens.to(dtype), target().lm_head.to(dtype))
    low = toy(rows, trainable_head=True, **HEAD_TYPES[head]).to(dtype)
    hidden = torch.randn(2, 3, G, H, generator=torch.Generator().manual_seed(1)).to(dtype)

    def run(model: DSparkDraft, b: Batch, frozen: FrozenTarget, states: Tensor) -> dict:
        leaf = states.clone().requires_grad_()
        blocks = layout_blocks(model, b)
        objective = (OBJECTIVE, denominators_of(model, b), 1)
        _, loss = batch_objective(model, leaf, blocks, b, frozen, *objective)
        assert loss is not None
        torch.autograd.backward(loss)
        return gradients(model) | {"gradient h": leaf.grad, "loss": loss.detach()}

    got = {name: x.double() for name, x in run(low, b, frozen, hidden).items()}
    high = FrozenTarget(frozen.embed_tokens.double(), frozen.lm_head.double())
    exact = toy(PLAIN, trainable_head=True, **HEAD_TYPES[head])
    exact.load_state_dict(low.state_dict())
    want = run(exact, b.to(device, torch.float64), high, hidden.double())
    assert_same(got, want, tolerance)


# --- Autograd's corners --------------------------------------------------------------------------


@every_head
def test_backward_twice_scaled_and_without(head: str) -> None:
    """Faults: saved gradients scaled in place, the upstream gradient ignored, no_grad ignored."""
    model, b, frozen = toy(FUSED, True, **HEAD_TYPES[head]), batch(), target()
    sums = denominators_of(model, b)
    loss = forward_batch(model, b, frozen, OBJECTIVE, sums).loss
    assert loss is not None
    torch.autograd.backward(loss, retain_graph=True)
    once = gradients(model)
    model.zero_grad()
    torch.autograd.backward(loss * -4, retain_graph=True)
    for name, value in gradients(model).items():
        # A power of two scales without rounding.
        assert torch.equal(value, -4 * once[name]), name
    model.zero_grad()
    torch.autograd.backward(loss)
    assert all(torch.equal(value, once[name]) for name, value in gradients(model).items())
    with torch.no_grad():
        silent = forward_batch(model, b, frozen, OBJECTIVE, sums).loss
    assert silent is not None
    assert not silent.requires_grad
    assert torch.equal(silent, loss.detach())


@both_objectives
@every_head
def test_micro_batches_add_up(head: str, compute: ComputeConfig) -> None:
    """Faults: a gradient overwritten, a denominator per micro-batch. float64, another order."""
    whole, frozen = batch(), target()
    rows = [
        Batch(**{n: None if v is None else v[i : i + 1] for n, v in vars(whole).items()})
        for i in range(2)
    ]
    model = toy(compute, True, **HEAD_TYPES[head])
    sums, losses = denominators_of(model, whole), []
    for part in ([whole], rows):
        model.zero_grad()
        parts = [forward_batch(model, b, frozen, OBJECTIVE, sums).loss for b in part]
        for loss in parts:
            assert loss is not None
            torch.autograd.backward(loss)
        losses.append({"loss": sum(x.detach() for x in parts)} | gradients(model))
    assert_same(losses[1], losses[0])


def test_bit_equal_twice() -> None:
    """Fault: an order of summation that depends on the run."""
    case = Case(SMALL, OBJECTIVE, small_batch(), 0)
    compute = ComputeConfig(objective_buffer_mib=mib(12, 65))
    first, second = step(case, compute)[1], step(case, compute)[1]
    assert all(torch.equal(second[name], value) for name, value in first.items())


@both_objectives
@every_head
@pytest.mark.parametrize("changes", [{}, {"draft_vocab_size": None}], ids=["pruned", "full"])
def test_no_evaluated_slot(changes: dict, head: str, compute: ComputeConfig) -> None:
    """Field-note 15: a rank without an anchor adds a loss of 0, and a gradient of 0 for every
    parameter, so that it takes part in every collective.

    Fault: an error, a None gradient, or 0/0, from empty tensors.
    """
    b = replace(batch(), block_keep_mask=torch.zeros(2, 3, dtype=torch.bool))
    model = toy(compute, True, **changes | HEAD_TYPES[head])
    outcome = forward_batch(model, b, target(), OBJECTIVE, denominators_of(model, b, others=1.0))
    assert outcome.loss is not None
    torch.autograd.backward(outcome.loss)
    assert outcome.loss.item() == 0
    found = gradients(model)
    assert len(found) == len(list(model.parameters()))
    assert all((value == 0).all() for value in found.values())


def test_ranks_scale_the_loss() -> None:
    """Fault: W left out of one of the three terms. 4 ranks: a power of two, exact."""
    case = Case(SMALL, OBJECTIVE, small_batch(), 0)
    one, four = (step(case, FUSED, ranks=ranks)[1] for ranks in (1, 4))
    for name, value in one.items():
        factor = 4 if name == "loss" or name.startswith("gradient") else 1
        assert torch.equal(four[name], factor * value), name


# --- The teacher, a head of one's own, poison ----------------------------------------------------


@both_objectives
def test_trainable_head_has_a_frozen_teacher(compute: ComputeConfig) -> None:
    """Field-note 11: the distance-only gradient equals the one with precomputed probabilities.

    Faults: the teacher read from the trained head, or given a gradient. float64, another order.
    """
    model, b, frozen = toy(compute, trainable_head=True), batch(), target()
    only = ObjectiveConfig(ce_alpha=0.0, l1_alpha=1.0, confidence_alpha=0.0)
    sums = reduce_denominators(batch_denominators(model, b, only), True)
    loss = forward_batch(model, b, frozen, only, sums).loss
    assert loss is not None
    torch.autograd.backward(loss)
    got = gradients(model)

    logits_BSV = b.target_last_hidden_states @ frozen.lm_head.T
    conditional_BSK = logits_BSV[..., list(KEPT)].softmax(-1)  # precomputed, no graph
    model.zero_grad()
    blocks = layout_blocks(model, b)
    hidden = model(blocks, b.hidden_states, b.anchor_positions, b.block_keep_mask, frozen)
    head, markov = model.lm_head, model.markov_head
    assert head is not None
    assert markov is not None
    bias = markov.markov_w2(markov.markov_w1(blocks.previous))
    q = (hidden @ head.weight.T + bias).softmax(-1)
    rows = torch.arange(2).view(2, 1, 1)
    distance = (q - conditional_BSK[rows, blocks.teacher_position]).abs().sum(-1)
    weights = slot_weights(blocks.evaluated, None, torch.float64)
    torch.autograd.backward((weights * distance).sum() / weights.sum())
    want = gradients(model)
    confidence = {name for name in got if "confidence" in name}
    assert all((got.pop(name) == 0).all() for name in confidence)
    assert_same(got, want)
    assert got["gradient lm_head.weight"].abs().max() > 0
    assert frozen.lm_head.grad is None


@both_objectives
def test_head_of_its_own_starts_at_the_targets_rows(compute: ComputeConfig) -> None:
    """Faults: rows of another id copied; the borrowed head still read once there is another."""
    b, frozen = batch(), target()
    own, borrowed = toy(compute, trainable_head=True), toy(compute)
    borrowed.load_state_dict(
        {name: x for name, x in own.state_dict().items() if not name.startswith("lm_head")}
    )
    own.copy_head(frozen.lm_head)
    assert own.lm_head is not None
    assert torch.equal(own.lm_head.weight, frozen.lm_head[list(KEPT)])
    start, same = (forward_batch(m, b, frozen, OBJECTIVE).terms for m in (own, borrowed))
    assert all(torch.equal(getattr(start, n), x) for n, x in vars(same).items())
    with torch.no_grad():
        own.lm_head.weight += torch.randn(len(KEPT), H, dtype=torch.float64)
    moved = forward_batch(own, b, frozen, OBJECTIVE).terms
    assert torch.equal(moved.teacher_top, start.teacher_top)
    assert torch.equal(moved.kept_mass, start.kept_mass)
    assert not torch.equal(moved.draft_top, start.draft_top)
    with pytest.raises(UserError, match="trainable_head=True"):
        borrowed.copy_head(frozen.lm_head)


@both_objectives
@every_head
def test_states_that_are_not_finite_where_nothing_counts(head: str, compute: ComputeConfig) -> None:
    """Field-note 9, every head and its own gradients: a NaN behind a block's last evaluated slot.

    Faults: 0·NaN in the product that makes a weight's gradient; a NaN carried along a block.
    """
    model, frozen = toy(compute, True, **HEAD_TYPES[head]), target()
    b = batch(loss_mask=[[0, 0, 0, 1, 1, 1, 1] + [0] * 5], anchors=[[3, 0]], keep=[[True, False]])
    blocks, sums = layout_blocks(model, b), denominators_of(model, b, others=1.0)
    states = torch.randn(
        1, 2, G, H, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    found = []
    for poison in (0.0, torch.nan, torch.inf):
        model.zero_grad()
        leaf = torch.where(blocks.evaluated[..., None], states, states + poison).requires_grad_()
        _, loss = batch_objective(model, leaf, blocks, b, frozen, OBJECTIVE, sums, 1)
        assert loss is not None
        torch.autograd.backward(loss)
        found.append(gradients(model) | {"h": leaf.grad, "loss": loss.detach()})
    assert found[0]["h"].abs().max() > 0
    for poisoned in found[1:]:
        for name, value in found[0].items():
            assert torch.equal(poisoned[name], value), name


@both_objectives
@pytest.mark.parametrize("size", [30.0, 1e9])
def test_far_apart_logits(compute: ComputeConfig, size: float) -> None:
    """Logits of ±1e9: ce is the distance, q and p̃ are one-hot, nothing overflows.

    Faults: log q[label] (−inf), a softmax without its maximum (NaN).
    """
    b = batch(loss_mask=[[0, 0, 1, 1] + [0] * 8], anchors=[[2]], keep=[[True]])
    b = replace(b, input_ids=torch.full((1, 12), KEPT[1]))
    model = toy(compute, markov_rank=0, confidence_head_with_markov=False)
    head = torch.zeros(V, H, dtype=torch.float64)
    head[KEPT[0], 0], head[KEPT[1], 0] = 1.0, -1.0
    frozen = FrozenTarget(head, head)
    states = torch.zeros(1, 1, G, H, dtype=torch.float64)
    states[..., 0] = size
    b = replace(b, target_last_hidden_states=torch.full((1, 12, H), -size, dtype=torch.float64))
    leaf = states.requires_grad_()
    blocks, sums = layout_blocks(model, b), denominators_of(model, b)
    terms, loss = batch_objective(model, leaf, blocks, b, frozen, OBJECTIVE, sums, 1)
    assert loss is not None
    torch.autograd.backward(loss)
    # Beside the two of ±size stand zeros: e⁻³⁰ of them is 1e-13 in ce, and 3e-13 in l1.
    assert terms.ce[0, 0, 0].item() == pytest.approx(2 * size, rel=1e-13)
    assert terms.l1[0, 0, 0].item() == pytest.approx(2.0, abs=2e-12)
    assert terms.accept[0, 0, 0].item() == pytest.approx(0.0, abs=2e-12)
    assert leaf.grad is not None
    assert leaf.grad.isfinite().all()
