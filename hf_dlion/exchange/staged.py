"""Votes on a device from which the group cannot send: they travel through the host's memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_dlion.codec.layout import MessageLayout
from hf_dlion.codec.rule import MessageVerdict, StepRule

if TYPE_CHECKING:
    from hf_dlion.exchange.exchange import Exchange


class Staged:
    """Exchanges one message of a GPU over a group that sends from the CPU, as gloo does.

        GPU:  votes -> copy                                      copy -> verdict
        CPU:               pack -> the other exchange -> unpack

    On CUDA the copies take page-locked memory, 0.125 bytes per parameter and bit of a vote, and the
    host waits for the device once per message: in `leave`, before it packs what was copied.
    """

    votes: Tensor | None = None
    waits = True

    def __init__(
        self, inner: Exchange, own: MessageLayout, words: int, bits: int, device: torch.device
    ) -> None:
        """Makes the buffers.

        Args:
            inner: Exchanges the votes, on the CPU.
            own: What this rank votes on.
            words: Of the verdict.
            bits: Of a vote.
            device: Where the votes are made and the verdict is wanted.
        """
        self._inner, self._device = inner, device
        memory = host_memory(max(bits * own.words, words), torch.int64, device)
        self._words, self._verdict = memory[: bits * own.words], memory[:words]
        self._active = host_memory(own.rows, torch.bool, device)
        self._copied: Callable[[], object] | None = None
        self.rounds, self.bytes_per_rank = inner.rounds, inner.bytes_per_rank

    def start(self, words: Tensor | None, active: Tensor) -> None:
        """See `Exchange.start`."""
        assert words is not None, "votes of a device are not made on the CPU"
        self._words.copy_(words, non_blocking=True)
        self._active.copy_(active, non_blocking=True)
        self._copied = reached(self._device)

    def leave(self) -> None:
        """Waits until the votes are copied, and sends them; see `Exchange.leave`."""
        assert self._copied is not None, "leave() follows start()"
        self._copied()
        self._copied = None
        self._inner.start(self._words, self._active)
        self._inner.leave()

    def count(self, rule: StepRule) -> None:
        """See `Exchange.count`."""
        self._inner.count(rule)

    def verdict(self) -> MessageVerdict:
        """See `Exchange.verdict`; the sums stay, since nobody has asked for them yet."""
        return self._on_device(self._inner.verdict())

    def rehearse(self, words: Tensor | None, active: Tensor, rule: StepRule) -> MessageVerdict:
        """See `Exchange.rehearse`."""
        return self._on_device(self._inner.rehearse(self._words, self._active, rule))

    def _on_device(self, found: MessageVerdict) -> MessageVerdict:
        planes = found.planes
        if planes.shape[0] == 1:
            # The last votes were copied from here when they left, and the next ones come on the
            # stream of this copy, so after it.
            parts = torch.split(self._verdict, max(1, planes.shape[2]))
            for part, own in zip(parts, planes[0], strict=False):
                part.copy_(own[: len(part)])
            planes = self._verdict.to(self._device, non_blocking=True).view(1, 1, -1)
        # From other memory a copy is over, or kept aside, when the call returns.
        counts = found.counts.to(self._device, non_blocking=True)
        return MessageVerdict(planes.to(self._device), counts, found.sums)


def host_memory(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns memory of the CPU, shape (count,), that is copied to and from a device unwaited."""
    return torch.empty(count, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def reached(device: torch.device) -> Callable[[], object]:
    """Returns what waits for all that the current stream of a device was asked for so far."""
    if device.type == "cuda":
        # Without spinning: on another thread it would take the processor from the loop's.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))

        def wait() -> None:
            # A fresh thread would take to the first GPU.
            with torch.cuda.device(device):
                event.synchronize()

        return wait
    return functools.partial(_wait_for, device)


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
