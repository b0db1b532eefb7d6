"""Reading the draft config: what is refused, and in which words."""

import pytest
from toys import V, config, hf_config

from torch_port.config import DraftConfig, ObjectiveConfig
from torch_port.errors import NotBuiltError, UserError
from torch_port.training.optimizer import OptimizerConfig


@pytest.mark.parametrize("value", [0, -1, V + 1, True, False, 5.0, "5"])
def test_bad_draft_vocab_size_is_refused_by_name(value: object) -> None:
    """Fault: a bool or float coerced to a size, or K > V reaching the head."""
    with pytest.raises(UserError, match="draft_vocab_size") as caught:
        config(draft_vocab_size=value)
    assert repr(value) in str(caught.value) or str(value) in str(caught.value)


@pytest.mark.parametrize("given", [None, V])
def test_whole_vocabulary_is_no_pruning(given: int | None) -> None:
    """Fault: K = V taken for a pruned run, which would add keys to its checkpoints."""
    assert config(draft_vocab_size=given).draft_vocab_size == V
    assert not config(draft_vocab_size=given).prunes


def test_absent_draft_vocab_size_means_unpruned() -> None:
    raw = hf_config()
    del raw["draft_vocab_size"]
    assert not DraftConfig.from_hf(raw).prunes


def test_round_trip_through_the_field_schema() -> None:
    """Fault: a field lost or renamed on the way out."""
    for changes in ({}, {"markov_rank": 0, "confidence_head_with_markov": False}):
        read = config(**changes)
        assert DraftConfig.from_hf(read.to_hf()) == read


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"projector_type": "medusa"}, "projector_type 'medusa'"),
        ({"projector_type": "dflash"}, "DSparkDraftModel"),
        ({"architectures": ["DFlashDraftModel"]}, "DFlashDraftModel"),
        ({"markov_head_type": "lstm"}, "markov_head_type 'lstm'"),
        ({"markov_head_type": "lstm", "markov_rank": 0}, "markov_head_type 'lstm'"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ],
)
def test_what_is_not_built_is_said_so(changes: dict[str, object], words: str) -> None:
    """Fault: an unknown head silently run as another one."""
    with pytest.raises(NotBuiltError, match=words):
        config(**changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"layer_types": 5}, "layer_types"),
        ({"layer_types": "full_attention"}, "layer_types"),
        ({"vocab_size": True}, "vocab_size"),
        ({"target_layer_ids": [0, 3]}, "last"),
        ({"target_layer_ids": [2, 2]}, "repeats"),
        ({"layer_types": ["full_attention"]}, "num_hidden_layers"),
        ({"num_key_value_heads": 3}, "multiple"),
        ({"attention_mode": "mha"}, "attention_mode"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_window"),
        ({"mask_token_id": V}, "mask_token_id"),
        ({"markov_rank": 0}, "confidence_head_with_markov"),
        ({"hidden_size": 8.0}, "hidden_size"),
    ],
)
def test_inconsistent_fields_are_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        config(**changes)


def test_unknown_and_missing_fields_are_named() -> None:
    """Fault: a setting ignored because this version does not know it."""
    with pytest.raises(UserError, match="surprise"):
        config(surprise=1)
    raw = hf_config()
    del raw["rope_theta"]
    with pytest.raises(UserError, match="rope_theta"):
        DraftConfig.from_hf(raw)


def test_objective_and_optimizer_ranges() -> None:
    with pytest.raises(ValueError, match="ce_alpha"):
        ObjectiveConfig(ce_alpha=-0.1)
    with pytest.raises(ValueError, match="loss_decay_gamma"):
        ObjectiveConfig(loss_decay_gamma=0.0)
    with pytest.raises(UserError, match="warmup_steps"):
        OptimizerConfig(peak_rate=1e-3, warmup_steps=10, total_steps=10)
    with pytest.raises(UserError, match="betas"):
        OptimizerConfig(peak_rate=1e-3, warmup_steps=1, total_steps=10, betas=(0.9, 2.0))
    for name, value in (("ce_alpha", "0.1"), ("l1_alpha", True), ("detach_confidence", "yes")):
        with pytest.raises(UserError, match=name):  # nothing is coerced
            ObjectiveConfig(**{name: value})
    with pytest.raises(UserError, match="dflash_config"):
        DraftConfig.from_hf([1])
