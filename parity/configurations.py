"""The suite's configurations: what is compared, in a few dozen shapes that XLA compiles once each.

A configuration is a recipe; every case of it has fresh contents: weights, map, target, ids and
states come from NumPy by (seed, name, number); masks, anchors, coefficients and how hot the logits
are from hypothesis (`parity.variations`). Its fixed edges are in `parity.edges`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

from parity.cases import Array, Case
from parity.draw import draw_recipe
from parity.recipes import N, Recipe, V
from parity.small_sizes import SIZES, SMALL
from parity.variations import Variation, varied

# How the port computes: every form must say the same, so the cases take turns.
COMPUTE: tuple[dict[str, Any], ...] = (
    {"objective": "fused", "attention": "blockwise"},
    {"objective": "plain", "attention": "dense"},
    {"objective": "fused", "attention": "dense"},
    {"objective": "plain", "attention": "blockwise"},
)
# The same again with the port's pieces cut small, so that there are several of each.
COMPUTE += tuple(form | {SIZES: SMALL, "objective_buffer_mib": 2e-3} for form in COMPUTE)


@dataclass(frozen=True)
class Configuration:
    """A recipe by name; with `one_anchor` its batches have one block a row.

    `quick` says whether a quick run has it: XLA's compilation is most of the time there.
    """

    recipe: Recipe
    one_anchor: bool = False
    quick: bool = True

    @property
    def name(self) -> str:
        """The name in reports and on the command line."""
        return self.recipe.name

    @property
    def family(self) -> str:
        """Return "dspark", "dflash" or "eagle3"."""
        return "eagle3" if self.recipe.eagle3 is not None else self.recipe.layout

    def case(self, seed: int, number: int, variation: Variation | None = None) -> Case:
        """Make case `number` of a run's seed: weights, map, target, ids and states are its own.

        Arguments: the seed, the number, and what hypothesis drew; without it the case has the
        recipe's own masks and anchors, and logits of about 2.
        """
        key = zlib.crc32(f"{self.name}/{seed}/{number}".encode())
        case = replace(draw_recipe(self.recipe, key), name=f"{self.name} #{number}")
        blocks = 1 if self.one_anchor else N
        if self.one_anchor:
            names = ("batch/anchor_positions", "batch/block_keep_mask")
            case = with_tensors(case, {name: case.tensors[name][:, :1] for name in names})
        if variation is not None:
            case = varied(case, variation, self.family, blocks)
        return replace(case, compute=COMPUTE[number % len(COMPUTE)])


def with_tensors(case: Case, tensors: dict[str, Array]) -> Case:
    """Return the case with some tensors replaced."""
    return replace(case, tensors=case.tensors | tensors)


def _dspark(name: str, one_anchor: bool = False, **config: Any) -> Configuration:
    objective: dict[str, Any] = {
        key: config.pop(key) for key in ("loss_decay_gamma", "detach_confidence") if key in config
    }
    if config.get("markov_rank") == 0:
        config["confidence_head_with_markov"] = False
    if config.get("enable_confidence_head") is False:
        config["confidence_head_with_markov"] = False
        objective["confidence_alpha"] = 0.0
    return Configuration(Recipe(name, config, objective), one_anchor)


def _dflash(name: str, objective: dict[str, Any] | None = None, **config: Any) -> Configuration:
    return Configuration(Recipe(name, config, objective or {}, layout="dflash"))


def _eagle3(name: str, steps: int, **config: Any) -> Configuration:
    return Configuration(Recipe(name, config, eagle3={"steps": steps}))


FULL: dict[str, Any] = {"draft_vocab_size": None}
_SLIDES: dict[str, Any] = {"layer_types": ["sliding_attention", "full_attention"]}
_ALL_SLIDE: dict[str, Any] = {"layer_types": ["sliding_attention", "sliding_attention"]}

CONFIGURATIONS: tuple[Configuration, ...] = (
    _dspark("pruned-vanilla"),
    _dspark("pruned-gated", markov_head_type="gated"),
    _dspark("pruned-rnn", markov_head_type="rnn"),
    _dspark("pruned-none", markov_rank=0),
    _dspark("full-vanilla", **FULL),
    _dspark("full-gated", markov_head_type="gated", **FULL),
    _dspark("full-rnn", markov_head_type="rnn", **FULL),
    _dspark("full-none", markov_rank=0, **FULL),
    _dspark("pruned-vanilla-nodecay", loss_decay_gamma=None),
    _dspark("full-rnn-nodecay", markov_head_type="rnn", loss_decay_gamma=None, **FULL),
    _dspark("pruned-noconfidence", enable_confidence_head=False),
    _dspark(
        "full-gated-noconfidence", markov_head_type="gated", enable_confidence_head=False, **FULL
    ),
    _dspark("pruned-confidence-h", confidence_head_with_markov=False),
    _dspark("pruned-detached", detach_confidence=True),
    _dspark("full-rnn-detached", markov_head_type="rnn", detach_confidence=True, **FULL),
    _dspark("pruned-sliding", sliding_window=5, **_SLIDES),
    _dspark("full-rnn-sliding-2", sliding_window=2, markov_head_type="rnn", **_ALL_SLIDE, **FULL),
    _dspark("pruned-sliding-1", sliding_window=1, **_SLIDES),
    _dspark("pruned-mha", num_key_value_heads=4),
    _dspark("full-mqa", num_key_value_heads=1, **FULL),
    _dspark("pruned-eps-theta", rms_norm_eps=1e-2, rope_theta=50.0),
    _dspark("one-slot", block_size=1),
    _dspark("seven-slots", block_size=7),
    _dspark("one-kept", draft_vocab_size=1),
    _dspark("all-but-one-kept", draft_vocab_size=V - 1),
    _dspark("one-anchor-none", one_anchor=True, markov_rank=0),
    _dspark("one-anchor-none-full", one_anchor=True, markov_rank=0, **FULL),
    _dspark("one-layer", num_hidden_layers=1, layer_types=["full_attention"]),
    _dflash("dflash-pruned", {"loss_decay_gamma": 4.0}),
    _dflash("dflash-pruned-nodecay"),
    _dflash("dflash-full", {"loss_decay_gamma": 2.5}, **FULL),
    _dflash("dflash-sliding", {"loss_decay_gamma": 4.0}, sliding_window=3, **_SLIDES),
    _dflash("dflash-two-slots", block_size=2),
    _dflash("dpace-cumulative", {"dpace": "cumulative", "beta": 0.3}),
    _dflash("dpace-continuation", {"dpace": "continuation"}),
    _dflash("dpace-both", {"dpace": "both"}),
    _dflash("dpace-both-full", {"dpace": "both", "beta": 0.2}, **FULL),
    _dflash("dpace-seven-slots", {"dpace": "both", "beta": 0.8}, block_size=7),
    _eagle3("eagle3-pruned", 3),
    _eagle3("eagle3-full-mha", 3, num_key_value_heads=4, **FULL),
    _eagle3("eagle3-one-step", 1),
    _eagle3("eagle3-five-steps", 5, rms_norm_eps=1e-2, rope_theta=50.0),
    _eagle3("eagle3-all-but-one-kept", 2, draft_vocab_size=V - 1),
)

# What a quick run can spare: each clause is served by another configuration.
_SPARED = (
    "full-gated",
    "full-rnn-nodecay",
    "full-gated-noconfidence",
    "full-rnn-detached",
    "pruned-sliding-1",
    "one-anchor-none-full",
    "dflash-full",
    "dpace-both-full",
    "dpace-seven-slots",
    "eagle3-five-steps",
    "eagle3-all-but-one-kept",
)
BY_NAME = {c.name: replace(c, quick=c.name not in _SPARED) for c in CONFIGURATIONS}


def chosen_configurations(quick: bool, names: tuple[str, ...] | None) -> list[Configuration]:
    """Return the configurations of a run: those that are named, else all or the quick ones."""
    if names is not None:
        return [configuration for name, configuration in BY_NAME.items() if name in names]
    return [configuration for configuration in BY_NAME.values() if configuration.quick or not quick]
