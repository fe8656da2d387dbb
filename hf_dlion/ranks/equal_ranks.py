"""Warnings about gradients or momenta that are equal on all ranks, a sign of a mistake."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hf_dlion.exchange.wire import Wire
from hf_dlion.ranks.fingerprint import digest, fingerprints

AVERAGED_GRADIENTS = (
    "all ranks have equal gradients. If the model is wrapped in DistributedDataParallel, add "
    "optimizer.attach(ddp_model): DDP still averages gradients, so training is right, but at full "
    "traffic. If it isn't, all ranks train on the same data: check the sampler"
)
COPIED_MOMENTA = (
    "all ranks loaded the same momentum, for example that of rank 0. Each rank has its own: save "
    "it with hf_dlion.save_momentum() and load it with hf_dlion.load_momentum(). Training "
    "continues, and the momenta become different again in about 100 steps"
)


def all_ranks_have(tensors: Sequence[Tensor], voters: Wire, what: str) -> bool:
    """Returns whether all voters hold equal tensors that aren't zero; every voter must call this.

    Bytes per rank: 16 * (N - 1).

    Args:
        tensors: Tensors of this rank, not changed.
        voters: The ranks that vote.
        what: Name of what is gathered, for the message if a rank is lost.
    """
    nonzero = any([bool(tensor.any()) for tensor in tensors])
    table = voters.gather_words([digest(fingerprints(tensors)), int(nonzero)], what).tolist()
    return nonzero and len(table) > 1 and bool(table.count(table[0]) == len(table))
