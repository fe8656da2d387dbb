"""Which checkpoints are whole: what a crash left half written must not be taken for one.

Of files only ends, sizes and headers are read, and what lists the parts of a distributed
checkpoint, never tensors. A checkpoint is whole if

- its writing ended: Trainer writes `trainer_state.json` last (after all ranks are done, where
  `hf_dlion.register()` was called), and `hf_dlion.saving` and `hf_dlion.accelerate.attach` rename
  `checkpoint-is-incomplete.txt` to `checkpoint-is-complete.txt`;
- each file that a resumed run reads is as long as it says itself;
- the momenta of all ranks are there, and of the step of the optimizer's state.
"""

from __future__ import annotations

import json
import os
import re
import warnings
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from hf_dlion.checkpoint.durable import sync_folder
from hf_dlion.checkpoint.momentum_file import (
    MOMENTUM_NAME,
    CheckpointError,
    file_name,
    read_step,
    saved_momenta,
)

# The first is transformers' own, for a checkpoint that it writes when a job is terminated.
INCOMPLETE = "checkpoint-is-incomplete.txt"
COMPLETE = "checkpoint-is-complete.txt"
TRAINER_STATE = "trainer_state.json"
# How Trainer names an optimizer's state: by itself, and whole or in parts under FSDP.
TRAINERS_OPTIMIZERS = ("optimizer.pt", "optimizer.bin", "optimizer_0")

# What torch.save writes for Trainer, Accelerate and us.
_OPTIMIZERS = ("optimizer*.pt", "optimizer*.bin")
_TORCH_FILES = (
    *(*_OPTIMIZERS, "scheduler*.pt", "scheduler*.bin", "scaler.pt"),
    *("rng_state*.pth", "random_states_*.pkl", "sampler*.bin", "custom_checkpoint_*.pkl"),
    *("pytorch_model*.bin", "adapter_model*.bin", "training_args.bin"),
)
_INDICES = ("*.safetensors.index.json", "*.bin.index.json")
_JSON_FILES = (TRAINER_STATE, "config.json", "adapter_config.json", *_INDICES)
_KNOWN_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model*.bin")
_KNOWN = (COMPLETE, INCOMPLETE, *_TORCH_FILES, *_JSON_FILES, *_KNOWN_WEIGHTS)
# A Trainer of one's own may give the weights any name.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt")
_NO_WEIGHTS = ("optimizer.*", "scheduler.*", "scaler.*", "rng_state*", "training_args.*", "dlion_*")
# Folders of torch's distributed checkpoints, as Trainer and Accelerate name them under FSDP.
_MODEL_PARTS, _OPTIMIZER_PARTS = "pytorch_model_fsdp_[0-9]*", "optimizer_[0-9]*"
_PARTS = (_MODEL_PARTS, _OPTIMIZER_PARTS)
_FOLDER = re.compile(r"checkpoint[-_](\d+)")
_TRAINERS_FOLDER = re.compile(r"checkpoint-\d+")
_ACCELERATES_FOLDER = re.compile(r"checkpoint_\d+")
# What reading a file that is cut, or holds something else, may raise.
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile)
_SHARD = re.compile(r"(.+)-0*1-of-\d+(\.safetensors|\.bin)")
_OF_A_RANK = re.compile(r"(?:rng_state|random_states)_(\d+)\.(?:pth|pkl)")


def last_whole_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Returns the newest whole checkpoint in a folder, or None if there is none.

    Warns of each newer one that is not whole, and says why. `trainer.train(
    resume_from_checkpoint=True)` does this by itself after `hf_dlion.register()`, and agrees on it
    over the ranks; this function communicates nothing, and is right where all ranks see the same
    files and none is being written.

    Args:
        output_dir: Holds folders named `checkpoint-N` (Trainer) or `checkpoint_N` (Accelerate).
    """
    for name in checkpoint_names(output_dir):
        folder = Path(output_dir, name)
        problems = problems_in(folder)
        if not problems:
            return str(folder)
        warnings.warn(passed_over(folder, problems), stacklevel=2)
    return None


def checkpoint_names(output_dir: str | os.PathLike[str]) -> list[str]:
    """Returns the names of the checkpoints in a folder, the newest first."""
    output_dir = Path(output_dir)
    entries = output_dir.iterdir() if output_dir.is_dir() else ()
    found = [path.name for path in entries if _FOLDER.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=number_of, reverse=True)


def number_of(name: str) -> int:
    """Returns the number in a checkpoint's name."""
    match = _FOLDER.fullmatch(name)
    assert match is not None, "checkpoint_names returns no other"
    return int(match[1])


def passed_over(folder: str | os.PathLike[str], problems: Iterable[str]) -> str:
    """Returns what is said of a checkpoint that is not whole."""
    return f"passed over {folder}, which is not whole: {'; '.join(problems)}"


def begin(folder: Path) -> None:
    """Marks a checkpoint as incomplete; several ranks may do so."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / INCOMPLETE).touch()
    (folder / COMPLETE).unlink(missing_ok=True)
    sync_folder(folder)


def finish(folder: Path) -> None:
    """Marks a checkpoint as complete; several ranks may do so."""
    try:
        (folder / INCOMPLETE).replace(folder / COMPLETE)
    except FileNotFoundError:
        # Listed, because an NFS client remembers for a while that a single name did not exist.
        if COMPLETE not in os.listdir(folder):
            raise
    sync_folder(folder)


def is_unfinished(folder: Path) -> bool:
    """Returns whether the saving of a checkpoint began and did not end, by its names alone."""
    names = set(os.listdir(folder))
    if TRAINER_STATE in names or not names:
        return not names
    # Without any mark it is one that Trainer has not ended, or that Accelerate saved without us.
    of_trainer = _TRAINERS_FOLDER.fullmatch(folder.name) is not None
    return INCOMPLETE in names or (of_trainer and COMPLETE not in names)


@dataclass(frozen=True)
class Momenta:
    """What one rank found of momentum files whose names start alike.

    Attributes:
        steps: The step that a file says it is of.
        problems: In words; they count if one of the files turns out to be ours.
    """

    steps: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Finding:
    """What one rank found in a checkpoint.

    Attributes:
        problems: In words.
        momenta: By what the names of their files start with.
    """

    problems: list[str] = field(default_factory=list)
    momenta: dict[str, Momenta] = field(default_factory=dict)


def problems_in(folder: str | os.PathLike[str]) -> list[str]:
    """Returns what makes a checkpoint no whole one, in words; nothing if it is whole."""
    return judged([examine(folder)])


def judged(findings: Sequence[Finding]) -> list[str]:
    """Returns what makes a checkpoint no whole one, from what each of the ranks found.

    What all of them found is said once, the rest of each by rank.
    """
    momenta = [item for found in findings for item in found.momenta.items()]
    # Another program may have files that are named like ours, whatever they hold.
    ours = sorted({name for name, own in momenta if name.startswith(MOMENTUM_NAME) or own.steps})
    told = [
        [
            *found.problems,
            *(p for name in ours for p in found.momenta.get(name, Momenta()).problems),
        ]
        for found in findings
    ]
    common = [problem for problem in told[0] if all(problem in others for others in told)]
    problems = list(common)
    for rank, said in enumerate(told):
        if rest := [problem for problem in said if problem not in common]:
            problems.append(f"rank {rank}: {'; '.join(rest)}")
    for name in ours:
        steps = sorted(
            {item for other, own in momenta if other == name for item in own.steps.items()}
        )
        if len({step for _, step in steps}) > 1:
            listed = ", ".join(f"{file} after step {step}" for file, step in steps)
            problems.append(f"its files are of different steps: {listed}")
    return problems


def examine(
    folder: str | os.PathLike[str],
    ranks_of: Callable[[int], Iterable[int]] = range,
    reads: Callable[[int], bool] = lambda rank: True,
) -> Finding:
    """Returns what one rank finds in a checkpoint.

    Args:
        folder: The checkpoint.
        ranks_of: Gets the number of ranks that saved it, and returns those whose files must be
            here: not all, where each node has a disk of its own.
        reads: Says whether this rank opens the files of a rank that saved: there are as many as
            ranks, so each opens a few of them. It opens those that are common to the ranks.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return Finding([f"there is no {folder}"])
    # What lies deeper is another program's, except PEFT's adapters beside the first, and parts.
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    adapters = [path for path in sorted(folder.glob("*/adapter_model.*")) if path.is_file()]
    parts = [p for p in sorted(folder.iterdir()) if p.is_dir() and _is_like(p.name, _PARTS)]
    names = {path.name for path in files}
    saved = saved_momenta(names)
    of_trainer = TRAINER_STATE in names
    # Files that are cut or hold something else.
    problems = [
        f"{path.name} {what}"
        for path in [*files, *adapters]
        if (rank := _rank_of(path.name)) is None or reads(rank)
        for what in _damages(path)
    ]
    problems += [f"{path.name} {what}" for path in parts for what in _damages_of_parts(path)]
    # Whether its writing ended, as its own way of saving marks that.
    if not of_trainer and INCOMPLETE in names:
        problems.append("its saving did not end")
    elif not saved and not any(_is_like(name, _KNOWN) for name in names):
        # What a killed job made before anything was written into it, the mark included.
        return Finding(["it is empty"])
    elif not of_trainer and COMPLETE not in names:
        if _TRAINERS_FOLDER.fullmatch(folder.name):
            problems.append(f"{TRAINER_STATE} is missing")
        elif _ACCELERATES_FOLDER.fullmatch(folder.name):
            present = (*names, *(path.name for path in parts))
            states = (*_OPTIMIZERS, _OPTIMIZER_PARTS)
            stated = saved or any(_is_like(name, states) for name in present)
            problems += [] if stated else ["it holds neither a momentum nor an optimizer's state"]
    # Files that a resumed run would miss.
    weights = [path for path in parts if _is_like(path.name, [_MODEL_PARTS])] or [
        path
        for path in folder.rglob("*")
        if _is_like(path.name, _WEIGHTS) and not _is_like(path.name, _NO_WEIGHTS)
    ]
    if of_trainer and not weights:
        problems.append("the model's weights are missing")
    for name in sorted(names):
        if match := _SHARD.fullmatch(name):
            index = f"{match[1]}{match[2]}.index.json"
            problems += [f"{index} is missing"] if index not in names else []
    optimizers = {*names, *(path.name for path in parts)} & {*TRAINERS_OPTIMIZERS}
    scheduled = "scheduler.pt" in names
    if of_trainer and (MOMENTUM_NAME in saved or optimizers or scheduled):
        problems += [] if optimizers else [f"{TRAINERS_OPTIMIZERS[0]} is missing"]
        problems += [] if scheduled else ["scheduler.pt is missing"]
    if of_trainer:
        for size in saved.get(MOMENTUM_NAME, ()):
            wanted = [f"rng_state_{rank}.pth" for rank in ranks_of(size)]
            if size > 1:
                problems += [f"{name} is missing" for name in wanted if name not in names]
    momenta = {
        name: _momenta(folder, name, by_size, ranks_of, reads) for name, by_size in saved.items()
    }
    return Finding(problems, momenta)


def _is_like(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _rank_of(name: str) -> int | None:
    """Returns the rank that saved a file, or None if it is one of those that the ranks share."""
    match = _OF_A_RANK.fullmatch(name)
    return None if match is None else int(match[1])


def _damages(path: Path) -> Iterator[str]:
    """Yields what is wrong with one file."""
    try:
        if path.name.endswith(".safetensors"):
            _check_safetensors(path)
        elif _is_like(path.name, _TORCH_FILES):
            _check_zip(path)
        elif _is_like(path.name, _JSON_FILES):
            content = json.loads(path.read_bytes())
            if path.name.endswith(".index.json"):
                for shard in sorted(set(content.get("weight_map", {}).values())):
                    if not path.with_name(shard).is_file():
                        yield f"names {shard}, which is missing"
    except _DAMAGED as error:
        yield f"is damaged ({error})"


def _damages_of_parts(folder: Path) -> Iterator[str]:
    """Yields what is wrong with a distributed checkpoint, whose list of parts is written last."""
    if not (folder / ".metadata").is_file():
        yield "is not complete: its .metadata is missing"
        return
    try:
        stored = FileSystemReader(folder).read_metadata().storage_data or {}
        sizes: dict[str, int] = {}
        for entry in stored.values():
            end = entry.offset + entry.length
            sizes[entry.relative_path] = max(end, sizes.get(entry.relative_path, 0))
    except Exception as error:  # pickle raises what it likes.
        yield f"is damaged: .metadata cannot be read ({error})"
        return
    for name, wanted in sorted(sizes.items()):
        size = (folder / name).stat().st_size if (folder / name).is_file() else None
        if size is None:
            yield f"lacks {name}"
        elif size < wanted:
            yield f"is damaged: {name} has {size} bytes instead of {wanted}"


def _check_safetensors(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 2 <= length <= size - 8:
            raise ValueError("its header is cut or empty")
        header = json.loads(file.read(length))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    wanted = 8 + length + max(ends, default=0)
    if size != wanted:
        raise ValueError(f"it has {size} bytes instead of {wanted}")


def _check_zip(path: Path) -> None:
    with path.open("rb") as file, zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            file.seek(entry.header_offset)
            if file.read(4) != b"PK\x03\x04":
                raise ValueError(f"{entry.filename} in it is overwritten")


def _momenta(
    folder: Path,
    name: str,
    by_size: dict[int, set[int]],
    ranks_of: Callable[[int], Iterable[int]],
    reads: Callable[[int], bool],
) -> Momenta:
    """Returns what one rank finds of the momentum files whose names start with `name`."""
    found = Momenta()
    for size, ranks in by_size.items():
        for rank in sorted({*ranks_of(size), *ranks}):
            file = file_name(name, rank, size)
            if rank not in ranks:
                found.problems.append(f"{file} is missing")
            elif reads(rank):
                try:
                    _check_zip(folder / file)
                    if (step := read_step(folder / file)) is not None:
                        found.steps[file] = step
                    elif name.startswith(MOMENTUM_NAME):
                        found.problems.append(f"{file} does not hold a momentum")
                except CheckpointError as error:
                    found.problems.append(str(error).replace(f"{folder}{os.sep}", ""))
                except (OSError, ValueError, zipfile.BadZipFile) as error:
                    found.problems.append(f"{file} is damaged ({error})")
    if len(by_size) > 1:
        found.problems.append(f"it holds momenta of runs with {sorted(by_size)} ranks")
    if name.startswith(MOMENTUM_NAME):
        suffix = name.removeprefix(MOMENTUM_NAME)
        for file in (f"optimizer{suffix}.pt", f"optimizer{suffix}.bin"):
            if (step := _step_of_optimizer(folder / file)) is not None:
                found.steps[file] = step
    return found


def _step_of_optimizer(path: Path) -> int | None:
    """Returns the step of an optimizer's state, or None if it does not say."""
    if not path.is_file():
        return None
    try:
        state: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return int(state["dlion"]["steps"])
    except Exception:  # If it is damaged, `_damages` or the loading says so.
        return None
