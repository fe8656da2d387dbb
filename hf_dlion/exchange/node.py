"""One vote per node: each of its ranks exchanges and counts a shard of the words for all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.codec import codec_for
from hf_dlion.codec.edges import Edges, Ends
from hf_dlion.codec.layout import MessageLayout, Shard, shards_of
from hf_dlion.codec.rule import StepRule, Verdict, verdict_planes
from hf_dlion.codec.tally import Segments
from hf_dlion.exchange.exchange import Exchange, choose_exchange, make_exchange
from hf_dlion.exchange.verdict_gather import VerdictGather
from hf_dlion.exchange.wire import Wire
from hf_dlion.options import Options


class NodeExchange:
    """Exchanges one message between nodes, by shards: node 0 has ranks a and b, node 1 c and d.

        rank a: its node's votes v0     ->  v0 w0 (with c)  ->  verdict x0  ->  x0 x1 (with b)
        rank b: its node's votes    v1  ->  v1 w1 (with d)  ->  verdict x1  ->  x0 x1 (with a)

    A shard is ceil(W / L) words of the message; it travels among the ranks that own the same shard
    on the M nodes by one of the other strategies. To other nodes a rank sends that strategy's
    bytes for its shard and M ranks; inside the node those of `VerdictGather` for L ranks.
    Every rank of all nodes must call the three methods in this order.
    """

    rounds = 3

    def __init__(
        self,
        name: str,
        layout: MessageLayout,
        peers: Wire,
        local: Wire,
        device: torch.device,
        options: Options,
        down: Wire | None = None,
    ) -> None:
        """Makes the buffers.

        Args:
            name: Of the strategy between the nodes.
            layout: The message.
            peers: The ranks that own the same shard, one on each node.
            local: The ranks of this node.
            device: Where the votes are made and the verdict is wanted; both wires can send from it.
            options: Give what a vote and a verdict hold.
            down: Another process group of the peers for a second round between nodes: `count` may
                then be called on another thread than `start`.
        """
        planes = verdict_planes(options.aggregation, options.ties, peers.world_size)
        segments = Segments.of(
            layout, local.world_size, local.rank, options.bits, planes, peers.world_size
        )
        self.own = layout.part(segments.shard)
        # Of a short message the last ranks own nothing: on all nodes alike.
        self._inner: Exchange | None = None
        if self.own.words:
            self._inner = make_exchange(name, self.own, peers, device, options, down)
        self.bytes_per_rank = 0 if self._inner is None else self._inner.bytes_per_rank
        self._nothing = Verdict(
            torch.empty((planes[0], 0), dtype=torch.int64, device=device),
            torch.empty(0, dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int64, device=device),
        )
        tally = codec_for(device).tally(segments, device)
        # Zeros, because the ends of short shards are sent without ever being written.
        found = torch.zeros(segments.verdict_words, dtype=torch.int64, device=device)
        verdicts = found.new_empty((local.world_size, segments.verdict_words))
        self._gather = VerdictGather(segments, tally, local, found, verdicts)

    def start(self, words: Tensor, active: Tensor) -> None:
        """Sends the votes on this rank's shard: words int64, active bool; as `Exchange.start`."""
        if self._inner is not None:
            self._inner.start(words, active)

    def count(self, rule: StepRule) -> None:
        """Waits for the other nodes' votes on the shard and counts them."""
        if self._inner is not None:
            self._inner.count(rule)

    def verdict(self, free: Tensor) -> Verdict:
        """See `Exchange.verdict`."""
        found = self._nothing
        if self._inner is not None:
            found = self._inner.verdict(free[: self.own.words])
        self._gather.start(found)
        return self._gather.verdict(free)

    def rehearse(self, words: Tensor, active: Tensor, rule: StepRule) -> Verdict:
        """See `Exchange.rehearse`."""
        found = self._nothing
        if self._inner is not None:
            found = self._inner.rehearse(words, active, rule)
        return self._gather.rehearse(found)


def choose_node_exchange(
    layouts: Sequence[MessageLayout], nodes: int, local_size: int, options: Options
) -> str:
    """Returns the strategy between nodes: "auto" takes the one with fewer bytes from a node."""
    shards = [layout.part(s) for layout in layouts for s in shards_of(layout, local_size)]
    return choose_exchange([shard for shard in shards if shard.words], nodes, options)


class RowEdges:
    """Makes the votes on rows that the shards of a message cut those of whole rows.

    Each rank tells the others of its node whether the first and the last row of its shard vote
    (`hf_dlion.codec.edges`). Bytes inside the node, per rank: 2 * (L - 1); none if no row is cut.
    """

    def __init__(
        self,
        layout: MessageLayout,
        shards: Sequence[Shard],
        wire: Wire,
        device: torch.device,
        bits: int = 1,
    ) -> None:
        """Finds the rows that are cut.

        Args:
            layout: The message.
            shards: One per rank of the node.
            wire: The ranks of the node.
            device: Where the votes are made.
            bits: Of a vote.
        """
        self._wire, mine = wire, shards[wire.rank]
        # Row of the message -> the ends, numbered 2 * rank (+ 1), that lie in it.
        ends: dict[int, list[int]] = {}
        for rank, shard in enumerate(shards):
            if shard.rows:
                ends.setdefault(shard.first_row, []).append(2 * rank)
                ends.setdefault(shard.first_row + shard.rows - 1, []).append(2 * rank + 1)
        self._cut = any(len({end // 2 for end in sharing}) > 1 for sharing in ends.values())
        place = wire.device_for(device)
        self._told = torch.zeros(2, dtype=torch.uint8, device=place)
        self._heard = torch.empty((wire.world_size, 2), dtype=torch.uint8, device=place)
        self._edges: Edges | None = None
        if mine.rows:
            sharing = ends[mine.first_row], ends[mine.first_row + mine.rows - 1]
            self._edges = codec_for(device).edges(Ends(mine, bits, wire.rank, sharing), device)

    @staticmethod
    def wire_bytes(shards: Sequence[Shard]) -> int:
        """Returns the bytes that a rank sends inside its node for one message."""
        filled = [shard for shard in shards if shard.rows]
        touching = itertools.pairwise(filled)
        cut = any(a.first_row + a.rows > b.first_row for a, b in touching)
        return 2 * (len(shards) - 1) * cut

    def rehearse(self, words: Tensor, active: Tensor, rule: StepRule) -> None:
        """Calls all that `complete` calls of the codec, and sends nothing."""
        if self._cut and self._edges is not None:
            self._edges.tell(active, self._told)
            self._edges.hear(words, active, self._heard, rule)

    def complete(self, words: Tensor, active: Tensor, rule: StepRule) -> None:
        """Makes the votes of cut rows those of whole rows, in place; the node's ranks all call it.

        Args:
            words: int64, this rank's votes; 0 where its part of a row is zero everywhere.
            active: bool, the rows of this rank's shard; of a cut row, whether its part votes.
            rule: The step's constants.
        """
        if not self._cut:
            return
        if self._edges is not None:
            self._edges.tell(active, self._told)
        self._wire.all_gather(self._heard, self._told, "votes on rows that are cut").wait()
        if self._edges is not None:
            self._edges.hear(words, active, self._heard, rule)
