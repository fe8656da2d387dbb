"""The methods of the study by name, and where they run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.convergence.setting import Setting
from benchmarks.convergence.simulated import Averaged, LocalSGD, LocalSteps, Votes
from benchmarks.convergence.tasks import Task
from benchmarks.convergence.workers import Workers
from benchmarks.methods import METHODS, adamw, distributed_lion, method_of

# Methods that run in this process.
IN_PROCESS: dict[str, Callable[[Task, Setting], Workers]] = {
    "adamw": partial(Averaged, make=adamw),
    "lion": partial(Averaged, make=distributed_lion),  # One rank alone takes plain Lion.
    **{
        name: partial(Votes, **(METHODS[name].options or {}))
        for name in ("majority", "average", "bits2", "bits4", "sync16")
    },
    **{
        name: partial(LocalSteps, **(METHODS[name].options or {}))
        for name in ("every16", "every32")
    },
    **{
        name: partial(LocalSGD, every=METHODS[name].every)
        for name in ("localsgd8", "localsgd32", "localsgd160")
    },
}
# Options of DistributedLion that `Votes` and `LocalSteps` follow.
_OF_VOTES = {"bits", "aggregation", "ties", "level_scale", "momentum_sync_every"}
_OF_LOCAL_STEPS = {"vote_every", "bits", "momentum_sync_every"}
# Methods of step_time.py whose ranks don't train a common model, or that need several nodes.
NOT_TRAINED = ("none", "alone", "adamw-alone", "ddp-lion", "node")


def in_process(name: str) -> Callable[[Task, Setting], Workers] | None:
    """Returns what makes a method's workers in this process, or None if it needs real ranks."""
    if name in IN_PROCESS:
        return IN_PROCESS[name]
    options = method_of(name).options or {}
    if ":" not in name:
        return None
    if options.keys() <= _OF_VOTES:
        return partial(Votes, **options)
    if options.get("vote_every", 1) > 1 and options.keys() <= _OF_LOCAL_STEPS:
        return partial(LocalSteps, **options)
    return None


def check_method(setting: Setting) -> None:
    """Checks that a method supports a setting, before any work starts.

    Raises:
        ValueError: If it doesn't.
    """
    name = setting.method
    method_of(name)
    if name in NOT_TRAINED:
        raise ValueError(f"{name!r} trains no common model; use it in benchmarks/step_time.py")
    if not setting.real and in_process(name) is None:
        raise ValueError(f"{name!r} runs on real ranks only; add --real")
    if setting.lr_factors and name == "demo":
        raise ValueError(
            f"--lr-factors doesn't work with {name}; remove --lr-factors, or the method"
        )
