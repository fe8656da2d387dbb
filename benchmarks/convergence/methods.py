"""The ways of training that are compared: N workers in this process, or one rank of N."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from hf_dlion.exchange.mean import average_wire_bytes
from hf_dlion.exchange.memory import Hub
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer

from benchmarks import rivals
from benchmarks.convergence.compressors import DGC, Compressor, GradDrop, Run, TernGrad, Workers
from benchmarks.convergence.scenes import Scene, UnknownNameError
from benchmarks.convergence.setting import Setting
from hf_dlion.optimizer import DistributedLion

Make = Callable[[nn.Module, Setting], Optimizer]
# The quintic of Muon, five times: https://kellerjordan.github.io/posts/muon.
QUINTIC, ITERATIONS = (3.4445, -4.7750, 2.0315), 5


class Method(ABC):
    """N workers, or one of N, and what makes one step of their gradients.

    Attributes:
        places: Pairs of worker and model: whose gradients this process computes, and on what;
            models may be one and the same.
        bytes_sent: Bytes that a rank has sent so far.
        rounds: Messages that waited for one another so far.
        judges: Whether this process takes validation losses and metrics.
        judging_threads: torch's threads while it does; None leaves them as they are.
    """

    places: Sequence[tuple[int, nn.Module]]
    bytes_sent: float = 0.0
    rounds: int = 0
    judges: bool = True
    judging_threads: int | None = None

    def total(self, loss: float) -> float:
        """Returns the sum of all workers' losses, of that of this process's workers."""
        return loss

    def collect(self, model: nn.Module) -> None:  # noqa: B027 (most have nothing to do)
        """Takes over the gradients that a worker's backward has just left in `model`."""

    @abstractmethod
    def step(self, lr: float) -> None:
        """Moves the parameters and drops the gradients."""

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Ends what the method started."""


class Averaged(Method):
    """One optimizer on the mean gradient, or on what a compressor makes of the workers' gradients.

    There is one model: the workers' would never differ.
    """

    def __init__(
        self,
        scene: Scene,
        setting: Setting,
        make: Make,
        compressor: Callable[[Run], Compressor] | None,
    ) -> None:
        model = scene.model(setting.seed)
        self.places = [(worker, model) for worker in range(setting.workers)]
        self._params = trainable(model)
        self._sizes = [param.numel() for param in self._params]
        self._optimizer = make(model, setting)
        self._workers: Workers | None = None
        self._gradients: list[Tensor] = []
        if compressor is not None:
            self._workers = Workers(
                compressor, setting.workers, self._sizes, setting.seed, setting.steps
            )

    def collect(self, model: nn.Module) -> None:
        """Keeps the gradients apart; without a compressor autograd adds them up by itself."""
        if self._workers is not None:
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._params]
            self._gradients.append(torch.cat([grad.flatten() for grad in grads]))
            self._optimizer.zero_grad()

    def step(self, lr: float) -> None:
        workers = len(self.places)
        if self._workers is None:
            for param in self._params:
                if param.grad is not None:
                    param.grad /= workers
            self.bytes_sent += average_wire_bytes(sum(self._sizes), workers, torch.float32)
            self.rounds += 2 * (workers - 1)
        else:
            mean = self._workers.mean(self._gradients).split_with_sizes(self._sizes)
            for param, part in zip(self._params, mean, strict=True):
                param.grad = part.view_as(param)
            self._gradients = []
            self.bytes_sent, self.rounds = float(self._workers.bytes_sent), self._workers.rounds
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad()


class Voting(Method):
    """N `DistributedLion` in N threads, each with a replica of its own."""

    def __init__(self, scene: Scene, setting: Setting, options: dict[str, Any]) -> None:
        self._hub = Hub(setting.workers)
        self.places = [(rank, scene.model(setting.seed)) for rank in range(setting.workers)]
        self._optimizers = [
            DistributedLion(
                groups_of(model, setting), process_group=group, **lion_options(setting), **options
            )
            for (_, model), group in zip(self.places, self._hub.groups, strict=True)
        ]

    def step(self, lr: float) -> None:
        for optimizer in self._optimizers:
            set_lr(optimizer, lr)
        self._hub.run([optimizer.step for optimizer in self._optimizers])
        for optimizer in self._optimizers:
            optimizer.zero_grad()
        self.bytes_sent = float(self._optimizers[0].wire.bytes_sent)
        self.rounds = self._optimizers[0].wire.rounds

    def close(self) -> None:
        self._hub.close()


class SignMuon(Method):
    """A vote in every step on the sign of Lion's direction, orthogonalised (arXiv 2605.16311).

    Only of matrices, and whole ones, an embedding among them; of other parameters as it is. Each
    worker sends its vote to each of the others.
    """

    def __init__(self, scene: Scene, setting: Setting) -> None:
        self.places = [(rank, scene.model(setting.seed)) for rank in range(setting.workers)]
        self._params = [trainable(model) for _, model in self.places]
        self._momenta = [p.detach().new_zeros((setting.workers, *p.shape)) for p in self._params[0]]
        self._setting = setting

    def step(self, lr: float) -> None:
        beta1, beta2 = self._setting.betas
        others = len(self.places) - 1
        self.rounds += others
        self.bytes_sent += others * sum(param.numel() for param in self._params[0]) / 8
        for own, momentum in zip(zip(*self._params, strict=True), self._momenta, strict=True):
            if all(param.grad is None for param in own):
                continue
            zeros = torch.zeros_like(own[0])
            grads = torch.stack([zeros if param.grad is None else param.grad for param in own])
            directions = torch.lerp(grads, momentum, beta1)
            momentum.lerp_(grads, 1.0 - beta2)
            if own[0].dim() == 2:
                directions = torch.stack([orthogonal(direction) for direction in directions])
            move = majority(directions, self.rounds // max(others, 1))
            value = own[0].detach() * (1.0 - lr * self._setting.weight_decay) - lr * move
            for param in own:
                param.data.copy_(value)
                param.grad = None


def majority(wanted: Tensor, turn: int) -> Tensor:
    """Returns the majority of the workers' signs, +1 or -1, 0 where all are zero; shape (N, ...).

    A tie goes one way and the other by turns, and by neighbouring elements.
    """
    signs = wanted.sign()
    total = signs.sum(dim=0).sign()
    place = torch.arange(total.numel(), device=total.device).view(total.shape)
    tied = (total == 0) & (signs != 0).any(dim=0)
    return torch.where(tied, 1.0 - 2.0 * ((place + turn) % 2), total)


def orthogonal(matrix: Tensor) -> Tensor:
    """Returns a matrix's nearest semi-orthogonal one, roughly, by Muon's iteration in bfloat16."""
    a, b, c = QUINTIC
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = ((matrix.T if tall else matrix) / (matrix.norm() + 1e-7)).bfloat16()
    for _ in range(ITERATIONS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return (x.T if tall else x).to(matrix.dtype)


class RealRank(Method):
    """This process's share of a run on real ranks; a process group is there."""

    def __init__(self, scene: Scene, setting: Setting) -> None:
        model = scene.model(setting.seed)
        self.judges = dist.get_rank() == 0
        if scene.judged_long:
            # The other ranks wait, and leave their cores.
            self.judging_threads = min(setting.workers, len(os.sched_getaffinity(0)))
        how = recipe(setting.method)
        self._rival = None if how.rival is None else how.rival(model, setting)
        if self._rival is not None:
            self.places = [(dist.get_rank(), self._rival.model)]
            self._optimizer = self._rival.optimizer
            return
        self._numel = sum(param.numel() for param in trainable(model))
        self.places = [(dist.get_rank(), DistributedDataParallel(model))]
        if setting.method == "adamw":
            self._optimizer = adamw(model, setting)
        else:
            # Global Lion is `DistributedLion` that averages gradients in all steps.
            averaged = {"warmup_full_steps": setting.steps}
            options = averaged if how.options is None else how.options
            self._optimizer = DistributedLion(
                groups_of(model, setting), **lion_options(setting), **options
            )

    def total(self, loss: float) -> float:
        """See `Method.total`: what one rank finds has diverged, all leave."""
        found = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(found)
        return float(found)

    def step(self, lr: float) -> None:
        set_lr(self._optimizer, lr)
        if self._rival is not None:
            self._rival.step()
            self._rival.zero_grad()
            self.bytes_sent, self.rounds = self._rival.bytes_sent, self._rival.rounds
            return
        self._optimizer.step()
        self._optimizer.zero_grad()
        if isinstance(self._optimizer, DistributedLion):
            stats = self._optimizer.wire
            self.bytes_sent, self.rounds = float(stats.bytes_sent), stats.rounds
        else:
            ranks = dist.get_world_size()
            self.bytes_sent += average_wire_bytes(self._numel, ranks, torch.float32)
            self.rounds += 2 * (ranks - 1)

    def close(self) -> None:
        if self._rival is not None:
            self._rival.close()


def lion_options(setting: Setting) -> dict[str, Any]:
    """Returns the options that all Lions of a run share."""
    return {key: getattr(setting, key) for key in ("lr", "betas", "weight_decay", "seed")}


def groups_of(model: nn.Module, setting: Setting) -> list[dict[str, Any]]:
    """Returns what is trained, with names, in a parameter group for each factor of `lr_factors`."""
    pairs = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    for pattern, _ in setting.lr_factors:
        if not any(fnmatchcase(name, pattern) for name, _ in pairs):
            raise ValueError(f"--lr-factors: no parameter has a name like {pattern}")
    found: dict[float, list[tuple[str, Tensor]]] = {}
    for name, param in pairs:
        found.setdefault(setting.lr_factor(name), []).append((name, param))
    return [{"params": group, "lr_factor": factor} for factor, group in found.items()]


def trainable(model: nn.Module) -> list[Tensor]:
    """Returns the parameters that are trained."""
    return [param for param in model.parameters() if param.requires_grad]


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups, times their factors."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


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


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a method is made.

    Attributes:
        family: Whose learning rates it chooses from: "adamw", "lion" or "sgd".
        workers: Makes all workers in this process; None where there is no simulation.
        options: Of `DistributedLion`, where workers vote.
        compressor: Whether gradients are compressed.
        rival: Makes one rank of what comes from another library.
        real: Whether it runs on real ranks.
        package: Module that it needs besides torch, a key of `rivals.PACKAGES`.
    """

    family: str
    workers: Callable[[Scene, Setting], Method] | None = None
    options: dict[str, Any] | None = None
    compressor: bool = False
    rival: Callable[[nn.Module, Setting], rivals.Rival] | None = None
    real: bool = True
    package: str = ""


def _averaged(make: Make, compressor: Callable[[Run], Compressor] | None = None) -> Recipe:
    workers = partial(Averaged, make=make, compressor=compressor)
    plain = compressor is None
    return Recipe(family=make.__name__, workers=workers, compressor=not plain, real=plain)


def _voting(**options: Any) -> Recipe:
    return Recipe(family="lion", workers=partial(Voting, options=options), options=options)


def _rival(
    make: Callable[..., rivals.Rival],
    *,
    family: str = "adamw",
    package: str = "",
    of_setting: Sequence[str] = ("lr", "weight_decay"),
    **options: Any,
) -> Recipe:
    def of_run(model: nn.Module, setting: Setting) -> rivals.Rival:
        return make(model, **{name: getattr(setting, name) for name in of_setting}, **options)

    return Recipe(family=family, rival=of_run, package=package)


_local_sgd = partial(_rival, rivals.LocalSGD, of_setting=("lr", "weight_decay", "steps"))
METHODS: dict[str, Recipe] = {
    "adamw": _averaged(adamw),
    "lion": _averaged(lion),
    "majority": _voting(),
    "average": _voting(aggregation="average"),
    "bits2": _voting(bits=2),
    "bits4": _voting(bits=4),
    "sync16": _voting(momentum_sync_every=16),
    "terngrad": _averaged(adamw, TernGrad),
    "graddrop": _averaged(adamw, GradDrop),
    "dgc": _averaged(sgd, DGC),  # which brings the momentum
    "signmuon": Recipe(family="lion", workers=SignMuon, real=False),
    "bf16": _rival(rivals.Hooked, compressed=False),
    "powersgd": _rival(rivals.Hooked, compressed=True),
    "localsgd8": _local_sgd(every=8),
    "localsgd32": _local_sgd(every=32),
    "diloco16": _rival(rivals.DiLoCo, package="torchft", every=16),
    "diloco50": _rival(rivals.DiLoCo, package="torchft", every=50),
    "demo": _rival(rivals.DeMo, family="lion", package="pytorch_optimizer"),
}
SIMULATED = [name for name, made in METHODS.items() if made.workers is not None]


def recipe(name: str) -> Recipe:
    """Returns the recipe of a method."""
    if name not in METHODS:
        raise UnknownNameError(f"unknown method {name!r}: there are {', '.join(METHODS)}")
    return METHODS[name]


def check_method(setting: Setting) -> None:
    """Checks before any work starts that a method can run as it is asked for."""
    name, how = setting.method, recipe(setting.method)
    if setting.real and not how.real:
        raise UnknownNameError(f"{name!r} runs in one process only: leave out --real")
    if not setting.real and how.workers is None:
        raise UnknownNameError(f"{name!r} runs on real ranks only: give --real")
    if how.package:
        rivals.check_installed(how.package)
    if setting.clip and how.compressor:
        raise ValueError(f"--clip does not go with {name}, which keeps gradients apart")
    if setting.lr_factors and (how.rival or name == "signmuon"):
        raise ValueError(f"--lr-factors does not go with {name}, which takes one rate")
