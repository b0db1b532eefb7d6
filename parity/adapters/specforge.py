"""The public `specforge` package (0.2.0) as an adapter of `parity judge`: its DSpark and DFlash.

The package pins other versions of torch and transformers than ours; what is called here needs
neither sglang nor a GPU (docs/judge.md says how it was installed). It is called as its trainer
calls it, with dense masks, in float32. It draws its anchors itself: here they are given.
"""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

from parity.adapter import DraftOutputs, NotJudged, Objective, Unavailable
from parity.cases import Array, Case
from parity.conventions import Conventions, family

if importlib.util.find_spec("specforge") is None:
    raise Unavailable(
        "the package specforge is not installed here; docs/judge.md says how to run this adapter "
        "where it is"
    )
_LOSSES = {
    "none": "dflash",
    "both": "dpace",
    "cumulative": "dpace-cumulative-confidence-only",
    "continuation": "dpace-continuation-value-only",
}


class SpecForge:
    """The package's DSpark and DFlash drafts, which predict the whole vocabulary."""

    conventions = Conventions()
    dtype = "float32"
    families = ("dspark", "dflash")

    def __init__(self) -> None:
        self.name = f"specforge {version('specforge')}"

    def draft_outputs(self, case: Case) -> DraftOutputs:
        """Return what the package's forward pass has at every slot."""
        said = _run(case)
        return DraftOutputs(said["hidden"], said["logits"], said.get("confidence"))

    def objective(self, case: Case) -> Objective:
        """Return the package's loss and metrics; of DFlash it has the accuracy alone."""
        said = _run(case)
        pairs = {name: (num.numpy(), den.numpy()) for name, (num, den) in said["pairs"].items()}
        return Objective(loss=said["loss"], metrics=pairs, eval_mask=said.get("mask"))

    def gradients(self, case: Case) -> dict[str, Array]:
        """Return the gradient of every weight of the draft."""
        return dict(_run(case, gradients=True)["gradients"])


def _package(name: str) -> Any:
    """Import a module of the package, which is absent where types are checked."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of attention kernels that are not installed
        return importlib.import_module(f"specforge.{name}")


def _run(case: Case, gradients: bool = False) -> dict[str, Any]:
    """Run the package's trainer's model on a case; return what was caught on the way."""
    import torch

    if "weights/t2d" in case.tensors:
        raise NotJudged("the package's DSpark and DFlash drafts predict the whole vocabulary")
    model = _model(case)
    batch = {name: torch.from_numpy(value) for name, value in case.group("batch").items()}
    inputs = [batch[name] for name in ("input_ids", "hidden_states", "loss_mask")]
    if family(case) == "dspark":
        inputs.append(batch["target_last_hidden_states"])
    anchors = batch["anchor_positions"], batch["block_keep_mask"].bool()
    with torch.set_grad_enabled(gradients), _caught(model, anchors) as caught:
        loss, _, metrics = model(*inputs)
    B, N = anchors[0].shape
    shape = B, N, case.config["block_size"]
    said: dict[str, Any] = {
        name: value.detach().reshape(*shape, *value.shape[value.ndim - extra :]).numpy()
        for name, (value, extra) in caught.items()
    }
    if gradients:
        loss.backward()
        said["gradients"] = {
            name: (torch.zeros_like(p) if p.grad is None else p.grad).numpy()
            for name, p in model.draft_model.named_parameters()
        }
    return said | {"loss": float(loss.detach()), "pairs": metrics["ratio_metrics"]}


@contextmanager
def _caught(model: Any, anchors: tuple[Any, Any]) -> Iterator[dict[str, tuple[Any, int]]]:
    """Give the package its anchors; catch tensors, each with its number of last axes."""
    caught: dict[str, tuple[Any, int]] = {}
    draft = model.draft_model
    model._sample_anchor_positions = lambda *_: anchors

    def catch(owner: Any, method: str, name: str, extra: int, part: Any) -> None:
        original = getattr(owner, method)

        def catching(*given: Any, **named: Any) -> Any:
            found = original(*given, **named)
            if found is not None:
                caught[name] = (part(found), extra)
            return found

        setattr(owner, method, catching)

    catch(draft, "forward", "hidden", 1, lambda found: found)
    catch(draft, "predict_confidence", "confidence", 0, lambda found: found)
    if hasattr(model, "dspark_ce_loss_alpha"):
        catch(draft, "apply_logits_head", "logits", 1, lambda found: found)
        catch(model, "_build_dspark_labels_and_mask", "mask", 0, lambda found: found[1])
    else:
        catch(model.lm_head, "forward", "logits", 1, lambda found: found)
    yield caught


def _model(case: Case) -> Any:
    """Build the package's trainer's model of a case."""
    import torch
    from transformers import Qwen3Config

    trained = _package("algorithms.common.dflash_family_model")
    given, objective = case.config, case.objective
    kind = family(case)
    drafts = {"dspark": "DSparkDraftModel", "dflash": "DFlashDraftModel"}
    own = {name: value for name, value in given.items() if name != "architectures"}
    # transformers drops the window of a config that does not say so.
    own["use_sliding_window"] = "sliding_attention" in given["layer_types"]
    config = Qwen3Config(**own)
    config._attn_implementation = "eager"
    draft = getattr(_package(f"modeling.draft.{kind}"), drafts[kind])(config).float()
    state = {name: torch.from_numpy(value) for name, value in case.group("weights").items()}
    missing, unknown = draft.load_state_dict(state, strict=False)
    left = [name for name in missing if not name.startswith("rotary_emb.")]
    if left or unknown:
        raise RuntimeError(f"weights do not fit the package's model: {left} {unknown}")
    settings: dict[str, Any] = {
        "draft_model": draft,
        "target_lm_head": _linear(case.tensors["target/lm_head.weight"]),
        "target_embed_tokens": torch.nn.Embedding.from_pretrained(
            torch.from_numpy(case.tensors["target/embed_tokens.weight"])
        ),
        "mask_token_id": given["dflash_config"]["mask_token_id"],
        "block_size": given["block_size"],
        "attention_backend": "eager",
        "loss_decay_gamma": objective.get("loss_decay_gamma"),
        "objective_chunk_blocks": 0,  # the whole batch at once
    }
    if kind == "dflash":
        return trained.OnlineDFlashModel(
            **settings,
            loss_type=_LOSSES[objective.get("dpace", "none")],
            dpace_alpha=objective.get("beta") or 0.5,
        )
    return trained.OnlineDSparkModel(
        **settings,
        dspark_ce_loss_alpha=objective["ce_alpha"],
        dspark_l1_loss_alpha=objective["l1_alpha"],
        dspark_confidence_head_alpha=objective["confidence_alpha"],
    )


def _linear(weight: Array) -> Any:
    import torch

    head = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    head.weight = torch.nn.Parameter(torch.from_numpy(weight.copy()), requires_grad=False)
    return head


adapter = SpecForge()
