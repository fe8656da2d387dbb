"""The state dict's entry "dlion", carried in the groups for torch's distributed checkpoints.

`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` keeps "state" and "param_groups"
of an optimizer's state dict and drops the rest: the step number, the seed, whose momentum it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hf_dlion.options.warn_once import warn_once


def with_entry_in_groups(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the state dict with a copy of its entry "dlion" in each group.

    Not where the momentum is this rank's share of a node's: torch would keep one rank's for all.
    """
    own = state_dict["dlion"]
    if "shard" in own:
        return state_dict
    groups = [{**group, "dlion": dict(own)} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def with_entry_from_groups(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state dict with its entry "dlion" in its place and in no group.

    Warns, once per process, if the entry was in the groups alone and the momentum is not that of
    all ranks: torch's distributed checkpoints hold each tensor once, from any of the ranks.
    """
    found = dict(state_dict)
    groups = found.get("param_groups")
    if not isinstance(groups, Sequence) or not all(isinstance(group, Mapping) for group in groups):
        return found  # Refused by name by whoever checks it.
    entries = [group["dlion"] for group in groups if "dlion" in group]
    found["param_groups"] = [
        {key: value for key, value in group.items() if key != "dlion"} for group in groups
    ]
    if "dlion" in found or not entries or not isinstance(entries[0], Mapping):
        return found
    found["dlion"] = own = dict(entries[0])
    state, world_size = found.get("state"), own.get("world_size")
    # What they hold is checked later; an array or a tensor is neither true nor false.
    several = isinstance(world_size, int) and world_size != 1
    if several and isinstance(state, Mapping) and state and own.get("rank") is not None:
        own["rank"] = None
        warn_once(
            "momentum collected",
            "the optimizer's state came through get_optimizer_state_dict, and "
            "torch.distributed.checkpoint keeps of each momentum that of one rank, for all: call "
            "optimizer.synchronize_momentum() on every rank before get_optimizer_state_dict",
        )
    return found
