"""What an optimizer keeps from step to step: its ranks, its plan, who has a gradient."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from hf_dlion.codec.rule import StepRule
from hf_dlion.exchange import Wire, WireStats
from hf_dlion.momentum.origin import MomentumOrigin
from hf_dlion.momentum.part_states import PartStates
from hf_dlion.momentum.shares import Shares
from hf_dlion.momentum.store import MomentumStore
from hf_dlion.momentum.sync import MomentumSync
from hf_dlion.options import Options
from hf_dlion.options.groups import flat_params
from hf_dlion.options.parts import Parts
from hf_dlion.options.treatment import Treatment, treatment_by_name
from hf_dlion.ranks.group import Ranks
from hf_dlion.step.early import EarlyVotes, NoEarlyVotes
from hf_dlion.step.message import Message
from hf_dlion.step.plan import Params, Plan
from hf_dlion.step.presence import Presence
from hf_dlion.step.voters import ONE_RANK, EveryRank, Voters, voters_of


class Hooks(Protocol):
    """What watches gradients and DDP wrappers for an optimizer."""

    def search(self) -> None:
        """Attaches to every DDP wrapper of the optimizer's parameters, now and later."""

    def claim(self) -> None:
        """Takes the parameters' gradients, also from another DistributedLion."""

    def claim_free(self) -> None:
        """Takes the gradients of those parameters that no DistributedLion has."""

    def added(self, params: Iterable[Tensor]) -> None:
        """Watches parameters of a new group, and takes them if it has the others."""

    def release(self) -> None:
        """Gives the parameters' gradients back to their DDP wrappers."""

    def watch_gradients(self, params: Iterable[Tensor]) -> None:
        """Watches those parameters that require a gradient and are not watched yet."""

    def after_step(self) -> None:
        """Claims what another optimizer has taken, and looks after the wrappers."""


class Engine:
    """The part of a `DistributedLion` that steps and hooks work with.

    Torch replaces an optimizer's state and groups when it loads; they are read through the
    optimizer, which is held weakly because hooks hold this.

    Attributes:
        options: The options.
        ranks: The process group, the node, and what the ranks remember of one another.
        stats: Bytes, times and agreement: `optimizer.wire`.
        steps: Number of the last step that moved anything.
        parts: What this rank holds of the parameters that are sharded.
        presence: Knows which parameters received a gradient.
        early: Votes that leave before the step.
        hooks: Watch gradients and wrappers.
        plan: The messages of the coming step, as far as they are known.
        treatment: What the options select by name.
        sync: Which momenta are averaged, and when.
        shares: Which stretch of each momentum this rank holds.
        origin: Whose momentum this rank goes on with.
        shared_momenta: Indices of parameters of which all ranks are known to have one momentum.
        sent_inside: `WireStats.node_bytes_sent` at the end of the last step.
        message_numel: Elements per message at most; None lets the plan choose.
    """

    early: EarlyVotes
    hooks: Hooks

    def __init__(self, owner: Optimizer, options: Options, ranks: Ranks) -> None:
        """Starts before the first step; `early` and `hooks` are still to be set.

        Args:
            owner: The optimizer, held weakly.
            options: The options.
            ranks: Who takes part.
        """
        self._owner = weakref.ref(owner)
        self.options, self.ranks = options, ranks
        self.stats = WireStats()
        self.steps = self.sent_inside = 0
        self.parts, self.presence = Parts(), Presence()
        self.plan: Plan | None = None
        self.treatment = Treatment()
        self.sync, self.shares, self.origin = MomentumSync(), Shares(), MomentumOrigin()
        self.shared_momenta: frozenset[int] = frozenset()
        self.message_numel: int | None = None
        self._voters: Voters = ONE_RANK
        # ids of all parameters when the last plan was made; that keeps them alive.
        self._places: list[int] = []

    def carried(self) -> dict[str, Any]:
        """Returns what a copy of the optimizer gets: never the process group."""
        kept = {name: getattr(self, name) for name in ("options", "steps", *_COPIED)}
        made = self.origin.entry(self.steps, self.rank, self.world_size)
        return {**kept, "ranks": self.ranks.carried(), "momenta_of": made}

    @staticmethod
    def restored(owner: Optimizer, carried: dict[str, Any]) -> Engine:
        """Returns the engine of a copy from what `carried` returned."""
        engine = Engine(owner, carried["options"], carried["ranks"])
        for name in ("steps", *_COPIED):
            setattr(engine, name, carried[name])
        engine.origin.loaded(carried["momenta_of"])
        return engine

    def shed(self) -> None:
        """Lets go of parameters and momenta: the optimizer is gone, and this may outlive it."""
        self.plan = None
        self.parts.forget()
        self.early = NoEarlyVotes()

    @property
    def owner(self) -> Optimizer:
        """The optimizer."""
        owner = self._owner()
        assert owner is not None, "whoever works with an engine keeps its optimizer alive"
        return owner

    @property
    def alive(self) -> bool:
        """Whether the optimizer still exists: a kept traceback may hold this longer than it."""
        return self._owner() is not None

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The optimizer's parameter groups, none of one that is gone."""
        owner = self._owner()
        return [] if owner is None else owner.param_groups

    @property
    def local_groups(self) -> Sequence[Mapping[str, Any]]:
        """The parameter groups with this rank's parts of sharded parameters: what steps go by."""
        return self.parts.groups(self.groups) if self.ranks.sharded else self.groups

    @property
    def joins(self) -> bool:
        """Whether the optimizer is inside a `Join`."""
        return bool(getattr(getattr(self._owner(), "_join_config", None), "enable", False))

    @property
    def messages(self) -> Sequence[Message]:
        """The messages of the coming step as far as they are known, in the order they leave."""
        return () if self.plan is None else self.plan.messages

    @property
    def rank(self) -> int:
        """This rank in the process group, 0 without one."""
        wire = self.wire()
        return 0 if wire is None else wire.rank

    @property
    def world_size(self) -> int:
        """Number of ranks in the process group, 1 without one."""
        wire = self.wire()
        return 1 if wire is None else wire.world_size

    def group(self) -> dist.ProcessGroup | None:
        """Returns the process group in use, or None where torch.distributed is not initialised."""
        wire = self.wire()
        return None if wire is None else wire.group

    @property
    def control_device(self) -> torch.device:
        """Where small control messages lie."""
        wire = self.wire()
        return torch.device("cpu") if wire is None else wire.control_device

    def wire(self) -> Wire | None:
        """Returns the wire, looked up late: an optimizer may be built before the process group."""
        wire, new = self.ranks.look_up(self.groups, self.stats)
        if new:
            self.early.reset()
            self.hooks.search()
        return wire

    def wire_if_several(self) -> Wire | None:
        """Returns the wire, or None where this rank is alone."""
        wire = self.wire()
        return None if wire is None or wire.world_size == 1 else wire

    def voters(self) -> Voters:
        """Returns who votes as one.

        Every rank must call this at the same point of its program. The first time, with
        `local_group`, the ranks agree on who shares a node and make process groups; later nothing
        is sent.

        Raises:
            Disagreement: On every rank, if the ranks cannot be divided into equal nodes.
        """
        wire = self.wire_if_several()
        if wire is None:
            self._voters = ONE_RANK
        elif self._voters.wire is not wire:
            node = self.ranks.join(wire, self.local_groups, self.options, self.steps, self.stats)
            self._voters = voters_of(node, wire)
        return self._voters

    def rule(self) -> StepRule:
        """Returns the constants of the coming step."""
        wire, voters = self.wire_if_several(), self._voters
        if voters.wire is not wire:
            voters = ONE_RANK if wire is None else EveryRank(wire)
        options = self.options
        # Of the messages that are there, should somebody have changed the options since.
        made = options if self.plan is None else self.plan
        return StepRule(
            step=self.steps + 1,
            rank=voters.index,
            world_size=voters.count,
            aggregation=options.aggregation,
            ties=options.ties,
            stochastic_rounding=options.stochastic_rounding,
            seed=options.seed,
            bits=made.bits,
            level_scale=made.level_scale,
        )

    def plan_for(self, params: Params, voters: Voters) -> Plan:
        """Returns the plan of the coming step, made anew where the last one does not fit.

        Args:
            params: Pairs of parameter index and parameter, those with requires_grad.
            voters: Who votes as one.

        Raises:
            NotImplementedError: If a parameter is sharded.
            TypeError: If one is not dense or not floating.
        """
        self._note_places()
        indices = [index for index, _ in params]
        treatment = self.treatment.of_step(self.groups, self.options, self.steps + 1, indices)
        plan = self.plan
        if plan is None or not plan.fits(params, voters, treatment, self.options):
            self.plan = None  # Should making another one fail, none holds.
            self.plan = plan = Plan(
                params, voters, self.options, treatment, message_numel=self.message_numel
            )
        return plan

    def _note_places(self) -> None:
        """Drops what goes by index where other parameters have come into the places of some."""
        places = list(map(id, flat_params(self.groups)))
        if places[: len(self._places)] != self._places:
            self.treatment = treatment_by_name(self.options, self.groups, complete=False)
            self.shared_momenta, self.sync = frozenset(), MomentumSync()
            self.ranks.agreement.anew = True
        # Last: a step that could not read the names must not go on by those before.
        self._places = places

    def momenta(self) -> MomentumStore:
        """Returns where the momenta live now."""
        dtype = self.options.momentum_dtype
        states = PartStates(self.owner.state)
        return MomentumStore(states, self.local_groups, self.shares, dtype)

    def gather_objects(self, value: Any) -> list[Any]:
        """Returns every rank's `value`, in rank order; every rank must call this.

        Args:
            value: A small, plain, picklable object.
        """
        wire = self.wire()
        return [value] if wire is None else wire.gather_objects(value)

    def meet_to_save(self, failure: Exception | None = None) -> None:
        """Meets all ranks in the course of a save; every rank must call this.

        It is a header, as a step begins with, so a rank that takes a step meanwhile, because it
        was not told to save, is found. Bytes per rank: `ranks.header.header_wire_bytes`.

        Args:
            failure: What went wrong on this rank.

        Raises:
            Disagreement: On every rank, if something failed on one, or they do not all save after
                the same step.
        """
        wire = self.wire_if_several()
        if wire is not None:
            self.ranks.meet_to_save(wire, self.local_groups, self.options, self.steps, failure)


# What a copy of an optimizer takes over as it is.
_COPIED = ("shares", "sync", "treatment", "message_numel")
