"""Options and parameter groups, which are checked when they are set."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

Aggregation = Literal["majority", "average"]
Ties = Literal["alternate", "zero"]
LevelScale = Literal["word", "tensor"]
Route = Literal["auto", "gather", "two_phase"]
Selector = Callable[[str, Tensor], bool]
Selection = str | Sequence[str] | Selector
# Parameter groups, which `load_state_dict` replaces.
Groups = Sequence[Mapping[str, Any]]

# Default betas of Lion.
BETAS = (0.9, 0.98)
# Default of bits in exchanges of local steps.
LOCAL_BITS = 4
MOMENTUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The value of momentum_sync that isn't a pattern of names.
ALL = "all"
# Options of other optimizers, which DistributedLion would ignore in a parameter group.
FOREIGN = (
    *("maximize", "differentiable", "capturable", "foreach", "fused"),
    *("amsgrad", "eps", "momentum", "dampening", "nesterov", "decoupled_weight_decay"),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that apply to all parameter groups. `DistributedLion` describes each of them.

    Raises:
        ValueError: If a value isn't allowed, or has no effect with the other options.
        TypeError: If a value has the wrong type.
    """

    # First, because the defaults of others depend on it, and an error names the first difference.
    vote_every: int = 1
    bits: int | None = None
    aggregation: Aggregation | None = None
    ties: Ties = "alternate"
    level_scale: LevelScale = "word"
    exchange: Route = "auto"
    local_group: Literal["node"] | int | None = None
    full_precision: Selection | None = None
    momentum_sync_every: int = 0
    momentum_sync: Selection = ALL
    momentum_dtype: torch.dtype | None = None
    seed: int = 0
    max_abstained_steps: int = 20
    check_replicas_every: int = 0

    def __post_init__(self) -> None:
        """Checks every value, so the error's traceback shows the line that set it."""
        _check_integer("vote_every", self.vote_every, 1, 2**31 - 1)
        local = self.vote_every > 1
        for name, value in (
            ("aggregation", "average" if local else "majority"),
            ("bits", LOCAL_BITS if local else 1),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        _check_choice("aggregation", self.aggregation, get_args(Aggregation))
        _check_choice("ties", self.ties, get_args(Ties))
        _check_choice("level_scale", self.level_scale, get_args(LevelScale))
        _check_choice("exchange", self.exchange, get_args(Route))
        if type(self.bits) is not int or self.bits not in (1, 2, 4, 8):
            raise ValueError(f"bits must be 1, 2, 4, or 8 (got {self.bits!r})")
        _check_integer("seed", self.seed, 0, 2**64 - 1)
        _check_integer("max_abstained_steps", self.max_abstained_steps, 1, 2**31 - 1)
        _check_integer("check_replicas_every", self.check_replicas_every, 0, 2**31 - 1)
        _check_integer("momentum_sync_every", self.momentum_sync_every, 0, 2**63 - 1)
        if isinstance(self.local_group, str):
            if self.local_group != "node":
                raise ValueError(f'local_group must be "node" or an int (got {self.local_group!r})')
        elif self.local_group is not None:
            _check_integer("local_group", self.local_group, 1, 2**31 - 1)
        # By identity, because == of an array isn't a bool.
        if not any(self.momentum_dtype is dtype for dtype in (None, *MOMENTUM_DTYPES)):
            kind = ValueError if isinstance(self.momentum_dtype, torch.dtype) else TypeError
            names = ", ".join(map(str, MOMENTUM_DTYPES))
            raise kind(
                f"momentum_dtype must be None or one of {names} (got {self.momentum_dtype!r})"
            )
        _check_selection("momentum_sync", self.momentum_sync)
        if self.full_precision is not None:
            _check_selection("full_precision", self.full_precision)
        self._check_together()

    def _check_together(self) -> None:
        """Refuses values that don't work together, or have no effect."""
        local, bits = self.vote_every > 1, self.bits or 1
        if local and self.aggregation == "majority":
            raise ValueError(
                f"vote_every={self.vote_every} needs aggregation='average' (got 'majority'): leave "
                f"out aggregation, or use vote_every=1"
            )
        if bits > 1 and self.aggregation == "average" and not local:
            raise ValueError(
                f"aggregation='average' is the mean of votes of one bit (got bits={self.bits}); "
                f"use bits=1, or aggregation='majority'"
            )
        needs = {
            "ties": (self.aggregation == "majority", "aggregation='majority'"),
            "level_scale": (bits > 1 and not local, "bits=2, 4, or 8 and vote_every=1"),
            "momentum_sync": (self.momentum_sync_every > 0, "momentum_sync_every=n"),
        }
        for name, (effective, need) in needs.items():
            value = getattr(self, name)
            if not effective and value != getattr(type(self), name):
                raise ValueError(f"{name}={value!r} would have no effect: it needs {need}")


def check_group(group: Mapping[str, Any]) -> None:
    """Checks the hyperparameters of one parameter group.

    Raises:
        TypeError: If lr, weight_decay or a beta isn't a number, or betas isn't a pair.
        ValueError: If a value is out of its range, or an option in the group would be ignored.
    """
    options = [field.name for field in dataclasses.fields(Options)]
    for name in (*options, "process_group", "replicate"):
        if name in group:
            raise ValueError(
                f"{name}={group[name]!r} in a parameter group would have no effect: it applies to "
                f"all groups, so pass it to DistributedLion itself"
            )
    for name in FOREIGN:
        # False is allowed, because torch itself puts differentiable=False into groups.
        if group.get(name):
            raise ValueError(
                f"{name}={group[name]!r} in a parameter group has no effect: DistributedLion "
                f"has no such option; a group may have its own lr, betas, and weight_decay"
            )
    _check_hyperparameters(group)


def _check_hyperparameters(group: Mapping[str, Any]) -> None:
    check_number("lr", group["lr"])
    check_number("weight_decay", group["weight_decay"])
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas must be a pair of numbers such as (0.9, 0.98) (got {betas!r})")
    for position, beta in enumerate(betas):
        check_number(f"betas[{position}]", beta)
        if float(beta) >= 1.0:
            raise ValueError(f"betas[{position}] must be at least 0 and below 1 (got {beta})")


def check_number(name: str, value: object) -> None:
    """Checks that a value is a finite number of at least 0.

    Args:
        name: Name of the value, for error messages.
        value: A number, or a tensor of one number.

    Raises:
        TypeError: If the value isn't a number.
        ValueError: If the value is negative, infinite or NaN.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_meta:
            raise TypeError(f"{name} must be one number (got a tensor of {tuple(value.shape)})")
        value = value.item()
    # Real also includes NumPy's floats, which some schedules return.
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(f"{name} must be a number (got {value!r}, a {type(value).__name__})")
    if not math.isfinite(float(value)) or float(value) < 0:
        raise ValueError(f"{name} must be finite and at least 0 (got {value})")


def hyperparameters(groups: Groups) -> dict[str, object]:
    """Returns the hyperparameters of all groups by name, which must be equal on all ranks.

    Raises:
        TypeError, ValueError: If one isn't allowed, as a schedule may set it.
    """
    found: dict[str, object] = {}
    for number, group in enumerate(groups):
        try:
            _check_hyperparameters(group)
        except (TypeError, ValueError) as error:
            what = f"group {number}: {error}. Check the schedule that sets it"
            raise type(error)(what) from error
        # First, because an error names the first difference.
        found[f"group {number} parameters"] = len(group["params"])
        found[f"group {number} lr"] = float(group["lr"])
        found[f"group {number} betas"] = list(map(float, group["betas"]))
        found[f"group {number} weight_decay"] = float(group["weight_decay"])
    return found


def numbered(groups: Groups) -> list[Tensor]:
    """Returns the parameters in the order in which torch's `state_dict()` numbers them.

    For the groups of a state dict, it returns the keys of its states.
    """
    return [param for group in groups for param in group["params"]]


def patterns(selection: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the patterns of a selection by name."""
    return tuple(selection.split(";") if isinstance(selection, str) else selection)


def _check_selection(option: str, selection: object) -> None:
    if callable(selection) and not isinstance(selection, type):
        return
    if not isinstance(selection, (str, list, tuple)) or not all(
        isinstance(pattern, str) for pattern in selection
    ):
        raise TypeError(
            f"{option} must be a pattern of parameter names such as '*norm*', a sequence of them, "
            f"or a function of name and parameter (got {selection!r})"
        )
    if not selection or not all(patterns(selection)):
        raise ValueError(f"{option} must not have an empty pattern (got {selection!r})")


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    choices = ", ".join(map(repr, allowed))
    if not isinstance(value, str):
        raise TypeError(f"{name} must be one of {choices} (got {value!r})")
    if value not in allowed:
        raise ValueError(f"{name} must be one of {choices} (got {value!r})")


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer (got {value!r})")
    if not low <= value <= high:
        raise ValueError(f"{name} must be between {low} and {high} (got {value})")
