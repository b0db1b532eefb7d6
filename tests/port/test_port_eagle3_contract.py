"""EAGLE3's contract: names in the state dict, maps, the borrowed embedding, refused configs."""

import pytest
import torch
from eagle3_toys import SIZES, eagle3_batch, eagle3_draft
from torch import Tensor
from toys import KEPT, H, V, target, toy_map

from torch_port.config_eagle3 import Eagle3Config, Eagle3Objective
from torch_port.data.batch import Batch
from torch_port.errors import UserError
from torch_port.models.dspark import FrozenTarget
from torch_port.models.eagle3 import Eagle3Draft
from torch_port.objective.eagle3 import forward_eagle3, prepare_eagle3
from torch_port.vocabulary.mapping import buffers_from_kept


def ce_sums(model: Eagle3Draft, batch: Batch, frozen: FrozenTarget) -> Tensor:
    prepared = prepare_eagle3(model, batch, frozen)
    return forward_eagle3(model, prepared, frozen, Eagle3Objective(steps=2)).numerators


NAMES = {
    "fc.weight": (H, 3 * H),
    "midlayer.input_layernorm.weight": (H,),
    "midlayer.hidden_norm.weight": (H,),
    "midlayer.post_attention_layernorm.weight": (H,),
    "midlayer.self_attn.q_proj.weight": (16, 2 * H),
    "midlayer.self_attn.k_proj.weight": (8, 2 * H),
    "midlayer.self_attn.v_proj.weight": (8, 2 * H),
    "midlayer.self_attn.o_proj.weight": (H, 16),
    "midlayer.mlp.gate_proj.weight": (12, H),
    "midlayer.mlp.up_proj.weight": (12, H),
    "midlayer.mlp.down_proj.weight": (H, 12),
    "norm.weight": (H,),
    "embed_tokens.weight": (V, H),
    "t2d": (V,),
}


@pytest.mark.parametrize("K", [len(KEPT), V])
def test_state_dict_names_and_identity(K: int) -> None:
    """Contracts §1, §4. Faults: buffers that vanish at K = V, an embedding that is trained."""
    model = Eagle3Draft(Eagle3Config(**(SIZES | {"draft_vocab_size": K})))
    found = {name: tuple(x.shape) for name, x in model.state_dict().items()}
    assert found == NAMES | {"lm_head.weight": (K, H), "d2t": (K,)}
    assert {n for n, _ in model.named_parameters()} == {
        name for name in found if name not in ("embed_tokens.weight", "t2d", "d2t")
    }
    if K == V:
        model.install_vocab_mapping(*buffers_from_kept(torch.arange(V), V))
        assert model.t2d.all()
        assert not model.d2t.any()
    else:
        assert not model.t2d.any()
        with pytest.raises(UserError, match="no vocabulary map is installed"):
            ce_sums(model.double(), eagle3_batch(), target())
        with pytest.raises(UserError, match="no vocabulary map is installed"):
            model(eagle3_batch().input_ids, eagle3_batch().hidden_states, target(), 1)


def test_another_embedding_or_map_is_refused_before_it_is_taken() -> None:
    """Faults: a checkpoint of another target that overwrites the embedding in the target's own
    memory; head rows that come to mean other tokens (field-note 1)."""
    model, b, frozen = eagle3_draft(), eagle3_batch(), target()
    ce_sums(model, b, frozen)
    assert model.embed_tokens.weight is frozen.embed_tokens  # shared, not copied
    saved = {name: x.clone() for name, x in model.state_dict().items()}
    other = {**saved, "embed_tokens.weight": saved["embed_tokens.weight"] + 1}
    before = frozen.embed_tokens.clone()
    with pytest.raises(UserError, match="another target's embedding"):
        model.load_state_dict(other)
    assert torch.equal(frozen.embed_tokens, before)
    fresh = Eagle3Draft(model.config).double()
    fresh.load_state_dict(saved)
    assert torch.equal(ce_sums(fresh, b, frozen), ce_sums(model, b, frozen))
    fresh.load_state_dict(saved)
    with pytest.raises(UserError, match="another target's embedding"):
        ce_sums(fresh, b, target(seed=9))
    t2d, d2t = buffers_from_kept(torch.tensor([0, 3, 4, 9, 13]), V)
    with pytest.raises(UserError, match="another vocabulary map"):
        fresh.load_state_dict({**saved, "t2d": t2d, "d2t": d2t})
    with pytest.raises(UserError, match="another vocabulary map"):
        fresh.install_vocab_mapping(t2d, d2t)
    fresh.install_vocab_mapping(*toy_map())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_layer_ids": (0, 2)}, "must be 3 layers, ascending"),
        ({"target_layer_ids": (4, 2, 0)}, "must be 3 layers, ascending"),
        ({"target_layer_ids": (0, 2, 5)}, "the last layer"),
        ({"num_key_value_heads": 3}, "must be a multiple of"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"draft_vocab_size": V + 1}, "draft_vocab_size is 17"),
        ({"draft_vocab_size": True}, "draft_vocab_size"),
        ({"num_hidden_layers": 1}, "num_hidden_layers"),
    ],
)
def test_config_refuses(changes: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        Eagle3Config(**(SIZES | changes))


def test_map_of_another_size_is_refused() -> None:
    """Fault: a K = V draft that takes a pruned map."""
    model = Eagle3Draft(Eagle3Config(**(SIZES | {"draft_vocab_size": 16})))
    with pytest.raises(UserError, match="draft_vocab_size"):
        model.install_vocab_mapping(*buffers_from_kept(torch.tensor([0, 3, 4, 9, 12]), 16))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("kind", ["never ran", "bf16"])
def test_a_load_does_not_write_into_the_targets_embedding(kind: str, assign: bool) -> None:
    """Faults: zeros of a draft that never ran, or a rounded copy, written over the target's E."""
    frozen, b = target(), eagle3_batch()
    before = frozen.embed_tokens.clone()
    model = eagle3_draft()
    wanted = model(b.input_ids, b.hidden_states, frozen, 2)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    E = state["embed_tokens.weight"]
    state["embed_tokens.weight"] = torch.zeros_like(E) if kind == "never ran" else E.bfloat16()
    model.load_state_dict(state, assign=assign)
    assert torch.equal(frozen.embed_tokens, before)
    got = model(b.input_ids, b.hidden_states, frozen, 2)
    assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))
