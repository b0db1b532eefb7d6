"""The sections of a run file that say what is trained on, where and how (`run` puts them together).

Paths are taken as they are written, relative to the working directory. Imports no torch.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from torch_port.config import Settings

PathText = str  # kept as written, so that the resolved run shows what the file says


class DraftSection(Settings):
    """`config`: the draft's config.json, or a directory that holds it."""

    config: PathText = Field(min_length=1)


class TargetSection(Settings):
    """`path`: the target's directory (config, embedding, head, tokenizer)."""

    path: PathText = Field(min_length=1)


class DataSection(Settings):
    """The captured features, and how batches are made of them.

    `path`: the feature directory. `producer`: "files" (made before this run), "inline" (this
    process captures them) or "separate" (another process makes them while this one trains).
    `validation_path`: features to validate on; or `validation_share` of `path`'s samples, drawn by
    `seed`, is kept from training for it.
    `max_length`: S, the longest sample in tokens. Longer ones are refused at the start; memory is
    planned for it. Absent, the features' longest.
    `batch_size`: samples of a micro-batch on one rank; `accumulation`: micro-batches of an
    optimizer step; `num_anchors`: N, the blocks drawn of a sample (EAGLE3 draws none).
    `seed`: of the data's order and of the anchors.
    `workers`: processes of each rank that read ahead, `prefetch` batches each; 0 reads in the
    training process.
    """

    path: PathText = Field(min_length=1)
    producer: Literal["files", "inline", "separate"] = "files"
    validation_path: PathText | None = Field(default=None, min_length=1)
    validation_share: float = Field(default=0.0, ge=0, le=0.5)
    max_length: int | None = Field(default=None, ge=1)
    batch_size: int = Field(default=1, ge=1)
    accumulation: int = Field(default=1, ge=1)
    num_anchors: int = Field(default=512, ge=1)
    seed: int = Field(default=0, ge=0)
    workers: int = Field(default=2, ge=0)
    prefetch: int = Field(default=2, ge=1)

    @model_validator(mode="after")
    def _one_validation(self) -> DataSection:
        if self.validation_path is not None and self.validation_share > 0:
            raise ValueError(
                f"validation_path ({self.validation_path}) and validation_share "
                f"({self.validation_share}) both say what to validate on; keep one of them"
            )
        return self


class VocabularySection(Settings):
    """`map`: a vocabulary map's file; null means none. `pinned`: target ids to keep regardless."""

    map: PathText | None = Field(default=None, min_length=1)
    pinned: tuple[Annotated[int, Field(ge=0)], ...] = ()


class TrainingSection(Settings):
    """What a run starts from, what it writes, and when it says something.

    `out`: the run's directory (checkpoints, logs); a run that is started again there continues.
    `init_from`: a draft checkpoint of any format to start from; its vocabulary map is this run's.
    `seed`: of the weights of a draft that starts from nothing, and of each rank's generators.
    `dtype`: of weights and products; masters, moments and gradients are float32 or better.
    `device`: "auto" is npu where torch_npu can be imported, else cuda where there is one, else cpu.
    `trainable_head`: the draft gets an output head of its own, started from the target's rows.
    `log_every`, `validate_every`: optimizer steps between log records and between validations
    (0: a validation with every checkpoint).
    `spike_guard`: of gradient norms above `optimizer.spike_multiple` times their running mean:
    "skip" the step, "observe" (say so and take it) or "off".
    `stop_after_bad_steps`: so many steps in a row with a loss or gradient that is not finite end
    the run, with the last batch saved for a look.
    `tensorboard`: write TensorBoard's event files beside the JSON lines.
    """

    out: PathText = Field(default="runs/train", min_length=1)
    init_from: PathText | None = Field(default=None, min_length=1)
    seed: int = Field(default=0, ge=0)
    dtype: Literal["bfloat16", "float32", "float64"] = "bfloat16"
    device: Literal["auto", "cpu", "cuda", "npu"] = "auto"
    trainable_head: bool = False
    log_every: int = Field(default=10, ge=1)
    validate_every: int = Field(default=0, ge=0)
    spike_guard: Literal["off", "observe", "skip"] = "skip"
    stop_after_bad_steps: int = Field(default=3, ge=1)
    tensorboard: bool = True


class DistributionSection(Settings):
    """How the ranks that torchrun started share the work.

    `mode`: "auto" is one process without torchrun and ddp with it; "ddp" keeps the whole draft and
    optimizer on every rank, "fsdp" (FSDP2) shards them layer by layer; the target's frozen
    embedding and head are whole on every rank in both. `offload_optimizer`: masters and moments
    stay in host memory.
    `timeout_seconds`: how long a rank waits for the others in a collective.
    """

    mode: Literal["auto", "single", "ddp", "fsdp"] = "auto"
    offload_optimizer: bool = False
    timeout_seconds: int = Field(default=1800, ge=1)


class CheckpointsSection(Settings):
    """When checkpoints are written and which stay.

    `every`: optimizer steps between them. `keep_last`: so many of the newest stay; `keep_best`:
    and so many with the highest τ on validation data. `asynchronous`: training goes on while one
    is written.
    """

    every: int = Field(default=500, ge=1)
    keep_last: int = Field(default=2, ge=1)
    keep_best: int = Field(default=1, ge=0)
    asynchronous: bool = True
