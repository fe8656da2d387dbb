"""The ranks that an optimizer steps with: its process group, and this rank's node."""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hf_dlion.exchange import Wire, WireStats
from hf_dlion.exchange.wire import ConnectableGroup, RankGroup, connect, default_group
from hf_dlion.options import NodeName, Options
from hf_dlion.options.groups import Groups, flat_params, option_values
from hf_dlion.options.parts import TWO_LINES, is_sharded
from hf_dlion.ranks.abstention import Abstentions
from hf_dlion.ranks.agreement import Agreement, details_of
from hf_dlion.ranks.fingerprint import digest
from hf_dlion.ranks.header import Header
from hf_dlion.ranks.launched import warn_of_strangers
from hf_dlion.ranks.node import LocalGroup, Node, Undivided, find_node
from hf_dlion.ranks.shards import claim_of, find_replica, voting_group
from hf_dlion.ranks.which import new_number


class Ranks:
    """The process group and the node, looked up late, and what the ranks remember of one another.

    Attributes:
        sharded: Whether parameters are sharded: then the process group holds but one rank of each
            replica, and these ranks are those of the default group.
        node: Who votes together with this rank, as far as `join` has found out.
        agreement: Compares the ranks' headers.
        abstentions: Counts steps from which ranks, or nodes, abstained.
    """

    def __init__(
        self,
        process_group: RankGroup | None,
        local_group: LocalGroup,
        limit: int,
        *,
        replicate: DeviceMesh | None = None,
    ) -> None:
        """Looks nothing up yet: an optimizer may be built before the process group.

        Args:
            process_group: The ranks that vote; None is the default group.
            replicate: The same as a mesh; then parameters must be sharded.
            local_group: The option.
            limit: The option `max_abstained_steps`.

        Raises:
            TypeError: If `process_group` is not one of which this rank is a member.
        """
        process_group = voting_group(process_group, replicate)
        kinds = (dist.ProcessGroup, ConnectableGroup)
        if process_group is not None and not isinstance(process_group, kinds):
            raise TypeError(
                f"process_group={process_group!r} must be a torch.distributed process group of "
                f"which this rank is a member, or None"
            )
        self._process_group, self._local_group, self._limit = process_group, local_group, limit
        self._lost_group = False
        self._wire: Wire | None = None
        self.sharded = self._looked_up_sharded = False
        self._must_be_sharded = replicate is not None
        self.node: Node | Undivided = Undivided(1)
        self._joined = False
        self._number = new_number()
        self.agreement = Agreement(self._number)
        self.abstentions = Abstentions(1, limit)

    def carried(self) -> Ranks:
        """Returns what a copy of the optimizer gets: never a process group."""
        copy = Ranks(None, plain(self._local_group), self._limit)
        copy._lost_group = (
            self._lost_group
            or self._process_group is not None
            or isinstance(self._local_group, dist.ProcessGroup)
        )
        return copy

    @property
    def members(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each node or replica, as far as `join` has found out; else empty."""
        return self.node.members

    def bind(self, groups: Groups) -> None:
        """Looks whether parameters are sharded: loops may do that after they were passed."""
        self.sharded = any(map(is_sharded, flat_params(groups)))

    def check(self, groups: Groups, options: Options) -> None:
        """Checks what can be told of sharded parameters without the other ranks.

        Raises:
            NotImplementedError: As `shards.claim_of`.
            ValueError: As `shards.claim_of`.
        """
        if self.sharded and default_group() is not None:
            claim_of(self._process_group, groups, options)

    def check_step(self) -> None:
        """Checks that parameters are sharded if they must be, which loops may do late.

        Raises:
            RuntimeError: If they are not: the ranks of a replica would drift apart.
        """
        if self._must_be_sharded and not self.sharded:
            raise RuntimeError(
                f"replicate=... names the ranks that hold the same parts, but no parameter is "
                f"sharded: {TWO_LINES}"
            )

    def look_up(self, groups: Groups, stats: WireStats) -> tuple[Wire | None, bool]:
        """Returns the wire, None without torch.distributed, and whether it is a new one.

        Args:
            groups: The parameter groups.
            stats: Counts what is sent.

        Raises:
            RuntimeError: If this belongs to a copy, and the process group was the original's own.
        """
        group = (None if self.sharded else self._process_group) or default_group()
        # A process group outlives the torch.distributed that made it.
        if group is None or (isinstance(group, dist.ProcessGroup) and not dist.is_initialized()):
            self._wire = None
            return None, False
        if self._lost_group:
            raise RuntimeError(
                "this DistributedLion was copied or unpickled from one with a process group of its "
                "own, which a copy does not carry: make a new one with process_group=... (or "
                "local_group=...) and load the state dict into it"
            )
        same = self._wire is not None and self._wire.group is group
        if same and self._looked_up_sharded == self.sharded:
            return self._wire, False
        self._wire = connect(group, stats, _device_of(groups))
        if isinstance(group, dist.ProcessGroup):
            warn_of_strangers()
        self.node, self._joined = Undivided(self._wire.world_size), False
        self._looked_up_sharded = self.sharded
        self.agreement = Agreement(self._number)
        self.abstentions = Abstentions(self._wire.world_size, self._limit)
        return self._wire, True

    def join(
        self, wire: Wire, groups: Groups, options: Options, steps: int, stats: WireStats
    ) -> Node | Undivided:
        """Returns this rank's node, or that there are none; found out at the first call.

        Every rank must call this at the same point of its program.

        Args:
            wire: From `look_up`, of several ranks.
            groups: The parameter groups.
            options: Compared first: a rank without `local_group` would not come here.
            steps: Number of the last step.
            stats: Counts what is sent.

        Raises:
            Disagreement: On every rank, if the ranks cannot be divided into equal nodes.
        """
        if options.local_group in (None, 1) and not self.sharded:
            return Undivided(wire.world_size)
        if not self._joined:
            self.node, self._joined = self._found(wire, groups, options, steps, stats), True
            self.abstentions = Abstentions(self.node.voters, self._limit, self.node.voter)
        return self.node

    def meet_to_save(
        self,
        wire: Wire,
        groups: Groups,
        options: Options,
        steps: int,
        failure: Exception | None,
    ) -> None:
        """Meets all ranks in the course of a save; every rank must call this.

        Args:
            wire: From `look_up`, of several ranks.
            groups: The parameter groups.
            options: The options.
            steps: Number of the last step.
            failure: What went wrong on this rank.

        Raises:
            Disagreement: On every rank, if something failed on one, or they do not all save after
                the same step.
        """
        # As a step begins, so a rank that steps, because it was not told to save, hears of it.
        doing = {**option_values(options), "saving": f"after step {steps}"}
        header = dataclasses.replace(
            Header.of_failure(steps), failed=failure is not None, options=digest(doing)
        )
        details = dataclasses.replace(
            details_of(groups, options, failure),
            options=lambda: doing,
            doing="saving a checkpoint",
        )
        self.agreement.agree_on_options(header, wire, details)

    def _found(
        self, wire: Wire, groups: Groups, options: Options, steps: int, stats: WireStats
    ) -> Node | Undivided:
        def agree(failure: Exception | None) -> None:
            header = dataclasses.replace(
                Header.of_failure(steps),
                failed=failure is not None,
                options=digest(option_values(options)),
            )
            # As a step begins, so a rank without local_group, which is there, hears of it.
            self.agreement.agree_on_options(header, wire, details_of(groups, options, failure))

        device = _device_of(groups)
        if self.sharded:
            replica = find_replica(self._process_group, groups, options, wire, agree, stats, device)
            self.agreement.alike = replica.places
            return replica
        return find_node(self._local_group, wire, agree, stats, device)


def plain(local_group: LocalGroup) -> NodeName | int | None:
    """Returns `local_group` as ranks can compare it: of a process group its size."""
    if isinstance(local_group, dist.ProcessGroup):
        return dist.get_world_size(local_group)
    outside: object = dist.GroupMember.NON_GROUP_MEMBER
    # Of the same type first: an array compares element by element.
    if type(local_group) is type(outside) and local_group == outside:
        return 2  # Refused on all ranks together, at the first use.
    return cast("NodeName | int | None", local_group)


def _device_of(groups: Groups) -> torch.device:
    params = flat_params(groups)
    return params[0].device if params else torch.device("cpu")
