"""The parts of a shard on which every rank votes, and those on which some abstain."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from hf_dlion.codec.layout import Run, Shard


def stretches(
    counts: Tensor, shard: Shard, world_size: int
) -> Iterator[tuple[slice, Sequence[Run], bool]]:
    """Yields the words of a shard in stretches, their runs, and whether every rank votes on all.

    That is the usual case, and the quick one. On the CPU parameters with other rows (an embedding
    with unseen tokens) are told apart.

    Args:
        counts: int32, shape (rows,): how many ranks vote on each row.
        shard: Which words and rows these are.
        world_size: Number of ranks.
    """
    runs = shard.runs
    if not runs or bool((counts == world_size).all()):
        yield slice(0, shard.words), runs, True
        return
    if counts.device.type != "cpu":
        yield slice(0, shard.words), runs, False
        return
    rows = np.array([run.row for run in runs])
    whole = np.minimum.reduceat(counts.numpy(), rows) == world_size
    for same, members in itertools.groupby(range(len(runs)), lambda k: bool(whole[k])):
        part = [runs[k] for k in members]
        yield slice(part[0].word, part[-1].word + part[-1].words), part, same
