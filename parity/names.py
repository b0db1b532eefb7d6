"""One table between torch parameter names and Flax paths, both ways.

Whether a tensor is transposed follows from the parameter's *name*: torch's linear kernels are
[out, in], Flax's are [in, out], and a square matrix would slip through any test of shapes
(contracts §4).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tree = dict[str, Any]

BUFFERS = ("t2d", "d2t")  # vocabulary buffers: no parameters, the spec takes them as a map


@dataclass(frozen=True)
class Rule:
    """One family of parameters: `{i}` stands for a layer number on both sides."""

    torch: str
    flax: str
    transpose: bool


def _linear(torch: str, bias: bool = False) -> list[Rule]:
    flax = torch.replace("layers.{i}", "layers_{i}").replace(".", "/")
    rules = [Rule(f"{torch}.weight", f"{flax}/kernel", transpose=True)]
    return rules + ([Rule(f"{torch}.bias", f"{flax}/bias", transpose=False)] if bias else [])


def _norm(torch: str) -> list[Rule]:
    flax = torch.replace("layers.{i}", "layers_{i}").replace(".", "/")
    return [Rule(f"{torch}.weight", f"{flax}/scale", transpose=False)]


TABLE: tuple[Rule, ...] = (
    *_linear("fc"),
    *_norm("hidden_norm"),
    *_norm("layers.{i}.input_layernorm"),
    *_linear("layers.{i}.self_attn.q_proj"),
    *_linear("layers.{i}.self_attn.k_proj"),
    *_linear("layers.{i}.self_attn.v_proj"),
    *_linear("layers.{i}.self_attn.o_proj"),
    *_norm("layers.{i}.self_attn.q_norm"),
    *_norm("layers.{i}.self_attn.k_norm"),
    *_norm("layers.{i}.post_attention_layernorm"),
    *_linear("layers.{i}.mlp.gate_proj"),
    *_linear("layers.{i}.mlp.up_proj"),
    *_linear("layers.{i}.mlp.down_proj"),
    *_norm("norm"),
    Rule("markov_head.markov_w1.weight", "markov_head/markov_w1/embedding", transpose=False),
    *_linear("markov_head.markov_w2"),
    *_linear("markov_head.gate_proj", bias=True),
    *_linear("markov_head.joint_proj", bias=True),
    *_linear("confidence_head.proj", bias=True),
)
# EAGLE3's own (contracts §4); apart, because the other family's drafts have no head of their own.
EAGLE3_TABLE: tuple[Rule, ...] = (
    *_linear("fc"),
    *_norm("midlayer.input_layernorm"),
    *_norm("midlayer.hidden_norm"),
    *_norm("midlayer.post_attention_layernorm"),
    *_linear("midlayer.self_attn.q_proj"),
    *_linear("midlayer.self_attn.k_proj"),
    *_linear("midlayer.self_attn.v_proj"),
    *_linear("midlayer.self_attn.o_proj"),
    *_linear("midlayer.mlp.gate_proj"),
    *_linear("midlayer.mlp.up_proj"),
    *_linear("midlayer.mlp.down_proj"),
    *_norm("norm"),
    *_linear("lm_head"),
)


def flax_path(torch_name: str, table: tuple[Rule, ...] = TABLE) -> tuple[str, bool]:
    """Return (Flax path, transpose?) of a torch parameter name.

    Raises KeyError for a name that the table does not hold.

    >>> flax_path("layers.10.mlp.up_proj.weight")
    ('layers_10/mlp/up_proj/kernel', True)
    """
    return _translate(torch_name, "torch", "flax", table)


def torch_name(path: str, table: tuple[Rule, ...] = TABLE) -> tuple[str, bool]:
    """Return (torch name, transpose?) of a Flax path.

    >>> torch_name("markov_head/markov_w1/embedding")
    ('markov_head.markov_w1.weight', False)
    """
    return _translate(path, "flax", "torch", table)


def _translate(name: str, source: str, goal: str, table: tuple[Rule, ...]) -> tuple[str, bool]:
    for rule in table:
        pattern = re.escape(getattr(rule, source)).replace(re.escape("{i}"), r"(\d+)")
        match = re.fullmatch(pattern, name)
        if match:
            layer = match.group(1) if match.groups() else ""
            return getattr(rule, goal).replace("{i}", layer), rule.transpose
    raise KeyError(f"{name!r} is no parameter of a draft: parity/names.py has no {source} name so")


def to_flax(state: Mapping[str, Array], table: tuple[Rule, ...] = TABLE) -> Tree:
    """Turn a torch state dict of NumPy arrays (without t2d, d2t) into a Flax parameter tree."""
    tree: Tree = {}
    for name, value in state.items():
        path, transpose = flax_path(name, table)
        *parents, leaf = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[leaf] = np.ascontiguousarray(value.T) if transpose else value
    return tree


def to_torch(tree: Mapping[str, Any], table: tuple[Rule, ...] = TABLE) -> dict[str, Array]:
    """Turn a Flax parameter tree into a torch state dict of NumPy arrays; inverse of `to_flax`."""
    state = {}
    for path, value in _leaves(tree):
        name, transpose = torch_name(path, table)
        array = np.asarray(value)
        state[name] = np.ascontiguousarray(array.T) if transpose else array
    return state


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{prefix}/{key}" if prefix else key
        if isinstance(value, Mapping):
            yield from _leaves(value, path)
        else:
            yield path, value
