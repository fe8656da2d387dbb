"""torch's parameter groups: what they may hold, who is where, what all ranks must agree on."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from hf_dlion.options.options import ExchangeName, Options, check_choice

Groups = Sequence[Mapping[str, Any]]
GroupExchange = Literal["vote", "full"]

# What groups written for another optimizer may hold. Keys of a user's own, or a scheduler's, pass.
FOREIGN = (
    *("maximize", "differentiable", "capturable", "foreach", "fused"),
    *("amsgrad", "eps", "momentum", "dampening", "nesterov", "decoupled_weight_decay"),
    *("beta1", "beta2", "learning_rate"),
)


def check_group(group: Mapping[str, Any]) -> None:
    """Checks the hyperparameters of one parameter group.

    Args:
        group: A parameter group with "lr" (float or 0-D tensor), "betas" and "weight_decay", and
            perhaps "exchange".

    Raises:
        TypeError: If one of them is not a number, or betas is not a pair.
        ValueError: If one of them is out of its range, or the group holds what would be ignored:
            an option of the whole optimizer, or one that only other optimizers have.
    """
    names = [field.name for field in dataclasses.fields(Options)]
    for name in (*names, "process_group", "replicate"):
        # A group's own "exchange" is another thing: whether it votes.
        if name in group and (name != "exchange" or _is_choice(group[name], ExchangeName)):
            raise ValueError(
                f"{name}={group[name]!r} in a parameter group would have no effect: it holds for "
                f"all groups, so give it to DistributedLion itself"
            )
    for name in FOREIGN:
        # Off is what DistributedLion does; torch itself puts differentiable=False into groups.
        if group.get(name):
            raise ValueError(
                f"{name}={group[name]!r} in a parameter group would have no effect: "
                f"DistributedLion has no such option; a group may have its own lr, betas and "
                f"weight_decay"
            )
    _check_number("lr", group["lr"])
    _check_number("weight_decay", group["weight_decay"])
    check_choice("exchange", group.get("exchange", "vote"), get_args(GroupExchange))
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas={betas!r} must be a pair of numbers, for example (0.9, 0.99)")
    for position, beta in enumerate(betas):
        _check_number(f"betas[{position}]", beta)
        if float(beta) >= 1.0:
            raise ValueError(f"betas[{position}]={beta} must be at least 0 and below 1")


def _is_choice(value: object, choices: object) -> bool:
    return isinstance(value, str) and value in get_args(choices)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_meta:
            where = f"{tuple(value.shape)} on {value.device}"
            raise TypeError(f"{name} must hold one number, got a tensor of {where}")
        value = value.item()
    # Real, because schedules written with NumPy make its floats.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name}={value!r} must be a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:  # An integer or a fraction beyond the largest float.
        number = math.inf
    if not (math.isfinite(number) and number >= 0.0):
        shown = value if math.isfinite(number) else number
        raise ValueError(f"{name}={shown} must be a finite number, 0 or greater")


def flat_params(groups: Groups) -> list[Tensor]:
    """Returns the parameters of all groups in a row; the position is the parameter's index."""
    return [param for group in groups for param in group["params"]]


def trainable(groups: Groups) -> list[tuple[int, Tensor]]:
    """Returns index and parameter of those that require a gradient, which messages are made of."""
    return [(index, p) for index, p in enumerate(flat_params(groups)) if p.requires_grad]


def names_of(groups: Groups) -> list[str]:
    """Returns the name of every parameter, or its number where its group does not name them all."""
    names: list[str] = []
    for group in groups:
        numbered = [f"parameter {len(names) + k}" for k in range(len(group["params"]))]
        given = [_plain(name) for name in group.get("param_names", ()) if isinstance(name, str)]
        names.extend(given if len(given) == len(numbered) else numbered)
    return names


def group_values(groups: Groups) -> list[dict[str, Any]]:
    """Returns each group's hyperparameters as plain numbers."""
    return [
        {
            "lr": float(group["lr"]),
            "betas": tuple(map(float, group["betas"])),
            "weight_decay": float(group["weight_decay"]),
            "exchange": _plain(group.get("exchange", "vote")),
        }
        for group in groups
    ]


def agreed_values(groups: Groups) -> list[dict[str, Any]]:
    """Returns each group's hyperparameters and size, on which all ranks must agree."""
    return [
        {**values, "parameters": len(group["params"])}
        for group, values in zip(groups, group_values(groups), strict=True)
    ]


def option_values(options: Options) -> dict[str, Any]:
    """Returns the options as plain values."""
    return {
        field.name: _plain(value)
        for field in dataclasses.fields(options)
        for value in [getattr(options, field.name)]
    }


def _plain(value: Any) -> Any:
    """Returns a value as ranks compare, send and show it: of a type of Python's own."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__int__(value)
    if isinstance(value, torch.dtype):
        return str(value)
    return "a function" if callable(value) else value  # What it selects is part of the layout.
