"""The plain objective: hand-computed values, a naive reference, poison, memory."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import KEPT, G, H, S, V, batch, draft, target

from torch_port.blocks import slot_weights
from torch_port.compute import ComputeConfig
from torch_port.config import ObjectiveConfig
from torch_port.errors import UserError
from torch_port.models.dspark import FrozenTarget
from torch_port.objective.evaluate import batch_denominators, forward_batch, layout_blocks
from torch_port.objective.loss import assemble_loss, check_denominators, reduce_denominators
from torch_port.objective.metrics import ratios
from torch_port.objective.teacher import log_normalizer
from torch_port.objective.terms import SlotTerms, slot_terms

OBJECTIVE = ObjectiveConfig(loss_decay_gamma=3.0)
FULL = {"draft_vocab_size": None}


def loss_of(model, b, frozen, objective=OBJECTIVE) -> tuple[Tensor, object]:
    local = batch_denominators(model, b, objective)
    denominators = reduce_denominators(local, model.prunes_vocabulary)
    outcome = forward_batch(model, b, frozen, objective, denominators)
    return outcome.loss, outcome


def gradients(model, loss: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    torch.autograd.backward(loss)
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def naive_loss(model, b, frozen, objective=OBJECTIVE) -> tuple[Tensor, dict[str, float]]:
    """§7 to §9 slot by slot, from the hidden states and the sheet alone."""
    blocks = layout_blocks(model, b)
    hidden = model(blocks, b.hidden_states, b.anchor_positions, b.block_keep_mask, frozen)
    kept = list(KEPT) if model.prunes_vocabulary else list(range(V))
    U, W1, W2 = frozen.lm_head, model.markov_head.markov_w1.weight, model.markov_head.markov_w2
    ce = l1 = conf = den = ce_den = torch.zeros((), dtype=torch.float64)
    count = inside = mass = correct = tau = alive = 0.0
    for row in range(len(b.input_ids)):
        for n in range(b.anchor_positions.shape[1]):
            survival, any_slot = 1.0, False
            for k in range(G):
                at = int(b.anchor_positions[row, n]) + 1 + k
                supervised = at < S and bool(b.loss_mask[row, at] > 0.5)
                if not (b.block_keep_mask[row, n] and supervised):
                    break
                h = hidden[row, n, k]
                e = W1[b.input_ids[row, at - 1]]
                z = U[kept] @ h + W2.weight @ e
                q = z.softmax(0)
                logits = U @ b.target_last_hidden_states[row, at - 1]
                conditional = logits[kept].softmax(0)
                true = (logits[kept] - logits.logsumexp(0)).exp()
                label = int(b.input_ids[row, at])
                w = math.exp(-k / objective.loss_decay_gamma)
                alpha = float(torch.minimum(q, true).sum().clamp(0, 1).detach())
                c = model.confidence_head.proj(torch.cat([h, e]))[0]
                p = torch.sigmoid(c)
                l1 = l1 + w * (q - conditional).abs().sum()
                conf = conf - w * (alpha * p.log() + (1 - alpha) * (1 - p).log())
                den = den + w
                if label in kept:
                    ce = ce - w * q[kept.index(label)].log()
                    ce_den = ce_den + w
                    inside += 1
                    correct += float(int(z.argmax()) == kept.index(label))
                count, mass, any_slot = count + 1, mass + float(true.sum()), True
                survival *= alpha
                tau += survival
            alive += any_slot
    o = objective
    if model.prunes_vocabulary:
        loss = o.ce_alpha * ce / ce_den + (o.l1_alpha * l1 + o.confidence_alpha * conf) / den
    else:
        loss = (o.ce_alpha * ce + o.l1_alpha * l1 + o.confidence_alpha * conf) / den
    return loss, {
        "ce": float((ce / ce_den).detach()),
        "l1": float((l1 / den).detach()),
        "acc": correct / count,
        "coverage": inside / count,
        "mass": mass / count,
        "tau": (alive + tau) / alive,
    }


@pytest.mark.parametrize("changes", [{}, FULL], ids=["pruned", "full"])
def test_loss_and_every_gradient_against_naive(changes: dict) -> None:
    """Faults: W1 read with draft ids, CE denominator counting pruned labels, detach missing.

    float64: two sums in another order, 1e-15 or so; 1e-12 of each tensor's maximum.
    """
    model, b, frozen = draft(**changes), batch(), target()
    loss, outcome = loss_of(model, b, frozen)
    expected, numbers = naive_loss(model, b, frozen)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    got, want = gradients(model, loss), gradients(model, naive_loss(model, b, frozen)[0])
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        scale = float(gradient.abs().max())
        torch.testing.assert_close(got[name], gradient, rtol=0, atol=1e-12 * scale, msg=name)
    metrics = ratios(outcome.metrics)
    assert metrics["ce_loss"] == pytest.approx(numbers["ce"], rel=1e-12)
    assert metrics["l1_loss"] == pytest.approx(numbers["l1"], rel=1e-12)
    assert metrics["acc"] == pytest.approx(numbers["acc"], rel=1e-12)
    assert metrics["tau_probabilistic"] == pytest.approx(numbers["tau"], rel=1e-12)
    if not changes:
        assert 0 < numbers["coverage"] < 1  # else the case shows nothing about pruning
        assert metrics["draft_vocab_coverage"] == pytest.approx(numbers["coverage"], rel=1e-12)
        assert metrics["teacher_kept_mass"] == pytest.approx(numbers["mass"], rel=1e-12)


def one_slot(kept_logits: list[float], teacher: list[float], label: int) -> SlotTerms:
    """A draft with logits and a teacher of our choice in its one evaluated slot."""
    b = batch(loss_mask=[[0, 0, 1, 1] + [0] * 8], anchors=[[2]], keep=[[True]])
    model = draft()

    class Chosen(nn.Module):
        """Stands where the draft stands for `slot_terms`."""

        prunes_vocabulary = True
        confidence_head = None

        def draft_head(self, head: Tensor) -> Tensor:
            return head[: len(kept_logits)]

        output_head = draft_head

        def embed_previous(self, previous: Tensor) -> None:
            return None

        def logits(self, hidden: Tensor, e: None, head: Tensor) -> Tensor:
            return torch.tensor(kept_logits, dtype=torch.float64).expand(*hidden.shape[:-1], -1)

        def confidence(self, hidden: Tensor, e: None, detach: bool) -> None:
            return None

    head = torch.zeros(len(teacher), H, dtype=torch.float64)
    head[:, 0] = torch.tensor(teacher, dtype=torch.float64)
    states = torch.zeros(1, S, H, dtype=torch.float64)
    states[..., 0] = 1
    frozen = FrozenTarget(head, head)
    blocks = replace(
        layout_blocks(model, b),
        label_is_kept=torch.ones(1, 1, G, dtype=torch.bool),
        label_draft_id=torch.full((1, 1, G), label),
    )
    hidden = torch.zeros(1, 1, G, H, dtype=torch.float64)
    return slot_terms(Chosen(), hidden, blocks, frozen, states, None, OBJECTIVE)


def test_half_is_half() -> None:
    """§9's counterexample: target uniform on 4, 2 kept, draft equal to the conditional: α = ½.

    Fault: acceptance from the renormalised teacher says 1.0.
    """
    terms = one_slot([0.0, 0.0], [0.0] * 4, label=0)
    assert terms.accept[0, 0, 0].item() == pytest.approx(0.5, abs=1e-15)
    assert terms.kept_mass[0, 0, 0].item() == pytest.approx(0.5, abs=1e-15)
    assert terms.l1[0, 0, 0].item() == pytest.approx(0.0, abs=1e-15)
    assert terms.accept[0, 0, 1:].tolist() == [0, 0, 0]


def test_terms_by_hand() -> None:
    """Faults: L1 halved; the conditional not renormalised; argmax ties to the higher id.

    q = (¾, ¼); teacher logits (ln 1, ln 3, ln 4): conditional (¼, ¾), true (⅛, ⅜).
    """
    teacher = [0.0, math.log(3), math.log(4)]
    terms = one_slot([math.log(3), 0.0], teacher, label=0)
    slot = (0, 0, 0)
    assert terms.l1[slot].item() == pytest.approx(1.0, abs=1e-14)  # |¾ − ¼| + |¼ − ¾|
    assert terms.accept[slot].item() == pytest.approx(0.125 + 0.25, abs=1e-14)
    assert terms.kept_mass[slot].item() == pytest.approx(0.5, abs=1e-14)
    assert terms.teacher_top[slot].item() == pytest.approx(0.375, abs=1e-14)
    assert terms.draft_top[slot].item() == pytest.approx(0.75, abs=1e-14)
    assert terms.ce[slot].item() == pytest.approx(math.log(4 / 3), abs=1e-14)
    assert terms.correct[slot].item() == 1
    assert terms.agrees[slot].item() == 0


def test_alpha_is_one_minus_half_l1_unpruned() -> None:
    """§8: unpruned acceptance keeps its arithmetic, bit for bit."""
    model, b = draft(**FULL), batch()
    terms = loss_of(model, b, target())[1].terms
    assert torch.equal(terms.accept, (1 - 0.5 * terms.l1.detach()).clamp(0, 1) * (terms.l1 != 0))


def test_sums_by_hand() -> None:
    """Fault: CE's denominator counting pruned labels; decay in an evaluation metric."""
    from torch_port.objective.loss import Denominators, Numerators

    n = Numerators(*(torch.tensor(v, dtype=torch.float64) for v in (6.0, 8.0, 4.0)))
    d = Denominators(*(torch.tensor(v, dtype=torch.float64) for v in (4.0, 2.0)))
    o = ObjectiveConfig(ce_alpha=0.5, l1_alpha=0.25, confidence_alpha=2.0)
    assert assemble_loss(n, d, o, prunes=True, ranks=1).item() == 0.5 * 6 / 2 + (2 + 8) / 4
    assert assemble_loss(n, d, o, prunes=False, ranks=1).item() == (3 + 2 + 8) / 4
    assert assemble_loss(n, d, o, prunes=True, ranks=3).item() == 3 * 4.0
    none = Denominators(d.den, torch.zeros((), dtype=torch.float64))
    off = ObjectiveConfig(ce_alpha=0.0, l1_alpha=0.25, confidence_alpha=2.0)
    assert assemble_loss(n, none, off, prunes=True, ranks=1).item() == 2.5


def test_errors_in_the_sheets_words() -> None:
    with pytest.raises(UserError, match=r"^no supervised target tokens"):
        check_denominators(0.0, 0.0, OBJECTIVE)
    with pytest.raises(UserError, match=r"^no in-vocabulary target tokens"):
        check_denominators(1.0, 0.0, OBJECTIVE)
    check_denominators(1.0, 0.0, ObjectiveConfig(ce_alpha=0.0))


@pytest.mark.parametrize("changes", [{}, FULL], ids=["pruned", "full"])
@pytest.mark.parametrize("bad_id", [-1, V, -100])
def test_poison_where_nothing_counts(changes: dict, bad_id: int) -> None:
    """Field-note 9: bad ids and NaN states at unsupervised places change nothing, bit for bit."""
    mask = [[0, 0] + [1] * 6 + [0] * 4]
    clean = batch(loss_mask=mask, anchors=[[2, 5]], keep=[[True, True]])
    model, frozen = draft(**changes), target()
    loss, _ = loss_of(model, clean, frozen)
    expected = gradients(model, loss)
    ids, states = clean.input_ids.clone(), clean.target_last_hidden_states.clone()
    ids[0, 8:] = bad_id
    # Teacher states are read up to the last label's predecessor, position 6.
    states[0, 7:] = torch.nan
    poisoned = type(clean)(**{**vars(clean), "input_ids": ids, "target_last_hidden_states": states})
    poisoned_loss, outcome = loss_of(model, poisoned, frozen)
    assert torch.equal(poisoned_loss, loss)
    got = gradients(model, poisoned_loss)
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    assert all(x.isfinite().all() for pair in outcome.metrics.values() for x in pair)


def test_nan_logits_where_nothing_counts() -> None:
    """Field-note 9: a weight of 0 does not stop a NaN's gradient; the slot is replaced first."""
    model, b, frozen = draft(), batch(), target()
    blocks = layout_blocks(model, b)
    hidden = model(blocks, b.hidden_states, b.anchor_positions, b.block_keep_mask, frozen)
    hidden = hidden.detach()
    bad = torch.where(blocks.evaluated[..., None], hidden, torch.nan).requires_grad_()

    def sums(states: Tensor) -> Tensor:
        t = slot_terms(model, states, blocks, frozen, b.target_last_hidden_states, None, OBJECTIVE)
        w = slot_weights(blocks.evaluated, 3.0, torch.float64)
        return (w * (t.ce + t.l1 + t.confidence_loss)).sum()

    clean = hidden.requires_grad_()
    assert torch.equal(sums(bad), sums(clean))
    model.zero_grad()
    torch.autograd.backward(sums(bad))
    w2 = model.markov_head.markov_w2.weight.grad
    assert w2 is not None
    assert w2.isfinite().all()
    assert bad.grad is not None
    assert bad.grad.isfinite().all()


def test_chunk_size_changes_nothing() -> None:
    """Faults: the last, shorter chunk dropped or padded."""
    model, b, frozen = draft(), batch(), target()
    blocks = layout_blocks(model, b)
    hidden = model(blocks, b.hidden_states, b.anchor_positions, b.block_keep_mask, frozen)
    runs = [
        slot_terms(model, hidden, blocks, frozen, b.target_last_hidden_states, None, OBJECTIVE, c)
        for c in (1, 4, 100)
    ]
    for other in runs[1:]:
        for name, value in vars(runs[0]).items():
            # The matrix product of more rows may block its sum differently: rounding only.
            torch.testing.assert_close(getattr(other, name), value, rtol=1e-13, atol=1e-13)


@settings(max_examples=30)
@given(
    rows=st.integers(1, 9),
    offset=st.sampled_from([0.0, 1e9, -1e9, 700.0]),
    seed=st.integers(0, 99),
)
def test_streamed_normaliser(rows: int, offset: float, seed: int) -> None:
    """Faults: overflow without the running maximum; a slice counted twice or left out."""
    g = torch.Generator().manual_seed(seed)
    states = torch.randn(3, 4, generator=g, dtype=torch.float64)
    head = torch.randn(7, 4, generator=g, dtype=torch.float64)
    states[:, 0], head[:, 0] = 1.0, offset
    expected = (states @ head.T).logsumexp(-1)
    torch.testing.assert_close(log_normalizer(states, head, rows), expected, rtol=1e-14, atol=1e-14)


def test_stored_normaliser_is_used_and_equal() -> None:
    """Fault: the normaliser gathered at the label instead of the teacher's position."""
    model, b, frozen = draft(), batch(), target()
    stored = log_normalizer(b.target_last_hidden_states, frozen.lm_head)
    with_it = type(b)(**{**vars(b), "target_log_normalizer": stored})
    assert torch.equal(loss_of(model, with_it, frozen)[0], loss_of(model, b, frozen)[0])
    shifted = type(b)(**{**vars(b), "target_log_normalizer": stored + 1})
    assert not torch.equal(loss_of(model, shifted, frozen)[0], loss_of(model, b, frozen)[0])


def test_detach_confidence_cuts_h_and_e() -> None:
    """Fault: only one of the head's inputs detached."""
    model, b, frozen = draft(), batch(), target()
    only = {"ce_alpha": 0.0, "l1_alpha": 0.0, "confidence_alpha": 1.0}
    attached, _ = loss_of(model, b, frozen, ObjectiveConfig(**only))
    moved = gradients(model, attached)
    assert moved["fc.weight"].abs().max() > 0
    assert moved["markov_head.markov_w1.weight"].abs().max() > 0
    cut, _ = loss_of(model, b, frozen, ObjectiveConfig(**only, detach_confidence=True))
    assert cut.item() == attached.item()
    rest = gradients(model, cut)
    for name, value in rest.items():
        if name.startswith("confidence_head"):
            assert torch.equal(value, moved[name])
        else:
            assert value.abs().max() == 0, name


class WidestTensor(TorchDispatchMode):
    """Remembers the largest number of elements of a tensor whose last axis is `width`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.shapes = width, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[-1] == self.width:
                self.shapes.add(tuple(leaf.shape))
        return result


def test_no_target_wide_tensor_in_a_pruned_step() -> None:
    """Fault: the full-V logits made at once. V = 1536 is wider than one slice of the head."""
    wide = 1536
    model = draft(vocab_size=wide, draft_vocab_size=None)
    kept = torch.arange(0, wide, 300)
    from torch_port.vocabulary.mapping import buffers_from_kept

    pruned = type(model)(model.config.model_copy(update={"draft_vocab_size": len(kept)})).double()
    pruned.install_vocab_mapping(*buffers_from_kept(kept, wide))
    b, frozen = batch(), target(vocab_size=wide)
    for candidate, expected in ((pruned, False), (model, True)):
        with WidestTensor(wide) as seen:
            loss, _ = loss_of(candidate, b, frozen)
            torch.autograd.backward(loss)
        assert bool(seen.shapes - {(H, wide), (3, wide)}) == expected  # transposed E, U and W1


@pytest.mark.parametrize("objective", ["plain", "fused"])
def test_no_device_sync_boolean_index_or_float64_in_the_step(objective: str) -> None:
    """Faults: `.item()`, `nonzero`, masked assignment or a float64 table inside the step."""

    class Watch(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen, self.doubles = set(), set()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            self.seen.add(func._schema.name)
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.dtype == torch.float64:
                    self.doubles.add(func._schema.name)
            return result

    model = draft().float()
    frozen = target()
    frozen = FrozenTarget(frozen.embed_tokens.float(), frozen.lm_head.float())
    b = batch().laid_out(G).to(torch.device("cpu"), torch.float32)
    model.compute = ComputeConfig(objective=objective)
    loss_of(model, b, frozen)  # index and rotary tables are made once, on the host
    with Watch() as watch:
        loss, _ = loss_of(model, b, frozen)
        torch.autograd.backward(loss)
    forbidden = {
        "aten::_local_scalar_dense",
        "aten::nonzero",
        "aten::masked_select",
        "aten::masked_scatter",
        "aten::index_put_",
        "aten::index",
    }
    assert not watch.seen & forbidden
    assert not watch.doubles


def test_bf16_teacher_keeps_its_mass() -> None:
    """Fault: teacher logits rounded to bf16 against a float32 normaliser: kept mass up to 1.28.

    Against float64 on the same bf16-rounded inputs; float32 products and sums of 8 terms: 1e-5.
    """
    b = batch().to(torch.device("cpu"), torch.bfloat16)
    exact = b.to(torch.device("cpu"), torch.float64)
    frozen = target()
    low = FrozenTarget(frozen.embed_tokens.bfloat16(), (6 * frozen.lm_head).bfloat16())
    high = FrozenTarget(low.embed_tokens.double(), low.lm_head.double())
    got = loss_of(draft().bfloat16(), b, low)[1].terms
    want = loss_of(draft(), exact, high)[1].terms
    assert got.kept_mass.max() <= 1 + 1e-6
    torch.testing.assert_close(got.kept_mass.double(), want.kept_mass, rtol=0, atol=1e-5)
