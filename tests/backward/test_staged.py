"""A GPU's votes over gloo, here the CPU's: with overlap backward does not wait for copies."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from hf_dlion.backward.background import Background
from hf_dlion.backward.flight import _leave
from hf_dlion.exchange import make_exchange, staged
from hf_dlion.exchange.staged import Staged
from hf_dlion.step.voters import every_rank
from tests.support.ddp_training import new_model, optimizer_of
from tests.support.spawn import RankPools
from tests.support.zoo import short_messages


def staged_exchange(
    name: str, layout: Any, wire: Any, device: torch.device, options: Any, down: Any
) -> Staged:
    """As `make_exchange` for a device from which the group cannot send."""
    inner = make_exchange(name, layout, wire, device, options, down)
    return Staged(inner, layout, layout.words, options.bits, device)


def trained(
    rank: int, world_size: int, options: dict[str, Any], copied_late: bool
) -> tuple[list[Tensor], int, list[int]]:
    """Trains; returns the weights, how often votes left early, and how many in each step.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        options: Of the optimizer.
        copied_late: Whether votes are staged, and no copy is there before backward is over.
    """
    model = new_model()
    optimizer = optimizer_of(model, **options)
    over, early = threading.Event(), []

    def reached(device: torch.device) -> Callable[[], None]:
        def wait() -> None:
            if not over.wait(20):
                raise TimeoutError("backward waits for a copy")

        return wait

    with pytest.MonkeyPatch.context() as patch, short_messages():
        if copied_late:
            patch.setattr(every_rank, "make_exchange", staged_exchange)
            patch.setattr(staged, "reached", reached)
        for t in range(5):
            over.clear()
            generator = torch.Generator().manual_seed(9 * rank + t)
            optimizer.zero_grad()
            model(torch.randint(0, 11, (3, 5), generator=generator)).backward()
            over.set()
            optimizer.step()
            early.append(optimizer.wire.sent_in_backward)
    weights = [param.detach().clone() for param in model.parameters()]
    return weights, optimizer.wire.overlapped, early


@pytest.mark.multiproc
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"exchange": "gather"},
        {"exchange": "two_phase"},
        {"exchange": "two_phase", "ties": "zero"},
        {"exchange": "two_phase", "bits": 4},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_backward_does_not_wait_for_copies_of_votes(
    ranks: RankPools, options: dict[str, Any], overlap: bool
) -> None:
    expected = ranks(3).run(trained, options, False)
    found = ranks(3).run(trained, {**options, "overlap": overlap}, True)
    for (weights, overlapped, early), (plain, *_) in zip(found, expected, strict=True):
        assert all(map(torch.equal, weights, plain))
        assert overlapped == (4 if overlap else 0)
        assert min(early[1:]) >= (3 if overlap else 0), early


class Vote:
    """A message that leaves, or cannot."""

    def __init__(self, gone: list[int], number: int) -> None:
        self._gone, self._number = gone, number

    def leave(self) -> None:
        """Leaves, but for the second."""
        if self._number == 1:
            raise RuntimeError("the device is lost")
        self._gone.append(self._number)


def test_nothing_leaves_after_votes_that_could_not() -> None:
    sender, gone, departures = Background("test"), list[int](), list[Any]()
    for number in range(4):
        message = cast(Any, Vote(gone, number))
        departures.append(sender.submit(functools.partial(_leave, message, departures[-1:])))
    assert departures[0].result(10) is None
    for departure in departures[1:]:
        with pytest.raises(RuntimeError, match="the device is lost"):
            departure.result(10)
    assert gone == [0]
