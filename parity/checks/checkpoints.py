"""The conversion matrix: a draft through every pair of formats, bit for bit (contracts §4).

The conversions are `parity.convert`'s and the port's; what comes back is compared with what was
drawn, and what orbax holds is evaluated by the specification against the port on the drawn weights.
"""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from parity.cases import Array, Case, as_dtype
from parity.checks.base import Check, CheckResult, Measured, Plan, record
from parity.checks.continued import STATE_RUN, compare_continued, state_case
from parity.compare import relative_error
from parity.configurations import BY_NAME
from parity.sides import Answer, port_answer, run_port, run_spec, spec_batch
from parity.tolerances import EXACT, batch_tolerance

NAME = "checkpoints"
CHOSEN = ("pruned-gated", "full-rnn", "dflash-pruned")
_BLOCK_FORMATS = ("hf", "deepspec", "speculators", "port", "orbax")


def run_checkpoints(plan: Plan) -> CheckResult:
    """Convert drawn drafts between all formats; a quick run, one draft from hf and back."""
    result, started = CheckResult(NAME), time.process_time()
    names = CHOSEN[:1] if plan.quick and plan.configurations is None else CHOSEN
    chosen = [BY_NAME[name] for name in names if plan.wants(name)]
    pairs = list(product(_BLOCK_FORMATS, _BLOCK_FORMATS))
    if plan.quick:
        pairs = [(a, b) for a, b in pairs if "hf" in (a, b) or a == b == "orbax"]
    for done, configuration in enumerate(chosen, start=1):
        drawn = _out_of_order(configuration.case(plan.seed, 0))
        case = replace(drawn, extra={NAME: [list(pair) for pair in pairs]})
        record({NAME: result}, configuration.name, case, compare_conversions(case))
        plan.progress(done, len(chosen))
    if plan.wants(STATE_RUN):
        record({NAME: result}, STATE_RUN, None, compare_continued(state_case(plan.seed), NAME))
    result.seconds = time.process_time() - started
    return result


def _out_of_order(case: Case) -> Case:
    """Return a draft that reads its captured layers from the last to the first, as fc may."""
    nested = case.config["dflash_config"]
    layers = {"target_layer_ids": nested["target_layer_ids"][::-1]}
    return replace(case, config=case.config | {"dflash_config": nested | layers})


def compare_conversions(case: Case) -> list[Measured]:
    """Return the comparisons of every pair of formats that the case asks for."""
    from torch_port.formats.target import TargetDirectory

    measured: list[Measured] = []
    with tempfile.TemporaryDirectory(prefix="parity-") as temporary:
        where = Path(temporary)
        _write_target(where / "target", case)
        target = TargetDirectory(where / "target")
        held = {"hf": _write_hf(where / "hf", case)}
        for name in sorted({name for pair in case.extra[NAME] for name in pair} - {"hf"}):
            held[name] = where / name
            measured += _convert(held["hf"], held[name], name, target, case, f"hf to {name}")
        for a, b in case.extra[NAME]:
            if a == "hf" and b != "hf":
                continue  # done above
            measured += _convert(held[a], where / f"{a}-{b}", b, target, case, f"{a} to {b}")
        measured += _layers_written(held, case)
        if (where / "orbax").is_dir():
            measured += _evaluate(where / "orbax", case)
    return measured


def _layers_written(held: dict[str, Path], case: Case) -> list[Measured]:
    """The captured layers as the files say them: a reader that undoes a writer's fault hides it.

    Contracts §4: speculators counts from the embedding, i + 1; hf and deepspec say layer i.
    """
    own = list(case.config["dflash_config"]["target_layer_ids"])
    measured = []
    for name, key, wanted in (
        ("hf", "target_layer_ids", own),
        ("deepspec", "target_layer_ids", own),
        ("speculators", "aux_hidden_state_layer_ids", [layer + 1 for layer in own]),
    ):
        if name in held and (held[name] / "config.json").is_file():
            found = _found(json.loads((held[name] / "config.json").read_text()), key)
            error = 0.0 if found == wanted else float("inf")
            measured.append(Measured(NAME, f"{name}: {key} as it is written", error, EXACT))
    return measured


def _found(config: Any, key: str) -> Any:
    """A key's value, wherever in a config it stands."""
    if not isinstance(config, dict):
        return None
    if key in config:
        return config[key]
    return next((v for v in (_found(inner, key) for inner in config.values()) if v), None)


def _write_hf(directory: Path, case: Case) -> Path:
    return _write(directory, case.config, case.group("weights"))


def _write_target(directory: Path, case: Case) -> None:
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": case.config["num_target_layers"],
        "hidden_size": case.config["hidden_size"],
        "vocab_size": case.config["vocab_size"],
        "tie_word_embeddings": False,
    }
    rows = case.group("target")
    _write(
        directory,
        config,
        {
            "model.embed_tokens.weight": rows["embed_tokens.weight"],
            "lm_head.weight": rows["lm_head.weight"],
        },
    )


def _write(directory: Path, config: dict[str, Any], tensors: dict[str, Array]) -> Path:
    from safetensors.numpy import save_file

    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    arrays = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(arrays, directory / "model.safetensors", {"format": "pt"})
    return directory


def _convert(
    source: Path, goal: Path, to: str, target: Any, case: Case, told: str
) -> list[Measured]:
    """Convert once and compare every tensor of the draft, and its config."""
    from parity.convert import convert, read_checkpoint, to_numpy
    from torch_port.formats.convert import Options

    try:
        before, _ = convert(source, goal, to, Options(target, verifier="org/target"))
        after = read_checkpoint(goal, target)
        found = {name: to_numpy(ref.load()) for name, ref in after.weights.items()}
    except Exception as error:  # noqa: BLE001 (one pair must not hide the others)
        first = str(error).strip().split("\n")[0]
        stage = f"{told} ({type(error).__name__}: {first})"
        return [Measured(NAME, stage, float("inf"), EXACT)]
    measured = [
        Measured(
            NAME,
            f"{told}: config",
            0.0 if before.config == after.config else float("inf"),
            EXACT,
        )
    ]
    expected = case.group("weights")
    for name in sorted(set(found) | set(expected)):
        same = (
            name in found
            and name in expected
            and found[name].dtype == expected[name].dtype
            and np.array_equal(found[name], expected[name])
        )
        measured.append(Measured(NAME, f"{told}: {name}", 0.0 if same else float("inf"), EXACT))
    return measured


def _evaluate(directory: Path, case: Case) -> list[Measured]:
    """The spec on what it reads from orbax, the port on the drawn weights: loss and logits."""

    def from_orbax(case: Case, dtype: str) -> Answer:
        return _spec_of_orbax(directory, case, dtype)

    port, spec = run_port(case, "float64", port_answer), run_spec(case, "float64", from_orbax)
    if port.failure == spec.failure == "refused":
        return [Measured(NAME, "orbax, evaluated by the spec: refusal", 0.0, EXACT)]
    for answer in (port, spec):
        if answer.error is not None:
            stage = f"orbax, evaluated by the spec ({answer.error})"
            return [Measured(NAME, stage, float("inf"), EXACT)]
    mask = port.tensors["eval_mask"]
    logits = port.tensors["draft_logits"][mask]
    allowed = batch_tolerance(case, "float64", float(np.abs(logits).max()))
    error = relative_error(spec.tensors["draft_logits"][mask], logits)
    loss = relative_error(spec.loss, port.loss)
    return [
        Measured(NAME, "orbax, evaluated by the spec: draft_logits", error, allowed),
        Measured(NAME, "orbax, evaluated by the spec: loss", loss, allowed),
    ]


def _spec_of_orbax(directory: Path, case: Case, dtype: str) -> Answer:
    import jax.numpy as jnp
    from jax import tree_util

    from jaxdraft.config import DFLASH, DraftConfig, ObjectiveConfig
    from jaxdraft.dflash import DFlashObjective, gradients_dflash
    from jaxdraft.draft_checkpoint import load_draft
    from jaxdraft.evaluate import Target, gradients

    saved = load_draft(directory)
    config = DraftConfig.from_hf(case.config)
    params = tree_util.tree_map(lambda value: jnp.asarray(value, dtype), saved.params)
    frozen = as_dtype(case.group("target"), dtype)
    target = Target(*(jnp.asarray(frozen[f"{n}.weight"]) for n in ("embed_tokens", "lm_head")))
    batch = spec_batch(case.group("batch"), dtype)
    if config.projector_type == DFLASH:
        flash = DFlashObjective(**case.objective)
        found, _ = gradients_dflash(config, flash, params, target, saved.vocabulary, batch)
    else:
        objective = ObjectiveConfig(**case.objective)
        found, _ = gradients(config, objective, params, target, saved.vocabulary, batch)
    return Answer(loss=float(found.loss), tensors={"draft_logits": np.asarray(found.draft_logits)})


CHECK = Check(
    NAME,
    "drafts between hf, deepspec, speculators, port and orbax, every ordered pair: each tensor bit "
    "for bit, the config, captured layers as they are written; the specification evaluates what it "
    "reads from orbax, and goes on with a run of which the port skipped steps",
    ("§2", "§6"),
    run_checkpoints,
    (
        "bf16 weights, runs from orbax to the port, sharded and damaged files: the formats' own "
        "tests have them",
        "EAGLE3's formats",
        "what the field's own readers make of the files, but for the numbers of captured layers",
    ),
)
