"""Blockwise attention against the dense mask, in both forms; layouts; recomputing; memory."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import fields, replace

import pytest
import torch
from drawn import HIDDEN, Case, assert_same, cases, gradients, step
from emulated_npu import emulated_torch_npu
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from toys import G, S, batch, draft, target

from torch_port.compute import ComputeConfig
from torch_port.config import ANCHOR_FIRST, BONUS_ANCHOR, ObjectiveConfig
from torch_port.data.batch import Batch
from torch_port.device import NPU, PORTABLE, use_kernels
from torch_port.errors import UserError
from torch_port.layout import Layout, lay_out
from torch_port.memory import PeakMemory
from torch_port.models import blockwise
from torch_port.models.attention import dense_mask, draft_attention
from torch_port.models.blockwise import blockwise_attention
from torch_port.objective.evaluate import forward_batch, layout_blocks

PLAIN = {"objective": "plain"}
DENSE = ComputeConfig(attention="dense", **PLAIN)
BLOCKWISE = ComputeConfig(**PLAIN)
SLIDING = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 3}


@contextmanager
def emulated() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch, use_kernels(NPU):
        patch.setitem(sys.modules, "torch_npu", emulated_torch_npu(float64=True))
        yield


# Sliced: the portable form. Chunked: the NPU's form, on the portable kernels and on the emulation.
FORMS: dict[str, Callable[[], object]] = {
    "sliced": nullcontext,
    "chunked": lambda: use_kernels(replace(PORTABLE, name="npu")),
    "emulated": emulated,
}
every_form = pytest.mark.parametrize("form", FORMS)


# --- Equality ------------------------------------------------------------------------------------


@every_form
def test_blockwise_equals_dense(form: str) -> None:
    """Loss, terms and gradients of a whole step, float64: sums in another order, 1e-12.

    Faults: the window off by one, a block's keys left in the context of the next, the scale missing
    in dk, query heads grouped by i mod R, a dropped block walked, packs or calls cut wrong.
    """

    @settings(max_examples=60)
    @given(case=cases(), few=st.booleans())
    def compare(case: Case, few: bool) -> None:
        with pytest.MonkeyPatch.context() as patch:
            if few:  # several packs and calls to a row
                patch.setattr(blockwise, "PACK", 2)
                patch.setattr(blockwise, "BLOCKS_PER_CALL", 2)
            with FORMS[form]():
                got = step(case, BLOCKWISE)[1]
            assert_same(got, step(case, DENSE)[1])

    compare()


def heads(B: int, S: int, N: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, context k and v, own k and v: 4 query heads on 2 kv heads, D = 4, γ = 3."""
    g = torch.Generator().manual_seed(0)
    shapes = [(B, 4, N * 3, 4), (B, 2, S, 4), (B, 2, S, 4), (B, 2, N * 3, 4), (B, 2, N * 3, 4)]
    return [torch.randn(s, generator=g, dtype=torch.float64).to(dtype) for s in shapes]


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> dict[str, Tensor]:
    leaves = [x.clone().requires_grad_() for x in inputs]
    out = function(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view(out.shape).to(out.dtype)
    torch.autograd.backward((out * weight).sum())
    names = ("q", "context k", "context v", "own k", "own v")
    found = {f"gradient {n}": x.grad for n, x in zip(names, leaves, strict=True)}
    return {"out": out.detach()} | {n: g for n, g in found.items() if g is not None}


def placed(B: int, S: int, N: int) -> tuple[Tensor, Tensor, Layout]:
    """Anchors in no order, some equal, some dropped."""
    g = torch.Generator().manual_seed(1)
    anchors = torch.randint(0, S, (B, N), generator=g)
    keep = torch.rand(B, N, generator=g) < 0.8
    return anchors, keep, lay_out(torch.ones(B, S), anchors, keep, 3)


def dense_form(anchors: Tensor, keep: Tensor, S: int, window: int | None) -> Callable[..., Tensor]:
    mask, keep_BQ = dense_mask(anchors, keep, S, 3, window), keep.repeat_interleave(3, dim=1)

    def attend(q: Tensor, ck: Tensor, cv: Tensor, ok: Tensor, ov: Tensor) -> Tensor:
        return draft_attention(q, torch.cat([ck, ok], 2), torch.cat([cv, ov], 2), mask, keep_BQ)

    return attend


@every_form
@pytest.mark.parametrize("window", [None, 1, 2, 60, 1000])
def test_more_blocks_than_a_pack_and_a_call_take(form: str, window: int | None) -> None:
    """Faults: packs and calls of the real sizes cut wrong; a row's start counted from another's."""
    sequence, N = 50, 2 * blockwise.PACK + 5
    anchors, keep, layout = placed(2, sequence, N)
    inputs = heads(2, sequence, N)
    with FORMS[form]():
        got = with_gradients(lambda *x: blockwise_attention(x[0], x[1:3], x[3:], layout, window),
                             inputs)  # fmt: skip
    assert_same(got, with_gradients(dense_form(anchors, keep, sequence, window), inputs))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 0.01)])
@pytest.mark.parametrize("form", ["sliced", "chunked"])
def test_low_precision_follows_float64(form: str, dtype: torch.dtype, tolerance: float) -> None:
    """Against float64 on the same rounded inputs; dtypes of outputs and gradients are the inputs'.

    Fault: context gradients summed over blocks in bf16. The output is rounded once and the
    gradient's inner mean reads it rounded: a few 2⁻⁹ of the largest; float32: a few 2⁻²⁴.
    """
    anchors, keep, layout = placed(1, 40, 30)
    inputs = heads(1, 40, 30, dtype)
    with FORMS[form]():
        got = with_gradients(lambda *x: blockwise_attention(x[0], x[1:3], x[3:], layout, 9), inputs)
    assert all(x.dtype == dtype for x in got.values())
    want = with_gradients(dense_form(anchors, keep, 40, 9), [x.double() for x in inputs])
    assert_same({n: x.double() for n, x in got.items()}, want, tolerance)


@every_form
def test_backward_twice(form: str) -> None:
    """Faults: a saved tensor used up by the first backward; statistics of another call."""
    _, _, layout = placed(2, 20, 11)
    leaves = [x.requires_grad_() for x in heads(2, 20, 11)]
    with FORMS[form]():
        out = blockwise_attention(leaves[0], leaves[1:3], leaves[3:], layout, None).square().sum()
        first = torch.autograd.grad(out, leaves, retain_graph=True)
        second = torch.autograd.grad(out, leaves)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# --- What a block may not see --------------------------------------------------------------------


@every_form
@pytest.mark.parametrize("window", [None, 4])
def test_dropped_blocks_are_exactly_zero(form: str, window: int | None) -> None:
    """Faults: a dropped block's output not 0, or a gradient through it; also where it holds NaN."""
    _, keep, layout = placed(2, 20, 11)
    assert 0 < keep.sum() < keep.numel()
    inputs, dropped = heads(2, 20, 11), ~keep.repeat_interleave(3, dim=1)
    for i in (0, 3, 4):  # q, own k, own v of dropped blocks
        inputs[i] = torch.where(dropped[:, None, :, None], torch.nan, inputs[i])
    with FORMS[form]():
        found = with_gradients(lambda *x: blockwise_attention(x[0], x[1:3], x[3:], layout, window),
                               inputs)  # fmt: skip
    for name in ("out", "gradient q", "gradient own k", "gradient own v"):
        rows = found[name].transpose(1, 2)[dropped]
        assert torch.equal(rows, torch.zeros_like(rows)), name
    assert all(x.isfinite().all() for x in found.values())


@every_form
@pytest.mark.parametrize("changes", [{}, SLIDING], ids=["full", "sliding"])
def test_states_at_or_after_an_anchor_do_not_matter(form: str, changes: dict) -> None:
    """Field-note 7: a block's h does not move, bit for bit, with states from its anchor on.

    NaN as well in the sliced form, whose keys end at the anchor. A masked form (dense, and the
    NPU's calls for blocks that share one) multiplies it by 0: there a large number stands for it.
    """
    b = batch(loss_mask=[[1.0] * S], anchors=[[6, 2, 4]], keep=[[True] * 3]).laid_out(G)
    model, frozen = draft(**changes), target()
    blocks = layout_blocks(model, b)

    def hidden(first: int, value: float) -> Tensor:
        states = b.hidden_states.clone()
        states[:, first:] = value
        with torch.no_grad(), FORMS[form]():
            return model(blocks, states, b.anchor_positions, b.block_keep_mask, frozen, b.layout)[0]

    clean = hidden(S, 0.0)
    for value in (1e6, torch.nan) if form == "sliced" else (1e6,):
        assert torch.equal(hidden(6, value), clean)
        moved = hidden(4, value)
        assert torch.equal(moved[1:], clean[1:])
        assert not torch.equal(moved[0], clean[0])
        assert torch.equal(hidden(2, value)[1], clean[1])
        assert not torch.equal(hidden(1, value)[1], clean[1])


# --- Layout --------------------------------------------------------------------------------------


def layout_by_loops(
    mask: Tensor, anchors: Tensor, keep: Tensor, gamma: int, bonus: bool
) -> dict[str, object]:
    """§3.3 and §3.5 slot by slot; with `bonus` slot k predicts x[a+k], and a hole ends nothing."""
    (B, N), S = anchors.shape, mask.shape[1]
    slots, visits = [], []
    for b in range(B):
        row = []
        for n in range(N):
            a = int(anchors[b, n])
            if not keep[b, n]:
                continue
            row.append((a, n))
            for k in range(gamma):
                label = a + k if bonus else a + 1 + k
                if bonus and k == 0:
                    continue
                if label >= S or (mask[b, label] <= 0.5 and not bonus):
                    break
                if mask[b, label] > 0.5:
                    slots.append((b * S + label - 1, (b * N + n) * gamma + k))
        visits.append(tuple(sorted(row)))
    slots.sort()
    positions = sorted({position for position, _ in slots})
    first = [sum(p < position for p, _ in slots) for position in positions]
    flat = [pair for row in visits for pair in row]
    return {
        "block_size": gamma,
        "block_layout": BONUS_ANCHOR if bonus else ANCHOR_FIRST,
        "slots_M": [slot for _, slot in slots],
        "place_M": [positions.index(position) for position, _ in slots],
        "positions_P": positions,
        "first_P": (*first, len(slots)),
        "visits": tuple(visits),
        "visit_anchors_X": [a for a, _ in flat],
        "visit_queries_XG": [[n * gamma + k for k in range(gamma)] for _, n in flat],
    }


@settings(max_examples=80)
@given(case=cases(), bonus=st.booleans())
def test_layout_against_loops(case: Case, bonus: bool) -> None:
    """Faults: slots of a dropped or ended block, rows counted with another stride, an order that
    depends on the sort."""
    gamma = case.changes["block_size"]
    b = case.batch.laid_out(gamma, BONUS_ANCHOR if bonus else ANCHOR_FIRST)
    assert b.layout is not None
    want = layout_by_loops(b.loss_mask, b.anchor_positions, b.block_keep_mask, gamma, bonus)
    for field in fields(Layout):
        value = getattr(b.layout, field.name)
        if isinstance(value, Tensor):
            assert value.dtype == torch.int64
            value = value.tolist()
        assert value == want[field.name], field.name


def test_layout_of_the_loader_or_of_the_step() -> None:
    """Faults: a step that finds another layout than the loader; the layout lost on the way to a
    device; another block size taken silently."""
    model, b = draft(), batch()
    host = b.laid_out(G).to(torch.device("cpu"), torch.float64)
    assert host.with_layout(G) is host
    found = b.with_layout(G)
    for field in fields(Layout):
        one, other = (getattr(x.layout, field.name) for x in (host, found))
        equal = torch.equal(one, other) if isinstance(one, Tensor) else one == other
        assert equal, field.name
    first, second = (forward_batch(model, x, target(), ObjectiveConfig()).terms for x in (b, host))
    assert all(torch.equal(getattr(second, n), x) for n, x in vars(first).items())
    for compute in (ComputeConfig(), DENSE):
        model.compute = compute
        with pytest.raises(UserError, match=rf"block_size {G + 1}.* has {G}; call laid_out\({G}\)"):
            forward_batch(model, b.laid_out(G + 1), target(), ObjectiveConfig())


# --- Recomputing and memory ----------------------------------------------------------------------

LONG = {
    "vocab_size": 40,
    "draft_vocab_size": 20,
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 9,
    "intermediate_size": 40,
}


def long_batch(sequence: int, N: int, B: int = 1) -> Batch:
    g = torch.Generator().manual_seed(0)
    return Batch(
        input_ids=torch.randint(0, 40, (B, sequence), generator=g),
        loss_mask=torch.ones(B, sequence, dtype=torch.float64),
        hidden_states=torch.randn(B, sequence, 2 * HIDDEN, generator=g, dtype=torch.float64),
        target_last_hidden_states=torch.randn(
            B, sequence, HIDDEN, generator=g, dtype=torch.float64
        ),
        anchor_positions=torch.arange(0, sequence, -(-sequence // N)).expand(B, -1).contiguous(),
        block_keep_mask=torch.ones(B, N, dtype=torch.bool),
    )


def hidden_states_run(form: str, recompute: str) -> tuple[int, int, dict[str, Tensor]]:
    """Return (bytes kept for the backward pass, peak bytes, h with gradients) of the backbone."""
    case = Case(LONG, ObjectiveConfig(), long_batch(48, 24).laid_out(G), 0)
    model, frozen = case.draft(ComputeConfig(recompute=recompute)), case.target()  # type: ignore[arg-type]
    b, blocks = case.batch, layout_blocks(model, case.batch)
    place = (b.anchor_positions, b.block_keep_mask, frozen, b.layout)
    with FORMS[form](), PeakMemory() as traced:
        hidden = model(blocks, b.hidden_states, *place)
        kept = traced.live
        torch.autograd.backward(hidden.square().sum())
    return kept, traced.peak, {"h": hidden.detach()} | gradients(model)


@pytest.mark.parametrize("form", ["sliced", "chunked"])
def test_recompute_changes_memory_alone(form: str) -> None:
    """Faults: a setting that does nothing; a loss or a gradient that moves by a bit."""
    runs = {how: hidden_states_run(form, how) for how in ("none", "mlp", "layer")}
    peaks = {how: peak for how, (_, peak, _) in runs.items()}
    assert peaks["none"] > 1.2 * peaks["mlp"] > 1.2 * 1.2 * peaks["layer"]
    case = Case(LONG, ObjectiveConfig(), long_batch(48, 24), 0)
    for how, (_, _, found) in runs.items():
        with FORMS[form]():
            found |= step(case, ComputeConfig(recompute=how))[1]  # type: ignore[arg-type]
        for name, value in runs["none"][2].items():
            assert torch.equal(found[name], value), (how, name)


def test_layers_computed_again_keep_their_inputs_alone() -> None:
    """Fault: what a form of attention holds on its own account (a chunked call's statistics, as
    attributes) outlives a layer that is computed again. Then the forms keep unlike many bytes."""
    kept = {form: hidden_states_run(form, "layer")[0] for form in ("sliced", "chunked")}
    assert kept["sliced"] == kept["chunked"]


@pytest.mark.parametrize("form", ["sliced", "chunked"])
@pytest.mark.parametrize("window", [None, 16])
def test_peak_grows_with_the_sum_of_lengths(form: str, window: int | None) -> None:
    """Fault: scores of all blocks at once. Twice S and N: the sum doubles, the product is 4 times.

    2.5 leaves room for the one block's scores that stand beside it.
    """
    peaks = []
    for length, N in ((256, 64), (512, 128)):
        layout = lay_out(
            torch.ones(1, length), torch.arange(0, length, 4).view(1, N),
            torch.ones(1, N, dtype=torch.bool), 3,
        )  # fmt: skip
        leaves = [x.requires_grad_() for x in heads(1, length, N)]
        with FORMS[form](), PeakMemory() as traced:
            out = blockwise_attention(leaves[0], leaves[1:3], leaves[3:], layout, window)
            torch.autograd.backward(out.sum())
        peaks.append(traced.peak)
    assert peaks[1] < 2.5 * peaks[0]


class Large(TorchDispatchMode):
    """Remembers tensors made with at least `elements`, or with a last axis of `width`."""

    def __init__(self, elements: int, width: int) -> None:
        super().__init__()
        self.elements, self.width = elements, width
        self.found: set[tuple[str, tuple[int, ...]]] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            wide = leaf.dim() > 1 and leaf.shape[-1] == self.width
            if leaf.numel() >= self.elements or wide:  # an expanded view counts with what it shows
                self.found.add((func._schema.name, tuple(leaf.shape)))
        return result


@pytest.mark.parametrize("objective", ["fused", "plain"])
@pytest.mark.parametrize("V", [43, 6007])
def test_nothing_gathers_the_sequence_for_every_block(V: int, objective: str) -> None:
    """Field-note 12: no [B, N, S, H], not even as a view, and no […, V], in a pruned step.

    At V = 43 nothing else comes near B·N·S·H. V = 6007 makes positions · V more than 2²⁰, the most
    that the streamed normaliser takes at a time.
    """
    B, N, length = 2, 48, 96
    changes = LONG | {"vocab_size": V, "num_hidden_layers": 1, "layer_types": ["full_attention"]}
    changes["sliding_window"] = None
    case = Case(changes, ObjectiveConfig(), long_batch(length, N, B).laid_out(G), 0)
    gathers = V == 43
    with Large(B * N * length * HIDDEN if gathers else 1 + 2**20, -1 if gathers else V) as large:
        step(case, ComputeConfig(objective=objective))
    # Transposes of U and W1, which are [V, …], are views of them.
    assert {shape for _, shape in large.found} <= {(HIDDEN, V), (3, V)}


def test_a_window_far_beyond_the_sequence_costs_nothing() -> None:
    """Fault: a band as wide as the window, here 10¹² columns."""
    sliding = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 10**12}
    model, b, frozen = draft(**sliding), batch(), target()
    found = forward_batch(model, b, frozen, ObjectiveConfig()).hidden
    model.compute = ComputeConfig(attention="dense")
    expected = forward_batch(model, b, frozen, ObjectiveConfig()).hidden
    # float64, sums in another order; states are of size 1 after the last norm.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
