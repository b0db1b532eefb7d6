"""How fast ids are counted and a map is built: `python -m benchmarks.vocabulary`.

One process, V = 248320 (the head of a 248k-entry tokenizer), ids drawn as text has them: a few
often, most hardly ever. Best of five.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from torch_port.vocabulary.counting import count_supervised_tokens
from torch_port.vocabulary.mapping import buffers_from_kept, check_map
from torch_port.vocabulary.selection import select_by_count

V, V_TOK, K = 248320, 248077, 64000
TOKENS = 20_000_000


def seconds(run: Callable[[], object]) -> float:
    """Return the shortest of five runs."""
    times = []
    for _ in range(5):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)


def main() -> None:
    """Print ids per second by sample length, and the seconds that one map takes."""
    random = np.random.default_rng(0)
    ids = np.minimum(random.zipf(1.2, TOKENS), V_TOK) - 1
    mask = (random.random(TOKENS) < 0.7).astype(np.float32)
    for length in (512, 4096, TOKENS):
        starts = range(0, TOKENS, length)
        samples = [(ids[at : at + length], mask[at : at + length]) for at in starts]
        took = seconds(partial(count_supervised_tokens, samples, V, V_TOK))
        print(f"counting, samples of {length:>10,} ids: {TOKENS / took / 1e6:6.0f} M ids/s")
    counts = count_supervised_tokens([(ids, mask)], V, V_TOK)
    pins = range(V_TOK - 256, V_TOK)

    def build() -> None:
        kept = select_by_count(counts, K, pins, V_TOK)
        check_map(*buffers_from_kept(torch.from_numpy(kept), V), V, K)

    print(f"a map of {K:,} of {V:,} ids, checked: {1e3 * seconds(build):.1f} ms")


if __name__ == "__main__":
    main()
