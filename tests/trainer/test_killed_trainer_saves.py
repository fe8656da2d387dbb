"""A Trainer that is killed at any file operation of a save goes on from the last whole checkpoint.

It ends with the bits of a run that was never interrupted.
"""

from __future__ import annotations

import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

import hf_dlion
from tests.support.faults import Fate, Fault, Injector, Journal, run_struck
from tests.support.tiny import tiny_args, tiny_trainer, weights_digest

pytestmark = pytest.mark.multiproc

SAVED, STRUCK, LAST = 2, 4, 5
# What a process does to files, as Python's audit hooks are told of it.
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate", "shutil.rmtree"}
POINT = "a file operation"


class Note(TrainerCallback):
    """Tells the injector which step it is, and the journal what came of it."""

    def __init__(self, injector: Injector, journal: Journal) -> None:
        self.injector, self.journal = injector, journal

    def on_step_end(self, args, state, control, model=None, **kwargs):
        digest = weights_digest(model)
        self.journal.note(step=state.global_step, digest=digest, abstained=0)
        # What follows until the next step is the save.
        self.injector.step = state.global_step

    def on_save(self, args, state, control, **kwargs):
        self.injector.step = 0


def train(
    rank: int,
    world_size: int,
    resume: bool,
    folder: Path,
    injector: Injector,
    journal: Journal,
) -> None:
    """Trains; every file operation in the folder is a point where it may be killed."""
    if world_size > 1:
        # As torchrun tells Trainer.
        size, own = str(world_size), str(rank)
        os.environ.update(RANK=own, LOCAL_RANK=own, WORLD_SIZE=size, LOCAL_WORLD_SIZE=size)
    hf_dlion.register()
    inside = str(folder)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in EVENTS and injector.step and str(arguments[0]).startswith(inside):
            injector.reach(POINT)

    changes = {"save_strategy": "steps", "save_steps": SAVED, "save_total_limit": 1}
    args = tiny_args(folder, max_steps=LAST, **changes)
    trainer = tiny_trainer(args, callbacks=[Note(injector, journal)])
    sys.addaudithook(hook)
    trainer.train(resume_from_checkpoint=resume)


def undisturbed(world_size: int, folder: Path) -> list[Fate]:
    """Returns what becomes of the ranks if none is killed."""
    fates = run_struck(train, world_size, False, folder)
    assert [fate.code for fate in fates] == [0] * world_size, fates
    assert len({tuple(fate.digests.items()) for fate in fates}) == 1
    return fates


def endure(whole: list[Fate], rank: int, nth: int, folder: Path) -> None:
    """Kills a rank, and checks that what it left resumes to the bits of the undisturbed run."""
    folder.mkdir()
    world_size, digests = len(whole), whole[0].digests
    fault = Fault(kind="kill", rank=rank, step=STRUCK, point=POINT, nth=nth)
    struck = run_struck(train, world_size, False, folder, fault)
    assert all(fate.code != 0 for fate in struck), struck
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = hf_dlion.last_whole_checkpoint(folder)
    assert found is not None, sorted(os.walk(folder))
    resumed = run_struck(train, world_size, True, folder)
    assert [fate.code for fate in resumed] == [0] * world_size, resumed
    first = int(found.rpartition("-")[2]) + 1
    rest = {step: digest for step, digest in digests.items() if step >= first}
    assert all(fate.digests == rest for fate in resumed), "resumed to something else"


@pytest.mark.long
@pytest.mark.slow
def test_a_trainer_killed_in_a_save_goes_on_from_the_last_whole_checkpoint(tmp_path: Path) -> None:
    whole = undisturbed(2, tmp_path / "whole")
    first, second = (fate.passed[STRUCK][POINT] for fate in whole)
    assert first > 20
    assert second > 5
    for rank, nth in ((0, first // 2), (1, second // 2)):
        endure(whole, rank, nth, tmp_path / f"{rank}-{nth}")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_trainer_killed_at_any_file_operation_of_a_save_goes_on(
    tmp_path: Path, world_size: int
) -> None:
    whole = undisturbed(world_size, tmp_path / "whole")
    points = [(r, n) for r, fate in enumerate(whole) for n in range(fate.passed[STRUCK][POINT])]
    with ThreadPoolExecutor(3) as pool:
        trials = [pool.submit(endure, whole, r, n, tmp_path / f"{r}-{n}") for r, n in points]
        failures = {
            point: error
            for point, trial in zip(points, trials, strict=True)
            if (error := trial.exception())
        }
    assert not failures, failures
    print(f"killed at {len(points)} points of a save on {world_size} ranks")
