"""What each query sees, cell by cell, and the backbone against the sheet written as loops."""

import math

import pytest
import torch
from toys import G, S, batch, draft, target

from torch_port.config import ObjectiveConfig
from torch_port.device import rotary
from torch_port.models.attention import dense_mask, rotary_tables
from torch_port.objective.evaluate import forward_batch, layout_blocks


def seen(mask: torch.Tensor, query: int) -> list[int]:
    return mask[0, 0, query].nonzero().squeeze(1).tolist()


def test_full_visibility_by_hand() -> None:
    """Faults: the anchor's own state in the context; a neighbour's block visible."""
    mask = dense_mask(torch.tensor([[2, 4]]), torch.ones(1, 2, dtype=torch.bool), 6, 2, None)
    own = {0: [6, 7], 1: [8, 9]}
    for query in range(4):
        block = query // 2
        assert seen(mask, query) == list(range([2, 4][block])) + own[block]


def test_sliding_visibility_by_hand() -> None:
    """Faults: window off by one; window cutting inside the block; own slots after j visible."""
    mask = dense_mask(torch.tensor([[5]]), torch.ones(1, 1, dtype=torch.bool), 8, 3, 3)
    # Slot j sees s ≥ 5 + j − 2 and s < 5, and own slots ≤ j (keys 8, 9, 10).
    assert seen(mask, 0) == [3, 4, 8]
    assert seen(mask, 1) == [4, 8, 9]
    assert seen(mask, 2) == [8, 9, 10]


def test_states_at_or_after_an_anchor_do_not_matter() -> None:
    """Field-note 7: anchors 2 and 4; the block's states must not move with later features."""
    b = batch(loss_mask=[[1.0] * S], anchors=[[2, 4]], keep=[[True, True]])
    model, frozen = draft(), target()

    def hidden(changed_from: int) -> torch.Tensor:
        states = b.hidden_states.clone()
        states[:, changed_from:] += 1.0
        blocks = layout_blocks(model, b)
        return model(blocks, states, b.anchor_positions, b.block_keep_mask, frozen)

    clean = hidden(S)
    assert torch.equal(hidden(4), clean)
    assert torch.equal(hidden(2)[0, 0], clean[0, 0])
    assert not torch.equal(hidden(2)[0, 1], clean[0, 1])
    assert not torch.equal(hidden(1)[0, 0], clean[0, 0])


def test_rotation_is_half_split() -> None:
    """Fault: interleaved pairs. Position 1, d = 4: x₀ pairs with x₂ at angle 1, x₁ with x₃."""
    cos, sin = rotary_tables(2, 4, 10000.0, torch.float64, torch.device("cpu"))
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    a, b = 1.0, 0.01  # 10000^(-0/4), 10000^(-2/4)
    expected = [
        math.cos(a) - 3 * math.sin(a),
        2 * math.cos(b) - 4 * math.sin(b),
        3 * math.cos(a) + math.sin(a),
        4 * math.cos(b) + 2 * math.sin(b),
    ]
    torch.testing.assert_close(
        rotary(x, cos[1], sin[1]), torch.tensor(expected, dtype=torch.float64), rtol=1e-14, atol=0
    )


def _norm(x: torch.Tensor, module: torch.nn.Module) -> torch.Tensor:
    return x * (x.pow(2).mean(-1, keepdim=True) + module.eps) ** -0.5 * module.weight


def _turn(x: torch.Tensor, position: int, theta: float) -> torch.Tensor:
    d = len(x)
    out = x.clone()
    for i in range(d // 2):
        angle = position * theta ** (-2 * i / d)
        out[i] = x[i] * math.cos(angle) - x[i + d // 2] * math.sin(angle)
        out[i + d // 2] = x[i + d // 2] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def reference_hidden(model, b, frozen, row: int, n: int) -> torch.Tensor:
    """§5 for one block, a query and a head at a time."""
    c = model.config
    a = int(b.anchor_positions[row, n])
    context = _norm(b.hidden_states[row] @ model.fc.weight.T, model.hidden_norm)
    ids = [int(b.input_ids[row, a])] + [c.mask_token_id] * (G - 1)
    y = frozen.embed_tokens[ids]
    D, groups = c.head_dim, c.num_attention_heads // c.num_key_value_heads
    for layer, kind in zip(model.layers, c.layer_types, strict=True):
        att = layer.self_attn
        u = _norm(y, layer.input_layernorm)
        places = list(range(S)) + [a + j for j in range(G)]
        source = torch.cat([context, u])
        k = (source @ att.k_proj.weight.T).view(-1, c.num_key_value_heads, D)
        v = (source @ att.v_proj.weight.T).view(-1, c.num_key_value_heads, D)
        q = (u @ att.q_proj.weight.T).view(G, c.num_attention_heads, D)
        out = torch.zeros(G, c.num_attention_heads, D, dtype=y.dtype)
        for j in range(G):
            lowest = 0 if kind == "full_attention" else a + j - (c.sliding_window - 1)
            last = G - 1 if kind == "full_attention" else j
            visible = [s for s in range(a) if s >= lowest] + [S + i for i in range(last + 1)]
            for head in range(c.num_attention_heads):
                qr = _turn(_norm(q[j, head], att.q_norm), a + j, c.rope_theta)
                keys = [
                    _turn(_norm(k[s, head // groups], att.k_norm), places[s], c.rope_theta)
                    for s in visible
                ]
                scores = torch.stack([qr @ key for key in keys]) / math.sqrt(D)
                out[j, head] = scores.softmax(0) @ v[visible, head // groups]
        y = y + out.flatten(1) @ att.o_proj.weight.T
        w = _norm(y, layer.post_attention_layernorm)
        gate, up = w @ layer.mlp.gate_proj.weight.T, w @ layer.mlp.up_proj.weight.T
        y = y + (gate * torch.sigmoid(gate) * up) @ layer.mlp.down_proj.weight.T
    return _norm(y, model.norm)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4, "attention_mode": "mha"},
        {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3},
    ],
)
def test_backbone_against_loops(changes: dict) -> None:
    """float64; sums in another order differ by about 1e-15 of the largest value, 1e-12 is safe."""
    model, b, frozen = draft(**changes), batch(), target()
    with torch.no_grad():
        blocks = layout_blocks(model, b)
        hidden = model(blocks, b.hidden_states, b.anchor_positions, b.block_keep_mask, frozen)
        for row, n in ((0, 0), (0, 2), (1, 1)):
            torch.testing.assert_close(
                hidden[row, n], reference_hidden(model, b, frozen, row, n), rtol=0, atol=1e-12
            )


def test_dropped_block_attends_to_nothing() -> None:
    """Fault: NaN from an empty softmax row, in the values or in the gradients."""
    model, b, frozen = draft(), batch(), target()
    captured = {}

    def keep_input(module, inputs):
        captured["attention"] = inputs[0]

    hook = model.layers[0].self_attn.o_proj.register_forward_pre_hook(keep_input)
    outcome = forward_batch(model, b, frozen, ObjectiveConfig())
    hook.remove()
    dropped = captured["attention"].view(2, 3, G, -1)[1, 2]
    assert torch.equal(dropped, torch.zeros_like(dropped))
    torch.autograd.backward(outcome.hidden.sum())
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
