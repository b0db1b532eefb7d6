"""The unpruned plain path keeps the published arithmetic; ranks agree on number and order of sums.

The formula is transcribed here from spec sheet §3.6, §7 and §8, frozen: float32, the same
operations in the same order, compared with `torch.equal`. A rewrite that is equal on paper and not
in the last bit is red: runs that exist must reproduce.
"""

import math
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from drawn import HIDDEN, Case, gradients
from torch import Tensor
from torch.nn import functional as F

from torch_port.compute import ComputeConfig
from torch_port.config import ObjectiveConfig
from torch_port.data.batch import Batch
from torch_port.models.dspark import DSparkDraft, FrozenTarget
from torch_port.objective.evaluate import batch_denominators, forward_batch
from torch_port.objective.loss import reduce_denominators
from torch_port.training.step import accumulate_gradients

V, S, N, GAMMA = 70, 16, 11, 4
PUBLISHED_CHUNK = 16  # blocks


def two_rows(dtype: torch.dtype) -> Batch:
    """The second row has no anchor candidate at all: no two neighbours of it are supervised."""
    g = torch.Generator().manual_seed(5)
    mask = (torch.rand(2, S, generator=g) < 0.85).to(dtype)
    mask[1] = torch.arange(S) % 2
    anchors = torch.zeros(2, N, dtype=torch.int64)
    anchors[0] = torch.randint(0, S - 1, (N,), generator=g).sort().values
    keep = torch.tensor([[True] * (N - 1) + [False], [False] * N])
    return Batch(
        input_ids=torch.randint(0, V, (2, S), generator=g),
        loss_mask=mask,
        hidden_states=torch.randn(2, S, 2 * HIDDEN, generator=g, dtype=torch.float64).to(dtype),
        target_last_hidden_states=torch.randn(2, S, HIDDEN, generator=g).to(dtype),
        anchor_positions=anchors,
        block_keep_mask=keep,
    )


def both_busy(dtype: torch.dtype) -> Batch:
    """22 blocks, more than one published chunk, in both rows."""
    b = two_rows(dtype)
    mask = (torch.rand(2, S, generator=torch.Generator().manual_seed(6)) < 0.85).to(dtype)
    anchors = torch.arange(N).repeat(2, 1)
    keep = (torch.arange(N) < N - 1).repeat(2, 1)
    return Batch(
        **vars(b) | {"loss_mask": mask, "anchor_positions": anchors, "block_keep_mask": keep}
    )


def sized(K: int | None, head: str, batch: Batch, objective: ObjectiveConfig) -> Case:
    changes = {"vocab_size": V, "draft_vocab_size": K, "hidden_size": HIDDEN}
    changes |= {"markov_head_type": head, "block_size": GAMMA}
    return Case(changes, objective, batch, seed=11)


# --- The published formula -----------------------------------------------------------------------


def published_terms(
    model: DSparkDraft, b: Batch, frozen: FrozenTarget, hidden: Tensor
) -> dict[str, Tensor]:
    """Every term of §8 for K = V, [B, N, γ]; a term is 0 at slots that are not evaluated."""
    rows = range(2)
    at = b.anchor_positions[:, :, None] + torch.arange(GAMMA)  # x[a + k] comes before slot k
    inside = at + 1 < S
    safe = torch.where(b.block_keep_mask[:, :, None], (at + 1).clamp(max=S - 1), 0)
    label = torch.stack([b.input_ids[r][safe[r]] for r in rows])
    supervised = torch.stack([b.loss_mask[r][safe[r]] > 0.5 for r in rows])
    M = (inside & supervised & b.block_keep_mask[:, :, None]).int().cumprod(-1).bool()
    anchor_token = torch.stack([b.input_ids[r][b.anchor_positions[r]] for r in rows])
    previous = torch.cat([anchor_token[:, :, None], label[:, :, :-1]], dim=-1)
    state_at = (safe - 1).clamp(min=0)
    teacher = torch.stack([b.target_last_hidden_states[r][state_at[r]] for r in rows])

    columns: list[dict[str, Tensor]] = []
    flat = [x.flatten(0, 1) for x in (hidden, teacher, previous, label, M)]
    for start in range(0, len(flat[0]), PUBLISHED_CHUNK):
        h, t, prev, y, m = (x[start : start + PUBLISHED_CHUNK] for x in flat)
        columns.append(_published_chunk(model, frozen, h, t, prev, y, m))
    return {
        name: torch.cat([c[name] for c in columns]).view(2, N, GAMMA) for name in columns[0]
    } | {"M": M}


def _published_chunk(
    model: DSparkDraft, frozen: FrozenTarget, h: Tensor, t: Tensor, prev: Tensor, y: Tensor,
    m: Tensor,
) -> dict[str, Tensor]:  # fmt: skip
    assert model.markov_head is not None
    assert model.confidence_head is not None
    U, W2 = frozen.lm_head, model.markov_head.markov_w2.weight
    e = model.markov_head.markov_w1.weight[prev]
    code = e
    if model.config.markov_head_type == "gated":
        gate = model.markov_head.gate_proj
        code = torch.sigmoid(F.linear(torch.cat([h, e], -1), gate.weight, gate.bias)) * e
    z = h @ U.T + F.linear(code, W2)
    ell = t @ U.T
    # 0 in the place of what does not count, before anything is computed from it.
    z, ell = torch.where(m[..., None], z, 0), torch.where(m[..., None], ell, 0)
    q, p = torch.softmax(z, -1), torch.softmax(ell, -1)
    ce = torch.logsumexp(z, -1) - torch.gather(z, -1, y[..., None])[..., 0]
    l1 = torch.abs(q - p).sum(-1)
    accept = (1 - 0.5 * l1.detach()).clamp(0, 1)
    proj = model.confidence_head.proj
    c = torch.where(m, F.linear(torch.cat([h, e], -1), proj.weight, proj.bias)[..., 0], 0)
    values = {
        "ce": ce,
        "l1": l1,
        "accept": accept,
        "confidence_loss": F.binary_cross_entropy_with_logits(c, accept, reduction="none"),
        "confidence_probability": torch.sigmoid(c),
        "confidence_error": (torch.sigmoid(c) - accept).abs(),
        "kept_mass": p.sum(-1),
        "teacher_top": p.max(-1).values,
        "draft_top": q.max(-1).values,
        "correct": (z.argmax(-1) == y).to(z.dtype),
        "agrees": (z.argmax(-1) == ell.argmax(-1)).to(z.dtype),
    }
    return {name: torch.where(m, value, 0) for name, value in values.items()}


def published_loss(terms: dict[str, Tensor], decay: float | None) -> Tensor:
    """(α_ce·ce_num + α_l1·l1_num + α_conf·conf_num) / den, one denominator, left to right."""
    w = terms["M"].float()
    if decay is not None:
        slots = [math.exp(-k / decay) for k in range(GAMMA)]
        w = w * torch.tensor(slots, dtype=torch.float32)
    ce_num = (w * terms["ce"]).sum()
    l1_num = (w * terms["l1"]).sum()
    conf_num = (w * terms["confidence_loss"]).sum()
    return (0.1 * ce_num + 0.9 * l1_num + 1.0 * conf_num) / w.sum()


@pytest.mark.parametrize("decay", [None, 3.0], ids=["no decay", "decay"])
@pytest.mark.parametrize("head", ["vanilla", "gated"])
def test_unpruned_plain_path_keeps_the_published_arithmetic(head: str, decay: float | None) -> None:
    """Faults: a second denominator, another order of the three sums, ce from log q, α through the
    kept mass, a norm in the place of a sum, another chunk. All equal in exact numbers."""
    objective = ObjectiveConfig(loss_decay_gamma=decay)
    case = sized(None, head, both_busy(torch.float32), objective)
    model = case.draft(ComputeConfig(objective="plain", attention="dense")).float()
    double = case.target()
    frozen = FrozenTarget(double.embed_tokens.float(), double.lm_head.float())
    sums = reduce_denominators(batch_denominators(model, case.batch, objective), False)
    outcome = forward_batch(model, case.batch, frozen, objective, sums)
    want = published_terms(model, case.batch, frozen, outcome.hidden)
    assert 0 < want["M"].sum() < want["M"].numel()
    got = vars(outcome.terms)
    assert got.keys() == want.keys() - {"M"}
    for name, value in got.items():
        assert value.dtype == torch.float32
        assert torch.equal(value, want[name]), name
    loss = published_loss(want, decay)
    assert outcome.loss is not None
    assert torch.equal(outcome.loss, loss)
    # The gradient too: of the transcription's own graph, from the same states.
    for name, parameter in model.named_parameters():
        one, other = (
            torch.autograd.grad(x, parameter, retain_graph=True)[0] for x in (outcome.loss, loss)
        )
        # Chunks' gradients are added in another order by a graph without checkpoints: rounding.
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=0, atol=2e-6 * scale, msg=name)


# --- Collectives under two real processes --------------------------------------------------------

RUNS = [(kind, how) for kind in ("full", "pruned") for how in ("plain", "fused")]


def run_step(kind: str, how: str, b: Batch) -> dict[str, object]:
    objective = ObjectiveConfig(loss_decay_gamma=3.0)
    case = sized(None if kind == "full" else 33, "gated", b, objective)
    model = case.draft(ComputeConfig(objective=how))  # type: ignore[arg-type]
    loss, den, ce_den, _ = accumulate_gradients(model, [b], case.target(), objective)
    return {"loss": loss, "den": den, "ce_den": ce_den, "gradients": gradients(model)}


def rank_main(rank: int, folder: str) -> None:
    """One rank: its row of the batch, four kinds of step, and every all-reduce it took part in."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    whole = two_rows(torch.float64)
    mine = {n: None if v is None else v[rank : rank + 1] for n, v in vars(whole).items()}
    original, calls, results = dist.all_reduce, [], {}

    def counted(tensor: Tensor, *args: object, **kwargs: object) -> object:
        calls.append(tuple(tensor.shape))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = counted  # type: ignore[assignment]
    for kind, how in RUNS:
        calls.clear()
        results[kind, how] = run_step(kind, how, Batch(**mine)) | {"calls": list(calls)}
    torch.save(results, f"{folder}/rank{rank}")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """What two gloo processes computed; the second one's row has no anchor (field-note 15)."""
    folder = tmp_path_factory.mktemp("ranks")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    mp.spawn(rank_main, (str(folder),), nprocs=2)
    return [torch.load(Path(folder, f"rank{rank}"), weights_only=True) for rank in range(2)]


@pytest.mark.parametrize(("kind", "how"), RUNS)
def test_one_all_reduce_unpruned_two_pruned(ranks: list[dict], kind: str, how: str) -> None:
    """Of the objective; all gradients together are one more. The same ones, in the same order,
    on both ranks, although one of them has nothing to learn from.

    Faults: a denominator reduced that is not read, both in one tensor, a gradient left out where a
    rank evaluated no slot.
    """
    first, second = (rank[kind, how]["calls"] for rank in ranks)
    assert first == second
    assert [shape for shape in first if shape == ()] == [()] * (1 if kind == "full" else 2)
    elements = sum(g.numel() for g in ranks[0][kind, how]["gradients"].values())
    assert [shape for shape in first if shape != ()] == [(elements,)]


@pytest.mark.parametrize(("kind", "how"), RUNS)
def test_two_ranks_equal_the_joint_batch(ranks: list[dict], kind: str, how: str) -> None:
    """float64; sums in another order: 1e-12.

    Faults: W missing or doubled, a rank's own denominators, an error from a rank without anchors.
    """
    joint = run_step(kind, how, two_rows(torch.float64))
    alone, empty = (rank[kind, how] for rank in ranks)
    assert empty["loss"].item() == 0
    torch.testing.assert_close(
        (alone["loss"] + empty["loss"]) / 2, joint["loss"], rtol=1e-12, atol=0
    )
    for rank in (alone, empty):
        assert rank["den"].item() == pytest.approx(joint["den"].item(), rel=1e-12)
        assert rank["ce_den"].item() == pytest.approx(joint["ce_den"].item(), rel=1e-12)
        assert rank["gradients"].keys() == joint["gradients"].keys()
        for name, want in joint["gradients"].items():
            scale = float(want.abs().max())
            torch.testing.assert_close(
                rank["gradients"][name], want, rtol=0, atol=1e-12 * scale, msg=name
            )
