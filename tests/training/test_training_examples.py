"""The run files in examples/: each loads, plans without a rejection, is of the draft it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import yaml

from torch_port.models.registry import ALGORITHMS, find_algorithm, read_draft_config
from torch_port.planning import plan, read_facts
from torch_port.run import RunConfig, load_run, section_classes
from torch_port.vocabulary.files import load_map

ROOT = Path(__file__).resolve().parent.parent.parent
RUNS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "examples").rglob("*.yaml")
    if not path.name.startswith(".")
)
# design note ascend.md's last paragraph: the draft of the proposal, field by field.
PROPOSAL = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 5,
    "block_size": 16,
    "markov_rank": 256,
    "target_layer_ids": (2, 17, 32, 47, 62),
    "num_target_layers": 64,
    "vocab_size": 248_320,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "projector_type": "dspark",
}


def example(name: str, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run of examples/, whose paths are relative to the repository."""
    monkeypatch.chdir(ROOT)
    return load_run(Path(name)).config


def draft_config(run: RunConfig) -> Any:
    raw = read_draft_config(run.draft.config)
    assert raw is not None
    return find_algorithm(run.algorithm).config_class().from_hf(raw)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", RUNS)
def test_every_run_file_plans_without_a_rejection(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Faults: a setting renamed and not here; a map beside an unpruned draft; sizes that differ."""
    verdicts = plan(read_facts(example(name, monkeypatch)))
    assert [v.text for v in verdicts if v.status == "reject"] == []
    for verdict in verdicts:
        if verdict.status == "unknown":  # only for what is made on the user's machine
            assert all("runs/" in need or "models/" in need for need in verdict.needs), verdict


def test_the_named_examples_are_there() -> None:
    """Fault: a file that docs and issue name was moved, and the test above passes without it."""
    names = {"run", "demo-run", "qwen3-8b", "qwen3.6-27b-full", "qwen3.6-27b-k64000"}
    assert {f"examples/{name}.yaml" for name in names} <= set(RUNS)


@pytest.mark.parametrize(
    ("name", "K", "length", "anchors", "buffer", "billions"),
    [
        ("full", 248_320, 2048, 512, 512, 1.86),
        ("k64000", 64_000, 4096, 1024, 128, 1.81),  # 184,320 rows of 256 in W2 less
    ],
)
def test_the_proposals_runs_are_of_its_draft(
    name: str,
    K: int,
    length: int,
    anchors: int,
    buffer: int,
    billions: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Faults: a digit lost; draft_vocab_size inside dflash_config, where nothing reads it."""
    run = example(f"examples/qwen3.6-27b-{name}.yaml", monkeypatch)
    config = draft_config(run)
    values = config.model_dump()
    assert {key: values[key] for key in PROPOSAL} == PROPOSAL
    assert config.draft_vocab_size == K
    assert (run.data.max_length, run.data.num_anchors) == (length, anchors)
    assert (run.vocabulary.map is None) == (K == 248_320)
    assert run.compute.objective_buffer_mib == buffer
    assert run.training.dtype == "bfloat16"
    raw = json.loads((ROOT / run.draft.config / "config.json").read_text())
    assert raw["draft_vocab_size"] == K  # at the top level (contracts §4)
    H, heads, kv = config.hidden_size, 32 * 128, 8 * 128
    layer = 2 * H * heads + 2 * H * kv + 3 * H * config.intermediate_size
    markov = config.markov_rank * (config.vocab_size + config.draft_vocab_size)
    trained = 5 * H * H + config.num_hidden_layers * layer + markov  # norms are a rounding error
    assert round(trained / 1e9, 2) == billions


def test_the_8b_run_is_for_eight_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults: another model's sizes; a step of other samples than its comment says."""
    run = example("examples/qwen3-8b.yaml", monkeypatch)
    config = draft_config(run)
    assert (config.vocab_size, config.draft_vocab_size) == (151_936, 32_000)
    assert (config.hidden_size, config.intermediate_size) == (4096, 12_288)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (32, 8, 128)
    assert (config.num_target_layers, len(config.target_layer_ids)) == (36, 5)
    assert run.data.batch_size * run.data.accumulation * 8 == 64


def known_settings() -> set[str]:
    """Every setting of every algorithm's run file, by its dotted name."""
    names = {"algorithm"}
    for algorithm in ALGORITHMS.values():
        for section, kind in section_classes(algorithm).items():
            names |= {section, *(f"{section}.{field}" for field in kind.model_fields)}
    return names


def test_the_migration_tables_name_settings_that_are_there() -> None:
    """Fault: a setting renamed here, and the docs send people to the old name."""
    text = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", text, flags=re.MULTILINE)
    named = {name for _, ours in rows for name in re.findall(r"`([a-z_.]+)`", ours)}
    assert len(named) > 30
    assert named <= known_settings()
    dotted = set(re.findall(r"`((?:data|optimizer|training|checkpoints|objective)\.\w+)`", text))
    theirs = {name for their, _ in rows for name in re.findall(r"`([\w.]+)`", their)}
    assert dotted <= known_settings() | theirs


def test_the_migration_example_is_a_run_file(tmp_path: Path) -> None:
    """Fault: an example that is refused."""
    text = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    shown = text[text.index("    train:  ") :].split("\n\n## ")[0]
    ours = "\n".join(line[42 + 4 :] for line in shown.splitlines())
    path = tmp_path / "run.yaml"
    path.write_text(ours)
    assert yaml.safe_load(ours)["draft"] == {"config": "draft"}
    run = load_run(path).config
    objective = run.objective.model_dump()
    assert (objective["ce_alpha"], objective["l1_alpha"]) == (0.1, 0.9)
    assert objective["loss_decay_gamma"] == 4.0
    assert (run.optimizer.peak_rate, run.training.out) == (6e-4, "runs/draft")


def test_a_map_of_two_arrays_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: the snippet's file is none that the port reads, or another map: 0, 3, 5 of 8 ids."""
    monkeypatch.chdir(tmp_path)
    numpy.save("d2t-64000.npy", numpy.array([0, 2, 3], dtype=numpy.int64))
    numpy.save("t2d-64000.npy", numpy.array([True, False, False, True, False, True, False, False]))
    text = (ROOT / "docs" / "migrating.md").read_text(encoding="utf-8")
    snippet = text[text.index("    import numpy, torch") : text.index("    vocabulary:\n")]
    exec("\n".join(line[4:] for line in snippet.splitlines()), {})
    t2d, d2t, _ = load_map(Path("map-64000.pt"))
    assert (torch.arange(3) + d2t).tolist() == [0, 3, 5]
    assert t2d.nonzero().squeeze(1).tolist() == [0, 3, 5]
