"""A replica's ranks cast one vote: each on its parts of the parameters, which FSDP2 sharded.

gradients   reduced inside the replica by FSDP; those of copies averaged in the step
momentum    of a rank's own parts
votes       exchanged between the ranks that hold the same parts
verdicts    applied to the parts; FSDP gathers parameters in the next forward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_dlion.codec.layout import MessageLayout
from hf_dlion.exchange import Wire
from hf_dlion.momentum.shares import Range
from hf_dlion.momentum.store import MomentumStore
from hf_dlion.options import Options
from hf_dlion.options.params import no_gradient
from hf_dlion.options.parts import held_in_parts
from hf_dlion.ranks.header import Header, one_per_voter
from hf_dlion.ranks.shards import Replica
from hf_dlion.step.delivery import LionAlone
from hf_dlion.step.presence import Presence
from hf_dlion.step.voters.every_rank import EveryRank
from hf_dlion.step.voters.interface import Built, Params
from hf_dlion.step.voters.node_gradients import average_gradients


class ReplicaVoters(EveryRank):
    """The ranks of this rank's replica; as voters, the ranks that hold the same parts."""

    def __init__(self, wire: Wire, replica: Replica) -> None:
        """Takes the wire of all ranks, and this rank's replica."""
        super().__init__(replica.peers)
        self.wire = wire
        self._replica, self.members = replica, replica.members
        self.near = replica.members[replica.index]
        self.alike = replica.places
        self.layout_key: tuple[object, ...] = (replica.members,)

    def build(
        self,
        params: Params,
        groups: Sequence[tuple[Params, MessageLayout]],
        name: str,
        options: Options,
        wires: tuple[Wire, Wire] | None,
    ) -> Built:
        """Returns messages of this rank's parts, or plain Lion where there is one replica.

        Raises:
            NotImplementedError: With overlap, if a parameter is not sharded, or offloaded.
        """
        if options.overlap:
            _check_overlap([param for _, param in params])
        if self.count == 1:
            return Built((), LionAlone(params))
        return super().build(params, groups, name, options, wires)

    def heard(self, headers: Sequence[Header]) -> list[Header]:
        """Returns one header per replica."""
        return one_per_voter(headers, self.members)

    def unaveraged(
        self, presence: Presence, params: Sequence[Tensor], present: Sequence[bool]
    ) -> list[bool]:
        """Returns, for each parameter, whether ranks hold copies of it, this one a gradient."""
        return [
            has and not held_in_parts(param) for param, has in zip(params, present, strict=True)
        ]

    def complete(
        self,
        momenta: MomentumStore,
        owners: Sequence[Mapping[int, Range]],
        params: Sequence[Tensor],
        unaveraged: Sequence[bool],
        mine: Header,
    ) -> None:
        """Averages gradients of copies in the replica, and fills in what others have."""
        if not mine.finite:
            return
        if mine.unaveraged:
            average_gradients(params, torch.tensor(unaveraged, dtype=torch.bool), self._replica)
        for param, has in zip(params, mine.present.tolist(), strict=True):
            # Somebody dropped it on this rank; the replica votes as it would on zeros.
            if has and param.grad is None:
                param.grad = no_gradient(param)


def _check_overlap(params: Sequence[Tensor]) -> None:
    """Checks that gradients are final, and readable, when FSDP calls a parameter's hook.

    Raises:
        NotImplementedError: If they are not.
    """
    if not all(map(held_in_parts, params)):
        raise NotImplementedError(
            "overlap=True does not go with parameters of which a replica's ranks hold copies: "
            "their gradients are averaged in the step; shard them all, or leave overlap out"
        )
    # Some versions of torch call the hook before the copy from the GPU has arrived.
    if any(param.is_pinned() for param in params):
        raise NotImplementedError(
            "overlap=True does not go with gradients that FSDP copies to pinned memory, which may "
            "still be on their way when votes leave: pass CPUOffloadPolicy(pin_memory=False), or "
            "leave overlap out"
        )
