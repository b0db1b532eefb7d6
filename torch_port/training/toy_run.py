"""A run so small that it takes milliseconds a step: what the soak and the tests train.

Drawn at random, yet whole: a target's directory, features with an index, a vocabulary map, a draft
config and a run file. Toy sizes: V = 64 target ids, K = 24 of them kept, H = 16.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml
from safetensors.torch import save_file

from torch_port.data.features import FeatureSample, write_features
from torch_port.vocabulary.files import save_map
from torch_port.vocabulary.mapping import buffers_from_kept

V, K, H = 64, 24, 16
LAYERS = (0, 2)  # of the target's four, captured
SAMPLES = 24

_TARGET = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": V,
    "hidden_size": H,
    "num_hidden_layers": 4,
    "tie_word_embeddings": False,
}
_DRAFT = {
    "vocab_size": V,
    "draft_vocab_size": K,
    "hidden_size": H,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "layer_types": ["full_attention"],
    "dflash_config": {
        "projector_type": "dspark",
        "block_size": 4,
        "target_layer_ids": list(LAYERS),
        "num_target_layers": 4,
        "mask_token_id": V - 1,
        "markov_rank": 4,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    },
}


def write_toy_run(directory: Path, *, seed: int = 0) -> Path:
    """Write everything that a toy run reads into a new directory, and return its run file.

    The run: 40 steps of 4 samples, a checkpoint every 5, float32.
    """
    directory.mkdir(parents=True)
    draw = torch.Generator().manual_seed(seed)
    target = directory / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps(_TARGET), encoding="utf-8")
    tensors = {
        "model.embed_tokens.weight": torch.randn(V, H, generator=draw),
        "lm_head.weight": torch.randn(V, H, generator=draw),
    }
    save_file(tensors, target / "model.safetensors")
    samples = [_sample(i, draw, tensors["lm_head.weight"]) for i in range(SAMPLES)]
    write_features(directory / "features", samples, metadata={"target_layer_ids": list(LAYERS)})
    kept = torch.randperm(V, generator=draw)[:K].sort().values
    save_map(
        directory / "map.safetensors",
        *buffers_from_kept(kept, V),
        corpus_fingerprint="toy",
        tokenizer_fingerprint="toy",
        coverage=K / V,
    )
    (directory / "draft").mkdir()
    (directory / "draft" / "config.json").write_text(json.dumps(_DRAFT), encoding="utf-8")
    run = {
        "algorithm": "dspark",
        "draft": {"config": str(directory / "draft")},
        "target": {"path": str(target)},
        "data": {
            "path": str(directory / "features"),
            "validation_share": 0.15,
            "batch_size": 1,
            "accumulation": 2,
            "num_anchors": 4,
            "workers": 0,
        },
        "vocabulary": {"map": str(directory / "map.safetensors")},
        "objective": {"loss_decay_gamma": 2.0},
        "optimizer": {"peak_rate": 1e-2, "warmup_steps": 4, "total_steps": 40},
        "training": {"out": str(directory / "out"), "dtype": "float32", "tensorboard": False},
        "checkpoints": {"every": 5},
    }
    file = directory / "run.yaml"
    file.write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")
    return file


def _sample(number: int, draw: torch.Generator, head_VH: torch.Tensor) -> FeatureSample:
    length = int(torch.randint(12, 25, (), generator=draw))
    mask = torch.ones(length)
    mask[:3] = 0
    final = torch.randn(length, H, generator=draw)
    return FeatureSample(
        id=f"toy-{number}",
        input_ids=torch.randint(0, V, (length,), generator=draw),
        loss_mask=mask,
        hidden_states=torch.randn(length, len(LAYERS) * H, generator=draw),
        target_last_hidden_states=final,
        target_log_normalizer=(final @ head_VH.T).logsumexp(-1),
    )
