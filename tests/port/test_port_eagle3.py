"""EAGLE3 in the port: by hand, against §13 written out with loops, causality, maps, training."""

import math

import pytest
import torch
from eagle3_toys import SIZES, eagle3_batch, eagle3_draft, reference
from torch import Tensor
from toys import KEPT, V, target

from torch_port.compute import ComputeConfig
from torch_port.config_eagle3 import Eagle3Config, Eagle3Objective
from torch_port.data.batch import Batch
from torch_port.errors import UserError
from torch_port.models.dspark import FrozenTarget
from torch_port.models.eagle3 import Eagle3Draft
from torch_port.models.training_time_test import training_time_attention
from torch_port.objective.eagle3 import (
    Eagle3Outcome,
    check_eagle3_denominators,
    eagle3_denominators,
    eagle3_terms,
    forward_eagle3,
    prepare_eagle3,
    reduce_eagle3_denominators,
)
from torch_port.objective.teacher import log_normalizer, normalizer_and_best
from torch_port.vocabulary.mapping import buffers_from_kept

OBJECTIVE = Eagle3Objective(steps=4)


def run(
    model: Eagle3Draft, batch: Batch, frozen: FrozenTarget, objective: Eagle3Objective = OBJECTIVE
) -> Eagle3Outcome:
    prepared = prepare_eagle3(model, batch, frozen)
    local = eagle3_denominators(model, prepared, objective)
    sums = reduce_eagle3_denominators(model, local)
    return forward_eagle3(model, prepared, frozen, objective, sums)


def gradients(model: Eagle3Draft, loss: Tensor) -> dict[str, Tensor]:
    torch.autograd.backward(loss)
    found = {}
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        found[name], parameter.grad = parameter.grad, None
    return found


def by_hand() -> tuple[Eagle3Draft, Batch, FrozenTarget]:
    """A draft whose layer adds nothing: q = (3/4, 1/4) at every index of every step.

    Teacher at position 1: (1, 2, 1, 2)/6, argmax 1 (kept; the tie goes to the lower id); at 2:
    (1, 1, 2, 2)/6, argmax 2 (pruned); at 3: uniform, argmax 0 (kept). Kept ids 0 and 1.
    """
    sizes = SIZES | {"vocab_size": 4, "draft_vocab_size": 2, "hidden_size": 2}
    model = Eagle3Draft(Eagle3Config(**sizes)).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        model.norm.eps = 0.0
        model.fc.weight[:, 0] = 1.0  # g = (1, 1) from a first feature of 1: h = (1, 1)
        model.lm_head.weight[0] = math.log(3) / 2
    model.install_vocab_mapping(*buffers_from_kept(torch.tensor([0, 1]), 4))
    head = torch.tensor([[0, 0], [1, 0], [0, 1], [1, 1]], dtype=torch.float64) * math.log(2)
    states = torch.tensor([[9, 9], [1, 0], [0, 1], [0, 0], [9, 9]], dtype=torch.float64)
    b = eagle3_batch([[0, 0, 1, 1, 1]], length=5, width=2)
    b.hidden_states.zero_()[..., 0] = 1.0
    b.target_last_hidden_states.copy_(states)
    b.input_ids.copy_(torch.tensor([0, 1, 2, 3, 1]))
    return model, b, FrozenTarget(torch.ones(4, 2, dtype=torch.float64), head)


def test_loss_and_metrics_by_hand() -> None:
    """Faults: the teacher one position off; a pruned argmax counted; division by slots instead of
    B·S; acceptance against the conditional; a step too many at the end; ties to the higher id."""
    model, b, frozen = by_hand()
    outcome = run(model, b, frozen)
    first = -(math.log(0.75) + 2 * math.log(0.25)) / 3  # p̃ = (1/3, 2/3)
    third = -(math.log(0.75) + math.log(0.25)) / 2  # p̃ = (1/2, 1/2)
    steps = [(first + third) / 5, third / 5, third / 5, 0.0]
    want = {
        "loss_step": steps,
        "accept_step": [(5 / 12 + 1 / 3 + 1 / 2) / 3, (1 / 3 + 1 / 2) / 2, 1 / 2, None],
        "accuracy_step": [1 / 3, 1 / 2, 1.0, None],
        "ce_step": [(first + third) / 2, third, third, None],
    }
    assert outcome.loss is not None
    total = sum(0.8**i * x for i, x in enumerate(steps))
    assert outcome.loss.item() == pytest.approx(total, rel=1e-14)  # float64 rounding
    for name, values in want.items():
        top, bottom = (x.tolist() for x in outcome.metrics[name])
        for i, value in enumerate(values):
            if value is None:
                assert (top[i], bottom[i]) == (0, 0), name
            else:
                assert top[i] / bottom[i] == pytest.approx(value, rel=1e-14), (name, i)
    kept = {name: (t.item(), d.item()) for name, (t, d) in outcome.metrics.items() if t.dim() == 0}
    assert kept["teacher_argmax_kept"] == (4, 6)
    assert kept["acc"] == (3, 6)
    assert kept["teacher_kept_mass"][0] == pytest.approx(3 / 6 + 2 * 2 / 6 + 3 * 1 / 2, rel=1e-14)


@pytest.mark.parametrize("kept", [KEPT, tuple(range(V))], ids=["pruned", "identity"])
@pytest.mark.parametrize("steps", [1, 4, 9])
def test_equals_the_sheet_written_with_loops(kept: tuple[int, ...], steps: int) -> None:
    """Faults: positions that do not advance, norms swapped, residual of the normed state, later
    keys seen at other indices, the token shifted by one less, teacher or mask not shifted; with
    K = V the reference is the plain unpruned computation: a map that is not the identity.

    Up to more steps than the sequence has. float64; both sides round at 1e-16 of the largest.
    """
    model, b, frozen = eagle3_draft(kept=kept), eagle3_batch(), target()
    objective = Eagle3Objective(steps=steps, step_decay=0.7)
    outcome = run(model, b, frozen, objective)
    want, leaves, sums = reference(model, kept, b, frozen, steps, 0.7)
    assert outcome.loss is not None
    assert outcome.loss.item() == pytest.approx(want.item(), rel=1e-12)
    torch.autograd.backward(want)
    for name, gradient in gradients(model, outcome.loss).items():
        expected = leaves[name].grad
        assert expected is not None
        scale = expected.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(gradient, expected, rtol=0, atol=1e-12 * scale, msg=name)
    names = {"loss_step": "ce", "accept_step": "accept", "accuracy_step": "hit"}
    for name, own in names.items():
        got = outcome.metrics[name][0].tolist()
        assert got == pytest.approx(sums[own], rel=1e-12, abs=1e-15), name
    assert outcome.metrics["accept_step"][1].tolist() == sums["slots"]
    assert outcome.metrics["ce_step"][1].tolist() == sums["counted"]
    mass = outcome.metrics["teacher_kept_mass"][0].item()
    assert mass == pytest.approx(sum(sums["mass"]), rel=1e-12)
    counted = sum(sums["counted"])
    assert counted == sum(sums["slots"]) if len(kept) == V else 0 < counted < sum(sums["slots"])


@pytest.mark.parametrize("queries", [1, 3, 256])
@pytest.mark.parametrize("later", [0, 1, 3])
def test_attention_equals_one_dense_mask(queries: int, later: int) -> None:
    """Faults: a chunk's keys or diagonal terms cut at the wrong place; kv heads misassigned.

    The judge: torch's own attention over all steps' keys under a [S, n·S] mask.
    """
    S, g = 7, torch.Generator().manual_seed(3)
    q = torch.randn(2, 4, S, 6, generator=g, dtype=torch.float64, requires_grad=True)
    kv = torch.randn(later + 1, 2, 2, 2, S, 6, generator=g, dtype=torch.float64, requires_grad=True)
    out = training_time_attention(q, [(x[0], x[1]) for x in kv], queries)
    mask = torch.cat(
        [torch.ones(S, S, dtype=torch.bool).tril(), *[torch.eye(S, dtype=torch.bool)] * later], 1
    )
    k, v = (torch.cat(list(kv[:, i]), dim=2) for i in range(2))
    want = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, enable_gqa=True
    )
    torch.testing.assert_close(out, want, rtol=0, atol=1e-13)  # float64 sums in another order
    direction = torch.randn(out.shape, generator=g, dtype=torch.float64)
    for got, expected in zip(
        torch.autograd.grad(out, (q, kv), direction),
        torch.autograd.grad(want, (q, kv), direction),
        strict=True,
    ):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)


def test_causality_of_states_and_tokens() -> None:
    """Faults: a mask that is not causal; a token read earlier than its index and step allow."""
    model, b, frozen = eagle3_draft(), eagle3_batch(), target()
    changed = 5

    def states(ids: Tensor, features: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return model(ids, features, frozen, 3)

    before = states(b.input_ids, b.hidden_states)
    features = b.hidden_states.clone()
    features[:, changed] += 1
    ids = b.input_ids.clone()
    ids[:, changed] = (ids[:, changed] + 1) % V
    for step, (old, by_state, by_token) in enumerate(
        zip(before, states(b.input_ids, features), states(ids, b.hidden_states), strict=True)
    ):
        moved = (old != by_state).any(-1)
        assert not moved[:, :changed].any()
        assert moved[:, changed:].all()
        moved = (old != by_token).any(-1)
        first = changed - 1 - step  # index t of step i reads x[t + 1 + i]
        assert not moved[:, :first].any()
        assert moved[:, first].all()


def test_chunks_and_recompute_move_no_number() -> None:
    """Faults: a chunk's slots put back elsewhere; a recomputed step that differs."""
    model, b, frozen = eagle3_draft(), eagle3_batch(), target()
    prepared = prepare_eagle3(model, b, frozen)
    with torch.no_grad():
        states = model(b.input_ids, b.hidden_states, frozen, 4)
        whole, small = (eagle3_terms(model, states, prepared, frozen, c) for c in (256, 12))
    for name in ("ce", "accept", "kept_mass", "correct"):
        torch.testing.assert_close(  # products of other shapes: float64 rounding
            getattr(small, name), getattr(whole, name), rtol=1e-13, atol=1e-15
        )
    plain = run(model, b, frozen).loss
    assert plain is not None
    want = gradients(model, plain)
    model.compute = ComputeConfig(recompute="layer")
    again = run(model, b, frozen).loss
    assert again is not None
    assert torch.equal(again, plain)
    assert all(torch.equal(g, want[n]) for n, g in gradients(model, again).items())


def test_stored_normaliser_is_used_and_streamed_one_equals_it() -> None:
    """Faults: the stored normaliser ignored; the scan's slices not merged, or ties to the higher
    id. The head's row 11 repeats row 2, beyond the slice that it is in."""
    model, b, frozen = eagle3_draft(), eagle3_batch(), target()
    logits = b.target_last_hidden_states @ frozen.lm_head.T
    for rows in (1, 3, 16, 100):
        got, best = normalizer_and_best(b.target_last_hidden_states, frozen.lm_head, rows)
        torch.testing.assert_close(got, logits.logsumexp(-1), rtol=1e-14, atol=1e-14)
        assert torch.equal(best, logits.argmax(-1))
        assert torch.equal(got, log_normalizer(b.target_last_hidden_states, frozen.lm_head, rows))
    twice = frozen.lm_head.clone()
    twice[11] = twice[2]
    _, best = normalizer_and_best(twice[2:3] * 9, twice, 4)
    assert best.item() == 2
    halved = logits.logsumexp(-1) + math.log(2)
    stored = Batch(**{**vars(b), "target_log_normalizer": halved})
    mass, mass_halved = (run(model, x, frozen).metrics["teacher_kept_mass"] for x in (b, stored))
    assert mass_halved[0].item() == pytest.approx(mass[0].item() / 2, rel=1e-13)


def test_junk_where_nothing_counts_changes_nothing() -> None:
    """Field-note 9. Faults: padded ids that index a table, NaN that a weight of 0 lets through."""
    model, b, frozen = eagle3_draft(), eagle3_batch(), target()
    clean = run(model, b, frozen)
    assert clean.loss is not None
    want = gradients(model, clean.loss)
    junk = Batch(**{**vars(b), "input_ids": b.input_ids.clone()})
    junk.input_ids[1, 7:] = torch.tensor([-1, V])
    states = b.target_last_hidden_states.clone()
    teaches = torch.zeros_like(b.loss_mask, dtype=torch.bool)
    teaches[:, 1:-1] = b.loss_mask[:, 2:] > 0.5
    states[~teaches] = torch.nan
    normalizer = (b.target_last_hidden_states @ frozen.lm_head.T).logsumexp(-1)
    normalizer[~teaches] = torch.nan
    spoilt = {"target_last_hidden_states": states, "target_log_normalizer": normalizer}
    outcome = run(model, Batch(**{**vars(junk), **spoilt}), frozen)
    assert outcome.loss is not None
    assert outcome.loss.item() == pytest.approx(clean.loss.item(), rel=1e-14)
    for name, gradient in gradients(model, outcome.loss).items():
        torch.testing.assert_close(gradient, want[name], rtol=1e-11, atol=1e-14, msg=name)
    for name, (top, bottom) in outcome.metrics.items():
        torch.testing.assert_close(top, clean.metrics[name][0], rtol=1e-13, atol=0, msg=name)
        assert torch.equal(bottom, clean.metrics[name][1]), name


def teacher_says(ids: list[int]) -> tuple[Batch, FrozenTarget]:
    """One row whose teacher's argmax at position p is ids[p]: U has its ids in one-hot rows."""
    head = torch.eye(V, dtype=torch.float64)
    frozen = FrozenTarget(torch.randn(V, V, dtype=torch.float64), head)
    b = eagle3_batch([[1.0] * len(ids)], length=len(ids), width=V)
    b.target_last_hidden_states.copy_(4 * head[ids])
    return b, frozen


def test_field_note_10_target_ids_and_draft_ids() -> None:
    """Argmax 9 is draft 3; 7 is pruned: a miss, and no part of the loss. Fault: 3 compared to 9,
    or a hit for draft 3 where the teacher says *target* 3."""
    model = eagle3_draft(hidden_size=V)
    with torch.no_grad():
        model.fc.weight.zero_()
        model.fc.weight[:, 0] = 1.0
        model.midlayer.self_attn.o_proj.weight.zero_()
        model.midlayer.mlp.down_proj.weight.zero_()
        model.norm.weight.fill_(1)
        model.lm_head.weight.zero_()
        model.lm_head.weight[3] = 1.0  # always proposes draft 3
    b, frozen = teacher_says([0, 9, 7, 3, 9, 0])
    b.hidden_states.fill_(1.0)
    terms = run(model, b, frozen, Eagle3Objective(steps=1)).terms
    assert terms.correct.tolist() == [[[1, 0, 0, 1]]]
    assert terms.counted.tolist() == [[[True, False, True, True]]]
    assert (terms.ce > 0).tolist() == [[[True, False, True, True]]]
    assert (terms.accept > 0).all()  # also where the argmax is pruned


def test_field_note_11_teacher_carries_no_gradient() -> None:
    """Fault: the loss pulls the teacher to the draft, through T or through a tied head."""
    model, b, frozen = eagle3_draft(), eagle3_batch(), target()
    model.copy_head(frozen.lm_head)
    assert torch.equal(model.lm_head.weight.detach(), frozen.lm_head[list(KEPT)])
    before = frozen.lm_head.clone()
    b.target_last_hidden_states.requires_grad_()
    outcome = run(model, b, frozen)
    assert outcome.loss is not None
    want, leaves, _ = reference(model, KEPT, b, frozen, 4, 0.8)
    torch.autograd.backward(want)  # there it does reach T: the reference detaches nothing
    head = gradients(model, outcome.loss)["lm_head.weight"]
    expected = leaves["lm_head.weight"].grad
    torch.testing.assert_close(head, expected, rtol=0, atol=1e-12 * head.abs().max().item())
    b.target_last_hidden_states.grad = None
    again = run(model, b, frozen).loss
    assert again is not None
    torch.autograd.backward(again)
    assert b.target_last_hidden_states.grad is None
    with torch.no_grad():
        model.lm_head.weight += 1
    assert torch.equal(frozen.lm_head, before)


def test_field_note_27_padding_rows_of_the_head() -> None:
    """A padding id (V_tok = 13) that wins the argmax is a miss, never a label; its mass counts.

    Fault: the teacher's softmax or argmax over the kept ids instead of all of V.
    """
    model = eagle3_draft(hidden_size=V)
    b, frozen = teacher_says([0, 9, 15, 9, 0])
    b.target_last_hidden_states[0, 2, 15] = 100.0
    terms = run(model, b, frozen, Eagle3Objective(steps=2)).terms
    assert terms.counted.tolist() == [[[True, False, True]], [[False, False, True]]]
    assert terms.correct[:, 0, 1].tolist() == [0, 0]
    assert terms.kept_mass[0, 0, 1] < 1e-40
    assert terms.accept[0, 0, 1] < 1e-40


@pytest.mark.parametrize(
    ("dtype", "loss_error", "gradient_error"),
    # float32 rounds at 6e-8 and sums some hundred products; bf16 at 4e-3, over ten operations.
    [(torch.float32, 1e-5, 1e-4), (torch.bfloat16, 2e-2, 0.15)],
)
def test_precision(dtype: torch.dtype, loss_error: float, gradient_error: float) -> None:
    """Judged against float64 on the rounded inputs. Faults: logits or softmax in bf16; a kept mass
    above 1 from a rounded normaliser."""
    model, frozen = eagle3_draft().to(dtype), target()
    low = FrozenTarget(frozen.embed_tokens.to(dtype), frozen.lm_head.to(dtype))
    b = eagle3_batch().to(torch.device("cpu"), dtype)
    outcome = run(model, b, low)
    exact = eagle3_draft().to(dtype).double()
    wide = FrozenTarget(low.embed_tokens.double(), low.lm_head.double())
    want = run(exact, b.to(torch.device("cpu"), torch.float64), wide)
    assert outcome.loss is not None
    assert want.loss is not None
    assert outcome.loss.dtype == torch.float32
    assert outcome.loss.item() == pytest.approx(want.loss.item(), rel=loss_error)
    expected = gradients(exact, want.loss)
    for name, gradient in gradients(model, outcome.loss).items():
        error = torch.linalg.vector_norm(gradient.double() - expected[name])
        assert error < gradient_error * torch.linalg.vector_norm(expected[name]), name
    terms = outcome.terms
    assert (terms.accept <= terms.kept_mass + 1e-6).all()  # float32 sums
    assert terms.kept_mass.max() <= 1 + 1e-6


def test_bf16_logits_are_never_rounded() -> None:
    """The objective alone, on bf16 states: fault, logits of up to 40 rounded to a step of 1/8.

    Products of bf16 factors are exact in float32; sums and exponentials of it are left.
    """
    low, frozen, b = eagle3_draft().bfloat16(), target(), eagle3_batch()
    b = b.to(torch.device("cpu"), torch.bfloat16)
    with torch.no_grad():
        low.lm_head.weight.mul_(8)
    E, U = frozen.embed_tokens.bfloat16(), frozen.lm_head.bfloat16()
    g = torch.Generator().manual_seed(7)
    states = [torch.randn(2, 9, 8, generator=g).bfloat16() * 4 for _ in range(2)]
    prepared = prepare_eagle3(low, b, FrozenTarget(E, U))
    with torch.no_grad():
        terms = eagle3_terms(low, states, prepared, FrozenTarget(E, U))
    exact, wide = low.double(), FrozenTarget(E.double(), U.double())
    b = b.to(torch.device("cpu"), torch.float64)
    with torch.no_grad():
        want = eagle3_terms(
            exact, [x.double() for x in states], prepare_eagle3(exact, b, wide), wide
        )
    assert want.ce.max() > 20
    for name in ("ce", "accept", "kept_mass"):
        got, expected = getattr(terms, name).double(), getattr(want, name)
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6, msg=name)
    assert torch.equal(terms.correct.double(), want.correct)


@pytest.mark.parametrize(
    ("mask", "length"), [([[1.0, 1.0]], 2), ([[1.0]], 1), ([[1.0, 1.0, 0.5, 0.0]], 4)]
)
def test_nothing_supervised_is_an_error_of_the_step(mask: list[list[float]], length: int) -> None:
    """Faults: a crash on rows shorter than a teacher needs; 0/0; a mask of 0.5 counted; a weight
    without a gradient, whose rank would then be missing from a collective (field-note 15)."""
    model, b = eagle3_draft(), eagle3_batch(mask, length=length)
    outcome = run(model, b, target())
    assert outcome.loss is not None
    assert outcome.loss.item() == 0
    assert all(not g.any() for g in gradients(model, outcome.loss).values())
    local = eagle3_denominators(model, prepare_eagle3(model, b, target()), OBJECTIVE)
    assert local.tolist() == [length, 0, 0]
    with pytest.raises(UserError, match="no supervised target tokens"):
        check_eagle3_denominators(0, 0, OBJECTIVE)
    with pytest.raises(UserError, match="no in-vocabulary target tokens"):
        check_eagle3_denominators(3, 0, OBJECTIVE)
