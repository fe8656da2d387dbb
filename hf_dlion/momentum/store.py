"""Where the momenta live: in torch's state, whole or as this rank's share of its node's."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from hf_dlion.exchange import Wire
from hf_dlion.exchange.mean import average_over_ranks
from hf_dlion.momentum.shares import Range, Shards
from hf_dlion.ranks.groups import Groups, flat_params
from hf_dlion.ranks.header import Disagreement, digest
from hf_dlion.ranks.node import Node


@dataclass(frozen=True)
class Momenta:
    """The momenta of an optimizer: a view, made anew when needed, since torch replaces its state.

    Attributes:
        state: The optimizer's; `state[p]["exp_avg"]` is what this rank holds of p's momentum.
        groups: The parameter groups.
        shards: Which stretch that is.
        dtype: Of the momenta, None for each parameter's own.
    """

    state: MutableMapping[Tensor, dict[str, Any]]
    groups: Groups
    shards: Shards
    dtype: torch.dtype | None

    def of(self, param: Tensor, index: int, owned: Mapping[int, Range]) -> Tensor:
        """Returns the parameter's momentum, or this rank's share of it, made at its first use.

        Args:
            param: The parameter.
            index: Of the parameter.
            owned: The stretch of each parameter that this rank owns; none where it has all.
        """
        state = self.state[param]
        if "exp_avg" not in state:
            shape: Sequence[int] = param.shape
            if index in owned:
                self.shards.held[index] = owned[index]
                shape = (owned[index][1] - owned[index][0],)
            dtype = self.dtype or param.dtype
            state["exp_avg"] = torch.zeros(shape, dtype=dtype, device=param.device)
        return cast(Tensor, state["exp_avg"])

    def held(self) -> dict[int, Tensor]:
        """Returns what this rank holds of each momentum, by parameter index."""
        return {
            index: cast(Tensor, self.state[param]["exp_avg"])
            for index, param in enumerate(flat_params(self.groups))
            if "exp_avg" in self.state.get(param, {})
        }

    def hold(self, momenta: Mapping[int, Tensor]) -> None:
        """Keeps momenta, by parameter index."""
        params = flat_params(self.groups)
        for index, momentum in momenta.items():
            self.state[params[index]]["exp_avg"] = momentum

    def fill_up(self) -> None:
        """Makes momenta whole, with zeros for what other ranks held; nothing is sent."""
        if self.shards.held:
            self.hold(self.shards.filled_up(self.held(), flat_params(self.groups)))

    def displaced(self, owned: Mapping[int, Range]) -> bool:
        """Returns whether this rank lacks a part of what it must own."""
        return self.shards.displaced(self.held(), owned)

    def share_out(self, owners: Sequence[Mapping[int, Range]], node: Node, displaced: bool) -> None:
        """Gives every rank of the node the momentum that it owns.

        Args:
            owners: The stretches that each rank of the node must own.
            node: The ranks; all of them must call this.
            displaced: Whether any of them lacks a part; otherwise nothing is sent.
        """
        momenta, shards = self.held(), self.shards
        if displaced:
            params = flat_params(self.groups)
            momenta = shards.shared_out(momenta, owners, params, self.dtype, node.local)
        self.hold(shards.cut(momenta, owners[node.local.rank]))
        shards.members = node.members

    def check_alike(self, wire: Wire, node: Node | None) -> None:
        """Checks that the ranks hold momenta of the same parameters; every rank must call this.

        Raises:
            Disagreement: On every rank, if they do not.
        """
        held = self.held()
        told = wire.gather_objects((list(held), digest(self.shards.ranges(held))))
        # The ranks of a node hold different shares, those with one place on all nodes the same.
        places = (range(wire.world_size),) if node is None else zip(*node.members, strict=True)
        if len({repr(indices) for indices, _ in told}) > 1 or any(
            len({told[rank][1] for rank in ranks}) > 1 for ranks in places
        ):
            raise Disagreement(
                "ranks hold momenta of different parameters: load the same checkpoint on every rank"
            )

    def average(self, wire: Wire, node: Node | None) -> None:
        """Replaces every momentum by its mean over ranks, or nodes, whole on every rank.

        Every rank must call this, after `check_alike`.
        """
        held = self.held()
        average_over_ranks(list(held.values()), wire if node is None else node.peers)
        if node is not None:
            params = flat_params(self.groups)
            self.hold(self.shards.made_whole(held, params, self.dtype, node.local))
