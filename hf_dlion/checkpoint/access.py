"""The optimizer that a loop passes, and what a checkpoint or a log asks of its ranks.

Whatever this folder and the integrations need of a DistributedLion beyond its public face is asked
for here and nowhere else.
"""

from __future__ import annotations

from typing import Any

import torch

from hf_dlion.momentum.part_states import stretch_of
from hf_dlion.optimizer import DistributedLion
from hf_dlion.options.groups import flat_params
from hf_dlion.options.parts import is_sharded


def lion_in(optimizer: object) -> DistributedLion | None:
    """Returns the DistributedLion inside Accelerate's wrapper, or None if it is another one."""
    while not isinstance(optimizer, DistributedLion):
        optimizer = getattr(optimizer, "optimizer", None)
        if optimizer is None:
            return None
    return optimizer


def unwrap(optimizer: object) -> DistributedLion:
    """Returns the DistributedLion inside what `accelerator.prepare()` or a Trainer holds.

    Accelerate's wrapper has torch's methods only: `hf_dlion.unwrap(optimizer).wire` counts bytes.

    Args:
        optimizer: A DistributedLion, or a wrapper with an attribute `optimizer` around one.

    Raises:
        TypeError: If it is another optimizer.
    """
    lion = lion_in(optimizer)
    if lion is None:
        raise TypeError(f"optimizer must be a DistributedLion, got {type(optimizer).__name__}")
    return lion


def gather_objects(lion: DistributedLion, value: Any) -> list[Any]:
    """Returns every rank's `value`, a small plain object, in rank order; all ranks must call it."""
    return lion._bound.gather_objects(value)


def gather_numbers(lion: DistributedLion, value: float) -> list[float]:
    """Returns every rank's number, in rank order; all ranks must call it.

    Bytes per rank: 8 * (N - 1).
    """
    wire = lion._bound.wire_if_several()
    if wire is None:
        return [value]
    bits = torch.tensor([value], dtype=torch.float64, device="cpu").view(torch.int64)
    numbers: list[float] = wire.gather_words(bits, "a number").view(torch.float64).view(-1).tolist()
    return numbers


def meet_to_save(lion: DistributedLion, failure: Exception | None) -> None:
    """Has all ranks meet in the course of a save, in one header; all ranks must call it.

    Args:
        lion: Whose ranks meet.
        failure: What went wrong on this rank.

    Raises:
        Disagreement: On every rank, if something failed on one, or one takes a step meanwhile.
    """
    lion._bound.meet_to_save(failure)


def nodes_of(lion: DistributedLion) -> list[list[int]]:
    """Returns the ranks of each node, or nothing where every rank votes; all ranks must call it."""
    return [list(ranks) for ranks in lion._bound.voters().members]


def held_momenta(lion: DistributedLion) -> dict[int, torch.Tensor]:
    """Returns what this rank holds of each momentum, by parameter index; a part is 1-D."""
    parts = part_ranges(lion)
    held = lion._bound.momenta().held()
    return {i: momentum.view(-1) if i in parts else momentum for i, momentum in held.items()}


def part_ranges(lion: DistributedLion) -> dict[int, list[int]]:
    """Returns start and stop of this rank's part of each sharded parameter, by index."""
    params = flat_params(lion.param_groups)
    return {i: list(stretch_of(param)) for i, param in enumerate(params) if is_sharded(param)}


def shares_of(lion: DistributedLion) -> dict[str, Any]:
    """Returns who shares a momentum with this rank, and which stretches of momenta it holds.

    Raises:
        RuntimeError: If parameters are sharded, and the ranks have not found each other since the
            momenta were loaded: no file could say whose they are.
    """
    ranks, held = lion._bound.ranks, held_momenta(lion)
    if ranks.sharded:
        members = [list(own) for own in ranks.members]
        if held and not members and lion.world_size > 1:
            raise RuntimeError(
                "save_momentum() before the first step of sharded parameters whose momenta torch "
                "loaded: take a step first, or keep what they were loaded from"
            )
        ranges = {i: stretch for i, stretch in part_ranges(lion).items() if i in held}
        return {"members": members, "ranges": ranges}
    entry: dict[str, Any] = lion.state_dict()["dlion"].get("shard", {"members": [], "ranges": {}})
    return entry


def search_ddp(lion: DistributedLion) -> None:
    """Has the optimizer attach to every DDP wrapper of its parameters, now and later."""
    lion._engine.hooks.search()


def claim_gradients(lion: DistributedLion) -> None:
    """Keeps DDP from averaging the optimizer's gradients, also after a `detach()`."""
    lion._engine.hooks.claim()
