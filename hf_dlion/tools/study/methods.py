"""The ways of training that the study compares, each a line in a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from hf_dlion.exchange.mean import average_wire_bytes
from hf_dlion.exchange.memory import Hub
from hf_dlion.optimizer import DistributedLion
from hf_dlion.tools import rivals
from hf_dlion.tools.study.compressors import DGC, Compressor, GradDrop, TernGrad
from hf_dlion.tools.study.scenes import Scene, UnknownNameError
from hf_dlion.tools.study.setting import Setting

Make = Callable[[nn.Module, Setting], Optimizer]
Options = Callable[[Setting, int], dict[str, Any]]
RivalMake = Callable[[nn.Module, Setting], rivals.Rival]


class Method(ABC):
    """N workers, or one of N, and what makes one step of their gradients.

    Attributes:
        places: Pairs of worker and model: whose gradients this process computes, and on what;
            models may be one and the same.
        bytes_sent: Bytes that a rank has sent so far.
        rounds: Messages that waited for one another so far.
        judges: Whether this process takes validation losses and metrics.
    """

    places: Sequence[tuple[int, nn.Module]]
    bytes_sent: float = 0.0
    rounds: int = 0
    judges: bool = True

    def collect(self, model: nn.Module) -> None:  # noqa: B027 (most have nothing to do)
        """Takes over the gradients that a worker's backward has just left in `model`."""

    @abstractmethod
    def step(self, lr: float) -> None:
        """Moves the parameters and drops the gradients."""

    @property
    def voters(self) -> Sequence[DistributedLion]:
        """The optimizers with a momentum per worker, all of them; empty where there are none."""
        return ()

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Ends what the method started."""


class Averaged(Method):
    """One optimizer on the mean gradient, or on what a compressor makes of the workers' gradients.

    The last two arguments are as in `Recipe`.
    """

    def __init__(
        self, scene: Scene, setting: Setting, make: Make, compressor: Compressor | None
    ) -> None:
        """Makes one model: the workers' would never differ."""
        model = scene.model(setting.seed)
        self.places = [(worker, model) for worker in range(setting.workers)]
        self._params = trainable(model)
        self._optimizer = make(model, setting)
        self._compressor = compressor
        self._gradients: list[list[Tensor]] = []
        if compressor is not None:
            compressor.start(setting.workers, self._params, setting.seed, setting.steps)

    def collect(self, model: nn.Module) -> None:
        """Keeps the gradients apart; without a compressor autograd adds them up by itself."""
        if self._compressor is not None:
            self._gradients.append([_gradient(param) for param in self._params])
            self._optimizer.zero_grad()

    def step(self, lr: float) -> None:
        """Takes a step on the mean."""
        workers = len(self.places)
        # The workers' gradients have been added up in one model, or kept apart.
        if self._compressor is None:
            for param in self._params:
                if param.grad is not None:
                    param.grad /= workers
            numel = sum(param.numel() for param in self._params)
            self.bytes_sent += average_wire_bytes(numel, workers, torch.float32)
            self.rounds += 2 * (workers - 1)
        else:
            means = self._compressor.compress(self._gradients)
            for param, mean in zip(self._params, means, strict=True):
                param.grad = mean
            self._gradients = []
            self.bytes_sent += self._compressor.bits_per_iteration / 8
            self.rounds += self._compressor.rounds_per_iteration
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad()


class Voting(Method):
    """N `DistributedLion` in N threads, each with a replica of its own; options as in `Recipe`."""

    def __init__(self, scene: Scene, setting: Setting, options: Options) -> None:
        """Makes the replicas."""
        self._hub = Hub(setting.workers)
        self.places = [(rank, scene.model(setting.seed)) for rank in range(setting.workers)]
        numel = sum(param.numel() for param in trainable(self.places[0][1]))
        every = lion_options(setting) | options(setting, numel)
        named = [
            [pair for pair in model.named_parameters() if pair[1].requires_grad]
            for _, model in self.places
        ]
        self._optimizers = [
            DistributedLion(params, process_group=group, **every)
            for params, group in zip(named, self._hub.groups, strict=True)
        ]

    @property
    def voters(self) -> Sequence[DistributedLion]:
        """All of them."""
        return self._optimizers

    def step(self, lr: float) -> None:
        """Exchanges votes."""
        for optimizer in self._optimizers:
            set_lr(optimizer, lr)
        self._hub.run([optimizer.step for optimizer in self._optimizers])
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self.bytes_sent = float(self._optimizers[0].wire.bytes_sent)
        self.rounds = self._optimizers[0].wire.rounds

    def close(self) -> None:
        """Ends the threads."""
        self._hub.close()


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a method is made: an optimizer on the mean gradient, or votes.

    Attributes:
        family: Whose learning rates it chooses from: "adamw", "lion" or "sgd".
        make: Makes the optimizer; None where workers vote.
        compressor: Makes what compresses gradients; None averages them in full precision.
        options: Returns the options of `DistributedLion`, from the setting and the number of
            trained elements; None where gradients are averaged.
        rival: Makes one rank of what comes from another library and has no simulation.
        package: Module that it needs besides torch, a key of `rivals.PACKAGES`.
    """

    family: str
    make: Make | None = None
    compressor: Callable[[], Compressor] | None = None
    options: Options | None = None
    rival: RivalMake | None = None
    package: str = ""

    def simulated(self, scene: Scene, setting: Setting) -> Method:
        """Returns the method with all workers in this process; see `check_simulated`."""
        check_simulated(setting)
        if self.options is not None:
            return Voting(scene, setting, self.options)
        assert self.make is not None, "a method without votes has an optimizer"
        compressor = None if self.compressor is None else self.compressor()
        return Averaged(scene, setting, self.make, compressor)


def adamw(model: nn.Module, setting: Setting) -> Optimizer:
    """Returns AdamW with torch's betas."""
    return AdamW(trainable(model), lr=setting.lr, weight_decay=setting.weight_decay)


def sgd(model: nn.Module, setting: Setting) -> Optimizer:
    """Returns plain SGD without decay: a compressor may bring a momentum of its own.

    Its learning rates are a hundred times the others'; so would be what the decay takes off.
    """
    return SGD(trainable(model), lr=setting.lr)


def lion(model: nn.Module, setting: Setting) -> Optimizer:
    """Returns `DistributedLion` alone, which is plain Lion."""
    return DistributedLion(named(model), **lion_options(setting))


def lion_options(setting: Setting) -> dict[str, Any]:
    """Returns the options that all Lions of a run share."""
    return {key: getattr(setting, key) for key in ("lr", "betas", "weight_decay", "seed")}


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
}
SIMULATED = [name for name, made in METHODS.items() if made.rival is None]


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


def named(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns names and parameters of what is trained."""
    return [pair for pair in model.named_parameters() if pair[1].requires_grad]


def trainable(model: nn.Module) -> list[Tensor]:
    """Returns the parameters that are trained."""
    return [param for _, param in named(model)]


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def _gradient(param: Tensor) -> Tensor:
    return torch.zeros_like(param) if param.grad is None else param.grad
