"""Drafts and batches drawn by hypothesis, and one step on them, for the equality tests.

Everything continuous comes from seeded normal draws: q and p̃ then differ by far more than the 1e-9
of the sheet's kink (§8), except at K = 1, where both are exactly 1 and every program's sign is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor
from toys import config

from torch_port.compute import ComputeConfig
from torch_port.config import ObjectiveConfig
from torch_port.data.batch import Batch
from torch_port.models.dspark import DSparkDraft, FrozenTarget
from torch_port.objective.evaluate import Outcome, batch_denominators, forward_batch
from torch_port.objective.loss import Denominators, reduce_denominators
from torch_port.objective.teacher import log_normalizer
from torch_port.vocabulary.mapping import buffers_from_kept

HIDDEN = 6
OBJECTIVE = ObjectiveConfig(loss_decay_gamma=3.0)
SIZES = [(3, 1), (3, 2), (3, 3), (17, 5), (17, 16), (70, 64), (70, 70), (150, 1), (150, 130)]
SIZES += [(150, 149), (150, 150)]  # (V, K): beyond one segment of `row_max`, and no multiple of 64
HEAD_TYPES = {
    "vanilla": {},
    "gated": {"markov_head_type": "gated"},
    "rnn": {"markov_head_type": "rnn"},
    "none": {"markov_rank": 0, "confidence_head_with_markov": False},
}
HEADS = [(1, 1), (2, 2), (4, 2), (6, 2), (6, 3), (4, 1)]  # query and kv heads


@dataclass(frozen=True)
class Case:
    """A step's inputs; the two programs compared differ in `compute` alone."""

    changes: dict[str, Any]
    objective: ObjectiveConfig
    batch: Batch
    seed: int
    trainable_head: bool = False
    others: float = 0.0  # what the step's other micro-batches add to both denominators

    def draft(self, compute: ComputeConfig) -> DSparkDraft:
        """Build the draft; weights depend on the seed alone."""
        model = DSparkDraft(config(**self.changes), compute, self.trainable_head).double()
        g = torch.Generator().manual_seed(self.seed)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                near = 1.0 if parameter.dim() == 1 and not name.endswith("bias") else 0.0  # norms
                parameter.normal_(near, 0.4, generator=g)
        V, K = model.vocab_size, model.draft_vocab_size
        if K < V:
            kept = torch.randperm(V, generator=g)[:K].sort().values
            model.install_vocab_mapping(*buffers_from_kept(kept, V))
        return model

    def target(self) -> FrozenTarget:
        """Build the frozen target."""
        g = torch.Generator().manual_seed(self.seed + 1)
        shape = (self.changes["vocab_size"], HIDDEN)
        E, U = (torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
        return FrozenTarget(E, U)


def layers(draw: st.DrawFn, S: int) -> dict[str, Any]:
    kinds = draw(st.lists(st.sampled_from(["full_attention", "sliding_attention"]), min_size=1,
                          max_size=2))  # fmt: skip
    window = draw(st.sampled_from([1, 2, 3, S - 1, S, S + 7]))
    heads, kv_heads = draw(st.sampled_from(HEADS))
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "sliding_window": window if "sliding_attention" in kinds else None,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": draw(st.sampled_from([2, 4])),
        "hidden_size": HIDDEN,
        "intermediate_size": 5,
    }


def heads(draw: st.DrawFn) -> dict[str, Any]:
    kind = draw(st.sampled_from(["vanilla", "gated", "rnn", "none"]))
    confidence = draw(st.booleans())
    return {
        "markov_rank": 0 if kind == "none" else 3,
        "markov_head_type": "vanilla" if kind == "none" else kind,
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence and kind != "none" and draw(st.booleans()),
    }


@st.composite
def objectives(draw: st.DrawFn) -> ObjectiveConfig:
    return ObjectiveConfig(
        ce_alpha=draw(st.sampled_from([0.1, 0.0, 1.3])),
        l1_alpha=draw(st.sampled_from([0.9, 0.0])),
        confidence_alpha=draw(st.sampled_from([1.0, 0.0])),
        loss_decay_gamma=draw(st.sampled_from([None, 3.0, 0.6])),
        detach_confidence=draw(st.booleans()),
    )


@st.composite
def batches(draw: st.DrawFn, V: int, U: Tensor | None) -> Batch:
    """Draw a batch: any anchors (unsorted, equal, adjacent, 0, near the end), any mask.

    Ids where the mask is 0 are −1 or V or legal; with `U` the normaliser is stored.
    """
    B, S, N = draw(st.integers(1, 3)), draw(st.integers(4, 13)), draw(st.integers(1, 5))
    seed = draw(st.integers(0, 10**6))
    g = torch.Generator().manual_seed(seed)
    share = draw(st.sampled_from([1.0, 0.9, 0.6, 0.0]))  # of supervised places
    mask = (torch.rand(B, S, generator=g) < share).double()
    anchors = draw(
        st.lists(st.lists(st.integers(0, S - 1), min_size=N, max_size=N), min_size=B, max_size=B)
    )
    keep = torch.rand(B, N, generator=g) < draw(st.sampled_from([1.0, 0.7, 0.0]))
    ids = torch.randint(0, V, (B, S), generator=g)
    padding = draw(st.sampled_from([None, -1, V]))
    if padding is not None:
        ids = torch.where(mask > 0.5, ids, padding)
    states = torch.randn(B, S, HIDDEN, generator=g, dtype=torch.float64)
    return Batch(
        input_ids=ids,
        loss_mask=mask,
        hidden_states=torch.randn(B, S, 2 * HIDDEN, generator=g, dtype=torch.float64),
        target_last_hidden_states=states,
        anchor_positions=torch.tensor(anchors),
        block_keep_mask=keep,
        target_log_normalizer=None if U is None else log_normalizer(states, U),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    V, K = draw(st.sampled_from(SIZES))
    seed = draw(st.integers(0, 10**6))
    changes = {"vocab_size": V, "draft_vocab_size": K, "block_size": draw(st.integers(1, 5))}
    changes |= heads(draw) | layers(draw, 9)
    bare = Case(changes, ObjectiveConfig(), None, seed)  # type: ignore[arg-type]
    U = bare.target().lm_head if draw(st.booleans()) else None
    objective, batch = draw(objectives()), draw(batches(V, U))
    return Case(changes, objective, batch, seed, draw(st.booleans()), draw(st.sampled_from([0, 2])))


def mib(rows: int, K: int, bits: int = 64) -> float:
    """The setting that holds `rows` K-wide rows; one slot and its position take 5."""
    return rows * K * bits / 8 / 2**20


def small_batch(V: int = 70, B: int = 2, S: int = 12, N: int = 6, every: int = 1) -> Batch:
    """Everything supervised; anchors 0, every, 2·every, …: up to 4 slots to a position."""
    g = torch.Generator().manual_seed(0)
    return Batch(
        input_ids=torch.randint(0, V, (B, S), generator=g),
        loss_mask=torch.ones(B, S, dtype=torch.float64),
        hidden_states=torch.randn(B, S, 2 * HIDDEN, generator=g, dtype=torch.float64),
        target_last_hidden_states=torch.randn(B, S, HIDDEN, generator=g, dtype=torch.float64),
        anchor_positions=every * torch.arange(N).repeat(B, 1),
        block_keep_mask=torch.ones(B, N, dtype=torch.bool),
    )


def denominators_of(model: DSparkDraft, b: Batch, others: float = 0.0) -> Denominators:
    """A step's denominators under OBJECTIVE; `others` from its other micro-batches."""
    return reduce_denominators(batch_denominators(model, b, OBJECTIVE) + others, True)


def step(
    case: Case, compute: ComputeConfig, scale: float = 1.0, ranks: int = 1
) -> tuple[Outcome, dict[str, Tensor]]:
    """Run a step forward and backward; return (outcome, everything that it computes by name)."""
    model, frozen = case.draft(compute), case.target()
    local = batch_denominators(model, case.batch, case.objective) + case.others
    local = torch.where(local == 0, 1.0, local)  # a step without any is an error, tested elsewhere
    denominators = reduce_denominators(local, model.prunes_vocabulary)
    outcome = forward_batch(model, case.batch, frozen, case.objective, denominators, ranks)
    assert outcome.loss is not None
    torch.autograd.backward(outcome.loss * scale)
    found = {"loss": outcome.loss.detach(), "hidden": outcome.hidden.detach()}
    for name, (top, bottom) in outcome.metrics.items():
        found |= {f"metric {name} numerator": top, f"metric {name} denominator": bottom}
    found |= {f"term {name}": value.detach() for name, value in vars(outcome.terms).items()}
    found |= {f"sum {name}": value.detach() for name, value in vars(outcome.numerators).items()}
    return outcome, found | gradients(model)


def gradients(model: DSparkDraft) -> dict[str, Tensor]:
    return {
        f"gradient {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
    }


def assert_same(got: dict[str, Tensor], want: dict[str, Tensor], relative: float = 1e-12) -> None:
    """Every tensor within `relative` of its largest magnitude.

    Or within 1e-14, where terms of order 1 to 20 cancel: the ce of a draft that is sure of the
    label, its gradient q − 1, the key of a query with no other key. A float64 of that size is
    itself off by 1e-16 to 4e-15.
    """
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        scale = float(value.abs().max()) if value.numel() else 0.0
        torch.testing.assert_close(
            got[name], value, rtol=0, atol=relative * scale + 1e-14,
            msg=lambda text, name=name: f"{name}: {text}",
        )  # fmt: skip
