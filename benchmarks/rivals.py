"""What one would otherwise take on a slow network, from its own library; on real ranks only.

`step_time.py` times them, and `convergence` trains with them.
"""

# No `from __future__ import annotations` here: DDP compares the hooks' annotations with classes.

import datetime
import importlib.util
import os
from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.distributed as dist
from hf_dlion.exchange.mean import average_wire_bytes
from hf_dlion.ranks.interface import interfaces, route_to
from hf_dlion.tools.names import POWER_RANK, power_numel
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.model_averaging import utils as averaging
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

# PowerSGD's warm start needs two plain steps before the first compressed one.
POWER_START = 2
ONE_BUCKET_MB = 1 << 20
# What to install for a rival that comes with neither torch nor transformers, by its module.
PACKAGES = {
    "torchft": "torchft",
    "pytorch_optimizer": "pytorch-optimizer einops",
}


class Rival(ABC):
    """One rank of a way of training that is not ours; every rank begins with the same model.

    Attributes:
        model: Whose forward and backward the loop calls.
        optimizer: Whose learning rate the loop sets.
        bytes_sent: Bytes that this rank has sent so far; an all-reduce counts as a ring.
        rounds: Messages that waited for one another so far.
    """

    model: nn.Module
    optimizer: Optimizer
    bytes_sent: float = 0.0
    rounds: int = 0

    @abstractmethod
    def step(self) -> None:
        """Moves the parameters."""

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def close(self) -> None:  # noqa: B027 (most have nothing to do)
        """Ends what the rival started."""

    def _count(self, numel: int, dtype: torch.dtype, all_reduces: int = 1) -> None:
        ranks = dist.get_world_size()
        self.bytes_sent += average_wire_bytes(numel, ranks, dtype)
        self.rounds += all_reduces * 2 * (ranks - 1)


def check_installed(module: str) -> None:
    """Checks before any work starts that a rival's library is there."""
    if importlib.util.find_spec(module) is None:
        raise ImportError(f"{module} is not installed: pip install {PACKAGES[module]}")


class Hooked(Rival):
    """AdamW on what a comm hook of torch makes of the gradients."""

    def __init__(
        self, model: nn.Module, lr: float, weight_decay: float, *, compressed: bool
    ) -> None:
        """Wraps the model in DDP."""
        params = _trainable(model)
        whole = sum(param.numel() for param in params)
        # Elements in the first steps, and how many these are; then elements, dtype and all-reduces.
        self._first, self._left = whole, POWER_START if compressed else 0
        if compressed:
            # In one bucket, because several deadlock on gloo.
            ddp = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB, init_sync=False)
            state = powerSGD_hook.PowerSGDState(None, POWER_RANK, start_powerSGD_iter=POWER_START)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
            # What is not compressed, and the two factors.
            self._sent = sum(power_numel(param.shape) for param in params), torch.float32, 3
        else:
            ddp = DistributedDataParallel(model, init_sync=False)
            ddp.register_comm_hook(None, reduce_in_bf16)
            self._sent = whole, torch.bfloat16, 1
        self.model, self.optimizer = ddp, _adamw(params, lr, weight_decay)

    def step(self) -> None:
        self.optimizer.step()
        numel, dtype, all_reduces = self._sent
        if self._left:
            numel, all_reduces = self._first, 1
            self._left -= 1
        self._count(numel, dtype, all_reduces)


class LocalSGD(Rival):
    """AdamW on each rank's own gradient; every k steps the parameters become their mean.

    torch's PeriodicModelAverager, which is Accelerate's LocalSGD for the trained parameters alone.
    """

    def __init__(
        self,
        model: nn.Module,
        lr: float,
        weight_decay: float,
        *,
        every: int,
        steps: int | None = None,
    ) -> None:
        """Leaves the model without a wrapper."""
        self.model, self._params = model, _trainable(model)
        self._every, self._steps, self._taken = every, steps, 0
        self.optimizer = _adamw(self._params, lr, weight_decay)
        self._averager = PeriodicModelAverager(period=every, warmup_steps=0)
        # It averages where its count is a multiple of k, and would begin with 0.
        self._averager.step = 1
        self._numel = sum(param.numel() for param in self._params)

    def step(self) -> None:
        self.optimizer.step()
        self._averager.average_parameters(self._params)
        self._taken += 1
        if self._taken % self._every == 0:
            self._count(self._numel, torch.float32)
        elif self._taken == self._steps:
            everyone = self._averager.process_group
            assert everyone is not None, "None stood for the default group"
            averaging.average_parameters(iter(self._params), everyone)
            self._count(self._numel, torch.float32)


class DiLoCo(Rival):
    """torchft's DiLoCo (Douillard et al. 2023, arXiv 2311.08105): each rank a replica of its own.

    Inside AdamW; every H steps SGD with Nesterov's momentum moves all ranks' common parameters by
    the mean of what theirs moved. Between the last of these and the end ranks go on by themselves.
    """

    def __init__(self, model: nn.Module, lr: float, weight_decay: float, *, every: int) -> None:
        """Starts a lighthouse on rank 0, and a manager on every rank."""
        from torchft.coordination import LighthouseServer
        from torchft.local_sgd import DiLoCo
        from torchft.manager import Manager
        from torchft.process_group import ProcessGroupGloo

        rank, ranks, patience = dist.get_rank(), dist.get_world_size(), datetime.timedelta(hours=1)
        # Where the others reach this rank: at the interface that gloo takes, or that leads to them.
        named = interfaces().get(os.environ.get("GLOO_SOCKET_IFNAME", ""))
        host = named[0] if named else route_to(os.environ.get("MASTER_ADDR", "127.0.0.1")).address
        self._lighthouse = LighthouseServer(f"{host}:0", ranks) if rank == 0 else None
        address: list[str | None] = [None]
        if self._lighthouse is not None:
            # It tells its machine's name, which may lead nowhere, and its port.
            address = [f"http://{host}:{self._lighthouse.address().rpartition(':')[2]}"]
        dist.broadcast_object_list(address)
        # A replica's ranks meet at a store of its own; here it has one rank.
        self._store = dist.TCPStore(host, 0, 1, is_master=True)
        self.model, params = model, _trainable(model)
        self.optimizer = _adamw(params, lr, weight_decay)
        self._manager = Manager(
            ProcessGroupGloo(patience), None, None, ranks, use_async_quorum=False,
            timeout=patience, quorum_timeout=patience, connect_timeout=patience,
            rank=0, world_size=1, store_addr=host, store_port=self._store.port,
            lighthouse_addr=address[0], replica_id=str(rank), init_sync=False, hostname=host,
        )  # fmt: skip
        outer = torch.optim.SGD(params, lr=0.7, momentum=0.9, nesterov=True)  # as in the paper
        self._diloco = DiLoCo(
            self._manager, [model], self.optimizer, outer, every, pin_memory=False
        )
        self._diloco.__enter__()
        self._every, self._taken = every, 0
        self._numel = sum(param.numel() for param in model.parameters())

    def step(self) -> None:
        self.optimizer.step()
        self._taken += 1
        if self._taken % self._every == 0:
            self._count(self._numel, torch.float32)

    def close(self) -> None:
        self._diloco.__exit__(None, None, None)
        self._manager.shutdown()
        dist.barrier()
        if self._lighthouse is not None:
            self._lighthouse.shutdown()


class DeMo(Rival):
    """pytorch-optimizer's DeMo (Peng et al. 2024, arXiv 2411.19870), with its own defaults."""

    def __init__(self, model: nn.Module, lr: float, weight_decay: float) -> None:
        """Leaves the model without a wrapper: DeMo wants each rank's own gradient."""
        from pytorch_optimizer import DeMo

        params = _trainable(model)
        self.model = model
        self._demo: Any = DeMo(params, lr=lr, weight_decay=weight_decay)
        self.optimizer = self._demo

    def step(self) -> None:
        self.optimizer.step()
        # It counts one copy of what it sends.
        self.bytes_sent += (dist.get_world_size() - 1) * self._demo.data_transmit
        self.rounds += dist.get_world_size() - 1


def reduce_in_bf16(
    state: dist.ProcessGroup | None,
    bucket: dist.GradBucket,
) -> torch.futures.Future[Tensor]:
    """The bf16 hook of torch under a name that DDP does not refuse on gloo."""
    return default_hooks.bf16_compress_hook(state, bucket)


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def _adamw(params: list[nn.Parameter], lr: float, weight_decay: float) -> Optimizer:
    return AdamW(params, lr=lr, weight_decay=weight_decay, fused=True)
