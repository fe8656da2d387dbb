"""The checkpoint from which all ranks resume: a whole one, and the same one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hf_dlion.checkpoint.momentum_file import CheckpointError
from hf_dlion.checkpoint.whole import (
    Finding,
    checkpoint_names,
    examine,
    judged,
    number_of,
    passed_over,
)
from hf_dlion.ranks.agreement import told

# Gets a value, returns those of all ranks in their order.
Gather = Callable[[Any], list[Any]]
RanksOf = Callable[[int], Iterable[int]]


def agreed_checkpoint(
    gather: Gather,
    rank: int,
    folder: str | os.PathLike[str] | None,
    output_dir: str | os.PathLike[str],
    ranks_of: RanksOf = range,
) -> str | None:
    """Returns a checkpoint that is whole on all ranks, or None where there is none at all.

    Every rank must call it. Rank 0 warns of newer ones that are not whole, and says why.

    Args:
        gather: A collective over the ranks.
        rank: This rank.
        folder: The checkpoint that was asked for, or None for the newest.
        output_dir: Where to look for the newest; may be another folder on another machine.
        ranks_of: As for `examine`.

    Raises:
        CheckpointError: On every rank, if the one that was asked for is not whole on all of them,
            or if there are some and none is.
    """
    # First, because what follows are other collectives for the one than for the other.
    newest = gather(folder is None)
    world_size = len(newest)
    if len(set(newest)) > 1:
        raise CheckpointError("cannot load: some ranks want the newest checkpoint, others name one")
    if folder is not None:
        if problems := _problems_on_ranks(gather, rank, world_size, folder, ranks_of):
            raise CheckpointError(f"cannot load {folder}, it is not whole: {'; '.join(problems)}")
        return os.fspath(folder)
    # The newest that is whole on all of them; a newer one may be on the disk of some ranks only.
    complaints: list[str] = []
    places = [Path(output_dir, name) for name in names_on_ranks(gather, output_dir)]
    for place in places:
        problems = _problems_on_ranks(gather, rank, world_size, place, ranks_of)
        if not problems:
            if complaints and rank == 0:
                warnings.warn("\n".join([*complaints, f"taking {place}"]), stacklevel=2)
            return str(place)
        complaints.append(passed_over(place, problems))
    if complaints:
        half = ", ".join(map(str, places))
        remedy = f"to start anew, delete {half}, or do not resume"
        lines = ["cannot load, no checkpoint is whole", *complaints, remedy]
        raise CheckpointError("\n".join(lines))
    return None


def names_on_ranks(gather: Gather, output_dir: str | os.PathLike[str]) -> list[str]:
    """Returns the names of the checkpoints that any of the ranks sees, the newest first.

    Every rank must call it.

    Raises:
        CheckpointError: On every rank, if one of them cannot look.
    """
    names, failure = [], None
    try:
        names = checkpoint_names(output_dir)
    except Exception as error:  # The others wait for this rank below.
        failure = told(error)
    answers = gather((names, failure))
    failures = [f"rank {rank}: {failure}" for rank, (_, failure) in enumerate(answers) if failure]
    if failures:
        raise CheckpointError("\n".join(["cannot look for checkpoints", *failures]))
    found = sorted({name for names, _ in answers for name in names})  # Alike on all ranks.
    return sorted(found, key=number_of, reverse=True)


def _problems_on_ranks(
    gather: Gather,
    rank: int,
    world_size: int,
    folder: str | os.PathLike[str],
    ranks_of: RanksOf,
) -> list[str]:
    """Returns what is wrong with a checkpoint, of whose files each rank opens its share."""
    try:
        found = examine(Path(folder), ranks_of, lambda saved: saved % world_size == rank)
    except Exception as error:  # The others wait for this rank below.
        found = Finding([told(error)])
    return judged(gather(found))
