"""A checkpoint is on the disk, with what every rank wrote, before it counts or older ones go."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import TrainerState

import hf_dlion
from hf_dlion import DistributedLion, last_whole_checkpoint, saving
from hf_dlion.checkpoint.whole import COMPLETE
from tests.support.spawn import RankPools
from tests.support.tiny import tiny_args, tiny_trainer

pytestmark = pytest.mark.multiproc

# So much after the other rank has nothing left to do.
LATE_S = 0.3
LATE = "rng_state_1.pth"


class Recorder:
    """What a rank synchronised and what made its checkpoint count, each with the time.

    Attributes:
        syncs: Of files and folders, by their inodes, which a renaming does not change.
        marks: Of what makes the checkpoint a whole one: a renaming, or Trainer's last file.
        deletions: Of older ones.
    """

    def __init__(self) -> None:
        self.syncs: list[tuple[int, int]] = []
        self.marks: list[int] = []
        self.deletions: list[int] = []

    @contextlib.contextmanager
    def watch(self, full: str) -> Iterator[None]:
        """Notes calls; has the disk be full when the late file is written or synchronised."""
        fsync, replace, rmtree, save = os.fsync, os.replace, shutil.rmtree, torch.save
        save_to_json = TrainerState.save_to_json

        def note_sync(descriptor):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if full == "when synchronised" and name.endswith(LATE):
                raise OSError(errno.ENOSPC, "No space left on device (injected)")
            self.syncs.append((os.fstat(descriptor).st_ino, time.time_ns()))
            fsync(descriptor)

        def note_end(path, target):
            if Path(target).name == COMPLETE:
                self.marks.append(time.time_ns())
            replace(path, target)

        def note_last_file(state, path):
            self.marks.append(time.time_ns())
            save_to_json(state, path)

        def note_deletion(path, *args, **kwargs):
            self.deletions.append(time.time_ns())
            rmtree(path, *args, **kwargs)

        def save_late(content, target, *args, **kwargs):
            if str(target).endswith(LATE):
                time.sleep(LATE_S)
                if full == "when written":
                    raise OSError(errno.ENOSPC, "No space left on device (injected)")
            save(content, target, *args, **kwargs)

        os.fsync, os.replace, torch.save = note_sync, note_end, save_late
        shutil.rmtree, TrainerState.save_to_json = note_deletion, note_last_file
        try:
            yield
        finally:
            os.fsync, os.replace, torch.save = fsync, replace, save
            shutil.rmtree, TrainerState.save_to_json = rmtree, save_to_json


def save_in_a_loop(rank, folder, step):
    optimizer = DistributedLion(nn.Linear(4, 2).named_parameters())
    with saving(optimizer, f"{folder}/checkpoint-{step}") as place:
        if rank == 0:
            torch.save(optimizer.state_dict(), place / "optimizer.pt")
        else:
            torch.save(torch.get_rng_state(), place / LATE)
        hf_dlion.save_momentum(optimizer, place)


def save_in_trainer(rank, folder, step, **changes):
    hf_dlion.register()
    args = tiny_args(
        folder,
        max_steps=step,
        save_strategy="steps",
        save_steps=step,
        save_total_limit=1,
        **changes,
    )
    tiny_trainer(args).train()


def save_model_only(rank, folder, step):
    save_in_trainer(rank, folder, step, save_only_model=True)


WAYS = {"loop": save_in_a_loop, "Trainer": save_in_trainer, "model only": save_model_only}


def save_twice(rank, world_size, folder, way, full):
    WAYS[way](rank, folder, 1)
    torch.distributed.barrier()
    recorder, error = Recorder(), ""
    with recorder.watch(full):
        try:
            WAYS[way](rank, folder, 2)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
    return recorder, error


@pytest.mark.parametrize("way", WAYS)
def test_every_file_is_on_the_disk_before_a_checkpoint_counts(ranks: RankPools, tmp_path, way):
    told = ranks(2).run(save_twice, str(tmp_path), way, "never", timeout=60)
    assert [error for _, error in told] == ["", ""]
    recorders = [recorder for recorder, _ in told]
    mark = min(time for recorder in recorders for time in recorder.marks)
    deletions = [time for recorder in recorders for time in recorder.deletions]
    assert len(deletions) == (way != "loop")
    new = tmp_path / "checkpoint-2"
    for path in [tmp_path, *([new] if deletions else []), *new.iterdir()]:
        status = path.stat()
        # The name of the new folder was put in its parent before the first file in it.
        first = min(file.stat().st_mtime_ns for file in new.iterdir())
        since = first if path == tmp_path else status.st_mtime_ns
        until = min(deletions) if path in (new, new / "trainer_state.json") else mark
        syncs = [time for own in recorders for inode, time in own.syncs if inode == status.st_ino]
        assert any(since <= time <= until for time in syncs), path.name


@pytest.mark.parametrize("full", ["when written", "when synchronised"])
@pytest.mark.parametrize("way", ["loop", "Trainer"])
def test_a_late_file_that_the_disk_has_no_room_for_keeps_the_older_checkpoint(
    ranks: RankPools, tmp_path, way, full
):
    told = ranks(2).run(save_twice, str(tmp_path), way, full, timeout=60)
    failing = 1 if full == "when written" else 0
    assert told[failing][1] == "OSError: [Errno 28] No space left on device (injected)"
    assert f"failed on 1 of 2 ranks: rank {failing}: OSError" in told[1 - failing][1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
