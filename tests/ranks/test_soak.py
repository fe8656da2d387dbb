"""Faults at random: of any kind, on any rank, at any point of any kind of training.

Every trial is drawn from the seed and its own number alone. A failure names both;

    SOAK_SEED=1 SOAK_TRIALS=17 pytest -m long tests/ranks/test_soak.py

repeats it alone ("17-20,31" repeats several).
"""

from __future__ import annotations

import collections
import os
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.fault_trial import Trial, endure, undisturbed
from tests.support.faults import Fate, Fault
from tests.support.faulty_training import Job

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

# As often as named: a stall takes as long as a timeout.
KINDS = {"kill": 8, "term": 2, "raise": 4, "disk": 3, "nan": 3, "inf": 2, "stop": 2}
STEPS, SAVE_EVERY = 6, 2
IN_STEP = ("before the header", "after the header", "before the step", "after the step")

Place = tuple[Job, int]


def places(short: bool) -> list[Place]:
    """Returns the kinds of training: job and number of ranks."""
    sizes = {"plain": (2, 3, 4), "ddp": (2, 3, 4), "overlap": (2, 3, 4)}
    sizes |= {"node": (4, 2), "node plain": (4, 2)}
    found = []
    for mode, counts in sizes.items():
        for world_size in counts[:1] if short else counts:
            for dtype in ("float32", "bfloat16"):
                for exchange in ("two_phase", "gather"):
                    options = {
                        "exchange": exchange,
                        "aggregation": "average" if world_size == 3 else "majority",
                        "check_replicas_every": 3 if dtype == "bfloat16" else 0,
                    }
                    job = Job(
                        mode=mode,
                        dtype=dtype,
                        options=options,
                        steps=STEPS,
                        save_every=SAVE_EVERY,
                    )
                    found.append((job, world_size))
    # One of dtype and exchange for each, so that few undisturbed runs are needed.
    return found[:: 4 if not short else 5] + ([] if short else found[3::4])


def draw_place(seed: int, number: int, short: bool) -> tuple[random.Random, Place]:
    rng = random.Random(f"{seed}/{number}")
    return rng, rng.choice(places(short))


def draw_fault(rng: random.Random, world_size: int, reference: Sequence[Fate]) -> Fault:
    """Returns a fault at a point that an undisturbed run passes."""
    (kind,) = rng.choices(list(KINDS), list(KINDS.values()))
    rank = rng.randrange(world_size)
    step = rng.randrange(2, STEPS)
    if kind in ("nan", "inf"):
        struck = -1 if rng.random() < 0.3 else rank
        count = reference[rank].passed[step]["a gradient"]
        nth = rng.randrange(count)
        return Fault(kind=kind, rank=struck, step=step, point="a gradient", nth=nth)
    if kind == "disk":
        step = rng.choice(range(SAVE_EVERY, STEPS, SAVE_EVERY))
    passed = reference[rank].passed[step]
    on_disk = {"within a file", "before a sync"}
    points = sorted(on_disk if kind == "disk" else set(passed) - {"a gradient"})
    point = rng.choice(points)
    nth = rng.randrange(passed[point])
    return Fault(kind=kind, rank=rank, step=step, point=point, nth=nth)


def soak(seed: int, numbers: Sequence[int], folder: Path, short: bool, at_once: int) -> str:
    """Runs trials, several at a time, and returns a line on what they were.

    Raises:
        AssertionError: With the seed and number of each trial that failed, and how.
    """
    began = time.monotonic()
    drawn = {number: draw_place(seed, number, short) for number in numbers}
    used = {repr(place): place for _, place in drawn.values()}
    kinds: collections.Counter[str] = collections.Counter()

    def quiet(name: str, run: Callable[[Path], object]) -> object:
        path = folder / name
        path.mkdir()
        return run(path)

    with ThreadPoolExecutor(at_once) as pool:
        runs = {
            key: pool.submit(quiet, f"whole{place}", lambda path, at=at: undisturbed(*at, path))
            for place, (key, at) in enumerate(used.items())
        }
        references = {key: run.result() for key, run in runs.items()}

        def attempt(number: int) -> str | None:
            rng, (job, world_size) = drawn[number]
            reference = references[repr((job, world_size))]
            fault = draw_fault(rng, world_size, reference)
            kinds[fault.kind] += 1
            trial = Trial(job=job, world_size=world_size, fault=fault)
            try:
                quiet(f"trial{number}", lambda path: endure(trial, reference, path))
            except Exception as error:
                return f"seed {seed}, trial {number}: {trial}\n{type(error).__name__}: {error}"
            return None

        failures = [text for text in pool.map(attempt, numbers) if text is not None]
    assert not failures, "\n\n".join([f"{len(failures)} of {len(numbers)} failed", *failures])
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    return (
        f"seed {seed}: {len(numbers)} faults ({counts}) in {len(used)} kinds of training, "
        f"{time.monotonic() - began:.0f} s"
    )


@pytest.mark.long
def test_a_few_random_faults_leave_nothing_hanging_different_or_half(tmp_path: Path) -> None:
    soak(1, range(8), tmp_path, short=True, at_once=1)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_two_hundred_random_faults_leave_nothing_hanging_different_or_half(tmp_path: Path) -> None:
    seed = int(os.environ.get("SOAK_SEED", "1"))
    numbers: list[int] = []
    for part in os.environ.get("SOAK_TRIALS", "0-219").split(","):
        first, _, last = part.partition("-")
        numbers += range(int(first), int(last or first) + 1)
    print(soak(seed, numbers, tmp_path, short=False, at_once=3))
