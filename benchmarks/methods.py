"""The ways of training that `step_time.py` compares."""

# No `from __future__ import annotations` here: DDP compares the hooks' annotations with classes.

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from hf_dlion.codec import codec_for
from hf_dlion.exchange.mean import average_wire_bytes
from hf_dlion.tools.models import vocabulary
from hf_dlion.tools.names import ALONE, BF16, FP32, NONE, POWER, name_of
from hf_dlion.tools.work import step_rule, tensor_rule
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from benchmarks.rivals import (
    DeMo,
    DiLoCo,
    Hooked,
    LocalSGD,
    Rival,
    check_installed,
)
from hf_dlion.optimizer import DistributedLion

# Rows of the tables that other code looks for.
LOCAL, DILOCO, DEMO = "LocalSGD, {} steps of AdamW", "DiLoCo, {} steps of AdamW", "DeMo"
# Methods that differ from "dlion" only on several nodes of several ranks.
NODE, FSDP2 = "dlion-node", "fsdp2"

# Makes a new model, the same on every rank.
Make = Callable[[], nn.Module]
LR, WEIGHT_DECAY = 1e-4, 0.1
ADAMW = partial(torch.optim.AdamW, lr=LR, fused=True)


class LocalLion:
    """Lion on the gradients as they are, with the codec that DistributedLion uses alone."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        self._params = list(params)
        self._momenta = [torch.zeros_like(param) for param in self._params]
        self._step = 0

    @torch.no_grad()
    def step(self) -> None:
        self._step += 1
        rule = step_rule(self._step)
        for index, (param, momentum) in enumerate(zip(self._params, self._momenta, strict=True)):
            if param.grad is not None:
                own = tensor_rule(rule, index)
                codec_for(param.device).step_alone(param, param.grad, momentum, own)

    def zero_grad(self) -> None:
        for param in self._params:
            param.grad = None


class Method:
    """A model in DDP with its optimizer.

    Attributes:
        name: For the table.
        model: The wrapper, or the bare model.
        optimizer: With `step` and `zero_grad`.
        bytes_sent: Bytes that a rank sends in a step; an all-reduce counts as a ring.
        period: Steps after which all begins anew, as with what meets in every k-th step only.
    """

    def __init__(
        self, name: str, model: nn.Module, optimizer: Any, bytes_sent: int = 0, period: int = 1
    ) -> None:
        self.name, self.model, self.optimizer = name, model, optimizer
        self.bytes_sent, self.period = bytes_sent, period

    def loss(self, tokens: Tensor) -> Tensor:
        """Returns the loss on tokens."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def step(self, tokens: Tensor) -> None:
        self.loss(tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if isinstance(self.optimizer, DistributedLion):
            self.bytes_sent = self.optimizer.wire.last_bytes_sent

    def lap(self, tokens: Tensor) -> None:
        """Takes the steps of a period."""
        before = self._sent()
        for _ in range(self.period):
            self.step(tokens)
        if isinstance(self.optimizer, Rival):
            self.bytes_sent = round((self._sent() - before) / self.period)

    def close(self) -> None:
        if isinstance(self.optimizer, Rival):
            self.optimizer.close()

    def _sent(self) -> float:
        return self.optimizer.bytes_sent if isinstance(self.optimizer, Rival) else 0.0


def keep_local(
    state: object,
    bucket: dist.GradBucket,
) -> torch.futures.Future[Tensor]:
    """Comm hook that sends nothing."""
    buffer = bucket.buffer()
    devices = None if buffer.device.type == "cpu" else [buffer.device]
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future


def alone(make: Make) -> Method:
    """Returns the step of a host by itself: no wrapper, no network, plain Lion."""
    model = make()
    return Method(ALONE, model, LocalLion(model.parameters()))


def reduced(
    make: Make,
    name: str,
    dtype: torch.dtype | None,
    hook: Callable[..., Any] | None = None,
    optimizer: Callable[[Iterable[Tensor]], Any] = ADAMW,
) -> Method:
    """Returns an optimizer on the gradients that DDP has made of all ranks'."""
    ddp = _wrapped(make())
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    numel = sum(param.numel() for param in ddp.parameters())
    sent = 0 if dtype is None else average_wire_bytes(numel, dist.get_world_size(), dtype)
    return Method(name, ddp, optimizer(ddp.parameters()), sent)


def other(
    make: Make, name: str, rival: Callable[..., Rival], period: int = 1, **options: Any
) -> Method:
    """Returns what one would otherwise take."""
    made = rival(make(), lr=LR, weight_decay=WEIGHT_DECAY, **options)
    return Method(name, made.model, made, period=period)


def distributed_lion(make: Make, bits: int = 1, **options: Any) -> Method:
    """Returns DistributedLion with some options; its name tells what is not the default."""
    ddp = _wrapped(make())
    optimizer = DistributedLion(
        ddp.named_parameters(), lr=LR, weight_decay=WEIGHT_DECAY, bits=bits, **options
    )
    return Method(name_of(bits, **options), ddp, optimizer)


def sharded_lion(make: Make, bits: int = 1) -> Method:
    """Returns DistributedLion on a model that FSDP2 shards inside each node."""
    from torch.distributed.fsdp import fully_shard

    model, ranks, shards = make(), dist.get_world_size(), _ranks_per_node()
    mesh = init_device_mesh(
        next(model.parameters()).device.type,
        (ranks // shards, shards),
        mesh_dim_names=("replicate", "shard"),
    )
    for module in (*cast(Any, model).model.layers, model):
        fully_shard(module, mesh=mesh["shard"])
    optimizer = DistributedLion(
        model.named_parameters(), lr=LR, weight_decay=WEIGHT_DECAY, bits=bits,
        replicate=mesh["replicate"],
    )  # fmt: skip
    return Method(f"{name_of(bits)}, FSDP2 in the node", model, optimizer)


# What makes DistributedLion of a model and the bits of a vote.
VOTING: dict[str, Callable[..., Method]] = {
    "dlion": distributed_lion,
    NODE: partial(distributed_lion, local_group="node"),
    FSDP2: sharded_lion,
    "overlap": partial(distributed_lion, overlap=True),
}
# What needs other packages, or many steps for one time: only where it is asked for.
ON_DEMAND: dict[str, Callable[[Make], Method]] = {
    "localsgd8": partial(other, name=LOCAL.format(8), rival=LocalSGD, period=8, every=8),
    "localsgd32": partial(other, name=LOCAL.format(32), rival=LocalSGD, period=32, every=32),
    "diloco16": partial(other, name=DILOCO.format(16), rival=DiLoCo, period=16, every=16),
    "diloco50": partial(other, name=DILOCO.format(50), rival=DiLoCo, period=50, every=50),
    "demo": partial(other, name=DEMO, rival=DeMo),
}
PACKAGE_OF = {"diloco16": "torchft", "diloco50": "torchft", "demo": "pytorch_optimizer"}
METHODS: dict[str, Callable[[Make], Method]] = {
    "none": partial(reduced, name=NONE, dtype=None, hook=keep_local),
    "alone": alone,
    "fp32": partial(reduced, name=FP32, dtype=torch.float32),
    "bf16": partial(other, name=BF16, rival=Hooked, compressed=False),
    "powersgd": partial(other, name=POWER, rival=Hooked, compressed=True),
    "lion": partial(reduced, name="DDP fp32, Lion", dtype=torch.float32, optimizer=LocalLion),
    **VOTING,
    **ON_DEMAND,
}


def sizes_of(make: Callable[[], nn.Module]) -> tuple[int, int]:
    """Returns how many parameters a model has, and how many tokens it knows."""
    with torch.device("meta"):
        model = make()
    return sum(param.numel() for param in model.parameters()), vocabulary(model)


def check_methods(names: Iterable[str]) -> None:
    """Checks before any work starts that the packages of some methods are installed."""
    for name in names:
        if name in PACKAGE_OF:
            check_installed(PACKAGE_OF[name])


def methods_of(names: Sequence[str], bits: Sequence[int], make: Make) -> list[Method]:
    """Returns methods by their keys in `METHODS`, those that vote once for each number of bits."""
    found = []
    for name in names:
        if name in VOTING:
            found += [VOTING[name](make, bits=own) for own in bits]
        else:
            found.append(METHODS[name](make))
    return found


def sensible_methods() -> list[str]:
    """Returns the methods that differ here, of those that need nothing but torch.

    What nodes do together differs on several nodes of several ranks.
    """
    several = 1 < _ranks_per_node() < dist.get_world_size()
    left_out = {*ON_DEMAND, *(() if several else (NODE, FSDP2))}
    return [name for name in METHODS if name not in left_out]


def _ranks_per_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _wrapped(model: nn.Module, **options: Any) -> DistributedDataParallel:
    # Every rank seeds alike: nothing need be sent to make the replicas equal.
    return DistributedDataParallel(model, init_sync=False, **options)
