"""Methods that run on real ranks: ours, DDP's, and the alternatives for slow networks.

`step_time.py` times them, and `convergence --real` trains with them. The alternatives come from
torch, torchft, and pytorch-optimizer.
"""

from __future__ import annotations

import ast
import datetime
import importlib.util
import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging import utils as averaging
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from hf_dlion.optimizer import DistributedLion

POWER_RANK = 4
# PowerSGD's warm start needs two plain steps before the first compressed one.
POWER_START = 2
ONE_BUCKET_MB = 1 << 20
# What to install for a module that comes with neither torch nor transformers.
PACKAGES = {"torchft": "torchft", "pytorch_optimizer": "pytorch-optimizer einops"}


@dataclass(frozen=True, kw_only=True)
class Hyper:
    """Hyperparameters of a run.

    Attributes:
        lr: Peak learning rate.
        weight_decay: Decoupled weight decay, multiplied by the learning rate.
        betas: Lion's betas; AdamW has torch's.
        seed: Seed of weights and batches, and of DistributedLion.
        steps: Length of the run; 0 if unknown.
        lr_factors: Patterns of parameter names, and what their learning rate is multiplied by; the
            first that matches counts.
    """

    lr: float = 1e-4
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    seed: int = 0
    steps: int = 0
    lr_factors: tuple[tuple[str, float], ...] = ()


class Rank:
    """One rank of a method; all ranks begin with the same model.

    Attributes:
        model: The loop calls its forward and backward.
        optimizer: The loop sets its learning rate.
        bytes_sent: Bytes that this rank has sent so far; an all-reduce counts as a ring.
    """

    bytes_sent = 0.0

    def __init__(self, model: nn.Module, optimizer: Any, bytes_per_step: int = 0) -> None:
        self.model, self.optimizer = model, optimizer
        self._bytes_per_step, self._taken = bytes_per_step, 0

    def step(self) -> None:
        """Moves the parameters and drops the gradients."""
        self.optimizer.step()
        self._taken += 1
        self.bytes_sent += self._sent()
        self.optimizer.zero_grad()

    def _sent(self) -> float:
        return self._bytes_per_step

    def close(self) -> None:
        """Ends what the method started."""


class Voting(Rank):
    """DistributedLion, attached to DDP."""

    def __init__(self, model: nn.Module, hyper: Hyper, **options: Any) -> None:
        ddp = DistributedDataParallel(model, init_sync=False)
        self._begin(ddp, distributed_lion(model, hyper, **options), hyper)

    def _begin(self, model: nn.Module, optimizer: DistributedLion, hyper: Hyper) -> None:
        super().__init__(model, optimizer)
        self._last, self._counted = hyper.steps, 0
        optimizer.attach(model)

    def _sent(self) -> float:
        if self._taken == self._last:
            self.optimizer.exchange_now()  # Training may end within a period.
        before, self._counted = self._counted, self.optimizer.wire.bytes_sent
        return float(self._counted - before)


class Sharded(Voting):
    """DistributedLion on a Llama that FSDP2 shards inside each node."""

    def __init__(self, model: nn.Module, hyper: Hyper, **options: Any) -> None:
        from torch.distributed.fsdp import fully_shard

        ranks, shards = dist.get_world_size(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        kind, names = next(model.parameters()).device.type, ("replicate", "shard")
        mesh = init_device_mesh(kind, (ranks // shards, shards), mesh_dim_names=names)
        for module in (*model.model.layers, model):  # type: ignore[union-attr, misc]
            fully_shard(module, mesh=mesh["shard"])
        optimizer = distributed_lion(model, hyper, replicate=mesh["replicate"], **options)
        self._begin(model, optimizer, hyper)


class PowerSGD(Rank):
    """AdamW on what torch's PowerSGD hook makes of the gradients (Vogels et al. 2019)."""

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
    """AdamW on each rank's own gradient; after k steps and at the end ranks take the mean.

    Of the trained parameters: torch's average, as its PeriodicModelAverager and Accelerate's
    LocalSGD take it. With a dtype, the mean of how far they moved, which is rounded to it.
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

    AdamW inside; every H steps SGD with Nesterov momentum moves the common parameters by the mean
    of what the ranks moved. After the last of these meetings the ranks differ.
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
            host = probe.getsockname()[0]  # Where the other ranks reach this one.
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
        # It counts one copy of what it sends.
        return (dist.get_world_size() - 1) * float(self.optimizer.data_transmit)


def _reduced(
    model: nn.Module,
    hyper: Hyper,
    *,
    hook: Callable[..., Any] | None = None,
    itemsize: int = 4,
    make: Callable[[nn.Module, Hyper], Optimizer] | None = None,
) -> Rank:
    """Returns an optimizer on the gradients that DDP has averaged."""
    ddp = DistributedDataParallel(model, init_sync=False)  # All ranks set the same seed.
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    sent = ring_bytes(sum(param.numel() for param in trainable(model)), itemsize)
    return Rank(ddp, (make or adamw)(model, hyper), sent)


# DDP compares the annotations of hooks with classes, so these two have none.
def _keep(state, bucket):  # type: ignore[no-untyped-def]
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _in_bf16(state, bucket):  # type: ignore[no-untyped-def]
    # Under its own name, DDP refuses torch's hook on gloo.
    return default_hooks.bf16_compress_hook(state, bucket)


def adamw(model: nn.Module, hyper: Hyper) -> Optimizer:
    """Returns AdamW with torch's betas."""
    return AdamW(groups_of(model, hyper), hyper.lr, weight_decay=hyper.weight_decay, fused=True)


def distributed_lion(model: nn.Module, hyper: Hyper, **options: Any) -> DistributedLion:
    """Returns DistributedLion with a run's hyperparameters."""
    common = {key: getattr(hyper, key) for key in ("lr", "betas", "weight_decay", "seed")}
    return DistributedLion(groups_of(model, hyper), **common, **options)


def _plain_lion(model: nn.Module, hyper: Hyper) -> DistributedLion:
    # In a group of one rank.
    return distributed_lion(model, hyper, process_group=dist.new_subgroups(1)[0])


def _alone(make: Callable[[nn.Module, Hyper], Optimizer]) -> Callable[[nn.Module, Hyper], Rank]:
    """Returns how to make an optimizer on a rank's own gradients."""
    return lambda model, hyper: Rank(model, make(model, hyper))


def groups_of(model: nn.Module, hyper: Hyper) -> list[dict[str, Any]]:
    """Returns named trainable parameters, in a parameter group for each factor of `lr_factors`.

    Raises:
        ValueError: If a pattern matches no name.
    """
    pairs = [pair for pair in model.named_parameters() if pair[1].requires_grad]
    for pattern, _ in hyper.lr_factors:
        if not any(fnmatchcase(name, pattern) for name, _ in pairs):
            raise ValueError(f"--lr-factors: no parameter has a name like {pattern}")
    found: dict[float, list[tuple[str, Tensor]]] = {}
    for name, param in pairs:
        factors = (k for pattern, k in hyper.lr_factors if fnmatchcase(name, pattern))
        found.setdefault(next(factors, 1.0), []).append((name, param))
    return [{"params": group, "lr_factor": factor} for factor, group in found.items()]


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Sets the learning rate of all groups, times their factors."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_factor", 1.0)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that are trained."""
    return [param for param in model.parameters() if param.requires_grad]


def ring_bytes(numel: int, itemsize: int = 4, ranks: int | None = None) -> int:
    """Returns the bytes that a rank sends in a ring all-reduce."""
    ranks = ranks or dist.get_world_size()
    return 2 * (ranks - 1) * -(-numel // ranks) * itemsize


def power_numel(shape: Sequence[int]) -> int:
    """Returns the elements that PowerSGD reduces for a tensor: two factors, or the tensor.

    >>> power_numel((512, 1024)), power_numel((512,))
    (6144, 512)
    """
    numel = math.prod(shape)
    # A tensor of more dimensions is a matrix with the first as rows; a vector is one row.
    rows, columns = (shape[0], numel // max(shape[0], 1)) if len(shape) > 1 else (1, numel)
    factors = (rows + columns) * min(rows, columns, POWER_RANK)
    return factors if 2 * factors < numel else numel


@dataclass(frozen=True)
class Method:
    """A way of training.

    Attributes:
        title: Row of the tables.
        about: What it does, in one line.
        make: Makes this rank of it, from the model and the hyperparameters.
        family: Learning rates to choose from: "adamw" or "lion".
        options: Options of DistributedLion, if ranks vote.
        every: Steps in which its ranks meet once, unless that is an option.
        package: Module that it needs, a key of `PACKAGES`.
        usual: Whether step_time.py measures it without being asked.
    """

    title: str
    about: str
    make: Callable[[nn.Module, Hyper], Rank] = field(repr=False)
    family: str = "adamw"
    options: dict[str, Any] | None = None
    every: int = 1
    package: str = ""
    usual: bool = False

    @property
    def period(self) -> int:
        """Steps after which it repeats itself."""
        return int((self.options or {}).get("vote_every", self.every))


def _voting(title: str, about: str, usual: bool = False, **options: Any) -> Method:
    return Method(title, about, partial(Voting, **options), "lion", options, usual=usual)


def _plain(title: str, about: str, **options: Any) -> Method:
    return Method(title, about, partial(_reduced, **options), usual=True)


def _local_sgd(k: int, dtype: torch.dtype | None = None) -> Method:
    name = f"LocalSGD, {k} steps of AdamW" + (", bf16" if dtype else "")
    about = f"after {k} steps of AdamW the mean of {'moves in bfloat16' if dtype else 'parameters'}"
    return Method(name, about, partial(LocalSGD, every=k, dtype=dtype), every=k)


def _diloco(k: int) -> Method:
    name, about = f"DiLoCo, {k} steps of AdamW", f"after {k} steps of AdamW a Nesterov step"
    return Method(name, about, partial(DiLoCo, every=k), every=k, package="torchft")


DLION = "DistributedLion"
METHODS: dict[str, Method] = {
    "none": _plain("no communication, AdamW", "a hook that sends nothing", hook=_keep, itemsize=0),
    "alone": Method(
        "one host alone, Lion", "plain Lion, no DDP, no network", _alone(_plain_lion), usual=True
    ),
    "adamw-alone": Method(
        "one host alone, AdamW", "AdamW, no DDP, no network", _alone(adamw), usual=True
    ),
    "adamw": _plain("DDP fp32, AdamW", "AdamW on the mean gradient"),
    "bf16": _plain("DDP bf16 hook, AdamW", "torch's bf16_compress_hook", hook=_in_bf16, itemsize=2),
    "powersgd": Method(
        f"PowerSGD rank {POWER_RANK}, AdamW", "torch's powerSGD_hook", PowerSGD, usual=True
    ),
    "ddp-lion": _plain("DDP fp32, Lion", "plain Lion after DDP's all-reduce", make=_plain_lion),
    "lion": _voting("Lion on the mean gradient", 'full_precision="*"', full_precision="*"),
    "majority": _voting(DLION, "the majority of one-bit votes", usual=True),
    "average": _voting(f"{DLION}, average", "the mean of one-bit votes", aggregation="average"),
    "bits2": _voting(f"{DLION}, 2 bits", "votes of 2 bits", bits=2),
    "bits4": _voting(f"{DLION}, 4 bits", "votes of 4 bits", bits=4),
    "bits8": _voting(f"{DLION}, 8 bits", "votes of 8 bits", bits=8),
    "sync16": _voting(
        f"{DLION}, momentum_sync_every=16", "momenta averaged (Lion Cub)", momentum_sync_every=16
    ),
    "every16": _voting(f"{DLION}, vote_every=16", "an exchange in 16 steps", vote_every=16),
    "every32": _voting(f"{DLION}, vote_every=32", "an exchange in 32 steps", vote_every=32),
    "node": _voting(f"{DLION}, a vote per node", 'local_group="node"', local_group="node"),
    "fsdp2": Method(f"{DLION}, FSDP2 in the node", "shards vote", Sharded, "lion", {}),
    "localsgd8": _local_sgd(8),
    "localsgd32": _local_sgd(32),
    "localsgd160": _local_sgd(160),
    "localsgd32-bf16": _local_sgd(32, torch.bfloat16),
    "diloco16": _diloco(16),
    "diloco50": _diloco(50),
    "demo": Method("DeMo", "DCT of the momentum", DeMo, "lion", package="pytorch_optimizer"),
}


def method_of(name: str) -> Method:
    """Returns a method by name; "majority:bits=4,exchange=gather" gives DistributedLion's options.

    Raises:
        ValueError: If there is no such method, or it has no such options.
        ImportError: If its package is missing.
    """
    key, _, text = name.partition(":")
    if key not in METHODS:
        raise ValueError(f"unknown method {key!r}: there are {', '.join(METHODS)}")
    method = METHODS[key]
    if method.package and importlib.util.find_spec(method.package) is None:
        package = PACKAGES[method.package]
        raise ImportError(f"{method.package} is not installed: pip install {package}")
    if not text:
        return method
    if method.options is None:
        raise ValueError(f"{name}: {key} has no options; those of DistributedLion have")
    options = dict(pair.partition("=")[::2] for pair in text.split(","))
    both = method.options | {option: _value(value) for option, value in options.items()}
    # Refuses wrong ones before any rank starts.
    DistributedLion([("parameter", torch.zeros(1))], **both)
    make = Sharded if key == "fsdp2" else Voting
    return Method(f"{method.title}, {text}", method.about, partial(make, **both), "lion", both)


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
