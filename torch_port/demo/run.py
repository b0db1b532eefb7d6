"""`torch-port demo`: from source text to a trained, cross-checked pruned draft."""

from __future__ import annotations

import importlib.util
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from safetensors import safe_open
from torch import Tensor

from torch_port.data.conversations import CHAT_TEMPLATE
from torch_port.data.features import FeatureDirectory
from torch_port.data.fingerprints import corpus_fingerprint, tokenizer_fingerprint
from torch_port.demo.drafts import (
    DraftRun,
    draft_config,
    heldout_batches,
    objective_config,
    optimizer_config,
    train_draft,
    training_batches,
)
from torch_port.demo.output import check_output, open_output, save_case, save_draft, write_json
from torch_port.demo.prepare import Prepared, prepare
from torch_port.demo.recipe import Recipe
from torch_port.demo.report import terminal_table, write_report
from torch_port.models.dspark import FrozenTarget
from torch_port.progress import Stage, stage
from torch_port.vocabulary.build import write_map
from torch_port.vocabulary.counting import count_supervised_tokens
from torch_port.vocabulary.counts import TokenCounts
from torch_port.vocabulary.mapping import buffers_from_kept
from torch_port.vocabulary.sweep import rank, sweep

PARITY_BATCH = 2  # samples per batch of the cross-check: the spec keeps [slots, V] in float64


def run_demo(recipe: Recipe, out: Path | None, overwrite: bool, console: Console) -> bool:
    """Run the demo; return whether it came out well: the draft learned, nothing disagrees.

    Without jax the cross-check does not run, and that is no failure; one that breaks off is.

    Raises UserError for a bad output directory or an unusable cache; `out` is untouched then.
    """
    check_output(out, overwrite)
    started = datetime.now(UTC)
    clock = time.perf_counter()
    console.print(f"[bold]torch-port demo[/] ({recipe.name})", highlight=False)
    prepared = _prepare(recipe, console)
    directory = open_output(out, overwrite, recipe.name)
    seconds = dict(prepared.seconds)
    target = FrozenTarget(prepared.embedding, prepared.head)
    vocabulary, buffers = _vocabulary(prepared, recipe, directory, console)
    runs: dict[str, DraftRun] = {}
    for name, size in (("pruned", recipe.draft_vocab_size), ("full", prepared.vocab_size)):
        since = time.perf_counter()
        runs[name] = train_draft(
            name,
            draft_config(prepared, recipe, size),
            buffers if name == "pruned" else None,
            prepared,
            recipe,
            target,
            console,
        )
        save_draft(directory / name, runs[name].trained)
        seconds[name] = time.perf_counter() - since
    since = time.perf_counter()
    parity = _parity(directory, prepared, recipe, runs, target, console)
    seconds["parity"] = time.perf_counter() - since
    seconds["total"] = time.perf_counter() - clock
    metrics = {
        "format": 1,
        "quick": recipe.name == "quick",
        "seed": recipe.draft_seed,
        "started": started.isoformat(timespec="seconds"),
        "seconds": seconds,
        "versions": _versions(),
        "corpus": _corpus(prepared),
        "target": _target(prepared),
        "vocabulary": vocabulary,
        "runs": {name: run.metrics for name, run in runs.items()},
        "parity": parity,
    }
    write_json(directory / "metrics.json", metrics)
    write_report(metrics, directory / "report.html")
    console.print(terminal_table(metrics))
    console.print(f"Report: {directory / 'report.html'}", highlight=False, soft_wrap=True)
    return _learned(runs["pruned"], recipe, console) and parity["agrees"] is not False


def _learned(run: DraftRun, recipe: Recipe, console: Console) -> bool:
    """Say whether the pruned draft's τ on held-out modules rose by what the recipe asks."""
    heldout = run.metrics["heldout"]
    gain = heldout["trained"]["tau"] - heldout["untrained"]["tau"]
    learned = gain >= recipe.tau_gain
    console.print(
        f"τ on held-out modules {'rose' if learned else 'did NOT rise enough:'} by {gain:+.2f} "
        f"({recipe.tau_gain:+.2f} asked)",
        highlight=False,
    )
    return learned


def _prepare(recipe: Recipe, console: Console) -> Prepared:
    with ExitStack() as shown:
        current: dict[str, Stage] = {}

        def report(name: str, done: int, total: int, numbers: Mapping[str, float]) -> None:
            if name not in current:
                shown.close()  # the stage before this one is done
                current[name] = shown.enter_context(stage(name, total, console))
            current[name].update(done, _numbers(numbers), total)

        return prepare(recipe, report=report)


def _numbers(numbers: Mapping[str, float]) -> str:
    parts = []
    if "loss" in numbers:
        parts.append(f"loss {numbers['loss']:.3f}")
    if "tokens_per_second" in numbers:
        parts.append(f"{numbers['tokens_per_second']:,.0f} tokens/s")
    return "  ".join(parts)


def _vocabulary(
    prepared: Prepared, recipe: Recipe, directory: Path, console: Console
) -> tuple[dict[str, Any], tuple[Tensor, Tensor]]:
    """Count, select, save the map; return its part of metrics.json and its buffers."""
    counts, heldout = (
        _counts(prepared, features, side)
        for features, side in ((prepared.train, "train"), (prepared.heldout, "heldout"))
    )
    ranking = rank(counts, pin_bytes=False, heldout=heldout)
    size, V = recipe.draft_vocab_size, prepared.vocab_size
    row = write_map(directory / "vocabulary.safetensors", counts, ranking, size)
    assert row.heldout is not None
    console.print(
        f"  vocabulary: {size} of {V} ids kept, {ranking.pins} pinned; coverage "
        f"{row.train:.2%} of training tokens, {row.heldout:.2%} of held-out ones",
        highlight=False,
        soft_wrap=True,
    )
    usable = prepared.tokenizer_vocab_size
    low = min(max(16, ranking.pins), usable)
    sizes = np.unique(np.geomspace(low, usable, 24).astype(int))
    return {
        "size": size,
        "of": V,
        "pinned": ranking.pins,
        "coverage_train": row.train,
        "coverage_heldout": row.heldout,
        "curve": [
            {"size": row.size, "train": row.train, "heldout": row.heldout}
            for row in sweep(ranking, counts, [*sizes.tolist(), size])
        ],
    }, buffers_from_kept(torch.from_numpy(ranking.kept(size)), V)


def _counts(prepared: Prepared, features: FeatureDirectory, side: str) -> TokenCounts:
    """Count a side's captured samples; its corpus is the file that they were drawn from."""
    corpus = prepared.directory / "corpus"
    file, length = corpus / f"{side}.jsonl", prepared.recipe.max_length
    tokens = ((ids.numpy(), mask.numpy()) for ids, mask in features.iter_tokens())
    return TokenCounts(
        counts=count_supervised_tokens(tokens, prepared.vocab_size),
        mass=None,
        special_ids=np.array(prepared.special.all(), dtype=np.int64),
        byte_ids=np.zeros(0, dtype=np.int64),
        tokenizer_size=prepared.tokenizer_vocab_size,
        samples=len(features),
        truncated=0,
        corpus_fingerprint=corpus_fingerprint(corpus, [file], CHAT_TEMPLATE, length),
        tokenizer_fingerprint=tokenizer_fingerprint(
            prepared.directory / "tokenizer" / "tokenizer.json"
        ),
        contents=(),
    )


def _parity(
    directory: Path,
    prepared: Prepared,
    recipe: Recipe,
    runs: dict[str, DraftRun],
    target: FrozenTarget,
    console: Console,
) -> dict[str, Any]:
    """Leave cases for `parity demo` and run it as a program of its own.

    The port imports no jax and never parity: they meet at files.
    """
    objective = objective_config(recipe).model_dump(exclude={"detach_confidence"})
    heldout = next(heldout_batches(prepared, recipe)).first(PARITY_BATCH)
    steps = recipe.parity_steps
    batches = [batch.first(PARITY_BATCH) for batch in training_batches(prepared, recipe, steps)]
    cases = directory / "parity"
    save_case(cases / "pruned-untrained", runs["pruned"].untrained, target, objective, [heldout])
    save_case(cases / "pruned-trained", runs["pruned"].trained, target, objective, [heldout])
    save_case(cases / "full-trained", runs["full"].trained, target, objective, [heldout])
    save_case(
        cases / "training",
        runs["pruned"].untrained,
        target,
        objective,
        batches,
        _parity_optimizer(recipe, steps),
    )
    missing = [n for n in ("jax", "flax", "optax") if importlib.util.find_spec(n) is None]
    if missing:
        why = f'{", ".join(missing)} not installed; pip install -e ".[spec]"'
        console.print(f"  parity: not checked, {why}", highlight=False)
        return {"ran": False, "why_not": why, "agrees": None, "checks": [], "trajectory": []}
    return _run_parity(directory, console)


def _run_parity(directory: Path, console: Console) -> dict[str, Any]:
    command = [sys.executable, "-m", "parity", "demo", str(directory)]
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            console.print(f"  parity: {lines[-1]}", highlight=False, markup=False, soft_wrap=True)
    status = process.returncode
    result = directory / "parity.json"
    if not result.is_file():
        why = f"`parity demo` broke off with status {status}: {lines[-1] if lines else ''}"
        return {"ran": False, "why_not": why, "agrees": False, "checks": [], "trajectory": []}
    return {"ran": True, "why_not": None, **json.loads(result.read_text())}


def _parity_optimizer(recipe: Recipe, steps: int) -> dict[str, Any]:
    """Return the demo's optimizer with a warm-up and cosine that fit into `steps`."""
    config = optimizer_config(recipe)
    beta1, beta2 = config.betas
    names = ("peak_rate", "final_rate", "eps", "weight_decay", "max_grad_norm")
    return {name: getattr(config, name) for name in names} | {
        "beta1": beta1,
        "beta2": beta2,
        "warmup_steps": steps // 2,
        "total_steps": steps,
    }


def _corpus(prepared: Prepared) -> dict[str, Any]:
    return {
        "train_samples": len(prepared.train),
        "heldout_samples": len(prepared.heldout),
        "train_tokens": sum(prepared.train.lengths),
        "supervised_tokens": sum(prepared.train.supervised),
        "heldout_modules": prepared.corpus.modules_heldout,
        "fingerprint": _corpus_fingerprint(prepared),
    }


def _corpus_fingerprint(prepared: Prepared) -> str:
    corpus = prepared.directory / "corpus"
    files = [corpus / "train.jsonl", corpus / "heldout.jsonl"]
    return corpus_fingerprint(corpus, files, CHAT_TEMPLATE, prepared.recipe.max_length)


def _target(prepared: Prepared) -> dict[str, Any]:
    return {
        "parameters": _parameters(prepared.directory / "target" / "model.safetensors"),
        "layers": prepared.target_config["num_hidden_layers"],
        "hidden_size": prepared.target_config["hidden_size"],
        "vocab_size": prepared.vocab_size,
        "heldout_loss": prepared.target.heldout_loss,
        "from_cache": prepared.cached["target"],
    }


def _parameters(weights: Path) -> int:
    with safe_open(weights, "pt") as file:
        shapes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118
    return sum(math.prod(shape) for shape in shapes)


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in ("torch", "transformers", "jax", "flax", "optax"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    return versions
