"""Make a corpus and a target so small that docs/training.md can be followed on any machine.

The corpus is the docstrings of four modules of the standard library, as questions and answers; the
target has four layers and random weights. Writes DIR/corpus.jsonl and DIR/target.

    python examples/tiny/make.py runs/tiny
"""

import ast
import fractions
import heapq
import json
import statistics
import sys
import textwrap
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from torch_port.demo.tokenizer import train_tokenizer


def main(directory: Path) -> None:
    """Write corpus and target."""
    directory.mkdir(parents=True, exist_ok=True)
    lines = []
    for module in (textwrap, statistics, fractions, heapq):
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text())):
            if isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                asked = {"from": "human", "value": f"What does {node.name} do?"}
                answer = {"from": "gpt", "value": ast.get_docstring(node)}
                name = f"{module.__name__}.{node.name}"
                lines.append({"id": name, "conversations": [asked, answer]})
    texts = [turn["value"] for line in lines for turn in line["conversations"]]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "corpus.jsonl").write_text(text, encoding="utf-8")
    config = Qwen3Config(
        vocab_size=640,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(directory / "target")
    train_tokenizer(texts, 600).save(str(directory / "target" / "tokenizer.json"))
    print(f"{len(lines)} conversations: {directory / 'corpus.jsonl'}")
    print(f"a target of 4 layers: {directory / 'target'}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/tiny"))
