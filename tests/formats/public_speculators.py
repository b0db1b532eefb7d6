"""Runs in the environment of the public `speculators` package, not in ours; see the test beside it.

    PYTHON public_speculators.py INPUTS CHECKPOINT...

Loads each CHECKPOINT with `SpeculatorModel.from_pretrained`, computes hidden states, logits and
confidences of the blocks in INPUTS, and writes CHECKPOINT.answers and, by the model's own
`save_pretrained`, CHECKPOINT.saved.
"""

import sys

import speculators.models.dflash.core as core
import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel, SpeculatorModelConfig


def answers(model, given):
    """Return what the model says of every slot; the package draws anchors, here they are given."""
    anchors = given["anchors"]
    core.select_anchors = lambda *_: (anchors, torch.ones_like(anchors, dtype=torch.bool))
    hidden, logits, _, _, indices = model._backbone_forward(
        given["hidden_states"],
        given["input_ids"],
        torch.ones_like(given["input_ids"]),
        given["last"],
        torch.zeros_like(given["input_ids"]),
        max_anchors=len(anchors),
    )
    size = len(anchors), model.block_size
    result = {"hidden": hidden.view(*size, -1), "logits": logits.view(*size, -1)}
    head = getattr(model, "markov_head", None)
    if head is not None:
        previous = given["input_ids"][0, indices].view(size)
        result["logits"] = result["logits"] + head.block_bias(
            prev_token_ids=previous, hidden_states=result["hidden"]
        )
    confidence = getattr(model, "confidence_head", None)
    if confidence is not None:
        features = result["hidden"]
        if model.config.confidence_head_with_markov:
            features = torch.cat([features, head.prev_embeddings(previous)], -1)
        result["confidence"] = confidence(features)
    return result


def main(inputs, *checkpoints):
    """Load, answer, write."""
    for checkpoint in checkpoints:
        config = SpeculatorModelConfig.from_pretrained(checkpoint)
        config.transformer_layer_config._attn_implementation = "eager"  # flex attention compiles
        model = SpeculatorModel.from_pretrained(checkpoint, config=config).eval()
        with torch.no_grad():
            found = answers(model, load_file(inputs))
        answered = {name: value.contiguous() for name, value in found.items()}
        save_file(answered, checkpoint + ".answers")
        model.save_pretrained(checkpoint + ".saved")


if __name__ == "__main__":
    main(*sys.argv[1:])
