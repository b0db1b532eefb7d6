"""`parity emit`: conformance vectors written by the specification, from fixed seeds.

The answers are the spec's in float64, so they judge every other implementation and never the spec
itself; `../shared/vectors` style sets from a third implementation do that.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from parity.cases import FORMAT, Array, Case, CaseError
from parity.recipes import (
    BARE,
    DECODING,
    EAGLE3,
    NESTED,
    OBJECTIVE,
    OPTIMIZER,
    RECIPES,
    TOP,
    B,
    H,
    N,
    Recipe,
    S,
    V,
)
from parity.sides import Answer
from parity.vectors import answer_case

MANIFEST = "MANIFEST.json"
_FILES = ("case.json", "tensors.safetensors")
_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy", "safetensors")


def emit(
    directory: Path, overwrite: bool = False, wrote: Callable[[Path], object] = lambda path: None
) -> list[str]:
    """Write every recipe's case below `directory`; return their names.

    `wrote` is called with the directory of each case as soon as it is there.

    With `overwrite`, cases of an earlier set that no recipe makes any more are removed: those that
    the directory's manifest names and whose files are the ones it describes. Nothing else is.

    Raises CaseError, before anything is written, when a case of a recipe's name exists and
    `overwrite` is off, or a case that would be removed has been changed; RuntimeError when the spec
    does not give the answer or the error that a recipe is for.
    """
    held = [recipe.name for recipe in RECIPES if (directory / recipe.name).exists()]
    if held and not overwrite:
        raise CaseError(
            f"{directory} already holds {', '.join(held)}; choose another directory, or add "
            "--overwrite to replace those"
        )
    stale = stale_cases(directory) if overwrite else []
    for recipe in RECIPES:
        # Seeded by its name: a new recipe in the list must not change the others' bytes.
        case = _draw(recipe, zlib.crc32(recipe.name.encode()))
        answer = answer_case(case, "spec", "float64")
        if answer.error is not None and (recipe.error is None or recipe.error not in answer.error):
            raise RuntimeError(f"{recipe.name}: the spec refuses: {answer.error}")
        if recipe.error is not None and answer.error is None:
            raise RuntimeError(f"{recipe.name}: the spec does not refuse")
        if recipe.decoding is not None:
            check_decoding(case, answer)
        if recipe.eagle3 is not None and recipe.error is None:
            check_eagle3(case, answer)
        _write(directory / recipe.name, case, answer, recipe.error)
        wrote(directory / recipe.name)
    for path in stale:
        for name in _FILES:
            (path / name).unlink()
        path.rmdir()
    _write_manifest(directory)
    return [recipe.name for recipe in RECIPES]


def stale_cases(directory: Path) -> list[Path]:
    """Return the cases that an earlier emit wrote to `directory` and no recipe makes any more.

    Raises CaseError when one of them holds other files than the manifest says: somebody's work.
    """
    try:
        written = json.loads((directory / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        raise CaseError(f"{directory / MANIFEST} is no manifest of emit's; remove it") from None
    current = {recipe.name for recipe in RECIPES}
    stale = []
    # Names of what is there, looked up in the manifest: a manifest cannot point elsewhere.
    for path in sorted(directory.iterdir()):
        own = {f"{path.name}/{name}": path / name for name in _FILES}
        if path.name in current or not path.is_dir() or not own.keys() & written.keys():
            continue
        held = {file.name for file in path.iterdir()}
        changed = path.is_symlink() or held != set(_FILES)
        if changed or any(_digest(file) != written.get(name) for name, file in own.items()):
            raise CaseError(
                f"{path} is a case that emit no longer writes, but it has been changed since; move "
                "it elsewhere or remove it, then emit again"
            )
        stale.append(path)
    return stale


def check_decoding(case: Case, answer: Answer) -> None:
    """Refuse a decoding case that could not tell a wrong implementation from a right one.

    Some round must accept a whole block and some reject a proposal; and a setting that a case
    brings (truncation, V_tok) must make a difference to it.

    Raises RuntimeError, naming what does not occur.
    """
    settings, rounds = case.extra["decoding"], answer.tensors["rounds"]
    proposed, accepted, committed = rounds.T
    n = settings["proposals"]
    occurs = {
        "a whole block accepted": ((accepted == n) & (committed == n + 1)).any(),
        "a proposal rejected": (accepted < proposed).any(),
        "a rejection after an acceptance": ((accepted > 0) & (accepted < proposed)).any(),
    }
    if "confidence_threshold" in settings:
        # The last round's statistics may be cut by the limit.
        occurs["a truncated block"] = (proposed[:-1] < n).any()
    if settings["end_of_text"] is not None:
        inside = accepted[-1] == committed[-1] == proposed[-1] < n
        ends = answer.tensors["tokens"][-1] == settings["end_of_text"]
        occurs["an end of text accepted inside a block"] = inside and ends
    for name in ("confidence_threshold", "tokenizer_size"):
        if name not in settings:
            continue
        rest = {key: value for key, value in settings.items() if key != name}
        without = answer_case(replace(case, extra={"decoding": rest}), "spec", "float64")
        equal = np.array_equal(without.tensors["tokens"], answer.tensors["tokens"])
        occurs[f"tokens that depend on {name}"] = not equal
    missing = [what for what, there in occurs.items() if not there]
    if missing:
        raise RuntimeError(f"{case.name}: the case lacks {', '.join(missing)}")


def check_eagle3(case: Case, answer: Answer) -> None:
    """Refuse an EAGLE3 case in which a step has nothing to tell.

    Every step must count some slot and, where the draft prunes, leave a supervised one uncounted.

    Raises RuntimeError, naming what does not occur.
    """
    counted, supervised = answer.metrics["in_vocabulary_step"]
    occurs = {
        "a counted slot in every step": (counted > 0).all(),
        "a pruned choice in every step": case.tensors["weights/t2d"].all()
        or (counted < supervised).all(),
        "an unsupervised slot": not answer.tensors["eval_mask"][:, 0, : S - 2].all(),
    }
    missing = [what for what, there in occurs.items() if not there]
    if missing:
        raise RuntimeError(f"{case.name}: the case lacks {', '.join(missing)}")


def _digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _write_manifest(directory: Path) -> None:
    """Record what was written and by what: sha256 of each file, versions of spec and packages."""
    files = [directory / recipe.name / name for recipe in RECIPES for name in _FILES]
    manifest = {
        "format": FORMAT,
        "spec": version("jaxdraft"),
        "packages": {name: version(name) for name in _PACKAGES},
        "files": {file.relative_to(directory).as_posix(): _digest(file) for file in sorted(files)},
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _draw(recipe: Recipe, seed: int) -> Case:
    random = np.random.default_rng([20260, seed])
    if recipe.eagle3 is not None:
        return _draw_eagle3(recipe, random)
    top, nested = dict(TOP), dict(NESTED)
    for name, value in recipe.config.items():
        (nested if name in nested else top)[name] = value
    if recipe.layout == "dflash":
        top["architectures"] = ["DFlashDraftModel"]
        nested = {name: nested[name] for name in BARE} | {"projector_type": "dflash"}
    config = top | {"dflash_config": nested}
    kept_count = top["draft_vocab_size"] or V
    kept = np.sort(random.permutation(V)[:kept_count])
    tensors = {f"weights/{n}": _weights(n, s, random) for n, s in _shapes(config).items()}
    if kept_count < V:
        t2d = np.zeros(V, dtype=bool)
        t2d[kept] = True
        tensors["weights/t2d"] = t2d
        tensors["weights/d2t"] = kept - np.arange(kept_count)
    for name in ("embed_tokens", "lm_head"):
        tensors[f"target/{name}.weight"] = _normal(random, (V, H), 0.6)
    for step in range(recipe.steps):
        batch = _batch(recipe, kept, random)
        tensors |= {name.replace("batch/", f"steps/{step}/"): v for name, v in batch.items()}
    extra: dict[str, Any] = {}
    if recipe.steps:
        extra = {"optimizer": OPTIMIZER | {"total_steps": recipe.steps}}
    elif recipe.decoding is not None:
        extra = {"decoding": DECODING | recipe.decoding}
        tensors |= _toy_target(recipe, tensors, kept, random)
    else:
        tensors |= _batch(recipe, kept, random)
    return Case(
        name=recipe.name,
        path=Path(recipe.name),
        config=config,
        objective=(OBJECTIVE if recipe.layout == "dspark" else {}) | recipe.objective,
        expect={},
        tensors=tensors,
        extra=extra,
    )


def _draw_eagle3(recipe: Recipe, random: np.random.Generator) -> Case:
    """Draw an EAGLE3 case; about half of the teacher's choices are kept ids."""
    config = EAGLE3 | recipe.config
    kept_count = config["draft_vocab_size"] or V
    kept = np.sort(random.permutation(V)[:kept_count])
    shapes = _eagle3_shapes(config)
    tensors = {f"weights/{n}": _weights(n, s, random) for n, s in shapes.items()}
    # Always there, the identity too (§13).
    tensors["weights/t2d"] = np.isin(np.arange(V), kept)
    tensors["weights/d2t"] = kept - np.arange(kept_count)
    for name in ("embed_tokens", "lm_head"):
        tensors[f"target/{name}.weight"] = _normal(random, (V, H), 0.6)
    choice = np.where(
        random.random((B, S)) < 0.5, random.choice(kept, (B, S)), random.integers(0, V, (B, S))
    )
    if recipe.labels == "pruned":
        choice = random.choice(np.setdiff1d(np.arange(V), kept), (B, S))
    # Near the row of its choice, so that the argmax is no accident of rounding.
    states = _normal(random, (B, S, H), 0.2) + 2 * tensors["target/lm_head.weight"][choice]
    mask = (random.random((B, S)) < 0.8).astype(np.float32) * float(recipe.supervised)
    mask[1, -3:] = 0  # padding
    tensors |= {
        "batch/input_ids": random.integers(0, V, (B, S)).astype(np.int64),
        "batch/loss_mask": mask,
        "batch/hidden_states": _normal(random, (B, S, 3 * H), 1.0),
        "batch/target_last_hidden_states": states,
    }
    return Case(
        name=recipe.name,
        path=Path(recipe.name),
        config=config,
        objective=recipe.objective,
        expect={},
        tensors=tensors,
        extra={"eagle3": recipe.eagle3},
    )


def _toy_target(
    recipe: Recipe, tensors: dict[str, Array], kept: Array, random: np.random.Generator
) -> dict[str, Array]:
    """Draw a target as tables, a prompt, and the uniforms of every round that there can be.

    The target leans on the draft's own Markov bias, so that rounds of every length occur. The
    frozen head is scaled down to let that bias speak, but its padding rows are scaled up: a draft
    that may propose padding ids does little else.
    """
    settings = DECODING | (recipe.decoding or {})
    n, limit, ids = settings["proposals"], settings["limit"], settings.get("tokenizer_size", V)
    head = tensors["target/lm_head.weight"] * np.float32(0.3 * (1 - 0.9 * recipe.agreement))
    head[ids:] *= np.float32(100)
    logits = _normal(random, (V, V), 0.3 * (1 - 0.6 * recipe.agreement))
    logits[:, kept] += 1 + 2 * recipe.agreement
    if recipe.layout == "dspark":
        w1, w2 = (tensors[f"weights/markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
        logits[:, kept] += w1 @ w2.T
    return {
        "target/lm_head.weight": head,
        "toy/logits": logits.astype(np.float32),
        "toy/hidden_states": _normal(random, (V, 2 * H), 1.0),
        "prompt": random.integers(0, ids, 3).astype(np.int64),
        "draws": random.random((limit, 2 * n + 1)).astype(np.float32),
    }


def _normal(random: np.random.Generator, shape: tuple[int, ...], deviation: float) -> Array:
    return (random.normal(size=shape) * deviation).astype(np.float32)


def _weights(name: str, shape: tuple[int, ...], random: np.random.Generator) -> Array:
    """Draw weights large enough that every one of them shows in the loss."""
    if name.endswith("norm.weight"):
        return 1 + _normal(random, shape, 0.2)
    return _normal(random, shape, 0.5 if len(shape) == 1 else 1 / math.sqrt(shape[-1]))


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name every weight of a draft with its shape (contracts §4)."""
    nested = config["dflash_config"]
    D, r, K = config["head_dim"], nested.get("markov_rank", 0), config["draft_vocab_size"] or V
    q, kv = config["num_attention_heads"] * D, config["num_key_value_heads"] * D
    inner = config["intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, len(nested["target_layer_ids"]) * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (H,),
            f"{layer}.post_attention_layernorm.weight": (H,),
            f"{layer}.self_attn.q_proj.weight": (q, H),
            f"{layer}.self_attn.k_proj.weight": (kv, H),
            f"{layer}.self_attn.v_proj.weight": (kv, H),
            f"{layer}.self_attn.o_proj.weight": (H, q),
            f"{layer}.self_attn.q_norm.weight": (D,),
            f"{layer}.self_attn.k_norm.weight": (D,),
            f"{layer}.mlp.gate_proj.weight": (inner, H),
            f"{layer}.mlp.up_proj.weight": (inner, H),
            f"{layer}.mlp.down_proj.weight": (H, inner),
        }
    if r:
        shapes |= {"markov_head.markov_w1.weight": (V, r), "markov_head.markov_w2.weight": (K, r)}
    extra = {"gated": ("gate_proj", r, H + r), "rnn": ("joint_proj", 3 * r, 2 * r + H)}
    if r and nested["markov_head_type"] in extra:
        name, rows, columns = extra[nested["markov_head_type"]]
        shapes[f"markov_head.{name}.weight"] = (rows, columns)
        shapes[f"markov_head.{name}.bias"] = (rows,)
    if nested.get("enable_confidence_head"):
        width = H + (r if nested["confidence_head_with_markov"] else 0)
        shapes |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return shapes


def _eagle3_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name every weight of an EAGLE3 draft with its shape; the embedding is the target's."""
    D, inner, K = config["head_dim"], config["intermediate_size"], config["draft_vocab_size"] or V
    q, kv = config["num_attention_heads"] * D, config["num_key_value_heads"] * D
    return {
        "fc.weight": (H, 3 * H),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "midlayer.self_attn.q_proj.weight": (q, 2 * H),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, q),
        "midlayer.mlp.gate_proj.weight": (inner, H),
        "midlayer.mlp.up_proj.weight": (inner, H),
        "midlayer.mlp.down_proj.weight": (H, inner),
        "norm.weight": (H,),
        "lm_head.weight": (K, H),
    }


def _batch(recipe: Recipe, kept: Array, random: np.random.Generator) -> dict[str, Array]:
    """Draw two rows; one block is dropped, one ends past the sequence, anchors are no candidates.

    (Some anchors are unsupervised, which drawing them by §3.1 would not give: vectors may.)
    """
    # About half of the tokens are kept ones, whatever K is: both kinds of label must occur.
    ids = np.where(
        random.random((B, S)) < 0.5, random.choice(kept, (B, S)), random.integers(0, V, (B, S))
    )
    if recipe.labels == "pruned":
        ids = random.choice(np.setdiff1d(np.arange(V), kept), (B, S))
    mask = (random.random((B, S)) < 0.85).astype(np.float32) * float(recipe.supervised)
    anchors = np.stack([np.sort(random.permutation(S - 2)[:N]) for _ in range(B)])
    anchors[0, -1], anchors[1, -1] = S - 2, 0
    keep = np.ones((B, N), dtype=bool)
    keep[1, -1] = False
    return {
        "batch/input_ids": ids.astype(np.int64),
        "batch/loss_mask": mask,
        "batch/hidden_states": _normal(random, (B, S, 2 * H), 1.0),
        "batch/target_last_hidden_states": _normal(random, (B, S, H), 1.0),
        "batch/anchor_positions": anchors.astype(np.int64),
        "batch/block_keep_mask": keep,
    }


def _write(directory: Path, case: Case, answer: Answer, error: str | None) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    tensors = dict(case.tensors)
    expect: dict[str, Any] = {"error": error}
    if error is None:
        expect = {
            "loss": answer.loss,
            "metrics": {n: [a.tolist(), b.tolist()] for n, (a, b) in answer.metrics.items()},
        }
        tensors |= {f"expect/grad/{n}": v for n, v in answer.gradients.items()}
        tensors |= {f"expect/{n}": v for n, v in answer.tensors.items()}
    save_file(
        {name: np.ascontiguousarray(value) for name, value in sorted(tensors.items())},
        directory / "tensors.safetensors",
    )
    document = {
        "format": FORMAT,
        "name": case.name,
        "config": case.config,
        "objective": case.objective,
        "expect": expect,
    } | case.extra
    (directory / "case.json").write_text(json.dumps(document, indent=1) + "\n")
