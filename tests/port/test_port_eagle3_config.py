"""EAGLE3's config.json: read strictly, written back, each refusal with its field and value."""

import copy
from typing import Any

import pytest
from eagle3_toys import SIZES
from toys import KEPT, V

from torch_port.config_eagle3 import Eagle3Config
from torch_port.errors import NotBuiltError, UserError

LAYERS = "eagle_aux_hidden_state_layer_ids"
HF: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": V,
    "draft_vocab_size": len(KEPT),
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 100.0,
    "rope_scaling": None,
    "num_target_layers": 6,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "eagle_config": {LAYERS: [0, 2, 4], "use_aux_hidden_state": True},
}


def without(*names: str, **changes: Any) -> dict[str, Any]:
    return {n: x for n, x in (copy.deepcopy(HF) | changes).items() if n not in names}


def test_the_fields_file_is_read_and_written() -> None:
    """Faults: a field that is dropped, renamed or moved; the caller's mapping changed by reading.

    The toys' sizes were written by hand, field by field.
    """
    raw = copy.deepcopy(HF)
    config = Eagle3Config.from_hf(raw)
    assert config == Eagle3Config(**SIZES)
    assert raw == HF
    assert config.to_hf() == HF
    written = config.to_hf()
    written["architectures"].append("another")
    assert config.to_hf() == HF


@pytest.mark.parametrize(
    "raw",
    [
        without("draft_vocab_size"),
        without(draft_vocab_size=None),
        without(draft_vocab_size=V),
    ],
)
def test_no_draft_vocab_size_means_all(raw: dict[str, Any]) -> None:
    """Fault: null taken for 0, or for pruning."""
    config = Eagle3Config.from_hf(raw)
    assert (config.draft_vocab_size, config.prunes) == (V, False)
    assert Eagle3Config.from_hf(config.to_hf()) == config


def test_what_may_be_absent() -> None:
    """Fault: a default other than the schema's; a required field with a default."""
    bare = without(
        *("architectures", "model_type", "hidden_act", "attention_bias", "mlp_bias"),
        *("rope_scaling", "tie_word_embeddings", "initializer_range"),
        eagle_config={LAYERS: [0, 2, 4]},
    )
    assert Eagle3Config.from_hf(bare) == Eagle3Config.from_hf(HF)
    for name in sorted(set(bare) - {"draft_vocab_size"}):
        with pytest.raises(UserError, match=f"lacks {name}; add"):
            Eagle3Config.from_hf({n: x for n, x in bare.items() if n != name})
    with pytest.raises(UserError, match=f"eagle_config lacks {LAYERS}; add"):
        Eagle3Config.from_hf(without(eagle_config={}))


def test_rope_theta_stands_in_one_of_two_places() -> None:
    """Faults: the file's base ignored where it is nested; one of two picked."""
    nested = {"rope_theta": 7.0, "rope_type": "default"}
    config = Eagle3Config.from_hf(without("rope_theta", rope_parameters=nested))
    assert config.rope_theta == 7
    assert config.to_hf()["rope_theta"] == 7
    both = without(rope_parameters={"rope_theta": 100}, rope_scaling=None)
    assert Eagle3Config.from_hf(both) == Eagle3Config.from_hf(without(rope_parameters=None))
    with pytest.raises(UserError, match=r"100.0 at the top level and 7.0 under rope_parameters"):
        Eagle3Config.from_hf(without(rope_parameters=nested))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colour": 3}, "ignored: {'colour': 3}; remove"),
        ({LAYERS: [0, 2, 4]}, f"ignored: {{'{LAYERS}': "),
        ({"eagle_config": {LAYERS: [0, 2, 4], "colour": 3}}, "eagle_config has fields"),
        ({"eagle_config": [1]}, "eagle_config: [1] must be an object"),
        ({"rope_parameters": {"factor": 2}}, "rope_parameters has fields"),
        ({"eagle_config": {LAYERS: [0, 2]}}, f"{LAYERS}: [0, 2] must be 3 layers, ascending"),
        ({"eagle_config": {LAYERS: [2, 0, 4]}}, f"{LAYERS}: [2, 0, 4] must be 3 layers"),
        ({"eagle_config": {LAYERS: [0, 2, 5]}}, f"{LAYERS}: [0, 2, 5] has the last layer"),
        ({"eagle_config": {LAYERS: [0, 2, 2]}}, f"{LAYERS}: [0, 2, 2] repeats a layer"),
        ({"eagle_config": {LAYERS: [0, 2, 6]}}, f"{LAYERS}: [0, 2, 6] is out of range"),
        ({"eagle_config": {LAYERS: "024"}}, f"{LAYERS}: '024' must be a list"),
        ({"eagle_config": {LAYERS: [0, True, 4]}}, f"{LAYERS}: [0, True, 4] must be a list"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0"),
        ({"draft_vocab_size": V + 1}, f"draft_vocab_size is {V + 1}"),
        ({"draft_vocab_size": True}, "draft_vocab_size"),
        ({"vocab_size": "16"}, "vocab_size is "),
        ({"head_dim": 3}, "head_dim is "),
        ({"hidden_size": 8.0}, "hidden_size is "),
        ({"num_target_layers": None}, "num_target_layers is "),
        ({"num_key_value_heads": 3}, "num_key_value_heads (3)"),
        ({"rope_theta": 0}, "rope_theta is "),
        ({"rope_theta": float("nan")}, "rope_theta is "),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings 0 is no value"),
        ({"num_hidden_layers": True}, "num_hidden_layers True is no value"),
        ({"rope_scaling": 2.0}, "rope_scaling 2.0 is no value"),
        ({3: 4}, "must be an object whose names are strings"),
    ],
)
def test_refused(changes: dict[Any, Any], words: str) -> None:
    """Fault: an unknown, wrong or contradicting field read as if it were fine."""
    with pytest.raises(UserError) as told:
        Eagle3Config.from_hf({**HF, **changes})
    assert words in str(told.value)
    assert not isinstance(told.value, NotBuiltError)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": ["DSparkDraftModel"]}, "architectures ['DSparkDraftModel']"),
        ({"model_type": "qwen3"}, "model_type 'qwen3'"),
        ({"num_hidden_layers": 2}, "num_hidden_layers 2"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling {'factor': 2.0}"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings True"),
        (
            {"eagle_config": {LAYERS: [0, 2, 4], "use_aux_hidden_state": False}},
            "use_aux_hidden_state False",
        ),
    ],
)
def test_not_built(changes: dict[str, Any], said: str) -> None:
    """Fault: another layer computed as this one."""
    with pytest.raises(NotBuiltError) as told:
        Eagle3Config.from_hf(HF | changes)
    assert f"{said} is not built; " in str(told.value)
