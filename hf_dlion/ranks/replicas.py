"""Whether the parameters of all ranks are still bitwise equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor

from hf_dlion.exchange.wire import Wire, named_ranks
from hf_dlion.ranks.agreement import Disagreement, raise_together
from hf_dlion.ranks.fingerprint import digest, fingerprints

# Name, shape and dtype, and hash of a parameter.
Entry = tuple[str, str, int]


def hashed(named_params: Iterable[tuple[str, Tensor]]) -> list[Entry]:
    """Returns name, shape and dtype, and a hash of the bits of every parameter.

    Args:
        named_params: Names and parameters, with this rank's parts of sharded ones; not changed.
    """
    pairs = list(named_params)
    hashes = fingerprints([param for _, param in pairs])
    return [
        (name, f"{tuple(param.shape)} {param.dtype}", value)
        for (name, param), value in zip(pairs, hashes, strict=True)
    ]


def compare_replicas(
    named_params: Iterable[tuple[str, Tensor]],
    wire: Wire,
    step: int,
    alike: Sequence[Sequence[int]] | None = None,
) -> None:
    """Raises on every rank if parameters are not bitwise equal; every rank must call this.

    Bytes per rank: 16 * (N - 1); if ranks differ, a `gather_objects` of every parameter's entry
    more.

    Args:
        named_params: Names and parameters, frozen ones included, with this rank's parts of sharded
            ones; not changed.
        wire: All ranks.
        step: Number of the step that was taken.
        alike: Groups of ranks that hold the same parts (default: all ranks hold whole parameters).

    Raises:
        Disagreement: The same on every rank, naming the first parameter that differs and the ranks
            in the minority.
    """
    entries, failure = [], None
    try:
        entries = hashed(named_params)
    except Exception as error:  # The other ranks wait for a hash.
        failure = error
    words = [failure is not None, digest(entries)]
    failed, digests = wire.gather_words(words, "a hash of parameters").t().tolist()
    if any(failed):
        raise_together(failure, wire, "the comparison of replicas")
    columns = alike or [range(wire.world_size)]
    broken = [ranks for ranks in columns if len({digests[rank] for rank in ranks}) > 1]
    if not broken:
        return
    # Several columns may differ: every rank describes the first one.
    ranks, tables = broken[0], wire.gather_objects(entries)
    raise Disagreement(
        f"{_difference(step, ranks, [tables[rank] for rank in ranks])}. Something changed "
        f"parameters on some ranks only: code that runs on one rank, weights loaded there, another "
        f"type of device or version of torch, or faulty memory. Resume from an earlier checkpoint"
    )


def _difference(step: int, ranks: Sequence[int], tables: Sequence[Sequence[Entry]]) -> str:
    texts = [repr(table) for table in tables]
    counts = Counter(texts).most_common()
    most, count = counts[0]  # Of equally many ranks, those with the lowest rank.
    majority = [rank for rank, text in zip(ranks, texts, strict=True) if text == most]
    minority = [rank for rank in ranks if rank not in majority]
    tied = len(counts) > 1 and counts[1][1] == count
    length = max(map(len, tables))
    padded = [[*table, *[None] * (length - len(table))] for table in tables]
    different = [own for own in zip(*padded, strict=True) if any(e != own[0] for e in own)]
    first = next(entry for entry in different[0] if entry is not None)
    return (
        f"replicas differ after step {step} in {len(different)} of {length} parameters, first in "
        f"{first[0]!r}: {named_ranks(minority)} from {named_ranks(majority)} "
        f"({'no majority' if tied else 'the majority'})"
    )
