"""The files that the ranks of a run left in a folder -> the momentum that one rank loads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hf_dlion.momentum_file import CheckpointError, MomentumFile, file_name, read, saved_ranks

# Wrappers put these before a parameter's name, which does not make it another parameter.
_WRAPPER_PREFIXES = ("module.", "_orig_mod.")


def momentum_for(ours: MomentumFile, folder: Path, name: str) -> MomentumFile:
    """Returns this rank's file, or the mean of all files if another number of ranks saved.

    Args:
        ours: The rank, world size, step, names and shapes of the optimizer that loads.
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
        return _checked(ours, folder / file_name(name, ours.rank, ours.world_size))
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
    names = [list(map(_bare, names)) for names in (content.names, ours.names)]
    if all(names) and names[0] != names[1]:
        raise CheckpointError(f"{path} is of other parameters: {_difference(content, ours)}")
    for index, momentum in content.exp_avg.items():
        if list(momentum.shape) != ours.shapes[index]:
            raise CheckpointError(f"{path} is damaged: parameter {index} has {momentum.shape}")
    # A fresh optimizer may load its momentum alone and goes on from the step of the file.
    if ours.steps not in (0, content.steps):
        raise CheckpointError(
            f"{path} was saved after step {content.steps}, the optimizer is at step {ours.steps}; "
            "load the state_dict() that was saved with it first"
        )
    return content


def _mean(ours: MomentumFile, paths: list[Path]) -> MomentumFile:
    # In the order of the ranks, so that every rank gets the same bits.
    total: dict[int, torch.Tensor] = {}
    first: MomentumFile | None = None
    for path in paths:
        content = _checked(ours, path)
        first = first or content
        if content.steps != first.steps:
            raise CheckpointError(
                f"{path} was saved after step {content.steps}, {paths[0]} after step "
                f"{first.steps}: they do not belong together"
            )
        for index, momentum in content.exp_avg.items():
            wide = momentum.to(torch.promote_types(momentum.dtype, torch.float32))
            total[index] = total[index].add_(wide) if index in total else wide.clone()
    assert first is not None
    mean = {index: momentum.div_(len(paths)) for index, momentum in total.items()}
    return replace(first, exp_avg=mean)


def _bare(name: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name


def _difference(saved: MomentumFile, ours: MomentumFile) -> str:
    if len(saved.shapes) != len(ours.shapes):
        return f"it has {len(saved.shapes)}, the optimizer {len(ours.shapes)}"

    def described(content: MomentumFile) -> list[Any]:
        names: list[Any] = list(map(_bare, content.names)) or [""] * len(content.shapes)
        return [f"{name} {tuple(shape)}" for name, shape in zip(names, content.shapes, strict=True)]

    pairs = zip(described(saved), described(ours), strict=True)
    index, (there, here) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
    return f"parameter {index} is {there.strip()} there and {here.strip()} here"
