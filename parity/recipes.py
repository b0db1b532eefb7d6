"""What `parity emit` writes: the base config and settings, and what differs in each case."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

# Rows of the head, kept ids, hidden size, sequence, batch, anchors.
V, K, H, S, B, N = 40, 10, 16, 20, 2, 4

NESTED: dict[str, Any] = {
    "projector_type": "dspark",
    "attention_mode": "gqa",
    "target_layer_ids": [0, 2],
    "mask_token_id": 3,
    "markov_rank": 4,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
TOP: dict[str, Any] = {
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
BARE = ("attention_mode", "target_layer_ids", "mask_token_id")  # a draft without heads
EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": V,
    "draft_vocab_size": K,
    "hidden_size": H,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "num_target_layers": 4,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
        "use_aux_hidden_state": True,
    },
}
OPTIMIZER = {
    "peak_rate": 3e-2,
    "final_rate": 1e-3,
    "warmup_steps": 2,
    "beta1": 0.9,
    "beta2": 0.95,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "max_grad_norm": 1.0,
}
DECODING = {"proposals": 3, "limit": 24, "end_of_text": None}
OBJECTIVE = {
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
    with `steps` the case is a training run of so many AdamW steps (§14), with `decoding` (what
    differs from the base settings) a decoding with given draws (§10). `agreement`, from
    0 to 1, says how much alike the target and the draft of such a case are. With `eagle3` (its
    settings: `steps`, the training-time test's n) the draft is an EAGLE3 one and the objective that
    of §13; `labels` "pruned" then means that the teacher's choices are.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    objective: dict[str, Any] = field(default_factory=dict)
    labels: str = "any"
    supervised: bool = True
    error: str | None = None
    layout: str = "dspark"
    steps: int = 0
    decoding: dict[str, Any] | None = None
    agreement: float = 0.0
    eagle3: dict[str, Any] | None = None


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
    Recipe("eagle3-pruned", eagle3={"steps": 3}),
    Recipe(
        "eagle3-full-mha",
        {"draft_vocab_size": None, "num_key_value_heads": 4},
        eagle3={"steps": 3},
    ),
    Recipe("eagle3-one-step", eagle3={"steps": 1}),
    Recipe(
        "eagle3-nothing-inside",
        labels="pruned",
        error="no in-vocabulary target tokens",
        eagle3={"steps": 1},
    ),
    Recipe("training-pruned", steps=6),
    Recipe("training-dflash", layout="dflash", objective={"loss_decay_gamma": 4.0}, steps=6),
    Recipe("training-dpace", layout="dflash", objective={"dpace": "both"}, steps=6),
    Recipe("decoding-pruned", decoding={"temperature": 0.8}),
    Recipe("decoding-greedy", decoding={"temperature": 0.0}, agreement=1.0),
    Recipe(
        "decoding-full-rnn",
        {"draft_vocab_size": None, "markov_head_type": "rnn"},
        decoding={"temperature": 2.0},
    ),
    Recipe(
        "decoding-truncated",
        decoding={"temperature": 0.8, "confidence_threshold": 0.03},
        agreement=0.5,
    ),
    Recipe(
        "decoding-padded-head",
        {"draft_vocab_size": None},
        decoding={"temperature": 0.8, "tokenizer_size": 32},
        agreement=1.0,
    ),
    Recipe("decoding-ends", decoding={"temperature": 0.8, "end_of_text": 4}, agreement=0.8),
    Recipe("decoding-dflash", decoding={"temperature": 0.8}, layout="dflash", agreement=0.8),
    Recipe("error-no-supervision", supervised=False, error="no supervised target tokens"),
    Recipe("error-nothing-inside", labels="pruned", error="no in-vocabulary target tokens"),
)
