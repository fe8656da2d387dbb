"""Whether the ranks' parameters are still bitwise equal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from hf_dlion.core.exchange.wire import Wire
from hf_dlion.core.ranks.agreement import Disagreement
from hf_dlion.core.ranks.fingerprint import digest, fingerprints


def compare_replicas(
    named: Sequence[tuple[str, Tensor]], wire: Wire, step: int, places: Sequence[int]
) -> None:
    """Raises on every rank if the parameters of the ranks are not bitwise equal.

    Every rank must call this. Bytes per rank: 8 (N - 1), and if they differ those of a
    `gather_objects` of names and hashes.

    Args:
        named: Names and parameters, frozen ones too; not changed.
        wire: All ranks.
        step: Number of the step that was taken.
        places: By rank, a number that ranks holding the same values share.

    Raises:
        Disagreement: The same on every rank; names the first parameter and the ranks that differ
            from most (of equally many, those with the lowest rank count as most).
    """
    own = fingerprints([param for _, param in named])
    digests = wire.gather_words([digest(own)], "hashes of parameters").view(-1).tolist()
    broken = [
        ranks
        for place in dict.fromkeys(places)
        for ranks in [[rank for rank, own_place in enumerate(places) if own_place == place]]
        if len({digests[rank] for rank in ranks}) > 1
    ]
    if not broken:
        return
    everyone: list[list[int]] = wire.gather_objects(own)
    ranks = broken[0]
    most = Counter(digests[rank] for rank in ranks).most_common(1)[0][0]
    others = [str(rank) for rank in ranks if digests[rank] != most]
    different = [k for k in range(len(own)) if len({everyone[rank][k] for rank in ranks}) > 1]
    raise Disagreement(
        f"replicas differ after step {step} in {len(different)} of {len(own)} parameters, first in "
        f"{named[different[0]][0]!r}, on rank{'s' * (len(others) > 1)} {', '.join(others)}. "
        f"Something changed parameters on some ranks only: code or weights of one rank, another "
        f"kind of device or version of torch, or faulty memory. Resume from an earlier checkpoint"
    )
