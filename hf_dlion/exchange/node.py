"""One vote per node: each of its ranks exchanges and counts a shard of the words for all."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.codec import codec_for
from hf_dlion.codec.bits import pack_bits
from hf_dlion.codec.layout import WORD_BITS, MessageLayout, Run, Shard, shards_of
from hf_dlion.codec.levels import pack_codes, zero_codes
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
            device: Where the votes are made and the verdict is wanted.
            options: Give what a vote and a verdict hold.
            down: Another process group of the peers for a second round between nodes: `count` may
                then be called on another thread than `start`.
        """
        planes = verdict_planes(options.aggregation, options.ties, peers.world_size)
        segments = Segments.of(
            layout, local.world_size, local.rank, options.bits, planes, peers.world_size
        )
        self.own = layout.part(segments.shard)
        self._device, self._place = device, local.device_for(device)
        # Of a short message the last ranks own nothing: on all nodes alike.
        self._inner: Exchange | None = None
        if self.own.words:
            self._inner = make_exchange(name, self.own, peers, device, options, down)
        self.bytes_per_rank = 0 if self._inner is None else self._inner.bytes_per_rank
        self._nothing = Verdict(
            torch.empty((planes[0], 0), dtype=torch.int64, device=self._place),
            torch.empty(0, dtype=torch.int32, device=self._place),
            torch.zeros(2, dtype=torch.int64, device=self._place),
        )
        tally = codec_for(self._place).tally(segments, self._place)
        self._gather = VerdictGather(segments, tally, local, self._place)

    def start(self, words: Tensor, active: Tensor) -> None:
        """Sends the votes on this rank's shard: words int64, active bool; as `Exchange.start`."""
        if self._inner is not None:
            self._inner.start(words, active)

    def count(self, rule: StepRule) -> None:
        """Waits for the other nodes' votes on the shard and counts them."""
        if self._inner is not None:
            self._inner.count(rule)

    def verdict(self) -> Verdict:
        """Returns the verdict on the whole message, on the message's device."""
        found = self._nothing if self._inner is None else self._inner.verdict()
        self._gather.start(found.to(self._place))
        return self._gather.verdict().to(self._device)


def choose_node_exchange(
    layouts: Sequence[MessageLayout], nodes: int, local_size: int, options: Options
) -> str:
    """Returns the strategy between nodes: "auto" takes the one with fewer bytes from a node."""
    shards = [layout.part(s) for layout in layouts for s in shards_of(layout, local_size)]
    return choose_exchange([shard for shard in shards if shard.words], nodes, options)


class RowEdges:
    """The activity of the rows that lie in several shards of a message.

    A row abstains only if its direction is zero everywhere (rule S3), and of a row that is cut a
    rank sees a part. So each rank tells the others of its node whether the first and the last row
    of its shard vote. Where a row votes in another shard only, the zeros of the part in this one
    vote by their rule. Bytes inside the node, per rank: 2 * (L - 1); none if no row is cut.
    """

    def __init__(
        self, layout: MessageLayout, shards: Sequence[Shard], wire: Wire, device: torch.device
    ) -> None:
        """Finds the rows that are cut.

        Args:
            layout: The message.
            shards: One per rank of the node.
            wire: The ranks of the node.
            device: Where the votes are made.
        """
        self._wire, self._place = wire, wire.device_for(device)
        self._mine = shards[wire.rank]
        # Row of the message -> the ends, numbered 2 * rank (+ 1), that lie in it.
        ends: dict[int, list[int]] = {}
        for rank, shard in enumerate(shards):
            if shard.rows:
                ends.setdefault(shard.first_row, []).append(2 * rank)
                ends.setdefault(shard.first_row + shard.rows - 1, []).append(2 * rank + 1)
        self._cut = any(len({end // 2 for end in sharing}) > 1 for sharing in ends.values())
        self._sharing = [
            ends[row]
            for row in (self._mine.first_row, self._mine.first_row + self._mine.rows - 1)
            if self._mine.rows
        ]

    @staticmethod
    def wire_bytes(shards: Sequence[Shard]) -> int:
        """Returns the bytes that a rank sends inside its node for one message."""
        filled = [shard for shard in shards if shard.rows]
        touching = itertools.pairwise(filled)
        cut = any(a.first_row + a.rows > b.first_row for a, b in touching)
        return 2 * (len(shards) - 1) * cut

    def complete(self, words: Tensor, active: Tensor, rule: StepRule) -> None:
        """Makes the votes of cut rows those of whole rows, in place; the node's ranks all call it.

        Args:
            words: int64, this rank's votes; 0 where its part of a row is zero everywhere.
            active: bool, the rows of this rank's shard; of a cut row, whether its part votes.
            rule: The step's constants.
        """
        if not self._cut:
            return
        ends = torch.zeros(2, dtype=torch.uint8, device=self._place)
        if self._mine.rows:
            ends.copy_(active[[0, -1]])
        everyone = torch.empty((self._wire.world_size, 2), dtype=torch.uint8, device=self._place)
        self._wire.all_gather(everyone, ends, "votes on rows that are cut").wait()
        if not self._mine.rows:
            return
        whole = everyone.view(-1)
        woken = torch.zeros_like(active)
        for row, sharing in zip((0, -1), self._sharing, strict=True):
            woken[row] = whole[sharing].any().to(active.device) & ~active[row]
        bits = rule.bits
        for row, run in ((0, self._mine.runs[0]), (-1, self._mine.runs[-1])):
            if bool(woken[row]):
                own = words[bits * run.word : bits * (run.word + run.words)]
                _vote_zeros(own, run, run.first_row + row % run.rows, rule)
        active |= woken


def _vote_zeros(words: Tensor, run: Run, row: int, rule: StepRule) -> None:
    """Makes the votes on a row of a stretch, where all directions are 0, those of a row that votes.

    Args:
        words: int64, shape (bits * run.words,), changed in place; 0 for the elements of the row.
        run: The stretch.
        row: Row of the parameter.
        rule: The step's constants.
    """
    begin = max(run.start, row * run.row_numel) - run.start
    end = min(run.stop, (row + 1) * run.row_numel) - run.start
    first, last = begin // WORD_BITS, (end - 1) // WORD_BITS
    by_word, zeros = words.view(run.words, rule.bits), _votes_on_zeros(rule, words.device)
    by_word[first + 1 : last] |= zeros
    element = torch.arange(WORD_BITS, device=words.device)
    for word in {first, last}:
        here = element + WORD_BITS * word
        flags = (here >= begin) & (here < end)
        by_word[word] |= zeros & _mask(flags, rule.bits)


def _votes_on_zeros(rule: StepRule, device: torch.device) -> Tensor:
    """Returns the votes on 64 directions that are 0 in a row that votes, int64 of shape (bits,)."""
    if rule.bits == 1:
        return torch.tensor([rule.zero_word], device=device)
    return zero_codes(rule.bits, rule.zero_phase, device)


def _mask(flags: Tensor, bits: int) -> Tensor:
    """Returns ones in the places of the votes on some of 64 elements, int64 of shape (bits,).

    Args:
        flags: bool, shape (64,).
        bits: Of a vote.
    """
    if bits == 1:
        return pack_bits(flags)
    mask = torch.empty(bits, dtype=torch.int64, device=flags.device)
    pack_codes(flags.to(torch.uint8) * (2**bits - 1), bits, mask)
    return mask
