"""A target loaded from a local directory to be run: nothing downloaded, nothing made up.

Shape suffixes: B batch, S tokens, H hidden size, V rows of the head.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torch_port.data.capture import parts_of
from torch_port.data.conversations import DataError
from torch_port.data.fingerprints import tokenizer_fingerprint
from torch_port.device import device_named
from torch_port.errors import UserError
from torch_port.formats.target import TargetDirectory
from torch_port.objective.products import product
from torch_port.training.resume import target_fingerprint

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Settings by which a model's logits are not its head times its final states.
_RESCALED = ("final_logit_softcapping", "logit_scale", "logits_scaling")


@dataclass(frozen=True)
class TargetSizes:
    """Of a target's decoder: layers, H, and the longest sequence, where its config says one."""

    layers: int
    hidden_size: int
    max_positions: int | None


def target_sizes(directory: Path) -> TargetSizes:
    """Read a target's sizes from its config.json, whatever its architecture calls them.

    Raises UserError when there is none that transformers knows.
    """
    _quiet()
    from transformers import AutoConfig

    TargetDirectory(directory).config  # noqa: B018 - its own error names what is missing
    try:
        whole = AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
        told = whole.get_text_config()
        layers, hidden_size = int(told.num_hidden_layers), int(told.hidden_size)
    except Exception as error:  # noqa: BLE001 - whatever a broken config makes the library raise
        raise _unloadable(directory, error) from None
    limit = getattr(told, "max_position_embeddings", None)
    return TargetSizes(layers, hidden_size, limit if type(limit) is int else None)


def _unloadable(directory: Path, error: Exception) -> UserError:
    first = (str(error) or type(error).__name__).strip().split("\n", 1)[0]
    return UserError(
        f"target {directory}: transformers cannot load it as a causal LM ({first}); give a "
        "local directory of a model that transformers knows (no remote code is run)"
    )


def load_target_model(directory: Path, dtype: str, device: str) -> nn.Module:
    """Load any transformers causal LM, in evaluation mode and without gradients.

    Of a multimodal model its text part, where transformers has one. Weights that are not in the
    files are an error: transformers would make them up.

    Arguments: `directory`; `dtype`, a name of `DTYPES`; `device`, such as `cpu` or `npu:0`.
    Raises UserError for a directory that cannot be loaded so, and for a head that does not give the
    model's own logits.
    """
    _quiet()
    from transformers import AutoModelForCausalLM

    TargetDirectory(directory).config  # noqa: B018 - its own error names what is missing
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            str(directory),
            local_files_only=True,
            trust_remote_code=False,
            dtype=DTYPES[dtype],
            output_loading_info=True,
        )
    except Exception as error:  # noqa: BLE001 - whatever a broken directory makes the library raise
        raise _unloadable(directory, error) from None
    absent = [*report["missing_keys"], *(name for name, *_ in report.get("mismatched_keys", ()))]
    if absent:
        raise UserError(
            f"target {directory}: {sorted(absent)[0]} is absent or of another shape ({len(absent)} "
            "such tensors), and would be made up; copy the target again"
        )
    model = model.to(device_named(device)).eval().requires_grad_(False)
    _check_logits(model, directory)
    return model


@torch.no_grad()
def _check_logits(model: Any, directory: Path) -> None:
    """Refuse a model whose logits are something else than U·(its final states)."""
    parts = parts_of(model)
    settings = model.config.get_text_config()
    for name in _RESCALED:
        if getattr(settings, name, None) not in (None, 1, 1.0):
            raise UserError(
                f"target {directory}: {name} is {getattr(settings, name)!r}, but a draft and its "
                "teacher take logits as head times final state; use another target"
            )
    V = len(parts.head_VH)
    ids_1S = torch.arange(8, device=parts.head_VH.device)[None] * 7919 % min(V, settings.vocab_size)
    final_SH = parts.decoder(input_ids=ids_1S, use_cache=False).last_hidden_state[0]
    logits_SV = model(input_ids=ids_1S, use_cache=False).logits[0].float()
    ours_SV = product(final_SH, parts.head_VH)[:, : logits_SV.shape[1]]
    # A logit rounded to bf16 is off by 2⁻⁹ of itself; sums in another order add less than that.
    if (ours_SV - logits_SV).abs().max() > 2**-7 * logits_SV.abs().max():
        raise UserError(
            f"target {directory}: its logits are not its head times its final states, as a draft "
            "and its teacher would take them; use another target"
        )


def fingerprint(directory: Path) -> str:
    """Return the target's fingerprint of contracts §3.

    A model whose embedding and head have other names than usual gets one over its files' names and
    sizes and its config.
    """
    target = TargetDirectory(directory)
    told = target.text_config
    V, H = told.get("vocab_size"), told.get("hidden_size")
    if type(V) is int and type(H) is int:
        try:
            E = target.embedding(V, H).load()
            U = target.head_rows(torch.arange(V), V, H).load()
        except UserError:
            pass
        else:
            return target_fingerprint(E, U, target.config)
    files = sorted(p for p in directory.iterdir() if p.suffix in (".safetensors", ".bin"))
    listed = [[file.name, file.stat().st_size] for file in files]
    return hashlib.sha256(json.dumps([listed, target.config], sort_keys=True).encode()).hexdigest()


def check_tokenizer(directory: Path, prepared_with: str | None) -> None:
    """Refuse samples that were prepared with another tokenizer than the target's, where it is told.

    Raises DataError.
    """
    own = directory / "tokenizer.json"
    if prepared_with is None or not own.is_file():
        return
    found = tokenizer_fingerprint(own)
    if found != prepared_with:
        raise DataError(
            f"target {directory}: its tokenizer.json (sha256 {found[:12]}) is not the one that the "
            f"samples were prepared with ({prepared_with[:12]}), and their ids mean other tokens. "
            "Prepare them with the target's own."
        )


def _quiet() -> None:
    """Keep progress bars and advice of transformers off the terminal."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
