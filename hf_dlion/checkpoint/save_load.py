"""Saves and loads the momenta of all ranks together: it succeeds or fails on all of them.

Momenta differ between ranks, but rank 0's `optimizer.state_dict()` holds only those of rank 0. So
each rank also writes a file of its own:

    every rank:  optimizer.exchange_now()             with local steps
    rank 0:      torch.save(model and optimizer)
    every rank:  save_momentum(optimizer, folder)

    every rank:  optimizer.load_state_dict(...)
    every rank:  load_momentum(optimizer, folder)

All ranks of a save write the same random id. Files with different ids don't belong together, even
if they were saved after the same step.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from hf_dlion.checkpoint.momentum_file import (
    LOAD_OLDER,
    NAME,
    Caller,
    CheckpointError,
    Loaded,
    Position,
    file_name,
    files_in,
    find_file,
    read,
    write,
)
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Kind
from hf_dlion.ranks.topology import Topology
from hf_dlion.state_dict import MOMENTA_APART
from hf_dlion.user_warning import warn_user


def find_lion(optimizer: object) -> DistributedLion | None:
    """Returns the DistributedLion in a wrapper such as Accelerate's, None if there is none."""
    for _ in range(4):  # Not forever: a mock has an optimizer of an optimizer, and so on.
        if isinstance(optimizer, DistributedLion):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


@contextlib.contextmanager
def momenta_apart(lion: DistributedLion) -> Iterator[None]:
    """Leaves momenta out of `state_dict()` in a save that also calls `save_momentum`.

    Otherwise rank 0's would be written twice, and loaded on every rank before its own. A process
    alone keeps them, because Ray Tune's checkpoints have the state dict only.
    """

    def leave_out(_: object, state_dict: dict[str, Any]) -> None:
        if lion.peers.world_size > 1:
            state_dict |= {"state": {}, MOMENTA_APART: True}

    handle = lion.register_state_dict_post_hook(leave_out)
    try:
        yield
    finally:
        handle.remove()


def save_momentum(
    optimizer: object,
    folder: str | os.PathLike[str],
    *,
    scaler: Mapping[str, Any] | None = None,
    failure: BaseException | None = None,
    name: str = NAME,
) -> None:
    """Writes this rank's momentum to `folder`; every rank must call this after the same step.

    The file is `dlion_momentum_{rank}_of_{world_size}.safetensors`. If the save fails on one rank,
    all ranks raise. Files in the folder that were saved by another number of ranks are deleted.

    With `vote_every` above 1 it begins with `optimizer.exchange_now()`, so call that before you
    save the model. If it ends a period, rank 0 warns.

    Args:
        optimizer: A DistributedLion, or Accelerate's wrapper of one.
        folder: Folder of the checkpoint, the same path on every rank; created if it doesn't exist.
        scaler: State dict of this rank's GradScaler, to keep it (default: None).
        failure: Error with which this rank failed to save the rest of the checkpoint. All ranks
            then raise, and no file is written (default: None).
        name: Prefix of the file's name, another one for each optimizer and each process group that
            saves into one folder.

    Raises:
        TypeError: If `optimizer` isn't a DistributedLion.
        ValueError: If `name` isn't the beginning of a file's name.
        CheckpointError: If this rank cannot write its file, or the ranks were given different
            folders or names.
        Disagreement: If the save failed on another rank, or another rank doesn't save.
        LostRank: If another rank ended or stalled.
        BaseException: `failure`.
    """
    lion = _unwrapped(optimizer)
    ranks, save_id = _begin(lion, Kind.SAVE, folder, name, failure)
    at = _position(ranks)
    path = Path(folder, file_name(name, at.rank, at.world_size))
    ends_period = lion.local.period.steps  # On all ranks, which have met.
    if ends_period:
        lion.exchange_now()
    with lion.peers.together(Kind.SAVE):
        try:
            write(path, lion, save_id, at, scaler)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"rank {at.rank} cannot write {path}: {error}. This checkpoint is incomplete. Free "
                f"space or check permissions, and save again"
            ) from error
    for other_rank, count in files_in(path.parent, name):
        if count != at.world_size:
            with contextlib.suppress(OSError):  # Another rank may have been faster.
                path.with_name(file_name(name, other_rank, count)).unlink()
    if ends_period and at.rank == 0:
        warn_user(
            "save_momentum() ended a period of local steps. A model that was saved before it has "
            "rank 0's own weights, for which load_momentum() will refuse these momenta: call "
            "optimizer.exchange_now() on every rank before you save the model"
        )


def load_momentum(
    optimizer: object,
    folder: str | os.PathLike[str],
    *,
    failure: BaseException | None = None,
    name: str = NAME,
) -> dict[str, Any] | None:
    """Loads this rank's momentum from `folder`; every rank must call this.

    Load the rest of the checkpoint first: the model, and `optimizer.load_state_dict`. A new
    optimizer without loaded state continues from the files' step, with its own hyperparameters.
    The optimizer changes only after all ranks have read and checked their files. If another number
    of ranks saved, rank r uses file r modulo that number, and rank 0 warns. With `local_group`, the
    ranks of a node use the file of their first rank, and rank 0 warns if it has changed. If
    another number of ranks saved and either run has nodes, node n uses the file of saved node n
    modulo their number.

    If a rank's model holds other weights than in the save, rank 0 warns, and with `vote_every`
    above 1 all ranks raise.

    Args:
        optimizer: A DistributedLion, or Accelerate's wrapper of one.
        folder: Folder that was given to `save_momentum`, the same path on every rank.
        failure: Error with which this rank failed to load the rest of the checkpoint. All ranks
            then raise (default: None).
        name: Prefix of the file's name, as in `save_momentum`.

    Returns:
        The GradScaler's state that was saved with the momentum, or None.

    Raises:
        TypeError: If `optimizer` isn't a DistributedLion.
        ValueError: If `name` isn't the beginning of a file's name.
        CheckpointError: If this rank's file is missing or damaged, or belongs to another step or
            model; or the files of all ranks don't belong to one save.
        Disagreement: If loading failed on another rank, or another rank doesn't load.
        LostRank: If another rank ended or stalled.
        BaseException: `failure`.
    """
    return load_for("loop", optimizer, folder, failure=failure, name=name)


def load_for(
    caller: Caller,
    optimizer: object,
    folder: str | os.PathLike[str],
    *,
    failure: BaseException | None = None,
    name: str = NAME,
) -> dict[str, Any] | None:
    """Loads as `load_momentum`, with errors that advise what the caller can do."""
    lion = _unwrapped(optimizer)
    ranks, _ = _begin(lion, Kind.LOAD, folder, name, failure)
    at = _position(ranks)
    with lion.peers.together(Kind.LOAD):
        path = find_file(at, Path(folder), name, caller)
        loaded = read(path, lion, caller)
    values = _gathered(ranks, (str(path), loaded.header.save, loaded.warning))
    paths, saves, warned = zip(*values, strict=True)
    if len(set(saves)) > 1:
        by_rank = "; ".join(
            f"rank {rank}: {path} of save {save_id}"
            for rank, (path, save_id) in enumerate(zip(paths, saves, strict=True))
        )
        raise CheckpointError(
            f"the ranks' momentum files are from different saves ({by_rank}): {LOAD_OLDER}"
        )
    _restore(lion, loaded)
    # Ranks may hold other shards, so the weights of one rank alone may be other ones.
    for text in (next(filter(None, warned), ""), _difference(Path(folder), loaded, at)):
        if at.rank == 0 and text:
            warn_user(text)
    return loaded.header.scaler


def _restore(lion: DistributedLion, loaded: Loaded) -> None:
    """Continues with this rank's own momenta and ages from a file."""
    lion.params.forget_layout()
    lion.guards.note_load(own_momenta=True)
    lion.local.reset(loaded.header.exchanges)
    lion.params.ages = loaded.ages
    for group in lion.param_groups:
        group["step"] = loaded.header.step
        for param in group["params"]:
            # Replaced: after torch's load_state_dict other objects may share the old tensors.
            lion.state.get(param, {}).pop("exp_avg", None)
            if param in loaded.momenta:
                lion.state[param]["exp_avg"] = loaded.momenta[param]


def _unwrapped(optimizer: object) -> DistributedLion:
    lion = find_lion(optimizer)
    if lion is None:
        raise TypeError(f"optimizer must be a DistributedLion (got {type(optimizer).__name__})")
    return lion


def _begin(
    lion: DistributedLion,
    kind: Kind,
    folder: str | os.PathLike[str],
    name: str,
    failure: BaseException | None,
) -> tuple[Topology | None, str]:
    """Meets all ranks; returns who is where, and a random id that is the same on all of them.

    Raises:
        CheckpointError: If the ranks were given different folders or names.
        ValueError: If the name isn't the beginning of a file's name.
    """
    with lion.peers.together(kind):
        if failure is not None:
            raise failure
        if Path(name).name != name:
            raise ValueError(f"name must be the beginning of a file's name (got {name!r})")
        path = os.path.join(folder, name)
    ranks = lion.peers.ranks
    paths, ids = zip(*_gathered(ranks, (path, secrets.token_hex(8))), strict=True)
    if len(set(paths)) > 1:
        by_rank = ", ".join(f"rank {rank}: {path!r}" for rank, path in enumerate(paths))
        raise CheckpointError(
            f"ranks were given different folders or names for one checkpoint ({by_rank}): pass the "
            f"same on every rank"
        )
    return ranks, ids[0]


def _gathered(ranks: Topology | None, value: object) -> list[Any]:
    return [value] if ranks is None else ranks.everyone.gather_objects(value)


def _position(ranks: Topology | None) -> Position:
    if ranks is None:
        return Position()
    return Position(
        rank=ranks.everyone.rank,
        world_size=ranks.everyone.world_size,
        local_size=ranks.local_size,
        voters=ranks.voters.world_size,
    )


def _difference(folder: Path, loaded: Loaded, at: Position) -> str:
    """Returns how the run will differ from the one that saved, or "" if it won't."""
    header, ending = loaded.header, ", so training differs from an uninterrupted run"
    if header.world_size != at.world_size:
        plural = "s" if header.world_size > 1 else ""
        what, count = "rank", header.world_size
        if header.shard is None and (header.voters < count or at.local_size > 1):
            what, count = "node", header.voters
        return (
            f"{folder} was saved by {header.world_size} rank{plural} and is loaded by "
            f"{at.world_size}. The {what} of number r continues with the momentum of saved "
            f"{what} r modulo {count}{ending}"
        )
    if header.voters != at.voters:
        whose = "Each node continues with the momentum of its first rank"
        if at.local_size == 1:
            whose = "Each rank continues with its own momentum"
        return (
            f"{folder} was saved by {header.voters} voters and is loaded by {at.voters}, with "
            f"another local_group. {whose}{ending}"
        )
    return ""
