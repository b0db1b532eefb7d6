"""Toy checkpoints and targets, written by hand: names, shapes and fields are those of contracts §4.

Files are written with the public safetensors library and json, never with the code under test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

V, K, H, LAYERS, RANK, INTER = 16, 5, 8, 4, 3, 12
HEADS, KV, D = 4, 2, 4
KEPT = (0, 3, 4, 9, 12)
D2T = (0, 2, 2, 6, 8)  # by hand: 0-0, 3-1, 4-2, 9-3, 12-4
DTYPE = torch.bfloat16
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One kind of draft."""

    algorithm: str = "dspark"
    pruned: bool = True
    head: str = "vanilla"  # "none": rank 0 and no confidence head
    sliding: bool = False
    layers: int = 2
    extra: Mapping[str, Any] = field(default_factory=dict)  # neutral fields at the top

    @property
    def rows(self) -> int:
        return K if self.pruned else V

    @property
    def with_heads(self) -> bool:
        return self.algorithm == "dspark" and self.head != "none"


CASES = {
    "vanilla": Case(),
    "gated": Case(head="gated"),
    "rnn": Case(head="rnn"),
    "no heads": Case(head="none"),
    "sliding": Case(sliding=True, extra={"use_cache": True, "max_position_embeddings": 512}),
    "full vocabulary": Case(pruned=False),
    "full gated": Case(pruned=False, head="gated"),
    "dflash": Case("dflash"),
    "dflash full": Case("dflash", pruned=False, sliding=True),
}


# --- Configs, by hand ----------------------------------------------------------------------------


def draft_fields(case: Case) -> tuple[dict[str, Any], dict[str, Any]]:
    """(top-level fields, draft fields) as the field's training writes them."""
    nested: dict[str, Any] = {
        "projector_type": case.algorithm,
        "attention_mode": "gqa",
        "target_layer_ids": [0, 2],
        "mask_token_id": 1,
    }
    if case.algorithm == "dspark":
        on = case.with_heads
        nested |= {
            "markov_rank": RANK if on else 0,
            "markov_head_type": case.head if on else "vanilla",
            "enable_confidence_head": on,
            "confidence_head_with_markov": on,
        }
    kinds = [
        "sliding_attention" if case.sliding and i == 0 else "full_attention"
        for i in range(case.layers)
    ]
    name = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel"}[case.algorithm]
    top = {
        "architectures": [name],
        "model_type": "qwen3",
        "vocab_size": V,
        "draft_vocab_size": case.rows,
        "hidden_size": H,
        "intermediate_size": INTER,
        "num_hidden_layers": case.layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "layer_types": kinds,
        "sliding_window": 6 if case.sliding else None,
        "block_size": 4,
        "num_target_layers": LAYERS,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
    }
    return top | dict(case.extra), nested


def hf_fields(case: Case) -> dict[str, Any]:
    top, nested = draft_fields(case)
    return top | {"dflash_config": nested}


def deepspec_fields(case: Case) -> dict[str, Any]:
    top, nested = draft_fields(case)
    return top | nested


_NOT_BACKBONE = (
    "architectures",
    "draft_vocab_size",
    "block_size",
    "num_target_layers",
    "rope_theta",
)


def speculators_fields(case: Case) -> dict[str, Any]:
    top, nested = draft_fields(case)
    elsewhere = [
        "architectures",
        "draft_vocab_size",
        "block_size",
        "num_target_layers",
        "rope_theta",
    ]
    backbone = {n: v for n, v in top.items() if n not in elsewhere}
    backbone |= {
        "rope_parameters": {"rope_theta": top["rope_theta"], "rope_type": "default"},
        "use_sliding_window": case.sliding,
    }
    anchor_first = case.algorithm == "dspark"
    own = {n: v for n, v in nested.items() if n.startswith(("markov", "enable", "confidence"))}
    return own | {
        "architectures": top["architectures"],
        "speculators_model_type": case.algorithm,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": case.algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": 4 if anchor_first else 3}
            ],
            "verifier": {"name_or_path": "org/target", "architectures": ["Qwen3ForCausalLM"]},
        },
        "transformer_layer_config": backbone,
        "draft_vocab_size": case.rows,
        "block_size": 4,
        "mask_token_id": 1,
        "aux_hidden_state_layer_ids": [1, 3],
        "num_target_layers": LAYERS,
        "sample_from_anchor": anchor_first,
        "sliding_window_non_causal": False,  # slots see earlier slots of their block alone (§4)
        "tie_word_embeddings": False,
    }


def eagle3_fields(pruned: bool = True) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "vocab_size": V,
        "draft_vocab_size": K if pruned else V,
        "hidden_size": H,
        "intermediate_size": INTER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "head_dim": D,
        "rms_norm_eps": 1e-6,
        "rope_theta": 100.0,
        "num_target_layers": 6,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": None,
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": [0, 2, 4],
            "use_aux_hidden_state": True,
        },
    }


# --- Tensors, by hand ----------------------------------------------------------------------------


def _layer(prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.self_attn.q_proj.weight": (HEADS * D, width),
        f"{prefix}.self_attn.k_proj.weight": (KV * D, width),
        f"{prefix}.self_attn.v_proj.weight": (KV * D, width),
        f"{prefix}.self_attn.o_proj.weight": (H, HEADS * D),
        f"{prefix}.mlp.gate_proj.weight": (INTER, H),
        f"{prefix}.mlp.up_proj.weight": (INTER, H),
        f"{prefix}.mlp.down_proj.weight": (H, INTER),
        f"{prefix}.input_layernorm.weight": (H,),
        f"{prefix}.post_attention_layernorm.weight": (H,),
    }


def draft_shapes(case: Case) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (H, 2 * H),
        "hidden_norm.weight": (H,),
        "norm.weight": (H,),
    }
    for i in range(case.layers):
        shapes |= _layer(f"layers.{i}", H)
        shapes |= {f"layers.{i}.self_attn.{n}_norm.weight": (D,) for n in "qk"}
    if case.with_heads:
        shapes |= {
            "markov_head.markov_w1.weight": (V, RANK),
            "markov_head.markov_w2.weight": (case.rows, RANK),
            "confidence_head.proj.weight": (1, H + RANK),
            "confidence_head.proj.bias": (1,),
        }
    if case.with_heads and case.head == "gated":
        shapes |= {
            "markov_head.gate_proj.weight": (RANK, H + RANK),
            "markov_head.gate_proj.bias": (RANK,),
        }
    if case.with_heads and case.head == "rnn":
        shapes |= {
            "markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + H),
            "markov_head.joint_proj.bias": (3 * RANK,),
        }
    return shapes


def eagle3_shapes(pruned: bool) -> dict[str, tuple[int, ...]]:
    return _layer("midlayer", 2 * H) | {
        "fc.weight": (H, 3 * H),
        "midlayer.hidden_norm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (K if pruned else V, H),
    }


def fill(
    shapes: Mapping[str, tuple[int, ...]], seed: int = 0, dtype: torch.dtype = DTYPE
) -> Tensors:
    """Random values, every one different from every other tensor's."""
    g = torch.Generator().manual_seed(seed)
    return {n: torch.randn(shape, generator=g).to(dtype) for n, shape in sorted(shapes.items())}


def map_tensors(pruned: bool) -> Tensors:
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[list(KEPT) if pruned else slice(None)] = True
    return {"t2d": t2d, "d2t": torch.tensor(D2T) if pruned else torch.zeros(V, dtype=torch.int64)}


def draft_tensors(case: Case, dtype: torch.dtype = DTYPE) -> Tensors:
    return fill(draft_shapes(case), dtype=dtype) | (map_tensors(True) if case.pruned else {})


def target_tensors(rows: int = V, dtype: torch.dtype = DTYPE) -> Tensors:
    """Embedding and head of the one toy target; rows beyond V are padding."""
    full = fill({"embed_tokens.weight": (V, H), "lm_head.weight": (V, H)}, 9, dtype)
    pad = torch.full((rows - V, H), 100.0).to(dtype)
    return {name: torch.cat([value, pad]) for name, value in full.items()}


def borrowed(case: Case, dtype: torch.dtype = DTYPE) -> Tensors:
    """What deepspec carries of the target: embedding, and the kept rows of the head."""
    target = target_tensors(dtype=dtype)
    kept = list(KEPT) if case.pruned else list(range(V))
    return target | {"lm_head.weight": target["lm_head.weight"][kept].clone()}


# --- Directories ---------------------------------------------------------------------------------


def write(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Tensors,
    shards: int = 1,
    stem: str = "model",
) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if shards == 1:
        save_file(tensors, directory / f"{stem}.safetensors", {"format": "pt"})
        return directory
    placed = {}
    for i in range(shards):
        name = f"{stem}-{i + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[i::shards])
        save_file(part, directory / name, {"format": "pt"})
        placed |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 0}, "weight_map": placed}
    (directory / f"{stem}.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_draft(
    directory: Path,
    case: Case,
    kind: str = "hf",
    dtype: torch.dtype = DTYPE,
    changes: Mapping[str, Any] | None = None,
    **how: Any,
) -> Path:
    """A hand-written draft directory; speculators carries the head where it must, and embedding."""
    tensors = draft_tensors(case, dtype)
    if kind == "hf":
        config = hf_fields(case)
    elif kind == "deepspec":
        config, tensors = deepspec_fields(case), tensors | borrowed(case, dtype)
    else:
        config = speculators_fields(case)
        tensors |= borrowed(case, dtype) if case.pruned else {}
    return write(directory, config | dict(changes or {}), tensors, **how)


def write_eagle3(directory: Path, pruned: bool = True, with_embedding: bool = True) -> Path:
    tensors = fill(eagle3_shapes(pruned)) | map_tensors(pruned)
    if with_embedding:
        tensors["embed_tokens.weight"] = target_tensors()["embed_tokens.weight"]
    return write(directory, eagle3_fields(pruned), tensors)


def write_target(
    directory: Path,
    shards: int = 1,
    tied: bool = False,
    rows: int = V,
    text_part: bool = False,
    head_key: bool = True,
    layers: int = LAYERS,
    **changes: Any,
) -> Path:
    """A target with some other tensors around what a draft borrows."""
    tensors = target_tensors(rows)
    inner = {
        "model_type": "qwen3",
        "num_hidden_layers": layers,
        "hidden_size": H,
        "vocab_size": rows,
        "tie_word_embeddings": tied,
    } | changes
    prefix = "model.language_model." if text_part else "model."
    named = {
        f"{prefix}embed_tokens.weight": tensors["embed_tokens.weight"],
        f"{prefix}norm.weight": torch.ones(H, dtype=DTYPE),
        f"{prefix}layers.0.mlp.up_proj.weight": torch.zeros(INTER, H, dtype=DTYPE),
    }
    if head_key:
        named["lm_head.weight"] = tensors["lm_head.weight"]
    if text_part:
        named["model.visual.patch_embed.proj.weight"] = torch.zeros(4, 3, dtype=DTYPE)
        outer = {
            "architectures": ["ToyForConditionalGeneration"],
            "text_config": inner,
            "vision_config": {"hidden_size": 4},
        }
    else:
        outer = {"architectures": ["Qwen3ForCausalLM"]} | inner
    return write(directory, outer, named, shards)


def read_tensors(directory: Path) -> Tensors:
    """Every tensor of a directory, by the public library."""
    found: Tensors = {}
    for file in sorted(directory.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Names, dtypes, shapes and bytes."""
    assert set(found) == set(wanted)
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), name
        assert torch.equal(bits(found[name]), bits(tensor)), name


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
