"""Makes the runs that are missing, in one process or in several."""

from __future__ import annotations

import functools
import math
import os
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

import torch

from benchmarks.convergence.real import run_real
from benchmarks.convergence.records import Record, Records
from benchmarks.convergence.scenes import Scene, scene_class
from benchmarks.convergence.search import Trial, missing
from benchmarks.convergence.setting import Setting
from benchmarks.convergence.train import simulate
from hf_dlion.tools.report import duration, track


def complete(trials: Sequence[Trial], records: Records, jobs: int) -> int:
    """Makes all missing runs of the trials; returns how many.

    Each is in the records as soon as it has been made.

    Args:
        trials: What the study consists of.
        records: Of the runs that are there.
        jobs: Processes, with one thread each.
    """
    _prepare(trials)
    made = 0
    # First those that choose learning rates, then those that take the choices.
    while todo := list(dict.fromkeys(missing(trials, records))):
        runs = track(_records(todo, jobs), "runs", len(todo))
        for number, record in enumerate(runs, 1):
            records.add(record)
            made += 1
            _say(number, len(todo), record)
    return made


def _records(todo: Sequence[Setting], jobs: int) -> Iterator[Record]:
    if jobs == 1 or len(todo) == 1:
        yield from map(_made, todo)
        return
    # One thread each: more of them would wait for one another's cores.
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = [pool.submit(_made, setting) for setting in todo]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def _made(setting: Setting) -> Record:
    return run_real(setting) if setting.real else simulate(setting, _scene_of(setting))


def _scene_of(setting: Setting) -> Scene:
    # Settings that differ in their folder alone are equal, and their bases are not.
    return _scene(_of_scene(setting), setting.folder)


@functools.lru_cache(maxsize=4)
def _scene(setting: Setting, folder: str) -> Scene:
    return scene_class(setting.scene)(setting)


def _of_scene(setting: Setting) -> Setting:
    """Returns the part of a setting that scenes read."""
    return setting.replace(method="", lr=0.0, seed=0, workers=0)


def _prepare(trials: Sequence[Trial]) -> None:
    """Lets every scene make what its runs share, before several processes would at once."""
    for setting in dict.fromkeys(_of_scene(trial.setting) for trial in trials):
        _scene_of(setting).prepare(Path(setting.folder))


def estimate_s(settings: Sequence[Setting]) -> float:
    """Returns the processor time of all runs' gradients, without those of a fine-tuning's base.

    Some of each kind are timed, on one thread.
    """
    times: dict[Setting, float] = {}
    total = 0.0
    for setting in settings:
        kind = _of_scene(setting)
        if kind not in times:
            times[kind] = _gradient_s(_scene_of(kind))
        total += setting.steps * setting.workers * times[kind]
    return total


def _gradient_s(scene: Scene) -> float:
    model, best = scene.untrained(0), math.inf
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for step in range(8):
            batch, before = scene.batch(0, step, 0), time.process_time()
            scene.loss(model, batch).backward()  # type: ignore[no-untyped-call]
            best = min(best, time.process_time() - before)
    finally:
        torch.set_num_threads(threads)
    return best


def _say(number: int, count: int, record: Record) -> None:
    own = Setting.of(record["setting"])
    loss = "diverged" if record["loss"] is None else f"{record['loss']:.4f}"
    print(
        f"{number}/{count}  {own.scene} {own.method} {own.workers}x{own.batch} lr {own.lr:g} "
        f"seed {own.seed}: {loss}, {duration(record['seconds'])}",
        file=sys.stderr,
        flush=True,
    )
