"""Configs: the schema is read strictly, and each refusal names its field and value."""

from dataclasses import replace

import pytest
from spec_toys import HF, NO_HEADS, config, dflash_config, hf

from jaxdraft import DFlashObjective, DraftConfig, NotBuilt, ObjectiveConfig


def test_absent_and_null_draft_vocab_size_mean_unpruned():
    # Fault: a null K read as 0 or as pruning.
    absent = {field: value for field, value in HF.items() if field != "draft_vocab_size"}
    for mapping in (absent, hf(draft_vocab_size=None), hf(draft_vocab_size=16)):
        read = DraftConfig.from_hf(mapping)
        assert (read.draft_vocab_size, read.prunes) == (16, False)
    assert config().prunes


def test_rank_zero_is_no_head():
    # Fault: a head of rank 0 built because its type is named.
    read = config(markov_rank=0, confidence_head_with_markov=False)
    assert read.markov_head_type == "none"


@pytest.mark.parametrize("size", [0, -1, 17, True, 5.0, "5"])
def test_bad_draft_vocab_size(size):
    # Fault: K coerced (True to 1, 5.0 to 5) or clamped.
    with pytest.raises(ValueError, match=r"draft_vocab_size.*from 1 to vocab_size = 16"):
        config(draft_vocab_size=size)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colour": 3}, "unknown fields.*'colour': 3"),
        ({"target_layer_ids": [0, 3]}, "target_layer_ids holds 3, the target's last layer"),
        ({"target_layer_ids": [2, 2]}, "target_layer_ids has duplicates"),
        ({"target_layer_ids": [0, 4]}, "target_layer_ids: expected layers from 0 to 2"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"layer_types": ["full_attention"] * 2}, "layer_types names 2 layers"),
        ({"layer_types": ["sliding_attention"]}, "sliding_window is null"),
        ({"layer_types": "full_attention"}, "layer_types: expected a list"),
        ({"sliding_window": 0}, "sliding_window"),
        ({"attention_mode": "mha"}, "attention_mode 'mha' contradicts"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide"),
        ({"head_dim": 3}, "head_dim"),
        ({"hidden_size": 8.0}, "hidden_size"),
        ({"block_size": 0}, "block_size"),
        ({"mask_token_id": 16}, "mask_token_id"),
        ({"markov_rank": -1}, "markov_rank"),
        ({"markov_head_type": "none"}, "markov_rank = 3 contradicts"),
        ({"enable_confidence_head": 1}, "enable_confidence_head"),
        ({"enable_confidence_head": False}, "confidence_head_with_markov is true"),
        ({"markov_rank": 0}, "confidence_head_with_markov is true"),
        ({"rms_norm_eps": 0}, "rms_norm_eps"),
    ],
)
def test_refused(changes, words):
    # Fault: an off, unknown or contradicting field read as if it were fine.
    with pytest.raises(ValueError, match=words):
        config(**changes)


def test_missing_field_is_named():
    # Fault: a default standing in for a field that the checkpoint lacks.
    with pytest.raises(ValueError, match="lacks rope_theta"):
        DraftConfig.from_hf({k: v for k, v in HF.items() if k != "rope_theta"})


@pytest.mark.parametrize(
    "changes",
    [
        {"projector_type": "domino"},
        {"markov_head_type": "lstm"},
        {"layer_types": ["linear_attention"]},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"attention_mode": "mla"},
        {"architectures": ["LlamaForCausalLMEagle3"]},
    ],
)
def test_not_built_names_field_and_value(changes):
    # Fault: another layout or head silently computed as this one.
    ((field, value),) = changes.items()
    shown = value[0] if field == "layer_types" else value
    with pytest.raises(NotBuilt, match=f"(?s){field}.*{str(shown).strip('[]')}"):
        config(**changes)


def test_objective_defaults_and_refusals():
    # Fault: defaults other than §8's, or a decay of 0 dividing.
    assert ObjectiveConfig() == ObjectiveConfig(0.1, 0.9, 1.0, None, False)
    for bad in ({"ce_alpha": -1}, {"l1_alpha": float("nan")}, {"loss_decay_gamma": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            ObjectiveConfig(**bad)


def test_dflash_without_head_fields():
    # Fault: head fields demanded of a draft that has none, or their absence read as heads.
    of = dflash_config()
    assert (of.projector_type, of.markov_rank, of.markov_head_type) == ("dflash", 0, "none")
    assert not of.enable_confidence_head
    named = dict(NO_HEADS, markov_head_type="vanilla")
    assert dflash_config(own=named) == of
    assert config().projector_type == "dspark"
    assert replace(config(**NO_HEADS), projector_type="dflash") == of


@pytest.mark.parametrize(
    ("own", "changes", "words"),
    [
        ({"markov_rank": 3, "markov_head_type": "vanilla"}, {}, "'dflash' has no heads"),
        ({"enable_confidence_head": True}, {}, "'dflash' has no heads"),
        ({"colour": 3}, {}, "unknown fields.*'colour': 3"),
        ({"markov_rank": -1}, {}, "markov_rank"),
        ({}, {"block_size": 1}, "block_size = 1 leaves projector_type 'dflash'"),
    ],
)
def test_dflash_refused(own, changes, words):
    # Fault: an off, unknown or contradicting field read as if it were fine.
    with pytest.raises(ValueError, match=words):
        dflash_config(own=own, **changes)


def test_the_other_architecture():
    # Fault: a checkpoint of one class computed as the other.
    with pytest.raises(NotBuilt, match=r"DSparkDraftModel.*DFlashDraftModel"):
        dflash_config(architectures=["DSparkDraftModel"])
    with pytest.raises(NotBuilt, match=r"DFlashDraftModel.*DSparkDraftModel"):
        config(architectures=["DFlashDraftModel"])
    nested = {k: v for k, v in HF["dflash_config"].items() if not k.startswith("markov")}
    with pytest.raises(ValueError, match="lacks markov_head_type, markov_rank"):
        DraftConfig.from_hf({**HF, "dflash_config": nested})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_decay_gamma": 0}, "loss_decay_gamma: expected a positive"),
        ({"dpace": "all"}, "dpace: expected one of 'none', 'cumulative'"),
        ({"dpace": "both", "beta": 0}, "beta: expected"),
        ({"beta": 1.5}, "beta: expected"),
        ({"beta": True}, "beta: expected"),
        ({"beta": 0.5}, "beta = 0.5 would be ignored, because dpace = 'none'"),
        ({"dpace": "both", "loss_decay_gamma": 4.0}, "loss_decay_gamma = 4.0 would be ignored"),
    ],
)
def test_dflash_objective_refused(changes, words):
    # Fault: a setting ignored, or a β that divides by 0 behind a pruned label.
    with pytest.raises(ValueError, match=words):
        DFlashObjective(**changes)
