"""A step of several ranks, all in this process, equals the definition in NumPy bit for bit."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dlion import DistributedLion
from hf_dlion.exchange.rule import Average, Majority
from hf_dlion.options import Options
from hf_dlion.vote import codec, local, message
from hf_dlion.vote.groups import named, trainable
from hf_dlion.vote.local import Plan
from hf_dlion.vote.update import (
    Scratch,
    Turn,
    direction,
    encode,
    move,
    tensor_sums,
)
from tests.support.definition import TOP, Lions
from tests.support.gradients import SHAPES


class Ranks:
    """Ranks in one process, with shared parameters and separate momenta."""

    def __init__(self, lions: Lions, groups: list[list[int]], **options: Any) -> None:
        self.params = [torch.nn.Parameter(p.clone()) for p in lions.params]
        self.lions, self.members = lions, groups
        self.momenta = [[m.clone() for m in own] for own in lions.momenta]
        self.groups = [
            {
                "params": [self.params[i] for i in own],
                "lr": lions.lrs[own[0]],
                "weight_decay": lions.decays[own[0]],
                "betas": lions.betas,
            }
            for own in groups
        ]
        self.options = options
        self.step_number = 0

    def step(self, grads: Sequence[Sequence[torch.Tensor | None]]) -> None:
        self.step_number += 1
        ranks, lions = len(grads), self.lions
        params = [local.flat_view(p) for p in self.params]
        plan = Plan.of(
            tuple([message.Shape.of(p, g) for g, p in trainable(self.groups)]),
            named(self.groups),
            [False] * len(params),
        )
        rule = (
            Average(ranks, lions.bits) if lions.aggregation == "average" else Majority(lions.ties)
        )
        finite = [all(g is None or bool(g.isfinite().all()) for g in own) for own in grads]
        flats = []
        for rank in range(ranks):
            own = [
                None if g is None or not finite[rank] else local.flat_gradient("p", g, p)
                for g, p in zip(grads[rank], self.params, strict=True)
            ]
            kept = [
                None if g is None else local.flat_view(m)
                for g, m in zip(own, self.momenta[rank], strict=True)
            ]
            flats.append((own, kept))
        moved = [
            p if any(own[i] is not None for own, _ in flats) else None for i, p in enumerate(params)
        ]
        turns = [
            Turn(
                step=self.step_number,
                voter=rank,
                options=Options(seed=lions.seed, bits=lions.bits, level_scale=lions.level_scale),
                groups=self.groups,
                scratch=Scratch(),
            )
            for rank in range(ranks)
        ]
        with torch.no_grad():
            scales: list[Any] = [() for _ in range(ranks)]
            if lions.level_scale == "tensor":
                for rank, (own, kept) in enumerate(flats):
                    turn = turns[rank]
                    look = partial(direction, grads=own, momenta=kept, turn=turn, advance=False)
                    sums, counts = tensor_sums(plan.messages, params, look, turn)
                    scales[rank] = [a / b for a, b in zip(sums, counts, strict=True)]
            for msg in plan.messages:
                votes = [encode(msg, *flats[r], turns[r], scales[r]) for r in range(ranks)]
                voters = torch.stack([own.active for own in votes]).sum(dim=0)
                top = TOP[lions.bits]
                total = codec.spread(voters[msg.rows.of_word] * top, (ranks * top).bit_length())
                sums = codec.tally([list(own.planes) for own in votes], lions.bits)
                planes = [own.contiguous() for own in rule.decide(sums, total, self.step_number)]
                move(msg, moved, planes, voters, rule, turns[0])


def gradient(
    random: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor | None:
    """Returns a gradient with rows of zeros, None, or a gradient with a NaN."""
    kind = random.random()
    if kind < 0.15:
        return None
    grad = torch.from_numpy(random.normal(size=shape)).reshape(shape).to(dtype)
    if grad.dim() and kind < 0.6:
        grad[torch.from_numpy(random.random(shape[0]) < 0.5)] = 0.0
    if kind > 0.98 and grad.numel():
        grad.view(-1)[-1] = torch.nan
    return grad


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(message.PIECE, "cpu", 1 << 10)
    monkeypatch.setitem(message.MESSAGE, "cpu", 1 << 13)
    monkeypatch.setattr(message, "MESSAGES", 1 << 20)


CASES = [
    {},
    {"ties": "zero"},
    {"aggregation": "average"},
    {"bits": 2},
    {"bits": 4},
    {"bits": 8},
    {"bits": 4, "ties": "zero", "level_scale": "tensor"},
    {"bits": 8, "level_scale": "tensor"},
    {"bits": 2, "level_scale": "tensor"},
    {"momentum_dtype": torch.bfloat16},
]


@pytest.mark.parametrize("case", CASES, ids=str)
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 5))
def test_steps_equal_the_definition(case: dict[str, Any], seed: int, ranks: int) -> None:
    check(case, seed, ranks, [torch.float32] * len(SHAPES))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@settings(max_examples=8)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 4))
def test_other_dtypes_equal_the_definition(dtype: torch.dtype, seed: int, ranks: int) -> None:
    check({"seed": seed}, seed, ranks, [dtype] * len(SHAPES))


def check(case: dict[str, Any], seed: int, ranks: int, dtypes: list[torch.dtype]) -> None:
    random = np.random.default_rng(seed)
    order = list(random.permutation(len(SHAPES)))
    shapes = [SHAPES[k] for k in order]
    params = [
        torch.from_numpy(random.normal(size=shape)).reshape(shape).to(dtype)
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    cut = int(random.integers(0, len(shapes)))
    lrs = [0.1 if k < cut else 0.01 for k in range(len(shapes))]
    decays = [0.3 if k < cut else 0.0 for k in range(len(shapes))]
    lions = Lions([p.clone() for p in params], ranks, lrs, decays, **case)
    groups = [own for own in (list(range(cut)), list(range(cut, len(shapes)))) if own]
    ours = Ranks(lions, groups)
    for _ in range(3):
        grads = [
            [gradient(random, s, d) for s, d in zip(shapes, dtypes, strict=True)]
            for _ in range(ranks)
        ]
        before = lions.t
        lions.step(grads)
        if lions.t == before:
            continue  # no rank had finite gradients
        ours.step(grads)
        for rank in range(ranks):
            for mine, theirs in zip(ours.momenta[rank], lions.momenta[rank], strict=True):
                assert torch.equal(mine, theirs)
        for mine, theirs, shape in zip(ours.params, lions.params, shapes, strict=True):
            assert torch.equal(mine, theirs), shape


def test_a_channels_last_tensor_moves_in_its_own_memory_order() -> None:
    param = torch.randn(4, 64, 3, 5).to(memory_format=torch.channels_last)
    grads = [torch.randn(4, 64, 3, 5) for _ in range(3)]
    flat = [local.flat_view(param.clone(memory_format=torch.preserve_format))]
    lions = Lions([flat[0].view(4, -1).clone()], 3, [0.1], [0.1])
    ours = Ranks(Lions([param.clone()], 3, [0.1], [0.1]), [[0]])
    ours.momenta = [[torch.zeros_like(param)] for _ in range(3)]
    ours.params = [torch.nn.Parameter(param.clone())]
    ours.groups[0]["params"] = ours.params
    lions.step([[local.flat_gradient("p", g, param).view(4, -1)] for g in grads])
    ours.step([[g] for g in grads])
    assert ours.params[0].stride() == param.stride()
    assert torch.equal(local.flat_view(ours.params[0]).view(4, -1), lions.params[0])


def test_a_row_is_never_cut_between_messages() -> None:
    plan = messages_of([(37, 64 * 5), (3,), (1000, 64), (11, 64 * 40)])
    for own in plan:
        for _, _, words, row in own.spans:
            assert words % row == 0
    assert len(plan) > 3
    assert max(len(own.pieces) for own in plan) > 1


def messages_of(shapes: list[tuple[int, ...]]) -> list[message.Message]:
    return message.messages([message.Shape.of(torch.empty(shape), 0) for shape in shapes])


def test_the_largest_magnitude_skips_empty_gradients() -> None:
    grads = [torch.empty(0, 4), torch.tensor([1.0, -2.0]), torch.tensor([[0.5]])]
    assert local.largest(grads).tolist() == [2.0, 0.5]
    assert local.largest(grads[:1]).isfinite().all()


class DestinationsOfCopies(TorchDispatchMode):
    """Notes the dtypes that each `_foreach_copy_` writes."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: list[set[torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ == "_foreach_copy_":
            self.dtypes.append({tensor.dtype for tensor in args[0]})
        return func(*args, **(kwargs or {}))


def test_one_copy_of_several_tensors_writes_one_dtype() -> None:
    params = [
        torch.nn.Parameter(torch.ones(size, dtype=dtype))
        for size, dtype in zip(
            (64, 10, 7), (torch.bfloat16, torch.float32, torch.float16), strict=True
        )
    ]
    optimizer = DistributedLion(params, lr=0.1)
    for p in params:
        p.grad = torch.ones_like(p)
    with DestinationsOfCopies() as mode:
        optimizer.step()
    assert max(map(len, mode.dtypes)) == 1
