"""`torch-port capture`: which states reach the disk, shard by shard, and what is refused before."""

import json
import shutil
from collections import namedtuple
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from data_toys import (
    QUIET,
    V,
    contents,
    corpus,
    drawn_lines,
    write_adding_target,
    write_drawn_target,
)
from rich.console import Console
from safetensors.torch import load_file, save_file

import torch_port.data.capture_run as run_module
from torch_port.data.capture_run import CaptureSettings, capture_features
from torch_port.data.conversations import DataError
from torch_port.data.features import FeatureDirectory
from torch_port.data.prepare import prepare_corpus
from torch_port.data.target_model import load_target_model
from torch_port.errors import UserError


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `prepared`, and the targets `adding` and `drawn`."""
    directory = tmp_path_factory.mktemp("capture")
    prepare_corpus(corpus(directory / "c", drawn_lines(24)), directory / "prepared", QUIET)
    write_adding_target(directory / "adding")
    write_drawn_target(directory / "drawn")
    return directory


def settings(root: Path, out: Path, target: str = "drawn") -> CaptureSettings:
    return CaptureSettings(
        prepared=root / "prepared",
        target=root / target,
        directory=out,
        target_layer_ids=(2, 0),
        dtype="float32",
        batch_tokens=64,
        shard_tokens=100,
    )


def test_layers_are_outputs_counted_from_0_in_the_given_order(root: Path, tmp_path: Path) -> None:
    """Field note 25, on a real Qwen3 whose layer k adds 10^k to ones: after layer 2 stands 112,
    after layer 0 stands 2. Faults: a layer's input taken (12 and 1), layers sorted, the final state
    before its norm (1112 instead of 3), states of another sample."""
    given = settings(root, tmp_path / "out", "adding")
    capture_features(given, QUIET)
    read, prepared = FeatureDirectory(tmp_path / "out"), FeatureDirectory(root / "prepared")
    assert read.ids == prepared.ids
    assert read.metadata["target_layer_ids"] == [2, 0]
    for i in range(len(read)):
        sample, tokens = read[i], prepared.tokens(i)
        S = len(tokens["input_ids"])
        assert torch.equal(sample["input_ids"], tokens["input_ids"].long())
        assert torch.equal(sample["loss_mask"], tokens["loss_mask"].float())
        expected = torch.tensor([112.0] * 8 + [2.0] * 8).expand(S, 16)
        # float32: a norm's eps of 1e-6 beside 1, and sums of 8 products.
        torch.testing.assert_close(sample["hidden_states"], expected, rtol=1e-5, atol=0)
        final = sample["target_last_hidden_states"]
        torch.testing.assert_close(final, torch.full((S, 8), 3.0), rtol=1e-5, atol=0)


@pytest.mark.parametrize("layers", [(3,), (0, 3), (1, 1), (-1,), (4,)])
def test_unservable_layers_are_refused_before_anything_is_written(
    root: Path, tmp_path: Path, layers: tuple[int, ...]
) -> None:
    """Faults: the last layer, which transformers hands out normalised; duplicates; ids from the
    end; a directory left behind."""
    given = replace(settings(root, tmp_path / "out"), target_layer_ids=layers)
    with pytest.raises(DataError, match="target_layer_ids"):
        capture_features(given, QUIET)
    assert not (tmp_path / "out").exists()


def test_states_and_normalizer_are_transformers_own(root: Path, tmp_path: Path) -> None:
    """One sample at a time, with all logits, in float64 from there on. Faults: padding that is
    seen; a batch's results handed to other samples; a slice of the head left out."""
    from transformers import AutoModelForCausalLM

    capture_features(settings(root, tmp_path / "out"), QUIET)
    model = AutoModelForCausalLM.from_pretrained(root / "drawn", dtype=torch.float32).eval()
    read = FeatureDirectory(tmp_path / "out")
    assert len({place[0] for place in read.places}) > 3  # several shards
    for i in range(len(read)):
        sample = read[i]
        with torch.no_grad():
            out = model(input_ids=sample["input_ids"][None], output_hidden_states=True)
        states = torch.cat([out.hidden_states[3], out.hidden_states[1]], -1)[0]
        # float32 sums in another order.
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(sample["hidden_states"], states, **close)
        last = sample["target_last_hidden_states"]
        torch.testing.assert_close(last, out.hidden_states[-1][0], **close)
        exact = out.logits[0].double().logsumexp(-1)
        torch.testing.assert_close(sample["target_log_normalizer"].double(), exact, **close)


def test_bf16_states_with_a_float32_normalizer_of_what_is_stored(
    root: Path, tmp_path: Path
) -> None:
    """Faults: a normaliser in bf16, or of states before they were rounded: the kept ids' mass would
    exceed 1 (spec sheet §11)."""
    capture_features(replace(settings(root, tmp_path / "out"), dtype="bfloat16"), QUIET)
    read = FeatureDirectory(tmp_path / "out")
    head = load_file(root / "drawn" / "model.safetensors")["lm_head.weight"].bfloat16().double()
    for i in range(len(read)):
        sample = read[i]
        assert sample["hidden_states"].dtype == torch.bfloat16
        assert sample["target_last_hidden_states"].dtype == torch.bfloat16
        assert sample["target_log_normalizer"].dtype == torch.float32
        exact = (sample["target_last_hidden_states"].double() @ head.T).logsumexp(-1)
        # Products of bf16 values are exact in float32; what is left is float32 summation.
        torch.testing.assert_close(
            sample["target_log_normalizer"].double(), exact, rtol=2e-6, atol=2e-6
        )


def test_two_processes_and_an_interruption_change_nothing(root: Path, tmp_path: Path) -> None:
    """Real processes. Faults: shards exchanged; finished ones captured again; a half-written one
    taken for finished; another target, layers or dtype mixed in."""
    one, two = tmp_path / "one", tmp_path / "two"
    capture_features(settings(root, one), QUIET)
    capture_features(settings(root, two), QUIET, processes=2)
    assert contents(one) == contents(two)
    shards = sorted(one.glob("*.safetensors"))
    (one / "index.json").unlink()  # as if killed after all shards but two
    for shard in (shards[1], shards[-1]):
        shard.unlink()
    (one / f".{shards[1].name}.77.tmp").write_bytes(b"half")
    then = {shard: shard.stat().st_mtime_ns for shard in one.glob("*.safetensors")}
    plan = capture_features(settings(root, one), QUIET)
    assert [job.number for job in plan.left] == [1, len(shards) - 1]
    assert contents(one) == contents(two)
    assert all(shard.stat().st_mtime_ns == before for shard, before in then.items())
    for change, named in (
        ({"target_layer_ids": (0, 2)}, r"target_layer_ids was \[2, 0\], is \[0, 2\]"),
        ({"dtype": "bfloat16"}, "dtype was"),
        ({"target": root / "adding"}, "target_fingerprint was"),
    ):
        with pytest.raises(DataError, match=named):
            capture_features(replace(settings(root, one), **change), QUIET)
    # A smaller batch, after running out of memory, is no other input.
    capture_features(replace(settings(root, one), batch_tokens=8), QUIET)
    assert contents(one) == contents(two)


def test_the_disk_is_asked_before_anything_is_captured(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """By hand: 24 float32 states of 8 and 16 bytes of id, mask and normaliser a token. Faults: an
    estimate without the final states; a run that fills the disk; one that forgets what is there."""
    given = settings(root, tmp_path / "out")
    tokens = sum(FeatureDirectory(root / "prepared").lengths)
    bytes_in_all = tokens * ((2 + 1) * 8 * 4 + 16)
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(run_module.shutil, "disk_usage", lambda _: Usage(0, 0, bytes_in_all - 1))
    with pytest.raises(DataError, match="are free"):
        capture_features(given, QUIET)
    assert not (tmp_path / "out").exists()  # the same name is free for fewer layers
    monkeypatch.setattr(run_module.shutil, "disk_usage", lambda _: Usage(0, 0, bytes_in_all))
    with pytest.raises(DataError, match="--limit-gb"):
        capture_features(given, QUIET, limit_gb=(bytes_in_all - 1) / 1e9)
    plan = capture_features(given, Console(), limit_gb=bytes_in_all / 1e9)
    assert (plan.total_bytes, plan.left_bytes) == (bytes_in_all, bytes_in_all)
    assert "112 bytes a token" in capsys.readouterr().out
    stored = [load_file(shard) for shard in (tmp_path / "out").glob("*.safetensors")]
    assert sum(t.nbytes for shard in stored for t in shard.values()) == bytes_in_all
    assert capture_features(given, QUIET).left_bytes == 0


def test_another_architecture_is_captured_and_its_names_do_not_matter(tmp_path: Path) -> None:
    """GPT-2 has `transformer.h`, layers that return tuples in some versions, and a tied head.
    Fault: only models named like Llama."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=V, n_embd=8, n_layer=3, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path / "gpt2")
    prepare_corpus(corpus(tmp_path / "c", drawn_lines(3)), tmp_path / "prepared", QUIET)
    given = settings(tmp_path, tmp_path / "out", "gpt2")
    capture_features(replace(given, target_layer_ids=(0, 1)), QUIET)
    sample = FeatureDirectory(tmp_path / "out")[1]
    with torch.no_grad():
        out = model(input_ids=sample["input_ids"][None], output_hidden_states=True)
    states = torch.cat(out.hidden_states[1:3], -1)[0]
    torch.testing.assert_close(sample["hidden_states"], states, rtol=1e-4, atol=1e-5)
    exact = out.logits[0].logsumexp(-1)
    torch.testing.assert_close(sample["target_log_normalizer"], exact, rtol=1e-4, atol=1e-5)


def test_a_target_that_would_be_made_up_or_means_something_else_is_refused(
    root: Path, tmp_path: Path
) -> None:
    """Faults: an absent norm initialised anew with a warning; ids of another tokenizer; logits that
    are not head times state; a sample longer than the target's positions."""
    broken = tmp_path / "broken"
    shutil.copytree(root / "drawn", broken)
    weights = load_file(broken / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.norm\.weight is absent"):
        load_target_model(broken, "float32", "cpu")

    shutil.copytree(root / "drawn", tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="their ids mean other tokens"):
        capture_features(replace(settings(root, tmp_path / "o"), target=tmp_path / "other"), QUIET)

    shutil.copytree(root / "drawn", tmp_path / "scaled")
    told = json.loads((tmp_path / "scaled" / "config.json").read_text())
    for name, value, error in (
        ("final_logit_softcapping", 30.0, "final_logit_softcapping is 30.0"),
        ("max_position_embeddings", 8, "--max-length 8"),
    ):
        (tmp_path / "scaled" / "config.json").write_text(json.dumps(told | {name: value}))
        with pytest.raises(UserError, match=error):
            capture_features(
                replace(settings(root, tmp_path / "s"), target=tmp_path / "scaled"), QUIET
            )
    with pytest.raises(UserError, match="no such directory"):
        capture_features(replace(settings(root, tmp_path / "n"), target=tmp_path / "no"), QUIET)
