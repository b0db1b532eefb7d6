"""Products of bf16 factors whose result is kept in float32 (spec sheet §11).

Such a product is summed in float32 anyway. Rounding its *result* to bf16 is what costs: a logit of
30 comes out off by up to 1/16, and its exponential by 6 %. See docs/precision.md.

Shape suffixes: C rows, K rows of a head, H the inner size.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Elements of a head widened at a time where no kernel returns float32: 4 MiB, not the whole head.
SLICE = 1 << 20


def product(left_CH: Tensor, right_KH: Tensor, out_CK: Tensor | None = None) -> Tensor:
    """Return left·rightᵀ [C, K] in float32 or better, from factors of any floating dtype.

    Carries no gradient. `out_CK`, where given, has that dtype and is filled.
    """
    wide = torch.promote_types(left_CH.dtype, torch.float32)
    if out_CK is None:
        out_CK = left_CH.new_empty(len(left_CH), len(right_KH), dtype=wide)
    if left_CH.dtype == right_KH.dtype == wide:
        return torch.mm(left_CH, right_KH.T, out=out_CK)
    if left_CH.dtype == right_KH.dtype and left_CH.device.type != "cpu":
        return torch.mm(left_CH, right_KH.T, out_dtype=wide, out=out_CK)
    left_CH, rows = left_CH.to(wide), max(1, SLICE // right_KH.shape[1])
    for start in range(0, len(right_KH), rows):
        part = slice(start, start + rows)
        torch.mm(left_CH, right_KH[part].to(wide).T, out=out_CK[:, part])
    return out_CK
