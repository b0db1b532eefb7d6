"""The name table, both ways, and its kernel rule."""

import numpy as np
import pytest

from parity.names import TABLE, flax_path, to_flax, to_torch, torch_name


def numbered(rule_name: str, layer: int) -> str:
    return rule_name.replace("{i}", str(layer))


@pytest.mark.parametrize("rule", TABLE, ids=lambda rule: rule.torch)
def test_every_rule_goes_both_ways(rule) -> None:
    """Fault: one direction of the table edited alone. Layer 10 must not become layer 1."""
    for layer in (0, 10):
        name, path = numbered(rule.torch, layer), numbered(rule.flax, layer)
        assert flax_path(name) == (path, rule.transpose)
        assert torch_name(path) == (name, rule.transpose)


def test_exactly_the_kernels_transpose() -> None:
    """Fault: one kernel of the table not transposed; q_proj and o_proj are often square."""
    for rule in TABLE:
        assert rule.transpose == rule.flax.endswith("/kernel"), rule.torch


def test_kernels_transpose_by_name_even_when_square() -> None:
    """Fault: a kernel not transposed; on a square one no shape would tell."""
    square = np.arange(9.0).reshape(3, 3)
    tree = to_flax({"fc.weight": square, "markov_head.markov_w1.weight": square})
    assert tree["fc"]["kernel"].tolist() == square.T.tolist()
    assert tree["markov_head"]["markov_w1"]["embedding"].tolist() == square.tolist()


def test_round_trip_is_the_identity() -> None:
    """Faults: names merged, layers overwritten (field-note 24: each filled with its index)."""
    random = np.random.default_rng(0)
    state = {
        numbered(rule.torch, layer): random.normal(size=(3, 4))
        if rule.transpose
        else random.normal(size=5)
        for rule in TABLE
        for layer in range(11)
    }
    back = to_torch(to_flax(state))
    assert back.keys() == state.keys()
    for name, value in state.items():
        assert back[name].tobytes() == value.tobytes(), name


def test_unknown_names_are_refused() -> None:
    with pytest.raises(KeyError, match="layers_0/self_attn/rotary/kernel"):
        torch_name("layers_0/self_attn/rotary/kernel")
    with pytest.raises(KeyError, match="lm_head"):
        flax_path("lm_head.weight")


def test_the_table_covers_both_models() -> None:
    """Fault: a parameter added to one side only."""
    import jax
    import torch

    from jaxdraft.config import DraftConfig as SpecConfig
    from jaxdraft.draft import DSparkDraft as SpecDraft
    from parity.recipes import NESTED, TOP
    from torch_port.config import DraftConfig
    from torch_port.models.dspark import DSparkDraft

    for head in ("vanilla", "gated", "rnn"):
        raw = TOP | {"dflash_config": NESTED | {"markov_head_type": head}}
        config = SpecConfig.from_hf(raw)
        H, G = config.hidden_size, config.block_size
        shapes = jax.eval_shape(
            SpecDraft(config).init,
            jax.random.key(0),
            jax.ShapeDtypeStruct((1, 9, 2 * H), "float32"),
            jax.ShapeDtypeStruct((1, 2, G, H), "float32"),
            jax.ShapeDtypeStruct((1, 2), "int32"),
            jax.ShapeDtypeStruct((1, 2), "bool"),
            jax.ShapeDtypeStruct((1, 2, G), "int32"),
            jax.ShapeDtypeStruct((config.draft_vocab_size, H), "float32"),
        )["params"]
        spec = {
            name: value.shape
            for name, value in to_torch(jax.tree.map(lambda s: np.zeros(s.shape), shapes)).items()
        }
        with torch.device("meta"):
            port = DSparkDraft(DraftConfig.from_hf(raw))
        assert spec == {name: tuple(p.shape) for name, p in port.named_parameters()}
