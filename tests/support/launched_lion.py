"""Runs one of Accelerate's own test scripts with DistributedLion instead of its optimizers.

The scripts make `torch.optim.SGD` or `AdamW` themselves, and the installed files stay as they are.
Prints, on each rank, how many optimizers exchanged votes.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import hf_dlion.accelerate
from accelerate import Accelerator
from hf_dlion import DistributedLion

# By weak reference they would be gone before they are counted.
WIRES = []


class Lion(DistributedLion):
    """Accepts the arguments of the optimizers that it replaces."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, lr=lr)
        WIRES.append(self.wire)


def attach_prepared() -> None:
    """Makes `prepare` attach the model that it returns, as a user does in the next line."""
    original = Accelerator.prepare

    def prepare(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        prepared = original(self, *args, **kwargs)
        found = prepared if isinstance(prepared, tuple) else (prepared,)
        models = [own for own in found if isinstance(own, torch.nn.Module)]
        optimizers = [own for own in found if isinstance(own, torch.optim.Optimizer)]
        if models and optimizers:
            hf_dlion.accelerate.attach(self, models[0])
        return prepared

    Accelerator.prepare = prepare


def replicas_are_equal(_: Any, ddp_model: torch.nn.Module, did_step: bool, *__: Any, **___: Any):
    """Replaces the check that gradients were averaged, because DistributedLion doesn't."""
    if not did_step:
        return
    for param in ddp_model.parameters():
        everyone = [torch.empty_like(param) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, param.detach())
        assert all(torch.equal(param, other) for other in everyone)


def main() -> None:
    name, *options = sys.argv[1:]
    torch.optim.SGD = torch.optim.AdamW = Lion  # type: ignore[assignment, misc]
    attach_prepared()
    script = importlib.import_module(f"accelerate.test_utils.scripts.{name}")
    if "replicas" in options:
        script.check_model_parameters = replicas_are_equal
    script.main()
    exchanged = sum(wire.exchanges > 0 for wire in WIRES)
    text = f"rank {os.environ['RANK']}: {exchanged} of {len(WIRES)} optimizers exchanged votes"
    # One write, so that the ranks' lines do not mix.
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
