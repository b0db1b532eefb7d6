"""What a checkpoint records and when a resume is refused (contracts §3, field-note 17)."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import pytest
import torch
from toys import KEPT, V, config, hf_config

from torch_port.config import DFlashObjectiveConfig, DraftConfig, ObjectiveConfig, Settings
from torch_port.config_eagle3 import Eagle3Config, Eagle3Objective
from torch_port.errors import UserError
from torch_port.models.registry import ALGORITHMS
from torch_port.training.resume import (
    COMPARE,
    RESUME_KEYS,
    WHEN,
    check_resume,
    record,
    run_values,
    target_fingerprint,
)

HEADLESS = {
    "projector_type": "dflash",
    "architectures": ["DFlashDraftModel"],
    "markov_rank": 0,
    "enable_confidence_head": False,
    "confidence_head_with_markov": False,
}
EAGLE3 = Eagle3Config(
    vocab_size=V,
    draft_vocab_size=V,
    hidden_size=8,
    intermediate_size=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    num_target_layers=6,
    target_layer_ids=(0, 2, 4),
)


def dspark(objective: ObjectiveConfig | None = None, **changes: Any) -> dict[str, Any]:
    values = run_values(
        ALGORITHMS["dspark"], config(**changes), objective or ObjectiveConfig(), "f" * 64
    )
    return json.loads(json.dumps(record(values)))  # what a file gives back


def test_what_a_dspark_checkpoint_records() -> None:
    """By hand, from contracts §3. Fault: a key forgotten, which no later version can ask for."""
    assert dspark() == {
        "algorithm": "dspark",
        "layout": "anchor-first",
        "target_fingerprint": "f" * 64,
        "target_layer_ids": [0, 2],
        "attention_mode": "gqa",
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "block_size": 4,
        "mask_token_id": 1,
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "loss_decay_gamma": None,
        "markov_head_type": "vanilla",
        "markov_rank": 3,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "detach_confidence": False,
        "ce_alpha": 0.1,
        "l1_alpha": 0.9,
        "confidence_alpha": 1.0,
        "draft_vocab_size": len(KEPT),
    }


def test_draft_vocab_size_is_recorded_only_when_pruned() -> None:
    """Fault: an unconditional key refuses every earlier full-vocabulary checkpoint."""
    full = dspark(draft_vocab_size=None)
    assert "draft_vocab_size" not in full
    assert set(dspark()) - set(full) == {"draft_vocab_size"}
    check_resume(full, dspark(draft_vocab_size=V))


@pytest.mark.parametrize(
    ("saved", "current", "words"),
    [
        ({}, {"mask_token_id": 5}, "mask_token_id is 1 in the checkpoint and 5 in this run; set"),
        ({}, {"block_size": 5}, "block_size is 4 in the checkpoint and 5 in this run"),
        ({}, {"target_layer_ids": [2, 0]}, r"target_layer_ids is \[0, 2\] .* \[2, 0\]"),
        ({}, {"markov_head_type": "rnn"}, 'markov_head_type is "vanilla" .* "rnn"'),
        ({}, {"markov_rank": 4}, "markov_rank is 3 .* 4"),
        ({}, {"num_key_value_heads": 4}, 'attention_mode is "gqa" .* "mha"'),
        ({}, {"confidence_head_with_markov": False}, "confidence_head_with_markov is true"),
        ({}, {"rope_theta": 5e5}, "rope_theta"),
        ({}, {"draft_vocab_size": 6}, "draft_vocab_size is 5 .* 6"),
        ({}, {"draft_vocab_size": None}, r"draft_vocab_size is 5 .* not set \(full vocabulary\)"),
        ({"draft_vocab_size": None}, {}, r"draft_vocab_size is not set \(full vocabulary\) .* 5"),
    ],
)
def test_draft_config_changed_between_save_and_resume(
    saved: dict[str, Any], current: dict[str, Any], words: str
) -> None:
    """Field-note 17 and its kind: mask_token_id changed in the run file was accepted silently."""
    with pytest.raises(UserError, match=words):
        check_resume(dspark(**saved), dspark(**current))


@pytest.mark.parametrize(
    "change",
    [
        {"ce_alpha": 0.2},
        {"l1_alpha": 0.8},
        {"confidence_alpha": 0.0},
        {"loss_decay_gamma": 4.0},
        {"detach_confidence": True},
    ],
)
def test_objective_changed_between_save_and_resume(change: dict[str, Any]) -> None:
    name = next(iter(change))
    with pytest.raises(UserError, match=f"{name} is .* in the run's objective section"):
        check_resume(dspark(), dspark(ObjectiveConfig(**change)))


def test_every_difference_is_named_and_sameness_is_not() -> None:
    """Faults: only the first difference named; 4 and 4.0 taken for two decays; 1 for True."""
    with pytest.raises(UserError, match=r"block_size is 4 .*mask_token_id is 1 "):
        check_resume(dspark(), dspark(block_size=3, mask_token_id=2))
    check_resume(dspark(), dspark())
    four = dspark(ObjectiveConfig(loss_decay_gamma=4))
    assert isinstance(four["loss_decay_gamma"], float)
    check_resume(four | {"loss_decay_gamma": 4}, four)
    with pytest.raises(UserError, match="enable_confidence_head is 1 in the checkpoint and true"):
        check_resume(dspark() | {"enable_confidence_head": 1}, dspark())
    with pytest.raises(UserError, match="ce_alpha is true"):
        check_resume(dspark() | {"ce_alpha": True}, dspark(ObjectiveConfig(ce_alpha=1.0)))


@pytest.mark.parametrize("name", list(dspark(ObjectiveConfig())))
def test_every_recorded_key_is_compared(name: str) -> None:
    """Fault: a key recorded and never looked at; a key that is absent taken for the same."""
    saved = dspark()
    with pytest.raises(UserError, match=f"{name} is .*in the checkpoint"):
        check_resume(saved | {name: "other"}, saved)
    with pytest.raises(UserError, match=f"{name} is not "):
        check_resume({key: x for key, x in saved.items() if key != name}, saved)


def test_key_of_another_version_is_refused() -> None:
    with pytest.raises(UserError, match="novelty: the checkpoint records it, this version"):
        check_resume(dspark() | {"novelty": 1}, dspark())


def test_value_that_is_due_and_missing_is_an_error() -> None:
    """Fault: a checkpoint without its mask token, resumable with any."""
    values = run_values(ALGORITHMS["dspark"], config(), ObjectiveConfig(), "f")
    del values["mask_token_id"]
    with pytest.raises(UserError, match="no value for mask_token_id"):
        record(values)


@pytest.mark.parametrize(
    ("name", "draft", "objective", "there", "absent"),
    [
        (
            "eagle3", EAGLE3, Eagle3Objective(),
            {"steps": 7, "step_decay": 0.8, "layout": "training-time-test"},
            {"block_size", "mask_token_id", "markov_rank", "ce_alpha", "draft_vocab_size"},
        ),
        (
            "dflash", DraftConfig.from_hf(hf_config(**HEADLESS)), DFlashObjectiveConfig(),
            {"dpace": "none", "layout": "bonus-anchor", "mask_token_id": 1},
            {"markov_rank", "ce_alpha", "steps", "beta"},
        ),
        (
            "dflash", DraftConfig.from_hf(hf_config(**HEADLESS)),
            DFlashObjectiveConfig(dpace="both"), {"dpace": "both", "beta": 0.5}, {"steps"},
        ),
    ],
)  # fmt: skip
def test_other_families(
    name: str, draft: Settings, objective: Settings, there: dict[str, Any], absent: set[str]
) -> None:
    """Fault: a key of one family demanded of another, whose checkpoints cannot have it."""
    got = record(run_values(ALGORITHMS[name], draft, objective, "f"))
    assert {key: got.get(key) for key in there} == there
    assert not absent & set(got)
    with pytest.raises(UserError, match="algorithm is"):
        check_resume(got, dspark())


def test_eagle3_with_other_heads_of_the_same_shapes_is_refused() -> None:
    """Fault: 4 heads of width 4 resumed as 2 of width 8: equal shapes, other attention."""

    def recorded(**changes: Any) -> dict[str, Any]:
        changed = Eagle3Config(**(EAGLE3.model_dump() | changes))
        return record(run_values(ALGORITHMS["eagle3"], changed, Eagle3Objective(), "f"))

    wider = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    check_resume(recorded(), recorded())
    with pytest.raises(UserError, match="num_attention_heads is 4 in the checkpoint and 2 in"):
        check_resume(recorded(), recorded(**wider))


def test_a_head_of_ones_own_is_recorded_where_there_is_one() -> None:
    values = run_values(ALGORITHMS["dspark"], config(), ObjectiveConfig(), "f" * 64, True)
    with pytest.raises(UserError, match=r"trainable_head is not recorded .* true"):
        check_resume(dspark(), record(values))


def test_table_is_whole() -> None:
    names = [key.name for key in RESUME_KEYS]
    assert len(set(names)) == len(names)
    assert {key.when for key in RESUME_KEYS} == set(WHEN)
    assert {key.compare for key in RESUME_KEYS} == set(COMPARE)
    assert all(key.remedy for key in RESUME_KEYS)


def test_target_fingerprint_by_hand() -> None:
    """sha256 over name, dtype, shape and bytes of both, then the config with sorted names."""
    E = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    U = torch.tensor([[1.0], [2.0]], dtype=torch.float32)
    by_hand = hashlib.sha256(
        b"embed_tokens\0bfloat16\0[2, 2]\0" + bytes.fromhex("803f004040408040")
        + b"lm_head\0float32\0[2, 1]\0" + bytes.fromhex("0000803f00000040")
        + b'{"a": 1, "b": 2}'
    ).hexdigest()  # fmt: skip
    assert target_fingerprint(E, U, {"b": 2, "a": 1}) == by_hand
    assert target_fingerprint(E, U, {"a": 1, "b": 2, "_name_or_path": "x"}) == by_hand


def test_target_fingerprint_sees_every_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: rows after the first piece, dtype, shape or config left out; E, U swapped."""
    g = torch.Generator().manual_seed(0)
    E, U = torch.randn(6, 4, generator=g), torch.randn(6, 4, generator=g)
    base = target_fingerprint(E, U, {"a": 1})
    last = E.clone()
    last[5, 3] += 1e-3
    others = {
        target_fingerprint(last, U, {"a": 1}),
        target_fingerprint(U, E, {"a": 1}),
        target_fingerprint(E.view(torch.int32), U, {"a": 1}),
        target_fingerprint(E.reshape(4, 6), U, {"a": 1}),
        target_fingerprint(E, U, {"a": 2}),
        target_fingerprint(E, U, {}),
    }
    assert len(others | {base}) == 7
    monkeypatch.setattr("torch_port.training.resume._CHUNK_BYTES", 20)
    assert target_fingerprint(E, U, {"a": 1}) == base
    assert target_fingerprint(E.T.contiguous().T, U, {"a": 1}) == base  # layout is no content
