"""Where the methods of the study run: in one process, or on real ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.convergence.setting import Setting
from benchmarks.convergence.simulated import (
    Averaged,
    SimulatedLocalSGD,
    SimulatedLocalSteps,
    SimulatedVotes,
)
from benchmarks.convergence.tasks import Task
from benchmarks.convergence.workers import Workers
from benchmarks.methods import METHODS, adamw, distributed_lion, method_of

# What makes the workers of a method in one process.
Make = Callable[[Task, Setting], Workers]
_WITHOUT_VOTES: dict[str, Make] = {
    "adamw": partial(Averaged, make=adamw),
    "lion": partial(Averaged, make=distributed_lion),  # One rank alone takes plain Lion.
    **{
        name: partial(SimulatedLocalSGD, every=METHODS[name].every)
        for name in ("localsgd8", "localsgd32", "localsgd160")
    },
}
# Options of DistributedLion that the classes follow.
_OF_VOTES = {"bits", "aggregation", "ties", "level_scale", "momentum_sync_every", "momentum_dtype"}
_OF_LOCAL_STEPS = {"vote_every", "bits", "momentum_sync_every", "momentum_dtype"}
# Methods of step_time.py whose ranks don't train a common model, or that need several nodes.
NOT_TRAINED = ("none", "alone", "adamw-alone", "ddp-lion", "node")


def in_process(name: str) -> Make:
    """Returns what makes a method's workers in one process.

    Raises:
        ValueError: If it runs on real ranks only.
    """
    if name in _WITHOUT_VOTES:
        return _WITHOUT_VOTES[name]
    if METHODS[name.partition(":")[0]].options is not None:
        options = method_of(name).options or {}
        if options.keys() <= _OF_VOTES:
            return partial(SimulatedVotes, **options)
        if options.get("vote_every", 1) > 1 and options.keys() <= _OF_LOCAL_STEPS:
            return partial(SimulatedLocalSteps, **options)
    raise ValueError(f"{name!r} runs on real ranks only; add --real")


def needs_real_ranks(name: str) -> bool:
    """Returns whether a method runs on real ranks only."""
    try:
        in_process(name)
    except ValueError:
        return True
    return False


def check_method(setting: Setting) -> None:
    """Checks that a method supports a setting, before any work starts.

    Raises:
        ValueError: If it doesn't.
    """
    name = setting.method
    method_of(name)
    if name in NOT_TRAINED:
        raise ValueError(f"{name!r} trains no common model; use it in benchmarks/step_time.py")
    if not setting.real:
        in_process(name)
        if name == "lion" and setting.clip:
            raise ValueError(
                "'lion' clips each rank's own gradient, which one process has only as a mean; add "
                "--real, or remove --clip"
            )
    if setting.lr_factors and name == "demo":
        raise ValueError(
            f"--lr-factors doesn't work with {name}; remove --lr-factors, or the method"
        )
