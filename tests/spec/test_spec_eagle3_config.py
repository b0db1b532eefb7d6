"""EAGLE3's config: the schema is read strictly, and each refusal names its field and value."""

import pytest
import spec_eagle3 as toys
from spec_toys import V

from jaxdraft import Eagle3Config, Eagle3Objective, NotBuilt


def test_absent_and_null_draft_vocab_size_mean_unpruned():
    # Fault: a null K read as 0 or as pruning.
    absent = {field: value for field, value in toys.HF.items() if field != "draft_vocab_size"}
    FULL, PRUNED = toys.config(draft_vocab_size=None), toys.config()
    assert Eagle3Config.from_hf(absent) == FULL == toys.config(draft_vocab_size=V)
    assert (FULL.prunes, FULL.draft_vocab_size, PRUNED.prunes) == (False, V, True)
    assert PRUNED.target_layer_ids == (1, 2, 4)


def layers(ids):
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"colour": 3}, "unknown fields.*'colour': 3"),
        ({"block_size": 4}, "unknown fields.*'block_size': 4"),
        ({"eagle_config": {"colour": 3}}, "eagle_config has unknown fields.*'colour': 3"),
        ({"eagle_config": [1]}, "eagle_config: expected an object"),
        ({"eagle_config": {}}, "eagle_config lacks eagle_aux_hidden_state_layer_ids"),
        (layers([1, 2]), "expected three layers"),
        (layers([2, 1, 4]), "order low, middle, high"),
        (layers([1, 2, 5]), "holds 5, the target's last layer"),
        (layers([1, 2, 2]), "has duplicates"),
        (layers([1, 2, 6]), "expected layers from 0 to 4"),
        (layers("124"), "expected a list"),
        ({"draft_vocab_size": 0}, "draft_vocab_size: expected a whole number from 1 to"),
        ({"draft_vocab_size": 17}, "draft_vocab_size"),
        ({"draft_vocab_size": True}, "draft_vocab_size"),
        ({"head_dim": 3}, "head_dim"),
        ({"hidden_size": 8.0}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3 does not divide"),
        ({"rope_theta": 0}, "rope_theta"),
    ],
)
def test_refused(changes, words):
    # Fault: an off, unknown or contradicting field read as if it were fine.
    with pytest.raises(ValueError, match=words):
        toys.config(**changes)


def test_missing_fields_are_named():
    # Fault: a default standing in for a field that the checkpoint lacks.
    lacking = {k: v for k, v in toys.HF.items() if k not in ("rope_theta", "num_target_layers")}
    with pytest.raises(ValueError, match="lacks num_target_layers, rope_theta"):
        Eagle3Config.from_hf(lacking)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["DSparkDraftModel"]},
        {"model_type": "qwen3"},
        {"num_hidden_layers": 2},
        {"num_hidden_layers": True},
        {"hidden_act": "gelu"},
        {"attention_bias": True},
        {"rope_scaling": {"factor": 2.0}},
        {"tie_word_embeddings": True},
    ],
)
def test_not_built_names_field_and_value(changes):
    # Fault: another layer silently computed as this one.
    ((field, value),) = changes.items()
    with pytest.raises(NotBuilt) as told:
        toys.config(**changes)
    assert f"{field} = {value!r} is not built" in str(told.value)
    auxiliary = layers([1, 2, 4])["eagle_config"] | {"use_aux_hidden_state": False}
    with pytest.raises(NotBuilt, match="use_aux_hidden_state = False"):
        toys.config(eagle_config=auxiliary)


def test_seven_steps_unless_told():
    # Fault: another default than §13's; a number of steps that is none.
    assert Eagle3Objective().steps == 7
    for bad in (0, -1, True):
        with pytest.raises(ValueError, match="steps: expected a whole number >= 1"):
            Eagle3Objective(steps=bad)
