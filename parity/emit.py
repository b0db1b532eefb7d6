"""`parity emit`: conformance vectors written by the specification, from fixed seeds.

The answers are the spec's in float64, so they judge every other implementation and never the spec
itself; `../shared/vectors` style sets from a third implementation do that.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from parity.cases import FORMAT, Array, Case, CaseError
from parity.sides import Answer
from parity.vectors import answer_case

MANIFEST = "MANIFEST.json"
V, K, H, S, B, N = 40, 10, 16, 20, 2, 4

_NESTED: dict[str, Any] = {
    "projector_type": "dspark",
    "attention_mode": "gqa",
    "target_layer_ids": [0, 2],
    "mask_token_id": 3,
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
_TOP: dict[str, Any] = {
    "architectures": ["DSparkDraftModel"],
    "model_type": "qwen3",
    "vocab_size": V,
    "draft_vocab_size": K,
    "hidden_size": H,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "block_size": 4,
    "num_target_layers": 4,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
}
_BARE = ("attention_mode", "target_layer_ids", "mask_token_id")  # a draft without heads
_OPTIMIZER = {
    "peak_rate": 3e-2,
    "final_rate": 1e-3,
    "warmup_steps": 2,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
}
_DECODING = {"proposals": 3, "limit": 24, "end_of_text": 7}
_OBJECTIVE = {
    "ce_alpha": 0.1,
    "l1_alpha": 0.9,
    "confidence_alpha": 1.0,
    "loss_decay_gamma": 4.0,
}


@dataclass(frozen=True)
class Recipe:
    """One vector: what differs from the base config and objective, and what is done to the batch.

    `labels` "pruned" replaces every supervised token by a pruned id; `supervised` False clears the
    loss mask. With `layout` "dflash" the draft is the backbone alone and the objective that of §12;
    with `steps` the case is a training run of so many AdamW steps (§14), with `temperature` a
    decoding with given draws (§10).
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    labels: str = "any"
    supervised: bool = True
    error: str | None = None
    layout: str = "dspark"
    steps: int = 0
    temperature: float | None = None


RECIPES: tuple[Recipe, ...] = (
    Recipe("pruned-vanilla"),
    Recipe("pruned-one-kept", {"draft_vocab_size": 1}),
    Recipe("pruned-no-markov", {"markov_rank": 0, "confidence_head_with_markov": False}),
    Recipe("pruned-nodecay", objective={"loss_decay_gamma": None}),
    Recipe("pruned-nothing-inside-ce-off", objective={"ce_alpha": 0.0}, labels="pruned"),
    Recipe("full-vanilla", {"draft_vocab_size": None}),
    Recipe(
        "full-no-confidence",
        {
            "draft_vocab_size": V,
            "enable_confidence_head": False,
            "confidence_head_with_markov": False,
        },
        {"confidence_alpha": 0.0},
    ),
    Recipe("pruned-gated", {"markov_head_type": "gated"}),
    Recipe(
        "full-rnn-sliding",
        {
            "draft_vocab_size": None,
            "markov_head_type": "rnn",
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 5,
        },
    ),
    Recipe("dflash-pruned", layout="dflash", objective={"loss_decay_gamma": 4.0}),
    Recipe("dflash-full-nodecay", {"draft_vocab_size": None}, layout="dflash"),
    Recipe("dpace-cumulative", layout="dflash", objective={"dpace": "cumulative", "beta": 0.5}),
    Recipe("dpace-continuation", layout="dflash", objective={"dpace": "continuation"}),
    Recipe("dpace-both", layout="dflash", objective={"dpace": "both"}),
    Recipe("training-pruned", steps=6),
    Recipe("decoding-pruned", temperature=0.8),
    Recipe("decoding-greedy", temperature=0.0),
    Recipe(
        "decoding-full-rnn", {"draft_vocab_size": None, "markov_head_type": "rnn"}, temperature=1.0
    ),
    Recipe("error-no-supervision", supervised=False, error="no supervised target tokens"),
    Recipe("error-nothing-inside", labels="pruned", error="no in-vocabulary target tokens"),
)


def emit(directory: Path, overwrite: bool = False) -> list[str]:
    """Write every recipe's case below `directory`; return their names.

    Raises CaseError, before anything is written, when a case of a recipe's name exists and
    `overwrite` is off; RuntimeError when the spec does not give the answer or the error that a
    recipe is for.
    """
    held = [recipe.name for recipe in RECIPES if (directory / recipe.name).exists()]
    if held and not overwrite:
        raise CaseError(
            f"{directory} already holds {', '.join(held)}; choose another directory, or add "
            "--overwrite to replace those"
        )
    for recipe in RECIPES:
        # Seeded by its name: a new recipe in the list must not change the others' bytes.
        case = _draw(recipe, zlib.crc32(recipe.name.encode()))
        answer = answer_case(case, "spec", "float64")
        if answer.error is not None and (recipe.error is None or recipe.error not in answer.error):
            raise RuntimeError(f"{recipe.name}: the spec refuses: {answer.error}")
        if recipe.error is not None and answer.error is None:
            raise RuntimeError(f"{recipe.name}: the spec does not refuse")
        _write(directory / recipe.name, case, answer, recipe.error)
    _write_manifest(directory)
    return [recipe.name for recipe in RECIPES]


def _write_manifest(directory: Path) -> None:
    """Record what was written and by what: sha256 of each file, versions of spec and packages."""
    files = [
        directory / recipe.name / name
        for recipe in RECIPES
        for name in ("case.json", "tensors.safetensors")
    ]
    manifest = {
        "format": FORMAT,
        "spec": version("jaxdraft"),
        "packages": {name: version(name) for name in ("jax", "jaxlib", "flax", "numpy")},
        "files": {
            file.relative_to(directory).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
            for file in sorted(files)
        },
    }
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _draw(recipe: Recipe, seed: int) -> Case:
    random = np.random.default_rng([20260, seed])
    top, nested = dict(_TOP), dict(_NESTED)
    for name, value in recipe.config.items():
        (nested if name in nested else top)[name] = value
    if recipe.layout == "dflash":
        top["architectures"] = ["DFlashDraftModel"]
        nested = {name: nested[name] for name in _BARE} | {"projector_type": "dflash"}
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
        extra = {"optimizer": _OPTIMIZER | {"total_steps": recipe.steps}}
    elif recipe.temperature is not None:
        extra = {"decoding": _DECODING | {"temperature": recipe.temperature}}
        tensors["target/lm_head.weight"] *= np.float32(0.3)
        tensors |= _toy_target(tensors, kept, random)
    else:
        tensors |= _batch(recipe, kept, random)
    return Case(
        name=recipe.name,
        path=Path(recipe.name),
        config=config,
        objective=(_OBJECTIVE if recipe.layout == "dspark" else {}) | recipe.objective,
        expect={},
        tensors=tensors,
        extra=extra,
    )


def _toy_target(
    tensors: dict[str, Array], kept: Array, random: np.random.Generator
) -> dict[str, Array]:
    """Draw a target as tables, a prompt, and the uniforms of every round that there can be.

    The target leans on the draft's own Markov bias, so that rounds of every length occur.
    """
    n, limit = _DECODING["proposals"], _DECODING["limit"]
    w1, w2 = (tensors[f"weights/markov_head.markov_{name}.weight"] for name in ("w1", "w2"))
    logits = _normal(random, (V, V), 0.3)
    logits[:, kept] += w1 @ w2.T + 1
    return {
        "toy/logits": logits.astype(np.float32),
        "toy/hidden_states": _normal(random, (V, 2 * H), 1.0),
        "prompt": random.integers(0, V, 3).astype(np.int64),
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
