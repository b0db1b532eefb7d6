"""What planning reads of a run's files, and `torch-port plan`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_port_planning import RULE_5, K, a_map, rejections, verdict
from toys import KEPT, V, hf_config, toy_map

from torch_port.planning import Verdict, plan, read_facts
from torch_port.run import load_run
from torch_port.vocabulary.files import save_map
from torch_port.vocabulary.mapping import buffers_from_kept


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
    assert "no vocabulary map could be read" in rejections(facts)["map file"]
    assert "is refused above" in verdict(facts, "4 sizes agree").text
    (tmp_path / "config.json").write_text(json.dumps(hf_config(surprise=1)))
    assert "surprise" in rejections(read_facts(load_run(run).config))["draft config"]
    for value, shown in (([], "[]"), ({"a": 1}, "{'a': 1}"), (None, "null"), (8.0, "8.0")):
        (tmp_path / "config.json").write_text(json.dumps(hf_config(hidden_size=value)))
        text = rejections(read_facts(load_run(run).config))["draft config"]  # never a traceback
        assert f"hidden_size is {shown}; set hidden_size to a whole number" in text
    (tmp_path / "config.json").write_text(json.dumps(hf_config()))
    facts = read_facts(load_run(run, ["algorithm=dflash"]).config)
    assert "set algorithm to 'dspark'" in rejections(facts)["draft config"]
    facts = read_facts(load_run(run, ["algorithm=eagle3"]).config)
    assert "dflash_config" in rejections(facts)["draft config"]  # eagle3's own class reads it


def written(path: Path, values: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path


def planned(run: Path) -> dict[str, Verdict]:
    return {v.rule: v for v in plan(read_facts(load_run(run).config))}


def test_paths_of_target_and_data_are_looked_at(tmp_path: Path) -> None:
    """Faults: a path that is wrong and unsaid; absence taken for an error."""
    target, data = tmp_path / "target", tmp_path / "data"
    run = write_run(tmp_path, target={"path": str(target)}, data={"path": str(data)})
    before = planned(run)
    for rule, name in (("target", f"target.path {target}"), ("data", f"data.path {data}")):
        assert (before[rule].status, before[rule].needs) == ("unknown", (name,))
        assert f"{name} is not on disk" in before[rule].text
    for path in (target, data):
        path.write_text("a file")
    for rule in ("target", "data"):
        assert planned(run)[rule].status == "reject"
        assert "is no directory" in planned(run)[rule].text
    for path in (target, data):
        path.unlink()
        path.mkdir()
    assert planned(run)["data"].status == "ok"
    assert planned(run)["target"].status == "reject"
    assert (
        f"target.path {target}: the directory is there and holds no" in planned(run)["target"].text
    )
    (target / "config.json").write_text("{")
    assert f"target.path {target}: no JSON" in planned(run)["target"].text
    written(target / "config.json", {})
    assert planned(run)["target"].status == "ok"


@pytest.mark.parametrize("path", ["a" * 5000, "a\0b"])
def test_paths_that_can_be_no_files_are_said(tmp_path: Path, path: str) -> None:
    """Fault: the system's own error (too long, a NUL, not permitted) instead of a verdict."""
    names = {"draft": "config", "target": "path", "data": "path", "vocabulary": "map"}
    run = tmp_path / "run.json"
    values = {
        "algorithm": "dspark",
        "optimizer": {"peak_rate": 1e-4, "warmup_steps": 1, "total_steps": 10},
    }
    run.write_text(json.dumps(values | {s: {name: path} for s, name in names.items()}))
    verdicts = planned(run)
    rules = {"draft": "draft config", "target": "target", "data": "data", "vocabulary": "map file"}
    for section, name in names.items():
        found = verdicts[rules[section]]
        assert found.status == "reject"
        assert found.text.startswith(f"{section}.{name} 'a")
        assert found.text.endswith("name a path that can be read")
        assert len(found.text) < 160
    assert "unknown" not in [found.status for found in verdicts.values() if found.rule == "data"]


def test_draft_config_directory_without_the_file(tmp_path: Path) -> None:
    """Fault: a directory that is there, without config.json, passed over as not there yet."""
    run = write_run(tmp_path, draft={"config": str(tmp_path)})
    assert planned(run)["draft config"].status == "reject"
    assert f"draft.config {tmp_path}: the directory is there" in planned(run)["draft config"].text


@pytest.mark.parametrize("nested", [False, True])
def test_rule_5_target_on_disk(tmp_path: Path, nested: bool) -> None:
    """Faults: sizes of a multimodal target's wrong part; a fitting target rejected."""
    draft = hf_config()
    sizes = {
        "vocab_size": V,
        "hidden_size": draft["hidden_size"],
        "num_hidden_layers": draft["num_target_layers"],
    }
    run = write_run(tmp_path, target={"path": str(tmp_path / "target")})
    written(tmp_path / "config.json", draft)
    other = {"text_config": sizes, "vocab_size": V + 9, "hidden_size": 3}
    written(tmp_path / "target" / "config.json", other if nested else sizes)
    assert planned(run)[RULE_5].status == "ok"
    sizes["vocab_size"] = V + 8
    written(tmp_path / "target" / "config.json", other if nested else sizes)
    found = planned(run)[RULE_5]
    assert found.status == "reject"
    assert f"has vocab_size {V}, but" in found.text
    assert f"has vocab_size {V + 8}" in found.text
    del sizes["vocab_size"], other["vocab_size"]
    written(tmp_path / "target" / "config.json", other if nested else sizes)
    assert planned(run)[RULE_5].status == "unknown"  # a size that is not said is no evidence
    assert "does not say vocab_size" in planned(run)[RULE_5].text


def test_map_file_absent_is_said_whatever_the_draft_config(tmp_path: Path) -> None:
    """Fault: a missing map hidden behind a missing draft config."""
    run = write_run(tmp_path, vocabulary={"map": "absent.safetensors"})
    for _ in range(2):
        found = planned(run)
        assert found["map file"].status == "unknown"
        assert found["map file"].needs == ("vocabulary.map absent.safetensors",)
        assert "vocabulary.map absent.safetensors" in found["4 sizes agree"].needs
        assert "vocabulary.map absent.safetensors is not on disk" in found["4 sizes agree"].text
        written(tmp_path / "config.json", hf_config())


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
    assert "rules are unknown" in done.stdout
    assert "(asked because an unpruned draft of this family" in done.stdout
    (tmp_path / "config.json").write_text(json.dumps(hf_config(draft_vocab_size=None)))
    done = torch_port("plan", str(run))
    assert done.returncode == 1
    assert "1 of 9 rules reject this run" in done.stdout
    for bad in (str(tmp_path / "absent.yaml"), str(tmp_path)):
        done = torch_port("plan", bad)
        assert done.returncode == 2
        assert done.stderr.startswith("Error: ")
        assert "Traceback" not in done.stderr


def test_planning_brings_no_torch() -> None:
    """Fault: a check that takes seconds before it reads a line."""
    code = (
        "import sys, torch_port.planning, torch_port.run, torch_port.cli;"
        "import torch_port.training.resume;"
        "from torch_port.models.registry import ALGORITHMS as a;"
        "[x.objective_class() and x.config_class() for x in a.values()];"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
