"""DFlash drafts and D-PACE: blocks and weights by hand, a loop over slots, both forms, training."""

import math
from dataclasses import replace

import pytest
import torch
from dflash_toys import (
    FULL,
    FUSED,
    OBJECTIVES,
    PLAIN,
    by_hand,
    dflash_draft,
    holed_batch,
    sums_of,
)
from drawn import HIDDEN, assert_same, batches, gradients, mib
from hypothesis import given, settings
from hypothesis import strategies as st
from scan import Scan
from torch import Tensor
from toys import G, H, V, target

from torch_port.blocks import make_blocks, slot_weights
from torch_port.compute import ComputeConfig
from torch_port.config import BONUS_ANCHOR, DFlashObjectiveConfig
from torch_port.data.batch import Batch
from torch_port.memory import PeakMemory
from torch_port.models.block_draft import FrozenTarget
from torch_port.models.dflash import DFlashDraft
from torch_port.objective import dflash
from torch_port.objective.dflash import DFlashOutcome, dpace_weights, forward_batch
from torch_port.vocabulary.mapping import buffers_from_kept

every_objective = pytest.mark.parametrize("kind", OBJECTIVES)
both_forms = pytest.mark.parametrize("compute", [PLAIN, FUSED], ids=["plain", "fused"])
pruned_and_full = pytest.mark.parametrize("changes", [{}, FULL], ids=["pruned", "full"])


def run(
    model: DFlashDraft,
    b: Batch,
    frozen: FrozenTarget,
    objective: DFlashObjectiveConfig,
    ranks: int = 1,
) -> tuple[DFlashOutcome, dict[str, Tensor]]:
    """One batch forward and backward: (outcome, everything that it computes by name)."""
    model.zero_grad()
    outcome = forward_batch(model, b, frozen, objective, sums_of(model, b, objective), ranks)
    assert outcome.loss is not None
    torch.autograd.backward(outcome.loss)
    found = {"loss": outcome.loss.detach(), "sum": outcome.numerators, "weights": outcome.weights}
    for name, (top, bottom) in outcome.metrics.items():
        found |= {f"metric {name} numerator": top, f"metric {name} denominator": bottom}
    found |= {f"term {name}": value.detach() for name, value in vars(outcome.terms).items()}
    return outcome, found | gradients(model)


# --- Blocks and weights by hand ------------------------------------------------------------------


def test_bonus_anchor_blocks_by_hand() -> None:
    """Faults: labels x[a+1+k]; slot 0 trained; a prefix product; the teacher at the label."""
    ids, mask = [9, 4, 3, 7, 4, 9, 1, 3], [0, 0, 1, 1, 0, 1, 1, 1]
    b = make_blocks(
        torch.tensor([ids]),
        torch.tensor([mask], dtype=torch.float32),
        torch.tensor([[2, 5, 0]]),
        torch.tensor([[True, True, False]]),
        block_size=4,
        mask_token_id=8,
        draft_index_V=torch.tensor([0, -100, -100, 1, 2, -100, -100, -100, -100, 3]),
        block_layout=BONUS_ANCHOR,
    )
    assert b.input_ids[0].tolist() == [[3, 8, 8, 8], [9, 8, 8, 8], [8, 8, 8, 8]]
    assert b.position[0].tolist() == [[2, 3, 4, 5], [5, 6, 7, 8], [0, 1, 2, 3]]
    assert b.label[0, :2].tolist() == [[3, 7, 4, 9], [9, 1, 3, 3]]  # the last: clamped to S − 1
    assert b.previous[0, 0, 1:].tolist() == [3, 7, 4]
    assert b.teacher_position[0].tolist() == [[1, 2, 3, 4], [4, 5, 6, 6], [0, 0, 0, 0]]
    # Position 4 is unsupervised: slot 2 of the first block is out, slot 3 is not.
    assert b.evaluated[0].tolist() == [
        [False, True, False, True],
        [False, True, True, False],
        [False] * 4,
    ]


def test_decay_counts_from_slot_1() -> None:
    """Fault: exp(−k/decay), which gives slot 1 the weight of the second slot. Decay 2."""
    M = torch.tensor([[[False, True, False, True]]])
    weights = slot_weights(M, 2.0, torch.float64, first_slot=1)
    assert weights[0, 0].tolist() == pytest.approx([0, 1, 0, math.exp(-1)], rel=1e-15)
    assert slot_weights(M, None, torch.float64, first_slot=1).tolist() == [[[0.0, 1.0, 0.0, 1.0]]]


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("cumulative", [0, 0.75, 0.375, 0, 0.375]),
        ("continuation", [0, 2, 2, 0, 1]),
        ("both", [0, 1.5, 0.75, 0, 0.375]),
    ],
)
def test_dpace_weights_by_hand(kind: str, want: list[float]) -> None:
    """c = (·, ½, 0 of a pruned label, ·, 1), slots 0 and 3 masked, β = ½: s = (1, ¾, ½, 1, 1).

    P = (1, ¾, ⅜, ⅜, ⅜); R = Σ_{j≥k} M_j·P_j = (·, 3/2, ¾, ·, ⅜). All are binary fractions: exact.
    Faults: the prefix without its own slot, a suffix over masked slots, s = β at a masked slot
    (R/P of slot 2 would not see slot 4 whole), a pruned label taken as c = 1 or left out.
    """
    c = torch.tensor([0.9, 0.5, 0.0, 0.7, 1.0], dtype=torch.float64).requires_grad_()
    M = torch.tensor([False, True, True, False, True])
    weights = dpace_weights(c.view(1, 1, 5), M.view(1, 1, 5), kind, 0.5)
    assert weights[0, 0].tolist() == want
    assert not weights.requires_grad


def test_dpace_weights_of_a_long_block() -> None:
    """Fault: R/P as a quotient: P is β^k = 0 in float32 here. R/P = Σ_{i<G−k} β^i, β = 2⁻⁷."""
    zeros = torch.zeros(1, 1, 64)
    weights = dpace_weights(zeros, torch.ones_like(zeros, dtype=torch.bool), "continuation", 2**-7)
    want = [sum(2.0 ** (-7 * i) for i in range(64 - k)) for k in range(64)]
    assert weights[0, 0].tolist() == pytest.approx(want, rel=1e-6)  # float32: 2⁻²⁴ and a sum


# --- The loop over slots -------------------------------------------------------------------------


@both_forms
@pruned_and_full
@every_objective
def test_loss_metrics_and_gradients(kind: str, changes: dict, compute: ComputeConfig) -> None:
    """Against §12 slot by slot, with gradients. float64: sums in another order, 1e-12.

    Faults: pruned labels in the denominator, β of another kind, B replaced by Σ w, τ or a per-slot
    row over slot 0, a hole that does not end τ's products, α from the conditional.
    """
    model, b, frozen, objective = (
        dflash_draft(compute, **changes),
        holed_batch(),
        target(),
        OBJECTIVES[kind],
    )
    outcome, got = run(model, b, frozen, objective)
    model.zero_grad()
    loss, pairs = by_hand(model, b, frozen, objective)
    torch.autograd.backward(loss)
    want = {"loss": loss.detach()} | gradients(model)
    names = {
        "acc": "acc",
        "ce_loss": "ce",
        "l1_loss": "l1",
        "tau_probabilistic": "tau",
        "teacher_agreement": "agreement",
    }
    if not changes:
        names |= {"draft_vocab_coverage": "coverage", "teacher_kept_mass": "mass"}
        assert 0 < pairs["coverage"][0] < pairs["coverage"][1]  # else pruning shows nowhere
    for part, place in (("numerator", 0), ("denominator", 1)):
        for name, by_name in names.items():
            want[f"metric {name} {part}"] = torch.tensor(pairs[by_name][place], dtype=torch.float64)
        for name in ("ce", "accuracy", "accept"):
            want[f"metric {name}_position {part}"] = torch.tensor(
                pairs[f"{name} slots {part}"], dtype=torch.float64
            )
    assert_same({name: got[name] for name in want}, want)
    assert set(outcome.metrics) - set(names) == {
        "ce_position",
        "accuracy_position",
        "accept_position",
        "teacher_top1_prob",
        "draft_top1_prob",
    }
    assert {len(p[0]) for n, p in outcome.metrics.items() if n.endswith("position")} == {G - 1}


@both_forms
@pytest.mark.parametrize("kind", ["cumulative", "continuation", "both"])
def test_weights_carry_no_gradient(kind: str, compute: ComputeConfig) -> None:
    """Fault: detach left out. The loop with a gradient through its weights gives another one."""
    model, b, frozen, objective = dflash_draft(compute), holed_batch(), target(), OBJECTIVES[kind]
    got = run(model, b, frozen, objective)[1]["gradient fc.weight"]
    model.zero_grad()
    torch.autograd.backward(by_hand(model, b, frozen, objective, detach=False)[0])
    other = gradients(model)["gradient fc.weight"]
    assert (got - other).abs().max() > 1e-3 * other.abs().max()


# --- The two forms -------------------------------------------------------------------------------


@settings(max_examples=30)
@given(data=st.data())
def test_fused_equals_plain(data: st.DataObject) -> None:
    """Any anchors and masks, ids of padding −1 or V, chunks of any size. float64, 1e-12.

    Faults: slots laid out anchor-first, D-PACE's weights of another slot in the second pass, chunks
    cut wrong where a block has holes, a trained head without the weights.
    """
    V, K = data.draw(st.sampled_from([(3, 2), (17, 5), (17, 17), (70, 65), (70, 70)]))
    b = data.draw(batches(V, None))
    kind, own_head = data.draw(st.sampled_from([*OBJECTIVES])), data.draw(st.booleans())
    rows = data.draw(st.sampled_from([5, 9, 20, 1000]))
    changes = {
        "vocab_size": V,
        "draft_vocab_size": K,
        "hidden_size": HIDDEN,
        "block_size": data.draw(st.integers(2, 5)),
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 3,
    }
    g = torch.Generator().manual_seed(5)
    E, U = (torch.randn(V, HIDDEN, generator=g, dtype=torch.float64) for _ in range(2))
    found = []
    for compute in (PLAIN, ComputeConfig(objective_buffer_mib=mib(rows, K))):
        model = dflash_draft(compute, own_head, **changes)
        if K < V:
            kept = torch.randperm(V, generator=torch.Generator().manual_seed(6))[:K].sort().values
            model.install_vocab_mapping(*buffers_from_kept(kept, V))
        local = dflash.batch_denominators(model, b, OBJECTIVES[kind])
        sums = dflash.reduce_denominators(model, torch.where(local == 0, 1.0, local))
        outcome = forward_batch(model, b, FrozenTarget(E, U), OBJECTIVES[kind], sums)
        assert outcome.loss is not None
        torch.autograd.backward(outcome.loss)
        values = {f"term {n}": x.detach() for n, x in vars(outcome.terms).items()}
        values |= {"loss": outcome.loss.detach(), "weights": outcome.weights}
        found.append(values | gradients(model))
    assert_same(found[1], found[0])


@both_forms
@pytest.mark.parametrize("kind", ["decay", "both"])
def test_what_does_not_count_may_be_anything(kind: str, compute: ComputeConfig) -> None:
    """Field-note 9: slot 0, holes and dropped blocks with states of NaN; ids of −1 and V.

    Faults: a weight of 0 that comes after the operation; 0·NaN in the product for a trained head.
    The clean run's values, bit for bit.
    """
    model, b, frozen = dflash_draft(compute, trainable_head=True), holed_batch(), target()
    objective = OBJECTIVES[kind]
    sums, found = sums_of(model, b, objective), []
    states = torch.randn(2, 3, G, H, dtype=torch.float64, generator=torch.manual_seed(0))
    for poison, spoil in ((0.0, False), (torch.nan, False), (torch.inf, True)):
        unsupervised = b.loss_mask < 0.5
        other = torch.where(torch.arange(b.input_ids.shape[1]) % 2 == 0, -1, V)
        ids = torch.where(unsupervised & spoil, other, b.input_ids)
        poisoned = replace(b, input_ids=ids)
        M = forward_batch(model, b, frozen, objective).blocks.evaluated
        leaf = torch.where(M[..., None], states, states + poison).requires_grad_()
        model.forward = lambda *_, leaf=leaf: leaf  # type: ignore[method-assign]
        outcome = forward_batch(model, poisoned, frozen, objective, sums)
        del model.forward
        assert outcome.loss is not None
        model.zero_grad()
        torch.autograd.backward(outcome.loss)
        values = {"h": leaf.grad, "loss": outcome.loss.detach(), "weights": outcome.weights}
        found.append(values | gradients(model))
    assert found[0]["h"].abs().max() > 0
    for values in found[1:]:
        assert all(torch.equal(value, found[0][name]) for name, value in values.items())


@both_forms
@pytest.mark.parametrize("kind", ["decay", "both"])
def test_nothing_as_wide_as_all_slots_is_kept(kind: str, compute: ComputeConfig) -> None:
    """Fault: logits or probabilities [B·N·γ, K] alive at once; one such tensor is 4.1 MB here."""
    N, K = 256, 500
    compute = compute.model_copy(update={"attention": "blockwise", "objective_buffer_mib": 0.5})
    model = dflash_draft(compute, vocab_size=K, draft_vocab_size=None, num_hidden_layers=1,
                         layer_types=["full_attention"])  # fmt: skip
    g = torch.Generator().manual_seed(0)
    frozen = FrozenTarget(*(torch.randn(K, H, generator=g, dtype=torch.float64) for _ in range(2)))
    b = Batch(
        input_ids=torch.randint(0, K, (1, N + G), generator=g),
        loss_mask=torch.ones(1, N + G, dtype=torch.float64),
        hidden_states=torch.randn(1, N + G, 2 * H, generator=g, dtype=torch.float64),
        target_last_hidden_states=torch.randn(1, N + G, H, generator=g, dtype=torch.float64),
        anchor_positions=torch.arange(N).unsqueeze(0),
        block_keep_mask=torch.ones(1, N, dtype=torch.bool),
    ).laid_out(G, BONUS_ANCHOR)
    sums = sums_of(model, b, OBJECTIVES[kind])
    with PeakMemory() as traced:
        loss = forward_batch(model, b, frozen, OBJECTIVES[kind], sums).loss
        assert loss is not None
        torch.autograd.backward(loss)
    assert traced.peak < N * G * K * 8


@both_forms
@every_objective
def test_ranks_scale_the_loss(kind: str, compute: ComputeConfig) -> None:
    """Fault: W left out. 4 ranks: a power of two, exact."""
    model, b, frozen = dflash_draft(compute), holed_batch(), target()
    one, four = (run(model, b, frozen, OBJECTIVES[kind], ranks)[1] for ranks in (1, 4))
    for name, value in one.items():
        factor = 4 if name == "loss" or name.startswith("gradient") else 1
        assert torch.equal(four[name], factor * value), name


@both_forms
@every_objective
def test_nothing_syncs_and_nothing_is_float64(kind: str, compute: ComputeConfig) -> None:
    """Faults: a number read on the host, boolean indexing, a float64 on the device."""
    model = dflash_draft(compute).float()
    b = holed_batch().laid_out(G, BONUS_ANCHOR).to(torch.device("cpu"), torch.float32)
    frozen = FrozenTarget(target().embed_tokens.float(), target().lm_head.float())
    objective = OBJECTIVES[kind]
    forward_batch(model, b, frozen, objective)  # index and rotary tables are made once
    with Scan("cpu") as scan:
        run(model, b, frozen, objective)
    names = {operator.split(".")[1] for operator in scan.operators}
    assert "index_select" in names
    assert not names & {
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "masked_scatter",
        "index_put_",
        "index",
    }
    assert torch.float64 not in scan.dtypes


@both_forms
@every_objective
def test_bf16_follows_float64(kind: str, compute: ComputeConfig) -> None:
    """Fault: weights or sums held in bf16. Against float64 on the same rounded numbers.

    States are given, so what is rounded is the logit gradient and its product, 2⁻⁹ each: 0.02 of
    the largest gradient; the loss comes from float32 logits of 8 terms: 1e-5.
    """
    cpu, objective, found = torch.device("cpu"), OBJECTIVES[kind], []
    states = torch.randn(2, 3, G, H, generator=torch.manual_seed(0)).bfloat16()
    rounded = holed_batch().to(cpu, torch.bfloat16)
    E, U = target().embed_tokens.bfloat16(), target().lm_head.bfloat16()
    for dtype in (torch.bfloat16, torch.float64):
        model, b = dflash_draft(compute).to(dtype), rounded.to(cpu, dtype)
        leaf = states.detach().to(dtype, copy=True).requires_grad_()
        model.forward = lambda *_, leaf=leaf: leaf  # type: ignore[method-assign]
        frozen = FrozenTarget(E.to(dtype), U.to(dtype))
        outcome = forward_batch(model, b, frozen, objective, sums_of(model, b, objective))
        assert outcome.loss is not None
        torch.autograd.backward(outcome.loss)
        assert leaf.grad is not None
        found.append((outcome.loss.detach(), leaf.grad.double(), outcome.weights))
    (loss, gradient, weights), (exact, want, _) = found
    assert loss.dtype == weights.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=1e-5)
    scale = want.abs().max().item()
    torch.testing.assert_close(gradient, want, rtol=0, atol=0.02 * scale)
