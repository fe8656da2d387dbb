"""An optimizer's state dict: what it holds, how it is checked and restored, how torch carries it.

Besides torch's "state" and "param_groups" it has an entry "dlion":

    version, steps, seed, checkpoint   the state's version, the last step, and two options
    rank, world_size                   whose momentum it is: rank None stands for all of them
    divergence                         with momentum_sync="auto", how far momenta differ
    shard                              with local_group, which stretch of each momentum this is
    part                               where parameters are sharded, which part, and of how many

`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict` keeps "state" and "param_groups"
and drops the rest. So each group has a copy of the entry, which is put back when a state is loaded.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_dlion.momentum.part_states import momentum_of_part, part_entry
from hf_dlion.options import check_group
from hf_dlion.options.naming import bare
from hf_dlion.options.params import holds_numbers
from hf_dlion.options.parts import is_sharded, local_of
from hf_dlion.options.warn_once import warn_once

Own = Mapping[str, Any]
Groups = Sequence[Mapping[str, Any]]

# The key of the warning that each momentum came from one rank.
COLLECTED = "momentum collected"


def with_entry_in_groups(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Returns the state dict with a copy of its entry "dlion" in each group.

    Not where the momentum is this rank's share of a node's: torch would keep one rank's for all.
    """
    own = state_dict["dlion"]
    if "shard" in own:
        return state_dict
    # What torch's distributed checkpoints hold of a sharded momentum is the whole of it.
    common = {name: value for name, value in own.items() if name != "part"}
    groups = [{**group, "dlion": dict(common)} for group in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


@contextlib.contextmanager
def checked_loading(
    optimizer: Optimizer, version: int, restore: Callable[[Mapping[str, Any], Own | None], None]
) -> Iterator[None]:
    """Makes torch's `load_state_dict`, called inside, check a state dict and restore from it.

    As hooks, so what the user's own hooks return is checked and restored.

    Args:
        optimizer: The one that loads.
        version: Of the states that it reads.
        restore: Called after torch's part with the state dict and its entry "dlion", which is None
            for an empty state without one.

    Raises:
        ValueError: If the state dict does not fit; nothing is changed then.
    """
    found: dict[str, Any] = {}

    def check(_: Optimizer, hooked: dict[str, Any]) -> dict[str, Any]:
        placed = _with_entry_from_groups(hooked)
        own = _check_state(placed, optimizer.param_groups, version)
        found.update(state_dict=placed, own=own)
        return placed

    def take(_: Optimizer) -> None:
        restore(found["state_dict"], found["own"])

    before = optimizer.register_load_state_dict_pre_hook(check)
    after = optimizer.register_load_state_dict_post_hook(take, prepend=True)
    try:
        yield
    finally:
        before.remove()
        after.remove()


def restore_momentum(
    optimizer: Optimizer, state_dict: Mapping[str, Any], dtype: torch.dtype | None
) -> None:
    """Sets every momentum anew from the state dict: torch casts it to the parameter's dtype.

    Args:
        optimizer: Has just loaded `state_dict`.
        state_dict: Checked.
        dtype: The momentum's dtype, None for each parameter's own.
    """
    for key, param in _keyed(state_dict["param_groups"], optimizer.param_groups):
        saved = state_dict["state"].get(key)
        if saved is not None:
            momentum = saved["exp_avg"]
            if is_sharded(param) and not is_sharded(momentum):
                momentum = momentum_of_part(param, momentum)
            optimizer.state[param]["exp_avg"] = momentum.to(
                device=param.device,
                dtype=dtype or param.dtype,
                copy=True,
                memory_format=torch.contiguous_format,
            )


def _keyed(saved: Groups, groups: Groups) -> list[tuple[Any, Tensor]]:
    """Returns the state dict's key of each parameter, and the parameter."""
    keys = [key for group in saved for key in group["params"]]
    return list(zip(keys, (p for group in groups for p in group["params"]), strict=True))


def _check_state(state_dict: Mapping[str, Any], param_groups: Groups, version: int) -> Own | None:
    """Checks that a state dict fits, before anything is changed.

    Returns:
        Its entry "dlion", or None if it has no state and no such entry.

    Raises:
        ValueError: If it does not fit; the message says where.
    """
    missing = {"state", "param_groups"} - set(state_dict)
    if missing:
        raise ValueError(f"not an optimizer's state dict: {sorted(missing)} missing")
    saved_state, own = state_dict["state"], state_dict.get("dlion")
    if not isinstance(saved_state, Mapping):
        raise ValueError(f"the state dict's 'state' is no dict but {type(saved_state).__name__}")
    if own is None and saved_state:
        raise ValueError(
            "the state dict is not DistributedLion's (it has no entry 'dlion'): start with a new "
            "optimizer, Lion's momentum cannot be taken from another one's state (if it comes from "
            "get_optimizer_state_dict: flatten_optimizer_state_dict=True loses the entry, and so "
            "does local_group unless synchronize_momentum() was called just before)"
        )
    if own is not None:
        _check_own(own, version)
    # Before anything is looked up by the keys in them.
    _check_groups(state_dict["param_groups"], param_groups)
    pairs = _keyed(state_dict["param_groups"], param_groups)
    _check_part((own or {}).get("part"), [param for _, param in pairs])
    ranges = _ranges_in(own or {}, len(pairs))
    _check_divergence((own or {}).get("divergence"), len(pairs))
    for position, (key, param) in enumerate(pairs):
        # One that has not been stepped has no momentum; of a stretch the entry says that it has.
        if key in saved_state or position in ranges:
            _check_momentum(saved_state.get(key), param, position, ranges.get(position))
    keys = [key for key, _ in pairs]
    unknown = [key for key in saved_state if key not in keys]
    if unknown:
        raise ValueError(f"the state has entries of no parameter group: {unknown[:5]}")
    return own


def _check_own(own: object, version: int) -> None:
    if not isinstance(own, Mapping) or not {"version", "steps", "seed"} <= set(own):
        raise ValueError("the state dict's entry 'dlion' lacks version, steps or seed")
    if type(own["version"]) is not int or own["version"] != version:
        raise ValueError(
            f"the state has version {own['version']}, this hf_dlion reads version {version}: "
            f"install a newer one"
        )
    for name, limit in (("steps", 2**63), ("seed", 2**64)):
        value = own[name]
        if type(value) is not int or not 0 <= value < limit:
            raise ValueError(
                f"the state's {name}={value!r} must be an integer from 0 to {limit - 1}"
            )
    rank, world_size = own.get("rank"), own.get("world_size", 1)
    if type(world_size) is not int or not (rank is None or type(rank) is int):
        raise ValueError(f"the state's rank={rank!r} of {world_size!r} must be integers")


def _check_groups(saved: Any, groups: Groups) -> None:
    if not isinstance(saved, Sequence) or not all(isinstance(group, Mapping) for group in saved):
        raise ValueError("the state dict's 'param_groups' are no list of dicts")
    if len(saved) != len(groups):
        raise ValueError(
            f"the state has {len(saved)} parameter groups, the optimizer {len(groups)}"
        )
    keys: list[object] = []
    for position, (theirs, ours) in enumerate(zip(saved, groups, strict=True)):
        missing = {"params", "lr", "betas", "weight_decay"} - set(theirs)
        if missing:
            raise ValueError(f"group {position} of the state lacks {', '.join(sorted(missing))}")
        count = len(ours["params"])
        for name in theirs.keys() & {"params", "param_names"}:
            held = theirs[name]
            listed = isinstance(held, (list, tuple))
            if not listed or len(held) != count:
                raise ValueError(
                    f"group {position} of the state has {len(held) if listed else repr(held)} "
                    f"{name}, the optimizer's has {count} parameters"
                )
        keys.extend(theirs["params"])
        _check_names(theirs, ours, position)
        try:
            check_group(theirs)
        except (TypeError, ValueError) as error:
            raise ValueError(f"group {position} of the state: {error}") from error
    # torch numbers them, its distributed checkpoints name them; a list could not be looked up.
    if any(type(key) not in (int, str) for key in keys) or len(set(keys)) < len(keys):
        raise ValueError(
            f"the state's groups must number or name their parameters, each once: {keys[:8]}"
        )


def _check_names(saved: Mapping[str, Any], ours: Mapping[str, Any], position: int) -> None:
    pairs = zip(saved.get("param_names", ()), ours.get("param_names", ()), strict=False)
    for index, (theirs, own) in enumerate(pairs):
        if not isinstance(theirs, str) or bare(theirs) != bare(own):
            raise ValueError(
                f"parameter {index} of group {position} is {theirs!r} in the state and {own!r} in "
                f"the optimizer: is it the same model? (to load it all the same, because "
                f"parameters were renamed, delete 'param_names' from the state's groups)"
            )


def _ranges_in(own: Own, count: int) -> dict[int, tuple[int, int]]:
    """Returns start and stop of the momenta that are stretches, by position."""
    shard = own.get("shard")
    if shard is None:
        return {}
    if not isinstance(shard, Mapping):
        raise ValueError(f"the state dict's entry 'shard' is no dict but {type(shard).__name__}")
    try:
        ranges = {index: (start, stop) for index, (start, stop) in shard["ranges"].items()}
        members = [list(ranks) for ranks in shard["members"]]
        numbers = [*ranges, *chain(*ranges.values()), *chain(*members)]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"the state dict's entry 'shard' is damaged: {error!r}") from error
    if any(type(number) is not int for number in numbers):
        raise ValueError("the state dict's entry 'shard' is damaged: it holds what is no integer")
    if not members or not set(ranges) <= set(range(count)):
        raise ValueError("the state dict's entry 'shard' is of other parameters")
    return ranges


def _check_part(saved: object, params: Sequence[Tensor]) -> None:
    """Checks that a state whose momenta are parts holds those of this rank."""
    held = part_entry(params)
    if saved is None or saved == held:
        return
    if not isinstance(saved, (list, tuple)) or len(saved) != 2:
        raise ValueError("the state dict's entry 'part' is damaged")
    if held is not None:
        raise ValueError(
            f"the state holds the momenta of part {saved[0]} of {saved[1]}, and this rank holds "
            f"part {held[0]} of {held[1]}: load on each rank the state that it saved itself, or "
            f"save with torch.distributed.checkpoint or hf_dlion.save_momentum"
        )


def _check_divergence(entry: object, count: int) -> None:
    """Checks the divergences of `count` parameters; None stands for none."""
    if entry is None:
        return
    if (
        not isinstance(entry, (list, tuple))
        or len(entry) != count
        or not all(isinstance(value, float) and math.isfinite(value) for value in entry)
    ):
        raise ValueError("the state dict's entry 'divergence' is damaged, or of other parameters")


def _check_momentum(
    saved: object, param: Tensor, position: int, held: tuple[int, int] | None
) -> None:
    momentum = saved.get("exp_avg") if isinstance(saved, Mapping) else None
    if not isinstance(momentum, Tensor):
        raise ValueError(f"the state of parameter {position} has no tensor 'exp_avg'")
    if not holds_numbers(momentum):
        raise ValueError(
            f"the momentum of parameter {position} is {momentum.dtype}, {momentum.layout}, on "
            f"{momentum.device}: it must hold dense floating numbers"
        )
    if held is not None and is_sharded(param):
        raise ValueError(
            f"the state holds a stretch of the momentum of parameter {position}, as ranks with "
            f"local_group save it, and the parameter is sharded: load it from "
            f"hf_dlion.save_momentum, or call synchronize_momentum() before saving"
        )
    if held is not None:
        start, stop = held
        if not 0 <= start <= stop <= param.numel() or momentum.shape != (stop - start,):
            raise ValueError(
                f"the momentum of parameter {position} has shape {tuple(momentum.shape)} and "
                f"is said to be elements {start} to {stop} of {param.numel()}: is it the same "
                f"model?"
            )
        return
    if is_sharded(momentum) and not is_sharded(param):
        raise ValueError(
            f"the momentum of parameter {position} is sharded, the parameter is not: load it with "
            f"torch.distributed.checkpoint, or from hf_dlion.save_momentum"
        )
    own = local_of(param).shape
    if is_sharded(momentum) and local_of(momentum).shape != own:
        raise ValueError(
            f"the momentum of parameter {position} has a part of shape "
            f"{tuple(local_of(momentum).shape)} here, the parameter one of shape {tuple(own)}: "
            f"load it with torch.distributed.checkpoint, or from hf_dlion.save_momentum"
        )
    if momentum.shape != param.shape:
        raise ValueError(
            f"the momentum of parameter {position} has shape {tuple(momentum.shape)}, the "
            f"parameter {tuple(param.shape)}: is it the same model?"
        )


def _with_entry_from_groups(state_dict: Mapping[str, Any]) -> dict[str, Any]:
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
            COLLECTED,
            "the optimizer's state came through get_optimizer_state_dict, and "
            "torch.distributed.checkpoint keeps of each momentum that of one rank, for all: call "
            "optimizer.synchronize_momentum() on every rank before get_optimizer_state_dict",
        )
    return found
