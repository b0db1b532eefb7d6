"""The baseline computes what the port computes; the benchmark's command runs and writes its JSON.

A ratio against a baseline that computes something else means nothing.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import field, parts, port
from benchmarks.bounds import attention_products, objective_products
from benchmarks.cases import OBJECTIVE, Inputs, attention_inputs, step_inputs
from benchmarks.report import MARKERS
from benchmarks.shapes import QUICK_ATTENTION, QUICK_STEP, AttentionShape, ObjectiveShape
from torch_port.models.attention import dense_mask, draft_attention
from torch_port.models.dspark import FrozenTarget
from torch_port.objective.evaluate import forward_batch

ROOT = Path(__file__).resolve().parents[2]
# float64, a few hundred terms per sum: two orders above rounding at the tensor's scale.
TOLERANCE = 1e-12


def double(inputs: Inputs) -> Inputs:
    """The same in float64, with a second row whose mask has holes and a dropped block.

    Block 0 of the second row meets an unsupervised label in its second slot; the first row's last
    anchors reach beyond the sequence.
    """
    b = inputs.batch
    mask = torch.ones_like(b.loss_mask)
    mask[0, int(b.anchor_positions[0, 0]) + 2] = 0
    keep = torch.ones_like(b.block_keep_mask)
    keep[0, -1] = False
    anchors = torch.where(keep, b.anchor_positions, 0)
    batch = replace(
        b,
        input_ids=torch.cat([b.input_ids, b.input_ids.flip(1)]),
        loss_mask=torch.cat([torch.ones_like(mask), mask]).double(),
        hidden_states=torch.cat([b.hidden_states, b.hidden_states.flip(1)]).double(),
        target_last_hidden_states=torch.cat([b.target_last_hidden_states] * 2).double(),
        anchor_positions=torch.cat([b.anchor_positions, anchors]),
        block_keep_mask=torch.cat([b.block_keep_mask, keep]),
    )
    E, U = inputs.target.embed_tokens.double(), inputs.target.lm_head.double()
    return replace(inputs, batch=batch, target=FrozenTarget(E, 3 * U))


def gradients(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    found = {name: leaf.grad.clone() for name, leaf in leaves.items() if leaf.grad is not None}
    for leaf in leaves.values():
        leaf.grad = None
    return found


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert set(ours) == set(theirs)
    for name, value in ours.items():
        scale = theirs[name].abs().max()
        assert scale > 0, name
        assert (value - theirs[name]).abs().max() <= TOLERANCE * scale, name


@pytest.mark.parametrize("prunes", [True, False], ids=["pruned", "unpruned"])
def test_the_baselines_step_is_the_ports_plain_one(prunes: bool) -> None:
    """Faults: a baseline with another mask, decay, normaliser, rotation, layer or head."""
    shape = QUICK_STEP["toy"]
    if not prunes:
        shape = replace(shape, objective=shape.objective.unpruned())
    inputs = double(step_inputs(shape))
    draft = inputs.draft(parts.PLAIN).double()
    with torch.no_grad():  # large enough that every path matters; biases away from 0
        for parameter in draft.parameters():
            parameter.mul_(5) if parameter.dim() > 1 else parameter.add_(0.3)
    leaves = dict(draft.named_parameters())
    batch = inputs.batch

    denominators = port.denominators_of(draft, batch)
    plain = forward_batch(draft, batch, inputs.target, OBJECTIVE, denominators)
    assert plain.loss is not None
    torch.autograd.backward(plain.loss)
    expected = gradients(leaves)
    assert set(expected) == set(leaves)  # every parameter takes a gradient

    layout = parts.field_layout(inputs, draft)
    G = inputs.config.block_size
    mask = field.dense_mask(batch.anchor_positions, batch.block_keep_mask, 48, G)
    hidden = field.backbone(
        leaves,
        layout,
        inputs.target.embed_tokens,
        batch.hidden_states,
        mask,
        layers=inputs.config.num_hidden_layers,
        head_dim=inputs.config.head_dim,
        eps=inputs.config.rms_norm_eps,
        theta=inputs.config.rope_theta,
    )
    loss = field.objective(
        leaves,
        hidden,
        layout,
        batch.target_last_hidden_states,
        draft.draft_head(inputs.target.lm_head),
        inputs.target.lm_head,
        parts.COEFFICIENTS,
    )
    torch.autograd.backward(loss)
    assert abs(loss.item() - plain.loss.item()) <= TOLERANCE * abs(plain.loss.item())
    assert_same(gradients(leaves), expected)
    kept = plain.blocks.label_is_kept[plain.blocks.evaluated]
    assert bool(kept.all()) is not prunes  # the pruned case meets pruned labels


def test_the_baselines_attention_is_the_ports_dense_one() -> None:
    """Faults: kv heads repeated in another order, a mask that leaks context or blocks."""
    shape = QUICK_ATTENTION["toy"]
    inputs = attention_inputs(shape)
    keep_BQ = inputs.keep_BN.repeat_interleave(shape.block, dim=1)
    ours = dense_mask(inputs.anchors_BN, inputs.keep_BN, shape.sequence, shape.block, None)
    theirs = parts.field_mask(inputs, shape)
    assert torch.equal(ours, theirs)
    leaves = [inputs.q, inputs.k_joined, inputs.v_joined]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    named = dict(zip("qkv", wide, strict=True))
    d_out = inputs.d_out.double()
    torch.autograd.backward(draft_attention(*wide, ours, keep_BQ), d_out)
    expected = gradients(named)
    torch.autograd.backward(field.attention(*wide, theirs), d_out)
    assert_same(gradients(named), expected)


def test_the_objectives_products_are_those_of_the_notes() -> None:
    """Fault: a bound with a product too many (every ratio to it looks better).

    Shape A with 2048 slots on 512 positions, counted by hand: 2·2048·512·8000 for each of h·U_Kᵀ
    and dz·U_K, 2·512·512·8000 for the teacher, 2·512·64·8000 for each of bias, dW2 and de, and
    2·512·512·23040 for the pruned rows.
    """
    shape = ObjectiveShape(hidden=512, draft_vocab=8000, vocab=31040, sequence=512, anchors=128)
    stored = objective_products(shape, 2048, 512, normaliser=False).listed
    assert sum(product.flop for product in stored) == 2 * 16_777_216_000 + 4_194_304_000 + (
        3 * 524_288_000
    )
    computed = objective_products(shape, 2048, 512, normaliser=True).listed
    assert computed[-1].flop == 12_079_595_520
    assert len(computed) == len(stored) + 1


def test_attentions_products_see_the_visible_keys_alone() -> None:
    """Fault: a bound over all keys, or one that forgets the second scores.

    Anchors 3 and 10 with γ = 4: 7 and 14 keys; 4 query heads, so 7·2·4·4·8·(7 + 14) operations.
    """
    shape = AttentionShape(sequence=16, anchors=2, block=4, heads=4, kv_heads=2, head_dim=8)
    products = attention_products(shape, [3, 10])
    assert len(products.listed) == 7
    assert sum(product.flop for product in products.listed) == 7 * 2 * 4 * 4 * 8 * 21
    scores = products.listed[0]
    assert (scores.m, scores.k, scores.n, scores.count) == (8, 8, 10.5, 4)
    products.run()


def test_an_unpruned_shape_keeps_every_other_size() -> None:
    """Fault: sizes that change places, or a target that keeps its V rows."""
    shape = ObjectiveShape(1, 2, 3, 4, 5, 6, 7)
    assert shape.unpruned() == ObjectiveShape(1, 2, 2, 4, 5, 6, 7)


def test_the_command_runs_and_writes_what_it_says(tmp_path: Path) -> None:
    """Faults: a variant that computes another value, a JSON or a document that lacks a part."""
    docs = tmp_path / "page.md"
    docs.write_text(f"before\n{MARKERS[0]}\nold\n{MARKERS[1]}\nafter\n", encoding="utf-8")
    arguments = ["--compare", "--quick", "--repeats", "1", "--json", str(tmp_path / "out.json")]
    subprocess.run(
        [sys.executable, "-m", "benchmarks.step", *arguments, "--docs", str(docs)],
        check=True,
        cwd=ROOT,
        capture_output=True,
    )
    report = json.loads((tmp_path / "out.json").read_bytes())
    assert set(report) == {"command", "machine", "quick", "repeats", "comparisons"}
    assert report["quick"] is True
    assert report["machine"]["dtype"] == "float32"
    names = [(c["part"], c["case"]) for c in report["comparisons"]]
    assert names == [
        ("objective", "toy, pruned"),
        ("objective", "toy, unpruned"),
        ("attention", "toy"),
        ("step", "toy"),
    ]
    for comparison in report["comparisons"]:
        # float32 losses of the same weights: rounding alone, about 1e-7 times the sums' lengths.
        assert comparison["value_difference"] < 1e-5
        rows = {row["name"]: row for row in comparison["variants"]}
        assert comparison["products"]
        assert set(comparison["products"]) <= set(rows)
        baseline = rows["field"]
        for name, row in rows.items():
            assert row["milliseconds"] > 0
            assert row["all_milliseconds"] == [row["milliseconds"]]  # one round
            assert (row["peak_bytes"] is None) == name.startswith("products")
            if row["bound"] is not None:
                expected = row["milliseconds"] / rows[row["bound"]]["milliseconds"]
                assert row["of_products"] == pytest.approx(expected)
            if row["times_faster_than_field"] is not None:
                expected = baseline["milliseconds"] / row["milliseconds"]
                assert row["times_faster_than_field"] == pytest.approx(expected)
    page = docs.read_text(encoding="utf-8")
    assert page.startswith("before\n")
    assert page.endswith("\nafter\n")
    assert "old" not in page
    assert page.count("| field |") == len(names)


def test_a_document_without_markers_is_refused_before_the_work(tmp_path: Path) -> None:
    """Fault: ten minutes measured, then nowhere to write."""
    docs = tmp_path / "page.md"
    docs.write_text("no markers", encoding="utf-8")
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.step", "--quick", "--docs", str(docs)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert "results: begin" in run.stderr
    assert docs.read_text(encoding="utf-8") == "no markers"


def test_a_json_path_without_a_directory_is_refused_before_the_work(tmp_path: Path) -> None:
    """Fault: everything measured, then a traceback instead of numbers."""
    path = tmp_path / "nowhere" / "results.json"
    run = subprocess.run(
        [sys.executable, "-m", "benchmarks.step", "--quick", "--json", str(path)],
        check=False,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert "its directory does not exist" in " ".join(run.stderr.replace("│", " ").split())
