"""The registry, `prunes_vocabulary`, the planning rules, and `torch-port plan`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from test_port_resume import HEADLESS
from toys import KEPT, V, config

from torch_port import planning
from torch_port.errors import UserError
from torch_port.models.registry import (
    ALGORITHMS,
    find_algorithm,
    prunes_vocabulary,
    read_draft_config,
)
from torch_port.objective.families import FAMILIES
from torch_port.planning import (
    DraftFacts,
    Facts,
    MapFacts,
    TargetFacts,
    Verdict,
    plan,
    summary,
)

DSPARK, EAGLE3 = ALGORITHMS["dspark"], ALGORITHMS["eagle3"]
K = len(KEPT)


def rejections(facts: Facts) -> dict[str, str]:
    return {v.rule: v.text for v in plan(facts) if v.status == "reject"}


def verdict(facts: Facts, rule: str) -> Verdict:
    return next(v for v in plan(facts) if v.rule == rule)


def sized(facts: Facts, vocab_size: int, draft_vocab_size: int) -> Facts:
    prunes = draft_vocab_size < vocab_size
    return replace(facts, prunes=prunes, vocab_size=vocab_size, draft_vocab_size=draft_vocab_size)


def a_map(vocab_size: int = V, kept: tuple[int, ...] = KEPT) -> MapFacts:
    return MapFacts(vocab_size, len(kept), frozenset(kept))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_capabilities_are_those_of_the_classes(name: str) -> None:
    """Fault: planning promises buffers that the class does not have, or the other way round."""
    algorithm = find_algorithm(name)
    built = algorithm.draft_class()
    assert algorithm.keeps_vocab_buffers_when_unpruned == built.keeps_vocab_buffers_when_unpruned
    assert algorithm.supports_vocab_mapping == hasattr(built, "install_vocab_mapping")
    assert algorithm.keeps_vocab_buffers_when_unpruned == (name == "eagle3")  # contracts §2
    algorithm.objective_class()()
    assert "draft_vocab_size" in algorithm.config_class().model_fields


@pytest.mark.parametrize("name", ALGORITHMS)
def test_registry_and_training_mean_the_same_families(name: str) -> None:
    """Fault: a run planned as one family and trained as another, or with another objective."""
    algorithm, family = ALGORITHMS[name], FAMILIES[name]
    assert set(ALGORITHMS) == set(FAMILIES)
    assert algorithm.draft_class() is family.draft
    assert algorithm.objective_class() is family.objective
    assert algorithm.draft_class().algorithm == name
    if algorithm.drafts_blocks:
        changes = {} if algorithm.markov_head else HEADLESS
        assert config(**changes).block_layout == algorithm.layout


def test_unknown_algorithm_is_refused_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'dsprak' is not known; did you mean 'dspark'\?"):
        find_algorithm("dsprak")
    with pytest.raises(UserError, match="'medusa' is not known; there are eagle3"):
        find_algorithm("medusa")  # near none: a suggestion would mislead
    with pytest.raises(UserError, match="None is not known"):
        find_algorithm(None)


@pytest.mark.parametrize(
    ("config", "answer"),
    [
        (None, None),
        ({"vocab_size": 16}, False),
        ({"vocab_size": 16, "draft_vocab_size": None}, False),
        ({"vocab_size": 16, "draft_vocab_size": 16}, False),
        ({"vocab_size": 16, "draft_vocab_size": 15}, True),
        ({"vocab_size": 16, "dflash_config": {"draft_vocab_size": 5}}, True),
    ],
)
def test_prunes_vocabulary_has_three_answers(config: dict | None, answer: bool | None) -> None:
    """Faults: an absent config taken for an unpruned one; a nested size missed; K = V pruned."""
    assert prunes_vocabulary(config) is answer


@pytest.mark.parametrize("value", [0, -1, 17, True, 5.0, "5"])
def test_prunes_vocabulary_coerces_nothing(value: object) -> None:
    with pytest.raises(UserError, match="draft_vocab_size"):
        prunes_vocabulary({"vocab_size": 16, "draft_vocab_size": value})
    with pytest.raises(UserError, match="at the top and in dflash_config"):
        prunes_vocabulary(
            {"vocab_size": 16, "draft_vocab_size": 5, "dflash_config": {"draft_vocab_size": 16}}
        )


def test_draft_config_absent_is_none_and_damaged_is_an_error(tmp_path: Path) -> None:
    """Fault: planning that needs the draft config on disk, or that reads a broken one as absent."""
    assert read_draft_config(tmp_path / "absent") is None
    with pytest.raises(UserError, match=r"draft\.config .* holds no config\.json"):
        read_draft_config(tmp_path)  # a directory that is there is no absence
    assert prunes_vocabulary(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"draft\.config .* no JSON"):
        read_draft_config(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="expected a JSON object, found list"):
        read_draft_config(tmp_path / "config.json")
    assert prunes_vocabulary(tmp_path) is None
    (tmp_path / "config.json").write_text('{"vocab_size": 16, "draft_vocab_size": 5}')
    assert prunes_vocabulary(str(tmp_path)) is True


def test_rule_1_map_for_an_algorithm_without_maps() -> None:
    """Fault: the map ignored, the draft trained on another vocabulary than the user asked for."""
    without = replace(DSPARK, name="medusa", supports_vocab_mapping=False)
    facts = sized(Facts(without, map_path="m.safetensors"), V, K)
    text = rejections(facts)["1 map supported"]
    assert "vocabulary.map is m.safetensors" in text
    assert "'medusa' supports no vocabulary map" in text
    assert "remove vocabulary.map" in text
    assert not rejections(replace(facts, map_path=None))
    assert not rejections(replace(facts, algorithm=DSPARK))


def test_rule_2_map_for_an_unpruned_draft() -> None:
    """Faults: a map silently unused; a config not on disk taken for an unpruned one."""
    facts = Facts(DSPARK, draft_config="d/config.json", map_path="m.safetensors")
    text = rejections(sized(facts, V, V))["2 map and pruning agree"]
    assert "vocabulary.map is m.safetensors" in text
    assert f"draft_vocab_size {V}" in text
    assert "Set draft_vocab_size in d/config.json" in text
    assert "or remove vocabulary.map" in text
    with_map = sized(replace(facts, map=a_map()), V, V)
    assert list(rejections(with_map)) == ["2 map and pruning agree"]  # and not its size, too
    assert not rejections(facts)  # prunes is None: no evidence
    assert {v.status for v in plan(facts) if v.rule.startswith("2")} == {"unknown"}
    assert not rejections(sized(facts, V, K))
    assert not rejections(sized(replace(facts, map_path=None), V, V))
    wanting = next(v for v in plan(sized(replace(facts, map_path=None), V, K)) if v.rule[0] == "2")
    assert "refused in use until one is built" in wanting.text  # no bare "no map" (field-note 2)
    assert not rejections(sized(replace(facts, algorithm=EAGLE3), V, V))  # has buffers for it


def test_rule_3_separate_producer_without_a_map() -> None:
    """Fault: trainer and producer each count their own corpus and disagree about every id."""
    rule = "3 one shared map"
    separate = Facts(DSPARK, producer="separate")
    text = rejections(sized(separate, V, K))[rule]
    assert "data.producer is 'separate'" in text
    assert f"draft_vocab_size {K}" in text
    assert "set vocabulary.map" in text
    assert not rejections(separate)  # dspark, None: perhaps unpruned, no buffers then
    assert not rejections(sized(separate, V, V))
    assert not rejections(sized(replace(separate, map_path="m"), V, K))
    assert not rejections(sized(replace(separate, producer="files"), V, K))
    always = replace(separate, algorithm=EAGLE3)
    assert "'eagle3' always has a map" in rejections(always)[rule]  # None, family keeps buffers
    assert not rejections(sized(always, V, V))  # the identity is shared without asking
    assert rule in rejections(sized(always, V, K))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pinned": tuple(range(K + 1))}, f"names {K + 1} ids, but draft_vocab_size is {K}"),
        ({"pinned": (V,)}, f"names id {V}, but vocab_size is {V}"),
        ({"map": a_map(V + 8)}, f"is of {V + 8} target ids, but config.json has vocab_size {V}"),
        ({"map": a_map(V, (0, 1))}, f"keeps 2 ids, but config.json has draft_vocab_size {K}"),
        ({"map": a_map(), "pinned": (0, 7)}, r"names id 7 \(1 such ids\), which the map"),
    ],
)
def test_rule_4_sizes(changes: dict, words: str) -> None:
    """Faults: pinned ids lost (field-note 6); a map of another target or size reaching install."""
    facts = sized(Facts(DSPARK, map_path="m.safetensors"), V, K)
    with pytest.raises(UserError, match=words):
        raise UserError(rejections(replace(facts, **changes))["4 sizes agree"])
    assert not rejections(replace(facts, pinned=(0, 0, 0, 9, 9, 9), map=a_map()))  # two ids


def test_rule_4_without_the_draft_config() -> None:
    """With the map alone: pinned ids are checked against it, and nothing else is rejected."""
    facts = Facts(DSPARK, map_path="m", map=a_map(), pinned=tuple(range(K + 1)))
    assert "draft_vocab_size is 5" in rejections(facts)["4 sizes agree"]
    assert not rejections(replace(facts, pinned=(3,)))
    assert not rejections(sized(replace(facts, pinned=(), map=a_map()), V, K))
    # A tokenizer smaller than the head is no rule's business: V is the head's rows.
    assert not rejections(sized(Facts(DSPARK), V + 8, K))


def test_no_rule_hides_another() -> None:
    """Fault: the first rejection ends the plan, and the user finds the second one a run later."""
    without = replace(DSPARK, supports_vocab_mapping=False)
    facts = sized(Facts(without, map_path="m", pinned=(V + 3,), config_problem="broken"), V, V)
    assert len(plan(facts)) == len(planning.RULES) == 9
    assert list(rejections(facts)) == [
        "draft config",
        "1 map supported",
        "2 map and pruning agree",
        "4 sizes agree",
    ]


RULE_5 = "5 draft fits target"


def test_rule_5_sizes() -> None:
    """Fault: a draft made for another target, seen when the first batch has the wrong width."""
    draft = DraftFacts(hidden_size=8, num_target_layers=4, target_layer_ids=(0, 2))
    facts = sized(Facts(DSPARK, draft=draft, target=TargetFacts(V, 8, 4)), V, K)
    assert verdict(facts, RULE_5).status == "ok"
    for target, words in (
        (TargetFacts(V + 1, 8, 4), (f"vocab_size {V}, but", f"vocab_size {V + 1}")),
        (TargetFacts(V, 16, 4), ("hidden_size 8, but", "hidden_size 16")),
        (TargetFacts(V, 8, 6), ("num_target_layers 4, but", "num_hidden_layers 6")),
        (TargetFacts(V, 8, 3), ("num_target_layers 4, but", "[0, 2] has the last layer")),
        (TargetFacts(V, 8, 2), ("[0, 2] is out of range",)),
    ):
        text = rejections(replace(facts, target=target))[RULE_5]
        assert all(word in text for word in words), text
    unread = replace(facts, draft=None, vocab_size=None, target=TargetFacts(V, 16, 4))
    assert verdict(unread, RULE_5).status == "unknown"  # without a config nothing to compare


def test_every_rule_gives_its_reason_and_what_is_open() -> None:
    """Faults: a verdict without a why; "nothing rejected" where nothing could be looked at."""
    verdicts = plan(Facts(DSPARK, map_path="m"))
    assert all(len(v.reason.split()) >= 5 for v in verdicts)
    assert len({v.reason for v in verdicts}) == len(verdicts)
    assert all(bool(v.needs) == (v.status == "unknown") for v in verdicts)
    assert summary(verdicts) == (
        "nothing rejected; 7 of 9 rules are unknown: plan again when these are on disk and right: "
        "draft.config config.json, target.path target, data.path features, vocabulary.map m"
    )
    ok = [Verdict("a", "ok", "")]
    assert summary(ok) == "nothing rejected"
    assert summary([*ok, Verdict("b", "reject", "")]) == "1 of 2 rules reject this run"
