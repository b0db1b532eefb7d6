"""A run that changes framework in the middle goes on as if it had not (contracts §4, issue 6)."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from format_toys import assert_same, read_tensors
from safetensors.torch import save_file

from parity.cases import Case, read_case
from parity.checks.eagle3 import port_eagle3_draft
from parity.checks.training import LOSS_TOLERANCE, step_batches
from parity.compare import relative_error
from parity.convert import convert
from parity.names import to_torch
from parity.recipes import OPTIMIZER
from parity.sides import port_batch, port_draft, port_objective, setup_jax, spec_batch, spec_draft
from torch_port.config_eagle3 import Eagle3Objective
from torch_port.errors import UserError
from torch_port.formats.weights import header_digest
from torch_port.models.block_draft import FrozenTarget
from torch_port.training.optimizer import MasterAdamW, OptimizerConfig
from torch_port.training.state import RunFacts, load_training, save_training
from torch_port.training.step import training_step

VECTORS = Path(__file__).parents[1] / "vectors"
TARGET_CONFIG = {"model_type": "qwen3", "rope_theta": 1e4, "_name_or_path": "/somewhere"}
RNG = {"0": {"torch": "c3RhdGU="}}
DATA = {"epoch": 1, "sample": 7}
LEGS = (20, 40, 50)  # where the run changes framework, where it changes back, where it ends

# The trajectory check allows a float32 loss 1e-4 and a parameter 1e-1: at its rate an element whose
# gradient is near 0 moves by a whole rate on a rounding. At the tenth of it here, 50 steps stay
# calm: measured are 2e-7 and 8e-7 in float32 (rounding 6e-8 in sums of a few dozen terms), 4e-16
# and 2e-15 in float64. The loss keeps the check's tolerance; parameters are held to 1e-4, as a lost
# second moment or update count moves them by 1e-3 and more.
LOSS = {"float32": LOSS_TOLERANCE["float32"], "float64": 1e-9}
PARAMETERS = {"float32": 1e-4, "float64": 1e-9}


@pytest.fixture(scope="module")
def case() -> Case:
    """The training vector with a longer schedule and a rate at which 50 steps stay calm."""
    read = read_case(VECTORS / "training-pruned")
    numbers = read.extra["optimizer"] | {"total_steps": 50, "warmup_steps": 25, "peak_rate": 3e-3}
    return replace(read, extra={"optimizer": numbers})


class Torch:
    """A run of the port."""

    def __init__(self, case: Case, dtype: str) -> None:
        self.case, self.dtype = case, dtype
        self.draft, self.target = port_draft(case, "float32" if dtype == "bfloat16" else dtype)
        if dtype == "bfloat16":
            self.draft.to(torch.bfloat16)
            tables = self.target.embed_tokens, self.target.lm_head
            self.target = FrozenTarget(*(table.bfloat16() for table in tables))
        numbers = dict(case.extra["optimizer"])
        betas = (numbers.pop("beta1"), numbers.pop("beta2"))
        self.optimizer = MasterAdamW(
            self.draft.named_parameters(), OptimizerConfig(betas=betas, **numbers)
        )
        self.step = 0
        self.facts = RunFacts(
            "dspark",
            port_objective(case, self.draft),
            self.target,
            TARGET_CONFIG,
            rng=RNG,
            data=DATA,
        )

    def run(self, until: int) -> list[float]:
        losses, batches = [], step_batches(self.case)
        while self.step < until:
            arrays = batches[self.step % len(batches)]
            self.step += 1
            batch = self.batch(arrays)
            report = training_step(
                self.draft, self.optimizer, [batch], self.target, self.facts.objective, self.step
            )
            assert report.taken
            losses.append(report.loss)
        return losses

    def batch(self, arrays: dict[str, Any]) -> Any:
        if self.dtype != "bfloat16":
            return port_batch(arrays, self.dtype)
        batch = port_batch(arrays, "float32")
        states = {n: t.bfloat16() for n, t in vars(batch).items() if n.endswith("states")}
        assert len(states) == 2
        return replace(batch, **states)

    def save(self, directory: Path) -> Path:
        save_training(directory, self.draft, self.optimizer, self.step, self.facts)
        return directory

    def load(self, directory: Path) -> dict[str, Any]:
        self.step, record = load_training(directory, self.draft, self.optimizer, self.facts)
        return record

    def parameters(self) -> dict[str, Any]:
        return {n: p.detach().numpy() for n, p in self.draft.named_parameters()}


class Jax:
    """A run of the specification."""

    def __init__(self, case: Case, dtype: str) -> None:
        setup_jax()
        import jax

        from jaxdraft.config import ObjectiveConfig
        from jaxdraft.training import OptimizerConfig, start

        self.case, self.dtype, self.extra = case, dtype, {}
        config, params, target, vocabulary = spec_draft(case, dtype)
        numbers = dict(case.extra["optimizer"])
        numbers["epsilon"] = numbers.pop("eps")
        self.settings = (
            config,
            ObjectiveConfig(**case.objective),
            OptimizerConfig(**numbers),
        )
        self.target = target
        state = start(*self.settings, params, target, vocabulary, None, TARGET_CONFIG)
        # On the device as `restore` puts a state: else jax would compile the step a second time.
        self.state = jax.device_put(state, jax.devices()[0])

    def run(self, until: int) -> list[float]:
        from jaxdraft.training import check_step, train_step

        losses, batches = [], step_batches(self.case)
        while int(self.state.step) < until:
            arrays = batches[int(self.state.step) % len(batches)]
            self.state, report = train_step(self.state, spec_batch(arrays, self.dtype))
            check_step(self.settings[1], report)
            losses.append(float(report.evaluation.loss))
        return losses

    def save(self, directory: Path) -> Path:
        from jaxdraft.checkpoint import save

        save(directory, self.state, self.extra)
        return directory

    def load(self, directory: Path) -> None:
        from jaxdraft.checkpoint import restore
        from jaxdraft.saved_run import read_extra

        self.state = restore(directory, *self.settings, self.target, TARGET_CONFIG, self.dtype)
        self.extra = read_extra(directory)

    def parameters(self) -> dict[str, Any]:
        return to_torch(self.state.params)


FORMAT_OF = {Torch: "port", Jax: "orbax"}


def there_and_back(
    case: Case, dtype: str, first: type[Any], second: type[Any], folder: Path
) -> tuple[list[float], Any, Path]:
    """20 steps of `first`, 20 of `second`, 10 of `first` anew. Returns (losses, run, last file)."""
    run = first(case, dtype)
    losses = run.run(LEGS[0])
    convert(run.save(folder / "1"), folder / "2", FORMAT_OF[second])
    other = second(case, dtype)
    other.load(folder / "2")
    losses += other.run(LEGS[1])
    convert(other.save(folder / "3"), folder / "4", FORMAT_OF[first])
    back = first(case, dtype)
    back.load(folder / "4")
    losses += back.run(LEGS[2])
    return losses, back, folder / "4"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("first", "second"), [(Torch, Jax), (Jax, Torch)])
def test_a_run_goes_on_in_the_other_framework(
    case: Case, dtype: str, first: type[Any], second: type[Any], tmp_path: Path
) -> None:
    """Faults: moments lost, exchanged or not transposed; the update count or the step restarted
    (a second warm-up, another bias correction); the guard's mean forgotten.
    """
    whole = first(case, dtype)
    expected = whole.run(LEGS[2])
    losses, run, last = there_and_back(case, dtype, first, second, tmp_path)
    assert len(losses) == LEGS[2]
    if first is Torch:
        record = json.loads((last / "run.json").read_text())["training"]
        assert (record["step"], record["updates"], record["guard"]["seen"]) == (40, 40, 40)
        assert record["target"]["config"] == TARGET_CONFIG
        assert record["rng"] is record["data"] is None  # they were of step 20
    assert relative_error(losses, expected) <= LOSS[dtype]
    wanted = whole.parameters()
    for name, value in run.parameters().items():
        assert relative_error(value, wanted[name]) <= PARAMETERS[dtype], name


def test_a_bf16_run_comes_back_as_one(case: Case, tmp_path: Path) -> None:
    """The port's common case: weights and target in bf16. jaxdraft goes on in float32, with the
    target's bf16 tables widened where they are read, and the port continues in bf16.

    Faults: the weights' dtype forgotten in between; weights that are not the rounded masters; a
    fingerprint of the widened target.
    """
    setup_jax()
    import jax.numpy as jnp

    from jaxdraft.evaluate import Target

    run = Torch(case, "bfloat16")
    run.run(2)
    convert(run.save(tmp_path / "1"), tmp_path / "2", "orbax")
    other = Jax(case, "float32")
    other.target = Target(*(t.astype(jnp.bfloat16) for t in other.target))
    other.load(tmp_path / "2")
    losses = other.run(4)
    masters = other.parameters()
    convert(other.save(tmp_path / "3"), tmp_path / "4", "port")
    back = Torch(case, "bfloat16")
    back.load(tmp_path / "4")
    for name, master in zip(back.optimizer.names, back.optimizer.masters, strict=True):
        assert master.numpy().tobytes() == masters[name].tobytes(), name
        weight = back.draft.state_dict()[name]
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, master.bfloat16()), name
    # bf16 rounds by 2^-9 per operation; docs/precision.md has a loss off by 2e-3 at most.
    assert relative_error(run.run(4), losses) < 1e-2
    assert back.run(5)


# --- The state itself, there and back ----------------------------------------------------------


def state_case(name: str) -> Case:
    read = read_case(VECTORS / name)
    if "optimizer" not in read.extra:  # a single batch: it is every step's
        batch = {n.replace("batch/", "steps/0/"): t for n, t in read.tensors.items()}
        numbers = OPTIMIZER | {"total_steps": 9, "max_grad_norm": math.inf}
        read = replace(read, tensors=batch, extra={"optimizer": numbers})
    return read


def trained(name: str, dtype: str, steps: int, folder: Path) -> Path:
    """A port checkpoint of a run of some steps; bf16 computes as the port does."""
    run = Torch(state_case(name), dtype)
    run.run(steps)
    return run.save(folder / "port")


def everything(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tensors by the public library, run.json without the digests of its files)."""
    tensors = read_tensors(directory)
    record = json.loads((directory / "run.json").read_text())
    record.pop("headers")
    return tensors, record


@pytest.mark.parametrize(
    ("name", "dtype", "steps"),
    [
        ("training-pruned", "bfloat16", 3),
        ("full-vanilla", "bfloat16", 2),
        ("full-vanilla", "float32", 2),
        ("training-pruned", "float64", 3),
        ("training-pruned", "float32", 0),
    ],
)
def test_a_training_state_is_the_same_after_orbax(
    name: str, dtype: str, steps: int, tmp_path: Path
) -> None:
    """port → orbax → port → orbax → port. Faults: masters taken for weights, moments exchanged, the
    guard's float64 sum rounded, random states or position dropped, an identity map left in.
    """
    first = trained(name, dtype, steps, tmp_path)
    tensors, record = everything(first)
    assert record["training"]["step"] == steps
    assert any(n.startswith("optimizer.masters.") for n in tensors) == (dtype == "bfloat16")
    way = [first]
    for to in ("orbax", "port", "orbax", "port"):
        way.append(tmp_path / f"{len(way)}")
        assert convert(way[-2], way[-1], to)[1] == []
        if to == "port":
            found, again = everything(way[-1])
            assert_same(found, tensors)
            assert again == record
    one, two = tree_of(way[1]), tree_of(way[3])
    assert one.keys() == two.keys()
    for path, leaf in one.items():
        assert (leaf.dtype, leaf.shape) == (two[path].dtype, two[path].shape), path
        assert leaf.tobytes() == two[path].tobytes(), path


def tree_of(directory: Path) -> dict[str, Any]:
    from jaxdraft import stored

    return stored.leaves_by_path(stored.read_tree(directory, "state"))


def test_a_guards_mean_of_float64_comes_back(tmp_path: Path) -> None:
    """Fault: mean → sum → mean off by a last bit. The mean is one whose product with the count,
    divided by it again, is another number; an example is looked for, so that it cannot vanish.
    """
    from jaxdraft import saved_run

    first = trained("training-pruned", "float64", 3, tmp_path)
    convert(first, tmp_path / "o", "orbax")
    run = saved_run.read(tmp_path / "o")
    means = np.random.default_rng(0).uniform(1, 2, 1000)
    mean = next(m for m in means if m * 7 / 7 != m)
    arrays = run.arrays._replace(mean_log=np.float64(mean), seen=np.int64(7))
    saved_run.save_arrays(tmp_path / "changed", arrays, run.meaning, run.extra)
    convert(tmp_path / "changed", tmp_path / "p", "port")
    guard = everything(tmp_path / "p")[1]["training"]["guard"]
    assert guard == {"log_sum": mean * 7, "seen": 7, "mean_log": mean}  # not the carried, stale one
    convert(tmp_path / "p", tmp_path / "back", "orbax")
    assert float(saved_run.read(tmp_path / "back").arrays.mean_log) == mean


def changed(directory: Path, goal: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a port checkpoint whose run.json or tensors (by the public library) differ."""
    shutil.copytree(directory, goal)
    record = json.loads((goal / "run.json").read_text())
    change(record)
    (goal / "run.json").write_text(json.dumps(record))
    return goal


def with_tensors(directory: Path, goal: Path, tensors: dict[str, torch.Tensor]) -> Path:
    goal.mkdir()
    save_file(tensors, goal / "model-00001-of-00001.safetensors", {"format": "pt"})
    record = json.loads((directory / "run.json").read_text())
    record["headers"] = {p.name: header_digest(p) for p in goal.glob("*.safetensors")}
    (goal / "run.json").write_text(json.dumps(record))
    return goal


def test_weights_that_are_not_their_masters_are_refused(tmp_path: Path) -> None:
    """Fault: the weights that were served dropped without a word, as orbax holds the masters."""
    first = trained("training-pruned", "bfloat16", 1, tmp_path)
    tensors = read_tensors(first)
    tensors["norm.weight"] = tensors["norm.weight"] + 1
    other = with_tensors(first, tmp_path / "other", tensors)
    with pytest.raises(UserError, match=r"^norm\.weight: not the masters rounded to BF16") as told:
        convert(other, tmp_path / "o", "orbax")
    assert "\n" not in str(told.value)
    assert not (tmp_path / "o").exists()


def test_a_record_of_another_version_is_refused(tmp_path: Path) -> None:
    """Fault: a resume record that is made anew on the way back, and differs from what was there."""
    first = trained("training-pruned", "float32", 1, tmp_path)

    def change(record: dict[str, Any]) -> None:
        record["training"]["resume"]["loss_decay_gamma"] = 9.0

    other = changed(first, tmp_path / "other", change)
    with pytest.raises(UserError, match=r"resume record's loss_decay_gamma is 9\.0, but .* 4\.0"):
        convert(other, tmp_path / "o", "orbax")


@pytest.mark.parametrize("name", ["dflash-pruned", "eagle3-pruned", "trainable head"])
def test_a_training_state_that_orbax_cannot_hold_is_told(name: str, tmp_path: Path) -> None:
    """DFlash, EAGLE3, a head of the run's own. Faults: a run that jaxdraft could not continue
    written as one; a trained head dropped; a loss that is not told.
    """
    first = untrained_run(name, tmp_path / "port")
    tensors = read_tensors(first)
    _, lost = convert(first, tmp_path / "o", "orbax")
    assert len(lost) == 1
    assert lost[0].startswith("training state of step 0: orbax holds the one of DSpark drafts")
    convert(tmp_path / "o", tmp_path / "back", "port")
    kept = {n: t for n, t in tensors.items() if not n.startswith("optimizer.")}
    assert_same(read_tensors(tmp_path / "back"), kept)
    assert everything(tmp_path / "back")[1]["training"] is None
    if name == "trainable head":
        assert "lm_head.weight" in kept


def untrained_run(name: str, directory: Path) -> Path:
    """A port checkpoint before step 1, of a family or a head that jaxdraft does not train."""
    read = read_case(VECTORS / ("training-pruned" if name == "trainable head" else name))
    table = {n: torch.from_numpy(t) for n, t in read.group("target").items()}
    target = FrozenTarget(table["embed_tokens.weight"], table["lm_head.weight"])
    if name == "eagle3-pruned":
        draft, _ = port_eagle3_draft(read, "float32")
        objective: Any = Eagle3Objective()
    else:
        draft, _ = port_draft(read, "float32")
        objective = port_objective(read, draft)
    named = list(draft.named_parameters())
    optimizer = MasterAdamW(named, OptimizerConfig(peak_rate=1, warmup_steps=0, total_steps=9))
    facts = RunFacts(draft.algorithm, objective, target, TARGET_CONFIG)
    save_training(directory, draft, optimizer, 0, facts)
    if name != "trainable head":
        return directory
    # A run of this version has none: its tensors as the port would write them.
    head = torch.randn(read.config["draft_vocab_size"], read.config["hidden_size"])
    tensors = read_tensors(directory) | {"lm_head.weight": head}
    for part in ("exp_avg", "exp_avg_sq"):
        tensors |= {f"optimizer.{part}.{n}": torch.zeros_like(p) for n, p in named}
        tensors[f"optimizer.{part}.lm_head.weight"] = torch.zeros_like(head)
    return with_tensors(directory, directory.with_name("with head"), tensors)
