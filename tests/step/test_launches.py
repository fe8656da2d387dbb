"""What a step asks of a GPU is held to a budget, counted without one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from hf_dlion.step.voters.node_waves import WAVES
from tests.support.fake_gpu import CASES, SHAPES, FakeGpu, asked_by

# Launches, copies to the device included, and waits for it.
PER_MESSAGE, BESIDE, WAITS = 8, 30, 2
# With more than two nodes a verdict is unpacked between them, and packed again inside each.
PER_NODE_MESSAGE = 10
# For the plain tier: each way in which votes leave once.
QUICK: list[tuple[int, dict[str, Any]]] = [
    (16, {"local_group": 8, "backend": "gloo"}),
    (16, {"exchange": "two_phase"}),
    (2, {"exchange": "gather", "overlap": True}),
    (16, {"local_group": 8}),
    (16, {"backend": "gloo"}),
]


@pytest.fixture
def gpus() -> Iterator[list[FakeGpu]]:
    made: list[FakeGpu] = []
    yield made
    for gpu in made:
        gpu.close()


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(n, options, marks=[] if (n, options) in QUICK else pytest.mark.full)
        for n, options in (
            *CASES,
            (16, {"exchange": "two_phase", "aggregation": "average"}),
            (16, {"exchange": "two_phase", "ties": "zero", "bits": 4}),
            (32, {"local_group": 8}),
            (16, {"local_group": 8, "backend": "gloo"}),
        )
    ],
    ids=str,
)
def test_a_step_asks_little_of_a_gpu(
    gpus: list[FakeGpu], ranks: int, options: dict[str, Any]
) -> None:
    gpu = FakeGpu(SHAPES, ranks, **options)
    gpus.append(gpu)
    asked = asked_by(gpu)
    nodes = ranks // options.get("local_group", ranks)
    per_message = PER_NODE_MESSAGE if nodes > 2 else PER_MESSAGE
    stats = gpu.optimizer.wire
    assert gpu.messages == 9
    assert stats.sent_in_backward == (9 if options.get("overlap") else 0)
    told = f"{asked.launched} launches, {asked.waited} waits: {asked.places} {asked.waits}"
    assert asked.launched <= per_message * gpu.messages + BESIDE, told
    # gloo sends from the CPU, so the host waits for every message's votes, and a node's ranks for
    # the rows of each wave.
    staged = gpu.messages + (WAVES if nodes < ranks else 0) if gpu.backend == "gloo" else 0
    assert asked.waited <= WAITS + staged, told


@pytest.mark.parametrize("options", [{"exchange": "two_phase"}, {"local_group": 2}], ids=str)
def test_what_a_step_launches_was_compiled_before_its_header_left(
    gpus: list[FakeGpu], options: dict[str, Any]
) -> None:
    gpu = FakeGpu([(30, 70), (50,)], 4, **options)
    gpus.append(gpu)
    gpu.step()
    before = gpu.history[: gpu.history.index(("send", "votes"))]
    last_header = max(k for k, event in enumerate(before) if event == ("send", "a header"))
    compiled = {variant for kind, variant in before[:last_header] if kind == "compile"}
    # The finite check is part of what the header tells.
    late = [v for kind, v in gpu.history[last_header:] if kind == "launch" and v not in compiled]
    assert not late
    assert any(variant.startswith("apply") for variant in compiled)
    gpu.history.clear()
    gpu.step()
    assert not [variant for kind, variant in gpu.history if kind == "compile"]


@pytest.mark.parametrize("kernel", ["encode", "count", "unpack_verdict", "apply"])
def test_a_kernel_that_does_not_compile_is_heard_of_before_any_vote_leaves(
    gpus: list[FakeGpu], kernel: str
) -> None:
    gpu = FakeGpu([(30, 70), (50,)], 4, exchange="two_phase")
    gpus.append(gpu)
    gpu.broken = kernel
    with pytest.raises(RuntimeError, match=f"{kernel} does not compile"):
        gpu.step()
    assert ("send", "a header") in gpu.history
    assert ("send", "votes") not in gpu.history
    assert not [variant for kind, variant in gpu.history if kind == "launch"]
