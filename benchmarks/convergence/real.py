"""One run on real ranks: a process each, gloo, DDP, and `DistributedLion` as a user has it."""

from __future__ import annotations

import gc
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.convergence.compressors_hook import HookState, compress_hook
from benchmarks.convergence.methods import Method, groups_of, lion_options, set_lr, trainable
from benchmarks.convergence.recipes import recipe
from benchmarks.convergence.scenes import Scene, UnknownNameError, scene_class
from benchmarks.convergence.setting import Setting
from benchmarks.convergence.train import train
from benchmarks.rivals import check_installed
from hf_dlion.exchange.mean import average_wire_bytes
from hf_dlion.optimizer import DistributedLion


class RealRank(Method):
    """This process's share of a run; a process group is there."""

    def __init__(self, scene: Scene, setting: Setting) -> None:
        """Makes the model, its wrapper and the optimizer."""
        model = scene.model(setting.seed)
        self.judges = dist.get_rank() == 0
        if scene.judged_long:
            # The other ranks wait, and leave their cores.
            self.judging_threads = min(setting.workers, len(os.sched_getaffinity(0)))
        how = recipe(setting.method)
        self._rival = None if how.rival is None else how.rival(model, setting)
        if self._rival is not None:
            self.places = [(dist.get_rank(), self._rival.model)]
            return
        params = trainable(model)
        self._numel = sum(param.numel() for param in params)
        ddp = DistributedDataParallel(model)
        self.places = [(dist.get_rank(), ddp)]
        self._hook: HookState | None = None
        if how.compressor is not None:
            self._hook = HookState(how.compressor(), params, seed=setting.seed, steps=setting.steps)
            ddp.register_comm_hook(self._hook, compress_hook)
        self._optimizer: torch.optim.Optimizer
        if how.make is None or how.family == "lion":
            options = real_options(setting, self._numel)
            groups = groups_of(model, setting)
            self._optimizer = DistributedLion(groups, **lion_options(setting), **options)
        else:
            self._optimizer = how.make(model, setting)

    def total(self, loss: float) -> float:
        """See `Method.total`: what one rank finds has diverged, all leave."""
        found = torch.tensor(loss, dtype=torch.float64)
        dist.all_reduce(found)
        return float(found)

    def step(self, lr: float) -> None:
        """Takes a step together with the other ranks."""
        if self._rival is not None:
            set_lr(self._rival.optimizer, lr)
            self._rival.step()
            self._rival.zero_grad()
            self.bytes_sent, self.rounds = self._rival.bytes_sent, self._rival.rounds
            return
        set_lr(self._optimizer, lr)
        self._optimizer.step()
        self._optimizer.zero_grad()
        if isinstance(self._optimizer, DistributedLion):
            stats = self._optimizer.wire
            self.bytes_sent, self.rounds = float(stats.bytes_sent), stats.rounds
        elif self._hook is not None:
            self.bytes_sent, self.rounds = float(self._hook.bytes_sent), self._hook.rounds
        else:
            ranks = dist.get_world_size()
            self.bytes_sent += average_wire_bytes(self._numel, ranks, torch.float32)
            self.rounds += 2 * (ranks - 1)

    def close(self) -> None:
        """Ends what a rival started."""
        if self._rival is not None:
            self._rival.close()


def real_options(setting: Setting, numel: int) -> dict[str, Any]:
    """Returns the options of `DistributedLion` that make a method with real ranks.

    Raises:
        UnknownNameError: If the method is one of Lion's, and no option of `DistributedLion`.
    """
    if setting.method == "lion":
        return {"warmup_full_steps": setting.steps}
    options = recipe(setting.method).options
    if options is None:
        raise UnknownNameError(
            f"{setting.method!r} runs in one process only: leave out --real, or the method"
        )
    return options(setting, numel)


def check_real(setting: Setting) -> None:
    """Checks before any work starts that a method has real ranks.

    Raises:
        UnknownNameError: If it has none, or there is no such method.
        ImportError: If its library is not installed.
    """
    how = recipe(setting.method)
    if how.package:
        check_installed(how.package)
    if how.family == "lion" and how.rival is None:
        real_options(setting, 0)


def run_real(setting: Setting) -> dict[str, Any]:
    """Trains on `setting.workers` processes of this machine; returns rank 0's record.

    Raises:
        UnknownNameError: If there is no such scene or method, or it has no real ranks.
    """
    check_real(setting)
    scene_class(setting.scene)(setting).prepare(Path(setting.folder))
    with tempfile.TemporaryDirectory(prefix="hf_dlion_study_") as folder:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        spawn(_rank, (setting, folder), nprocs=setting.workers)  # type: ignore[no-untyped-call]
        found: dict[str, Any] = json.loads(Path(folder, "record.json").read_text())
        return found


def _rank(rank: int, setting: Setting, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=setting.workers
    )
    scene = scene_class(setting.scene)(setting)
    method = RealRank(scene, setting)
    record = train(setting, scene, method)
    method.close()
    if rank == 0:
        Path(folder, "record.json").write_text(json.dumps(record))
    # gloo may abort the process if a DDP model outlives its process group.
    del method
    gc.collect()
    dist.destroy_process_group()
