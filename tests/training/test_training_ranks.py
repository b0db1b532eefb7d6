"""Two, three and four real gloo processes against one: steps, collectives, optimizers, faults.

All that the ranks show comes from one launch (`rank_work.all_ranks`). float64 bounds are for
sums in another order (measured: 1e-15); float32's first gradients were off by 3e-7 of a tensor's
largest, weights after 20 steps by 2e-7, where Adam may amplify rounding.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from rank_cases import (
    CASES,
    RATES,
    STEPS,
    first_gradients,
    frozen,
    micro_batches,
    train,
    uneven,
    weights,
)
from rank_launch import launch
from rank_work import BF16, F32, F64, OF_FOUR, OF_THREE, OF_TWO, SMALL_BUCKET
from torch import Tensor
from toys import KEPT

from torch_port.evaluation import evaluate
from torch_port.training.optimizer import MasterAdamW
from torch_port.training.step import training_step

Results = list[dict[Any, Any]]
BOUNDS = {F64: (1e-10, 1e-10), F32: (1e-6, 1e-4)}  # of first gradients, of weights at the end


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return launch("rank_work", "all_ranks", 4, tmp_path_factory.mktemp("ranks"))


@pytest.fixture
def two(four: Results) -> Results:
    return four[:2]


@cache
def one_process(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """The same steps with all rows in one batch, here, without a process group."""
    case, model = CASES[name], CASES[name].draft().to(dtype)
    gradients = first_gradients(model, micro_batches(case, 0, 0, 1, dtype), case)
    losses: dict[int, float] = {}
    rank_rows = micro_batches(case, 0, 1, 2, dtype)  # rank 1's of two

    def look(step: int) -> None:
        if step % 5 == 0:
            losses[step] = evaluate(model, rank_rows, frozen(dtype), case.objective)["loss"]

    optimizer = train(model, case, 0, 1, dtype, each=look)
    return {
        "gradients": gradients,
        "weights": weights(model),
        "moments": optimizer.moments(),
        "losses": losses,
    }


def assert_near(got: dict[str, Tensor], want: dict[str, Tensor], bound: float) -> None:
    """Every tensor within `bound` of its largest magnitude."""
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype, name
        limit = bound * value.abs().max().item()
        torch.testing.assert_close(
            got[name], value, rtol=0, atol=limit, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_equal(got: dict[str, Any], want: dict[str, Any]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        pairs = (
            zip(got[name], value, strict=True) if isinstance(value, tuple) else [(got[name], value)]
        )
        assert all(torch.equal(a, b) for a, b in pairs), name


def check_equality(results: Results, key: tuple[Any, ...]) -> None:
    name, _, dtype = key[-3:]
    mine, want = results[0][key], one_process(name, dtype)
    first, last = BOUNDS[dtype]
    assert_near(mine["gradients"], want["gradients"], first)
    assert_near(mine["weights"], want["weights"], last)
    for which in (0, 1):
        moments = {n: pair[which] for n, pair in mine["moments"].items()}
        assert_near(moments, {n: pair[which] for n, pair in want["moments"].items()}, last)
    for other in results[1:]:  # no rank drifts away
        assert_equal(other[key]["weights"], mine["weights"])


@pytest.mark.parametrize(("name", "mode", "dtype"), OF_TWO)
def test_two_ranks_equal_one_process(
    two: Results, name: str, mode: str, dtype: torch.dtype
) -> None:
    """Faults: W missing or doubled, other weights on rank 1 at the start, a head read before it is
    gathered, gathered weights that outlive the optimizer's step (an evaluation in between), a
    parameter left out of the reduction, the norm of one rank's shards."""
    check_equality(two, (name, mode, dtype))
    held = [rank[name, mode, dtype]["elements"] for rank in two]
    total = sum(x.numel() for x in one_process(name, dtype)["weights"].values())
    assert sum(held) == (total if mode == "fsdp" else 2 * total)


@pytest.mark.parametrize(("name", "mode", "dtype"), OF_FOUR)
def test_four_ranks_equal_one_process(
    four: Results, name: str, mode: str, dtype: torch.dtype
) -> None:
    """As above; of some tensors a rank's part is padded, or empty."""
    check_equality(four, ("four", name, mode, dtype))


@pytest.mark.parametrize("name", CASES)
def test_an_evaluation_between_steps_sees_new_weights(two: Results, name: str) -> None:
    """Fault: heads or root stay gathered as they were: an evaluation reads the step before."""
    wanted = one_process(name, F64)["losses"]
    assert len(wanted) == STEPS // 5
    assert two[1][name, "fsdp", F64]["losses"] == pytest.approx(wanted, rel=1e-10)


@pytest.mark.parametrize(("name", "mode", "dtype"), OF_THREE)
def test_ranks_with_3_30_and_0_tokens(
    four: Results, name: str, mode: str, dtype: torch.dtype
) -> None:
    """Field-note 15, with two micro-batches a step. Faults: each rank or micro-batch divided by its
    own denominator; a rank without a label leaves out its backward pass, or a gradient.

    One process takes all batches as one step. bf16's activations are added up in another order.
    """
    found = [rank["uneven", name, mode, dtype] for rank in four[:3]]
    case = CASES[name]
    batches = uneven(name, dtype)
    if name == "pruned":
        assert [rank["tokens"] for rank in found] == [3, 30, 0]
    together = [b for of_rank in batches for b in of_rank]
    gradients = first_gradients(case.draft().to(dtype), together, case)
    bound = {F64: 1e-12, F32: 1e-6, BF16: 2**-6}[dtype]
    for rank in found:
        assert_near(rank["gradients"], gradients, bound)
        assert rank["collectives"] == found[0]["collectives"]
        assert_equal(rank["weights"], found[0]["weights"])
    # Of two steps with two micro-batches each: buckets once a step, units in every micro-batch.
    kinds = [kind for kind, _, n in found[0]["collectives"] if kind != "allreduce" or n > 3]
    layers, heads = UNITS[name]
    units = 1 + len(layers) + len(heads)
    assert kinds.count("allreduce") == (2 if mode == "ddp" else 0)
    assert kinds.count("_reduce_scatter_base") == (0 if mode == "ddp" else 4 * units)
    assert kinds.count("_allgather_base") == (0 if mode == "ddp" else 4 * (units + len(layers)))
    losses = [rank["loss"] for rank in found]
    assert losses[2] == 0
    model = case.draft().to(dtype)
    optimizer = MasterAdamW(model.named_parameters(), RATES)
    alone = training_step(model, optimizer, together, frozen(dtype), case.objective, 1)
    assert sum(losses) / 3 == pytest.approx(alone.loss, rel=max(bound, 1e-6))


# --- Collectives: the table of torch_port/training/distribution.py -------------------------------

DENOMINATORS = {"pruned": [1, 1], "full": [1], "own head": [1, 1], "dflash": [3], "eagle3": [3]}
# Elements by unit: fc, norms and confidence head (EAGLE3: its layer too), layers, heads.
UNITS = {
    "pruned": (["layers.0.", "layers.1."], ["markov_head."]),
    "full": (["layers.0."], ["markov_head."]),
    "own head": (["layers.0."], ["markov_head.", "lm_head."]),
    "dflash": (["layers.0."], ["lm_head."]),
    "eagle3": ([], ["lm_head."]),
}


def padded(name: str, prefix: str | None) -> int:
    """Elements of a unit, each parameter's first axis padded to a multiple of two ranks."""
    layers, heads = UNITS[name]
    total = 0
    for key, value in one_process(name, F64)["weights"].items():
        inside = [p for p in layers + heads if key.startswith(p)]
        if inside == ([] if prefix is None else [prefix]):
            total += -(-value.shape[0] // 2) * 2 * value[0].numel()
    return total


@pytest.mark.parametrize(("name", "mode", "dtype"), [x for x in OF_TWO if x[2] == F64])
def test_a_steps_collectives(two: Results, name: str, mode: str, dtype: torch.dtype) -> None:
    """Faults: one more or less than the table says, another dtype, per-parameter reductions, an
    order that ranks do not share."""
    seen = two[0][name, mode, dtype]["collectives"]
    assert seen == two[1][name, mode, dtype]["collectives"]
    assert two[0][name, mode, dtype]["told"] == len(seen)  # what a run's summary says
    objective = [("allreduce", "torch.float64", n) for n in DENOMINATORS[name]]
    assert seen[: len(objective)] == objective
    rest = seen[len(objective) :]
    if mode == "ddp":
        elements = sum(x.numel() for x in one_process(name, F64)["weights"].values())
        assert rest == [("allreduce", "torch.float64", elements)]
        return
    layers, heads = UNITS[name]
    root, of_layers, of_heads = (
        [padded(name, prefix) for prefix in prefixes] for prefixes in ([None], layers, heads)
    )
    gathered = [n // 2 for n in [*root, *of_layers, *of_heads, *of_layers[::-1]]]
    reduced = [*of_layers[::-1], *root, *of_heads]
    assert rest == [
        *(("_allgather_base", "torch.float64", n) for n in gathered),
        *(("_reduce_scatter_base", "torch.float64", n) for n in reduced),
        ("allreduce", "torch.float64", 1),
    ]


def test_gradients_travel_in_buckets(two: Results) -> None:
    """Faults: a bucket beyond its size, a parameter in none or in two, float32 sent as less."""
    seen = two[0]["pruned", "ddp", F32]["collectives"]
    assert seen[:2] == [("allreduce", "torch.float32", 1)] * 2
    sizes = [n for _, _, n in seen[2:]]
    assert {x[:2] for x in seen} == {("allreduce", "torch.float32")}
    elements = [x.numel() for x in one_process("pruned", F32)["weights"].values()]
    assert sum(sizes) == sum(elements)
    assert max(sizes) <= SMALL_BUCKET // 4
    assert len(sizes) < len(elements) / 2


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_backend_without_gather_and_bools(two: Results, mode: str) -> None:
    """Field-notes 35 and 16: a map is given out, a draft spread, trained, saved and loaded again.

    Faults: t2d broadcast as bools; objects or checkpoints over the device's group; buffers that
    become sharded; a loaded map that is not read.
    """
    for rank in two:
        found = rank["refusing", mode]
        assert found["ids"].tolist() == list(KEPT)
        assert found["t2d"].dtype == torch.bool
        assert found["t2d"].nonzero().flatten().tolist() == list(KEPT)
        assert (found["d2t"] + torch.arange(len(KEPT))).tolist() == list(KEPT)
        assert found["plain"] == ["Tensor", "Tensor"]
        assert_equal(found["loaded"], found["saved"])
        assert_equal(found["saved"], two[0]["refusing", mode]["saved"])
        names = {name for name, _, _ in found["collectives"]}
        assert names <= {"broadcast", "allreduce", "_allgather_base", "_reduce_scatter_base"}


# --- bf16, optimizers, spikes --------------------------------------------------------------------


def test_bf16_gradients_stay_wide(two: Results) -> None:
    """Fault: FSDP2 rounds reduced gradients to bf16. Both modes round the same activations; what a
    layer's input gets from two layers is added up in bf16, in another order (measured: 4e-3)."""
    sharded, replicated = (two[0]["bf16", mode]["gradients"] for mode in ("fsdp", "ddp"))
    assert_near(sharded, replicated, 2**-7)
    assert {x.dtype for x in sharded.values()} == {torch.float32}
    assert not [n for n, x in sharded.items() if torch.equal(x, x.to(BF16).float())]


def test_sharded_norms_move_in_bf16(two: Results) -> None:
    """Field-note 14: 50 steps at 1e-4; without float32 masters norms of 1.0 stay where they are."""
    found = two[0]["bf16", "fsdp"]
    assert all(found["sharded"])
    assert {x.dtype for x in found["masters"].values()} == {torch.float32}
    norms = [n for n in found["weights"] if "norm" in n]
    assert len(norms) == 10
    for name in norms:
        assert found["weights"][name].dtype == BF16
        assert (found["masters"][name] != 1).all()
        assert (found["weights"][name] != 1).any()
        assert torch.equal(found["weights"][name], found["masters"][name].to(BF16))


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_sharded_optimizers_agree(two: Results, dtype: torch.dtype) -> None:
    """Offloaded and resumed from whole tensors: bit for bit. By the emulated NPU, whose optimizer
    moves its parameters' memory: within float32's rounding of masters, one unit of bf16 weights.

    Faults: FSDP2 gathers from the memory that was left behind; a shard's moments taken whole, or
    another rank's; masters not copied back.
    """
    found = two[0]["optimizers", dtype]
    for kind in ("offloaded", "resumed"):
        assert_equal(found[kind]["weights"], found["usual"]["weights"])
        assert_equal(found[kind]["moments"], found["usual"]["moments"])
    assert_near(found["npu"]["weights"], found["usual"]["weights"], 1e-6 if dtype == F32 else 2**-7)
    for which in (0, 1):
        got, want = (
            {n: pair[which] for n, pair in found[kind]["moments"].items()}
            for kind in ("npu", "usual")
        )
        assert_near(got, want, 2e-6)


@pytest.mark.parametrize(
    ("mode", "guard"), [("ddp", "skip"), ("fsdp", "off"), ("fsdp", "observe"), ("fsdp", "skip")]
)
def test_all_ranks_do_alike_about_a_spike(two: Results, mode: str, guard: str) -> None:
    """Field-note 19. Faults: a rank goes by its own norm (rank 1's is 0); a skipped step moves a
    weight, a moment or the count; an observed or overlooked one is not taken; the mean takes it."""
    found = two[0]["spikes", mode, guard]
    assert two[1]["spikes", mode, guard]["reports"] == found["reports"]
    assert [r[:2] for r in found["reports"]] == [
        (True, False),
        (True, False),
        (guard != "skip", guard != "off"),
        (True, False),
    ]
    norms = [r[2] for r in found["reports"]]
    before, after = found["states"][1], found["states"][2]
    if guard == "skip":
        assert_equal(after[0], before[0])
        assert_equal(after[1], before[1])
    else:
        assert not torch.equal(after[0]["fc.weight"], before[0]["fc.weight"])
    assert [s[2] for s in found["states"]] == [
        1,
        2,
        2 if guard == "skip" else 3,
        3 + (guard != "skip"),
    ]
    assert [s[3] for s in found["states"]] == ([0] * 4 if guard == "off" else [1, 2, 2, 3])
    calm = [] if guard == "off" else [norms[i] for i in (0, 1, 3)]
    assert found["mean"] == pytest.approx(float(torch.tensor(calm, dtype=F64).log().sum()))


def test_leaving_and_an_error_on_one_rank(two: Results) -> None:
    """Faults: a group that outlives its block; rank 0 waits for rank 1, which left by an error."""
    assert [rank["ranks"] for rank in two] == [(i, 2, "cpu", "fsdp") for i in (0, 1)]
    assert all(rank["left"] and rank["left again"] for rank in two)
    assert [rank["error"] for rank in two] == ["RuntimeError", "ZeroDivisionError"]
    assert all(rank["seconds"] < 30 for rank in two)
