"""Corpora, a tokenizer and targets small enough to be counted by hand."""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console

from torch_port.data.features import FeatureSample, write_features
from torch_port.data.prepare import Corpus
from torch_port.data.templates import CHATML, ChatTemplate

QUIET = Console(quiet=True)
# Words by white space; the newline between turns is no token.
WORDS = ["<unk>", "user", "assistant", "system", "a", "b", "c", "d"]
USER, ASSISTANT, SYSTEM, A, B, C, D, START, END = 1, 2, 3, 4, 5, 6, 7, 8, 9
V = 16


def write_tokenizer(directory: Path) -> Path:
    """Write tokenizer.json into a directory and return the file."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    model = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    directory.mkdir(exist_ok=True, parents=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory / "tokenizer.json"


def corpus(
    root: Path, lines: list[Any], *, length: int = 50, size: int = 4 << 20, **settings: Any
) -> Corpus:
    """Write a corpus (objects, or text as it is) and return it with its tokenizer."""
    root.mkdir(exist_ok=True, parents=True)
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (root / "train.jsonl").write_text("".join(f"{text}\n" for text in texts))
    tokenizer = write_tokenizer(root / "tok")
    template: ChatTemplate = settings.get("template", CHATML)
    return Corpus((root / "train.jsonl",), tokenizer, template, length, size)


def drawn_lines(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Conversations of random words and lengths; all can be trained on."""
    random = np.random.default_rng(seed)

    def words() -> str:
        return " ".join(random.choice(list("abcd"), random.integers(1, 12)))

    return [
        {
            "id": f"c{i}",
            "messages": [
                {"role": "user", "content": words()},
                {"role": "assistant", "content": words()},
            ],
        }
        for i in range(count)
    ]


def write_adding_target(directory: Path) -> Path:
    """Write a real Qwen3 of 4 layers whose layer k adds 10^k to an embedding of ones.

    Attention adds nothing (o_proj is 0). The MLP reads the norm of a constant vector, which is
    ones: its gate comes out at 20, up at 1, and silu(20) = 20 to float32, so that down = 10^k / 20
    adds 10^k to every element. The last norm gives ones again, times its weight 3.
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    H = 8
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(
            Qwen3Config(
                vocab_size=V,
                hidden_size=H,
                intermediate_size=1,
                num_hidden_layers=4,
                num_attention_heads=2,
                num_key_value_heads=1,
                head_dim=4,
                tie_word_embeddings=False,
                max_position_embeddings=64,
                bos_token_id=None,
                eos_token_id=None,
                initializer_range=0.5,
            )
        )
    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(1)
        model.model.norm.weight.fill_(3)
        for k, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.fill_(0)
            layer.mlp.gate_proj.weight.fill_(20 / H)
            layer.mlp.up_proj.weight.fill_(1 / H)
            layer.mlp.down_proj.weight.fill_(10.0**k / 20)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory


def write_drawn_target(directory: Path) -> Path:
    """Write a Qwen3 of 4 layers with random weights."""
    from transformers import Qwen3ForCausalLM

    write_adding_target(directory)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Qwen3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, 0.0, 0.4)
    model.save_pretrained(directory)
    return directory


def feature_sample(
    name: str, length: int, *, mask: list[float] | None = None, dtype: torch.dtype = torch.bfloat16
) -> FeatureSample:
    """A sample of random states, L = 2 and H = 3; supervised from its third token on."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {length}".encode()))
    return FeatureSample(
        id=name,
        input_ids=torch.randint(0, V, (length,), generator=draw),
        loss_mask=torch.tensor(mask or [0.0, 0.0, *[1.0] * (length - 2)]),
        hidden_states=torch.randn(length, 6, generator=draw).to(dtype),
        target_last_hidden_states=torch.randn(length, 3, generator=draw).to(dtype),
        target_log_normalizer=torch.randn(length, generator=draw),
    )


def write_drawn_features(directory: Path, lengths: list[int], **settings: Any) -> Path:
    """Write a feature directory with samples of these lengths."""
    samples = [feature_sample(f"s{i}", length) for i, length in enumerate(lengths)]
    write_features(directory, samples, **settings)
    return directory


def contents(directory: Path) -> dict[str, bytes]:
    """Every file's bytes, by name."""
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}
