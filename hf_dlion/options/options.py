"""What a user may choose, checked when it is chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

from hf_dlion.options.selection import Selection, check_selection

Aggregation = Literal["majority", "average"]
Ties = Literal["alternate", "zero"]
ExchangeName = Literal["auto", "gather", "two_phase"]
CheckpointMode = Literal["per_rank", "mean"]
NodeName = Literal["node"]
OnDivergence = Literal["raise", "repair"]
LevelScale = Literal["word", "tensor"]

BITS = (1, 2, 4, 8)
MOMENTUM_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SYNC_DTYPES = (torch.bfloat16, torch.float32)
# What momentum_sync may be besides a selection of parameters.
SYNC_WORDS = ("all", "auto")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of `DistributedLion` that hold for every parameter group.

    N is the number of ranks and u the direction whose sign is a rank's vote; docs/rule.md has the
    whole rule. `DistributedLion` takes these as arguments, and its docstring repeats the text.

    Attributes:
        aggregation: What all ranks apply: "majority" (the sign of the sum of the votes) or
            "average" (their mean).
        ties: A tied majority: "alternate" (+1 and -1 in turns over elements and steps, one bit on
            the way down) or "zero" (no move, two bits).
        bits: Bits of a vote, per element. 1 sends the sign of u; 2, 4 and 8 also send how large u
            is, relative to a mean a of |u| that is not sent (see `level_scale`). With 4 and 8 bits
            that is q = round(u / a * L / 2), cut to -L and L (7 or 127); with 2 bits -3, -1, 1 or
            3, for |u| above 1.5 a or not. The verdict is the sign of the sum of the q. A sum of 0
            is a tie; with 4 and 8 bits that is also where all ranks round a small u to 0. Two-phase
            sends (bits + 1) (N - 1) / N bits per parameter. Not with aggregation="average".
        level_scale: With 2, 4 or 8 bits, what a is the mean over: in each "word" of 64 elements
            those that are not zero, or in the whole "tensor" the rows that are not zero (Lion
            Cub's). With "tensor" rows that are small beside others, such as those of rare tokens,
            all get the lowest level; gradients and momenta are read twice; and it does not go with
            `local_group` yet.
        exchange: How votes travel: "gather", "two_phase", or "auto", which takes the one that sends
            fewer bytes.
        overlap: Exchange votes during backward, as gradients become ready, from the second step
            on. The momentum is advanced in `step()`, from the gradient as the loop left it; the
            direction takes the factor by which the gradients of the step before were scaled
            between backward and `step()` (by clipping or GradScaler), since that of this step is
            not known yet. It costs one more pass over gradients and momenta. Not with
            `local_group`.
        stochastic_rounding: Round bfloat16 and float16 parameters and momenta stochastically, the
            parameters with the same random bits on every rank. Nearest rounding (False) loses every
            update smaller than half a unit in the last place: most steps of a fine-tuning.
        momentum_dtype: dtype of the momentum: torch.float32, torch.bfloat16 or torch.float16;
            None keeps each parameter's own.
        seed: Seed of the stochastic rounding, the same on every rank.
        max_abstained_steps: A rank whose gradients hold a NaN or an Inf abstains from the step.
            When one does so in this many steps in a row, all ranks raise.
        checkpoint: "per_rank" has the integrations save every rank's momentum; "mean" has them
            average the momenta before rank 0 saves.
        local_group: Ranks that cast one vote together, because fast links join them: "node" (as
            many as LOCAL_WORLD_SIZE says, ranks of a node following one another), their number, or
            the process group of this rank's node, of which `Options` holds the size. Gradients are
            averaged in full precision inside a node, by DDP's backward or else in `step()`, and the
            momentum is shared out among its ranks; in the rule N is then the number of nodes. None:
            every rank votes. Not with `overlap`.
        check_replicas_every: Number of steps after which the ranks compare a hash of all
            parameters of the groups, frozen ones too; 0 never does.
        on_divergence: What happens if they differ: "raise" an error on every rank that names the
            first such parameter, or "repair": warn, and give all ranks the values that most of
            them have.
        momentum_sync_every: Number of steps in which the ranks average the selected momenta once,
            an equal part of them in each step (Lion Cub, arXiv 2411.16462); 0 never does.
        momentum_sync: Which momenta: "all", "auto" (those that differ most between the ranks, as
            many as `momentum_sync_budget` allows), patterns of parameter names (`"*.bias;*norm*"`
            or a sequence; as `fnmatch`), or a function of name and parameter (one that can be
            imported, if the optimizer is to be pickled).
        momentum_sync_dtype: How they travel: torch.bfloat16 or torch.float32.
        momentum_sync_budget: For "auto", the most bytes that a rank sends for them in a step; None
            stands for one bit per parameter.
        full_precision: Parameters whose gradients are averaged over the ranks instead of a vote, by
            name as for `momentum_sync`; a parameter group with "exchange": "full" is the same.
            None selects none.
        warmup_full_steps: Number of steps at the start that are plain Lion on the mean gradient.

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
        """Checks every value, so a bad one is refused where it was written."""
        self._check_values()
        self._check_together()
        self._check_effect()

    def _check_values(self) -> None:
        """Checks each value by itself."""
        check_choice("aggregation", self.aggregation, get_args(Aggregation))
        check_choice("ties", self.ties, get_args(Ties))
        _check_integer("bits", self.bits, low=1, high=8)
        if self.bits not in BITS:
            raise ValueError(f"bits={self.bits} is unknown; choose one of 1, 2, 4, 8")
        check_choice("level_scale", self.level_scale, get_args(LevelScale))
        check_choice("exchange", self.exchange, get_args(ExchangeName))
        check_choice("checkpoint", self.checkpoint, get_args(CheckpointMode))
        check_choice("on_divergence", self.on_divergence, get_args(OnDivergence))
        for name in ("overlap", "stochastic_rounding"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(
                    f"{name}={value!r} must be True or False, got {type(value).__name__}"
                )
        _check_dtype("momentum_dtype", self.momentum_dtype, (None, *MOMENTUM_DTYPES))
        _check_dtype("momentum_sync_dtype", self.momentum_sync_dtype, SYNC_DTYPES)
        _check_integer("seed", self.seed, low=0, high=2**64 - 1)
        _check_integer("max_abstained_steps", self.max_abstained_steps, low=1, high=2**31 - 1)
        _check_integer("check_replicas_every", self.check_replicas_every, low=0, high=2**31 - 1)
        for name in ("momentum_sync_every", "warmup_full_steps"):
            _check_integer(name, getattr(self, name), low=0, high=2**63 - 1)
        if self.momentum_sync_budget is not None:
            _check_integer("momentum_sync_budget", self.momentum_sync_budget, low=0, high=2**63 - 1)
        check_selection("momentum_sync", self.momentum_sync)
        if self.full_precision is not None:
            check_selection("full_precision", self.full_precision)
        if isinstance(self.local_group, str):
            check_choice("local_group", self.local_group, get_args(NodeName))
        elif self.local_group is not None:
            _check_integer("local_group", self.local_group, low=1, high=2**31 - 1)

    def _check_together(self) -> None:
        """Refuses values that do not go together."""
        if self.bits > 1 and self.aggregation == "average":
            raise ValueError(
                f"aggregation='average' is the mean of votes of one bit, got bits={self.bits}; use "
                f"bits=1 or aggregation='majority', which takes the sign of the sum of the votes"
            )
        if self.local_group in (None, 1):
            return
        if self.overlap:
            raise NotImplementedError(
                f"overlap=True does not go with local_group={self.local_group!r}: a node's "
                f"gradient is there only once DDP has averaged it, so little of backward is left "
                f"to hide votes behind; use local_group alone, or overlap=True alone"
            )
        # Each rank of a node holds a part of every momentum, and sees only its node's gradients.
        if self.bits > 1 and self.level_scale == "tensor":
            raise NotImplementedError(
                f"level_scale='tensor' with local_group={self.local_group!r}: a node's ranks would "
                f"have to agree on every tensor's mean magnitude; use level_scale='word'"
            )
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
        """Refuses what another option makes idle: whoever wrote it expects an effect.

        The default passes, since it cannot be told from a value that was left out.
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
        # `seed` is not among them: a loaded state brings one, whether anything is rounded or not.
        for name, (effective, need) in needs.items():
            value = getattr(self, name)
            if not effective and value != getattr(type(self), name):
                raise ValueError(f"{name}={value!r} would have no effect: it needs {need}")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuses a value that is not one of the allowed strings."""
    if not isinstance(value, str):
        raise TypeError(f"{name}={value!r} must be a string, one of {', '.join(allowed)}")
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {', '.join(allowed)}")


def _check_integer(name: str, value: object, *, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} must be an integer, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}={value} must be between {low} and {high}")


def _check_dtype(name: str, value: object, allowed: tuple[torch.dtype | None, ...]) -> None:
    # By identity: an array compares element by element.
    if not any(value is dtype for dtype in allowed):
        kind = ValueError if isinstance(value, torch.dtype) else TypeError
        or_none = "None or " if None in allowed else ""
        dtypes = ", ".join(str(dtype) for dtype in allowed if dtype is not None)
        raise kind(f"{name}={value!r} must be {or_none}one of {dtypes}")
