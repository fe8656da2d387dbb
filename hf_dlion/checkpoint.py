"""Saves and loads what only one rank has, in one safetensors file per rank.

The momenta differ between ranks, and whatever saves `optimizer.state_dict()` on rank 0 keeps one of
them. With `vote_every` above 1, weights differ as well. So each rank also writes a file of its own:

    every rank:  save_momentum(optimizer, folder)      rank 0:  torch.save(optimizer.state_dict())
    every rank:  optimizer.load_state_dict(...)        then:    load_momentum(optimizer, folder)

All ranks of a save write the same random id. Files with different ids don't belong together, even
if they were saved after the same step.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import secrets
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import hf_dlion.fsdp as fsdp
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Kind
from hf_dlion.ranks.topology import Topology
from hf_dlion.vote.local import flat_view
from hf_dlion.vote.local_steps import LocalSteps, Period
from hf_dlion.vote.update import LOW_PRECISION

# How the files' names begin; an integration that saves several optimizers adds a number.
NAME = "dlion_momentum"
# How keys of own weights begin; those of momenta are numbers alone.
_OWN = "own."
# Key of the header in the file's metadata, whose values are texts; the number is the format's.
_HEADER = "hf_dlion momentum 1"
_OLDER = "load an older checkpoint, or restore this one from a copy"


class CheckpointError(RuntimeError):
    """Momentum files could not be written, or are missing, damaged, or of another run."""


@dataclass(frozen=True, kw_only=True)
class _Local:
    """What a header says about local steps; parameters by number, which JSON makes texts.

    Attributes:
        bits: Of a message, which the limits depend on.
        exchanges: Number of exchanges so far.
        period: The steps since the last exchange.
        used: Which parameters this rank used in them.
        limits: Limits of the parameters that took part in an exchange.
    """

    bits: int
    exchanges: int
    period: Period
    used: list[int]
    limits: dict[str, float]

    @classmethod
    def of(cls, values: dict[str, Any]) -> _Local:
        """Returns what `asdict` and JSON made of it.

        Raises:
            KeyError, TypeError, ValueError: If it is something else.
        """
        period = dict(values["period"])
        for name in ("decays", "paths"):
            period[name] = tuple(float(own) for own in period[name])
        return cls(
            bits=int(values["bits"]),
            exchanges=int(values["exchanges"]),
            period=Period(**period),
            used=[int(number) for number in values["used"]],
            limits={str(int(number)): float(own) for number, own in values["limits"].items()},
        )


@dataclass(frozen=True, kw_only=True)
class _Header:
    """What a file says about its momenta and own weights.

    Attributes:
        save: Id of the save, the same in the files of all ranks.
        step: Number of the last step before the save.
        rank: Rank that wrote the file.
        world_size: Number of ranks that saved.
        shard: Index of the FSDP2 shard that the rank held, and number of shards; None: everything.
        scaler: State of the rank's GradScaler.
        local: State of local steps; None, and left out, without them.
    """

    save: str
    step: int
    rank: int
    world_size: int
    shard: list[int] | None
    scaler: dict[str, Any] | None
    local: _Local | None = None

    def as_json(self) -> str:
        """Returns the header as a file has it."""
        return json.dumps({k: v for k, v in asdict(self).items() if k != "local" or v is not None})


@dataclass
class _Loaded:
    """What a file holds for this rank, on its device.

    Attributes:
        header: What the file says about it.
        momenta: By parameter, in its shape.
        local: State of local steps as after `eval()`, own weights in the place of anchors.
    """

    header: _Header
    momenta: dict[Tensor, Tensor] = field(default_factory=dict)
    local: LocalSteps | None = None


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

    With `vote_every` above 1 the file also holds this rank's own weights, whether the model holds
    them or those of all ranks (after `optimizer.eval()`), and the state of its local steps.

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
            local=_local_of(lion),
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

    With `vote_every` above 1 the model must hold the weights that all ranks have, as they are saved
    after `optimizer.eval()` or in `with optimizer.common_weights()`. It then gets this rank's own
    weights from the file, except after `optimizer.eval()`, where `optimizer.train()` gives it them.
    If another number of ranks saved, or `vote_every` was 1, all ranks continue with the weights in
    the model, and so does an optimizer with `vote_every=1`, whatever was saved.

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
    path, loaded = place, None
    try:
        first_of_node = rank - rank % (1 if ranks is None else ranks.local_size)
        path = _path_for(first_of_node, world_size, place, name)
        # A voter alone takes no local steps.
        voters = 1 if ranks is None else ranks.voters.world_size
        loaded = _read(path, lion, world_size if voters > 1 else None)
    except BaseException as error:  # As in save_momentum.
        failure = error
    lion.meet(Kind.LOAD, failure)
    assert loaded is not None
    header = loaded.header
    told = _gathered(ranks, [str(path), header.save])
    _check_equal([save for _, save in told], [path for path, _ in told])
    for group in lion.param_groups:
        group["step"] = header.step
    for param in _params(lion):
        # Replaced: after torch's load_state_dict the old tensor may be somebody else's.
        lion.state[param].pop("exp_avg", None)
        if param in loaded.momenta:
            lion.state[param]["exp_avg"] = loaded.momenta[param]
    if loaded.local is not None:
        lion._continue_from(loaded.local)
    has_own = loaded.local is not None and bool(loaded.local.anchors)
    had_own = header.local is not None and bool(header.local.used or header.local.limits)
    if had_own and not has_own and header.world_size == world_size and rank == 0:
        warnings.warn(
            f"{place} was saved amid local steps (vote_every above 1), which this training doesn't "
            f"take: it continues with the weights of the last exchange",
            stacklevel=2,
        )
    if header.world_size != world_size and rank == 0:
        dropped = ""
        if loaded.local is not None and header.local is not None:
            dropped = "all ranks with the weights of the last exchange, "
        warnings.warn(
            f"{place} was saved by {header.world_size} ranks and is loaded by {world_size}: rank r "
            f"continues with the momentum of saved rank r modulo {header.world_size}, {dropped}so "
            f"training differs from an uninterrupted run",
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


def _local_of(lion: DistributedLion) -> _Local | None:
    """Returns what the header says about local steps."""
    if lion.options.vote_every == 1:
        return None
    local = lion._local
    numbers = {param: number for number, param in enumerate(_params(lion))}
    return _Local(
        bits=local.bits,
        exchanges=local.exchanges,
        period=local.period,
        used=sorted(numbers[param] for param in local.used),
        limits={str(numbers[param]): limit for param, limit in local.limits.items()},
    )


def _own_weights(lion: DistributedLion) -> dict[str, Tensor]:
    """Returns this rank's own weights; those of 16 bits by their displacements, without loss."""
    local, own = lion._local, {}
    for number, param in enumerate(_params(lion)):
        if param in local.anchors:
            part = fsdp.local_part(param.detach())
            if param in local.displacements or local.swapped:
                flat = local.displacements.get(param, local.anchors[param])
                part = flat.as_strided(part.size(), part.stride())
            own[f"{_OWN}{number}"] = part
    return own


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
        str(number): fsdp.local_part(lion.state[param]["exp_avg"].detach())
        for number, param in enumerate(_params(lion))
        if "exp_avg" in lion.state.get(param, {})
    }
    kept = {**momenta, **_own_weights(lion)}
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        tensors = {key: own.cpu().contiguous() for key, own in kept.items()}
        save_file(tensors, temporary, {_HEADER: header.as_json()})
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


def _read(path: Path, lion: DistributedLion, local_ranks: int | None) -> _Loaded:
    """Returns what a file holds, checked against the optimizer, ready to be its state.

    Args:
        path: Of the file.
        lion: The optimizer.
        local_ranks: Number of ranks if they take local steps, or None.

    Raises:
        CheckpointError: If the file is damaged or doesn't fit.
    """
    params = _params(lion)
    try:
        with safe_open(path, framework="pt") as file:
            header = _header(path, file.metadata())
            keys = set(file.keys())
            known = {str(number) for number in range(len(params))}
            if not {key.removeprefix(_OWN) for key in keys} <= known:
                raise CheckpointError(
                    f"{path} holds momenta {sorted(keys)}, but the optimizer has {len(params)} "
                    f"parameters: it was saved with another model"
                )
            continues = header.local is not None and header.world_size == local_ranks
            saved = {
                key: file.get_tensor(key) for key in keys if continues or not key.startswith(_OWN)
            }
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): {_OLDER}") from error
    # A fresh optimizer continues from the file's step.
    if header.step != lion.steps and (lion.steps or lion.state):
        raise CheckpointError(
            f"{path} was saved after step {header.step}, but the optimizer is at step "
            f"{lion.steps}: first load the optimizer's state_dict() of the same checkpoint"
        )
    if lion._local.anchors:
        raise CheckpointError(
            f"the optimizer still has its own weights and those of its last exchange: before "
            f"{path}, load the model and the optimizer's state_dict() of the same checkpoint"
        )
    if header.shard != _shard(lion):
        raise CheckpointError(
            f"{path} holds shard {header.shard} of the momentum (index, number of shards), but "
            f"this rank has shard {_shard(lion)}: load FSDP2 checkpoints with the mesh that they "
            f"were saved with"
        )
    loaded = _Loaded(header)
    for number, param in enumerate(params):
        if (momentum := saved.get(str(number))) is None:
            continue
        local = fsdp.local_part(param.detach())
        if momentum.shape != local.shape or not momentum.is_floating_point():
            raise _other_model(path, "a momentum", momentum, number, local)
        dtype = lion.options.momentum_dtype or param.dtype
        # A copy: what safetensors returns is still mapped to the file.
        momentum = momentum.to(device=local.device, dtype=dtype, copy=True)
        loaded.momenta[param] = fsdp.with_local_part(param, momentum)
    if lion.options.vote_every > 1:
        own = {int(key.removeprefix(_OWN)): saved[key] for key in saved if key.startswith(_OWN)}
        loaded.local = _local_steps(path, lion, header.local, own if continues else None)
    return loaded


def _local_steps(
    path: Path, lion: DistributedLion, saved: _Local | None, own: dict[int, Tensor] | None
) -> LocalSteps:
    """Returns the state of local steps, checked; without own weights a period begins.

    Raises:
        CheckpointError: If own weights are missing or don't fit.
    """
    local = LocalSteps(lion.options.bits, swapped=True)
    if saved is not None:
        local.exchanges = saved.exchanges
    if saved is None or own is None:
        return local
    params = _params(lion)
    moved = {*saved.used, *map(int, saved.limits)}
    if own.keys() != moved:
        raise CheckpointError(
            f"{path} holds own weights of parameters {sorted(own)}, but should hold those of "
            f"{sorted(moved)}: {_OLDER}"
        )
    for number, weights in own.items():
        param, part = params[number], fsdp.local_part(params[number].detach())
        if weights.shape != part.shape or weights.dtype != part.dtype:
            raise _other_model(path, "own weights", weights, number, part)
        flat = flat_view(torch.empty_like(part).copy_(weights))
        if param.dtype in LOW_PRECISION:
            local.displacements[param] = flat
            flat = torch.empty_like(flat)  # Own weights follow from anchors and displacements.
        local.anchors[param] = flat
    local.period = saved.period
    local.used = {params[number] for number in saved.used}
    # With 8 bits limits are those of the largest displacement, else of a sum.
    alike = (saved.bits == 8) == (lion.options.bits == 8)
    local.limits = {
        params[int(number)]: limit if alike else math.inf for number, limit in saved.limits.items()
    }
    return local


def _other_model(
    path: Path, what: str, found: Tensor, number: int, wanted: Tensor
) -> CheckpointError:
    return CheckpointError(
        f"{path} holds {what} of {tuple(found.shape)} {found.dtype} for parameter {number}, which "
        f"is {tuple(wanted.shape)} {wanted.dtype} on this rank: it was saved with another model"
    )


def _header(path: Path, metadata: Mapping[str, str] | None) -> _Header:
    try:
        values = json.loads((metadata or {})[_HEADER])
        if "local" in values:
            values["local"] = _Local.of(values["local"])
        header = _Header(**values)
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
