"""The messages of a step where a node votes as one, and which momentum each of its ranks keeps."""

from __future__ import annotations

from hf_dlion.codec import codec_for
from hf_dlion.codec.layout import MessageLayout, shards_of
from hf_dlion.exchange import Wire
from hf_dlion.exchange.node import NodeExchange, RowEdges, choose_node_exchange
from hf_dlion.momentum.shares import Range
from hf_dlion.options import Options
from hf_dlion.options.treatment import Treatment
from hf_dlion.ranks.header import digest
from hf_dlion.ranks.node import Node
from hf_dlion.step.message import Message
from hf_dlion.step.node_messages import AloneMessage, NodeMessage, Params
from hf_dlion.step.plan import VOTES_ONLY, Plan, ReadyOrder, split_in_order, split_into_messages


class NodePlan(Plan):
    """The messages of a node's ranks, kept until the trainable parameters change.

    Attributes:
        alone: Where there is one node only, instead of `messages`.
    """

    def __init__(
        self,
        params: Params,
        wire: Wire,
        options: Options,
        node: Node,
        order: ReadyOrder | None = None,
        treatment: Treatment = VOTES_ONLY,
    ) -> None:
        """Checks the parameters and makes the messages.

        Args:
            params: Pairs of parameter index and parameter, those with requires_grad.
            wire: The process group.
            options: Give the exchange and what it carries.
            node: Who shares the work.
            order: How the messages of an exchange during backward are cut, and where they travel.
            treatment: Whose momenta are averaged now and then.

        Raises:
            NotImplementedError: If a parameter is sharded.
            TypeError: If one is not dense or not floating.
        """
        self._take_params(params, wire, treatment)
        nodes, size = node.peers.world_size, node.local.world_size
        self.ordered, self.bits = order is not None, options.bits
        peers, down, inside = node.peers, node.peers, node.local
        groups = split_into_messages(params, wire.world_size)
        if order is not None:
            assert order.inside is not None, "a node's ranks have a group for cut rows"
            (peers, down), inside = order.wires, order.inside
            groups = split_in_order(params, order, wire.world_size)
        layouts = [MessageLayout.of([(i, p.shape) for i, p in group]) for group in groups]
        name = choose_node_exchange(layouts, nodes, size, options)
        split = [[index for index, _ in group] for group in groups]
        kinds = [(index, tuple(p.shape), str(p.dtype)) for index, p in params]
        self.layout = digest((kinds, split, name, node.members, treatment.plain()))
        self.messages: list[Message] = []
        self.alone: list[AloneMessage] = []
        owners: list[dict[int, Range]] = [
            {index: (0, 0) for index, _ in params} for _ in range(size)
        ]
        self.owners, self.owned = owners, owners[node.local.rank]
        for group, layout in zip(groups, layouts, strict=True):
            device = group[0][1].device
            codec, shards = codec_for(device), shards_of(layout, size)
            parts = [layout.part(shard) for shard in shards]
            for owned, part in zip(owners, parts, strict=True):
                owned.update({slot.index: (slot.start, slot.stop) for slot in part.slots})
            if nodes == 1:
                self.alone.append(AloneMessage(group, parts, node.local, codec))
                continue
            exchange = NodeExchange(name, layout, peers, node.local, device, options, down)
            edges = RowEdges(layout, shards, inside, device)
            self.messages.append(NodeMessage(group, layout, exchange, codec, edges, self.bits))


def make_plan(
    params: Params,
    wire: Wire | None,
    options: Options,
    node: Node | None,
    order: ReadyOrder | None = None,
    treatment: Treatment = VOTES_ONLY,
) -> Plan:
    """Returns the messages of a set of trainable parameters; arguments as for `NodePlan`.

    Raises:
        NotImplementedError: If a parameter is sharded.
        TypeError: If one is not dense or not floating.
    """
    if node is None or wire is None:
        return Plan(params, wire, options, order, treatment)
    return NodePlan(params, wire, options, node, order, treatment)
