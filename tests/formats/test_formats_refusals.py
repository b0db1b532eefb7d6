"""Configs, places and pairs that are refused, each in a sentence that names what and where."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from format_faults import refuse, with_config
from format_toys import (
    CASES,
    V,
    draft_tensors,
    hf_fields,
    read_json,
    speculators_fields,
    target_tensors,
    write,
    write_draft,
    write_eagle3,
    write_target,
)

from torch_port.errors import UserError
from torch_port.formats.convert import FORMATS, Options, convert
from torch_port.formats.target import TargetDirectory

HEAD, EMBEDDING = "lm_head.weight", "embed_tokens.weight"
PRUNED = CASES["vanilla"]


# --- Config --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        ("hf", "new_field"),
        ("hf", "dflash_config__new_field"),
        ("deepspec", "new_field"),
        ("speculators", "new_field"),
        ("speculators", "transformer_layer_config__new_field"),
        ("speculators", "speculators_config__new_field"),
    ],
)
def test_unknown_config_fields(kind: str, field: str, tmp_path: Path) -> None:
    """Fault: a setting ignored: the draft that is written differs from the one that was trained."""
    message = refuse(with_config(tmp_path, kind, **{field: 3}), "new_field")
    assert "config.json" in message


@pytest.mark.parametrize("kind", ["hf", "deepspec", "speculators"])
@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([0, 3], "has the last layer"),
        ([2, 2], "repeats a layer"),
        ([0, 4], "out of range"),
        ([], "none is named|at least 1"),
        ([-1, 2], "out of range|the embedding"),
    ],
)
def test_captured_layers(kind: str, ids: list[int], text: str, tmp_path: Path) -> None:
    """Field-note 25. Faults: the last layer, whose output comes out normalised; a layer twice; in
    speculators the embedding as a layer, or the check on ids that are one too high."""
    if kind == "speculators":
        source = with_config(tmp_path, kind, aux_hidden_state_layer_ids=[i + 1 for i in ids])
    elif kind == "hf":
        source = with_config(tmp_path, dflash_config__target_layer_ids=ids)
    else:
        source = with_config(tmp_path, kind, target_layer_ids=ids)
    refuse(source, text)


def test_eagle3s_captured_layers(tmp_path: Path) -> None:
    """Faults: the last of 6 layers; a layer twice."""
    for i, (ids, text) in enumerate([([0, 2, 5], "has the last layer"), ([0, 2, 2], "repeats")]):
        directory = write_eagle3(tmp_path / str(i) / "a")
        config = read_json(directory / "config.json")
        config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
        (directory / "config.json").write_text(json.dumps(config))
        refuse(directory, text)


@pytest.mark.parametrize(("name", "value"), [("vanilla", False), ("dflash", True)])
def test_the_other_layout(name: str, value: bool, tmp_path: Path) -> None:
    """Fault: a draft whose slots predict other tokens: fine in every loss, rejected later."""
    source = with_config(tmp_path, "speculators", CASES[name], sample_from_anchor=value)
    refuse(source, f"sample_from_anchor is {value}")


def test_sliding_layers_that_see_later_slots(tmp_path: Path) -> None:
    """Fault: another attention mask than ours, accepted."""
    case = CASES["sliding"]
    source = with_config(tmp_path, "speculators", case, sliding_window_non_causal=True)
    refuse(source, "sliding_window_non_causal is true")


@pytest.mark.parametrize("kind", ["hf", "deepspec", "speculators"])
def test_quantised_by_its_config(kind: str, tmp_path: Path) -> None:
    """Fault: codes read as values."""
    quantised = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    source = with_config(tmp_path, kind, quantization_config=quantised)
    refuse(source, "quantization_config is set: quantised")


def test_quantised_inside_the_backbones_config(tmp_path: Path) -> None:
    """Fault: looked for at the top alone."""
    inside = {"transformer_layer_config__quantization_config": {"quant_method": "fp8"}}
    refuse(with_config(tmp_path, "speculators", **inside), "quantization_config is set")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("rope_scaling", {"type": "yarn", "factor": 4.0}, "rope_scaling"),
        ("rope_parameters", {"rope_theta": 1e4, "rope_type": "yarn"}, "yarn"),
        ("rope_parameters", {"rope_theta": 7.0}, "top level and 7.0 under"),
        ("attention_dropout", 0.1, "attention_dropout is 0.1"),
        ("hidden_act", "gelu", "hidden_act"),
        ("attention_bias", True, "attention_bias"),
        ("tie_word_embeddings", True, "tie_word_embeddings"),
        ("draft_vocab_size", 0, "draft_vocab_size is 0"),
        ("draft_vocab_size", V + 1, "draft_vocab_size is 17"),
        ("draft_vocab_size", 5.0, "whole number"),
        ("vocab_size", True, "vocab_size"),
        ("num_hidden_layers", 10**12, "num_hidden_layers"),
        ("hidden_size", 10**15, "config's sizes make no draft|hidden_size"),
        ("hidden_size", 10**30, "config's sizes make no draft|hidden_size"),
        ("dflash_config", 3, "dflash_config"),
        ("layer_types", 7, "layer_types"),
    ],
)
def test_values_that_are_not_built_or_no_values(
    field: str, value: object, text: str, tmp_path: Path
) -> None:
    """Faults: a setting ignored or coerced; a crash, or all memory, on an absurd number."""
    refuse(with_config(tmp_path, **{field: value}), text)


@pytest.mark.parametrize("layers", [10**12, 10**6, 9000])
def test_absurd_numbers_of_layers_without_layer_types(layers: int, tmp_path: Path) -> None:
    """Fault: a list, or a model, of a million layers is built before anything is compared."""
    fields = hf_fields(PRUNED) | {"num_hidden_layers": layers}
    del fields["layer_types"], fields["dflash_config"]["target_layer_ids"]
    fields["dflash_config"]["target_layer_ids"] = [0, 2]
    refuse(write(tmp_path / "a", fields, draft_tensors(PRUNED)), f"num_hidden_layers is {layers}")


@pytest.mark.parametrize("fields", [{}, {"architectures": ["Qwen3ForCausalLM"]}])
def test_what_is_no_draft(fields: dict[str, Any], tmp_path: Path) -> None:
    """Fault: a target's directory taken for a draft's."""
    refuse(write(tmp_path / "a", fields, target_tensors()), "of no draft that is known")


# --- Speculative tokens --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "asked", "trained"),
    [("vanilla", 5, 4), ("vanilla", 7, 4), ("vanilla", 0, 4), ("dflash", 4, 3)],
)
def test_more_tokens_than_a_block_predicts(
    name: str, asked: int, trained: int, tmp_path: Path
) -> None:
    """Field-note 29: 7 drafts of a block-5 model. A bonus-anchor block of γ predicts γ − 1.

    Faults: written for the server to try; γ for both layouts."""
    source = write_draft(tmp_path / "a", CASES[name])
    options = Options(TargetDirectory(write_target(tmp_path / "t")), speculative_tokens=asked)
    refuse(
        source,
        f"{asked} were asked of a draft that was trained for {trained}",
        "speculators",
        options,
    )


@pytest.mark.parametrize("asked", [5, 0, "4", None, True])
def test_a_file_that_asks_for_more(asked: object, tmp_path: Path) -> None:
    """Fault: a speculators file's own proposal is not looked at."""
    told = speculators_fields(PRUNED)["speculators_config"]
    told["proposal_methods"][0]["speculative_tokens"] = asked
    refuse(with_config(tmp_path, "speculators", speculators_config=told), "speculative_tokens")


def test_fewer_tokens_are_written_kept_and_told(tmp_path: Path) -> None:
    """Faults: a server's setting reset to the whole block on the way; lost without a word."""
    options = Options(TargetDirectory(write_target(tmp_path / "t")), speculative_tokens=2)
    convert(write_draft(tmp_path / "a", PRUNED), tmp_path / "s", "speculators", options)
    convert(tmp_path / "s", tmp_path / "p", "port")
    convert(tmp_path / "p", tmp_path / "s2", "speculators")
    config = read_json(tmp_path / "s2" / "config.json")
    assert config == read_json(tmp_path / "s" / "config.json")
    assert config["speculators_config"]["proposal_methods"] == [
        {"proposal_type": "greedy", "speculative_tokens": 2}
    ]
    _, lost = convert(tmp_path / "s2", tmp_path / "hf", "hf")
    assert any(
        "how a server proposes" in line and '"speculative_tokens": 2' in line for line in lost
    )


# --- Destinations and pairs ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("how", ["directory", "file", "dangling link"])
def test_a_destination_that_exists(kind: str, how: str, tmp_path: Path) -> None:
    """Fault: overwritten, or written into; a link to nowhere noticed after all is written."""
    source, place = write_draft(tmp_path / "a", PRUNED), tmp_path / "there"
    if how == "directory":
        place.mkdir()
    elif how == "file":
        place.write_text("mine")
    else:
        place.symlink_to(tmp_path / "nowhere")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match="exists already"):
        convert(source, place, kind, Options(TargetDirectory(write_target(tmp_path / "a" / "t"))))
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("kind", "name"), [("speculators", HEAD), ("deepspec", EMBEDDING)])
def test_pruned_without_head_and_without_target(kind: str, name: str, tmp_path: Path) -> None:
    """Field-note 26. Fault: exported without a head; rows made up."""
    refuse(write_draft(tmp_path / "a", PRUNED), rf"{name}.*--target", kind)


def test_hf_with_a_head_that_is_nowhere(tmp_path: Path) -> None:
    """Fault: --with-head without an effect."""
    refuse(write_draft(tmp_path / "a", PRUNED), rf"{HEAD}.*--target", "hf", Options(with_head=True))


@pytest.mark.parametrize("kind", ["deepspec", "speculators"])
def test_eagle3_goes_to_hf_and_port_alone(kind: str, tmp_path: Path) -> None:
    """Fault: a file in conventions that nobody checked."""
    options = Options(TargetDirectory(write_target(tmp_path / "t", layers=6)))
    refuse(write_eagle3(tmp_path / "a"), "EAGLE3", kind, options)


def test_an_unknown_format(tmp_path: Path) -> None:
    """Fault: a KeyError."""
    refuse(write_draft(tmp_path / "a", PRUNED), "--to onnx: unknown format; there are port", "onnx")


@pytest.mark.parametrize("kind", ["hf", "deepspec", "speculators"])
@pytest.mark.parametrize("present", [[], ["config.json"], ["model.safetensors"]])
def test_directories_that_lack_a_file(kind: str, present: list[str], tmp_path: Path) -> None:
    """Fault: a traceback; a config alone read as an empty draft."""
    directory = write_draft(tmp_path / "a", PRUNED, kind)
    for file in list(directory.iterdir()):
        if file.name not in present:
            file.unlink()
    refuse(directory, "no weights" if present == ["config.json"] else "no checkpoint")


@pytest.mark.parametrize("name", ["speculators_model_type", "speculators_config"])
def test_speculators_files_without_what_names_them(name: str, tmp_path: Path) -> None:
    """Faults: read as another format, with twenty complaints; the verifier lost without a word."""
    fields = speculators_fields(PRUNED)
    del fields[name]
    directory = write_draft(tmp_path / "a", PRUNED, "speculators")
    (directory / "config.json").write_text(json.dumps(fields))
    refuse(directory, name)


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        ("eagle3", "eagle_config", [10**12]),
        ("eagle3", "eagle_config", "x"),
        ("speculators", "transformer_layer_config__layer_types", 10**40),
        ("speculators", "speculators_model_type", ["dspark"]),
        ("hf", "use_sliding_window", "yes"),
    ],
)
def test_values_of_another_kind(kind: str, field: str, value: object, tmp_path: Path) -> None:
    """Found by the fuzz. Fault: a TypeError from the middle of a reader."""
    if kind != "eagle3":
        refuse(with_config(tmp_path, kind, **{field: value}), field.split("__")[-1])
        return
    directory = write_eagle3(tmp_path / "a")
    config = read_json(directory / "config.json") | {field: value}
    (directory / "config.json").write_text(json.dumps(config))
    refuse(directory, field)
