"""On which CUDA stream an exchange during backward does what; the streams here only take notes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

from hf_dlion.backward.streams import Streams

GPU, OTHER = torch.device("cuda:0"), torch.device("cuda:1")


class FakeStream:
    """A stream that knows for which others it waited."""

    def __init__(self, device: torch.device, priority: int = 0) -> None:
        self.device, self.priority = device, priority
        self.waited_for: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        """Takes note."""
        self.waited_for.append(other)


class FakeCuda:
    """The current streams, as torch.cuda has them."""

    def __init__(self) -> None:
        self.current = {device: FakeStream(device) for device in (GPU, OTHER)}

    def current_stream(self, device: torch.device) -> FakeStream:
        """As torch.cuda.current_stream."""
        return self.current[device]

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        """As torch.cuda.stream."""
        before, self.current[stream.device] = self.current[stream.device], stream
        yield
        self.current[stream.device] = before


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "current_stream", fake.current_stream)
    monkeypatch.setattr(torch.cuda, "stream", fake.stream)
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    return fake


def test_messages_leave_from_the_training_stream_after_all_gradients(cuda: FakeCuda) -> None:
    streams, training = Streams(), cuda.current[GPU]
    streams.note_training([GPU, OTHER, torch.device("cpu")])
    side = FakeStream(GPU)
    streams.note_gradient(GPU)
    with cuda.stream(side):
        streams.note_gradient(GPU)
        # The last gradient of a message comes on another stream than the loop's.
        with streams.sending(GPU):
            assert cuda.current[GPU] is training
        assert cuda.current[GPU] is side
    assert training.waited_for == [side]
    # Each message waits for the gradients since the one before.
    with streams.sending(GPU):
        pass
    assert training.waited_for == [side]
    assert cuda.current[OTHER].waited_for == []


def test_messages_have_one_stream_before_the_first_step_is_over(cuda: FakeCuda) -> None:
    streams, first, second = Streams(), FakeStream(GPU), FakeStream(GPU)
    with cuda.stream(first), streams.sending(GPU):
        pass
    with cuda.stream(second):
        streams.note_gradient(GPU)
        with streams.sending(GPU):
            assert cuda.current[GPU] is first
    assert first.waited_for == [second]


def test_counting_has_a_stream_of_high_priority(cuda: FakeCuda) -> None:
    streams, training = Streams(), cuda.current[GPU]
    streams.join(GPU)
    assert training.waited_for == []
    with streams.beside(GPU):
        counting = cuda.current[GPU]
    with streams.beside(GPU):
        assert cuda.current[GPU] is counting
    assert counting is not training
    assert counting.priority < training.priority
    streams.join(GPU)
    assert training.waited_for == [counting]


def test_a_loop_that_changes_its_stream_waits_for_what_was_sent(cuda: FakeCuda) -> None:
    streams, training = Streams(), cuda.current[GPU]
    streams.return_to_loop(GPU)
    streams.note_training([GPU])
    streams.return_to_loop(GPU)
    assert training.waited_for == []
    other = FakeStream(GPU)
    with cuda.stream(other):
        streams.return_to_loop(GPU)
    assert other.waited_for == [training]


def test_a_cpu_has_none() -> None:
    streams, cpu = Streams(), torch.device("cpu")
    streams.note_training([cpu])
    streams.note_gradient(cpu)
    with streams.sending(cpu), streams.beside(cpu):
        streams.join(cpu)
