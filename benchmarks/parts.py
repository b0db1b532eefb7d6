"""The three parts: objective, attention, whole step; each a list of comparisons to be measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import field, port
from benchmarks.bounds import (
    Product,
    Products,
    attention_products,
    objective_products,
    step_products,
)
from benchmarks.cases import (
    OBJECTIVE,
    AttentionInputs,
    Inputs,
    attention_inputs,
    objective_inputs,
    step_inputs,
)
from benchmarks.measure import Variant
from benchmarks.shapes import AttentionShape, ObjectiveShape, StepShape
from torch_port.compute import ComputeConfig
from torch_port.data.batch import Batch
from torch_port.models.dspark import DSparkDraft
from torch_port.objective.evaluate import layout_blocks

PLAIN = ComputeConfig(objective="plain", attention="dense")
FUSED = ComputeConfig()
# Other settings of objective_buffer_mib: what smaller and larger buffers trade.
OTHER_BUFFERS_MIB = (16.0, 64.0)
COEFFICIENTS = field.Coefficients(
    OBJECTIVE.ce_alpha,
    OBJECTIVE.l1_alpha,
    OBJECTIVE.confidence_alpha,
    OBJECTIVE.loss_decay_gamma,
)


@dataclass
class Comparison:
    """Variants of the same work, the shape they share, and the products of each bound."""

    part: str
    case: str
    shape: dict[str, Any]
    variants: list[Variant]
    products: dict[str, list[Product]]


def objective_comparison(name: str, shape: ObjectiveShape, alone: bool) -> Comparison:
    """Compare the objective, forward and backward from given hidden states.

    Pruned, the port is measured with the normaliser computed and with the one stored in the
    features; the baseline knows only the former.
    """
    inputs = objective_inputs(shape)
    prunes = shape.draft_vocab < shape.vocab
    size = (1, shape.anchors, shape.block, shape.hidden)
    hidden = torch.randn(size, generator=torch.Generator().manual_seed(1)).requires_grad_()
    batches = {"": inputs.batch}
    if prunes:
        batches = {", computed": inputs.batch, ", stored": inputs.with_normaliser()}
    # As the loader hands them out: the order of slots and blocks is found on the host.
    batches = {suffix: batch.laid_out(shape.block) for suffix, batch in batches.items()}
    # The baseline and both forms of the port train the same parameters.
    forms = {"fused": inputs.draft(FUSED)}
    for mib in OTHER_BUFFERS_MIB:
        compute = ComputeConfig(objective_buffer_mib=mib)
        forms[f"fused {mib:.0f} MiB"] = inputs.draft(compute)
    if not alone:
        forms = {"plain": inputs.draft(PLAIN)} | forms
    variants = []
    if not alone:
        bound = "products, computed" if prunes else "products"
        variants.append(_field_objective(inputs, hidden, bound))
    for form, draft in forms.items():
        for suffix, batch in batches.items():
            run = _port_objective(draft, hidden, batch, inputs)
            leaves = [hidden, *draft.parameters()]
            variants.append(Variant(form + suffix, run, leaves, f"products{suffix}"))
    slots, positions = _coverage(inputs)
    listed = {}
    for suffix in batches:
        products = objective_products(
            shape, slots, positions, normaliser=prunes and suffix != ", stored"
        )
        listed[f"products{suffix}"] = products.listed
        variants.append(_bound(f"products{suffix}", products))
    measured = asdict(shape) | {"evaluated_slots": slots, "covered_positions": positions}
    return Comparison("objective", name, measured, variants, listed)


def _port_objective(
    draft: DSparkDraft, hidden: Tensor, batch: Batch, inputs: Inputs
) -> Callable[[], Tensor]:
    blocks = layout_blocks(draft, batch)
    denominators = port.denominators_of(draft, batch)
    # Derived once per map and held for the whole run, not by the step.
    draft.draft_head(inputs.target.lm_head)
    draft.pruned_target_ids()

    def run() -> Tensor:
        loss = port.objective_only(draft, hidden, blocks, batch, inputs.target, denominators)
        return _backward(loss)

    return run


def _field_objective(inputs: Inputs, hidden: Tensor, bound: str) -> Variant:
    draft = inputs.draft(PLAIN)
    weights = dict(draft.named_parameters())
    layout = field_layout(inputs, draft)
    head = draft.draft_head(inputs.target.lm_head)

    def run() -> Tensor:
        loss = field.objective(
            weights,
            hidden,
            layout,
            inputs.batch.target_last_hidden_states,
            head,
            inputs.target.lm_head,
            COEFFICIENTS,
        )
        return _backward(loss)

    return Variant("field", run, [hidden, *draft.parameters()], bound)


def field_layout(inputs: Inputs, draft: DSparkDraft) -> field.Layout:
    """Lay the baseline's blocks out."""
    batch = inputs.batch
    return field.lay_out(
        batch.input_ids,
        batch.loss_mask,
        batch.anchor_positions,
        batch.block_keep_mask,
        inputs.config.block_size,
        inputs.config.mask_token_id,
        draft.draft_vocab_index(),
    )


def attention_comparison(name: str, shape: AttentionShape, alone: bool) -> Comparison:
    """Compare one attention call, forward and backward.

    Mask and layout are built once per step and shared by its layers, so they are given here, and
    building them is measured beside.
    """
    inputs = attention_inputs(shape)
    keep_BQ = inputs.keep_BN.repeat_interleave(shape.block, dim=1)
    layout = port.layout_of(inputs, shape.block)
    variants = []
    if not alone:
        mask = field_mask(inputs, shape)

        def build_field() -> None:
            field_mask(inputs, shape)

        def baseline() -> Tensor:
            return field.attention(inputs.q, inputs.k_joined, inputs.v_joined, mask)

        def dense() -> Tensor:
            return port.dense_attention(inputs, mask, keep_BQ)

        variants += [
            _attention("field", inputs, baseline),
            Variant("field's mask", build_field, aside=True),
            _attention("dense", inputs, dense),
        ]

    def build_layout() -> None:
        port.layout_of(inputs, shape.block)

    variants += [
        _attention("blockwise", inputs, lambda: port.blockwise(inputs, layout)),
        Variant("blockwise's layout", build_layout, aside=True),
    ]
    products = attention_products(shape, inputs.anchors_BN[inputs.keep_BN].tolist())
    variants.append(_bound("products", products))
    return Comparison("attention", name, asdict(shape), variants, {"products": products.listed})


def field_mask(inputs: AttentionInputs, shape: AttentionShape) -> Tensor:
    """Build the baseline's dense mask."""
    return field.dense_mask(inputs.anchors_BN, inputs.keep_BN, shape.sequence, shape.block)


def _attention(name: str, inputs: AttentionInputs, attend: Callable[[], Tensor]) -> Variant:
    def run() -> Tensor:
        out = attend()
        torch.autograd.backward(out, inputs.d_out)
        # Its value is read from the output that the clock has seen; one
        # column, to cost nothing.
        return out.detach()[..., :1].square().sum()

    return Variant(name, run, inputs.leaves, "products")


def step_comparison(name: str, shape: StepShape, alone: bool) -> Comparison:
    """Compare the whole step, forward and backward, from a batch to every gradient.

    Layout, masks and denominators are inside; the optimizer, the same in all, is not.
    """
    inputs = step_inputs(shape)
    variants = []
    if not alone:
        variants.append(_field_step(inputs))
    forms: list[tuple[str, ComputeConfig]] = [("fused, blockwise", FUSED)]
    if not alone:
        forms = [
            ("plain, dense", PLAIN),
            ("fused, dense", ComputeConfig(attention="dense")),
            ("plain, blockwise", ComputeConfig(objective="plain")),
            *forms,
        ]
    for form, compute in forms:
        draft = inputs.draft(compute)

        def run(draft: DSparkDraft = draft) -> Tensor:
            return _backward(port.whole_step(draft, inputs.batch, inputs.target))

        variants.append(Variant(form, run, list(draft.parameters()), "products"))
    slots, positions = _coverage(inputs)
    anchors = inputs.batch.anchor_positions[inputs.batch.block_keep_mask].tolist()
    products = step_products(shape, slots, positions, anchors)
    variants.append(_bound("products", products))
    measured = asdict(shape) | {"evaluated_slots": slots, "covered_positions": positions}
    return Comparison("step", name, measured, variants, {"products": products.listed})


def _field_step(inputs: Inputs) -> Variant:
    draft, batch, config = inputs.draft(PLAIN), inputs.batch, inputs.config
    weights = dict(draft.named_parameters())
    head = draft.draft_head(inputs.target.lm_head)

    def run() -> Tensor:
        layout = field_layout(inputs, draft)
        mask = field.dense_mask(
            batch.anchor_positions,
            batch.block_keep_mask,
            batch.input_ids.shape[1],
            config.block_size,
        )
        hidden = field.backbone(
            weights,
            layout,
            inputs.target.embed_tokens,
            batch.hidden_states,
            mask,
            layers=config.num_hidden_layers,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            theta=config.rope_theta,
        )
        states = batch.target_last_hidden_states
        loss = field.objective(
            weights, hidden, layout, states, head, inputs.target.lm_head, COEFFICIENTS
        )
        return _backward(loss)

    return Variant("field", run, list(draft.parameters()), "products")


def _backward(loss: Tensor) -> Tensor:
    torch.autograd.backward(loss)
    return loss.detach()


def _bound(name: str, products: Products) -> Variant:
    return Variant(name, products.run, products=True)


def _coverage(inputs: Inputs) -> tuple[int, int]:
    """Count the evaluated slots, and the distinct positions that their teachers stand at."""
    layout = field_layout(inputs, inputs.draft(PLAIN))
    slots = layout.teacher_position[layout.evaluated]
    return len(slots), len(slots.unique())


def comparisons(
    part: str, shapes: dict[str, Any], *, alone: bool
) -> Iterator[Callable[[], Comparison]]:
    """Yield a part's comparisons, each made only when it is called: inputs of one at a time."""
    for name, shape in shapes.items():
        if part == "objective":
            yield partial(objective_comparison, f"{name}, pruned", shape, alone)
            yield partial(objective_comparison, f"{name}, unpruned", shape.unpruned(), alone)
        elif part == "attention":
            yield partial(attention_comparison, name, shape, alone)
        else:
            yield partial(step_comparison, name, shape, alone)
