"""The file of one rank: its name, its content, and what is checked when it is read.

Name:      dlion_momentum_{rank}_of_{world_size}.safetensors
Tensors:   "{k}" is the momentum of parameter k, numbered as in torch's `state_dict()`. "age.{k}"
           is the age of its rows, if one is without a gradient (`core.idle_rows`).
Metadata:  the header as JSON: save, step, rank, voters, shard, GradScaler, exchanges, weights
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

import hf_dlion.fsdp as fsdp
from hf_dlion.core.fingerprint import fingerprints
from hf_dlion.optimizer import DistributedLion
from hf_dlion.options import numbered
from hf_dlion.ranks.wire import digest
from hf_dlion.state_dict import loaded_momentum

# Prefix of the files' names. An integration that saves several optimizers appends a number.
NAME = "dlion_momentum"
_OTHER_MODEL = "it was saved with another model: make that one, or load another checkpoint"
LOAD_OLDER = "load an older checkpoint, or restore this one from a copy"
# Who loads. A remedy is one that this caller can follow.
Caller = Literal["loop", "Trainer", "Accelerate"]
_NO_MOMENTA: dict[Caller, str] = {
    "loop": "Call hf_dlion.save_momentum on every rank when you save. To continue with rank 0's "
    "momentum on every rank, leave out load_momentum",
    "Trainer": "Resume from another checkpoint, or load this one's model and train without "
    "resume_from_checkpoint",
    "Accelerate": "Call hf_dlion.accelerate.attach before accelerator.save_state. To continue with "
    "rank 0's momentum on every rank, call load_state before attach",
}
_OTHER_STEP: dict[Caller, str] = {
    "loop": "First load the optimizer's state_dict() of the same checkpoint. If you did, the files "
    "are from two saves",
    "Trainer": "The folder mixes two saves: resume from another checkpoint, or copy all files of "
    "one save into it",
    "Accelerate": "The folder mixes two saves: load another one, or copy all files of one save "
    "into it",
}
_OTHER_WEIGHTS: dict[Caller, str] = {
    "loop": "First load the model of the same checkpoint, in the dtype that was trained, and call "
    "optimizer.exchange_now() before you save a model. To continue with the weights that the model "
    "holds, load no momenta",
    "Trainer": "The folder mixes two saves, or Trainer didn't load all weights, as it then says, "
    "such as those of experts: resume from another checkpoint, or make the model with "
    "from_pretrained(checkpoint), in the dtype that was trained, before you resume",
    "Accelerate": "The folder mixes two saves, or the model has another dtype: load another "
    "folder, or make the model in the dtype that was trained",
}
# Prefix of the keys of ages; the keys of momenta are numbers alone.
_AGE = "age."
# Key of the header in the file's metadata, whose values are strings, with the format's version.
_HEADER = "hf_dlion momentum 8"


class CheckpointError(RuntimeError):
    """Momentum files could not be written, or are missing, damaged, or from another run."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """A rank among those that save or load.

    With `local_group`, `local_size` ranks vote as one. `voters` is the number of ranks, nodes, or
    replicas that vote.
    """

    rank: int = 0
    world_size: int = 1
    local_size: int = 1
    voters: int = 1


@dataclass(frozen=True, kw_only=True)
class Header:
    """What a file says about its momenta.

    Attributes:
        save: Id of the save, the same in the files of all ranks.
        step: Number of the last step before the save.
        voters: Number of voters, nodes or replicas, among the ranks that saved.
        shard: Index of the rank's FSDP2 shard, and number of shards; None without FSDP2.
        exchanges: Number of exchanges of local steps.
        weights: Hash of the rank's weights, with local steps after the exchange with which the
            save began.
    """

    save: str
    step: int
    rank: int
    world_size: int
    voters: int
    shard: list[int] | None
    scaler: dict[str, Any] | None
    exchanges: int
    weights: int

    @classmethod
    def of(cls, lion: DistributedLion, save: str, at: Position, scaler: Any) -> Header:
        """Returns the header of a file that a rank writes now."""
        return cls(
            save=save,
            step=lion.steps,
            rank=at.rank,
            world_size=at.world_size,
            voters=at.voters,
            shard=_shard(lion),
            scaler=None if scaler is None else dict(scaler),
            exchanges=lion.local.exchanges,
            weights=_hash_of_weights(lion),
        )

    def to_json(self) -> str:
        """Returns the text that a file holds."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Header:
        """Returns the header that `to_json` wrote.

        Raises:
            ValueError: If the text isn't one; or AttributeError, KeyError, or TypeError.
        """
        values = json.loads(text)
        for name in ("exchanges", "weights"):
            values[name] = int(values[name])
        return cls(**values)


@dataclass
class Loaded:
    """A file's content for this rank, on its device.

    `momenta` have the shapes of their parameters, `ages` are those of rows. `warning` is "" if the
    model holds the weights of the save.
    """

    header: Header
    warning: str = ""
    momenta: dict[Tensor, Tensor] = field(default_factory=dict)
    ages: dict[Tensor, Tensor] = field(default_factory=dict)


def file_name(name: str, rank: int, world_size: int) -> str:
    """Returns the name of a rank's file."""
    return f"{name}_{rank}_of_{world_size}.safetensors"


def files_in(folder: Path, name: str) -> list[tuple[int, int]]:
    """Returns rank and number of ranks of every momentum file in a folder."""
    pattern = re.compile(rf"{re.escape(name)}_(\d+)_of_(\d+)\.safetensors")
    found = (pattern.fullmatch(entry) for entry in sorted(os.listdir(folder)))
    return [(int(match[1]), int(match[2])) for match in found if match]


def write(path: Path, lion: DistributedLion, save: str, at: Position, scaler: Any) -> None:
    """Writes a rank's file, which is complete after a crash or has a temporary name."""
    header = Header.of(lion, save, at, scaler)
    kept: dict[str, Tensor] = {}
    for number, param in enumerate(numbered(lion.param_groups)):
        state = lion.state.get(param, {})
        if "exp_avg" in state:
            kept[str(number)] = fsdp.local_part(state["exp_avg"].detach())
        if (age := lion.params.ages.get(param)) is not None:
            kept[f"{_AGE}{number}"] = age
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        tensors = {key: tensor.cpu().contiguous() for key, tensor in kept.items()}
        save_file(tensors, temporary, {_HEADER: header.to_json()})
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # Not all file systems can write a folder to the disk.
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # The folder has the new name.
        finally:
            os.close(descriptor)


def find_file(at: Position, folder: Path, name: str, caller: Caller) -> Path:
    """Returns the path of the file that a rank loads: that of the first rank of its node.

    If another number of ranks saved, it is a file of the saved voter with the voter's number modulo
    the number of saved voters.

    Raises:
        CheckpointError: If the folder doesn't hold the file, or a file is damaged.
    """
    if not folder.is_dir():
        raise CheckpointError(f"there is no folder {folder}: check the path")
    files, world_size = files_in(folder, name), at.world_size
    rank = at.rank - at.rank % at.local_size
    counts = sorted({count for _, count in files})
    if not counts:
        raise CheckpointError(
            f"{folder} holds no {file_name(name, rank, world_size)}: momenta were not saved, or "
            f"the save was interrupted (then load an earlier one). "
            f"{_NO_MOMENTA[caller]}"
        )
    if world_size not in counts and len(counts) > 1:
        raise CheckpointError(
            f"{folder} holds momenta of several saves, by {counts} ranks, and none by "
            f"{world_size}: keep the files of one save and delete the others"
        )
    saved = world_size if world_size in counts else counts[0]
    if saved != world_size:
        first = next(rank for rank, count in files if count == saved)
        with _opened(any_file := folder / file_name(name, first, saved)) as file:
            header = _read_header(any_file, file.metadata())
        # The ranks of a replica have files of their own; those of a node have equal ones.
        size = at.local_size if header.shard is None else 1
        voters = header.voters if header.shard is None else saved
        rank = at.rank // size % voters * (saved // voters)
    path = folder / file_name(name, rank, saved)
    if (rank, saved) not in files:
        raise CheckpointError(
            f"{path}, the momentum of rank {rank}, is missing: {LOAD_OLDER}. If every node "
            f"has its own disk, copy all files of the checkpoint to this rank's node"
        )
    return path


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} is damaged ({error}): {LOAD_OLDER}") from error


def read(path: Path, lion: DistributedLion, caller: Caller) -> Loaded:
    """Returns a file's content, checked against the optimizer.

    Raises:
        CheckpointError: If the file is damaged or doesn't fit.
    """
    params = numbered(lion.param_groups)
    with _opened(path) as file:
        header = _read_header(path, file.metadata())
        keys = set(file.keys())
        known = {str(number) for number in range(len(params))}
        if not {key.removeprefix(_AGE) for key in keys} <= known:
            raise CheckpointError(
                f"{path} holds momenta of other parameters than the optimizer's {len(params)}: "
                f"{_OTHER_MODEL}"
            )
        saved = {key: file.get_tensor(key) for key in keys}
    _check_state(path, header, lion, caller)
    loaded = Loaded(header, _check_weights(path, header, lion, caller))
    for number, param in enumerate(params):
        if (momentum := saved.get(str(number))) is None:
            continue
        part = fsdp.local_part(param.detach())
        if momentum.shape != part.shape or not momentum.is_floating_point():
            raise _other_model(path, momentum, number, part)
        dtype = lion.options.momentum_dtype or param.dtype
        # Copies, because what safetensors returns is still mapped to the file.
        copied = loaded_momentum(momentum, dtype, part.device)
        loaded.momenta[param] = fsdp.with_local_part(param, copied)
        if (age := saved.get(f"{_AGE}{number}")) is not None:
            loaded.ages[param] = age.to(part.device, copy=True)
    return loaded


def _hash_of_weights(lion: DistributedLion) -> int:
    params = numbered(lion.param_groups)
    return digest(fingerprints([fsdp.local_part(param.detach()) for param in params]))


def _read_header(path: Path, metadata: Mapping[str, str] | None) -> Header:
    try:
        header = Header.from_json((metadata or {})[_HEADER])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{path} is not a momentum file that this hf_dlion can read ({type(error).__name__}: "
            f"{error}): {LOAD_OLDER}"
        ) from error
    if not path.name.endswith(file_name("", header.rank, header.world_size)):
        raise CheckpointError(
            f"{path} holds the momentum of rank {header.rank} of {header.world_size}: restore the "
            f"file's name"
        )
    return header


def _check_state(path: Path, header: Header, lion: DistributedLion, caller: Caller) -> None:
    """Refuses a file that doesn't belong to the state that the optimizer has loaded."""
    # A new optimizer continues from the file's step.
    if header.step != lion.steps and (lion.steps or lion.state):
        raise CheckpointError(
            f"{path} was saved after step {header.step}, but the optimizer is at step "
            f"{lion.steps}. {_OTHER_STEP[caller]}"
        )
    if lion.local.states:
        raise CheckpointError(
            f"the optimizer is between two exchanges of local steps: load the model and the "
            f"optimizer's state_dict() of the same checkpoint before you load {path}"
        )
    if header.shard != _shard(lion):
        raise CheckpointError(
            f"{path} holds shard {header.shard} of the momentum (index, number of shards), but "
            f"this rank has shard {_shard(lion)}: load FSDP2 checkpoints with the mesh that they "
            f"were saved with"
        )


def _check_weights(path: Path, header: Header, lion: DistributedLion, caller: Caller) -> str:
    """Returns a warning if the model has other weights than in the save, "" if it has the same.

    Raises:
        CheckpointError: If it has others, in a run with local steps.
    """
    if header.weights == _hash_of_weights(lion):
        return ""
    text = f"{path} belongs to other weights than the model holds. {_OTHER_WEIGHTS[caller]}"
    if lion.options.vote_every > 1:  # Each rank may hold weights of its own.
        raise CheckpointError(text)
    return text


def _shard(lion: DistributedLion) -> list[int] | None:
    """Returns the index of this rank's FSDP2 shard and the number of shards."""
    shards = [fsdp.shard_index(param) for param in numbered(lion.param_groups)]
    return next((list(shard) for shard in shards if shard is not None), None)


def _other_model(path: Path, found: Tensor, number: int, expected: Tensor) -> CheckpointError:
    return CheckpointError(
        f"{path} holds a momentum of {tuple(found.shape)} {found.dtype} for parameter {number}, "
        f"which is {tuple(expected.shape)} {expected.dtype} on this rank: {_OTHER_MODEL}"
    )
