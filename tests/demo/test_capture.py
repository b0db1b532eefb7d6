"""Capture: which states are taken, that padding changes none, and the log normaliser."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from torch_port.data.capture import capture
from torch_port.data.conversations import DataError
from torch_port.objective.teacher import log_normalizer


class Add(nn.Module):
    def __init__(self, amount):
        super().__init__()
        self.amount = amount

    def forward(self, x):
        return x + self.amount


class Toy(nn.Module):
    """A target whose layer k adds 10^k to an embedding of ones, and whose norm negates."""

    def __init__(self, hidden=3, vocabulary=11):
        super().__init__()
        self.model = ToyDecoder(hidden)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)


class ToyDecoder(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden
        self.layers = nn.ModuleList(Add(10.0**k) for k in range(4))

    def forward(self, input_ids, use_cache):
        x = torch.ones(*input_ids.shape, self.hidden)
        for layer in self.layers:
            x = layer(x)
        return SimpleNamespace(last_hidden_state=-x)


def test_layer_ids_name_outputs_in_the_given_order():
    # Fault: field note 25, ids off by one (the input of layer i would give 1, 2, 12) or sorted.
    (states,) = capture(Toy(), [torch.tensor([5, 6])], (2, 0, 1))
    expected = torch.tensor([112.0] * 3 + [2.0] * 3 + [12.0] * 3).expand(2, 9)
    assert torch.equal(states.hidden_states, expected)
    # After the final norm: the raw last layer would be +1112.
    assert torch.equal(states.target_last_hidden_states, torch.full((2, 3), -1112.0))


@pytest.mark.parametrize("ids", [(3,), (0, 3), (1, 1), (4,), (-1,), ()])
def test_unservable_layer_ids_are_refused(ids):
    # Fault: the last layer (normalised by transformers), duplicates, python's negative indices.
    with pytest.raises(DataError, match=r"target_layer_ids: .*distinct layers from 0 to 2 of 4"):
        next(capture(Toy(), [torch.tensor([1])], ids))


@pytest.fixture(scope="module")
def qwen3():
    from torch_port.demo.target import silence_transformers

    silence_transformers()
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=97,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        tie_word_embeddings=False,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Qwen3ForCausalLM(config).eval()


def test_batched_equals_single_and_transformers_own_hidden_states(qwen3):
    # Fault: padding that is seen, or results handed out in the order of lengths.
    draw = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, 97, (n,), generator=draw) for n in (9, 2, 13, 5, 7, 1)]
    batched = list(capture(qwen3, ids, (1, 0), batch_size=4, head_rows=10))
    # float32 sums in another order: a few ulp of states of size about 10.
    close = {"rtol": 1e-5, "atol": 1e-5}
    for one, got in zip(ids, batched, strict=True):
        with torch.no_grad():
            out = qwen3(input_ids=one[None], output_hidden_states=True, use_cache=False)
        states = torch.cat([out.hidden_states[2], out.hidden_states[1]], -1)[0]
        torch.testing.assert_close(got.hidden_states, states, **close)
        torch.testing.assert_close(got.target_last_hidden_states, out.hidden_states[-1][0], **close)
        (single,) = capture(qwen3, [one], (1, 0))
        torch.testing.assert_close(got.hidden_states, single.hidden_states, **close)
        torch.testing.assert_close(got.target_log_normalizer, single.target_log_normalizer, **close)
        torch.testing.assert_close(got.target_log_normalizer, out.logits[0].logsumexp(-1), **close)
        assert not got.hidden_states.requires_grad


@pytest.mark.parametrize("rows", [1, 7, 50, 64, 1000])
def test_log_normalizer_against_float64(rows):
    # Fault: a last slice that is dropped or counted twice; overflow where logits reach 1e3.
    draw = torch.Generator().manual_seed(2)
    states = torch.randn(6, 8, generator=draw) * torch.tensor([1.0, 10, 100, 300, 0, 1])[:, None]
    head = torch.randn(50, 8, generator=draw)
    exact = torch.logsumexp(states.double() @ head.double().T, -1)
    got = log_normalizer(states, head, rows)
    assert got.dtype == torch.float32
    # float32 logits up to about 1e3 carry 1e-7 relative error each, over 8 products.
    torch.testing.assert_close(got.double(), exact, rtol=2e-6, atol=2e-6)


def test_log_normalizer_of_bf16_states_is_float32():
    # Fault: the sum taken in bf16, which is off in the third digit.
    states = torch.randn(4, 8, generator=torch.Generator().manual_seed(3)).bfloat16()
    head = torch.randn(50, 8, generator=torch.Generator().manual_seed(4)).bfloat16()
    exact = torch.logsumexp(states.double() @ head.double().T, -1)
    got = log_normalizer(states, head)
    # Products of bf16 values are exact in float32; what is left is float32 summation.
    torch.testing.assert_close(got.double(), exact, rtol=2e-6, atol=2e-6)
