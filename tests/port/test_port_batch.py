"""Batches, memory, progress and evaluation."""

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console
from toys import G, H, V, batch, draft, target

from torch_port.config import ObjectiveConfig
from torch_port.data.batch import Batch, batch_order, collate
from torch_port.errors import UserError
from torch_port.evaluation import evaluate
from torch_port.memory import PeakMemory
from torch_port.progress import stage


def sample(length: int, seed: int, **changes: torch.Tensor) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(0, V, (length,), generator=g),
        "loss_mask": torch.ones(length),
        "hidden_states": torch.randn(length, 2 * H, generator=g),
        "target_last_hidden_states": torch.randn(length, H, generator=g),
        "target_log_normalizer": torch.randn(length, generator=g),
    } | changes


def collated(samples: list[dict[str, torch.Tensor]]) -> Batch:
    ids = list(range(len(samples)))
    return collate(samples, ids, num_anchors=3, seed=0, epoch=0, vocab_size=V, block_size=G)


def test_padding_is_on_the_right_with_mask_zero() -> None:
    """Fault: left padding, which moves every rotary position."""
    b = collated([sample(3, 0), sample(5, 1)])
    assert b.loss_mask.tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert torch.equal(b.input_ids[0, :3], sample(3, 0)["input_ids"])
    assert (b.hidden_states[0, 3:] == 0).all()
    assert b.target_log_normalizer.shape == (2, 5)
    assert (b.anchor_positions[0] <= 1).all()


def test_normaliser_only_when_every_sample_has_it() -> None:
    without = sample(4, 1)
    del without["target_log_normalizer"]
    assert collated([sample(3, 0), without]).target_log_normalizer is None


@pytest.mark.parametrize("bad", [-1, V])
def test_ids_outside_the_target_name_the_sample(bad: int) -> None:
    with pytest.raises(UserError, match=f"sample 1: input_ids span .*vocab_size {V}"):
        collated([sample(3, 0), sample(3, 1, input_ids=torch.tensor([1, bad, 2]))])


def test_order_covers_every_epoch_once() -> None:
    """Faults: the same order every epoch; a sample twice in one epoch."""
    seen = list(batch_order(7, 2, seed=3, steps=6))
    assert [epoch for epoch, _ in seen] == [0, 0, 0, 1, 1, 1]
    first = torch.cat([rows for _, rows in seen[:3]])
    assert len(first.unique()) == 6
    assert first.tolist() != torch.cat([rows for _, rows in seen[3:]]).tolist()
    assert [r.tolist() for _, r in batch_order(7, 2, seed=3, steps=6)] == [
        r.tolist() for _, r in seen
    ]
    with pytest.raises(UserError, match="batch_size 8"):
        next(batch_order(7, 8, seed=0, steps=1))


def test_dtype_moves_states_and_leaves_ids_and_normaliser() -> None:
    b = collated([sample(3, 0)]).to(torch.device("cpu"), torch.bfloat16)
    assert b.hidden_states.dtype == torch.bfloat16
    assert b.target_log_normalizer.dtype == torch.float32
    assert b.input_ids.dtype == torch.int64


def test_evaluation_weighs_batches_by_their_counts() -> None:
    """Fault: ratios averaged over batches. One batch of two rows equals its rows one by one."""
    whole = batch()
    rows = [
        type(whole)(**{n: None if v is None else v[i : i + 1] for n, v in vars(whole).items()})
        for i in range(2)
    ]
    o = ObjectiveConfig(loss_decay_gamma=3.0)
    together, apart = (evaluate(draft(), bs, target(), o) for bs in ([whole], rows))
    for name, value in together.items():
        np.testing.assert_allclose(apart[name], value, rtol=1e-12, err_msg=name)
    with pytest.raises(UserError, match="nothing to evaluate"):
        evaluate(draft(), [], target(), o)


def test_peak_memory_counts_live_bytes_once() -> None:
    """Faults: views counted twice, inputs counted, frees missed."""
    a = torch.randn(1000)
    with PeakMemory() as traced:
        b = a + 1  # 4000
        c = b.view(10, 100)[2:]  # the same storage
        d = torch.cat([a, a])  # 8000
        del b, c
        e = a * 2  # 4000 in the place of b
        a.add_(1)
        del d, e
    assert (traced.peak, traced.live) == (12000, 0)


def test_plain_progress_has_no_control_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fault: bars redrawn into a log file."""
    monkeypatch.setattr("torch_port.progress.LINE_EVERY", 0.0)
    text = io.StringIO()
    with stage("work", 4, Console(file=text, width=80)) as progress:
        for done in range(1, 5):
            progress.update(done, "loss 1.000")
    lines = text.getvalue().splitlines()
    assert lines[0].startswith("  work: 1/4  loss 1.000  ETA 0:")
    assert lines[-1].startswith("  work: done in 0:0")
    assert "\x1b" not in text.getvalue()


def test_the_first_rows_are_laid_out_again() -> None:
    """Fault: the whole batch's layout kept, whose positions lie behind the rows that are left."""
    whole = collated([sample(5, 0), sample(5, 1), sample(5, 2)])
    cut = whole.first(2)
    assert cut.layout is not None
    assert len(cut.layout.visits) == len(cut.input_ids) == 2
    assert int(cut.layout.positions_P.max()) < 2 * 5
    assert replace(whole, layout=None).first(2).layout is None
