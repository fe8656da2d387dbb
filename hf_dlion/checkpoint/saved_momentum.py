"""The files that the ranks of a run left in a folder -> the momentum that one rank loads."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_dlion.checkpoint.momentum_file import (
    CheckpointError,
    MomentumFile,
    file_name,
    read,
    saved_ranks,
)
from hf_dlion.momentum.shares import assemble
from hf_dlion.options.naming import bare


def momentum_for(ours: MomentumFile, folder: Path, name: str) -> MomentumFile:
    """Returns this rank's file, or the mean of all files if other ranks or other nodes saved.

    Where nodes voted, the shares of each node's ranks are put together, and the mean is that over
    the nodes. A mean has no `ranges`, whatever its `members` say.

    Args:
        ours: The rank, world size, nodes, step, names and shapes of the optimizer that loads.
        folder: Where the files are.
        name: How their names start.

    Raises:
        CheckpointError: If a file is missing, damaged, or does not belong to this optimizer.
    """
    saved = saved_ranks(folder, name)
    if not saved:
        raise CheckpointError(
            f"there is no {file_name(name, ours.rank, ours.world_size)} in {folder}: "
            "the momenta of the ranks were not saved there"
        )
    if ours.world_size in saved:
        own = _checked(ours, folder / file_name(name, ours.rank, ours.world_size))
        if own.members == ours.members:
            return own
        saved = {ours.world_size: saved[ours.world_size]}
    if len(saved) > 1:
        raise CheckpointError(
            f"{folder} holds the momenta of runs with {sorted(saved)} ranks; remove all but one"
        )
    return _mean(ours, [folder / file_name(name, rank, *saved) for rank in range(*saved)])


def _checked(ours: MomentumFile, path: Path) -> MomentumFile:
    content = read(path)
    rank, world_size = content.rank, content.world_size
    if not path.name.endswith(file_name("", rank, world_size)):
        raise CheckpointError(f"{path} holds the momentum of rank {rank} of {world_size}: renamed?")
    if content.shapes != ours.shapes:
        raise CheckpointError(f"{path} is of other parameters: {_difference(content, ours)}")
    names = [list(map(bare, names)) for names in (content.names, ours.names)]
    if all(names) and names[0] != names[1]:
        raise CheckpointError(f"{path} is of other parameters: {_difference(content, ours)}")
    for index, momentum in content.exp_avg.items():
        shape = ours.shapes[index]
        if index in content.ranges:
            start, stop = content.ranges[index]
            shape = [stop - start] if 0 <= start <= stop <= math.prod(shape) else []
        if list(momentum.shape) != shape:
            raise CheckpointError(f"{path} is damaged: parameter {index} has {momentum.shape}")
    # A fresh optimizer may load its momentum alone and goes on from the step of the file.
    if ours.steps not in (0, content.steps):
        raise CheckpointError(
            f"{path} was saved after step {content.steps}, the optimizer is at step {ours.steps}; "
            "load the state_dict() that was saved with it first"
        )
    return content


def _mean(ours: MomentumFile, paths: list[Path]) -> MomentumFile:
    first = _checked(ours, paths[0])
    nodes = first.members or [[rank] for rank in range(len(paths))]
    if sorted(rank for ranks in nodes for rank in ranks) != list(range(len(paths))):
        raise CheckpointError(f"{paths[0]} is damaged: its nodes are {first.members}")
    # In the order of the ranks, so that every rank gets the same bits.
    total: dict[int, torch.Tensor] = {}
    for ranks in nodes:
        for index, momentum in _whole_of([paths[rank] for rank in ranks], first, ours).items():
            wide = momentum.to(torch.promote_types(momentum.dtype, torch.float32))
            total[index] = total[index].add_(wide) if index in total else wide.clone()
    mean = {index: momentum.div_(len(nodes)) for index, momentum in total.items()}
    return replace(first, exp_avg=mean, ranges={}, scaler=None)


def _whole_of(
    paths: list[Path], first: MomentumFile, ours: MomentumFile
) -> dict[int, torch.Tensor]:
    """Returns a node's momenta, put together from the files of its ranks."""
    pieces: dict[int, list[tuple[tuple[int, int], torch.Tensor]]] = {}
    for path in paths:
        content = _checked(ours, path)
        if (content.steps, content.members) != (first.steps, first.members):
            raise CheckpointError(
                f"{path} was saved after step {content.steps} by nodes {content.members}, the "
                f"file of rank {first.rank} after step {first.steps} by nodes {first.members}: "
                f"they do not belong together"
            )
        for index, momentum in content.exp_avg.items():
            start, stop = content.ranges.get(index, (0, momentum.numel()))
            pieces.setdefault(index, []).append(((start, stop), momentum))
    found = {}
    for index, parts in pieces.items():
        shape = ours.shapes[index]
        whole, gap = assemble(parts, math.prod(shape))
        if gap:
            raise CheckpointError(
                f"{paths[0]} and its node's other files lack a part of the momentum of parameter "
                f"{index}"
            )
        found[index] = whole.view(shape)
    return found


def _difference(saved: MomentumFile, ours: MomentumFile) -> str:
    if len(saved.shapes) != len(ours.shapes):
        return f"it has {len(saved.shapes)}, the optimizer {len(ours.shapes)}"

    def described(content: MomentumFile) -> list[Any]:
        names: list[Any] = list(map(bare, content.names)) or [""] * len(content.shapes)
        return [f"{name} {tuple(shape)}" for name, shape in zip(names, content.shapes, strict=True)]

    pairs = zip(described(saved), described(ours), strict=True)
    index, (there, here) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"parameter {index} is {there.strip()} there and {here.strip()} here"
