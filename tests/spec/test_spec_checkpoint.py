"""orbax checkpoints: the whole state comes back, on another device count, or one error says why."""

import hashlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_toys import batch, config, dflash_config, params, target, toy_map

from jaxdraft import ObjectiveConfig, OptimizerConfig, map_from_buffers, train_step
from jaxdraft.checkpoint import (
    CheckpointMismatchError,
    meaning,
    restore,
    save,
    target_fingerprint,
)
from jaxdraft.evaluate import Target
from jaxdraft.saved_run import read, read_extra, save_arrays
from jaxdraft.training import TrainState, start

OPTIMIZER = OptimizerConfig(peak_rate=0.01, warmup_steps=2, total_steps=10, max_grad_norm=1.0)
OBJECTIVE = ObjectiveConfig(loss_decay_gamma=4.0)


TARGET_CONFIG = {"model_type": "qwen3", "rope_theta": 10000.0, "rope_scaling": {"factor": 4.0}}


def fresh() -> TrainState:
    return start(
        config(),
        OBJECTIVE,
        OPTIMIZER,
        params(config()),
        target(),
        toy_map(),
        target_config=TARGET_CONFIG,
    )


def arguments():
    return {
        "config": config(),
        "objective": OBJECTIVE,
        "optimizer": OPTIMIZER,
        "target": target(),
        "target_config": TARGET_CONFIG,
        "dtype": jnp.float64,
    }


def again(directory: Path, **changes):
    return restore(directory, **(arguments() | changes))


def same(a, b) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in leaves)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> tuple[Path, TrainState]:
    state = fresh()
    for _ in range(2):
        state, _ = train_step(state, batch())
    directory = tmp_path_factory.mktemp("orbax") / "step-2"
    save(directory, state)
    return directory, state


def test_a_resumed_run_is_the_uninterrupted_one(saved) -> None:
    """Faults: moments, guard or step count left out; a rate that warms up again."""
    directory, state = saved
    back = again(directory)
    assert same(back, state)
    assert int(back.guard.seen) == 2
    assert back.target_config == state.target_config
    after, report = train_step(back, batch())
    expected, uninterrupted = train_step(state, batch())
    assert same(after, expected)
    assert float(report.rate) == float(uninterrupted.rate)


SAVE_ON_EIGHT = """
import os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
import jax
import numpy as np
from pathlib import Path
sys.path.insert(0, sys.argv[3])
jax.config.update("jax_enable_x64", True)
from dataclasses import replace
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxdraft import train_step
from jaxdraft.checkpoint import save
from spec_toys import batch
from test_spec_checkpoint import fresh

mesh = Mesh(np.array(jax.devices()), ("d",))
def place(leaf):
    rows = "d" if leaf.ndim and leaf.shape[0] % 8 == 0 else None
    spec = PartitionSpec(rows) if leaf.ndim else PartitionSpec()
    return jax.device_put(leaf, NamedSharding(mesh, spec))
state, _ = train_step(fresh(), batch())
arrays = ("params", "optimizer_state", "guard", "step")
state = replace(state, **{name: jax.tree.map(place, getattr(state, name)) for name in arrays})
for kernel in (state.params["fc"]["kernel"], state.optimizer_state[1].nu["fc"]["kernel"]):
    assert len({str(shard.index) for shard in kernel.addressable_shards}) == 8
save(Path(sys.argv[1]), state)
paths = jax.tree_util.tree_leaves_with_path({name: getattr(state, name) for name in arrays})
np.savez(sys.argv[2], **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in paths})
"""


def test_saved_on_eight_devices_restored_on_one(tmp_path: Path) -> None:
    """Field note 20: every leaf, sharded over 8 devices after a real step, comes back on one.

    Faults: a restore without an abstract tree, which orbax refuses here; moments left on 8
    devices, restored as zeros or one device's rows only. The step's arrays cross beside the
    checkpoint, in NumPy's own file.
    """
    directory, beside = tmp_path / "eight", tmp_path / "eight.npz"
    subprocess.run(
        [sys.executable, "-c", SAVE_ON_EIGHT, directory, beside, Path(__file__).parent],
        check=True,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    )
    assert len(jax.devices()) == 1
    back = again(directory)
    parts = {n: getattr(back, n) for n in ("params", "optimizer_state", "guard", "step")}
    leaves = jax.tree_util.tree_leaves_with_path(parts)
    with np.load(beside) as expected:
        assert sorted(expected) == sorted(jax.tree_util.keystr(path) for path, _ in leaves)
        for path, leaf in leaves:
            wanted = expected[jax.tree_util.keystr(path)]
            assert leaf.dtype == wanted.dtype, path
            assert np.array_equal(leaf, wanted), path
            assert leaf.sharding.device_set == {jax.devices()[0]}, path
    moments = back.optimizer_state[1]
    assert all(np.any(leaf) for leaf in jax.tree.leaves((moments.mu, moments.nu)))
    assert (int(back.step), int(moments.count), int(back.guard.seen)) == (1, 1, 1)
    assert np.array_equal(back.vocabulary.t2d, toy_map().t2d)


def draft(**changes):
    return {"config": config(**changes)}


def optimizer(**changes):
    return {"optimizer": replace(OPTIMIZER, **changes)}


def objective(**changes):
    return {"objective": replace(OBJECTIVE, **changes)}


def target_config(**changes):
    return {"target_config": TARGET_CONFIG | changes}


# By key of `meaning`: what a run has otherwise. Other keys may differ along with it.
OTHERWISE = {
    "dtype": {"dtype": np.float32},
    "num_anchors": {"num_anchors": 3},
    "target.fingerprint": {"target": 7},  # a seed: arrays are made in the test, in float64
    "target.config.model_type": target_config(model_type="llama"),
    "target.config.rope_theta": target_config(rope_theta=5000.0),
    "target.config.rope_scaling": target_config(rope_scaling={"factor": 8.0}),
    "draft.vocab_size": draft(vocab_size=20),
    "draft.draft_vocab_size": draft(draft_vocab_size=6),
    "draft.hidden_size": draft(hidden_size=16),
    "draft.intermediate_size": draft(intermediate_size=16),
    "draft.num_hidden_layers": draft(num_hidden_layers=2, layer_types=["full_attention"] * 2),
    "draft.num_attention_heads": draft(num_attention_heads=4),
    "draft.num_key_value_heads": draft(num_key_value_heads=2),
    "draft.head_dim": draft(head_dim=6),
    "draft.rms_norm_eps": draft(rms_norm_eps=1e-5),
    "draft.rope_theta": draft(rope_theta=20000.0),
    "draft.layer_types": draft(layer_types=["sliding_attention"], sliding_window=3),
    "draft.sliding_window": draft(sliding_window=3),
    "draft.block_size": draft(block_size=3),
    "draft.num_target_layers": draft(num_target_layers=5),
    "draft.target_layer_ids": draft(target_layer_ids=[0, 1]),
    "draft.mask_token_id": draft(mask_token_id=5),
    "draft.markov_rank": draft(markov_rank=2),
    "draft.markov_head_type": draft(markov_head_type="rnn"),
    "draft.enable_confidence_head": draft(
        enable_confidence_head=False, confidence_head_with_markov=False
    ),
    "draft.confidence_head_with_markov": draft(confidence_head_with_markov=False),
    "draft.initializer_range": draft(initializer_range=0.01),
    "draft.projector_type": {"config": dflash_config()},
    "objective.ce_alpha": objective(ce_alpha=0.2),
    "objective.l1_alpha": objective(l1_alpha=0.8),
    "objective.confidence_alpha": objective(confidence_alpha=0.5),
    "objective.loss_decay_gamma": objective(loss_decay_gamma=None),
    "objective.detach_confidence": objective(detach_confidence=True),
    "optimizer.peak_rate": optimizer(peak_rate=0.02),
    "optimizer.warmup_steps": optimizer(warmup_steps=3),
    "optimizer.total_steps": optimizer(total_steps=11),
    "optimizer.max_grad_norm": optimizer(max_grad_norm=float("inf")),
    "optimizer.final_rate": optimizer(final_rate=0.001),
    "optimizer.beta1": optimizer(beta1=0.8),
    "optimizer.beta2": optimizer(beta2=0.99),
    "optimizer.epsilon": optimizer(epsilon=1e-6),
    "optimizer.weight_decay": optimizer(weight_decay=0.1),
    "optimizer.spike_multiple": optimizer(spike_multiple=5.0),
}


def recorded(**changes):
    return meaning(**(arguments() | changes))


def test_every_key_has_a_case() -> None:
    """Fault: a new key of the record, compared by nobody. `format` has its own test below."""
    assert sorted(OTHERWISE) == sorted(set(recorded()) - {"format"})


@pytest.mark.parametrize("key", OTHERWISE)
def test_a_mismatch_is_refused_by_name(saved, key: str) -> None:
    """Field note 17 and its kind. Fault: a setting that differs accepted silently."""
    changes = dict(OTHERWISE[key])
    if "target" in changes:
        changes["target"] = target(seed=changes["target"])
    here, there = recorded()[key], recorded(**changes)[key]
    assert here != there
    with pytest.raises(CheckpointMismatchError, match="does not belong to this run") as caught:
        again(saved[0], **changes)
    assert f"{key}: the checkpoint has {here!r}, the run {there!r}" in str(caught.value)
    assert "Set the run to the checkpoint's values" in str(caught.value)


def test_pruned_does_not_resume_unpruned(saved) -> None:
    """Fault: an absent key taken for an equal one."""
    with pytest.raises(CheckpointMismatchError) as caught:
        again(saved[0], config=config(draft_vocab_size=None))
    words = "draft.draft_vocab_size: the checkpoint has 5, the run 'not recorded'"
    assert words in str(caught.value)


def test_other_fields_of_the_targets_config_are_refused(saved) -> None:
    """Fault: fields compared over those of one side only."""
    for changed, words in (
        (TARGET_CONFIG | {"hidden_act": "gelu"}, "hidden_act: the checkpoint has 'not recorded'"),
        ({"rope_theta": 10000.0}, "model_type: the checkpoint has 'qwen3', the run 'not recorded'"),
    ):
        with pytest.raises(CheckpointMismatchError) as caught:
            again(saved[0], target_config=changed)
        assert f"target.config.{words}" in str(caught.value)


def test_another_format_is_refused(saved, monkeypatch) -> None:
    """Fault: a checkpoint of another layout of arrays that fails somewhere inside orbax."""
    monkeypatch.setattr("jaxdraft.checkpoint.FORMAT", 1)
    with pytest.raises(CheckpointMismatchError, match="format: the checkpoint has 3, the run 1"):
        again(saved[0])


def test_the_fingerprint_is_of_arrays_and_config() -> None:
    """Contracts §3. Faults: E or U left out, or exchanged; the config left out; its key order."""
    E, U = target()
    other = E.at[3, 2].add(1e-12)
    seen = {
        target_fingerprint(Target(*arrays), TARGET_CONFIG)
        for arrays in ((E, U), (U, E), (other, U), (E, other), (E[:, :4], U))
    }
    assert len(seen) == 5
    with_other = target_fingerprint(target(), TARGET_CONFIG | {"rope_theta": 5000.0})
    assert with_other not in seen
    turned = dict(reversed(TARGET_CONFIG.items()))
    assert target_fingerprint(target(), turned) in seen


def test_the_fingerprint_by_hand() -> None:
    """The bytes of the docstring's recipe, written out. Faults: a separator, a dtype's or shape's
    spelling, an order of rows; a config's place or version that counts.
    """
    E = jnp.array([[1.0, 2.0], [3.0, 4.0]], dtype=jnp.bfloat16)
    U = jnp.array([[1.0], [2.0]], dtype=jnp.float32)
    by_hand = hashlib.sha256(
        b"embed_tokens\0bfloat16\0[2, 2]\0" + bytes.fromhex("803f004040408040")
        + b"lm_head\0float32\0[2, 1]\0" + bytes.fromhex("0000803f00000040")
        + b'{"a": 1, "b": 2}'
    ).hexdigest()  # fmt: skip
    told = {"b": 2, "a": 1, "_name_or_path": "/here", "transformers_version": "5.24"}
    assert target_fingerprint(Target(E, U), told) == by_hand
    # What the fingerprint leaves out is not compared value by value either.
    names = recorded(target_config=told)
    assert [n for n in names if n.startswith("target.config.")] == [
        "target.config.a",
        "target.config.b",
    ]


def test_a_state_without_the_targets_config_is_not_saved(tmp_path: Path) -> None:
    """Fault: a checkpoint that any target of equal arrays may continue."""
    with pytest.raises(ValueError, match="target_config: a checkpoint records the config"):
        save(tmp_path / "none", replace(fresh(), target_config=None))
    with pytest.raises(ValueError, match="target_config: expected what"):
        again(tmp_path, target_config={"rope_theta": float("nan")})


def test_another_map_of_equal_size_is_refused(saved) -> None:
    """Field note 1. Fault: head rows that come to mean other tokens."""
    t2d = np.zeros(16, dtype=bool)
    t2d[[1, 2, 5, 6, 7]] = True
    other = map_from_buffers(t2d, np.array([1, 2, 5, 6, 7]) - np.arange(5))
    with pytest.raises(ValueError, match="vocabulary map"):
        again(saved[0], vocabulary=other)
    assert np.array_equal(again(saved[0], vocabulary=toy_map()).vocabulary.t2d, toy_map().t2d)


def test_nothing_is_overwritten_and_nothing_is_guessed(saved, tmp_path: Path) -> None:
    directory, state = saved
    with pytest.raises(ValueError, match="never overwritten"):
        save(directory, state)
    with pytest.raises(ValueError, match="expected a checkpoint"):
        again(tmp_path / "absent")


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    """Fault: half a directory, under its own name or a temporary one, after a full disk."""
    import orbax.checkpoint as ocp

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(ocp.CompositeCheckpointHandler, "finalize", full)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "run", fresh())
    assert list(tmp_path.iterdir()) == []


def test_a_converters_arrays_are_what_save_writes(saved, tmp_path: Path) -> None:
    """`read` then `save_arrays` gives a run that `restore` continues, and its extra comes back.

    Faults: moments exchanged, the count or the guard left at 0, an extra document that is dropped.
    """
    directory, state = saved
    run = read(directory)
    assert run.extra == {}
    assert int(run.arrays.step) == int(run.arrays.updates) == int(run.arrays.seen) == 2
    save_arrays(tmp_path / "again", run.arrays, run.meaning, {"rng": [1, None, "π"]})
    assert same(again(tmp_path / "again"), state)
    assert read_extra(tmp_path / "again") == {"rng": [1, None, "π"]}
    save(tmp_path / "third", state, read_extra(tmp_path / "again"))
    assert read(tmp_path / "third").extra == {"rng": [1, None, "π"]}
    with pytest.raises(ValueError, match="expected a checkpoint"):
        read(tmp_path)


def test_draft_vocab_size_is_recorded_only_when_pruned() -> None:
    """Contracts §3: an unconditional key would make earlier full-vocabulary runs unresumable."""
    full = config(draft_vocab_size=None)
    names = ["draft.draft_vocab_size" in recorded(config=c) for c in (config(), full)]
    assert names == [True, False]


WITHOUT_X64 = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import jax, jax.numpy as jnp, numpy as np
import spec_toys as toys
from test_spec_checkpoint import OBJECTIVE, OPTIMIZER, TARGET_CONFIG
from jaxdraft.checkpoint import restore, save
from jaxdraft.training import start, train_step

low = lambda tree: jax.tree.map(
    lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
)
frozen = low(toys.target())
state = start(
    toys.config(), OBJECTIVE, OPTIMIZER, low(toys.params(toys.config())), frozen, toys.toy_map(),
    target_config=TARGET_CONFIG,
)
state, _ = train_step(state, low(toys.batch()))
save(Path(sys.argv[1]), state)
back = restore(
    Path(sys.argv[1]), toys.config(), OBJECTIVE, OPTIMIZER, frozen, TARGET_CONFIG, jnp.float32
)
for one, two in zip(jax.tree.leaves(back), jax.tree.leaves(state), strict=True):
    assert np.array_equal(one, two)
"""


def test_float32_without_x64_round_trips(tmp_path: Path) -> None:
    """Fault: the map of a jitted step, int32 without x64, saved so that nothing reads it back."""
    subprocess.run(
        [sys.executable, "-c", WITHOUT_X64, str(tmp_path / "low"), str(Path(__file__).parent)],
        check=True,
        env=os.environ | {"JAX_ENABLE_X64": "0"},
    )
