"""Methods that run on real ranks: DistributedLion, DDP, and alternatives for slow networks.

`step_time.py` times them, and `convergence --real` trains with them. The alternatives come from
torch, torchft, and pytorch-optimizer.
"""

from __future__ import annotations

import datetime
import importlib.util
import math
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    powerSGD_hook,
)
from torch.distributed.algorithms.model_averaging import utils as averaging
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from hf_dlion.cli.plan.machine import POWER_RANK
from hf_dlion.cli.plan.methods import power_numel
from hf_dlion.optimizer import DistributedLion
from hf_dlion.options import BETAS, Options
from hf_dlion.trainer.optim_args import parse_optim_args

# PowerSGD's warm start needs two plain steps before the first compressed one.
POWER_START = 2
ONE_BUCKET_MB = 1 << 20
# The default of torch.
ADAMW_BETAS = (0.9, 0.999)


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """Hyperparameters of a run.

    Attributes:
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        betas: Betas of Lion.
        adamw_betas: Betas of AdamW.
        seed: Seed of weights and batches, and of DistributedLion.
        steps: Number of steps of the run; 0 if unknown.
        lr_factors: Patterns of parameter names, each with the factor of their learning rate; the
            first match counts.
    """

    lr: float = 1e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = BETAS
    adamw_betas: tuple[float, float] = ADAMW_BETAS
    seed: int = 0
    steps: int = 0
    lr_factors: tuple[tuple[str, float], ...] = ()


class Rank:
    """One rank of a method; all ranks begin with the same model.

    Attributes:
        model: Model whose forward and backward the loop calls.
        optimizer: Optimizer whose learning rate the loop sets.
        bytes_sent: Bytes that this rank has sent so far; an all-reduce counts as a ring.
    """

    bytes_sent = 0.0

    def __init__(self, model: nn.Module, optimizer: Any, bytes_per_step: int = 0) -> None:
        self.model, self.optimizer = model, optimizer
        self._bytes_per_step, self._taken = bytes_per_step, 0

    def step(self) -> None:
        """Updates the parameters and drops the gradients."""
        self.optimizer.step()
        self._taken += 1
        self.bytes_sent += self._sent()
        self.optimizer.zero_grad()

    def _sent(self) -> float:
        return self._bytes_per_step

    def close(self) -> None:
        """Stops what the method started."""


class Voting(Rank):
    """DistributedLion, attached to DDP."""

    def __init__(self, model: nn.Module, hyper: Hyper, **options: Any) -> None:
        ddp = DistributedDataParallel(model, init_sync=False)
        super().__init__(ddp, distributed_lion(model, hyper, **options))
        self._last, self._counted = hyper.steps, 0
        self.optimizer.attach(ddp)

    def _sent(self) -> float:
        if self._taken == self._last:
            self.optimizer.exchange_now()  # Training may end within a period.
        before, self._counted = self._counted, self.optimizer.wire.bytes_sent
        return float(self._counted - before)


class PowerSGD(Rank):
    """AdamW on low-rank gradients from torch's PowerSGD hook (Vogels et al. 2019)."""

    def __init__(self, model: nn.Module, hyper: Hyper) -> None:
        # One bucket, because several deadlock on gloo.
        ddp = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB, init_sync=False)
        state = powerSGD_hook.PowerSGDState(None, POWER_RANK, start_powerSGD_iter=POWER_START)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        shapes = [param.shape for param in trainable(model)]
        self._plain, self._factors = (sum(map(of, shapes)) for of in (math.prod, power_numel))
        super().__init__(ddp, adamw(model, hyper))

    def _sent(self) -> float:
        return ring_bytes(self._plain if self._taken <= POWER_START else self._factors)


class LocalSGD(Rank):
    """AdamW on each rank's local gradient; parameters are averaged every k steps and at the end.

    This is torch's average, which its PeriodicModelAverager and Accelerate's LocalSGD use. With a
    dtype, the changes since the last average are rounded to that dtype and averaged instead.
    """

    def __init__(
        self, model: nn.Module, hyper: Hyper, *, every: int, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(model, adamw(model, hyper))
        self._params, self._every, self._last = trainable(model), every, hyper.steps
        self._dtype = dtype
        self._means = [] if dtype is None else [p.detach().clone() for p in self._params]

    @torch.no_grad()
    def _sent(self) -> float:
        if self._taken % self._every and self._taken != self._last:
            return 0.0
        sizes = [param.numel() for param in self._params]
        if self._dtype is None:
            averaging.average_parameters(iter(self._params), dist.group.WORLD)
            return ring_bytes(sum(sizes))
        pairs = zip(self._params, self._means, strict=True)
        moved = torch.cat([(param - mean).flatten() for param, mean in pairs]).to(self._dtype)
        dist.all_reduce(moved.div_(dist.get_world_size()))
        for param, mean, part in zip(self._params, self._means, moved.split(sizes), strict=True):
            param.copy_(mean.add_(part.view_as(mean)))
        return ring_bytes(sum(sizes), moved.itemsize)


class DiLoCo(Rank):
    """torchft's DiLoCo (Douillard et al. 2023, arXiv 2311.08105): each rank is a replica.

    Ranks train with AdamW. Every H steps, SGD with Nesterov momentum updates the common parameters
    by the mean change of the ranks. After the last exchange, the ranks differ.
    """

    def __init__(self, model: nn.Module, hyper: Hyper, *, every: int) -> None:
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        super().__init__(model, adamw(model, hyper))
        rank, ranks, patience = dist.get_rank(), dist.get_world_size(), datetime.timedelta(hours=1)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))
            host = probe.getsockname()[0]  # The address at which other ranks reach this one.
        self._lighthouse = LighthouseServer(f"{host}:0", ranks) if rank == 0 else None
        found: list[str | None] = [None]
        if self._lighthouse is not None:
            # Its address has the machine's name, which may not resolve, and the port.
            found = [f"http://{host}:{self._lighthouse.address().rpartition(':')[2]}"]
        dist.broadcast_object_list(found)
        self._store = dist.TCPStore(host, 0, 1, is_master=True)  # A replica of one rank.
        self._manager = Manager(
            ProcessGroupGloo(patience), None, None, ranks, use_async_quorum=False,
            timeout=patience, quorum_timeout=patience, connect_timeout=patience,
            rank=0, world_size=1, store_addr=host, store_port=self._store.port,
            lighthouse_addr=found[0], replica_id=str(rank), init_sync=False, hostname=host,
        )  # fmt: skip
        params = trainable(model)
        outer = torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)  # the paper's
        self._diloco = DiLoCo(
            self._manager, [model], self.optimizer, outer, every, pin_memory=False
        )
        self._diloco.__enter__()
        self._every, self._numel = every, sum(param.numel() for param in model.parameters())

    def _sent(self) -> float:
        return 0.0 if self._taken % self._every else ring_bytes(self._numel)

    def close(self) -> None:
        self._diloco.__exit__(None, None, None)
        self._manager.shutdown()
        dist.barrier()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


class DeMo(Rank):
    """pytorch-optimizer's DeMo (Peng et al. 2024, arXiv 2411.19870) with its own defaults."""

    def __init__(self, model: nn.Module, hyper: Hyper) -> None:
        from pytorch_optimizer import DeMo

        demo = DeMo(trainable(model), lr=hyper.lr, weight_decay=hyper.weight_decay)
        super().__init__(model, demo)

    def _sent(self) -> float:
        # DeMo counts one copy of its data, which goes to every other rank.
        return (dist.get_world_size() - 1) * float(self.optimizer.data_transmit)


def _reduced(
    model: nn.Module,
    hyper: Hyper,
    *,
    hook: Callable[..., Any] | None = None,
    itemsize: int | None = None,
    make: Callable[[nn.Module, Hyper], Optimizer] | None = None,
) -> Rank:
    """Returns a rank whose optimizer uses gradients averaged by DDP.

    `itemsize` is the bytes that DDP sends per element, if not those of a gradient.
    """
    ddp = DistributedDataParallel(model, init_sync=False)  # All ranks set the same seed.
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    params = trainable(model)
    each = params[0].itemsize if itemsize is None else itemsize
    sent = ring_bytes(sum(param.numel() for param in params), each)
    return Rank(ddp, (make or adamw)(model, hyper), sent)


# DDP rejects hooks with postponed annotations, so this one has no annotations.
def _in_bf16(state, bucket):  # type: ignore[no-untyped-def]
    # DDP refuses torch's hook on gloo unless it has another name.
    return default_hooks.bf16_compress_hook(state, bucket)


def adamw(model: nn.Module, hyper: Hyper) -> Optimizer:
    """Returns AdamW with a run's hyperparameters."""
    groups, decay = groups_of(model, hyper), hyper.weight_decay
    return AdamW(groups, hyper.lr, hyper.adamw_betas, weight_decay=decay, fused=True)


def distributed_lion(model: nn.Module, hyper: Hyper, **options: Any) -> DistributedLion:
    """Returns DistributedLion with a run's hyperparameters."""
    common = {key: getattr(hyper, key) for key in ("lr", "betas", "weight_decay", "seed")}
    return DistributedLion(groups_of(model, hyper), **common, **options)


def _plain_lion(model: nn.Module, hyper: Hyper) -> DistributedLion:
    # In a group of one rank.
    return distributed_lion(model, hyper, process_group=dist.new_subgroups(1)[0])


def _alone(make: Callable[[nn.Module, Hyper], Optimizer]) -> Callable[[nn.Module, Hyper], Rank]:
    """Returns a function that makes a rank whose optimizer uses its local gradients."""
    return lambda model, hyper: Rank(model, make(model, hyper))


def groups_of(model: nn.Module, hyper: Hyper) -> list[dict[str, Any]]:
    """Returns named trainable parameters, in one parameter group per factor of `lr_factors`.

    Raises:
        ValueError: If a pattern matches no name.
    """
    pairs = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    for pattern, _ in hyper.lr_factors:
        if not any(fnmatchcase(name, pattern) for name, _ in pairs):
            raise ValueError(f"--lr-factors: no parameter name matches {pattern}")
    found: dict[float, list[tuple[str, Tensor]]] = {}
    for name, param in pairs:
        factors = (k for pattern, k in hyper.lr_factors if fnmatchcase(name, pattern))
        found.setdefault(next(factors, 1.0), []).append((name, param))
    return [{"params": group, "lr_factor": factor} for factor, group in found.items()]


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups, multiplied by their factors."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Returns the trainable parameters."""
    return [param for param in model.parameters() if param.requires_grad]


def ring_bytes(numel: int, itemsize: int = 4, ranks: int | None = None) -> int:
    """Returns the bytes that a rank sends in a ring all-reduce."""
    ranks = ranks or dist.get_world_size()
    return 2 * (ranks - 1) * -(-numel // ranks) * itemsize


@dataclass(frozen=True)
class Method:
    """A training method.

    Attributes:
        title: Name in tables and result files.
        about: Explanation for --help, a noun phrase.
        make: Function that returns a `Rank`, given the model and the hyperparameters.
        family: Grid of learning rates, "adamw" or "lion".
        options: Options of DistributedLion; None if ranks don't vote.
        every: Number of steps per exchange.
        package: Module of the extra "study" that it imports.
        usual: Whether step_time.py measures it by default.
    """

    title: str
    about: str
    make: Callable[[nn.Module, Hyper], Rank] = field(repr=False)
    family: str = "adamw"
    options: dict[str, Any] | None = None
    every: int = 1
    package: str = ""
    usual: bool = False


def _voting(title: str, about: str, usual: bool = False, **options: Any) -> Method:
    every = options.get("vote_every", 1)
    return Method(title, about, partial(Voting, **options), "lion", options, every, usual=usual)


def _plain(title: str, about: str, **options: Any) -> Method:
    return Method(title, about, partial(_reduced, **options), usual=True)


def _local_sgd(k: int, dtype: torch.dtype | None = None) -> Method:
    name = f"LocalSGD, {k} steps of AdamW" + (", bf16" if dtype else "")
    average = "mean of the changes in bfloat16" if dtype else "mean of the parameters"
    about = f"LocalSGD: {average} every {k} steps of AdamW"
    return Method(name, about, partial(LocalSGD, every=k, dtype=dtype), every=k)


def _diloco(k: int) -> Method:
    name = f"DiLoCo, {k} steps of AdamW"
    about = f"DiLoCo (torchft): outer Nesterov step every {k} steps of AdamW"
    return Method(name, about, partial(DiLoCo, every=k), every=k, package="torchft")


DLION = "DistributedLion"
METHODS: dict[str, Method] = {
    "none": _plain(
        "no communication, AdamW",
        "AdamW with DDP, without communication",
        hook=debugging_hooks.noop_hook,
        itemsize=0,
    ),
    "alone": Method(
        "one host alone, Lion", "Lion on one rank, without DDP", _alone(_plain_lion), usual=True
    ),
    "adamw-alone": Method(
        "one host alone, AdamW", "AdamW on one rank, without DDP", _alone(adamw), usual=True
    ),
    "adamw": _plain("DDP fp32, AdamW", "AdamW on the mean gradient, as with DDP in float32"),
    "bf16": _plain(
        "DDP bf16 hook, AdamW", "AdamW with torch's bf16_compress_hook", hook=_in_bf16, itemsize=2
    ),
    "powersgd": Method(
        f"PowerSGD rank {POWER_RANK}, AdamW",
        f"AdamW with torch's powerSGD_hook, low-rank gradients of rank {POWER_RANK}",
        PowerSGD,
        usual=True,
    ),
    "ddp-lion": _plain("DDP fp32, Lion", "Lion with DDP in float32", make=_plain_lion),
    "lion": _voting(
        "Lion on the mean gradient", "Lion on the mean gradient, uncompressed", full_precision="*"
    ),
    "majority": _voting(DLION, "DistributedLion: majority of one-bit votes", usual=True),
    "average": _voting(
        f"{DLION}, average", "DistributedLion: mean of one-bit votes", aggregation="average"
    ),
    "bits2": _voting(f"{DLION}, 2 bits", "DistributedLion: votes of 2 bits", bits=2),
    "bits4": _voting(f"{DLION}, 4 bits", "DistributedLion: votes of 4 bits", bits=4),
    "sync16": _voting(
        f"{DLION}, momentum_sync_every=16",
        "DistributedLion: momenta averaged once in 16 steps (Lion Cub)",
        momentum_sync_every=16,
    ),
    "every16": _voting(
        f"{DLION}, vote_every=16", "DistributedLion: votes after 16 local steps", vote_every=16
    ),
    "every32": _voting(
        f"{DLION}, vote_every=32", "DistributedLion: votes after 32 local steps", vote_every=32
    ),
    "node": _voting(
        f"{DLION}, a vote per node", "DistributedLion: one vote per node", local_group="node"
    ),
    "localsgd8": _local_sgd(8),
    "localsgd32": _local_sgd(32),
    "localsgd160": _local_sgd(160),
    "localsgd32-bf16": _local_sgd(32, torch.bfloat16),
    "diloco16": _diloco(16),
    "diloco50": _diloco(50),
    "demo": Method(
        "DeMo",
        "DeMo (pytorch-optimizer): largest DCT components of the momentum",
        DeMo,
        "lion",
        package="pytorch_optimizer",
    ),
}


def method_of(name: str) -> Method:
    """Returns a method by name; "majority:bits=4,exchange=gather" gives DistributedLion's options.

    Raises:
        ValueError: If there is no such method, or it has no such options.
        ImportError: If its package is missing.
    """
    key, _, text = name.partition(":")
    if key not in METHODS:
        raise ValueError(f"unknown method {key!r}; use one of {', '.join(METHODS)}")
    method = METHODS[key]
    if method.package and importlib.util.find_spec(method.package) is None:
        raise ImportError(
            f'{key} needs {method.package}, which is not installed: pip install -e ".[study]"'
        )
    if not text:
        return method
    if method.options is None:
        raise ValueError(f"{name}: only methods with DistributedLion take options, not {key}")
    both = method.options | parse_optim_args(text, method.options)  # As in Trainer.
    try:
        Options(**both)  # Checks them before any rank starts.
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from None
    return _voting(f"{method.title}, {text.replace(',', ', ')}", method.about, **both)
