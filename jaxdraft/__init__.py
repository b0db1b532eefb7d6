"""The executable specification of pruned speculative drafts, in JAX and Flax.

Each module is one part of the specification sheet and each public function one clause of it:

* ``config``: what a draft and an objective are
* ``vocabulary``: the map between target and draft ids (§2)
* ``blocks``: anchors, labels, masks, weights, visibility (§3, §4)
* ``backbone``, ``heads``, ``draft``: the flax.linen modules (§4 to §6)
* ``teacher``: the conditional and the true teacher (§7)
* ``objective``, ``metrics``: terms, sums, loss, metric pairs (§8, §9)
* ``evaluate``: all of it, from arrays to an evaluation and its gradients
* ``dflash``, ``dpace``: the bonus-anchor layout with its two objectives (§3, §12)
* ``eagle3_config``, ``eagle3``, ``eagle3_objective``, ``eagle3_evaluate``: EAGLE3 (§13)
* ``drafting``, ``decoding``, ``expectation``: proposing a block, verifying it, the full loop, the
  expected length of a round (§10)
* ``scheduling``: how many proposals to verify, and calibrated confidences
* ``training``: learning rate, AdamW and the training step (§14)
* ``checkpoint``: all that a run needs to go on, with orbax; ``draft_checkpoint``: a draft alone;
  ``saved_run``: a run's arrays for a converter; ``stored``: the directories of all three
* ``checks``: what all configs refuse alike

The working dtype is that of the parameters and inputs, float32 or float64; nothing here sets a
global option of jax.
"""

from jaxdraft.config import DraftConfig, NotBuilt, ObjectiveConfig
from jaxdraft.dflash import DFlashObjective, evaluate_dflash, gradients_dflash
from jaxdraft.draft import DSparkDraft
from jaxdraft.eagle3 import Eagle3Draft
from jaxdraft.eagle3_config import Eagle3Config, Eagle3Objective
from jaxdraft.eagle3_evaluate import Eagle3Batch, evaluate_eagle3, gradients_eagle3
from jaxdraft.evaluate import Batch, Evaluation, Target, evaluate, gradients
from jaxdraft.training import OptimizerConfig, TrainState, train_step
from jaxdraft.vocabulary import (
    VocabularyMap,
    build_map,
    build_map_by_mass,
    identity_map,
    map_from_buffers,
    teacher_mass,
)

__all__ = [
    "Batch",
    "DFlashObjective",
    "DSparkDraft",
    "DraftConfig",
    "Eagle3Batch",
    "Eagle3Config",
    "Eagle3Draft",
    "Eagle3Objective",
    "Evaluation",
    "NotBuilt",
    "ObjectiveConfig",
    "OptimizerConfig",
    "Target",
    "TrainState",
    "VocabularyMap",
    "build_map",
    "build_map_by_mass",
    "evaluate",
    "evaluate_dflash",
    "evaluate_eagle3",
    "gradients",
    "gradients_dflash",
    "gradients_eagle3",
    "identity_map",
    "map_from_buffers",
    "teacher_mass",
    "train_step",
]
