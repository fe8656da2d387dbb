"""torch's parameter groups: who is where, and what every rank must agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dlion.options.options import Options

Groups = Sequence[Mapping[str, Any]]


def flat_params(groups: Groups) -> list[Tensor]:
    """Returns the parameters of the flattened groups: position is parameter index."""
    return [param for group in groups for param in group["params"]]


def trainable(groups: Groups) -> list[tuple[int, Tensor]]:
    """Returns index and parameter of those that require a gradient: they make the layout."""
    return [(index, p) for index, p in enumerate(flat_params(groups)) if p.requires_grad]


def names_of(groups: Groups) -> list[str]:
    """Returns a name for every parameter of the flattened groups."""
    names: list[str] = []
    for group in groups:
        numbered = [f"parameter {len(names) + k}" for k in range(len(group["params"]))]
        names.extend(group.get("param_names", numbered))
    return names


def group_values(groups: Groups) -> list[dict[str, Any]]:
    """Returns each group's hyperparameters as plain numbers."""
    return [
        {
            "lr": float(group["lr"]),
            "betas": tuple(map(float, group["betas"])),
            "weight_decay": float(group["weight_decay"]),
            "exchange": group.get("exchange", "vote"),
        }
        for group in groups
    ]


def agreed_values(groups: Groups) -> list[dict[str, Any]]:
    """Returns what all ranks must agree on of each group: who has which hyperparameters."""
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


def _plain(value: object) -> object:
    if callable(value):
        return "a function"  # What it selects is part of the layout.
    return str(value) if isinstance(value, torch.dtype) else value
