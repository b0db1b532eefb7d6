"""Two optimizer steps of a run on a virtual device: the real model, objective, optimizer and step.

The batch is a worst case of the run file: every sample has `data.max_length` tokens, all
supervised, with anchors drawn as in training. Two steps, so that the second one meets the
optimizer's state.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from torch_port.config import ANCHOR_FIRST
from torch_port.data.batch import Batch, collate
from torch_port.errors import UserError
from torch_port.models.block_draft import FrozenTarget
from torch_port.models.registry import find_algorithm
from torch_port.objective.terms import slot_terms
from torch_port.rehearsal.memory import Memory, MemoryReport
from torch_port.rehearsal.trace import Finding, Observer, Trace
from torch_port.rehearsal.virtual import virtual_device
from torch_port.run import RunConfig
from torch_port.training.build import read_draft
from torch_port.training.distribution import Ranks, average_gradients, distribute
from torch_port.training.optimizer import MasterAdamW
from torch_port.training.step import training_step
from torch_port.vocabulary.mapping import DraftVocabMappingMixin

MARGIN = 0.08  # of a card's memory that is left to kernels' workspace and to fragmentation
STEPS = 2
TINY = 64  # tokens of a sample that only brings the optimizer's state about
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class Rehearsal:
    """What a rehearsal found.

    `usable` is the card's memory less the margin; `findings` are those of all observers.
    """

    device: str
    world_size: int
    hbm_bytes: int
    usable: int
    seconds: float
    operators: int
    memory: MemoryReport
    findings: list[Finding] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        """Whether the peak leaves the margin."""
        return self.memory.peak <= self.usable


def rehearse(
    run: RunConfig,
    *,
    config: Any = None,
    device: str = "npu",
    world_size: int = 1,
    hbm_bytes: int = 64 * 2**30,
    observers: Sequence[Observer] = (),
    objective_chunk: int | None = None,
    coarse: bool = False,
) -> Rehearsal:
    """Rehearse two optimizer steps; `observers` look at every operator of both.

    Arguments: the run; the draft's config, read from `draft.config` where it is not given;
    "npu" or "cpu" (the portable branch); how many ranks; a card's memory; blocks of a chunk of the
    plain objective, in place of its own number. `coarse`, for memory alone and several times as
    fast: the first step is a tiny one, and attention and objective work in fewer, larger pieces.
    The peak comes out a little higher: by 0.1 % at a hidden size of 5120.
    Raises UserError for a run that cannot be rehearsed.
    """
    started = time.perf_counter()
    config = read_draft(run) if config is None else config
    batches = _host_batches(run, config, _length(run))
    first = _host_batches(run, config, min(TINY, _length(run))) if coarse else batches
    counter = _Counter()
    with virtual_device(device) as place:
        memory = Memory(place)
        trace = Trace([*observers, memory, counter])
        with (
            _ranks(run, world_size, place) as ranks,
            memory.watching_storages(),
            trace,
            _any_map(),
            _chunked(objective_chunk),
            _coarsely(coarse, run.data.num_anchors),
        ):
            with trace.during("set-up"):
                parts = _build(run, config, place, ranks)
                parts.label(memory)
                memory.label_rest("parameters")  # FSDP2's places for whole ones
            for step in range(1, STEPS + 1):
                _step(step, run, parts, first if step == 1 else batches, trace, memory)
        report = memory.report()
        del parts
    return Rehearsal(
        device=device,
        world_size=world_size,
        hbm_bytes=hbm_bytes,
        usable=int(hbm_bytes * (1 - MARGIN)),
        seconds=time.perf_counter() - started,
        operators=counter.operators,
        memory=report,
        findings=[finding for observer in observers for finding in observer.finding()],
    )


class _Counter:
    """Counts operators."""

    def __init__(self) -> None:
        self.operators = 0

    def before(self, call: Any) -> None:
        self.operators += 1

    def after(self, call: Any) -> None:
        pass

    def finding(self) -> list[Finding]:
        return []


@dataclass
class _Parts:
    """What a step needs, on the virtual device."""

    draft: Any
    target: FrozenTarget
    optimizer: MasterAdamW
    place: torch.device
    dtype: torch.dtype

    def label(self, memory: Memory) -> None:
        """Say what the parts' tensors are for, and what came about after the set-up."""
        memory.label((p.grad for p in self.draft.parameters()), "gradients")
        memory.label((*self.draft.parameters(), *self.draft.buffers()), "parameters")
        frozen = (self.target.embed_tokens, self.target.lm_head)
        derived = getattr(self.draft, "_derived", None)
        tables = () if derived is None else _tensors(vars(derived))
        memory.label((*frozen, *tables), "frozen target tensors")
        memory.label(self.optimizer.masters, "optimizer state")


def _tensors(values: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return [x for x in leaves if isinstance(x, torch.Tensor)]


def _build(run: RunConfig, config: Any, place: torch.device, ranks: Ranks) -> _Parts:
    """Make draft, frozen target and optimizer, as training does, without a value in them."""
    dtype = _DTYPES[run.training.dtype]
    family = find_algorithm(run.algorithm)
    own_head = run.training.trainable_head and run.algorithm != "eagle3"
    with place, _default_dtype(dtype):
        draft: Any = family.draft_class()(
            config, run.compute, **({"trainable_head": True} if own_head else {})
        )
        target = FrozenTarget(
            *(torch.empty(config.vocab_size, config.hidden_size) for _ in range(2))
        )
        if draft.prunes_vocabulary:
            pruned = config.vocab_size - config.draft_vocab_size
            draft._vocabulary().pruned_P = torch.zeros(pruned, dtype=torch.int64)
    draft = distribute(draft, ranks)
    offload = run.distribution.offload_optimizer
    lean = run.compute.adamw == "torch"
    optimizer = MasterAdamW(draft.named_parameters(), run.optimizer, offload=offload, lean=lean)
    return _Parts(draft, target, optimizer, place, dtype)


@contextmanager
def _ranks(run: RunConfig, world_size: int, place: torch.device) -> Iterator[Ranks]:
    """Be rank 0 of a process group whose collectives send nothing."""
    mode = run.distribution.mode
    if mode == "auto":
        mode = "single" if world_size == 1 else "ddp"
    if mode == "single":
        if world_size > 1:
            raise UserError(
                f"distribution.mode is single, but {world_size} ranks are to be rehearsed; set it "
                "to ddp or fsdp, or rehearse with --world-size 1"
            )
        yield Ranks(0, 1, 0, place, mode, None)
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    def real_mesh(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():  # it looks its ranks up by value
            return init_device_mesh(*args, **kwargs)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        with mock.patch("torch.distributed.device_mesh.init_device_mesh", real_mesh):
            yield Ranks(0, world_size, 0, place, mode, None)
    finally:
        dist.destroy_process_group()


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make modules in `dtype`: fake parameters cannot be exchanged afterwards."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _any_map() -> Iterator[None]:
    """Let every draft have a vocabulary map: which ids it keeps changes no shape."""

    def kept(draft: Any) -> torch.Tensor:
        return torch.zeros(draft.draft_vocab_size, dtype=torch.int64, device="cpu")

    with mock.patch.object(DraftVocabMappingMixin, "_read_kept_ids", kept):
        yield


def _length(run: RunConfig) -> int:
    if run.data.max_length is None:
        raise UserError(
            "data.max_length is not set, so the longest sample is not known; set it to the most "
            "tokens that a sample has"
        )
    return run.data.max_length


def _host_batches(run: RunConfig, config: Any, length: int) -> list[Batch]:
    """Collate a step's micro-batches on the host, as the loader does, with states of one column."""
    sample = {
        "input_ids": torch.zeros(length, dtype=torch.int64),
        "loss_mask": torch.ones(length),
        "hidden_states": torch.zeros(length, 1),
        "target_last_hidden_states": torch.zeros(length, 1),
    }
    rows = run.data.batch_size
    return [
        collate(
            [sample] * rows,
            list(range(index * rows, (index + 1) * rows)),
            num_anchors=run.data.num_anchors,
            seed=run.data.seed,
            epoch=0,
            vocab_size=config.vocab_size,
            block_size=getattr(config, "block_size", 1),
            block_layout=getattr(config, "block_layout", ANCHOR_FIRST),
        )
        for index in range(run.data.accumulation)
    ]


def _on_device(batch: Batch, config: Any, parts: _Parts) -> Batch:
    """Give the batch its states' true width, in host memory, and move it as training does."""
    rows, length = batch.input_ids.shape
    H = config.hidden_size
    wide = len(config.target_layer_ids) * H
    batch = replace(
        batch,
        hidden_states=torch.empty(rows, length, wide, dtype=parts.dtype),
        target_last_hidden_states=torch.empty(rows, length, H, dtype=parts.dtype),
    )
    return batch.to(parts.place, parts.dtype)


def _step(
    step: int,
    run: RunConfig,
    parts: _Parts,
    batches: Sequence[Batch],
    trace: Trace,
    memory: Memory,
) -> None:
    """Take one optimizer step, and label what each of its parts leaves behind."""
    with trace.during(f"step {step}: batch"):
        moved = [_on_device(batch, parts.draft.config, parts) for batch in batches]
        memory.label(_tensors([vars(b) | vars(b.layout) for b in moved]), "batch")
    with _seams(step, parts, trace, memory), trace.during(f"step {step}: forward"):
        training_step(parts.draft, parts.optimizer, moved, parts.target, run.objective, step)
    del moved
    parts.label(memory)
    memory.label_rest("optimizer state")
    memory.between_steps()


@contextmanager
def _seams(step: int, parts: _Parts, trace: Trace, memory: Memory) -> Iterator[None]:
    """Tell forward, backward and optimizer apart inside `training_step`."""
    backward = torch.autograd.backward

    def watched_backward(*args: Any, **kwargs: Any) -> None:
        parts.label(memory)
        memory.label_rest("saved activations")
        with trace.during(f"step {step}: backward"):
            backward(*args, **kwargs)
        memory.label((p.grad for p in parts.draft.parameters()), "gradients")

    def watched_average(draft: Any) -> None:
        trace.phase = f"step {step}: optimizer"  # till the step's end
        average_gradients(draft)
        memory.label((p.grad for p in parts.draft.parameters()), "gradients")

    with (
        mock.patch.object(torch.autograd, "backward", watched_backward),
        mock.patch("torch_port.training.step.average_gradients", watched_average),
    ):
        yield


@contextmanager
def _coarsely(coarse: bool, anchors: int) -> Iterator[None]:
    """Let attention take more blocks a call, and the objective compare more slots at a time."""
    if not coarse:
        yield
        return
    with (
        mock.patch("torch_port.models.blockwise.BLOCKS_PER_CALL", max(8, anchors // 16)),
        mock.patch("torch_port.objective.fused.PIECES", 4),
    ):
        yield


@contextmanager
def _chunked(blocks: int | None) -> Iterator[None]:
    """Let the plain objective take `blocks` at a time."""
    if blocks is None:
        yield
        return
    form = partial(slot_terms, chunk=blocks)
    with mock.patch("torch_port.objective.evaluate.slot_terms", form):
        yield
