"""Training under FSDP2 inside replicas, and the same on whole parameters."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from hf_dlion import DistributedLion
from tests.support.oracle import OracleGroup, OracleLion
from tests.support.spawn import LASTING

LR, DECAY = 0.01, 0.1


class TinyModel(nn.Module):
    """Tied weights, rows that no number of shards divides, one row alone, a layer nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 6)
        self.body = nn.Linear(6, 5)
        self.scale = nn.Linear(5, 1, bias=False)
        self.back = nn.Linear(5, 6)
        self.unused = nn.Linear(6, 3)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.body(self.embed(tokens)))
        hidden = self.back(hidden * (1 + self.scale(hidden)))
        return nn.functional.cross_entropy(self.head(hidden), tokens.roll(1))


def new_model(dtype: torch.dtype = torch.float32) -> TinyModel:
    torch.manual_seed(0)
    return TinyModel().to(dtype)


def grid(world_size: int, shards: int = 2) -> DeviceMesh:
    return _grid((world_size // shards, shards), dist.group.WORLD)


@functools.cache
def _grid(shape: tuple[int, int], world: dist.ProcessGroup) -> DeviceMesh:
    # Made once: groups have threads, and outlive the cases.
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    LASTING.update(mesh.get_all_groups())
    return mesh


def sharded(model: TinyModel, mesh: DeviceMesh, **options: Any) -> TinyModel:
    """Shards a model inside each replica, layer by layer."""
    for module in (model.body, model.back, model):
        fully_shard(module, mesh=mesh["shard"], **options)
    return model


def optimizer_of(model: nn.Module, mesh: DeviceMesh, **options: Any) -> DistributedLion:
    options = {"lr": LR, "weight_decay": DECAY, "replicate": mesh["replicate"], **options}
    return DistributedLion(model.named_parameters(), **options)


def sharded_late(mesh: DeviceMesh) -> tuple[TinyModel, DistributedLion]:
    """Shards a model after its optimizer was made, which then gets the sharded parameters."""
    model = new_model()
    optimizer = optimizer_of(model, mesh)
    sharded(model, mesh)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    return model, optimizer


def keep_groups(optimizer: DistributedLion) -> None:
    """Keeps the groups of early votes: torch would name the next ones of these ranks alike."""
    wires = getattr(optimizer._engine.early, "_wires", None) or ()
    LASTING.update(wire.group for wire in wires)


def tokens_of(rank: int, step: int) -> Tensor:
    # Not all tokens, so rows of the embedding have no gradient but from the head.
    return torch.randint(0, 7, (5,), generator=torch.Generator().manual_seed(100 * rank + step))


def full(tensor: Tensor) -> Tensor:
    """Returns a whole tensor; all ranks of the replica must call this."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def full_params(model: nn.Module) -> list[Tensor]:
    return [full(param) for param in model.parameters()]


def whole_gradients(params: Sequence[Tensor], batches: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns the gradients of one rank's batches by a model that nobody shards."""
    model = copy.deepcopy(new_model(params[0].dtype))
    with torch.no_grad():
        for param, value in zip(model.parameters(), params, strict=True):
            param.copy_(value)
    for tokens in batches:
        model(tokens).backward()
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def rows_of(tensor: Tensor, shards: int) -> list[Tensor]:
    """Returns the rows that each rank of a replica holds, as FSDP2 shares them out."""
    most = -(-len(tensor) // shards)
    return [tensor[k * most : (k + 1) * most] for k in range(shards)]


class ShardedOracle:
    """The rule for replicas that share out whole parameters by rows: one oracle for each part.

    Args:
        params: Whole, as all replicas begin.
        replicas: How many vote.
        shards: Ranks of a replica.
        plain: Indices of parameters that are not sharded.
        options: Of the oracles.
    """

    def __init__(
        self,
        params: Sequence[Tensor],
        replicas: int,
        shards: int,
        plain: Sequence[int] = (),
        **options: Any,
    ) -> None:
        self.replicas, self.shards, self.plain = replicas, shards, frozenset(plain)
        groups = [
            OracleGroup(self.cut(params, part), lr=LR, weight_decay=DECAY) for part in range(shards)
        ]
        self.parts = [OracleLion([group], replicas, **options) for group in groups]

    def cut(self, tensors: Sequence[Tensor | None], part: int) -> list[Any]:
        return [
            t if t is None or i in self.plain else rows_of(t, self.shards)[part]
            for i, t in enumerate(tensors)
        ]

    def step(self, grads: Sequence[Sequence[Tensor | None]]) -> None:
        """Takes a step with the whole gradients of all ranks, replica by replica."""
        firsts = range(0, len(grads), self.shards)
        means = [self._mean(grads[first : first + self.shards]) for first in firsts]
        for part, oracle in enumerate(self.parts):
            oracle.step([self.cut(mean, part) for mean in means])

    def _mean(self, grads: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
        mean = [
            None if own[0] is None else torch.stack(own).sum(dim=0) / self.shards  # type: ignore[arg-type]
            for own in zip(*grads, strict=True)
        ]
        if all(grad is None or bool(grad.isfinite().all()) for grad in mean):
            return mean
        # A replica abstains as a whole, whichever part the NaN is in.
        return [None if grad is None else torch.full_like(grad, torch.nan) for grad in mean]

    def params(self) -> list[Tensor]:
        """Returns the parameters, whole again."""
        columns = enumerate(zip(*(oracle.params for oracle in self.parts), strict=True))
        return [own[0] if index in self.plain else torch.cat(own) for index, own in columns]
