"""Which checkpoints are whole: what a crash left half written must not be taken for one.

Only ends, sizes and headers of files are read, never their tensors. A checkpoint is whole if

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
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from hf_dlion.durable import sync_folder
from hf_dlion.momentum_file import CheckpointError, read_step

# The first is transformers' own, for a checkpoint that it writes when a job is terminated.
INCOMPLETE = "checkpoint-is-incomplete.txt"
COMPLETE = "checkpoint-is-complete.txt"
TRAINER_STATE = "trainer_state.json"

# What torch.save writes for Trainer, Accelerate and us.
_OPTIMIZERS = ("optimizer*.pt", "optimizer*.bin")
_TORCH_FILES = (
    *(*_OPTIMIZERS, "scheduler*.pt", "scheduler*.bin", "scaler.pt"),
    *("rng_state*.pth", "random_states_*.pkl", "sampler*.bin", "custom_checkpoint_*.pkl"),
    *("pytorch_model*.bin", "adapter_model*.bin", "training_args.bin", "*_of_*.pt"),
)
_JSON_FILES = (TRAINER_STATE, "config.json", "adapter_config.json", "*.index.json")
_WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "adapter_model*.bin")
_KNOWN = (COMPLETE, INCOMPLETE, *_TORCH_FILES, *_JSON_FILES, *_WEIGHTS)
_FOLDER = re.compile(r"checkpoint[-_](\d+)")
_TRAINERS_FOLDER = re.compile(r"checkpoint-\d+")
_ACCELERATES_FOLDER = re.compile(r"checkpoint_\d+")
_SHARD = re.compile(r"(.+)-0*1-of-\d+(\.safetensors|\.bin)")
_MOMENTUM = re.compile(r"(.+)_(\d+)_of_(\d+)\.pt")


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


def problems_in(
    folder: str | os.PathLike[str], ranks_of: Callable[[int], Iterable[int]] = range
) -> list[str]:
    """Returns what makes a checkpoint no whole one, in words; nothing if it is whole.

    Args:
        folder: The checkpoint.
        ranks_of: Gets the number of ranks that saved it, and returns those whose files must be
            here: not all, where each node has a disk of its own.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return [f"there is no {folder}"]
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    problems = [f"{path.name} {what}" for path in files for what in _damages(path)]
    names = {path.relative_to(folder).as_posix() for path in files}
    saved = _saved_momenta(names)
    of_trainer = TRAINER_STATE in names
    if not of_trainer and INCOMPLETE in names:
        problems.append("its saving did not end")
    elif not saved and not any(_is_like(name, _KNOWN) for name in names):
        # What a killed job made before anything was written into it, the mark included.
        return ["it is empty"]
    elif not of_trainer and COMPLETE not in names:
        if _TRAINERS_FOLDER.fullmatch(folder.name):
            problems.append(f"{TRAINER_STATE} is missing")
        elif _ACCELERATES_FOLDER.fullmatch(folder.name):
            stated = saved or any(_is_like(name, _OPTIMIZERS) for name in names)
            problems += [] if stated else ["it holds neither a momentum nor an optimizer's state"]
    if of_trainer and not any(_is_like(path.name, _WEIGHTS) for path in files):
        problems.append("the model's weights are missing")
    for name in sorted(names):
        if match := _SHARD.fullmatch(name):
            index = f"{match[1]}{match[2]}.index.json"
            problems += [f"{index} is missing"] if index not in names else []
    state = {"optimizer.pt", "scheduler.pt"}
    if of_trainer and (saved or state & names):
        problems += [f"{name} is missing" for name in sorted(state - names)]
    for name, by_size in saved.items():
        problems += _momentum_problems(folder, name, by_size, ranks_of)
    if of_trainer and "dlion_momentum" in saved:
        for size in saved["dlion_momentum"]:
            wanted = [f"rng_state_{rank}.pth" for rank in ranks_of(size)]
            if size > 1:
                problems += [f"{name} is missing" for name in wanted if name not in names]
    return problems


def _is_like(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


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
                shards = sorted(set(content.get("weight_map", {}).values()))
                yield from (f"names {s}, which is missing" for s in shards if _lacks(path, s))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        yield f"is damaged ({error})"
    except zipfile.BadZipFile as error:
        yield f"is damaged ({error})"


def _lacks(index: Path, shard: str) -> bool:
    return not index.with_name(shard).is_file()


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
    with zipfile.ZipFile(path) as archive, path.open("rb") as file:
        for entry in archive.infolist():
            file.seek(entry.header_offset)
            if file.read(4) != b"PK\x03\x04":
                raise ValueError(f"{entry.filename} in it is overwritten")


def _saved_momenta(names: Iterable[str]) -> dict[str, dict[int, set[int]]]:
    """Returns the ranks of the momenta, by what their names start with and the number of ranks."""
    found: dict[str, dict[int, set[int]]] = {}
    for name in names:
        if (match := _MOMENTUM.fullmatch(name)) and "/" not in name:
            by_size = found.setdefault(match[1], {})
            by_size.setdefault(int(match[3]), set()).add(int(match[2]))
    return found


def _momentum_problems(
    folder: Path,
    name: str,
    by_size: dict[int, set[int]],
    ranks_of: Callable[[int], Iterable[int]],
) -> list[str]:
    steps: dict[str, int] = {}
    problems = []
    for size, ranks in by_size.items():
        for rank in sorted({*ranks_of(size), *ranks}):
            file = f"{name}_{rank}_of_{size}.pt"
            try:
                step = read_step(folder / file)
            except CheckpointError as error:
                problems.append(str(error).replace(f"{folder}{os.sep}", ""))
                continue
            if step is None:
                return []  # Another program's file that is named like ours.
            steps[file] = step
    if len(by_size) > 1:
        problems.append(f"it holds momenta of runs with {sorted(by_size)} ranks")
    suffix = name.removeprefix("dlion_momentum")
    for file in {f"optimizer{suffix}.pt", f"optimizer{suffix}.bin"}:
        if suffix != name and (step := _step_of_optimizer(folder / file)) is not None:
            steps[file] = step
    if len(set(steps.values())) > 1:
        told = ", ".join(f"{file} after step {step}" for file, step in sorted(steps.items()))
        problems.append(f"its files are of different steps: {told}")
    return problems


def _step_of_optimizer(path: Path) -> int | None:
    """Returns the step of an optimizer's state, or None if it does not say."""
    if not path.is_file():
        return None
    try:
        state: Any = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        return int(state["dlion"]["steps"])
    except Exception:  # If it is damaged, `_damages` or the loading says so.
        return None
