"""The modules (§4 to §6): what they see, and their arithmetic in loops or by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_toys import HIDDEN, SEQ, SLOTS, K, V, batch, config, params, shapes, target, toy_map

from jaxdraft import ObjectiveConfig, evaluate
from jaxdraft.backbone import (
    Backbone,
    RMSNorm,
    Visibility,
    attend,
    linear,
    masked_softmax,
    rms_norm,
    rotate,
)
from jaxdraft.heads import MARKOV_HEADS

OBJECTIVE = ObjectiveConfig(loss_decay_gamma=4.0)


def paths(of):
    tree = jax.tree_util.tree_leaves_with_path(shapes(of))
    return {"/".join(e.key for e in path): leaf.shape for path, leaf in tree}


def test_parameter_tree():
    # Fault: a renamed, missing or extra parameter; W1 with K rows; kernels the other way round.
    layer = "layers_0/"
    expected = {
        "fc/kernel": (16, 8),
        "hidden_norm/scale": (8,),
        "norm/scale": (8,),
        layer + "input_layernorm/scale": (8,),
        layer + "post_attention_layernorm/scale": (8,),
        layer + "self_attn/q_proj/kernel": (8, 8),
        layer + "self_attn/k_proj/kernel": (8, 4),
        layer + "self_attn/v_proj/kernel": (8, 4),
        layer + "self_attn/o_proj/kernel": (8, 8),
        layer + "self_attn/q_norm/scale": (4,),
        layer + "self_attn/k_norm/scale": (4,),
        layer + "mlp/gate_proj/kernel": (8, 12),
        layer + "mlp/up_proj/kernel": (8, 12),
        layer + "mlp/down_proj/kernel": (12, 8),
        "markov_head/markov_w1/embedding": (V, 3),
        "markov_head/markov_w2/kernel": (3, K),
        "confidence_head/proj/kernel": (HIDDEN + 3, 1),
        "confidence_head/proj/bias": (1,),
    }
    assert paths(config()) == expected
    gated = paths(config(markov_head_type="gated", confidence_head_with_markov=False))
    assert gated["markov_head/gate_proj/kernel"] == (11, 3)
    assert gated["markov_head/gate_proj/bias"] == (3,)
    assert gated["confidence_head/proj/kernel"] == (8, 1)
    rnn = paths(config(markov_head_type="rnn"))
    assert rnn["markov_head/joint_proj/kernel"] == (14, 9)
    assert rnn["markov_head/joint_proj/bias"] == (9,)
    bare = paths(
        config(markov_rank=0, confidence_head_with_markov=False, enable_confidence_head=False)
    )
    assert not [path for path in bare if "head" in path]


def test_initialisation():
    # Fault: another scale than initializer_range, a norm that starts at 0.
    of = config(initializer_range=0.5)
    dense = linear(of, 64, "float64", bias=True).init(jax.random.key(0), jnp.zeros((1, 128)))
    # 8192 draws: the estimate's own deviation is 0.5/√16384 = 0.004; 5 σ
    assert np.asarray(dense["params"]["kernel"]).std() == pytest.approx(0.5, abs=0.02)
    assert (np.asarray(dense["params"]["bias"]) == 0).all()
    norm = RMSNorm(1e-6, 3, "float64").init(jax.random.key(0), jnp.zeros((1, 3)))
    assert norm["params"]["scale"].tolist() == [1, 1, 1]


def test_rms_norm_by_hand():
    # Fault: a mean that is subtracted, a sum instead of a mean, eps outside the root.
    got = rms_norm(jnp.array([[3.0, 4.0]]), jnp.array([1.0, 2.0]), 0.5)
    np.testing.assert_allclose(got[0], [3 / math.sqrt(13), 8 / math.sqrt(13)], rtol=1e-15)


def test_rotary_by_hand():
    # Faults: interleaved pairs, the turn the other way, exponents over d/2 instead of d.
    x = jnp.array([[1.0, 2.0, 3.0, 4.0]])[None]
    got = rotate(x, jnp.array([2]), theta=100.0)[0, 0]
    c0, s0, c1, s1 = math.cos(2), math.sin(2), math.cos(0.2), math.sin(0.2)
    by_hand = [c0 - 3 * s0, 2 * c1 - 4 * s1, 3 * c0 + s0, 4 * c1 + 2 * s1]
    # cosines of two libraries
    np.testing.assert_allclose(got, by_hand, rtol=1e-14)


def test_softmax_that_sees_nothing():
    # Fault: NaN, or a uniform mixture, in a dropped block, in the value or in the gradient.
    visible = jnp.array([[True, True, False], [False, False, False]])
    scores = jnp.array([[0.0, 0.0, 1e9], [1e9, -1e9, 0.0]])
    assert masked_softmax(scores, visible).tolist() == [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]
    grad = jax.grad(lambda s: masked_softmax(s, visible)[0, 0] + s.sum() * 0)(scores)
    assert grad.tolist() == [[0.25, -0.25, 0.0], [0.0, 0.0, 0.0]]


def test_attention_against_loops():
    # Faults: query head i reading kv head i mod kv_heads; a scale other than d^(−½).
    rng = np.random.default_rng(0)
    heads, kv, dim, seq, slots = 4, 2, 3, 5, 2
    q = rng.normal(size=(1, 1, slots, heads, dim))
    ck, cv = rng.normal(size=(2, 1, seq, kv, dim))
    ok, ov = rng.normal(size=(2, 1, 1, slots, kv, dim))
    context, own = rng.random((1, 1, slots, seq)) > 0.4, np.ones((1, 1, slots, slots), bool)
    visible = Visibility(jnp.asarray(context), jnp.asarray(own))
    got = attend(*(jnp.asarray(x) for x in (q, ck, cv, ok, ov)), visible)
    for j in range(slots):
        for i in range(heads):
            h = i * kv // heads
            keys = np.concatenate([ck[0, context[0, 0, j], h], ok[0, 0, :, h]])
            values = np.concatenate([cv[0, context[0, 0, j], h], ov[0, 0, :, h]])
            weight = np.exp(keys @ q[0, 0, j, i] / math.sqrt(dim))
            # two orders of summation of at most 7 terms
            np.testing.assert_allclose(
                got[0, 0, j, i], weight @ values / weight.sum(), rtol=0, atol=1e-14
            )


FULL = ["##....|###"] * 3 + ["####..|###"] * 3 + ["......|#..", "......|.#.", "......|..#"]
SLIDING = [
    *("##....|#..", ".#....|##.", "......|###"),
    *("..##..|#..", "...#..|##.", "......|###"),
    *("......|#..", "......|.#.", "......|..#"),
]


@pytest.mark.parametrize(
    ("changes", "table"),
    [({}, FULL), ({"layer_types": ["sliding_attention"], "sliding_window": 3}, SLIDING)],
)
def test_what_a_slot_of_a_one_layer_backbone_depends_on(changes, table):
    # Faults: a mask that is right but not wired in; context that includes the anchor; blocks that
    # leak into each other. The last block is dropped: each slot depends on itself alone.
    of = config(block_size=3, **changes)
    rng = np.random.default_rng(0)
    states, embedded = rng.normal(size=(1, 6, 16)), rng.normal(size=(1, 3, 3, HIDDEN))
    anchors, keep = jnp.array([[2, 4, 3]]), jnp.array([[True, True, False]])
    own = {k: v for k, v in params(of).items() if not k.endswith("_head")}

    def hidden(states, embedded):
        h = Backbone(of, "float64").apply({"params": own}, states, embedded, anchors, keep)
        return jnp.square(h[0] - 0.1).sum(axis=-1)

    by_state, by_slot = jax.jit(jax.jacrev(hidden, argnums=(0, 1)))(
        jnp.asarray(states), jnp.asarray(embedded)
    )
    sees_state = np.abs(by_state[:, :, 0]).max(axis=-1) > 0
    sees_slot = np.abs(by_slot[:, :, 0]).max(axis=-1) > 0  # block, slot, other block, other slot
    for n in range(3):
        assert not np.delete(sees_slot[n], n, axis=1).any()
    rows = [
        "".join(".#"[s] for s in sees_state[n, j].astype(int))
        + "|"
        + "".join(".#"[s] for s in sees_slot[n, j, n].astype(int))
        for n in range(3)
        for j in range(3)
    ]
    assert rows == table


def test_states_at_or_after_an_anchor_do_not_move_its_block_note_7():
    # Fault (note 7): visibility by block index lets overlapping blocks leak.
    of, clean = config(), batch(anchor_positions=jnp.array([[2, 4, 7], [2, 4, 0]]))
    seen = evaluate(of, OBJECTIVE, params(of), target(), toy_map(), clean)
    for n, anchor in ((0, 2), (1, 4)):
        moved = clean._replace(hidden_states=clean.hidden_states.at[:, anchor:].add(3.0))
        after = evaluate(of, OBJECTIVE, params(of), target(), toy_map(), moved)
        # the same program; unseen keys weigh exactly 0
        np.testing.assert_array_equal(after.draft_logits[:, n], seen.draft_logits[:, n])
        assert (np.asarray(after.draft_logits[0, 2]) != np.asarray(seen.draft_logits[0, 2])).any()


def test_states_that_nothing_sees_may_be_nan():
    # Fault (note 9): NaN behind the last kept anchor times a weight of 0. The gradients of such a
    # case are compared with the port's by parity's edges.
    of, clean = (
        config(),
        batch(
            anchor_positions=jnp.array([[2, 4, 5], [2, 4, 7]]),
            block_keep_mask=jnp.array([[True, True, True], [True, True, False]]),
        ),
    )
    spoilt = clean._replace(hidden_states=clean.hidden_states.at[:, 5:].set(jnp.nan))
    got, want = (
        evaluate(of, OBJECTIVE, params(of), target(), toy_map(), b) for b in (spoilt, clean)
    )
    assert float(got.loss) == float(want.loss)
    np.testing.assert_array_equal(got.hidden, want.hidden)


def test_w1_is_read_with_target_ids_note_28():
    # Fault: W1 read with draft ids. A bias that fires after target token 9 (draft id 3) only.
    of = config(confidence_head_with_markov=False)
    weights = params(of)
    head = {
        "markov_w1": {"embedding": jnp.zeros((V, 3)).at[9].set(1.0)},
        "markov_w2": {"kernel": jnp.ones((3, K))},
    }
    silent = {**head, "markov_w1": {"embedding": jnp.zeros((V, 3))}}
    ids = jnp.tile(jnp.array([[9, 3, 0, 9, 3, 12, 4, 9, 9, 3]]), (2, 1))
    args = target(), toy_map(), batch(input_ids=ids, loss_mask=jnp.ones((2, SEQ)))
    on = evaluate(of, OBJECTIVE, {**weights, "markov_head": head}, *args)
    off = evaluate(of, OBJECTIVE, {**weights, "markov_head": silent}, *args)
    bias = np.asarray(on.draft_logits - off.draft_logits)[1]
    # anchors 0 and 4: previous tokens 9 3 0 9 and 3 12 4 9; a difference of logits of size 1e1
    expected = [[3, 0, 0, 3], [0, 0, 0, 3]]
    np.testing.assert_allclose(
        bias[:2], np.broadcast_to(np.array(expected)[:, :, None], (2, SLOTS, K)), atol=1e-13
    )


def scalar_head(kind, tree, e, h):
    """A head of rank 1 on one block of a draft with H = 2 and K = 1."""
    of = config(
        markov_head_type=kind, markov_rank=1, hidden_size=2, draft_vocab_size=1, block_size=3
    )
    model = MARKOV_HEADS[kind](of, "float64")
    base = {"markov_w1": {"embedding": jnp.zeros((V, 1))}, "markov_w2": {"kernel": one(2.0)}}
    arrays = jnp.array(e)[None, None, :, None], jnp.array(h)[None, None]
    return model.apply({"params": {**base, **tree}}, *arrays)[0, 0, :, 0]


def one(x):
    return jnp.array([[x]])


E = [0.5, -1.0, 2.0]
H = [[1.0, 0.0], [0.0, 1.0], [-1.0, 2.0]]


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


def test_gated_head_by_hand():
    # Fault: [e; h] instead of [h; e], or the gate applied to W2·e.
    tree = {"gate_proj": {"kernel": jnp.array([[0.3], [-0.2], [0.7]]), "bias": jnp.array([0.1])}}
    got = scalar_head("gated", tree, E, H)
    by_hand = [
        2 * sigmoid(0.3 * h[0] - 0.2 * h[1] + 0.7 * e + 0.1) * e for e, h in zip(E, H, strict=True)
    ]
    np.testing.assert_allclose(got, by_hand, rtol=1e-14)


def test_rnn_head_by_hand():
    # Faults: columns [s; e; h] or rows [g; c; o] in another order; a state kept across blocks;
    # the bias taken from the state instead of tanh(o).
    wj = np.array([[0.4, -0.3, 0.2], [0.1, 0.5, -0.6], [0.7, 0.2, 0.3], [-0.2, 0.6, 0.9]])
    bj = [0.05, -0.1, 0.15]
    tree = {"joint_proj": {"kernel": jnp.asarray(wj), "bias": jnp.array(bj)}}
    s, by_hand = 0.0, []
    for e, h in zip(E, H, strict=True):
        g, c, o = ([s, e, *h] @ wj + bj).tolist()
        s = sigmoid(g) * s + (1 - sigmoid(g)) * math.tanh(c)
        by_hand.append(2 * math.tanh(o))
    np.testing.assert_allclose(scalar_head("rnn", tree, E, H), by_hand, rtol=1e-14)
