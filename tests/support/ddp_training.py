"""A small model that is trained with and without a DDP wrapper, and the ways to wrap it."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from hf_dlion import DistributedLion
from hf_dlion.backward import search as comm_hook

STEPS = 4


class Model(nn.Module):
    """Two blocks, an embedding, and a branch that only some calls take."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 16)
        self.first = nn.Linear(16, 24)
        self.second = nn.Linear(24, 16)
        self.branch = nn.Linear(16, 16)
        self.recompute = recompute

    def block(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))

    def forward(self, tokens: Tensor, branch: bool = True) -> Tensor:
        x = self.embedding(tokens)
        x = checkpoint(self.block, x, use_reentrant=False) if self.recompute else self.block(x)
        return (self.branch(x) if branch else x).square().mean()


def new_model(recompute: bool = False) -> Model:
    torch.manual_seed(0)
    return Model(recompute)


def optimizer_of(model: nn.Module, **options: Any) -> DistributedLion:
    return DistributedLion(model.named_parameters(), lr=1e-2, weight_decay=0.1, **options)


def bits_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone().view(torch.int32) for param in model.parameters()]


def batches(rank: int, micro_steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(100 + rank)
    return [
        [torch.randint(0, 11, (3, 5), generator=generator) for _ in range(micro_steps)]
        for _ in range(STEPS)
    ]


@contextlib.contextmanager
def released(*holders: list[Any]) -> Iterator[None]:
    """Lets go of DDP wrappers before a pool's process group can end."""
    yield
    for holder in holders:
        holder.clear()
    gc.collect()


def alike(*tensors: Tensor) -> bool:
    """Returns whether all ranks hold the same bits; all ranks call it together."""
    for tensor in tensors:
        everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, tensor)
        if not all(torch.equal(tensor, other) for other in everyone):
            return False
    return True


def train(
    rank: int,
    world_size: int,
    wrap: str,
    ddp_options: dict[str, Any],
    loop: dict[str, Any],
    make: Callable[..., DistributedLion] = optimizer_of,
) -> tuple[list[Tensor], int]:
    """Trains a few steps and returns the parameters' bits and the bytes of a step."""
    model = new_model(loop.get("recompute", False))
    early = loop.get("optimizer_first", True)
    options = {"overlap": loop.get("overlap", False), **loop.get("options", {})}
    optimizer = make(model, **options) if early else None
    holder: list[Any] = [model]
    with released(holder):
        if wrap == "compile_inside":
            holder[0] = torch.compile(holder[0], backend="eager")
        if wrap != "bare":
            holder[0] = DistributedDataParallel(holder[0], **ddp_options)
        if wrap == "compile_outside":
            holder[0] = torch.compile(holder[0], backend="eager")
        if optimizer is None:
            optimizer = make(model, **options)
        if loop.get("attach", False) and wrap != "bare":
            optimizer.attach(holder[0])
        for step, micro_batches in enumerate(batches(rank, loop.get("micro_steps", 1))):
            for number, tokens in enumerate(micro_batches):
                last = number == len(micro_batches) - 1
                skip = loop.get("skip_branch_on") == rank and step % 2 == 0
                inner = comm_hook.unwrapped_ddp(holder[0])
                quiet = contextlib.nullcontext() if last or inner is None else inner.no_sync()
                with quiet:
                    holder[0](tokens, branch=not skip).backward()
            if loop.get("clip", False):
                nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad(set_to_none=loop.get("set_to_none", True))
            if loop.get("evaluate", False):
                holder[0].eval()
                with torch.no_grad():
                    holder[0](micro_batches[0])
                holder[0].train()
        return bits_of(model), optimizer.wire.last_bytes_sent


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "plain": ("ddp", {}, {}),
    "attached": ("ddp", {}, {"attach": True}),
    "optimizer_last": ("ddp", {}, {"optimizer_first": False}),
    "several_buckets": ("ddp", {"bucket_cap_mb": 0.001}, {}),
    "bucket_views": ("ddp", {"gradient_as_bucket_view": True}, {"micro_steps": 2}),
    "static_graph": ("ddp", {"static_graph": True}, {}),
    "accumulation": ("ddp", {}, {"micro_steps": 3}),
    "clipping": ("ddp", {}, {"micro_steps": 2, "clip": True}),
    "checkpointing": ("ddp", {}, {"recompute": True}),
    "evaluation": ("ddp", {}, {"evaluate": True}),
    "zeros_kept": ("ddp", {}, {"set_to_none": False}),
    "find_unused": ("ddp", {"find_unused_parameters": True}, {}),
    "unused_on_rank_0": ("ddp", {"find_unused_parameters": True}, {"skip_branch_on": 0}),
    "unused_zeros_kept": (
        "ddp",
        {"find_unused_parameters": True},
        {"skip_branch_on": 0, "set_to_none": False},
    ),
    "compile_inside": ("compile_inside", {}, {}),
    "compile_outside": ("compile_outside", {}, {"evaluate": True}),
}
