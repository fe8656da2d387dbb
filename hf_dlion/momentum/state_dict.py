"""Checks of parameters and of state dicts, and the momentum's dtype across loading."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from hf_dlion.options import check_group
from hf_dlion.options.naming import bare

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_trainable(param: Tensor) -> None:
    """Checks that a parameter is one that DistributedLion can move.

    Raises:
        TypeError: If its dtype is not floating, or it is not dense.
        NotImplementedError: If it is sharded.
    """
    sharded = {
        "FSDP, fully_shard or tensor parallel": type(param).__name__ == "DTensor",
        "FSDP": getattr(param, "_is_flat_param", False) or hasattr(param, "_fsdp_flattened"),
        "DeepSpeed ZeRO-3": hasattr(param, "ds_id"),
    }
    for what, found in sharded.items():
        if found:
            raise NotImplementedError(
                f"DistributedLion does not support sharded parameters ({what}): every rank must "
                f"hold whole parameters; use DistributedDataParallel (accelerate launch "
                f"--multi_gpu), or no wrapper at all"
            )
    if param.layout != torch.strided:
        raise TypeError(f"DistributedLion takes dense parameters, got layout {param.layout}")
    if param.dtype not in FLOATING:
        allowed = ", ".join(map(str, FLOATING))
        raise TypeError(
            f"DistributedLion takes parameters of {allowed}, got {param.dtype}; leave quantised "
            f"and complex ones out of the groups"
        )


def check_distinct(params: Sequence[Tensor]) -> None:
    """Checks that no parameter is there twice: it would vote, and move, twice in every step.

    Raises:
        ValueError: If one is; torch itself only warns.
    """
    seen: dict[int, int] = {}
    for position, param in enumerate(params):
        first = seen.setdefault(id(param), position)
        if first != position:
            raise ValueError(
                f"parameters {first} and {position} of the group are one and the same: pass each "
                f"once, as model.named_parameters() does with tied weights"
            )


def check_gradient(param: Tensor) -> None:
    """Checks that a parameter's gradient, if it has one, is dense and has values.

    Raises:
        TypeError: If it is sparse.
        RuntimeError: If it is on the meta device.
    """
    if param.grad is not None and param.grad.is_meta:
        raise RuntimeError(
            "DistributedLion got a gradient on the meta device, which holds no values: load the "
            "model's weights (or model.to_empty(...)) before the optimizer is made"
        )
    if param.grad is not None and param.grad.layout != torch.strided:
        raise TypeError(
            "DistributedLion takes no sparse gradients: build the embedding with sparse=False; "
            "rows without a gradient abstain anyway"
        )


def check_state(
    state_dict: Mapping[str, Any], param_groups: Sequence[Mapping[str, Any]], version: int
) -> dict[str, Any] | None:
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
    _check_groups(state_dict["param_groups"], param_groups)
    params = [param for group in param_groups for param in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    ranges = _ranges_in(own, len(params))
    _check_divergence((own or {}).get("divergence"), len(params))
    for position, (key, param) in enumerate(zip(keys, params, strict=True)):
        saved = saved_state.get(key)
        if saved is None and key not in saved_state and position not in ranges:
            continue
        momentum = saved.get("exp_avg") if isinstance(saved, Mapping) else None
        _check_momentum(momentum, param, position, ranges.get(position))
    unknown = [key for key in saved_state if key not in keys]
    if unknown:
        raise ValueError(f"the state has entries of no parameter group: {unknown[:5]}")
    return own


def _check_momentum(
    momentum: object, param: Tensor, position: int, held: tuple[int, int] | None
) -> None:
    if not isinstance(momentum, Tensor):
        raise ValueError(f"the state of parameter {position} has no tensor 'exp_avg'")
    if momentum.dtype not in FLOATING or momentum.layout != torch.strided or momentum.is_meta:
        raise ValueError(
            f"the momentum of parameter {position} is {momentum.dtype}, {momentum.layout}, on "
            f"{momentum.device}: it must hold dense floating numbers"
        )
    if held is not None:
        start, stop = held
        if not 0 <= start <= stop <= param.numel() or momentum.shape != (stop - start,):
            raise ValueError(
                f"the momentum of parameter {position} has shape {tuple(momentum.shape)} and "
                f"is said to be elements {start} to {stop} of {param.numel()}: is it the same "
                f"model?"
            )
    elif momentum.shape != param.shape:
        raise ValueError(
            f"the momentum of parameter {position} has shape {tuple(momentum.shape)}, the "
            f"parameter {tuple(param.shape)}: is it the same model?"
        )


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


def _ranges_in(own: Mapping[str, Any] | None, count: int) -> dict[int, tuple[int, int]]:
    """Returns start and stop of the momenta that are stretches, by position."""
    shard = None if own is None else own.get("shard")
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


def _check_divergence(entry: object, count: int) -> None:
    """Checks the divergences of a state dict, None standing for none.

    Args:
        entry: What the state dict holds.
        count: Number of parameters.

    Raises:
        ValueError: If it is damaged.
    """
    if entry is None:
        return
    if (
        not isinstance(entry, (list, tuple))
        or len(entry) != count
        or not all(isinstance(value, float) and math.isfinite(value) for value in entry)
    ):
        raise ValueError("the state dict's entry 'divergence' is damaged, or of other parameters")


def _check_groups(saved: Any, groups: Sequence[Mapping[str, Any]]) -> None:
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
        counts = {"params": len(ours["params"]), "param_names": len(ours["params"])}
        for name in counts.keys() & theirs.keys():
            held = theirs[name]
            if not isinstance(held, (list, tuple)) or len(held) != counts[name]:
                count = len(held) if isinstance(held, (list, tuple)) else repr(held)
                raise ValueError(
                    f"group {position} of the state has {count} {name}, the optimizer's has "
                    f"{counts[name]} parameters"
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


def restore_momentum(
    optimizer: Optimizer, state_dict: Mapping[str, Any], dtype: torch.dtype | None
) -> None:
    """Sets every momentum anew from the state dict: torch casts it to the parameter's dtype.

    Args:
        optimizer: Has just loaded `state_dict`.
        state_dict: Checked.
        dtype: The momentum's dtype, None for each parameter's own.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    for key, param in zip(keys, params, strict=True):
        saved = state_dict["state"].get(key)
        if saved is not None:
            optimizer.state[param]["exp_avg"] = saved["exp_avg"].to(
                device=param.device,
                dtype=dtype or param.dtype,
                copy=True,
                memory_format=torch.contiguous_format,
            )
