"""The vocabulary buffers of a draft: t2d and d2t, their one entrance and what follows from them.

Shape suffixes: V target ids, K draft ids, H hidden size.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from torch_port.errors import UserError

PRUNED = -100  # what the index says of a target id that no draft id stands for


def buffers_from_kept(kept_K: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
    """Make (t2d bool [V], d2t int64 [K]) of ascending kept target ids [K] (spec sheet §2).

    >>> t2d, d2t = buffers_from_kept(torch.tensor([0, 3, 4]), 6)
    >>> d2t.tolist()
    [0, 2, 2]
    """
    kept_K = kept_K.to(torch.int64)
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool)
    t2d_V[kept_K] = True
    return t2d_V, kept_K - torch.arange(len(kept_K))


def check_map(t2d_V: Tensor, d2t_K: Tensor, vocab_size: int, draft_vocab_size: int) -> None:
    """Refuse a map whose sizes, dtypes or invariant are off.

    The invariant: nonzero(t2d) equals arange(K) + d2t. From it follow K distinct ids in [0, V).
    Raises UserError, naming what was expected and what came. Source: spec sheet §2, contracts §1.
    """
    if draft_vocab_size < 1:
        raise UserError(
            "vocabulary map: it keeps no id at all; build it again with K of at least 1"
        )
    for name, tensor, dtype, size in (
        ("t2d", t2d_V, torch.bool, vocab_size),
        ("d2t", d2t_K, torch.int64, draft_vocab_size),
    ):
        if tensor.dtype != dtype or tensor.shape != (size,):
            raise UserError(
                f"vocabulary map: {name} must be {dtype} of shape [{size}], not {tensor.dtype} of "
                f"shape {list(tensor.shape)}; is it the map of another draft_vocab_size or target?"
            )
    kept = t2d_V.cpu().nonzero().squeeze(1)
    if not torch.equal(kept, torch.arange(draft_vocab_size) + d2t_K.cpu()):
        raise UserError(
            "vocabulary map: nonzero(t2d) must equal arange(K) + d2t. d2t holds offsets, not "
            f"absolute ids: t2d keeps {len(kept)} ids, d2t names {len(d2t_K)}, and they differ; "
            "build the map again from the token counts"
        )


def describe_map(t2d_V: Tensor) -> str:
    """Name a selection shortly for an error: how many ids, the first ones, and a digest."""
    kept = t2d_V.cpu().nonzero().squeeze(1)
    digest = hashlib.sha256(kept.numpy().tobytes()).hexdigest()[:12]
    return f"{len(kept)} ids starting {kept[:5].tolist()}, sha256 {digest}"


class DraftVocabMappingMixin(nn.Module):
    """Owns t2d and d2t for a draft: registration, installation, checks and the load path.

    Buffers exist only when the draft prunes, so an unpruned state dict keeps its exact key set.
    Installed state is derived from the buffer (any t2d set), because buffers also arrive through
    `load_state_dict`, which calls no method of ours. Source: contracts §1.
    """

    vocab_size: int
    draft_vocab_size: int
    t2d: Tensor
    d2t: Tensor

    def register_vocab_buffers(self, vocab_size: int, draft_vocab_size: int) -> None:
        """Register the buffers, not installed, when K < V. Call once, from the draft's __init__."""
        self.vocab_size, self.draft_vocab_size = vocab_size, draft_vocab_size
        self._kept_ids: Tensor | None = None
        self._pruned_ids: Tensor | None = None
        self._index: Tensor | None = None
        self._head: tuple[Tensor, Tensor] | None = None
        if self.prunes_vocabulary:
            self.register_buffer("t2d", torch.zeros(vocab_size, dtype=torch.bool))
            self.register_buffer("d2t", torch.zeros(draft_vocab_size, dtype=torch.int64))
            self.register_load_state_dict_pre_hook(_refuse_other_map)
            self.register_load_state_dict_post_hook(_after_load)

    @property
    def prunes_vocabulary(self) -> bool:
        """True when K < V."""
        return self.draft_vocab_size < self.vocab_size

    def install_vocab_mapping(self, t2d_V: Tensor, d2t_K: Tensor) -> None:
        """Install a map: the one entrance for every producer.

        Arguments: `t2d_V` bool [V]; `d2t_K` int64 [K].
        Raises UserError when the draft does not prune, when the map is malformed, or when another
        map is installed already (its head rows would silently come to mean other tokens).
        """
        if not self.prunes_vocabulary:
            raise UserError(
                f"a vocabulary map was given, but draft_vocab_size is {self.draft_vocab_size}, all "
                "of the target's; set draft_vocab_size below vocab_size or give no map"
            )
        check_map(t2d_V, d2t_K, self.vocab_size, self.draft_vocab_size)
        self._refuse_conflict(t2d_V)
        self.t2d.copy_(t2d_V)
        self.d2t.copy_(d2t_K)
        self.vocabulary_changed()

    def vocabulary_changed(self) -> None:
        """Forget what was derived from the buffers. Call after a broadcast or a sharded load."""
        self._kept_ids = self._pruned_ids = self._index = self._head = None

    def _refuse_conflict(self, t2d_V: Tensor) -> None:
        if bool(self.t2d.any()) and not torch.equal(self.t2d.cpu(), t2d_V.cpu()):
            raise UserError(
                f"another vocabulary map is installed: {describe_map(self.t2d)}; the new one has "
                f"{describe_map(t2d_V)}. Every row of the trained head would come to mean another "
                "token: keep the installed map, or start a new draft"
            )

    @torch.inference_mode(False)  # kept beyond the call
    def kept_target_ids(self) -> Tensor:
        """Return the target id of each draft id, int64 [K] (read on the host once per change).

        Raises UserError before a map is installed.
        """
        if self._kept_ids is None:
            device = self.vocab_device
            if not self.prunes_vocabulary:
                self._kept_ids = torch.arange(self.vocab_size, device=device)
            elif not bool(self.t2d.any()):
                raise UserError(
                    f"this draft prunes to draft_vocab_size {self.draft_vocab_size}, but no "
                    "vocabulary map is installed; call install_vocab_mapping or load a checkpoint"
                )
            else:
                check_map(self.t2d, self.d2t, self.vocab_size, self.draft_vocab_size)
                self._kept_ids = torch.arange(self.draft_vocab_size, device=device) + self.d2t
        return self._kept_ids

    @torch.inference_mode(False)  # kept beyond the call
    def pruned_target_ids(self) -> Tensor:
        """Return the target ids that no draft id stands for, ascending, int64 [V − K]."""
        if self._pruned_ids is None:
            index = self.draft_vocab_index().cpu()
            self._pruned_ids = (index == PRUNED).nonzero().squeeze(1).to(self.vocab_device)
        return self._pruned_ids

    @property
    def vocab_device(self) -> torch.device:
        """Where the derived tables live: with the draft's parameters."""
        return next(self.parameters()).device

    @torch.inference_mode(False)  # kept beyond the call
    def draft_vocab_index(self) -> Tensor:
        """Return the draft id of each target id, int64 [V]; −100 where it was pruned."""
        kept = self.kept_target_ids()
        if self._index is None:
            index = torch.full((self.vocab_size,), PRUNED, device=kept.device)
            self._index = index.scatter(0, kept, torch.arange(len(kept), device=kept.device))
        return self._index

    @torch.inference_mode(False)  # kept beyond the call
    def draft_head(self, lm_head_VH: Tensor) -> Tensor:
        """Return U_K [K, H], the rows of the frozen target head that the draft keeps.

        Sliced once per map and head; an unpruned draft gets the head itself.
        """
        kept = self.kept_target_ids()
        if not self.prunes_vocabulary:
            return lm_head_VH
        if self._head is None or self._head[0] is not lm_head_VH:
            self._head = (lm_head_VH, lm_head_VH.index_select(0, kept))
        return self._head[1]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        # .to(device) moves the buffers; what was derived from them must follow.
        result = super()._apply(fn, recurse)
        self.vocabulary_changed()
        return result


def _refuse_other_map(
    module: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: object
) -> None:
    assert isinstance(module, DraftVocabMappingMixin)
    arriving = {name: state_dict.get(prefix + name) for name in ("t2d", "d2t")}
    t2d, d2t = arriving["t2d"], arriving["d2t"]
    if t2d is None or d2t is None:
        return  # load_state_dict itself reports missing keys
    if not (bool(t2d.any()) or bool(d2t.any()) or bool(module.t2d.any())):
        return  # a checkpoint of a draft that never had a map; use raises later
    check_map(t2d, d2t, module.vocab_size, module.draft_vocab_size)
    module._refuse_conflict(t2d)


def _after_load(module: nn.Module, _: object) -> None:
    assert isinstance(module, DraftVocabMappingMixin)
    module.vocabulary_changed()
