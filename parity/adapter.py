"""What an implementation must offer to be judged: a few functions of NumPy arrays.

`docs/judge.md` shows how to write one. Needs neither torch nor jax.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from parity.cases import Array, Case
from parity.compare import TOLERANCE
from parity.conventions import Conventions

MetricValue = tuple[Any, Any] | float


class NotJudged(Exception):  # noqa: N818 (no error: the adapter's way to pass)
    """Raised by an adapter that has no answer to a case; its text is the reason that is listed."""


class Unavailable(Exception):  # noqa: N818
    """Raised by an adapter's module when its implementation is not here; the text says why."""


@dataclass(frozen=True)
class DraftOutputs:
    """What the draft says at every slot; None is "not judged".

    hidden [B, N, γ, H] after the last norm; draft_logits [B, N, γ, K] with the Markov bias;
    confidence_logits [B, N, γ].
    """

    hidden: Array | None = None
    draft_logits: Array | None = None
    confidence_logits: Array | None = None


@dataclass(frozen=True)
class Objective:
    """The loss, and what of the way to it the implementation can hand over.

    metrics: name of §9 to (numerator, denominator), or to their quotient where that is all there
    is. accept_probability, eval_mask [B, N, γ]. None is "not judged".
    """

    loss: float | None = None
    metrics: Mapping[str, MetricValue] = field(default_factory=dict)
    accept_probability: Array | None = None
    eval_mask: Array | None = None


class Adapter(Protocol):
    """What the judge asks of an implementation. Absent functions are "not judged".

    A case's tensors are float32 and integer NumPy arrays under the names of vectors.md:
    `case.group("weights")`, `("target")`, `("batch")`; `case.config` is the hf config,
    `case.objective` the α's and the decay. Expectations are taken out before it is handed over.
    A function raises NotJudged(reason) for what it has no answer to, and any error whose message
    has the sheet's words where a batch has nothing to learn from (§8).
    """

    name: str
    """The implementation and its version."""
    conventions: Conventions
    """What it declares; `Conventions()` is the sheet's."""
    dtype: str
    """"float64" or "float32": what it computes in, hence the tolerance."""
    families: tuple[str, ...]
    """Which drafts it has: "dspark", "dflash" (D-PACE too), "eagle3"."""

    def draft_outputs(self, case: Case) -> DraftOutputs:
        """Run the draft on the batch with the anchors given."""
        ...

    def objective(self, case: Case) -> Objective:
        """Compute the loss of one rank and one micro-batch, and its metrics."""
        ...

    # Optional:
    #   gradients(case) -> Mapping[str, Array]   d loss / d weight, under the weights' names
    #   decode(case) -> Mapping[str, Array]      tokens and rounds of a decoding case


def check_adapter(adapter: Any) -> None:
    """Raise ValueError when an object does not declare what an adapter must."""
    name = type(adapter).__name__
    for attribute in ("name", "conventions"):
        if not hasattr(adapter, attribute):
            raise ValueError(f"{name} is no adapter: it has no {attribute!r}; see docs/judge.md")
    if not isinstance(adapter.conventions, Conventions):
        raise ValueError(f"{name}.conventions must be parity.conventions.Conventions(...)")
    adapter.conventions.check()
    if computes_in(adapter) not in TOLERANCE:
        raise ValueError(
            f"{name}.dtype is {computes_in(adapter)!r}; known are {', '.join(TOLERANCE)}"
        )


def computes_in(adapter: Any) -> str:
    """Return the type that an adapter computes in, float64 unless it says otherwise."""
    return str(getattr(adapter, "dtype", "float64"))


def without_answers(case: Case) -> Case:
    """Return a case with copies of its inputs and none of its expectations."""
    inputs = {n: v.copy() for n, v in case.tensors.items() if not n.startswith("expect/")}
    return replace(case, expect={}, tensors=inputs)


def load_adapter(name: str) -> Any:
    """Import MODULE:OBJECT (an adapter, or a class or function that makes one) and check it.

    A bare NAME is a ready adapter of `parity.adapters`. The working directory is searched too.
    Raises Unavailable when the implementation is not here; ValueError for what is no adapter.
    """
    module_name, colon, object_name = name.partition(":")
    if not colon:
        module_name, object_name = f"parity.adapters.{name}", "adapter"
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise Unavailable(f"{module_name} cannot be imported here: {error}") from None
    found = getattr(module, object_name, None)
    if found is None:
        raise ValueError(f"{module_name} has no {object_name!r}; expected MODULE:OBJECT")
    try:
        adapter = found() if isinstance(found, type) or _makes_one(found) else found
    except TypeError as error:
        raise ValueError(f"{name} is no adapter, and makes none: {error}") from None
    check_adapter(adapter)
    return adapter


def _makes_one(found: Any) -> bool:
    return callable(found) and not hasattr(found, "conventions")
