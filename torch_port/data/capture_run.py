"""Capturing a prepared directory shard by shard: planned, checked against the disk, resumable."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file

from torch_port.data.capture import capture, check_target_layer_ids, parts_of
from torch_port.data.conversations import DataError
from torch_port.data.features import (
    FeatureDirectory,
    FeatureSample,
    shard_name,
    shard_tensors,
)
from torch_port.data.index import INDEX_NAME, entry
from torch_port.data.parallel import in_processes
from torch_port.data.resumable import claimed, read_about, write_index, write_shard
from torch_port.data.target_model import (
    DTYPES,
    TargetSizes,
    check_tokenizer,
    fingerprint,
    load_target_model,
    target_sizes,
)
from torch_port.progress import stage

RECORD_NAME = "capture.json"
_SHARD_BYTES = 1 << 30
_GB = 1e9


@dataclass(frozen=True)
class CaptureSettings:
    """What is captured, and how.

    `prepared`, `target`, `directory`: where samples and target are, and where features go.
    `dtype`: of the model and of the stored states. `batch_tokens`: of one forward pass at most.
    `device`: with several processes, `npu` and `cuda` are counted up. `shard_tokens`: tokens after
    which a shard is closed; by default those of about 1 GiB.
    """

    prepared: Path
    target: Path
    directory: Path
    target_layer_ids: tuple[int, ...]
    dtype: str = "bfloat16"
    batch_tokens: int = 8192
    device: str = "cpu"
    shard_tokens: int | None = None


@dataclass(frozen=True)
class Job:
    """One shard: samples first … first + count − 1 of the prepared directory."""

    number: int
    first: int
    count: int


@dataclass(frozen=True)
class CapturePlan:
    """What is to be done: all `jobs`, those `left`, and the bytes of a token's features."""

    jobs: tuple[Job, ...]
    left: tuple[Job, ...]
    token_bytes: int
    total_bytes: int
    left_bytes: int


def capture_features(
    settings: CaptureSettings,
    console: Console,
    *,
    processes: int = 1,
    limit_gb: float | None = None,
) -> CapturePlan:
    """Run a target over prepared samples and write their features.

    Interrupted, it goes on with the shards that are not there yet.

    Arguments: `settings`; `processes`, each with the whole model (1: this one); `limit_gb`, most
    disk space that the features may take, in 10⁹ bytes.
    Returns the plan that was followed.
    Raises UserError for unusable settings, a directory of other inputs, too little disk space, a
    target that cannot be captured, ids beyond its head.
    """
    prepared = FeatureDirectory(settings.prepared)
    sizes = target_sizes(settings.target)
    _check(settings, prepared, sizes)
    with stage("fingerprint", 1, console):
        token_bytes = _token_bytes(settings, sizes.hidden_size)
        shard_tokens = settings.shard_tokens or max(1, _SHARD_BYTES // token_bytes)
        inputs = {
            "format": 1,
            "prepared": _sha256(settings.prepared / INDEX_NAME),
            "target_fingerprint": fingerprint(settings.target),
            "target_layer_ids": list(settings.target_layer_ids),
            "dtype": settings.dtype,
            "shard_tokens": shard_tokens,
        }
    plan = _plan(settings.directory, prepared, shard_tokens, token_bytes)
    # Before the directory exists: what is refused here is tried again with other settings.
    _check_space(settings.directory, plan, limit_gb, console)
    with claimed(settings.directory, RECORD_NAME, inputs):
        _capture_all(settings, plan, prepared, console, processes)
        if not (settings.directory / INDEX_NAME).is_file():
            _finish(settings.directory, plan, inputs, prepared)
    return plan


def _check(settings: CaptureSettings, prepared: FeatureDirectory, sizes: TargetSizes) -> None:
    check_target_layer_ids(settings.target_layer_ids, sizes.layers)
    if settings.dtype not in DTYPES:
        raise DataError(f"--dtype is {settings.dtype!r}. Give one of {', '.join(DTYPES)}.")
    for option, value in (
        ("--batch-tokens", settings.batch_tokens),
        ("--shard-tokens", settings.shard_tokens),
    ):
        if value is not None and value < 1:
            raise DataError(f"{option} is {value}. Give 1 or more.")
    check_tokenizer(settings.target, prepared.metadata.get("tokenizer_fingerprint"))
    longest, limit = max(prepared.lengths), sizes.max_positions
    if limit is not None and longest > limit:
        raise DataError(
            f"{settings.prepared}: its longest sample has {longest} tokens, but the target's "
            f"max_position_embeddings is {limit}. Prepare with --max-length {limit}."
        )


def _token_bytes(settings: CaptureSettings, hidden_size: int) -> int:
    """Bytes of one token: L·H and H states, id (8), mask (4) and normaliser (4)."""
    width = hidden_size * (len(settings.target_layer_ids) + 1)
    return width * DTYPES[settings.dtype].itemsize + 16


def _plan(
    directory: Path, prepared: FeatureDirectory, shard_tokens: int, token_bytes: int
) -> CapturePlan:
    jobs: list[Job] = []
    first = held = 0
    for i, length in enumerate(prepared.lengths):
        held += length
        if held >= shard_tokens or i == len(prepared) - 1:
            jobs.append(Job(len(jobs), first, i + 1 - first))
            first, held = i + 1, 0
    left = [job for job in jobs if not (directory / shard_name(job.number)).is_file()]
    missing = sum(sum(prepared.lengths[job.first : job.first + job.count]) for job in left)
    total = sum(prepared.lengths) * token_bytes
    return CapturePlan(tuple(jobs), tuple(left), token_bytes, total, missing * token_bytes)


def _check_space(
    directory: Path, plan: CapturePlan, limit_gb: float | None, console: Console
) -> None:
    there = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free = shutil.disk_usage(there).free
    done = len(plan.jobs) - len(plan.left)
    already = f", {done} of them there already" if done else ""
    console.print(
        f"  disk: {_size(plan.total_bytes)} in {len(plan.jobs)} shards ({plan.token_bytes:,} bytes "
        f"a token){already}; {_size(plan.left_bytes)} to write, {_size(free)} free",
        highlight=False,
        soft_wrap=True,
    )
    if limit_gb is not None and plan.total_bytes > limit_gb * _GB:
        raise DataError(
            f"the features take {_size(plan.total_bytes)}, but --limit-gb is {limit_gb:g}. "
            "Raise it, capture fewer layers, or prepare less."
        )
    if plan.left_bytes > free:
        raise DataError(
            f"{directory}: {_size(plan.left_bytes)} are to be written, but {_size(free)} are free. "
            "Free some, capture fewer layers, or prepare less."
        )


def _size(count: int) -> str:
    """Bytes in GB, or in MB where that would be 0.00."""
    return f"{count / _GB:,.2f} GB" if count >= 1e7 or not count else f"{count / 1e6:,.3f} MB"


def _capture_all(
    settings: CaptureSettings,
    plan: CapturePlan,
    prepared: FeatureDirectory,
    console: Console,
    processes: int,
) -> None:
    if not plan.left:
        return
    processes = min(processes, len(plan.left))
    done: Iterable[int]
    if processes > 1:
        turn = multiprocessing.get_context("spawn").Value("i", 0)
        start = (settings, processes, turn)
        done = in_processes(_capture, plan.left, processes, _start, start, "--processes")
    else:
        done = map(_Capturer(settings, settings.device), plan.left)
    total = sum(prepared.lengths)
    captured = total - plan.left_bytes // plan.token_bytes
    with stage("capture", total, console) as progress:
        for tokens in done:
            captured += tokens
            progress.update(captured, "tokens")


class _Capturer:
    """Captures shards with a model of its own."""

    def __init__(self, settings: CaptureSettings, device: str) -> None:
        self.settings = settings
        self.prepared = FeatureDirectory(settings.prepared)
        self.model = load_target_model(settings.target, settings.dtype, device)
        self.rows = len(parts_of(self.model).head_VH)

    def __call__(self, job: Job) -> int:
        """Write one shard. Returns its tokens."""
        rows = range(job.first, job.first + job.count)
        tokens = [self.prepared.tokens(i) for i in rows]
        for i, one in zip(rows, tokens, strict=True):
            if int(one["input_ids"].min()) < 0 or int(one["input_ids"].max()) >= self.rows:
                raise DataError(
                    f"sample {self.prepared.ids[i]}: its ids reach {int(one['input_ids'].max())}, "
                    f"but the target's head has {self.rows} rows. Prepare with its tokenizer."
                )
        ids = [one["input_ids"].long() for one in tokens]
        states = capture(
            self.model,
            ids,
            self.settings.target_layer_ids,
            batch_tokens=self.settings.batch_tokens,
        )
        samples = []
        for i, ids_S, one, captured in zip(rows, ids, tokens, states, strict=True):
            on_host = {name: tensor.cpu() for name, tensor in vars(captured).items()}
            mask = one["loss_mask"].float()
            samples.append(FeatureSample(self.prepared.ids[i], ids_S, mask, **on_host))
        self._write(job, samples)
        return sum(len(sample.input_ids) for sample in samples)

    def _write(self, job: Job, samples: Sequence[FeatureSample]) -> None:
        start, entries = 0, []
        for sample in samples:
            one = entry(sample.id, sample.loss_mask.numpy(), start=start)
            entries.append(one.model_dump(exclude={"shard"}))
            start += one.length
        tensors = shard_tensors(samples)
        write_shard(
            self.settings.directory / shard_name(job.number),
            lambda name, metadata: save_file(tensors, name, metadata),
            {"samples": entries},
        )


def _finish(
    directory: Path, plan: CapturePlan, inputs: dict[str, Any], prepared: FeatureDirectory
) -> None:
    names = [shard_name(job.number) for job in plan.jobs]
    entries = []
    for name in names:
        about = read_about(directory / name)
        if about is None:
            raise DataError(f"{directory / name}: vanished meanwhile. Run the command again.")
        entries.append(about["samples"])
    told = ("tokenizer_fingerprint", "chat_template", "template_fingerprint", "max_length")
    kept = {name: prepared.metadata[name] for name in told if name in prepared.metadata}
    write_index(directory, names, entries, {**inputs, **kept})


def _sha256(path: Path) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


# Of a worker process, made by `_start`.
_capturer: _Capturer | None = None


def _start(settings: CaptureSettings, processes: int, turn: Any) -> None:
    global _capturer
    with turn.get_lock():
        place, turn.value = turn.value, turn.value + 1
    # The processes share the cores.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // processes))
    device = settings.device
    if device in ("npu", "cuda"):
        device = f"{device}:{place}"
    _capturer = _Capturer(settings, device)


def _capture(job: Job) -> int:
    assert _capturer is not None
    return _capturer(job)
