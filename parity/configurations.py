"""The suite's configurations: what is compared, in a few dozen shapes that XLA compiles once each.

A configuration is a recipe; every case of it has fresh contents, drawn by NumPy from (seed, name,
number): weights, map, target, batch, anchors, masks, coefficients, and how hot the logits are. Its
fixed edges are in `parity.edges`.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from parity.cases import Array, Case
from parity.draw import draw_recipe
from parity.recipes import B, N, Recipe, S, V
from parity.small_sizes import SIZES, SMALL

# How the port computes: every form must say the same, so the cases take turns.
COMPUTE: tuple[dict[str, Any], ...] = (
    {"objective": "fused", "attention": "blockwise"},
    {"objective": "plain", "attention": "dense"},
    {"objective": "fused", "attention": "dense"},
    {"objective": "plain", "attention": "blockwise"},
)
# The same again with the port's pieces cut small, so that there are several of each.
COMPUTE += tuple(form | {SIZES: SMALL, "objective_buffer_mib": 2e-3} for form in COMPUTE)
_ALPHAS = ((0.1, 0.9, 1.0), (1.0, 0.0, 0.0), (0.0, 1.0, 0.5), (0.5, 0.25, 2.0))


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

    def draw(self, seed: int, number: int, calm: bool = False) -> Case:
        """Draw case `number` of a run's seed: nothing else decides what is in it.

        `calm` leaves the logits at their ordinary size, about 2.
        """
        key = zlib.crc32(f"{self.name}/{seed}/{number}".encode())
        random = np.random.default_rng([7, key])
        case = replace(draw_recipe(self.recipe, key), name=f"{self.name} #{number}")
        if self.one_anchor:
            case = with_tensors(
                case,
                {
                    name: case.tensors[name][:, :1]
                    for name in ("batch/anchor_positions", "batch/block_keep_mask")
                },
            )
        case = _vary(self, case, random, calm)
        return replace(case, compute=COMPUTE[number % len(COMPUTE)])


def with_tensors(case: Case, tensors: dict[str, Array]) -> Case:
    """Return the case with some tensors replaced."""
    return replace(case, tensors=case.tensors | tensors)


def _vary(
    configuration: Configuration, case: Case, random: np.random.Generator, calm: bool
) -> Case:
    """Draw what a recipe leaves the same: masks, anchors, scales of the logits, coefficients."""
    heat, states = (np.float32(10 ** random.uniform(*span)) for span in ((-1, 1.2), (-0.7, 0.7)))
    if calm:
        heat = states = np.float32(1)
    tensors = dict(case.tensors)
    tensors["target/lm_head.weight"] = tensors["target/lm_head.weight"] * heat
    state = "batch/target_last_hidden_states"
    tensors[state] = tensors[state] * states
    tensors["batch/loss_mask"] = _mask(random)
    if configuration.family == "eagle3":
        name = "weights/lm_head.weight"
        return with_tensors(case, tensors | {name: tensors[name] * heat})
    tensors |= _anchors(tensors["batch/loss_mask"], 1 if configuration.one_anchor else N, random)
    objective = dict(case.objective)
    if configuration.family == "dspark":
        ce, l1, confidence = _ALPHAS[random.integers(len(_ALPHAS))]
        objective |= {"ce_alpha": ce, "l1_alpha": l1}
        if objective["confidence_alpha"]:
            objective["confidence_alpha"] = confidence
        if objective["loss_decay_gamma"] is not None:
            objective["loss_decay_gamma"] = float(random.uniform(0.5, 8))
    return replace(case, tensors=tensors, objective=objective)


def _mask(random: np.random.Generator) -> Array:
    """Draw a loss mask with holes and padding; 0.5 is not supervised, 0.6 is."""
    on = random.random((B, S)) < random.choice([0.3, 0.7, 0.9, 1.0])
    for row in range(B):
        if random.random() < 0.5:
            on[row, S - random.integers(1, S // 2) :] = False
    high, low = random.choice([0.6, 1.0], (B, S)), random.choice([0.0, 0.5], (B, S))
    return np.where(on, high, low).astype(np.float32)


def _anchors(mask: Array, blocks: int, random: np.random.Generator) -> dict[str, Array]:
    """Draw anchors: as §3.1 has them (sorted candidates, padded by 0), or anywhere."""
    anchors = random.integers(0, S - 1, (B, blocks))
    keep = random.random((B, blocks)) < 0.85
    if random.random() < 0.5:
        on = mask > 0.5
        anchors, keep = np.zeros((B, blocks), np.int64), np.zeros((B, blocks), bool)
        for row in range(B):
            found = np.flatnonzero(on[row, :-1] & on[row, 1:])
            chosen = np.sort(random.permutation(found)[:blocks])
            anchors[row, : len(chosen)], keep[row, : len(chosen)] = chosen, True
    return {"batch/anchor_positions": anchors.astype(np.int64), "batch/block_keep_mask": keep}


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
