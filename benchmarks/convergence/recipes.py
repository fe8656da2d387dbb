"""The ways of training that the study compares, each a line in a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks import rivals
from benchmarks.convergence.compressors import DGC, Compressor, GradDrop, TernGrad
from benchmarks.convergence.local_steps import EVERY, LOCAL, SignMuon
from benchmarks.convergence.methods import (
    Averaged,
    Make,
    Method,
    Options,
    Voting,
    groups_of,
    lion_options,
)
from benchmarks.convergence.scenes import Scene, UnknownNameError
from benchmarks.convergence.setting import Setting
from hf_dlion.optimizer import DistributedLion

RivalMake = Callable[[nn.Module, Setting], rivals.Rival]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a method is made: an optimizer on the mean gradient, votes, or a way of its own.

    Attributes:
        family: Whose learning rates it chooses from: "adamw", "lion" or "sgd".
        make: Makes the optimizer; None where workers vote.
        compressor: Makes what compresses gradients; None averages them in full precision.
        options: Returns the options of `DistributedLion`, from the setting and the number of
            trained elements; None where gradients are averaged.
        workers: Makes all workers of what is tried out in this study only.
        rival: Makes one rank of what comes from another library and has no simulation.
        package: Module that it needs besides torch, a key of `rivals.PACKAGES`.
    """

    family: str
    make: Make | None = None
    compressor: Callable[[], Compressor] | None = None
    options: Options | None = None
    workers: Callable[[Scene, Setting], Method] | None = None
    rival: RivalMake | None = None
    package: str = ""

    def simulated(self, scene: Scene, setting: Setting) -> Method:
        """Returns the method with all workers in this process; see `check_simulated`."""
        check_simulated(setting)
        if self.workers is not None:
            return self.workers(scene, setting)
        if self.options is not None:
            return Voting(scene, setting, self.options)
        assert self.make is not None, "a method without votes has an optimizer"
        compressor = None if self.compressor is None else self.compressor()
        return Averaged(scene, setting, self.make, compressor)


def adamw(model: nn.Module, setting: Setting) -> Optimizer:
    """Returns AdamW with torch's betas."""
    return AdamW(groups_of(model, setting), lr=setting.lr, weight_decay=setting.weight_decay)


def sgd(model: nn.Module, setting: Setting) -> Optimizer:
    """Returns plain SGD without decay: a compressor may bring a momentum of its own.

    Its learning rates are a hundred times the others'; so would be what the decay takes off.
    """
    return SGD(groups_of(model, setting), lr=setting.lr)


def lion(model: nn.Module, setting: Setting) -> Optimizer:
    """Returns `DistributedLion` alone, which is plain Lion."""
    return DistributedLion(groups_of(model, setting), **lion_options(setting))


def averaged(make: Make, compressor: Callable[[], Compressor] | None = None) -> Recipe:
    """Returns an optimizer on the mean gradient, arguments as in `Recipe`."""
    return Recipe(family=make.__name__, make=make, compressor=compressor)


def voting(*, warmup: float = 0.0, auto_bits: float = 0.0, **options: Any) -> Recipe:
    """Returns `DistributedLion` with these options.

    Args:
        warmup: Share of the run in which gradients are averaged (`warmup_full_steps`).
        auto_bits: Bits per parameter and step that `momentum_sync="auto"` may send.
        options: Of `DistributedLion`.
    """

    def of_run(setting: Setting, numel: int) -> dict[str, Any]:
        found = dict(options)
        if warmup:
            found["warmup_full_steps"] = round(warmup * setting.steps)
        if auto_bits:
            found |= {"momentum_sync": "auto", "momentum_sync_budget": int(auto_bits * numel / 8)}
        return found

    return Recipe(family="lion", options=of_run)


def rival(
    make: Callable[..., rivals.Rival],
    *,
    family: str = "adamw",
    package: str = "",
    of_setting: Sequence[str] = ("lr", "weight_decay"),
    **options: Any,
) -> Recipe:
    """Returns a rival with these options.

    Args:
        make: Makes one rank of it.
        family: As in `Recipe`.
        package: As in `Recipe`.
        of_setting: Options that are the run's.
        options: Others of `make`.
    """

    def of_run(model: nn.Module, setting: Setting) -> rivals.Rival:
        return make(model, **{name: getattr(setting, name) for name in of_setting}, **options)

    return Recipe(family=family, rival=of_run, package=package)


local_sgd = partial(rival, rivals.LocalSGD, of_setting=("lr", "weight_decay", "steps"))


def _is_small(name: str, _param: Tensor) -> bool:
    # A function and no patterns: a LoRA trains none of these.
    return "norm" in name or "embed" in name


METHODS: dict[str, Recipe] = {
    "adamw": averaged(adamw),
    "lion": averaged(lion),
    "majority": voting(),
    "zero": voting(ties="zero"),
    "average": voting(aggregation="average"),
    "bits2": voting(bits=2),
    "bits2-tensor": voting(bits=2, level_scale="tensor"),
    "bits4": voting(bits=4),
    "bits4-tensor": voting(bits=4, level_scale="tensor"),
    "bits8": voting(bits=8),
    "sync10": voting(momentum_sync_every=10),
    "sync16": voting(momentum_sync_every=16),
    "sync50": voting(momentum_sync_every=50),
    "auto": voting(momentum_sync_every=4, auto_bits=1.0),
    "warmup": voting(warmup=0.1),
    "small-full": voting(full_precision=_is_small),
    "terngrad": averaged(adamw, TernGrad),
    "graddrop": averaged(adamw, GradDrop),
    "dgc": averaged(sgd, DGC),  # which brings the momentum
    "bf16": rival(rivals.Hooked, compressed=False),
    "powersgd": rival(rivals.Hooked, compressed=True),
    "localsgd8": local_sgd(every=8),
    "localsgd32": local_sgd(every=32),
    "diloco16": rival(rivals.DiLoCo, package="torchft", every=16),
    "diloco50": rival(rivals.DiLoCo, package="torchft", every=50),
    "demo": rival(rivals.DeMo, family="lion", package="pytorch_optimizer"),
    **{
        f"{name}{every}": Recipe(family="lion", workers=partial(kind, every=every))
        for name, kind in LOCAL
        for every in EVERY
    },
    "signmuon": Recipe(family="lion", workers=SignMuon),
}
SIMULATED = [name for name, made in METHODS.items() if made.rival is None]
TRIALS = [name for name, made in METHODS.items() if made.workers is not None]


def recipe(name: str) -> Recipe:
    """Returns the recipe of a method.

    Raises:
        UnknownNameError: If there is none of this name.
    """
    if name not in METHODS:
        raise UnknownNameError(f"unknown method {name!r}: there are {', '.join(METHODS)}")
    return METHODS[name]


def check_simulated(setting: Setting) -> None:
    """Checks before any work starts that a method runs in one process.

    Raises:
        UnknownNameError: If it does not, or there is no such method.
    """
    if recipe(setting.method).rival is not None:
        raise UnknownNameError(f"{setting.method!r} runs on real ranks only: give --real")
