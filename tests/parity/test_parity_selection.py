"""Counting against teacher probability on features of our own making."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from parity.cases import CaseError
from parity.selection import compare_rules, markdown
from torch_port.data.features import FeatureSample, write_features

V, H = 6, 3


def prepared(directory: Path) -> np.ndarray:
    """Two samples a side. The data says 5 and 4, the teacher prefers 0 and 1."""
    head = np.zeros((V, H), dtype=np.float32)
    head[0, 0], head[1, 0] = 3.0, 2.0
    (directory / "target").mkdir(parents=True)
    save_file({"lm_head.weight": head}, directory / "target" / "model.safetensors")
    for side in ("train", "heldout"):
        samples = []
        for length in (4, 3):
            states = torch.zeros(length, H)
            states[:, 0] = 1.0
            samples.append(
                FeatureSample(
                    id=str(length),
                    input_ids=torch.tensor([0, 5, 5, 4])[:length],
                    loss_mask=torch.tensor([1.0, 1.0, 1.0, 1.0])[:length],
                    hidden_states=torch.zeros(length, 2 * H),
                    target_last_hidden_states=states,
                    target_log_normalizer=torch.zeros(length),
                )
            )
        write_features(directory / "features" / side, samples)
    return head


def test_shares_by_hand(tmp_path: Path) -> None:
    """Faults: the token at position 0 counted; padding summed; the two rules swapped."""
    head = prepared(tmp_path / "demo")
    (row,), size = compare_rules(tmp_path / "demo", [2])
    assert size == V
    weights = np.exp(head[:, 0].astype(np.float64))
    p = weights / weights.sum()
    # Counting keeps {4, 5} (5 four times, 4 once), the teacher's mass keeps {0, 1}.
    assert row.shared == 0
    # The teacher's probabilities are summed in float32.
    assert row.train == pytest.approx((p[4] + p[5], p[0] + p[1]), rel=1e-6)
    assert row.heldout == pytest.approx(row.train, rel=1e-6)
    assert row.coverage == (1.0, 0.0)
    assert markdown([row]).count("\n") == 2


def test_a_directory_without_features_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match="no prepared demo"):
        compare_rules(tmp_path, [2])
