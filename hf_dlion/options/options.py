"""What a user may choose, checked when it is chosen."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from hf_dlion.options.selection import Selection, check_selection

Aggregation = Literal["majority", "average"]
Ties = Literal["alternate", "zero"]
ExchangeName = Literal["auto", "gather", "two_phase"]
CheckpointMode = Literal["per_rank", "mean"]
NodeName = Literal["node"]
OnDivergence = Literal["raise", "repair"]
LevelScale = Literal["word", "tensor"]
GroupExchange = Literal["vote", "full"]

# What groups written for another optimizer may hold. Keys of a user's own, or a scheduler's, pass.
FOREIGN = (
    *("maximize", "differentiable", "capturable", "foreach", "fused"),
    *("amsgrad", "eps", "momentum", "dampening", "nesterov", "decoupled_weight_decay"),
    *("beta1", "beta2", "learning_rate"),
)

BITS = (1, 2, 4, 8)
MOMENTUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SYNC_DTYPES = (torch.bfloat16, torch.float32)
# What momentum_sync may be besides a selection of parameters.
SYNC_WORDS = ("all", "auto")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `DistributedLion` that hold for every parameter group.

    Attributes:
        aggregation: What all ranks apply: "majority" (the sign of the sum of the votes) or
            "average" (the mean of the votes).
        ties: The verdict of a tied majority: "alternate" (+1 and -1 in turns, one bit on the way
            down) or "zero" (no move, two bits).
        bits: Of a vote, per parameter: 1 sends the sign; 2, 4 and 8 send the direction relative to
            the mean magnitude, on so many bits.
        level_scale: Whose mean magnitude that is: that of each "word" of 64 elements, or the
            "tensor"'s.
        exchange: How votes travel: "gather", "two_phase", or "auto" (the one with fewer bytes).
        overlap: Exchange votes during backward, as gradients become ready, or in the step.
        stochastic_rounding: Round parameters and momenta below float32 stochastically; False
            rounds to nearest.
        momentum_dtype: dtype of `exp_avg`; None keeps each parameter's own.
        seed: Seed of the stochastic rounding, the same on every rank.
        max_abstained_steps: After so many steps in a row in which one rank's gradients held a NaN
            or an Inf, all ranks raise.
        checkpoint: "per_rank" (every rank saves its momentum) or "mean" (ranks average their
            momenta before rank 0 saves).
        local_group: Ranks per node, which cast one vote together, or "node" for as many as the
            launcher started on each; None lets every rank vote.
        check_replicas_every: After every so many steps the ranks compare hashes of all their
            parameters; 0 never does.
        on_divergence: Should they differ: "raise" on every rank, or "repair" by broadcasting the
            majority's values.
        momentum_sync_every: In how many steps the ranks average the selected momenta once; 0
            never does.
        momentum_sync: Which: "all", "auto" (the most divergent ones, within a budget), patterns of
            parameter names, or a function of name and parameter.
        momentum_sync_dtype: How they travel: torch.bfloat16 or torch.float32.
        momentum_sync_budget: For "auto": the most bytes that a rank sends for it in a step; None
            stands for one bit per parameter.
        full_precision: Patterns of the names of parameters whose gradients are averaged instead of
            voted on, or a function of name and parameter; None selects none.
        warmup_full_steps: In so many steps at the start all parameters are.

    Raises:
        ValueError: If a value is not one of those allowed, or has no effect with the others.
        TypeError: If a value has the wrong type.
        NotImplementedError: If options do not go together yet.
    """

    aggregation: Aggregation = "majority"
    ties: Ties = "alternate"
    bits: int = 1
    level_scale: LevelScale = "word"
    exchange: ExchangeName = "auto"
    overlap: bool = False
    stochastic_rounding: bool = True
    momentum_dtype: torch.dtype | None = None
    seed: int = 0
    max_abstained_steps: int = 20
    checkpoint: CheckpointMode = "per_rank"
    local_group: NodeName | int | None = None
    check_replicas_every: int = 0
    on_divergence: OnDivergence = "raise"
    momentum_sync_every: int = 0
    momentum_sync: Selection = "all"
    momentum_sync_dtype: torch.dtype = torch.bfloat16
    momentum_sync_budget: int | None = None
    full_precision: Selection | None = None
    warmup_full_steps: int = 0

    def __post_init__(self) -> None:
        """Check every value, so that a bad one is refused where it was written."""
        _check_choice("aggregation", self.aggregation, get_args(Aggregation))
        _check_choice("ties", self.ties, get_args(Ties))
        _check_integer("bits", self.bits, low=1, high=8)
        if self.bits not in BITS:
            raise ValueError(f"bits={self.bits} is unknown; choose one of 1, 2, 4, 8")
        if self.bits > 1 and self.aggregation == "average":
            raise ValueError(
                f"aggregation='average' is the mean of votes of one bit, got bits={self.bits}; use "
                f"bits=1 or aggregation='majority', which takes the sign of the sum of the votes"
            )
        _check_choice("level_scale", self.level_scale, get_args(LevelScale))
        _check_choice("exchange", self.exchange, get_args(ExchangeName))
        _check_choice("checkpoint", self.checkpoint, get_args(CheckpointMode))
        for name in ("overlap", "stochastic_rounding"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(
                    f"{name}={value!r} must be True or False, got {type(value).__name__}"
                )
        # By identity: an array compares element by element.
        if not any(self.momentum_dtype is dtype for dtype in (None, *MOMENTUM_DTYPES)):
            kind = ValueError if isinstance(self.momentum_dtype, torch.dtype) else TypeError
            allowed = ", ".join(map(str, MOMENTUM_DTYPES))
            raise kind(f"momentum_dtype={self.momentum_dtype!r} must be None or one of {allowed}")
        _check_integer("seed", self.seed, low=0, high=2**64 - 1)
        _check_integer("max_abstained_steps", self.max_abstained_steps, low=1, high=2**31 - 1)
        _check_integer("check_replicas_every", self.check_replicas_every, low=0, high=2**31 - 1)
        _check_choice("on_divergence", self.on_divergence, get_args(OnDivergence))
        if isinstance(self.local_group, str):
            _check_choice("local_group", self.local_group, get_args(NodeName))
        elif self.local_group is not None:
            _check_integer("local_group", self.local_group, low=1, high=2**31 - 1)
        if self.overlap and self.local_group not in (None, 1):
            raise NotImplementedError(
                f"overlap=True does not go with local_group={self.local_group!r}: a node's "
                f"gradient is there only once DDP has averaged it, so little of backward is left "
                f"to hide votes behind; use local_group alone, or overlap=True alone"
            )
        if self.bits > 1 and self.level_scale == "tensor" and self.local_group not in (None, 1):
            raise NotImplementedError(
                f"level_scale='tensor' with local_group={self.local_group!r}: a node's ranks would "
                f"have to agree on every tensor's mean magnitude; use level_scale='word'"
            )
        self._check_full_precision()
        self._check_effect()

    def _check_full_precision(self) -> None:
        """Check what makes the step more exact than votes."""
        for name in ("momentum_sync_every", "warmup_full_steps"):
            _check_integer(name, getattr(self, name), low=0, high=2**63 - 1)
        if self.momentum_sync_budget is not None:
            _check_integer("momentum_sync_budget", self.momentum_sync_budget, low=0, high=2**63 - 1)
        check_selection("momentum_sync", self.momentum_sync)
        if self.full_precision is not None:
            check_selection("full_precision", self.full_precision)
        if not any(self.momentum_sync_dtype is dtype for dtype in SYNC_DTYPES):
            kind = ValueError if isinstance(self.momentum_sync_dtype, torch.dtype) else TypeError
            allowed = ", ".join(map(str, SYNC_DTYPES))
            raise kind(f"momentum_sync_dtype={self.momentum_sync_dtype!r} must be one of {allowed}")
        if self.local_group in (None, 1):
            return
        if self.full_precision is not None or self.warmup_full_steps:
            raise NotImplementedError(
                f"local_group={self.local_group!r} does not go with full_precision or "
                f"warmup_full_steps: gradients are averaged inside a node only"
            )
        if self.momentum_sync_every and self.momentum_sync == "auto":
            raise NotImplementedError(
                f"local_group={self.local_group!r} does not go with momentum_sync='auto': a rank "
                f"holds a part of each momentum; use 'all' or patterns"
            )

    def _check_effect(self) -> None:
        """Refuse what another option makes idle: whoever wrote it expects that it does something.

        A value that was written out cannot be told from the default, which passes.
        """
        averages = self.momentum_sync_every > 0
        auto = isinstance(self.momentum_sync, str) and self.momentum_sync == "auto"
        needs = {
            "ties": (self.aggregation == "majority", "aggregation='majority'"),
            "level_scale": (self.bits > 1, "bits=2, 4 or 8"),
            "on_divergence": (self.check_replicas_every > 0, "check_replicas_every=k"),
            "momentum_sync": (averages, "momentum_sync_every=k"),
            "momentum_sync_dtype": (averages, "momentum_sync_every=k"),
            "momentum_sync_budget": (
                averages and auto,
                "momentum_sync_every=k and momentum_sync='auto'",
            ),
        }
        # No seed, which a loaded state may bring whatever is rounded.
        for name, (effective, need) in needs.items():
            value = getattr(self, name)
            if not effective and value != getattr(type(self), name):
                raise ValueError(f"{name}={value!r} would have no effect: it needs {need}")


def _check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a string, one of {', '.join(allowed)}")
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")


def _is_choice(value: object, choices: object) -> bool:
    return isinstance(value, str) and value in get_args(choices)


def _check_integer(name: str, value: object, *, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an integer, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}={value} must be between {low} and {high}")


def check_group(group: Mapping[str, Any]) -> None:
    """Check the hyperparameters of one parameter group.

    Args:
        group: A parameter group with "lr" (float or 0-D tensor), "betas" and "weight_decay", and
            perhaps "exchange".

    Raises:
        TypeError: If one of them is not a number, or betas is not a pair.
        ValueError: If one of them is out of its range, or the group holds what would be ignored:
            an option of the whole optimizer, or one that only other optimizers have.
    """
    for name in (*(field.name for field in fields(Options)), "process_group"):
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
    _check_choice("exchange", group.get("exchange", "vote"), get_args(GroupExchange))
    betas = group["betas"]
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas={betas!r} must be a pair of numbers, for example (0.9, 0.99)")
    for position, beta in enumerate(betas):
        _check_number(f"betas[{position}]", beta)
        if float(beta) >= 1.0:
            raise ValueError(f"betas[{position}]={beta} must be at least 0 and below 1")


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
