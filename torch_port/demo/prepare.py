"""Everything of the demo that comes before the draft: corpus, tokenizer, target, features."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from torch_port.cache import default_cache_root
from torch_port.data.capture import capture
from torch_port.data.conversations import Sample, SampleStats, encode_file, read_conversations
from torch_port.data.features import FeatureDirectory, FeatureSample, write_features
from torch_port.demo.cache import cached_stage, recipe_directory
from torch_port.demo.corpus import CorpusStats, build_corpus
from torch_port.demo.recipe import Recipe
from torch_port.demo.target import TargetResult, load_target, save_target, train_target
from torch_port.demo.tokenizer import SpecialIds, special_ids, train_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

STAGES = ("corpus", "tokenizer", "target", "features")

# (stage, steps done, steps in all, numbers to show such as loss and tokens_per_second)
PrepareReport = Callable[[str, int, int, Mapping[str, float]], None]


@dataclass(frozen=True)
class Prepared:
    """What the draft's training starts from.

    `embedding` and `head` are E and U, float32 `[V, H]`, frozen. `target_config` is the target's
    parsed `config.json`. `vocab_size` is V, the head's rows; `tokenizer_vocab_size` is V_tok.
    `seconds` and `cached` tell for each of `STAGES` how long it took and whether it was cached;
    `load_target(directory / "target")` gives the model itself.
    """

    recipe: Recipe
    directory: Path
    tokenizer: Tokenizer
    special: SpecialIds
    vocab_size: int
    tokenizer_vocab_size: int
    embedding: Tensor
    head: Tensor
    target_config: dict[str, Any]
    train: FeatureDirectory
    heldout: FeatureDirectory
    corpus: CorpusStats
    samples_train: SampleStats
    samples_heldout: SampleStats
    target: TargetResult
    seconds: dict[str, float]
    cached: dict[str, bool]

    @property
    def from_cache(self) -> bool:
        """True when no stage had to be built."""
        return all(self.cached.values())


def prepare(
    recipe: Recipe, cache_root: Path | None = None, report: PrepareReport | None = None
) -> Prepared:
    """Build, or take from the cache, everything that the draft's training needs.

    The stages are corpus, tokenizer, target and features. Each appears in the cache complete or
    not at all, so an interrupted run continues with the stage it was in.

    Args:
        recipe: the demo's sizes.
        cache_root: root of the cache; `default_cache_root()` when None.
        report: called with (stage, done, total, numbers) at least at a stage's start and end.

    Returns:
        The prepared demo.

    Raises:
        UserError: the cache cannot be written, or the corpus is empty on one side.

    Source: issue 2, item 7.
    """
    root = default_cache_root() if cache_root is None else cache_root
    build = _Build(recipe, recipe_directory(recipe, root), report or (lambda *_: None))
    for stage in STAGES:
        build.run(stage)
    return build.result()


class _Build:
    """One pass over the stages; what several of them need is loaded when the first asks."""

    def __init__(self, recipe: Recipe, directory: Path, report: PrepareReport) -> None:
        self.recipe = recipe
        self.directory = directory
        self.report = report
        self.seconds: dict[str, float] = {}
        self.cached: dict[str, bool] = {}

    def run(self, stage: str) -> None:
        """Take one stage from the cache or build it, with its time."""
        self.report(stage, 0, 1, {})
        began = time.perf_counter()
        later = [self.directory / name for name in STAGES[STAGES.index(stage) + 1 :]]
        self.cached[stage] = cached_stage(
            self.directory / stage, getattr(self, f"_{stage}"), dependents=later
        )
        self.seconds[stage] = time.perf_counter() - began
        self.report(stage, 1, 1, {"seconds": self.seconds[stage]})

    def _corpus(self, directory: Path) -> None:
        stats = build_corpus(directory / "train.jsonl", directory / "heldout.jsonl", self.recipe)
        (directory / "stats.json").write_text(json.dumps(asdict(stats)), encoding="utf-8")

    def _tokenizer(self, directory: Path) -> None:
        texts = _texts(self.directory / "corpus" / "train.jsonl")
        train_tokenizer(texts, self.recipe.vocab_size).save(str(directory / "tokenizer.json"))

    def _target(self, directory: Path) -> None:
        def report(step: int, total: int, loss: float, rate: float) -> None:
            self.report("target", step, total, {"loss": loss, "tokens_per_second": rate})

        (train, _), (heldout, _) = self.encoded["train"], self.encoded["heldout"]
        model, result = train_target(
            train, heldout, special_ids(self.tokenizer), self.recipe, report
        )
        save_target(model, result, directory)

    def _features(self, directory: Path) -> None:
        model, _ = load_target(self.directory / "target")
        limits = {"train": self.recipe.capture_train, "heldout": self.recipe.capture_heldout}
        chosen = {
            side: _choose(self.encoded[side][0], limit, self.recipe.seed)
            for side, limit in limits.items()
        }
        total = sum(map(len, chosen.values()))
        done = 0
        for side, samples in chosen.items():

            def progress(features: Iterator[FeatureSample]) -> Iterator[FeatureSample]:
                nonlocal done
                for sample in features:
                    yield sample
                    done += 1
                    self.report("features", done, total, {})

            write_features(
                directory / side,
                progress(_captured(model, samples, self.recipe)),
                metadata={
                    "target_layer_ids": list(self.recipe.target_layer_ids),
                    "samples": asdict(self.encoded[side][1]),
                },
            )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The trained tokenizer, read back from its file."""
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self.directory / "tokenizer" / "tokenizer.json"))

    @cached_property
    def encoded(self) -> dict[str, tuple[list[Sample], SampleStats]]:
        """Trainable samples of both sides, with counts."""
        return {
            side: encode_file(
                self.tokenizer, self.directory / "corpus" / f"{side}.jsonl", self.recipe.max_length
            )
            for side in ("train", "heldout")
        }

    def result(self) -> Prepared:
        """Read the finished stages."""
        target = self.directory / "target"
        with safe_open(target / "model.safetensors", framework="pt") as file:
            embedding = file.get_tensor("model.embed_tokens.weight")
            head = file.get_tensor("lm_head.weight")
        train = FeatureDirectory(self.directory / "features" / "train")
        heldout = FeatureDirectory(self.directory / "features" / "heldout")
        return Prepared(
            recipe=self.recipe,
            directory=self.directory,
            tokenizer=self.tokenizer,
            special=special_ids(self.tokenizer),
            vocab_size=len(head),
            tokenizer_vocab_size=self.tokenizer.get_vocab_size(),
            embedding=embedding,
            head=head,
            target_config=_read_json(target / "config.json"),
            train=train,
            heldout=heldout,
            corpus=CorpusStats(**_read_json(self.directory / "corpus" / "stats.json")),
            samples_train=SampleStats(**train.metadata["samples"]),
            samples_heldout=SampleStats(**heldout.metadata["samples"]),
            target=TargetResult(**_read_json(target / "training.json")),
            seconds=self.seconds,
            cached=self.cached,
        )


def _texts(path: Path) -> Iterator[str]:
    """What the tokenizer learns from: the turns' headers and contents."""
    for conversation in read_conversations(path):
        for turn in conversation.conversations:
            yield f"{turn.role}\n"
            yield turn.content


def _choose(samples: Sequence[Sample], limit: int, seed: int) -> list[Sample]:
    """Up to `limit` samples, drawn without replacement and in random order."""
    rows = np.random.default_rng(seed).permutation(len(samples))[:limit]
    return [samples[row] for row in rows]


def _captured(model: Any, samples: Sequence[Sample], recipe: Recipe) -> Iterator[FeatureSample]:
    """Run the target over samples and join what it gives with their ids and masks."""
    ids = [torch.from_numpy(sample.input_ids) for sample in samples]
    states = capture(model, ids, recipe.target_layer_ids, batch_size=recipe.capture_batch)
    for sample, ids_S, captured in zip(samples, ids, states, strict=True):
        yield FeatureSample(
            id=sample.id,
            input_ids=ids_S,
            loss_mask=torch.from_numpy(sample.loss_mask),
            **vars(captured),
        )


def _read_json(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return value
