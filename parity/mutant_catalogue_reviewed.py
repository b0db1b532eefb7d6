"""Faults that a reviewer planted, and that the suite of that time did not see.

Each got a case: steps that the spike guard skips, pieces cut small, files read as they are written.
"""

from __future__ import annotations

from parity.mutant_catalogue import Mutant

REVIEWED: tuple[Mutant, ...] = (
    Mutant(
        "updates-taken-for-steps",
        "spec",
        "§14",
        "a run that is converted goes on with AdamW's count of steps, skipped ones too",
        "jaxdraft/saved_run.py",
        "count=np.asarray(arrays.updates, adam.count.dtype)",
        "count=np.asarray(arrays.step, adam.count.dtype)",
        ("checkpoints",),
        ("a run with skipped steps",),
    ),
    Mutant(
        "skipped-step-moves-moments",
        "spec",
        "§14",
        "a step that is skipped leaves the weights alone, but enters AdamW's moments",
        "jaxdraft/training.py",
        "    before = state.params, state.optimizer_state, state.guard\n",
        "    before = state.params, moments, state.guard\n",
        ("training",),
        ("pruned-vanilla, spikes",),
    ),
    Mutant(
        "eagle3-mask-of-first-chunk",
        "port",
        "§13",
        "from the second chunk of queries on, attention is masked as in the first",
        "torch_port/models/training_time_test.py",
        "query_Q1 = torch.arange(start, stop, device=q_BAQD.device).unsqueeze(1)",
        "query_Q1 = torch.arange(Q, device=q_BAQD.device).unsqueeze(1)",
        ("losses",),
        ("eagle3-pruned",),
    ),
    Mutant(
        "layers-not-counted-from-embedding",
        "port",
        "§6",
        "speculators files number captured layers as hf does, written and read alike",
        "torch_port/formats/speculators.py",
        '"aux_hidden_state_layer_ids": [layer + 1 for layer in config.target_layer_ids]',
        '"aux_hidden_state_layer_ids": list(config.target_layer_ids)',
        ("checkpoints",),
        ("pruned-gated",),
    ),
    Mutant(
        "rotary-angles-rounded",
        "port",
        "§5",
        "rotary angles are rounded to the weights' dtype before cosine and sine",
        "torch_port/models/attention.py",
        "angle = torch.outer(position, rate).repeat(1, 2)",
        "angle = torch.outer(position, rate).repeat(1, 2).to(dtype)",
        ("precision",),
        ("rounded once",),
    ),
    Mutant(
        "pin-named-twice-counts-twice",
        "spec",
        "§2",
        "an id that is pinned twice takes two of the K places",
        "jaxdraft/vocabulary.py",
        "pins = sorted({int(i) for i in given})",
        "pins = sorted(int(i) for i in given)",
        ("vocabulary",),
    ),
    Mutant(
        "denominators-of-first-micro-batch",
        "port",
        "§8",
        "a step's denominators are its first micro-batch's, times their number",
        "torch_port/training/step.py",
        "torch.stack([family.denominators(draft, b, objective) for b in prepared]).sum(0)",
        "family.denominators(draft, prepared[0], objective) * len(prepared)",
        ("training",),
        ("pruned-vanilla, micro-batches",),
    ),
    Mutant(
        "eagle3-earlier-steps-detached",
        "port",
        "§13",
        "no gradient reaches an earlier step's keys and values",
        "torch_port/models/eagle3.py",
        "(*earlier, own))",
        "(*((k.detach(), v.detach()) for k, v in earlier), own))",
        ("gradients",),
        ("eagle3-pruned",),
    ),
)
