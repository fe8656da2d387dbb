"""The ways of training that `bench train` compares."""

# No `from __future__ import annotations` here: DDP compares the hooks' annotations with classes.

import math
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.codec import codec_for
from hf_dlion.exchange.mean import average_wire_bytes
from hf_dlion.optimizer import DistributedLion
from hf_dlion.tools.bench.work import step_rule, tensor_rule

POWER_RANK = 4
# PowerSGD's warm start needs two plain steps before the first compressed one.
POWER_START = 2
ONE_BUCKET_MB = 1 << 20

# Rows of the tables that other code looks for.
NONE = "no communication, AdamW"
ALONE = "one host alone, Lion"
FP32 = "DDP fp32, AdamW"
BF16 = "DDP bf16 hook, AdamW"
POWER = f"PowerSGD rank {POWER_RANK}, AdamW"
DLION = "DistributedLion"
# Methods that differ from "dlion" only on several nodes of several ranks.
NODE, FSDP2 = "dlion-node", "fsdp2"

# Makes a new model, the same on every rank.
Make = Callable[[], nn.Module]
ADAMW = partial(torch.optim.AdamW, lr=1e-4, fused=True)


class LocalLion:
    """Lion on the gradients as they are, with the codec that DistributedLion uses alone."""

    def __init__(self, params: Iterable[Tensor]) -> None:
        """Starts with momenta of 0."""
        self._params = list(params)
        self._momenta = [torch.zeros_like(param) for param in self._params]
        self._step = 0

    @torch.no_grad()
    def step(self) -> None:
        """Moves the parameters."""
        self._step += 1
        rule = step_rule(self._step)
        for index, (param, momentum) in enumerate(zip(self._params, self._momenta, strict=True)):
            if param.grad is not None:
                own = tensor_rule(rule, index)
                codec_for(param.device).step_alone(param, param.grad, momentum, own)

    def zero_grad(self) -> None:
        """Drops the gradients."""
        for param in self._params:
            param.grad = None


class Method:
    """A model in DDP with its optimizer.

    Attributes:
        name: For the table.
        model: The wrapper, or the bare model.
        optimizer: With `step` and `zero_grad`.
        bytes_sent: Bytes that a rank sends in a step; an all-reduce counts as a ring.
    """

    def __init__(self, name: str, model: nn.Module, optimizer: Any, bytes_sent: int = 0) -> None:
        """Keeps the attributes."""
        self.name, self.model, self.optimizer = name, model, optimizer
        self.bytes_sent = bytes_sent

    def loss(self, tokens: Tensor) -> Tensor:
        """Returns the loss on tokens."""
        loss: Tensor = self.model(input_ids=tokens, labels=tokens).loss
        return loss

    def step(self, tokens: Tensor) -> None:
        """Takes one training step."""
        self.loss(tokens).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        if isinstance(self.optimizer, DistributedLion):
            self.bytes_sent = self.optimizer.wire.last_bytes_sent


def keep_local(
    state: object,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """Comm hook that sends nothing."""
    buffer = bucket.buffer()
    devices = None if buffer.device.type == "cpu" else [buffer.device]
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    future.set_result(buffer)
    return future


def reduce_in_bf16(
    state: dist.ProcessGroup | None,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[Tensor]:
    """The bf16 hook of torch under a name that DDP does not refuse on gloo."""
    return default_hooks.bf16_compress_hook(state, bucket)  # type: ignore[arg-type]


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
    """Returns an optimizer on the gradients that DDP has made of all ranks'.

    Args:
        make: Makes the model.
        name: Of the method.
        dtype: Of the gradients on the wire; None where nothing is sent.
        hook: DDP's comm hook, or None.
        optimizer: Makes it of the parameters.
    """
    ddp = _wrapped(make())
    if hook is not None:
        ddp.register_comm_hook(None, hook)
    numel = sum(param.numel() for param in ddp.parameters())
    sent = 0 if dtype is None else average_wire_bytes(numel, dist.get_world_size(), dtype)
    return Method(name, ddp, optimizer(ddp.parameters()), sent)


def power_sgd(make: Make) -> Method:
    """Returns DDP with PowerSGD; in one bucket, because several deadlock on gloo."""
    ddp = _wrapped(make(), bucket_cap_mb=ONE_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(None, POWER_RANK, start_powerSGD_iter=POWER_START)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    numel = sum(power_numel(param.shape) for param in ddp.parameters())
    sent = average_wire_bytes(numel, dist.get_world_size(), torch.float32)
    return Method(POWER, ddp, ADAMW(ddp.parameters()), sent)


def power_numel(shape: Sequence[int]) -> int:
    """Returns the elements that PowerSGD reduces for a tensor: two factors, or all of it."""
    numel = math.prod(shape)
    # A tensor of more dimensions is a matrix with the first as rows; a vector is one row.
    rows = shape[0] if len(shape) > 1 else 1
    columns = math.prod(shape[1:] if len(shape) > 1 else shape)
    factors = (rows + columns) * min(rows, columns, POWER_RANK)
    return factors if factors * 2 < numel else numel


def distributed_lion(make: Make, bits: int = 1, **options: Any) -> Method:
    """Returns DistributedLion with some options; its name tells what is not the default."""
    ddp = _wrapped(make())
    optimizer = DistributedLion(
        ddp.named_parameters(), lr=1e-4, weight_decay=0.1, bits=bits, **options
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
        model.named_parameters(), lr=1e-4, weight_decay=0.1, bits=bits, replicate=mesh["replicate"]
    )
    return Method(f"{name_of(bits)}, FSDP2 in the node", model, optimizer)


def name_of(bits: int, *, local_group: str | None = None, overlap: bool = False) -> str:
    """Returns the name of DistributedLion with some options in the tables."""
    parts = [DLION]
    parts += [f"{bits} bits"] if bits > 1 else []
    parts += ["a vote per node"] if local_group is not None else []
    return ", ".join(parts + ["overlap"] * overlap)


# What makes DistributedLion of a model and the bits of a vote.
VOTING: dict[str, Callable[..., Method]] = {
    "dlion": distributed_lion,
    NODE: partial(distributed_lion, local_group="node"),
    FSDP2: sharded_lion,
    "overlap": partial(distributed_lion, overlap=True),
}
METHODS: dict[str, Callable[[Make], Method]] = {
    "none": partial(reduced, name=NONE, dtype=None, hook=keep_local),
    "alone": alone,
    "fp32": partial(reduced, name=FP32, dtype=torch.float32),
    "bf16": partial(reduced, name=BF16, dtype=torch.bfloat16, hook=reduce_in_bf16),
    "powersgd": power_sgd,
    "lion": partial(reduced, name="DDP fp32, Lion", dtype=torch.float32, optimizer=LocalLion),
    **VOTING,
}


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
    """Returns the methods that differ here: what nodes do together, on several of several ranks."""
    several = 1 < _ranks_per_node() < dist.get_world_size()
    return [name for name in METHODS if name not in (NODE, FSDP2) or several]


def _ranks_per_node() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def _wrapped(model: nn.Module, **options: Any) -> DistributedDataParallel:
    # Every rank seeds alike: nothing need be sent to make the replicas equal.
    return DistributedDataParallel(model, init_sync=False, **options)
