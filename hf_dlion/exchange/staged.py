"""Votes on a device from which the group cannot send: they travel through the host's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_dlion.codec.layout import MessageLayout
from hf_dlion.codec.rule import StepRule, Verdict

if TYPE_CHECKING:
    from hf_dlion.exchange.exchange import Exchange


class Staged:
    """Exchanges one message of a GPU over a group that sends from the CPU, as gloo does.

        GPU:  votes -> copy                                      copy -> verdict
        CPU:               pack -> the other exchange -> unpack

    On CUDA the copies take page-locked memory, 0.125 bytes per parameter and bit of a vote, and the
    host waits for the device once per message: in `start`, before it packs what was copied.
    """

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
        self._words, self._free = memory[: bits * own.words], memory[:words]
        self._active = host_memory(own.rows, torch.bool, device)
        self.rounds, self.bytes_per_rank = inner.rounds, inner.bytes_per_rank

    def start(self, words: Tensor, active: Tensor) -> None:
        """See `Exchange.start`."""
        self._words.copy_(words, non_blocking=True)
        self._active.copy_(active, non_blocking=True)
        wait_for(self._device)
        self._inner.start(self._words, self._active)

    def count(self, rule: StepRule) -> None:
        """See `Exchange.count`."""
        self._inner.count(rule)

    def verdict(self, free: Tensor) -> Verdict:
        """See `Exchange.verdict`; the sums stay, since nobody has asked for them yet."""
        return self._copied(self._inner.verdict(self._free), free)

    def rehearse(self, words: Tensor, active: Tensor, rule: StepRule) -> Verdict:
        """See `Exchange.rehearse`."""
        free = torch.empty(self._free.shape, dtype=torch.int64, device=self._device)
        return self._copied(self._inner.rehearse(self._words, self._active, rule), free)

    def _copied(self, found: Verdict, free: Tensor) -> Verdict:
        planes = found.planes
        if planes.shape[0] == 1:
            # The next votes come to this memory after a wait for the device, so after this copy.
            planes = free[: planes.shape[1]].view(1, -1).copy_(planes, non_blocking=True)
        # From other memory a copy is over, or kept aside, when the call returns.
        counts = found.counts.to(self._device, non_blocking=True)
        return Verdict(planes.to(self._device), counts, found.sums)


def host_memory(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns memory of the CPU, shape (count,), that is copied to and from a device unwaited."""
    return torch.empty(count, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")


def wait_for(device: torch.device) -> None:
    """Waits for all that the current stream of a device was asked for."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)
