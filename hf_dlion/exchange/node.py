"""One vote per node: each of its ranks exchanges and counts a shard of the words for all."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.codec import codec_for
from hf_dlion.codec.edges import Ends
from hf_dlion.codec.layout import MessageLayout, Shard, shards_of
from hf_dlion.codec.rule import MessageVerdict, StepRule, verdict_planes
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
    Every rank of all nodes must call the methods in this order.
    """

    rounds = 3
    waits = False
    # Rows that the shards cut are completed where all votes of a wave lie.
    votes: Tensor | None = None

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
                then be called on another thread than `leave`.
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
        self._nothing = MessageVerdict(
            torch.empty((planes[0], 1, 0), dtype=torch.int64, device=device),
            torch.empty(0, dtype=torch.int32, device=device),
            torch.zeros(2, dtype=torch.int64, device=device),
        )
        tally = codec_for(device).tally(segments, device)
        # Zeros, because the ends of short shards are sent without ever being written.
        found = torch.zeros(segments.verdict_words, dtype=torch.int64, device=device)
        verdicts = found.new_empty((local.world_size, segments.verdict_words))
        self._gather = VerdictGather(segments, tally, local, found, verdicts)

    def start(self, words: Tensor | None, active: Tensor) -> None:
        """Takes the votes on this rank's shard: words int64, active bool; as `Exchange.start`."""
        if self._inner is not None:
            self._inner.start(words, active)

    def leave(self) -> None:
        """See `Exchange.leave`."""
        if self._inner is not None:
            self._inner.leave()

    def count(self, rule: StepRule) -> None:
        """Waits for the other nodes' votes on the shard and counts them."""
        if self._inner is not None:
            self._inner.count(rule)

    def verdict(self) -> MessageVerdict:
        """See `Exchange.verdict`."""
        found = self._nothing
        if self._inner is not None:
            found = self._inner.verdict()
        self._gather.send(found)
        return self._gather.verdict()

    def rehearse(self, words: Tensor | None, active: Tensor, rule: StepRule) -> MessageVerdict:
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
    """Makes the votes on rows that the shards of some messages cut those of whole rows.

    Each rank tells the others of its node whether the first and the last row of its shards vote
    (`hf_dlion.codec.edges`), of all messages at once. Bytes inside the node, per rank: 2 * (L - 1)
    for each message of which a row is cut.
    """

    def __init__(
        self,
        layouts: Sequence[MessageLayout],
        wire: Wire,
        words: Tensor,
        active: Tensor,
        bits: int = 1,
    ) -> None:
        """Finds the rows that are cut.

        Args:
            layouts: The messages, all on one device.
            wire: The ranks of the node.
            words: int64: where this rank's votes on its shards will lie, one after another.
            active: bool: where its rows will.
            bits: Of a vote.
        """
        self._wire, self._words, self._active = wire, words, active
        size = wire.world_size
        ends = ends_of(layouts, size, wire.rank, bits)
        told = 2 * sum(bool(cut_rows(shards_of(layout, size))) for layout in layouts)
        device = words.device
        sent_from = wire.device_for(device)
        # Zeros, because of a short message the last ranks have nothing to tell.
        self._told = torch.zeros(told, dtype=torch.uint8, device=sent_from)
        self._heard = torch.empty((size, told), dtype=torch.uint8, device=sent_from)
        self._edges = codec_for(device).edges(ends, device) if ends else None

    @staticmethod
    def wire_bytes(shards: Sequence[Shard]) -> int:
        """Returns the bytes that a rank sends inside its node for one message."""
        return 2 * (len(shards) - 1) * bool(cut_rows(shards))

    def rehearse(self, rule: StepRule) -> None:
        """Calls all that `complete` calls of the codec, and sends nothing."""
        if self._edges is not None:
            self._edges.tell(self._active, self._told)
            self._edges.hear(self._words, self._active, self._heard, rule)

    def complete(self, rule: StepRule) -> None:
        """Makes the votes on cut rows those of whole rows; the node's ranks all call this.

        The votes are there: 0 where this rank's part of a row is zero everywhere, and of a cut row
        it is active if that part votes.
        """
        if not self._told.numel():
            return
        if self._edges is not None:
            self._edges.tell(self._active, self._told)
        self._wire.all_gather(self._heard, self._told, "votes on rows that are cut").wait()
        if self._edges is not None:
            self._edges.hear(self._words, self._active, self._heard, rule)


def cut_rows(shards: Sequence[Shard]) -> dict[int, list[tuple[int, int]]]:
    """Returns, for each row of a message at an end of a shard, the rank and end (0, 1) of all such.

    Nothing, if no row lies in two shards.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for rank, shard in enumerate(shards):
        if shard.rows:
            found.setdefault(shard.first_row, []).append((rank, 0))
            found.setdefault(shard.first_row + shard.rows - 1, []).append((rank, 1))
    cut = any(len({rank for rank, _ in ends}) > 1 for ends in found.values())
    return found if cut else {}


def ends_of(layouts: Sequence[MessageLayout], size: int, rank: int, bits: int) -> list[Ends]:
    """Returns the ends of a rank's shards of those messages of which a row is cut.

    Args:
        layouts: The messages, whose votes and rows lie one after another.
        size: Ranks of the node.
        rank: Of the node.
        bits: Of a vote.
    """
    shards = [shards_of(layout, size) for layout in layouts]
    told = 2 * sum(bool(cut_rows(of_message)) for of_message in shards)
    found = []
    word = row = place = 0
    for of_message in shards:
        mine, sharing = of_message[rank], cut_rows(of_message)
        if sharing and mine.rows:
            first, last = (
                [other * told + place + end for other, end in sharing[at]]
                for at in (mine.first_row, mine.first_row + mine.rows - 1)
            )
            found.append(Ends(mine, bits, word, row, place, rank * told + place, (first, last)))
        word, row = word + bits * mine.words, row + mine.rows
        place += 2 * bool(sharing)
    return found
