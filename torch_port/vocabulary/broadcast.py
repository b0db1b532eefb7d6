"""One map for all ranks: rank 0's, or an error on every rank alike.

Writing into the buffers with a collective is seen by no hook, and a rank that refuses alone leaves
the others waiting. Here the map arrives beside the buffers and enters through the one entrance.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from torch_port.errors import UserError
from torch_port.vocabulary.mapping import DraftVocabMappingMixin, buffers_from_kept


def broadcast_vocab_mapping(draft: DraftVocabMappingMixin, source: int = 0) -> None:
    """Install rank `source`'s map on every rank. Every rank must call it.

    One broadcast of V bytes and one all-reduce (bytes and int64: HCCL refuses bools). A draft
    without buffers, which holds no map, takes part in neither. Without a process group there is
    nothing to send, and the map must be installed already.
    Raises UserError on all ranks when `source` has no map, or when any rank holds another one; no
    rank's buffers have changed then.
    """
    if not draft.has_vocab_buffers or not dist.is_initialized():
        draft.require_vocabulary()
        return
    rank, device = dist.get_rank(), draft.vocab_device
    if device.type == "meta":  # refuses below, with the others: alone it would leave them waiting
        device = torch.device("cpu")
    sent_V = torch.zeros(draft.vocab_size, dtype=torch.uint8, device=device)
    problem: UserError | None = None
    if rank == source:
        try:
            sent_V.copy_(draft.exported_vocabulary()["t2d"])
        except UserError as error:
            problem = error
    dist.broadcast(sent_V, source)
    kept_K = sent_V.cpu().nonzero().squeeze(1)
    buffers = buffers_from_kept(kept_K, draft.vocab_size)
    if problem is None and len(kept_K) == 0:
        problem = UserError(f"rank {source} has no vocabulary map installed to give to the others")
    elif problem is None:
        try:
            draft.check_new_map(*buffers)
        except UserError as error:
            problem = error
    refusing = torch.tensor(0 if problem is None else rank + 1, device=device)
    dist.all_reduce(refusing, dist.ReduceOp.MAX)
    if int(refusing) == 0:
        draft.install_vocab_mapping(*buffers)
        return
    if problem is None:
        problem = UserError(
            f"rank {int(refusing) - 1} could not take rank {source}'s vocabulary map of "
            f"{len(kept_K)} ids; its own message says why"
        )
    raise problem
