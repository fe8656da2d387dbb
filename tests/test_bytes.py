"""Real steps send the bytes of the table in docs/rule.md, section 8.

The gradients of the small model below are 11 words in 9 rows: 7 rows of a word, a vector of 3, and
a matrix whose rows aren't whole words.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hf_dlion.optimizer import DistributedLion
from tests.support.spawn import on_ranks
from tests.support.steps import give_gradients

SHAPES = ((7, 64), (130,), (3, 2))
WORDS, ROWS, ELEMENTS = 11, 9, 7 * 64 + 130 + 6


def an_optimizer(**options: Any) -> DistributedLion:
    torch.manual_seed(0)
    return DistributedLion([nn.Parameter(torch.randn(shape)) for shape in SHAPES], **options)


def sent_in(optimizer: DistributedLion, steps: int, rank: int) -> Iterator[int]:
    """Takes steps, and yields the bytes of each."""
    for step in range(steps):
        give_gradients([p for group in optimizer.param_groups for p in group["params"]], step, rank)
        optimizer.step()
        yield optimizer.wire.last_bytes_sent


def sent_to_nodes(optimizer: DistributedLion, steps: int, rank: int) -> Iterator[tuple[int, int]]:
    """Takes steps, and yields the bytes to other nodes, and those inside the node."""
    # As if a hook had averaged the gradients in the node.
    optimizer.guards.check = lambda *_: None  # type: ignore[method-assign]
    for sent in sent_in(optimizer, steps, rank // 2):
        yield sent, optimizer.wire.last_node_bytes_sent


def plus(first: Iterable[int], second: Iterable[int]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip(first, second, strict=True))


def message(ranks: int, words: int, bits: int = 1, planes: int = 1) -> int:
    """The cheaper of gather and two_phase."""
    gather = math.ceil(ROWS / 64) + bits * words
    two_phase = math.ceil(ROWS / 64) + (bits + planes) * math.ceil(words / ranks)
    return 8 * (ranks - 1) * min(gather, two_phase)


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_a_step_sends_a_header_and_votes_and_some_compare_replicas(rank: int, ranks: int) -> None:
    optimizer, others = an_optimizer(check_replicas_every=50), ranks - 1
    sent = list(sent_in(optimizer, 130, rank))
    expected = [64 * others + message(ranks, WORDS)] * 130
    expected[0] += (16 + 32) * others  # names and values; gradients
    for step in (50, 100):
        expected[step - 1] += 16 * others
    for step in (64, 128):
        expected[step - 1] += 32 * others
    assert sent == expected


@on_ranks(3)
def test_a_step_after_a_load_without_load_momentum_compares_momenta(rank: int) -> None:
    optimizer = an_optimizer()
    _, usual = sent_in(optimizer, 2, rank)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    compared = 16 + 32 + 16  # names and values; gradients; momenta
    assert list(sent_in(optimizer, 2, rank)) == [usual + compared * 2, usual]


@pytest.mark.parametrize("ranks", [2, 3])
@on_ranks("ranks")
def test_an_exchange_sends_amounts_a_hash_and_displacements(rank: int, ranks: int) -> None:
    """Its 4 bits per weight are summed over ranks, so a sum of 15 per rank comes back."""
    optimizer, others = an_optimizer(vote_every=3), ranks - 1
    sent = list(sent_in(optimizer, 7, rank))
    first = (64 + 16 + 32) * others
    planes = (15 * ranks).bit_length()
    exchange = (64 + 8 * (len(SHAPES) + 1)) * others + message(ranks, WORDS, 4, planes)
    assert sent == [first, 0, exchange, 0, 0, exchange, 0]


@pytest.mark.parametrize("every", [1, 4])
@on_ranks(3)
def test_averaged_momenta_are_a_slice_in_each_step(rank: int, every: int) -> None:
    optimizer = an_optimizer(momentum_sync_every=every)
    _, *sent = sent_in(optimizer, 9, rank)
    cuts = [ELEMENTS * k // every for k in range(every + 1)]
    sizes = [stop - start for start, stop in itertools.pairwise(cuts)]
    usual = 64 * 2 + message(3, WORDS)
    assert sorted(sent[:every]) == sorted(usual + 4 * 2 * math.ceil(size / 3) for size in sizes)


class Norm(nn.Module):
    """Has the same parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList([torch.randn(shape) for shape in SHAPES])

    def forward(self, scale: float) -> torch.Tensor:
        return sum((scale * p).square().sum() for p in self.parts)


@pytest.mark.parametrize("every", [1, 3])
@on_ranks(4)
def test_nodes_send_votes_to_other_nodes_and_share_verdicts(rank: int, every: int) -> None:
    optimizer = an_optimizer(local_group=2, vote_every=every)
    half = math.ceil(WORDS / 2)  # of the first rank of each node, and a word less of the second
    sent = list(sent_to_nodes(optimizer, 65, rank))
    # Two headers and hashes of names and values, all of which count as sent to other nodes until
    # ranks know their nodes; then hashes of gradients.
    first = ((64 + 64 + 16) * 3 + 32 + 8 * 2, 8)
    if every == 1:
        votes = (message(2, half), 8 * half)
        usual = plus(votes, (64 * 2, 64))
        expected = [usual] * 65
        expected[0] = plus(votes, first)
        expected[63] = plus(usual, (32 + 8 * 2, 8))
    else:
        planes, amounts = (15 * 2).bit_length(), 8 * (len(SHAPES) + 2)
        votes = (message(2, half, 4, planes), 8 * planes * half)
        exchange = plus(votes, ((64 + amounts) * 2, 24 + 64 + amounts))
        expected = ([(0, 24), (0, 24), exchange] * 22)[:65]
        expected[0] = first
    assert rank % 2 or sent == expected
