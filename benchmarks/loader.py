"""What reading costs a training step: `python -m benchmarks.loader`.

The demo's step (its draft, anchors, batch of 4 samples of up to 256 tokens), fed from a feature
directory by the loader, against the same batches held in memory. The two take turns in blocks of
steps, in one run; features are drawn at random, in the demo's sizes.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from torch_port.config import FULL as FULL_ATTENTION
from torch_port.config import DraftConfig, ObjectiveConfig
from torch_port.data.batch import Batch
from torch_port.data.features import FeatureDirectory, FeatureSample, write_features
from torch_port.data.loader import BatchSettings, FeatureLoader
from torch_port.data.order import Split
from torch_port.demo.recipe import FULL
from torch_port.models.dspark import DSparkDraft, FrozenTarget
from torch_port.training.optimizer import MasterAdamW, OptimizerConfig
from torch_port.training.step import training_step
from torch_port.vocabulary.mapping import buffers_from_kept

V, K, H = FULL.vocab_size, FULL.draft_vocab_size, FULL.hidden_size
LAYERS = len(FULL.target_layer_ids)
SAMPLES = 256


def _features(place: Path) -> FeatureDirectory:
    draw = torch.Generator().manual_seed(0)

    def samples() -> Iterator[FeatureSample]:
        for i in range(SAMPLES):
            length = int(torch.randint(64, FULL.max_length + 1, (), generator=draw))
            mask = torch.ones(length)
            mask[: length // 4] = 0
            yield FeatureSample(
                f"s{i}",
                torch.randint(0, V, (length,), generator=draw),
                mask,
                torch.randn(length, LAYERS * H, generator=draw),
                torch.randn(length, H, generator=draw),
                torch.full((length,), 9.0),
            )

    write_features(place, samples())
    return FeatureDirectory(place)


def _draft() -> DSparkDraft:
    config = DraftConfig(
        vocab_size=V,
        draft_vocab_size=K,
        hidden_size=H,
        intermediate_size=FULL.intermediate_size,
        num_hidden_layers=FULL.draft_layers,
        num_attention_heads=FULL.num_attention_heads,
        num_key_value_heads=FULL.num_key_value_heads,
        head_dim=FULL.head_dim,
        rms_norm_eps=1e-6,
        rope_theta=FULL.rope_theta,
        layer_types=(FULL_ATTENTION,) * FULL.draft_layers,
        sliding_window=None,
        block_size=FULL.block_size,
        num_target_layers=FULL.num_hidden_layers,
        target_layer_ids=FULL.target_layer_ids,
        mask_token_id=V - 1,
        markov_rank=FULL.markov_rank,
        markov_head_type="vanilla",
        enable_confidence_head=True,
        confidence_head_with_markov=True,
    )
    draft = DSparkDraft(config)
    draft.initialise(torch.Generator().manual_seed(0))
    draft.install_vocab_mapping(*buffers_from_kept(torch.arange(K) * (V // K), V))
    return draft


def main(
    steps: Annotated[int, typer.Option(help="Steps of a block.")] = 20,
    blocks: Annotated[int, typer.Option(help="Blocks of each kind, in turns.")] = 7,
    workers: Annotated[int, typer.Option(help="Processes that read ahead; 0 reads here.")] = 1,
) -> None:
    """Measure the seconds of a step fed from files against one fed from memory."""
    torch.set_num_threads(1)  # the other core is the reading process's
    target = FrozenTarget(torch.randn(V, H) * 0.02, torch.randn(V, H) * 0.02)
    draft, objective = _draft(), ObjectiveConfig(loss_decay_gamma=FULL.block_size / 2)
    rates = OptimizerConfig(peak_rate=1e-4, warmup_steps=1, total_steps=100_000)
    optimizer = MasterAdamW(draft.named_parameters(), rates)
    with tempfile.TemporaryDirectory() as place:
        loader = FeatureLoader(
            _features(Path(place) / "features"),
            Split(FULL.draft_batch),
            BatchSettings(FULL.anchors, V, FULL.block_size),
            seed=0,
            workers=workers,
        )
        from_files = iter(loader)
        # The same batches as the loader's epoch, so that both kinds do like work.
        held = [next(from_files) for _ in range(loader.steps_per_epoch)]
        sources = {"memory": cycle(held), "files": from_files}
        spent: dict[str, list[float]] = {"memory": [], "files": []}
        waited = 0.0
        done = 0

        def block(batches: Iterator[Batch]) -> tuple[float, float]:
            nonlocal done
            waiting, began = 0.0, time.perf_counter()
            for _ in range(steps):
                asked = time.perf_counter()
                batch = next(batches)
                waiting += time.perf_counter() - asked
                done += 1
                training_step(draft, optimizer, [batch], target, objective, done)
            return (time.perf_counter() - began) / steps, waiting / steps

        block(sources["memory"])  # warm
        for _ in range(blocks):
            for name, batches in sources.items():
                seconds, waiting = block(batches)
                spent[name].append(seconds)
                waited += waiting if name == "files" else 0
        from_files.close()  # type: ignore[attr-defined]
    middle = {name: sorted(times)[blocks // 2] for name, times in spent.items()}
    table = Table("batches from", "ms a step (median block)", "of memory's")
    for name, seconds in middle.items():
        table.add_row(name, f"{1e3 * seconds:.2f}", f"{seconds / middle['memory']:.3f}")
    console = Console()
    console.print(table)
    share = waited / blocks / middle["files"]
    console.print(
        f"waiting for the loader: {1e3 * waited / blocks:.2f} ms a step, {share:.2%} of it"
    )


if __name__ == "__main__":
    typer.run(main)
