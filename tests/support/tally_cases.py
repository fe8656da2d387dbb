"""What the tests of tallies share: ballots, and an exchange of segments without a wire."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dlion.codec.bits import pack_bits
from hf_dlion.codec.layout import MessageLayout, Shard
from hf_dlion.codec.reference import levels as reference_levels
from hf_dlion.codec.reference import votes as reference
from hf_dlion.codec.rule import MessageVerdict, StepRule, Verdict
from hf_dlion.codec.tally import Segments, Tally

CPU = torch.device("cpu")


def ballots_of(
    shapes: list[tuple[int, ...]], world_size: int, seed: int, absent_share: float, bits: Any
) -> list[tuple[Tensor, Tensor]]:
    """Returns every rank's words and activity, with some rows that abstain."""
    pack = partial(reference_levels.pack_levels, bits=bits) if bits > 1 else reference.pack_signs
    random, found = np.random.default_rng(seed), []
    for rank in range(world_size):
        parts = []
        for shape in shapes:
            u = random.integers(-1, 2, shape) * 1.0
            u *= random.random((shape[0],) + (1,) * (len(shape) - 1)) >= absent_share
            parts.append(pack(u, t=4, rank=rank, world_size=world_size))
        words = np.concatenate([words for words, _ in parts]).view(np.int64)
        rows = np.concatenate([active for _, active in parts])
        found.append((torch.from_numpy(words), torch.from_numpy(rows)))
    return found


def within(planes: Tensor, shard: Shard) -> Tensor:
    """Planes without what lies past a tensor's end, which is nobody's business."""
    held = torch.zeros(shard.words, dtype=torch.int64)
    for part in shard.runs:
        flags = torch.ones(part.numel, dtype=torch.bool)
        held[part.word : part.word + part.words] = pack_bits(flags)
    return planes & held.to(planes.device)


def exchanged(
    codec: Any,
    layout: MessageLayout,
    count: int,
    planes: tuple[int, int],
    ballots: list[tuple[Tensor, Tensor]],
    step: StepRule,
    elsewhere: bool,
    device: torch.device = CPU,
) -> list[Tensor]:
    """Does what an exchange of `count` segments does; returns all that could differ.

    Args:
        codec: Of `device`.
        layout: The message.
        count: How many segments.
        planes: Bits per parameter and per row of a verdict.
        ballots: Every rank's words and activity.
        step: The step's constants.
        elsewhere: Whether planes are counted outside the segment that they travel in, and come in
            segments.
        device: Where all of it is done.
    """
    ranks, found, tallies = len(ballots), [], []
    for place in range(count):
        segments = Segments.of(layout, count, place, step.bits, planes, ranks)
        tallies.append((segments, codec.tally(segments, device)))
    sent = torch.zeros((ranks, count, segments.vote_words), dtype=torch.int64, device=device)
    for rank, (words, active) in enumerate(ballots):
        for _, tally in tallies:
            tally.pack(words.to(device), active.to(device), sent[rank])
    again = sent[0].clone()
    segments.votes_in(again).bitwise_not_()
    tallies[0][1].pack(None, ballots[0][1].to(device), again)
    # Words that lie in their places are left alone.
    segments.votes_in(again).bitwise_not_()
    assert torch.equal(again, sent[0])
    found.append(sent)
    told = torch.zeros((count, segments.verdict_words), dtype=torch.int64, device=device)
    for place, (segments, tally) in enumerate(tallies):
        counted(tally, segments, sent[:, place].contiguous(), step, told[place], elsewhere, found)
    whole = tallies[0][1].unpack_verdict(told)
    joined = Verdict(whole.planes.flatten(1)[:, : layout.words], whole.counts, whole.sums)
    return [*found, *of(joined, layout.shard(0, layout.words)), told]


def counted(
    tally: Tally,
    segments: Segments,
    received: Tensor,
    step: StepRule,
    told: Tensor,
    elsewhere: bool,
    found: list[Tensor],
) -> None:
    shard = segments.shard
    size, planes = segments.words, segments.planes[0]
    out = None if elsewhere else told[: planes * size].view(planes, size)[:, : shard.words]
    verdict = tally.count(received, step, out)
    verdict.planes.copy_(within(verdict.planes, shard))
    found += of(verdict, shard)
    if step.bits == planes == len(segments.shards) == 1:
        # As gather does: the verdict takes the place of one rank's votes. Sums begin with a pack.
        active = torch.ones(segments.layout.rows, dtype=torch.bool, device=told.device)
        tally.pack(None, active, received[:1].clone())
        found += of(tally.count(received, step, segments.votes_in(received)[1:2]), shard)
    if not elsewhere:
        tally.pack_verdict(verdict, told)
        return
    pieces = 3
    length = -(-shard.words // pieces)
    padded = torch.nn.functional.pad(verdict.planes, (0, pieces * length - shard.words), value=-1)
    # As received: the planes of a segment lie together.
    parts = padded.view(planes, pieces, length).transpose(0, 1).contiguous().transpose(0, 1)
    tally.pack_verdict(MessageVerdict(parts, verdict.counts, verdict.sums), told)


def of(verdict: Verdict, shard: Shard) -> list[Tensor]:
    return [part.clone() for part in (within(verdict.planes, shard), verdict.counts, verdict.sums)]
