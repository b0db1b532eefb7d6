"""Writing a map with what it was made from: for `vocab build` and for the demo."""

from __future__ import annotations

from pathlib import Path

import torch

from torch_port.vocabulary.counts import TokenCounts
from torch_port.vocabulary.files import save_map
from torch_port.vocabulary.mapping import buffers_from_kept
from torch_port.vocabulary.sweep import Ranking, SweepRow
from torch_port.vocabulary.sweep import sweep as rows_of


def write_map(path: Path, counts: TokenCounts, ranking: Ranking, size: int) -> SweepRow:
    """Write the map of K ids of a ranking; return what it covers.

    The metadata is that of contracts §1, and how the ids were chosen.

    Arguments: `path` to write; `counts` of the training corpus and their `ranking`; `size` K.
    Raises UserError for a K that cannot be.
    """
    (row,) = rows_of(ranking, counts, [size])
    details = {
        "selected_by": ranking.rule,
        "pinned": str(ranking.pins),
        "tokenizer_size": str(counts.tokenizer_size),
        "source": counts.source,
    }
    if row.heldout is not None:
        details["heldout_coverage"] = repr(row.heldout)
    if row.mass is not None:
        details |= {"kept_mass": repr(row.mass), "target_fingerprint": counts.target_fingerprint}
    save_map(
        path,
        *buffers_from_kept(torch.from_numpy(ranking.kept(size)), len(counts.counts)),
        corpus_fingerprint=counts.corpus_fingerprint,
        tokenizer_fingerprint=counts.tokenizer_fingerprint,
        coverage=row.train,
        details=details,
    )
    return row
