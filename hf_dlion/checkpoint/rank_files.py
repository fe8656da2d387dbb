"""A momentum per rank, saved and loaded.

Training loops save rank 0's `optimizer.state_dict()` and give it to every rank when they load. The
parameters are the same everywhere, the momenta are not: each rank has its own. So every rank saves
its momentum beside that file, and loads it after it:

    every rank:  save_momentum(optimizer, folder)      rank 0:      torch.save(state_dict)
    every rank:  optimizer.load_state_dict(...)        then:        load_momentum(optimizer, folder)

`hf_dlion.register()` does this inside Trainer and `hf_dlion.accelerate.attach` inside Accelerate.
The way without files is `optimizer.synchronize_momentum()` before `state_dict()`.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from hf_dlion.checkpoint import momentum_file
from hf_dlion.checkpoint.access import (
    gather_objects,
    held_momenta,
    nodes_of,
    part_ranges,
    shares_of,
    unwrap,
)
from hf_dlion.checkpoint.momentum_file import MOMENTUM_NAME, CheckpointError, MomentumFile
from hf_dlion.momentum.part_states import momentum_of_part
from hf_dlion.momentum.shares import assemble
from hf_dlion.momentum.state_dict import COLLECTED
from hf_dlion.optimizer import DistributedLion
from hf_dlion.options.naming import bare
from hf_dlion.options.parts import is_sharded
from hf_dlion.options.warn_once import kept_back
from hf_dlion.ranks.agreement import told


def save_momentum(
    optimizer: object,
    folder: str | os.PathLike[str],
    *,
    name: str = MOMENTUM_NAME,
    scaler: torch.amp.GradScaler | None = None,
) -> Path:
    """Writes this rank's momentum to a file of its own in `folder`; returns its path.

    Every rank calls it, after the same step, but none waits for another: no collective. Files that
    a run of another world size left in `folder` under the same name are removed.

    Args:
        optimizer: A DistributedLion, or Accelerate's wrapper around one.
        folder: Created if it does not exist.
        name: How the file's name starts: give each of several optimizers its own.
        scaler: Its state is saved along; it differs between ranks.

    Raises:
        TypeError: If `optimizer` is another optimizer.
        OSError: If the file cannot be written.
        RuntimeError: If parameters are sharded, torch loaded their momenta, and no step came since.
    """
    lion = unwrap(optimizer)
    shares = shares_of(lion)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    remove_momentum(folder, name=name, keep_world_size=lion.world_size)
    path = folder / momentum_file.file_name(name, lion.rank, lion.world_size)
    exp_avg = {index: _own_storage(momentum) for index, momentum in held_momenta(lion).items()}
    content = replace(
        _identity(lion),
        **shares,
        exp_avg=exp_avg,
        scaler=scaler.state_dict() if scaler is not None else None,
    )
    momentum_file.write(path, content)
    return path


def remove_momentum(
    folder: str | os.PathLike[str],
    *,
    name: str = MOMENTUM_NAME,
    keep_world_size: int | None = None,
) -> None:
    """Removes the momentum files in `folder`, except those of a run of `keep_world_size` ranks."""
    for world_size, ranks in momentum_file.saved_ranks(Path(folder), name).items():
        if world_size != keep_world_size:
            for rank in ranks:
                # Several ranks may do this at the same time.
                Path(folder, momentum_file.file_name(name, rank, world_size)).unlink(True)


def load_momentum(
    optimizer: object,
    folder: str | os.PathLike[str],
    *,
    name: str = MOMENTUM_NAME,
    failure: BaseException | None = None,
) -> dict[str, Any] | None:
    """Loads this rank's momentum from `folder`, after `optimizer.load_state_dict`.

    Every rank must call it: the ranks agree that all of them can load before one of them changes
    anything (one small all_gather_object on the optimizer's process group). With as many ranks as
    saved, and the same nodes where nodes vote, each takes its own file, bit for bit. Otherwise
    every rank takes the mean of all files, or nodes, added in float32 in the order of the ranks,
    and rank 0 warns.

    Args:
        optimizer: A DistributedLion, or Accelerate's wrapper around one.
        folder: Where `save_momentum` wrote.
        name: As given to `save_momentum`.
        failure: What already went wrong on this rank, so the others learn of it here instead
            of waiting for it somewhere else.

    Returns:
        The state of this rank's GradScaler, if it was saved along by as many ranks.

    Raises:
        TypeError: If `optimizer` is another optimizer.
        CheckpointError: On every rank, if a file that one of them needs is missing, damaged, from
            another step or of other parameters. Nothing has changed then.
    """
    lion = unwrap(optimizer)
    content, problem = None, failure
    ours = replace(_identity(lion), members=nodes_of(lion), ranges=part_ranges(lion))
    if problem is None:
        try:
            content = _momentum_for(ours, Path(folder), name)
        except Exception as error:  # Whatever it is, the other ranks wait for this one below.
            problem = error
    _agree(lion, problem, found=content and (content.world_size, content.steps))
    assert content is not None
    if not _is_own(content, ours) and lion.rank == 0:
        warnings.warn(
            f"{folder} was saved by {_voters(content)} and is loaded by {_voters(ours)}: "
            "every rank continues with the mean of the saved momenta, so this run is not the "
            "continuation, bit for bit, of the saved one",
            stacklevel=2,
        )
    _apply(lion, content)
    return content.scaler


def _is_own(content: MomentumFile, ours: MomentumFile) -> bool:
    """Returns whether a file, or the mean of all, holds what this rank and its voter go on with."""
    same = (content.world_size, content.members) == (ours.world_size, ours.members)
    # Of sharded parameters other stretches than a node's ranks share out.
    parts = ours.ranges.keys() & content.exp_avg.keys()
    return same and all(content.ranges.get(index) == ours.ranges[index] for index in parts)


def _voters(content: MomentumFile) -> str:
    nodes = f" on the nodes {content.members}" if content.members else ""
    return f"{content.world_size} ranks{nodes}"


def resume_momentum(
    lion: DistributedLion,
    folder: str | os.PathLike[str],
    state_names: Sequence[str],
    *,
    name: str = MOMENTUM_NAME,
    loaded: Loaded | None = None,
) -> dict[str, Any] | None:
    """Does what a training loop needs after every rank loaded the optimizer's state that is common.

    That is `load_momentum` from the same folder, unless the state holds a momentum that all ranks
    had in common (checkpoint="mean"), or there is none. Every rank must call it.

    Args:
        lion: The optimizer.
        folder: The checkpoint.
        state_names: What rank 0's `optimizer.state_dict()` may be called there, or the folder of a
            distributed checkpoint of it; none need exist.
        name: As given to `save_momentum`.
        loaded: From `load_common`.

    Returns:
        As `load_momentum`.

    Raises:
        CheckpointError: On every rank, as `load_momentum`, or if rank 0's momentum alone was saved.
    """
    folder, loaded = Path(folder), loaded or Loaded()
    failure: BaseException | None = loaded.failure
    if momentum_file.saved_ranks(folder, name):
        return load_momentum(lion, folder, name=name, failure=failure)
    held = [folder / state for state in state_names if (folder / state).exists()]
    try:
        if failure is None and held:
            _check_common(lion, held[0], loaded)
    except Exception as error:  # As in load_momentum.
        failure = error
    _agree(lion, failure, found=bool(held))
    if not held and lion.rank == 0:
        warnings.warn(
            f"{folder} holds no optimizer state (save_only_model?): the momentum starts at zero",
            stacklevel=2,
        )
    return None


@dataclass(frozen=True)
class Loaded:
    """How a loop's own loading of the state that is common to the ranks ended on this rank.

    Attributes:
        failure: What it raised, or None.
        of_one_rank: Whether the momenta came from a distributed checkpoint, from one rank for all.
    """

    failure: Exception | None = None
    of_one_rank: bool = False


def load_common(load: Callable[[], object], *, at_once: bool = False) -> Loaded:
    """Calls a loop's own loading and returns how it ended, for `resume_momentum`.

    A rank that simply raised would leave the others waiting for it.

    Args:
        load: The loading.
        at_once: Let what fails be raised at once: the ranks wait for one another inside, and one
            that came out of it alone would meet none of them.
    """
    with kept_back(COLLECTED) as warned:
        try:
            load()
        except Exception as error:
            if at_once:
                raise
            return Loaded(failure=error)
    return Loaded(of_one_rank=bool(warned))


def _check_common(lion: DistributedLion, state: Path, loaded: Loaded) -> None:
    """Checks that the state in a checkpoint holds a momentum that all ranks had in common."""
    common = not loaded.of_one_rank
    if state.is_file():
        saved = torch.load(state, map_location="cpu", mmap=True, weights_only=True)
        # torch's distributed states have our entry in their groups.
        places = (saved, *saved.get("param_groups", ()))
        own: dict[str, Any] = next((place["dlion"] for place in places if "dlion" in place), {})
        # No rank is named where the ranks averaged their momenta before.
        common = own.get("rank", 0) is None or (common and lion.options.checkpoint == "mean")
    if not common:
        raise CheckpointError(
            f"{state.parent} holds rank 0's optimizer state, but no momentum of any rank: it "
            "was saved without hf_dlion.register() or hf_dlion.accelerate.attach(). Resume from "
            f"another checkpoint, or delete {state.name} there to start with zero momentum"
        )


def _agree(lion: DistributedLion, problem: BaseException | None, *, found: object) -> None:
    """Raises on every rank if one of them has a problem, or if they found different things."""
    if lion.world_size == 1:
        if problem is not None:
            raise problem
        return
    text = None
    if problem is not None:
        text = str(problem) if isinstance(problem, CheckpointError) else told(problem)
    answers = gather_objects(lion, (text, found))
    problems = [f"rank {rank}: {said}" for rank, (said, _) in enumerate(answers) if said]
    if problems:
        raise CheckpointError("\n".join(["cannot load", *problems])) from problem
    if any(other != found for _, other in answers):
        raise CheckpointError(
            "cannot load: the ranks see different checkpoints, by rank "
            f"{[other for _, other in answers]}; give every rank the same files"
        )


def _parameters(lion: DistributedLion) -> list[torch.Tensor]:
    return [p for group in lion.param_groups for p in group["params"]]


def _identity(lion: DistributedLion) -> MomentumFile:
    """Returns what this rank's file would hold, without the momenta."""
    parameters = _parameters(lion)
    names = [name for group in lion.param_groups for name in group.get("param_names", ())]
    return MomentumFile(
        rank=lion.rank,
        world_size=lion.world_size,
        steps=lion.steps,
        names=names if len(names) == len(parameters) else [],
        shapes=[list(p.shape) for p in parameters],
    )


def _own_storage(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu()
    # torch.save writes the whole storage that a view looks at.
    return tensor.clone() if tensor.untyped_storage().nbytes() > tensor.nbytes else tensor


def _apply(lion: DistributedLion, content: MomentumFile) -> None:
    """Gives the optimizer the momenta, by way of a state dict, whose checks they pass too."""
    parameters = _parameters(lion)
    dtypes = {
        index: lion.options.momentum_dtype or parameters[index].dtype for index in content.exp_avg
    }
    state = lion.state_dict()
    # A subclass's entries beside the momentum stay.
    state["state"] = {
        index: {
            **state["state"].get(index, {}),
            "exp_avg": _held_of(parameters[index], momentum.to(dtypes[index])),
        }
        for index, momentum in content.exp_avg.items()
    }
    state["dlion"] = {**state["dlion"], "steps": content.steps, "rank": lion.rank, "shard": None}
    # A part of a sharded parameter's momentum is no share: the state holds it as a DTensor.
    shared = {i: held for i, held in content.ranges.items() if not is_sharded(parameters[i])}
    if shared:
        state["dlion"]["shard"] = {"members": content.members, "ranges": shared}
    lion.load_state_dict(state)


def _held_of(param: torch.Tensor, momentum: torch.Tensor) -> torch.Tensor:
    if not is_sharded(param):
        return momentum
    return momentum_of_part(param, momentum.to(param.device))


def _momentum_for(ours: MomentumFile, folder: Path, name: str) -> MomentumFile:
    """Returns this rank's file, or the mean of all files if other ranks or other nodes saved.

    Where nodes voted, the shares of each node's ranks are put together, and the mean is that over
    the nodes. A mean has no `ranges`, whatever its `members` say.

    Args:
        ours: The rank, world size, nodes or replicas, parts, step, names and shapes of the
            optimizer that loads.
        folder: Where the files are.
        name: How their names start.

    Raises:
        CheckpointError: If a file is missing, damaged, or does not belong to this optimizer.
    """
    saved = momentum_file.saved_ranks(folder, name)
    if not saved:
        raise CheckpointError(
            f"there is no {momentum_file.file_name(name, ours.rank, ours.world_size)} in {folder}: "
            "the momenta of the ranks were not saved there"
        )
    if ours.world_size in saved:
        own = _checked(ours, folder / momentum_file.file_name(name, ours.rank, ours.world_size))
        if _is_own(own, ours):
            return own
        saved = {ours.world_size: saved[ours.world_size]}
    if len(saved) > 1:
        raise CheckpointError(
            f"{folder} holds the momenta of runs with {sorted(saved)} ranks; remove all but one"
        )
    files = [momentum_file.file_name(name, rank, *saved) for rank in range(*saved)]
    return _mean(ours, [folder / file for file in files])


def _checked(ours: MomentumFile, path: Path) -> MomentumFile:
    """Returns what a file holds, which must be of the parameters and the step of `ours`."""
    content = momentum_file.read(path)
    rank, world_size = content.rank, content.world_size
    if not path.name.endswith(momentum_file.file_name("", rank, world_size)):
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
    """Returns the mean over the voters, from the files of all ranks in their order."""
    first = _checked(ours, paths[0])
    nodes = first.members or [[rank] for rank in range(len(paths))]
    if sorted(rank for ranks in nodes for rank in ranks) != list(range(len(paths))):
        raise CheckpointError(f"{paths[0]} is damaged: its nodes are {first.members}")
    # In the order of the ranks, so every rank gets the same bits.
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
