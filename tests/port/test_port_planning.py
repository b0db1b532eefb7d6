"""The registry, `prunes_vocabulary`, the planning rules, and `torch-port plan`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_port_resume import HEADLESS
from toys import KEPT, V, config, hf_config, toy_map

from torch_port import planning
from torch_port.errors import UserError
from torch_port.models.registry import (
    ALGORITHMS,
    find_algorithm,
    prunes_vocabulary,
    read_draft_config,
)
from torch_port.objective.families import FAMILIES
from torch_port.planning import Facts, MapFacts, plan, read_facts
from torch_port.run import load_run
from torch_port.vocabulary.files import save_map
from torch_port.vocabulary.mapping import buffers_from_kept

DSPARK, EAGLE3 = ALGORITHMS["dspark"], ALGORITHMS["eagle3"]
K = len(KEPT)


def rejections(facts: Facts) -> dict[str, str]:
    return {v.rule: v.text for v in plan(facts) if v.status == "reject"}


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
    assert len(plan(facts)) == len(planning.RULES) == 5
    assert list(rejections(facts)) == [
        "draft config",
        "1 map supported",
        "2 map and pruning agree",
        "4 sizes agree",
    ]


def write_run(directory: Path, **sections: object) -> Path:
    values = {
        "algorithm": "dspark",
        "draft": {"config": str(directory / "config.json")},
        "target": {"path": "t"},
        "data": {"path": "d"},
        "optimizer": {"peak_rate": 1e-3, "warmup_steps": 1, "total_steps": 9},
    }
    path = directory / "run.yaml"
    path.write_text(json.dumps(values | sections))  # JSON is YAML
    return path


def test_facts_are_read_from_the_files(tmp_path: Path) -> None:
    """Faults: V and K swapped, a map's kept ids read as offsets, another family's config taken."""
    map_path = tmp_path / "map.safetensors"
    run = write_run(tmp_path, vocabulary={"map": str(map_path), "pinned": [3]})
    facts = read_facts(load_run(run).config)
    assert (facts.prunes, facts.map) == (None, None)
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    meta = {"corpus_fingerprint": "", "tokenizer_fingerprint": "", "coverage": 1.0}
    save_map(map_path, *toy_map(), **meta)
    facts = read_facts(load_run(run).config)
    assert (facts.vocab_size, facts.draft_vocab_size, facts.prunes) == (V, K, True)
    assert facts.map == a_map()
    assert facts.pinned == (3,)
    assert not rejections(facts)
    save_map(map_path, *buffers_from_kept(torch.tensor(KEPT), V + 8), **meta)
    assert f"{V + 8} target ids" in rejections(read_facts(load_run(run).config))["4 sizes agree"]
    map_path.write_bytes(b"no map")
    facts = read_facts(load_run(run).config)
    assert "no vocabulary map could be read" in rejections(facts)["4 sizes agree"]
    (tmp_path / "config.json").write_text(json.dumps(hf_config(surprise=1)))
    assert "surprise" in rejections(read_facts(load_run(run).config))["draft config"]
    facts = read_facts(load_run(run, ["algorithm=dflash"]).config)
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    facts = read_facts(load_run(run, ["algorithm=dflash"]).config)
    assert "set algorithm to 'dspark'" in rejections(facts)["draft config"]


def torch_port(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch_port", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "140", "PYTHONIOENCODING": "utf-8"},
        check=False,
    )


def test_command_exit_status_and_words(tmp_path: Path) -> None:
    """Exit 0 without the draft config on disk, 1 when a rule rejects, 2 for an unreadable file."""
    run = write_run(tmp_path, vocabulary={"map": "m.safetensors"})
    done = torch_port("plan", str(run), "optimizer.peak_rate=6e-4")
    assert done.returncode == 0, done.stderr
    assert "nothing rejected" in done.stdout
    lines = {line.split("│")[1].strip(): line for line in done.stdout.splitlines() if "│" in line}
    assert "0.0006" in lines["optimizer.peak_rate"]
    assert "override" in lines["optimizer.peak_rate"]
    assert "default" in lines["compute.attention"]
    assert "file" in lines["vocabulary.map"]
    assert "unknown" in lines["2 map and pruning agree"]
    (tmp_path / "config.json").write_text(json.dumps(hf_config(draft_vocab_size=None)))
    done = torch_port("plan", str(run))
    assert done.returncode == 1
    assert "1 of 5 rules reject this run" in done.stdout
    for bad in (str(tmp_path / "absent.yaml"), str(tmp_path)):
        done = torch_port("plan", bad)
        assert done.returncode == 2
        assert done.stderr.startswith("Error: ")
        assert "Traceback" not in done.stderr


def test_planning_brings_no_torch() -> None:
    """Fault: a check that takes seconds before it reads a line."""
    code = (
        "import sys, torch_port.planning, torch_port.run, torch_port.training.resume as r;"
        "from torch_port.models.registry import ALGORITHMS as a;"
        "[x.objective_class() and x.config_class() for x in a.values()];"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
