"""A training loop as users write it, with this package's checkpoints, for faults."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import (
    DistributedLion,
    last_whole_checkpoint,
    load_momentum,
    save_momentum,
    saving,
)
from hf_dlion.checkpoint.whole import checkpoint_names, problems_in
from tests.support.faults import Injector, Journal

# Such that the model makes several messages.
SHORT = 40

# Options, and whether the model is wrapped in DDP.
MODES: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "ddp": ({}, True),
    "overlap": ({"overlap": True}, True),
    "node": ({"local_group": 2}, True),
    "node plain": ({"local_group": 2}, False),
}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A training.

    Attributes:
        mode: Of MODES.
        dtype: Of the parameters.
        options: Of the optimizer, besides those of the mode.
        steps: Of the loop.
        save_every: Steps between checkpoints; 0 for none.
    """

    mode: str
    dtype: str = "float32"
    options: dict[str, Any] = field(default_factory=dict)
    steps: int = 6
    save_every: int = 2


class Net(nn.Module):
    """An embedding with rows that are never seen, and two layers."""

    def __init__(self) -> None:
        """Is the same on every call."""
        super().__init__()
        torch.manual_seed(7)
        self.embedding = nn.Embedding(9, 6)
        self.first = nn.Linear(6, 10)
        self.second = nn.Linear(10, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        """Returns a loss."""
        x: Tensor = self.second(torch.tanh(self.first(self.embedding(tokens))))
        return (x - 0.5).float().square().mean()


def tokens_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 7, (4, 3), generator=generator)


def digest_of(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def whole_checkpoints(folder: Path) -> list[Path]:
    """Returns the whole checkpoints, the oldest first."""
    found = [folder / name for name in reversed(checkpoint_names(folder))]
    return [path for path in found if not problems_in(path)]


def save(optimizer: DistributedLion, model: nn.Module, folder: Path, step: int) -> None:
    """Writes a checkpoint."""
    with saving(optimizer, folder / f"checkpoint_{step}") as place:
        if optimizer.rank == 0:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(content | {"step": step}, place / "state.pt")
        save_momentum(optimizer, place)


def resume(optimizer: DistributedLion, model: nn.Module, folder: Path) -> int:
    """Loads the last whole checkpoint; returns the step after which it was saved."""
    found = last_whole_checkpoint(folder)
    if found is None:
        return 0
    content = torch.load(Path(found, "state.pt"), weights_only=True)
    model.load_state_dict(content["model"])
    optimizer.load_state_dict(content["optimizer"])
    load_momentum(optimizer, found)
    return int(content["step"])


def train(
    rank: int, world_size: int, job: Job, folder: Path, injector: Injector, journal: Journal
) -> None:
    """Trains from the last whole checkpoint on."""
    options, wrap = MODES[job.mode]
    model = Net().to(getattr(torch, job.dtype))
    wrapped = DistributedDataParallel(model, bucket_cap_mb=1e-4) if wrap else model
    optimizer = DistributedLion(
        model.named_parameters(), lr=1e-2, weight_decay=0.1, **options, **job.options
    )
    optimizer._engine.message_numel = SHORT
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(lambda _: injector.reach("in backward"))
    for step in range(resume(optimizer, model, folder) + 1, job.steps + 1):
        injector.step = step
        injector.reach("before forward")
        wrapped(tokens_of(rank, step)).backward()
        for param in model.parameters():
            assert param.grad is not None
            param.grad.view(-1)[-1] += injector.number("a gradient")
        injector.reach("before the step")
        optimizer.step()
        optimizer.zero_grad()
        journal.note(step=step, digest=digest_of(model), abstained=optimizer.wire.abstentions)
        injector.reach("after the step")
        if job.save_every and step % job.save_every == 0:
            save(optimizer, model, folder, step)
    injector.reach("at the end")
