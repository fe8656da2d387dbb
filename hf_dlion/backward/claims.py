"""Which DistributedLion a parameter's gradients belong to: DDP does not average those.

Only what the program does moves a claim, so it moves on every rank alike: making, attaching,
loading or stepping an optimizer takes its parameters, also from another DistributedLion, and
`detach()` gives them up. That an optimizer is deleted moves nothing, because the ranks' garbage
collectors run at different times: its claim stands until another one takes it.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hf_dlion.options.groups import flat_params
from hf_dlion.options.parts import Parts
from hf_dlion.step.early import EarlyVotes
from hf_dlion.step.engine import Hooks
from hf_dlion.step.presence import Presence
from hf_dlion.step.voters import Voters


class Owner(Protocol):
    """What hooks see of an optimizer: its `Engine`.

    Attributes:
        parts: Of the parameters that are sharded.
        presence: Hears of forward passes, and which gradients a wrapper averaged in the node.
        early: Hears of forward passes.
        hooks: Watch the gradients of parameters.
    """

    parts: Parts
    presence: Presence
    early: EarlyVotes
    hooks: Hooks

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, none of one that is gone."""

    @property
    def world_size(self) -> int:
        """Number of ranks that the optimizer exchanges votes with."""

    @property
    def joins(self) -> bool:
        """Whether the optimizer is inside a `Join`."""

    def group(self) -> dist.ProcessGroup | None:
        """Returns the process group that the optimizer exchanges votes in."""

    def voters(self) -> Voters:
        """Returns who votes as one; found on all ranks together."""


class Claim:
    """What one optimizer claims.

    Attributes:
        owner: The optimizer's engine, which outlives it: a wrapper does the same on a rank that
            has collected the optimizer as on one that has not.
        number: Counts claims in the order of the optimizers.
        active: Whether it has been taken and not released since.
        whole: Whether no parameter has been lost since it was last taken.
        kept_local: Whether DDP may have left gradients unaveraged that no DistributedLion has
            stepped yet.
        stepped_local: Whether it may have left unaveraged what was stepped and perhaps not yet
            dropped.
    """

    def __init__(self, owner: Owner) -> None:
        """Claims nothing yet."""
        self.owner = owner
        self.number = next(_numbers)
        self.active = self.whole = self.kept_local = self.stepped_local = False

    def take(self) -> None:
        """Takes the optimizer's parameters, from another claim where one has them."""
        for param in flat_params(self.owner.groups):
            before = claim_of(param)
            if before is self:
                continue
            if before is not None:
                before._lose()
                self.kept_local |= before.kept_local
                self.stepped_local |= before.stepped_local
            self._set(param)
        self.active = self.whole = True

    def take_free(self) -> None:
        """Takes those of the optimizer's parameters that nobody has."""
        self.active = True
        for param in flat_params(self.owner.groups):
            if claim_of(param) is None:
                self._set(param)

    def release(self) -> None:
        """Gives all parameters up."""
        for key, (_, claim) in list(_claims.items()):
            if claim is self:
                del _claims[key]
        self._lose()
        self.active = self.kept_local = self.stepped_local = False
        _note_change()

    def stepped(self) -> None:
        """Takes note that its optimizer has taken a step."""
        self.stepped_local |= self.kept_local
        self.kept_local = False

    def _set(self, param: Tensor) -> None:
        _claims[id(param)] = weakref.ref(param, functools.partial(_forget, id(param))), self
        _note_change()

    def _lose(self) -> None:
        self.whole = False
        # The votes under way are of gradients that this optimizer may never step.
        self.owner.early.disturb()


# By the parameter's id; another parameter may have it once that one is gone.
_claims: dict[int, tuple[weakref.ref[Tensor], Claim]] = {}
_numbers = itertools.count(1)
_changes = 0


def changes() -> int:
    """Returns a number that is another one whenever a claim has changed."""
    return _changes


def _note_change() -> None:
    global _changes
    _changes = next(_numbers)


def _forget(key: int, param: weakref.ref[Tensor]) -> None:
    found = _claims.get(key)
    if found is not None and found[0] is param:
        del _claims[key]


def claim_of(param: Tensor) -> Claim | None:
    """Returns the claim on a parameter, None if no DistributedLion has it."""
    found = _claims.get(id(param))
    return found[1] if found is not None and found[0]() is param else None


lions: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Every DistributedLion, told from other optimizers."""


@functools.cache
def watch_other_optimizers() -> None:
    """Refuses, from now on, that another optimizer steps gradients that were kept local."""
    register_optimizer_step_pre_hook(_refuse_foreign_step)


def _refuse_foreign_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Pre-hook of every optimizer's step: no other one may use gradients that were kept local.

    Every rank comes here in the same step of the same program, so all raise; of gradients that a
    DistributedLion has stepped before, those ranks that still have one.

    Raises:
        RuntimeError: If DDP did not average gradients of the optimizer's parameters, because they
            belong to a DistributedLion. Unless it has stepped them, it has lost them then.
    """
    if optimizer in lions:
        return
    params = flat_params(optimizer.param_groups)
    kept = next((claim for p in params if (claim := claim_of(p)) and claim.kept_local), None)
    if (kept is None and not any(map(_left_local, params))) or _steps_a_lion(optimizer):
        return
    if kept is None:
        # A rank that has no such gradient does not raise, so nothing may change that others share.
        raise RuntimeError(
            f"{type(optimizer).__name__}.step(): DDP has not averaged these gradients, and a "
            f"DistributedLion has stepped them already. This step moves nothing. Call zero_grad() "
            f"before it, and hf_dlion.unwrap(optimizer).detach() on the DistributedLion before a "
            f"forward whose gradients another optimizer is to step"
        )
    kept.release()
    raise RuntimeError(
        f"{type(optimizer).__name__}.step(): DDP has not averaged these gradients, because "
        f"a DistributedLion was made for the same parameters. Nothing has moved, and DDP "
        f"averages from the next forward on. Call hf_dlion.unwrap(optimizer).detach() on "
        f"the DistributedLion when you are done with it, before another one's first forward"
    )


def _left_local(param: Tensor) -> bool:
    """Returns whether a parameter has a gradient, not zero, that was stepped unaveraged."""
    claim, grad = claim_of(param), param.grad
    return claim is not None and claim.stepped_local and grad is not None and bool(grad.any())


def _steps_a_lion(optimizer: Optimizer) -> bool:
    """Returns whether an optimizer holds a DistributedLion, which it steps itself."""
    pending, met = _held(vars(optimizer).values()), {id(optimizer)}
    while pending:
        inner = pending.pop()
        if inner in lions:
            return True
        if id(inner) not in met:
            met.add(id(inner))
            pending += _held(vars(inner).values())
    return False


def _held(values: Iterable[Any]) -> list[Optimizer]:
    """Returns the optimizers among values, and in lists and dicts that are among them."""
    found = []
    for value in values:
        inner = value.values() if isinstance(value, dict) else value
        many = isinstance(value, (dict, list, tuple))
        found += [one for one in (inner if many else [value]) if isinstance(one, Optimizer)]
    return found
