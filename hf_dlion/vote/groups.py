"""Functions on parameter groups: parameters, names, hyperparameters, and selections.

Their results aren't kept from step to step, because `load_state_dict` replaces the groups.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hf_dlion.options import SYNC_WORDS, Options, selected

Groups = Sequence[Mapping[str, Any]]
# Names of parameters that a model was seen to have.
Names = Mapping[Tensor, str]


def trainable(groups: Groups, moved: Collection[Tensor] = ()) -> list[tuple[int, Tensor]]:
    """Returns group number and parameter of those that aren't frozen, or are in `moved`."""
    return [
        (g, p)
        for g, group in enumerate(groups)
        for p in group["params"]
        if p.requires_grad or p in moved
    ]


def names_in(model: nn.Module) -> dict[Tensor, str]:
    """Returns the names of a model's parameters, without what `torch.compile` adds to them."""
    return {
        param: ".".join(part for part in name.split(".") if part != "_orig_mod")
        for name, param in model.named_parameters()
    }


def named(groups: Groups, names: Names) -> list[tuple[str, Tensor]]:
    """Returns names and all parameters, frozen ones included.

    A name that was passed in a group goes before the one in `names`. A parameter without a name is
    called "group 0 parameter 1".
    """
    return [
        (name or f"group {g} parameter {k}", p)
        for g, group in enumerate(groups)
        for k, (name, p) in enumerate(_with_names(group, names))
    ]


def are_named(groups: Groups, names: Names) -> list[bool]:
    """Returns which of all parameters have a name."""
    return [name is not None for group in groups for name, _ in _with_names(group, names)]


def selection(groups: Groups, names: Names, options: Options, option: str) -> list[bool]:
    """Returns which of all parameters an option selects.

    Raises:
        ValueError: If the option selects by name and no parameter has a name, or if a pattern
            matches no name.
    """
    value = getattr(options, option)
    is_word = option == "momentum_sync" and value in SYNC_WORDS
    if value is None or is_word:
        return [value is not None for group in groups for _ in group["params"]]
    if not any(are_named(groups, names)):
        raise ValueError(
            f"{option}={value!r} selects parameters by name, but the parameters have no names: use "
            f"DistributedLion(model.named_parameters()), or call optimizer.attach(model) before "
            f"the first step"
        )
    return selected(option, value, named(groups, names))


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


def _with_names(group: Mapping[str, Any], names: Names) -> list[tuple[str | None, Tensor]]:
    passed = group.get("param_names") or [None] * len(group["params"])
    pairs = zip(passed, group["params"], strict=True)
    return [(names.get(p) if name is None else name, p) for name, p in pairs]
