"""Saves and loads the momentum of every rank, in one safetensors file per rank.

The momenta differ between ranks, and whatever saves `optimizer.state_dict()` on rank 0 keeps one of
them. So each rank also writes a file of its own:

    every rank:  save_momentum(optimizer, folder)      rank 0:  torch.save(optimizer.state_dict())
    every rank:  optimizer.load_state_dict(...)        then:    load_momentum(optimizer, folder)

All ranks of a save write the same random id. Files with different ids don't belong together, even
if they were saved after the same step.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import hf_dlion.fsdp as fsdp
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Kind
from hf_dlion.ranks.topology import Topology

# How the files' names begin; an integration that saves several optimizers adds a number.
NAME = "dlion_momentum"
# Key of the header in the file's metadata, whose values are texts; the number is the format's.
_HEADER = "hf_dlion momentum 1"
_OLDER = "load an older checkpoint, or restore this one from a copy"


class CheckpointError(RuntimeError):
    """Momentum files could not be written, or are missing, damaged, or of another run."""


@dataclass(frozen=True, kw_only=True)
class _Header:
    """What a file says about its momenta.

    Attributes:
        save: Id of the save, the same in the files of all ranks.
        step: Number of the last step before the save.
        rank: Rank that wrote the file.
        world_size: Number of ranks that saved.
        shard: Index of the FSDP2 shard that the rank held, and number of shards; None: everything.
        scaler: State of the rank's GradScaler.
    """

    save: str
    step: int
    rank: int
    world_size: int
    shard: list[int] | None
    scaler: dict[str, Any] | None


def find_optimizer(optimizer: object) -> DistributedLion | None:
    """Returns the DistributedLion in a wrapper such as Accelerate's, None if there is none."""
    for _ in range(4):  # Not forever: a mock has an optimizer of an optimizer, and so on.
        if isinstance(optimizer, DistributedLion):
            return optimizer
        optimizer = getattr(optimizer, "optimizer", None)
    return None


def save_momentum(
    optimizer: object,
    folder: str | os.PathLike[str],
    *,
    scaler: Mapping[str, Any] | None = None,
    failure: BaseException | None = None,
    name: str = NAME,
) -> None:
    """Writes this rank's momentum to `folder`; every rank must call this after the same step.

    The file is `dlion_momentum_{rank}_of_{world_size}.safetensors`. All ranks meet before they
    write and after it, so they all raise if the save failed on one. Files that another number of
    ranks left in the folder are deleted.

    Args:
        optimizer: A DistributedLion, or Accelerate's wrapper of one.
        folder: Folder of the checkpoint, the same path on every rank; created if it doesn't exist.
        scaler: State dict of this rank's GradScaler, to keep it (default: None).
        failure: What failed on this rank in saving the rest of the checkpoint; the other ranks
            then raise, too, and nothing is written (default: None).
        name: Beginning of the file's name, for a second optimizer in one folder.

    Raises:
        TypeError: If `optimizer` isn't a DistributedLion.
        CheckpointError: If this rank cannot write its file, or the ranks were given different
            folders.
        Disagreement: If the save failed on another rank, or another rank doesn't save.
        LostRank: If another rank ended or stalled.
        BaseException: `failure`.
    """
    lion = _unwrapped(optimizer)
    ranks, place, ids = _begin(lion, Kind.SAVE, folder, failure)
    rank, world_size = _position(ranks)
    path = place / _file_name(name, rank, world_size)
    try:
        header = _Header(
            save=ids[0],
            step=lion.steps,
            rank=rank,
            world_size=world_size,
            shard=_shard(lion),
            scaler=None if scaler is None else dict(scaler),
        )
        _write(path, lion, header)
    except (OSError, SafetensorError) as error:
        failure = CheckpointError(
            f"rank {rank} cannot write {path}: {error}. Free space or check permissions, and save "
            f"again; this checkpoint is incomplete"
        )
        failure.__cause__ = error
    except BaseException as error:  # The other ranks wait, for an interrupted rank as well.
        failure = error
    lion.meet(Kind.SAVE, failure)
    for other, count in _files(place, name):
        if count != world_size:
            with contextlib.suppress(OSError):  # Another rank may have been faster.
                (place / _file_name(name, other, count)).unlink()


def load_momentum(
    optimizer: object,
    folder: str | os.PathLike[str],
    *,
    failure: BaseException | None = None,
    name: str = NAME,
) -> dict[str, Any] | None:
    """Loads this rank's momentum from `folder`; every rank must call this.

    Load the rest of the checkpoint first: the model, and `optimizer.load_state_dict`. An optimizer
    that is new and loaded nothing continues from the files' step, with its own hyperparameters.
    Nothing changes until all ranks have read and checked their files. If another number of ranks
    saved, rank r uses file r modulo that number, and rank 0 warns. With `local_group`, the ranks of
    a node use the file of their first rank.

    Args:
        optimizer: A DistributedLion, or Accelerate's wrapper of one.
        folder: Folder that was given to `save_momentum`, the same path on every rank.
        failure: What failed on this rank in loading the rest of the checkpoint; the other ranks
            then raise, too (default: None).
        name: As for `save_momentum`.

    Returns:
        The GradScaler's state that was saved with the momentum, or None.

    Raises:
        TypeError: If `optimizer` isn't a DistributedLion.
        CheckpointError: If this rank's file is missing or damaged, or belongs to another step or
            model; or the files of all ranks don't belong to one save.
        Disagreement: If loading failed on another rank, or another rank doesn't load.
        LostRank: If another rank ended or stalled.
        BaseException: `failure`.
    """
    lion = _unwrapped(optimizer)
    ranks, place, _ = _begin(lion, Kind.LOAD, folder, failure)
    rank, world_size = _position(ranks)
    momenta: dict[Tensor, Tensor] = {}
    path, header = place, None
    try:
        first_of_node = rank - rank % (1 if ranks is None else ranks.local_size)
        path = _path_for(first_of_node, world_size, place, name)
        header, momenta = _read(path, lion)
    except BaseException as error:  # As in save_momentum.
        failure = error
    lion.meet(Kind.LOAD, failure)
    assert header is not None
    told = _gathered(ranks, [str(path), header.save])
    _check_equal([save for _, save in told], [path for path, _ in told])
    for group in lion.param_groups:
        group["step"] = header.step
    for param in _params(lion):
        # Replaced: after torch's load_state_dict the old tensor may be somebody else's.
        lion.state[param].pop("exp_avg", None)
        if param in momenta:
            lion.state[param]["exp_avg"] = momenta[param]
    if header.world_size != world_size and rank == 0:
        warnings.warn(
            f"{place} was saved by {header.world_size} ranks and is loaded by {world_size}: rank r "
            f"continues with the momentum of saved rank r modulo {header.world_size}, so training "
            f"differs from an uninterrupted run",
            stacklevel=2,
        )
    return header.scaler


def _unwrapped(optimizer: object) -> DistributedLion:
    lion = find_optimizer(optimizer)
    if lion is None:
        raise TypeError(f"optimizer must be a DistributedLion (got {type(optimizer).__name__})")
    return lion


def _begin(
    lion: DistributedLion,
    kind: Kind,
    folder: str | os.PathLike[str],
    failure: BaseException | None,
) -> tuple[Topology | None, Path, list[str]]:
    """Meets all ranks; returns who is where, the folder, and a random text of each rank."""
    ranks = lion.meet(kind, failure)
    told = _gathered(ranks, [str(folder), secrets.token_hex(8)])
    folders = [own for own, _ in told]
    if len(set(folders)) > 1:
        named = ", ".join(f"rank {rank}: {own!r}" for rank, own in enumerate(folders))
        raise CheckpointError(
            f"ranks were given different folders of one checkpoint ({named}): pass the same path "
            f"on every rank"
        )
    return ranks, Path(folder), [drawn for _, drawn in told]


def _gathered(ranks: Topology | None, value: object) -> list[Any]:
    return [value] if ranks is None else ranks.everyone.gather_objects(value)


def _position(ranks: Topology | None) -> tuple[int, int]:
    return (0, 1) if ranks is None else (ranks.everyone.rank, ranks.everyone.world_size)


def _params(lion: DistributedLion) -> list[Tensor]:
    """Returns the parameters in the order in which torch's `state_dict()` numbers them."""
    return [param for group in lion.param_groups for param in group["params"]]


def _shard(lion: DistributedLion) -> list[int] | None:
    """Returns the index of this rank's FSDP2 shard and the number of shards."""
    shards = [fsdp.shard_index(param) for param in _params(lion)]
    return next((list(shard) for shard in shards if shard is not None), None)


def _file_name(name: str, rank: int | str, world_size: int | str) -> str:
    return f"{name}_{rank}_of_{world_size}.safetensors"


def _files(folder: Path, name: str, ending: str = "safetensors") -> list[tuple[int, int]]:
    """Returns rank and number of ranks of every momentum file in a folder."""
    pattern = re.compile(rf"{re.escape(name)}_(\d+)_of_(\d+)\.{ending}")
    found = (pattern.fullmatch(entry) for entry in sorted(os.listdir(folder)))
    return [(int(match[1]), int(match[2])) for match in found if match]


def _write(path: Path, lion: DistributedLion, header: _Header) -> None:
    """Writes a file that is complete after a crash, or has its temporary name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    momenta = {
        str(number): fsdp.local_part(lion.state[param]["exp_avg"].detach()).cpu().contiguous()
        for number, param in enumerate(_params(lion))
        if "exp_avg" in lion.state.get(param, {})
    }
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        save_file(momenta, temporary, {_HEADER: json.dumps(asdict(header))})
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # The new name is on the disk once the folder is.
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _path_for(rank: int, world_size: int, folder: Path, name: str) -> Path:
    """Returns the file that a rank loads.

    Raises:
        CheckpointError: If the folder doesn't hold it.
    """
    if not folder.is_dir():
        raise CheckpointError(f"rank {rank} finds no folder {folder}: check the path")
    files = _files(folder, name)
    counts = sorted({count for _, count in files})
    if not counts:
        missing = f"{folder} holds no {_file_name(name, rank, world_size)}"
        if _files(folder, name, "pt"):
            raise CheckpointError(
                f"{missing}, only .pt files of an earlier hf_dlion, which this version cannot "
                f"read: finish that run with the version that saved it"
            )
        raise CheckpointError(
            f"{missing}: its momenta were not saved. Save with hf_dlion.save_momentum on every "
            f"rank (hf_dlion.accelerate.attach and Trainer do it for you). To continue with rank "
            f"0's momentum on every rank, load the checkpoint before hf_dlion.accelerate.attach, "
            f"or without load_momentum"
        )
    if world_size not in counts and len(counts) > 1:
        raise CheckpointError(
            f"{folder} holds momenta saved by {counts} ranks: delete the files of all runs but one"
        )
    saved = world_size if world_size in counts else counts[0]
    if (rank % saved, saved) not in files:
        raise CheckpointError(
            f"{folder / _file_name(name, rank % saved, saved)}, the momentum of rank "
            f"{rank % saved}, is missing: {_OLDER}. If ranks save to disks of their own, copy all "
            f"files of the checkpoint to this rank's"
        )
    return folder / _file_name(name, rank % saved, saved)


def _read(path: Path, lion: DistributedLion) -> tuple[_Header, dict[Tensor, Tensor]]:
    """Returns what a file holds, checked against the optimizer, ready to be its state.

    Raises:
        CheckpointError: If the file is damaged or doesn't fit.
    """
    params = _params(lion)
    try:
        with safe_open(path, framework="pt") as file:
            header = _header(path, file.metadata())
            keys = set(file.keys())
            if not keys <= {str(number) for number in range(len(params))}:
                raise CheckpointError(
                    f"{path} holds momenta {sorted(keys)}, but the optimizer has {len(params)} "
                    f"parameters: it was saved with another model"
                )
            saved = {params[int(key)]: file.get_tensor(key) for key in keys}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): {_OLDER}") from error
    # A fresh optimizer continues from the file's step.
    if header.step != lion.steps and (lion.steps or lion.state):
        raise CheckpointError(
            f"{path} was saved after step {header.step}, but the optimizer is at step "
            f"{lion.steps}: first load the optimizer's state_dict() of the same checkpoint"
        )
    if header.shard != _shard(lion):
        raise CheckpointError(
            f"{path} holds shard {header.shard} of the momentum (index, number of shards), but "
            f"this rank has shard {_shard(lion)}: load FSDP2 checkpoints with the mesh that they "
            f"were saved with"
        )
    momenta = {}
    for number, param in enumerate(params):
        if (momentum := saved.get(param)) is None:
            continue
        local = fsdp.local_part(param.detach())
        if momentum.shape != local.shape or not momentum.is_floating_point():
            raise CheckpointError(
                f"{path} holds a momentum of {tuple(momentum.shape)} {momentum.dtype} for "
                f"parameter {number}, which is {tuple(local.shape)} {local.dtype} on this rank: it "
                f"was saved with another model"
            )
        dtype = lion.options.momentum_dtype or param.dtype
        # A copy: what safetensors returns is still mapped to the file.
        momentum = momentum.to(device=local.device, dtype=dtype, copy=True)
        momenta[param] = fsdp.with_local_part(param, momentum)
    return header, momenta


def _header(path: Path, metadata: Mapping[str, str] | None) -> _Header:
    try:
        header = _Header(**json.loads((metadata or {})[_HEADER]))
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a momentum file of this hf_dlion ({type(error).__name__}: {error}): "
            f"{_OLDER}"
        ) from error
    if not path.name.endswith(_file_name("", header.rank, header.world_size)):
        raise CheckpointError(
            f"{path} holds the momentum of rank {header.rank} of {header.world_size}: restore the "
            f"file's name"
        )
    return header


def _check_equal(saves: list[str], paths: list[str]) -> None:
    """Raises on every rank if the ranks' files are not of one save.

    Raises:
        CheckpointError: Naming every file and the id of its save.
    """
    if len(set(saves)) > 1:
        named = "; ".join(
            f"rank {rank}: {path} of save {save}"
            for rank, (path, save) in enumerate(zip(paths, saves, strict=True))
        )
        raise CheckpointError(f"momentum files of different saves lie together ({named}): {_OLDER}")
