"""What the tests of the NPU seam share: drawn tensors, and how near two twins must be."""

import torch
from torch import Tensor

# float64: the twins differ in the order of sums of at most 64 products: about 1e-15 of the largest
# magnitude. float32 likewise: 2⁻²³ = 1.2e-7 times a few; 2e-6 leaves room for exp.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6}


def draws(*shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in shapes]


def assert_near(actual: Tensor, expected: Tensor, relative: float) -> None:
    """Within `relative` of the expected tensor's largest magnitude; dtypes agree."""
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(
        actual, expected, rtol=0, atol=relative * expected.abs().max().item()
    )
