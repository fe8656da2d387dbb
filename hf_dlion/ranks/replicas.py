"""Whether the ranks' parameters are still bitwise equal, and how they are made so (rule S8)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from itertools import zip_longest

from torch import Tensor

from hf_dlion.exchange import Wire
from hf_dlion.options import OnDivergence
from hf_dlion.options.groups import Groups, flat_params, names_of
from hf_dlion.options.warn_once import warn_once
from hf_dlion.ranks.agreement import Disagreement
from hf_dlion.ranks.fingerprint import digest, fingerprints

# Name, shape and dtype, and hash of a parameter.
Entry = tuple[str, str, int]


def check_replicas(
    groups: Groups,
    wire: Wire,
    step: int,
    on_divergence: OnDivergence,
    near: Collection[int] = (),
    alike: Sequence[Sequence[int]] | None = None,
    twins: Wire | None = None,
) -> None:
    """Compares the parameters of all ranks, and raises or repairs if they are not bitwise equal.

    Every rank must call this at the same point of its program. All parameters of the groups count,
    frozen ones too. The majority are the ranks whose parameters are all equal to those of most;
    of equally many, those with the lowest rank.

    Bytes per rank: 8 * (N - 1). If ranks differ also those of a `gather_objects` of every
    parameter's name, shape and hash, and of a repair (N - 1) times the bytes of the parameters that
    differ, sent by the lowest rank of the majority to the others.

    Args:
        groups: The parameter groups, with this rank's parts of sharded parameters; a repair changes
            parameters in place, and nothing else.
        wire: The process group, of several ranks.
        step: Number of the step that was taken.
        on_divergence: "raise" or "repair".
        near: The ranks of this rank's node.
        alike: Groups of ranks that hold the same parts; None where all ranks hold whole parameters.
        twins: The ranks of this rank's group; None where they are all.

    Raises:
        Disagreement: The same on every rank, if parameters differ and are not to be repaired, or
            cannot be, because they differ in shape or dtype.
    """
    params = flat_params(groups)
    kinds = [f"{tuple(param.shape)} {param.dtype}" for param in params]
    own = list(zip(names_of(groups), kinds, fingerprints(params), strict=True))
    mine = digest([entry[1:] for entry in own])
    digests: list[int] = wire.gather_words([mine], "a hash of parameters").view(-1).tolist()
    columns = alike or [range(wire.world_size)]
    broken = [ranks for ranks in columns if len({digests[rank] for rank in ranks}) > 1]
    if not broken:
        return
    everyone: list[list[Entry]] = wire.gather_objects(own)
    # Ranks that hold other parts may differ, too: all say the same, of the first ones.
    what = _told(step, everyone, digests, broken[0])
    if any(
        len({tuple(kind for _, kind, _ in everyone[rank]) for rank in ranks}) > 1
        for ranks in broken
    ):
        raise Disagreement(f"{what}, in shape or dtype: give every rank the same parameters")
    if on_divergence == "raise":
        raise Disagreement(
            f"{what}. Something changed parameters on some ranks only: code that runs on one rank "
            f"alone, weights loaded there, another kind of device or version of torch, or faulty "
            f"memory. Resume from a checkpoint from before, or set on_divergence='repair' to go "
            f"on with the values of the majority"
        )
    for ranks in broken:
        source = _majority(digests, ranks)[0]
        if wire.rank in ranks:
            for index in _different([everyone[rank] for rank in ranks]):
                place = list(ranks).index(source)
                _overwrite(params[index], twins or wire, place, near=source in near)
    wire.stats.repairs += 1
    source = _majority(digests, broken[0])[0]
    warn_once("repaired replicas", f"{what}; all ranks now have the values of rank {source}")


def _majority(digests: Sequence[int], ranks: Sequence[int]) -> list[int]:
    """Returns those of the ranks whose digests are equal to those of most."""
    return [ranks[place] for place in majority_of([digests[rank] for rank in ranks])]


def majority_of(digests: Sequence[int]) -> list[int]:
    """Returns the ranks with the most frequent digest; of equally many, those of the lowest."""
    # Entries come in the order of the ranks, and the first of equal ones is taken.
    (most, _), *_ = Counter(digests).most_common(1)
    return [rank for rank, value in enumerate(digests) if value == most]


def _different(tables: Sequence[Sequence[Entry]]) -> list[int]:
    """Returns the indices of the parameters that are not the same on all ranks."""
    rows = enumerate(zip_longest(*tables))
    return [
        index
        for index, entries in rows
        if len({None if entry is None else entry[1:] for entry in entries}) > 1
    ]


def _told(
    step: int, everyone: Sequence[Sequence[Entry]], digests: Sequence[int], ranks: Sequence[int]
) -> str:
    """Returns what is wrong among `ranks`, in the same words on every rank."""
    majority = _majority(digests, ranks)
    table, different = everyone[majority[0]], _different([everyone[rank] for rank in ranks])
    others = [rank for rank in ranks if rank not in majority]
    first = different[0]
    name = repr(table[first][0]) if first < len(table) else f"number {first}"
    counts = Counter(digests[rank] for rank in ranks)
    tied = sum(count == len(majority) for count in counts.values()) > 1
    choice = "no majority: those with the lowest rank count" if tied else "the majority"
    return (
        f"replicas differ after step {step} in {len(different)} of {len(table)} parameters, first "
        f"in {name}: {_ranks(others)} from {_ranks(majority)} ({choice})"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _overwrite(param: Tensor, wire: Wire, source: int, *, near: bool) -> None:
    """Replaces a parameter's values by those of another rank, in place."""
    sent = param.detach().contiguous().to(wire.device_for(param.device))
    wire.broadcast(sent, source, near=near)
    if sent.data_ptr() != param.data_ptr():
        param.copy_(sent)
