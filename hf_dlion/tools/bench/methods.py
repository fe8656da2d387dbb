"""The ways of training that `bench train` compares."""

# No `from __future__ import annotations` here: DDP compares the hooks' annotations with classes.

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.codec import codec_for
from hf_dlion.codec.rule import StepRule, TensorRule
from hf_dlion.optimizer import DistributedLion
from hf_dlion.tools.bench.traffic import POWER_RANK, power_numel, ring_bytes

# PowerSGD's warm start needs two plain steps before the first compressed one.
POWER_START = 2
ONE_BUCKET_MB = 1 << 20

ALONE = "one host alone, Lion"
NODE = "dlion-node"


class LocalLion:
    """Lion on the gradients as they are, with the codec that DistributedLion uses alone."""

    def __init__(self, params: list[Tensor]) -> None:
        """Starts with momenta of 0."""
        self._params = params
        self._momenta = [torch.zeros_like(param) for param in params]
        self._step = 0

    def step(self) -> None:
        """Moves the parameters."""
        self._step += 1
        rule = StepRule(
            step=self._step, rank=0, world_size=1, aggregation="majority", ties="alternate",
            stochastic_rounding=True, seed=0,
        )  # fmt: skip
        with torch.no_grad():
            for index, (param, momentum) in enumerate(
                zip(self._params, self._momenta, strict=True)
            ):
                if param.grad is not None:
                    one = TensorRule(
                        step_rule=rule, index=index, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1
                    )
                    codec_for(param.device).step_alone(param, param.grad, momentum, one)

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

    def __init__(self, name: str, model: nn.Module, optimizer: Any) -> None:
        """Sends nothing until told otherwise."""
        self.name, self.model, self.optimizer = name, model, optimizer
        self.bytes_sent = 0

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


def no_communication(make: Callable[[], nn.Module]) -> Method:
    """Returns the step without a network: replicas drift apart."""
    ddp = _wrapped(make())
    ddp.register_comm_hook(None, keep_local)
    return Method("no communication, AdamW", ddp, _adamw(ddp))


def alone(make: Callable[[], nn.Module]) -> Method:
    """Returns the step of a host by itself: no wrapper, no network, plain Lion."""
    model = make()
    return Method(ALONE, model, LocalLion(list(model.parameters())))


def ddp_fp32(make: Callable[[], nn.Module]) -> Method:
    """Returns DDP as it comes."""
    ddp = _wrapped(make())
    method = Method("DDP fp32, AdamW", ddp, _adamw(ddp))
    method.bytes_sent = _reduced(_numel(ddp), 4)
    return method


def ddp_bf16(make: Callable[[], nn.Module]) -> Method:
    """Returns DDP with gradients in bfloat16 on the wire."""
    ddp = _wrapped(make())
    ddp.register_comm_hook(None, reduce_in_bf16)
    method = Method("DDP bf16 hook, AdamW", ddp, _adamw(ddp))
    method.bytes_sent = _reduced(_numel(ddp), 2)
    return method


def power_sgd(make: Callable[[], nn.Module]) -> Method:
    """Returns DDP with PowerSGD; in one bucket, because several deadlock on gloo."""
    ddp = _wrapped(make(), bucket_cap_mb=ONE_BUCKET_MB)
    state = powerSGD_hook.PowerSGDState(None, POWER_RANK, start_powerSGD_iter=POWER_START)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    method = Method(f"PowerSGD rank {POWER_RANK}, AdamW", ddp, _adamw(ddp))
    method.bytes_sent = _reduced(sum(power_numel(p.shape) for p in ddp.parameters()), 4)
    return method


def reduced_lion(make: Callable[[], nn.Module]) -> Method:
    """Returns Lion on DDP's averaged gradients."""
    ddp = _wrapped(make())
    method = Method("DDP fp32, Lion", ddp, LocalLion(list(ddp.parameters())))
    method.bytes_sent = _reduced(_numel(ddp), 4)
    return method


def distributed_lion(make: Callable[[], nn.Module], bits: int = 1, **options: Any) -> Method:
    """Returns DistributedLion; its name tells what is not the default.

    Args:
        make: Makes the model.
        bits: Of a vote.
        options: More of its options.
    """
    ddp = _wrapped(make())
    optimizer = DistributedLion(
        ddp.named_parameters(), lr=1e-4, weight_decay=0.1, bits=bits, **options
    )
    return Method(name_of(bits, **options), ddp, optimizer)


def name_of(bits: int, *, local_group: str | None = None, overlap: bool = False) -> str:
    """Returns the name of DistributedLion with some options in the tables."""
    parts = ["DistributedLion"]
    parts += [f"{bits} bits"] if bits > 1 else []
    parts += ["a vote per node"] if local_group is not None else []
    return ", ".join(parts + ["overlap"] * overlap)


# DistributedLion's options besides the bits of a vote.
VOTING: dict[str, dict[str, Any]] = {
    "dlion": {},
    NODE: {"local_group": "node"},
    "overlap": {"overlap": True},
}
METHODS: dict[str, Callable[[Callable[[], nn.Module]], Method]] = {
    "none": no_communication,
    "alone": alone,
    "fp32": ddp_fp32,
    "bf16": ddp_bf16,
    "powersgd": power_sgd,
    "lion": reduced_lion,
    **{name: partial(distributed_lion, **options) for name, options in VOTING.items()},
}


def methods_of(
    names: Sequence[str], bits: Sequence[int], make: Callable[[], nn.Module]
) -> list[Method]:
    """Returns methods, those that vote once for each number of bits.

    Args:
        names: Keys of `METHODS`.
        bits: Of a vote.
        make: Makes the model.
    """
    found = []
    for name in names:
        if name in VOTING:
            found += [distributed_lion(make, own, **VOTING[name]) for own in bits]
        else:
            found.append(METHODS[name](make))
    return found


def sensible_methods() -> list[str]:
    """Returns the methods that differ here: a vote per node does on several nodes of several."""
    size, ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), dist.get_world_size()
    return [name for name in METHODS if name != NODE or 1 < size < ranks]


def _reduced(numel: int, size: int) -> int:
    return ring_bytes(numel, size, dist.get_world_size())


def _wrapped(model: nn.Module, **options: Any) -> DistributedDataParallel:
    # Every rank seeds alike: nothing need be sent to make the replicas equal.
    return DistributedDataParallel(model, init_sync=False, **options)


def _adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def _numel(model: nn.Module) -> int:
    return sum(param.numel() for param in model.parameters())
