"""Features from the field's `.ckpt` files to shards and back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from torch_port.data.atomic import atomic_directory
from torch_port.data.check import sample_problems
from torch_port.data.conversations import DataError
from torch_port.data.features import FeatureSample, check_sample, write_features
from torch_port.data.field_files import Features, open_features, write_file
from torch_port.data.index import INDEX_NAME, Index, entry
from torch_port.progress import stage

KINDS = ("sharded", "ckpt", "ckpt.gz")


def convert_features(source: Path, destination: Path, kind: str, console: Console) -> int:
    """Write the features of one directory into another one, which appears complete or not at all.

    Every tensor keeps its bytes and dtype (ids become int64, masks float32); the index is written.

    Arguments: `source` of either kind; `destination`, which does not exist; `kind`: "sharded",
    "ckpt" or "ckpt.gz".
    Returns the number of samples.
    Raises DataError for another kind, an existing destination, and a sample that cannot be read or
    is no sample.
    """
    if kind not in KINDS:
        raise DataError(f"--to is {kind!r}. Give one of {', '.join(KINDS)}.")
    features = open_features(source)
    if not len(features):
        raise DataError(f"{source}: expected at least one sample, found none.")
    samples = _samples(features, console)
    if kind == "sharded":
        write_features(destination, samples, metadata=features.metadata)
    else:
        _write_files(destination, samples, kind, features.metadata)
    return len(features)


def _samples(features: Features, console: Console) -> Iterator[FeatureSample]:
    with stage("converting", len(features), console) as progress:
        for i in range(len(features)):
            tensors = features[i]
            problems = sample_problems(tensors)
            if problems:
                raise DataError(f"sample {features.ids[i]}: {problems[0]}. Capture it again.")
            yield FeatureSample(id=features.ids[i], **tensors)
            progress.update(i + 1, "samples")


def _write_files(
    destination: Path, samples: Iterator[FeatureSample], kind: str, metadata: dict[str, object]
) -> None:
    names: list[str] = []
    taken: set[str] = set()
    entries = []
    with_normalizer = True
    try:
        with atomic_directory(destination) as temporary:
            for number, sample in enumerate(samples):
                check_sample(sample)
                name = f"{sample.id}.{kind}"
                if name in taken or not _is_file_name(name):
                    name = f"sample-{number:08d}.{kind}"  # the index keeps the id
                names.append(name)
                taken.add(name)
                write_file(temporary / name, sample)
                entries.append(entry(sample.id, sample.loss_mask.numpy()))
                with_normalizer = sample.target_log_normalizer is not None
            index = Index(
                format=1,
                shards=names,
                metadata=metadata,
                samples=[one.model_copy(update={"shard": at}) for at, one in enumerate(entries)],
                normalizer=with_normalizer,
            )
            (temporary / INDEX_NAME).write_text(index.model_dump_json(), encoding="utf-8")
    except FileExistsError:
        raise DataError(
            f"{destination}: exists already. Choose another path, or remove it."
        ) from None


def _is_file_name(name: str) -> bool:
    return Path(name).name == name and not name.startswith(".") and len(name.encode()) < 200
