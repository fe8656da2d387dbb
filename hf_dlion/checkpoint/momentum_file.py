"""One file that holds the momentum of one rank."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from hf_dlion.checkpoint.durable import replace_file

# What the files' names start with, unless a user gives another.
MOMENTUM_NAME = "dlion_momentum"
FORMAT = "hf_dlion momentum"
VERSION = 3
# Version 1 is from before nodes could vote as one: such a file holds whole momenta. Version 2 has
# no checksum of what is not a tensor.
_VERSIONS = (1, 2, VERSION)
_FILE_NAME = re.compile(r"(.+)_(\d+)_of_(\d+)\.pt")


class CheckpointError(RuntimeError):
    """A checkpoint's momenta are missing, damaged, or not those of this optimizer."""


@dataclass(frozen=True, kw_only=True)
class MomentumFile:
    """What one file holds.

    Attributes:
        rank: The rank whose momentum this is.
        world_size: The number of ranks of the run that saved it.
        steps: The step after which it was saved.
        names: The parameters' names, in the order of the flattened groups; empty if unknown.
        shapes: The parameters' shapes, in the same order.
        exp_avg: Momenta on the CPU, by the parameter's index; a parameter that has not been
            stepped has none.
        scaler: State of this rank's GradScaler, if there is one.
        members: The ranks of each node, where a node votes as one and its ranks share out its
            momentum; else empty.
        ranges: Start and stop of each momentum that is a stretch, by the parameter's index: then
            it is 1-D; the others are whole.
    """

    rank: int
    world_size: int
    steps: int
    names: list[str]
    shapes: list[list[int]]
    exp_avg: dict[int, torch.Tensor] = field(default_factory=dict)
    scaler: dict[str, Any] | None = None
    members: list[list[int]] = field(default_factory=list)
    ranges: dict[int, list[int]] = field(default_factory=dict)


def file_name(name: str, rank: int, world_size: int) -> str:
    """Returns the name of a rank's file, for example "dlion_momentum_0_of_2.pt"."""
    return f"{name}_{rank}_of_{world_size}.pt"


def saved_momenta(names: Iterable[str]) -> dict[str, dict[int, set[int]]]:
    """Returns the ranks of momentum files, by how their names start and the number of ranks."""
    found: dict[str, dict[int, set[int]]] = {}
    for name in names:
        if match := _FILE_NAME.fullmatch(name):
            by_size = found.setdefault(match[1], {})
            by_size.setdefault(int(match[3]), set()).add(int(match[2]))
    return found


def saved_ranks(folder: Path, name: str) -> dict[int, set[int]]:
    """Returns the ranks whose files are in `folder`, by the world size of the run that saved."""
    entries = folder.iterdir() if folder.is_dir() else ()
    return saved_momenta(entry.name for entry in entries).get(name, {})


def write(path: Path, content: MomentumFile) -> None:
    """Writes `content` to `path`, which holds either the whole of it or what it held before.

    Raises:
        OSError: If the file cannot be written.
    """
    payload = {
        "format": FORMAT,
        "version": VERSION,
        **vars(content),
        "crc32": {index: _crc32(tensor) for index, tensor in content.exp_avg.items()},
        "rest_crc32": _rest_crc32(content),
    }
    replace_file(path, lambda file: torch.save(payload, file))


def read(path: Path) -> MomentumFile:
    """Returns what `path` holds, with tensors on the CPU.

    Raises:
        CheckpointError: If the file is missing, damaged, of another version, or something else.
    """
    payload = _payload(path)
    if payload is None:
        raise CheckpointError(f"{path} does not hold the momentum of a DistributedLion")
    if payload.get("version") not in _VERSIONS:
        raise CheckpointError(
            f"{path} has version {payload.get('version')}, this hf_dlion reads versions up to "
            f"{VERSION}"
        )
    fields = MomentumFile.__dataclass_fields__
    if payload["version"] == 1:
        payload = {"members": [], "ranges": {}, **payload}
    checksums = {"crc32"} if payload["version"] < 3 else {"crc32", "rest_crc32"}
    if payload.keys() != {"format", "version", *checksums, *fields}:
        raise CheckpointError(f"{path} is damaged: it holds {', '.join(map(str, payload))}")
    content = MomentumFile(**{name: payload[name] for name in fields})
    if payload["version"] >= 3 and _rest_crc32(content) != payload["rest_crc32"]:
        raise CheckpointError(f"{path} is damaged: what it says of the momenta changed")
    for index, tensor in content.exp_avg.items():
        if _crc32(tensor) != payload["crc32"].get(index):
            raise CheckpointError(f"{path} is damaged: the momentum of parameter {index} changed")
    return content


def read_step(path: Path) -> int | None:
    """Returns the step after which a file was saved, without reading tensors.

    Returns:
        The step, or None if the file is not of a DistributedLion.

    Raises:
        CheckpointError: If the file is missing or damaged.
    """
    payload = _payload(path, mmap=True)
    if payload is None:
        return None
    if not isinstance(payload.get("steps"), int):
        raise CheckpointError(f"{path} is damaged: it does not say of which step it is")
    return int(payload["steps"])


def _payload(path: Path, mmap: bool = False) -> Mapping[str, Any] | None:
    """Returns the mapping in a file, or None if it is none of ours."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing")
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except Exception as error:  # torch raises half a dozen types for a damaged file.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise CheckpointError(f"{path} is damaged: {reason}") from error
    ours = isinstance(payload, Mapping) and payload.get("format") == FORMAT
    return payload if ours else None


def _crc32(tensor: torch.Tensor) -> int:
    # torch.load does not check the checksums that its own format has.
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)


def _rest_crc32(content: MomentumFile) -> int:
    """Returns a checksum of all that is not a tensor, whose kinds and shapes are in it, too."""
    kinds = {i: (str(m.dtype), list(m.shape)) for i, m in content.exp_avg.items()}
    return zlib.crc32(repr({**vars(content), "exp_avg": kinds}).encode())
