"""Comparisons by hashes: parameters must be equal, gradients and momenta must not be."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from hf_dlion.core.fingerprint import fingerprints
from hf_dlion.core.flat import numbers
from hf_dlion.ranks.header import Disagreement, raise_together
from hf_dlion.ranks.wire import Wire, digest

AVERAGED_GRADIENTS = (
    "all ranks have equal gradients. If a model is wrapped in DistributedDataParallel, it still "
    "averages them, at full traffic: add optimizer.attach(ddp_model), with Accelerate "
    "hf_dlion.accelerate.attach(accelerator, model), and with Trainer call hf_dlion.register() "
    "first. If none is, all ranks train on the same data: check the sampler"
)
CHANGED_PARAMETERS = (
    "Something changed parameters on some ranks only: code that runs on one rank or uses its "
    "gradients (as AdaLoRA does), weights loaded there, nn.Embedding(max_norm=...), another type "
    "of device or version of torch, or faulty memory. Remove the cause, and resume from an earlier "
    "checkpoint"
)
COPIED_MOMENTA = (
    "all ranks loaded the same momentum, which is right after optimizer.synchronize_momentum(). "
    "Otherwise, save each rank's own with hf_dlion.save_momentum() and load it with "
    "hf_dlion.load_momentum() after optimizer.load_state_dict(), which replaces it. Training "
    "continues, and the momenta become different again in about 50 steps"
)


def all_ranks_have(tensors: Sequence[Tensor], voters: Wire, what: str) -> bool:
    """Returns whether all voters hold equal tensors that aren't zero; every voter must call this.

    Bytes per rank: 16 * (N - 1).
    """
    nonzero = any(numbers([tensor.any() for tensor in tensors]))
    table = voters.gather_words([digest(fingerprints(tensors)), int(nonzero)], what).tolist()
    return nonzero and len(table) > 1 and bool(table.count(table[0]) == len(table))


def compare_parameters(
    named: Callable[[], Sequence[tuple[str, Tensor]]],
    wire: Wire,
    same_parts: Sequence[Sequence[int]],
    remedy: str,
    *,
    when: str = "",
) -> None:
    """Verifies that parameters are bitwise equal; every rank must call this.

    `named` returns names and parameters, frozen ones included, with this rank's parts of sharded
    ones. `same_parts` has the groups of ranks that hold the same parts. Bytes per rank: 16 (N - 1),
    and a `gather_objects` of all names and hashes if ranks differ.

    Raises:
        Disagreement: On every rank, with the first parameter that differs and the ranks in the
            minority.
    """
    entries: list[tuple[str, str, int]] = []
    failure = None
    try:
        pairs = named()
        values = fingerprints([param for _, param in pairs])
        for (name, param), value in zip(pairs, values, strict=True):
            entries.append((name, f"{tuple(param.shape)} {param.dtype}", value))
    except Exception as error:  # The other ranks wait for a hash.
        failure = error
    words = [failure is not None, digest(entries)]
    failed, hashes = wire.gather_words(words, "a hash of parameters").t().tolist()
    if any(failed):
        raise_together(failure, wire, "the comparison of parameters")
    different = [ranks for ranks in same_parts if len({hashes[rank] for rank in ranks}) > 1]
    if different:
        # Several groups may differ. Every rank describes the first one.
        ranks, tables = different[0], wire.gather_objects(entries)
        difference = _difference(ranks, [tables[rank] for rank in ranks], wire)
        raise Disagreement(f"replicas differ{when} in {difference}. {remedy}")


def _difference(ranks: Sequence[int], tables: Sequence[Sequence[Any]], wire: Wire) -> str:
    texts = [repr(table) for table in tables]
    counts = Counter(texts).most_common()
    most, count = counts[0]  # If two are equally frequent, the one of the lowest rank.
    majority = [rank for rank, text in zip(ranks, texts, strict=True) if text == most]
    minority = [rank for rank in ranks if rank not in majority]
    tied = len(counts) > 1 and counts[1][1] == count
    length = max(map(len, tables))
    padded = [[*table, *[None] * (length - len(table))] for table in tables]
    rows = zip(*padded, strict=True)
    different = [row for row in rows if any(entry != row[0] for entry in row)]
    first = next(entry for entry in different[0] if entry is not None)
    return (
        f"{len(different)} of {length} parameters, first in {first[0]!r}: {wire.named(minority)} "
        f"from {wire.named(majority)} ({'no majority' if tied else 'the majority'})"
    )
