"""The CUDA streams of an exchange during backward; on a CPU nothing here does anything.

training   where the loop runs; messages are encoded and sent there
others     autograd delivers a gradient on the stream on which its forward ran; FSDP2 on that which
           reduces it, and a message that leaves makes the loop's stream wait for the reduction
counting   waits for votes and counts them, so that waiting does not hold up backward
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch


class Streams:
    """The streams of one optimizer's exchanges, by device."""

    def __init__(self) -> None:
        """Makes none yet; those for counting are kept, since the allocator has a pool for each."""
        self._training: dict[torch.device, torch.cuda.Stream] = {}
        self._delivered: dict[torch.device, set[torch.cuda.Stream]] = {}
        self._counting: dict[torch.device, torch.cuda.Stream] = {}

    def note_training(self, devices: Iterable[torch.device]) -> None:
        """Takes note that the loop runs on the current streams."""
        for device in devices:
            if device.type == "cuda":
                self._training[device] = torch.cuda.current_stream(device)

    def note_gradient(self, device: torch.device) -> None:
        """Takes note that a gradient was delivered on the current stream."""
        if device.type == "cuda":
            self._delivered.setdefault(device, set()).add(torch.cuda.current_stream(device))

    @contextlib.contextmanager
    def sending(self, device: torch.device) -> Iterator[None]:
        """Runs on the training stream, after all gradients that were noted.

        All messages go through one stream: they take turns in the memory for votes. What the loop
        does to gradients after backward is on it, too, and so comes after they are read.
        """
        if device.type != "cuda":
            yield
            return
        stream = self._training.setdefault(device, torch.cuda.current_stream(device))
        for other in self._delivered.pop(device, set()) - {stream}:
            stream.wait_stream(other)
        with torch.cuda.stream(stream):
            yield

    def return_to_loop(self, device: torch.device) -> None:
        """Makes the current stream wait for what was sent, where the loop has changed its own."""
        stream = self._training.get(device)
        if stream is not None and stream != torch.cuda.current_stream(device):
            torch.cuda.current_stream(device).wait_stream(stream)

    @contextlib.contextmanager
    def beside(self, device: torch.device) -> Iterator[None]:
        """Runs on the stream for counting, whose short kernels go before backward's."""
        if device.type != "cuda":
            yield
            return
        if device not in self._counting:
            made = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
            self._counting[device] = made
        with torch.cuda.stream(self._counting[device]):
            yield

    def join(self, device: torch.device) -> None:
        """Makes the current stream wait for what was counted."""
        if device in self._counting:
            torch.cuda.current_stream(device).wait_stream(self._counting[device])
