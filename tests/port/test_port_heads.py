"""Markov and confidence heads, by hand."""

import math

import pytest
import torch
from toys import KEPT, V, config, draft

from torch_port.models.heads import ConfidenceHead, GatedMarkovHead, MarkovHead, RecurrentMarkovHead


def set_(parameter: torch.nn.Parameter, values: object) -> None:
    with torch.no_grad():
        parameter.copy_(torch.as_tensor(values, dtype=parameter.dtype))


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def test_field_note_28_w1_reads_target_ids() -> None:
    """Fault: W1 read with draft ids; nothing raises. The bias fires after target token 9."""
    head = MarkovHead(config())
    w1 = torch.zeros(V, 3)
    w1[9, 0] = 1
    set_(head.markov_w1.weight, w1)
    w2 = torch.zeros(len(KEPT), 3)
    w2[1, 0] = 5
    set_(head.markov_w2.weight, w2)
    previous = torch.tensor([[9, 3, 0, 12]])
    bias = head.bias(torch.zeros(1, 4, 8), head.embed(previous))
    assert bias[0, 0].tolist() == [0, 5, 0, 0, 0]
    assert bias[0, 1:].abs().max() == 0  # draft id 3 stands for 9, target id 3 does not


def test_gated_by_hand() -> None:
    """Fault: [e; h] for [h; e], or the gate applied to h."""
    c = config(markov_head_type="gated", markov_rank=1).model_copy(update={"hidden_size": 1})
    head = GatedMarkovHead(c).double()
    set_(head.gate_proj.weight, [[2.0, -1.0]])
    set_(head.gate_proj.bias, [0.5])
    h, e = torch.tensor([[0.3]]).double(), torch.tensor([[0.7]]).double()
    assert head.code(h, e).item() == pytest.approx(sigmoid(2 * 0.3 - 0.7 + 0.5) * 0.7)


def test_recurrent_by_hand() -> None:
    """Faults: columns in another order, s and 1 − s swapped, state carried between blocks."""
    c = config(markov_head_type="rnn", markov_rank=1).model_copy(update={"hidden_size": 1})
    head = RecurrentMarkovHead(c).double()
    weight = [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, 0.9]]
    set_(head.joint_proj.weight, weight)
    set_(head.joint_proj.bias, [0.01, 0.02, 0.03])
    h = torch.tensor([[[1.0], [2.0]]] * 2).double()
    e = torch.tensor([[[3.0], [4.0]]] * 2).double()
    state, expected = 0.0, []
    for hk, ek in ((1.0, 3.0), (2.0, 4.0)):
        g, cand, o = (
            w[0] * state + w[1] * ek + w[2] * hk + b
            for w, b in zip(weight, (0.01, 0.02, 0.03), strict=True)
        )
        expected.append(math.tanh(o))
        state = sigmoid(g) * state + (1 - sigmoid(g)) * math.tanh(cand)
    for block in range(2):
        assert head.code(h, e)[block, :, 0].tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_by_hand(with_markov: bool) -> None:
    """Fault: e before h, or e read where the head has no column for it."""
    c = config(confidence_head_with_markov=with_markov, markov_rank=1)
    head = ConfidenceHead(c.model_copy(update={"hidden_size": 1})).double()
    set_(head.proj.weight, [[2.0, 3.0]] if with_markov else [[2.0]])
    set_(head.proj.bias, [0.5])
    e = torch.tensor([[10.0]]).double() if with_markov else None
    logit = head(torch.tensor([[1.0]]).double(), e)
    assert logit.tolist() == [32.5 if with_markov else 2.5]


def test_initialisation() -> None:
    """§5. Fault: W2 at zero, biases drawn, norms drawn, or another draw for the same seed."""
    model = draft(markov_head_type="rnn", draft_vocab_size=None, scale=1.0)
    for name, p in model.named_parameters():
        if name.endswith("norm.weight"):
            assert (p == 1).all()
        elif p.dim() > 1:
            # The deviation of n draws is within 5 / √(2n) of 0.02, relatively.
            assert p.std().item() == pytest.approx(0.02, rel=5 / math.sqrt(2 * p.numel())), name
    same = draft(markov_head_type="rnn", draft_vocab_size=None, scale=1.0)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), same.parameters(), strict=True)
    )
    fresh = draft(markov_head_type="rnn", draft_vocab_size=None, scale=1.0)
    fresh.initialise(torch.Generator().manual_seed(0))
    assert all((p == 0).all() for n, p in fresh.named_parameters() if n.endswith("bias"))
