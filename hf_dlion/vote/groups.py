"""Functions on parameter groups: parameters, names, hyperparameters, and selections.

Their results aren't kept from step to step, because `load_state_dict` replaces the groups.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from hf_dlion.options import SYNC_WORDS, Options, selected

Groups = Sequence[Mapping[str, Any]]


def trainable(groups: Groups, moved: Collection[Tensor] = ()) -> list[tuple[int, Tensor]]:
    """Returns group number and parameter of those that aren't frozen, or are in `moved`."""
    return [
        (g, p)
        for g, group in enumerate(groups)
        for p in group["params"]
        if p.requires_grad or p in moved
    ]


def named(groups: Groups) -> list[tuple[str, Tensor]]:
    """Returns names and all parameters, frozen ones included.

    A parameter without a name is called "group 0 parameter 1".
    """
    return [
        (group["param_names"][k] if "param_names" in group else f"group {g} parameter {k}", p)
        for g, group in enumerate(groups)
        for k, p in enumerate(group["params"])
    ]


def selection(groups: Groups, options: Options, name: str) -> list[bool]:
    """Returns which of all parameters the option `name` selects.

    Raises:
        ValueError: If the option selects by name and the groups have no names, or if a pattern
            matches no name.
    """
    value = getattr(options, name)
    is_word = name == "momentum_sync" and value in SYNC_WORDS
    if value is None or is_word:
        return [value is not None for group in groups for _ in group["params"]]
    if any("param_names" not in group for group in groups):
        raise ValueError(
            f"{name}={value!r} selects parameters by name, but the parameters have no names: use "
            f"DistributedLion(model.named_parameters())"
        )
    return selected(name, value, named(groups))


def hyperparameters(groups: Groups) -> dict[str, object]:
    """Returns the hyperparameters of all groups by name, which must be equal on all ranks.

    Raises:
        ValueError: If a learning rate is negative, infinite, or NaN, as a schedule may set it.
    """
    found: dict[str, object] = {}
    for number, group in enumerate(groups):
        if not 0.0 <= float(group["lr"]) < math.inf:
            raise ValueError(
                f"lr of group {number} must be finite and at least 0 (got {group['lr']}): check "
                f"the learning rate's schedule"
            )
        found[f"group {number} lr"] = float(group["lr"])
        found[f"group {number} betas"] = list(map(float, group["betas"]))
        found[f"group {number} weight_decay"] = float(group["weight_decay"])
        found[f"group {number} parameters"] = len(group["params"])
    return found
