"""orbax checkpoints: the whole state comes back, on another device count, or one error says why."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spec_toys import batch, config, hf, params, target, toy_map

from jaxdraft import ObjectiveConfig, OptimizerConfig, map_from_buffers, train_step
from jaxdraft.checkpoint import CheckpointMismatchError, restore, save
from jaxdraft.evaluate import Target
from jaxdraft.training import TrainState, start

OPTIMIZER = OptimizerConfig(peak_rate=0.01, warmup_steps=2, total_steps=10, max_grad_norm=1.0)
OBJECTIVE = ObjectiveConfig(loss_decay_gamma=4.0)


def fresh() -> TrainState:
    return start(config(), OBJECTIVE, OPTIMIZER, params(config()), target(), toy_map())


def again(directory: Path, **changes):
    arguments = {
        "config": config(),
        "objective": OBJECTIVE,
        "optimizer": OPTIMIZER,
        "target": target(),
        "dtype": jnp.float64,
    }
    return restore(directory, **(arguments | changes))


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
    """Faults: moments or the step count left out; a rate that warms up again."""
    directory, state = saved
    back = again(directory)
    assert same(back, state)
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
sys.path.insert(0, sys.argv[2])
jax.config.update("jax_enable_x64", True)
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxdraft.checkpoint import save
from test_spec_checkpoint import fresh
from dataclasses import replace

mesh = Mesh(np.array(jax.devices()), ("d",))
def place(leaf):
    rows = "d" if leaf.ndim and leaf.shape[0] % 8 == 0 else None
    spec = PartitionSpec(rows) if leaf.ndim else PartitionSpec()
    return jax.device_put(leaf, NamedSharding(mesh, spec))
state = fresh()
state = replace(state, params=jax.tree.map(place, state.params))
assert len(state.params["fc"]["kernel"].sharding.device_set) == 8
save(Path(sys.argv[1]), state)
"""


def test_saved_on_eight_devices_restored_on_one(tmp_path: Path) -> None:
    """Field note 20. Fault: a restore without an abstract tree, which orbax refuses here."""
    directory = tmp_path / "eight"
    here = str(Path(__file__).parent)
    subprocess.run(
        [sys.executable, "-c", SAVE_ON_EIGHT, str(directory), here],
        check=True,
        env={k: v for k, v in os.environ.items() if k != "XLA_FLAGS"},
    )
    assert len(jax.devices()) == 1
    back = again(directory)
    assert same(back.params, fresh().params)
    assert back.params["fc"]["kernel"].sharding.device_set == {jax.devices()[0]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"config": config(mask_token_id=5)},
            "draft.mask_token_id: the checkpoint has 3, the run 5",
        ),
        ({"config": config(block_size=3)}, "draft.block_size: the checkpoint has 4, the run 3"),
        ({"objective": ObjectiveConfig(loss_decay_gamma=2.0)}, "objective.loss_decay_gamma"),
        ({"objective": replace(OBJECTIVE, ce_alpha=0.2)}, "objective.ce_alpha"),
        ({"optimizer": replace(OPTIMIZER, peak_rate=0.02)}, "optimizer.peak_rate"),
        ({"dtype": jnp.float32}, "dtype: the checkpoint has 'float64', the run 'float32'"),
        ({"target": target(seed=7)}, "target.fingerprint"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_mismatch_is_refused_by_name(saved, changes, words: str) -> None:
    """Field note 17 and its kind. Fault: a setting that differs accepted silently."""
    with pytest.raises(CheckpointMismatchError, match="does not belong to this run") as caught:
        again(saved[0], **changes)
    assert words in str(caught.value)


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


def test_draft_vocab_size_is_recorded_only_when_pruned(tmp_path: Path) -> None:
    """Contracts §3: an unconditional key would make earlier full-vocabulary runs unresumable."""
    from jaxdraft.checkpoint import meaning

    full = config(draft_vocab_size=None)
    E = Target(*target())
    names = [
        "draft.draft_vocab_size" in meaning(c, OBJECTIVE, OPTIMIZER, E, jnp.float64)
        for c in (config(), full)
    ]
    assert names == [True, False]
    assert hf()["draft_vocab_size"] == 5


WITHOUT_X64 = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import jax, jax.numpy as jnp, numpy as np
import spec_toys as toys
from test_spec_checkpoint import OBJECTIVE, OPTIMIZER, fresh
from dataclasses import replace
from jaxdraft.checkpoint import restore, save
from jaxdraft.training import start, train_step

low = lambda tree: jax.tree.map(
    lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree
)
frozen = low(toys.target())
state = start(
    toys.config(), OBJECTIVE, OPTIMIZER, low(toys.params(toys.config())), frozen, toys.toy_map()
)
state, _ = train_step(state, low(toys.batch()))
save(Path(sys.argv[1]), state)
back = restore(Path(sys.argv[1]), toys.config(), OBJECTIVE, OPTIMIZER, frozen, jnp.float32)
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
