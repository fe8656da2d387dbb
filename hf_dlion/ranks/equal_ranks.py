"""Warnings if all ranks hold equal gradients or momenta: training is correct, but not as meant."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from hf_dlion.exchange.wire import Wire
from hf_dlion.ranks.fingerprint import digest, fingerprints


def warn_of_averaged_gradients(grads: Sequence[Tensor], voters: Wire, rank: int) -> None:
    """Warns on rank 0 if all ranks have the same gradients; every rank must call this.

    Bytes per rank: 16 * (N - 1).

    Args:
        grads: Of this rank.
        voters: The ranks that vote.
        rank: Of all ranks, this one.
    """
    if _all_equal(grads, voters, "hashes of gradients") and rank == 0:
        warnings.warn(
            "all ranks have equal gradients. If the model is wrapped in DistributedDataParallel, "
            "add optimizer.attach(ddp_model): DDP still averages gradients, so training is right, "
            "but at full traffic. If it isn't, all ranks train on the same data: check the sampler",
            stacklevel=6,
        )


def warn_of_copied_momenta(momenta: Sequence[Tensor], voters: Wire, rank: int) -> None:
    """Warns on rank 0 if all ranks loaded the same momenta; every rank must call this.

    Bytes per rank: 16 * (N - 1).

    Args:
        momenta: Of this rank.
        voters: The ranks that vote.
        rank: Of all ranks, this one.
    """
    if _all_equal(momenta, voters, "hashes of momenta") and rank == 0:
        warnings.warn(
            "all ranks loaded the same momentum, for example that of rank 0. Each rank has its "
            "own: save it with hf_dlion.save_momentum() and load it with hf_dlion.load_momentum(). "
            "Training continues, and the momenta become different again in about 100 steps",
            stacklevel=6,
        )


def _all_equal(tensors: Sequence[Tensor], voters: Wire, what: str) -> bool:
    """Returns whether all ranks have equal tensors that are not all zeros."""
    some = any([bool(tensor.any()) for tensor in tensors])
    table = voters.gather_words([digest(fingerprints(tensors)), int(some)], what).tolist()
    return some and len(table) > 1 and bool(table.count(table[0]) == len(table))
