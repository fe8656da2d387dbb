"""Reading torch's parameter groups: who is where, and what every rank must agree on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hf_dlion.codec.rule import StepRule, TensorRule
from hf_dlion.options import Options
from hf_dlion.options.treatment import Treatment
from hf_dlion.ranks.fingerprint import fingerprints
from hf_dlion.ranks.header import Details, told

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


def layout_lines(groups: Groups, treatment: Treatment) -> list[str]:
    """Returns a line with name, shape and dtype for every trainable parameter."""
    names = names_of(groups)
    # Without the number of the device, which differs between ranks that agree.
    return [
        f"{names[index]}: {tuple(p.shape)} {p.dtype} on {p.device.type}{treatment.told(index)}"
        for index, p in trainable(groups)
    ]


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


def tensor_rules(groups: Groups, indices: set[int], step_rule: StepRule) -> dict[int, TensorRule]:
    """Returns the constants of one step for the parameters `indices`, by index."""
    rules: dict[int, TensorRule] = {}
    index = 0
    for group, values in zip(groups, group_values(groups), strict=True):
        del values["exchange"]
        for _ in group["params"]:
            if index in indices:
                rules[index] = TensorRule(step_rule=step_rule, index=index, **values)
            index += 1
    return rules


def details_of(
    groups: Groups,
    options: Options,
    failure: Exception | None,
    treatment: Treatment | None = None,
    beside: Sequence[dict[str, Any]] = (),
) -> Details:
    """Returns what a rank can say of itself should the ranks disagree.

    Args:
        groups: The parameter groups.
        options: The options.
        failure: What failed on this rank, or None.
        treatment: What is exchanged of each parameter besides votes.
        beside: What ranks have in common like the values of their groups.
    """

    def parameters() -> list[tuple[str, int]]:
        names, held = names_of(groups), trainable(groups)
        hashes = fingerprints([param for _, param in held])
        return [(names[index], value) for (index, _), value in zip(held, hashes, strict=True)]

    return Details(
        layout=lambda: layout_lines(groups, treatment or Treatment()),
        options=lambda: option_values(options),
        groups=lambda: [*agreed_values(groups), *beside],
        parameters=parameters,
        failure=lambda: None if failure is None else told(failure),
    )
