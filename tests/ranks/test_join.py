"""Ranks with different numbers of batches, inside torch's `Join`: one without data abstains."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from hf_dlion import DistributedLion
from tests.support.messages import message_numel
from tests.support.oracle import OracleGroup, OracleLion, same_bits
from tests.support.random_training import ignored_warnings, normal
from tests.support.spawn import RankPools

pytestmark = pytest.mark.multiproc

LR = 0.01


class Net(nn.Module):
    """Three parameters, one of which every second batch leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 9), nn.Linear(9, 4)
        self.extra = nn.Parameter(torch.zeros(70))
        for k, param in enumerate(self.parameters()):
            param.data = normal(*param.shape, seed=k) / 3

    def forward(self, x: Tensor, use_extra: bool) -> Tensor:
        loss = self.second(torch.tanh(self.first(x))).square().sum()
        return loss + (self.extra * x.sum()).sum() if use_extra else loss


def kept(param: nn.Parameter, used: bool) -> Tensor | None:
    """Returns a copy of the gradient of a parameter that was used (DDP gives the others zeros)."""
    return param.grad.clone() if used and param.grad is not None else None


@dataclass
class Trained:
    """One rank's gradients, batch by batch, and where it ended."""

    grads: list[list[Tensor | None]]
    params: list[Tensor]
    momenta: list[Tensor]
    steps: int
    overlapped: int
    abstentions: int
    lr: float
    joining: bool


@contextlib.contextmanager
def short_messages() -> Iterator[None]:
    with message_numel(40):
        yield


def train(
    rank: int,
    world_size: int,
    batches: Sequence[Sequence[int]],
    options: dict[str, Any] | None = None,
    *,
    ddp: dict[str, Any] | None = None,
    schedule: str = "",
    bad: int = -1,
    left_over: bool = False,
) -> Trained:
    """Trains for some epochs, each inside a `Join`; a rank function.

    Args:
        rank: The rank.
        world_size: The number of ranks.
        batches: For each epoch, how many batches each rank has.
        options: Of the optimizer.
        ddp: Of the wrapper, None for none.
        schedule: "hook" for one that is stepped after each step, "loop" for the usual one.
        bad: The batch, counted over epochs, in which rank 0's gradient is not finite.
        left_over: Whether a rank goes on with a backward pass without a step.
    """
    model = Net()
    holder: list[Any] = [model if ddp is None else DistributedDataParallel(model, **ddp)]
    params = list(model.parameters())
    optimizer = DistributedLion(params, lr=LR, weight_decay=0.1, **(options or {}))
    scheduler = LambdaLR(optimizer, lambda t: 0.8**t) if schedule else None
    if scheduler is not None and schedule == "hook":
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
    grads: list[list[Tensor | None]] = []
    with short_messages(), ignored_warnings():
        try:
            for epoch, counts in enumerate(batches):
                with Join([optimizer]):
                    for _ in range(counts[rank]):
                        t = len(grads)
                        x = normal(5, 6, seed=1000 * epoch + 10 * t + rank)
                        holder[0](x, t % 2 == 0).backward()
                        if rank == 0 and t == bad:
                            model.first.weight.grad[0, 0] = float("nan")
                        used = [t % 2 == 0 or p is not model.extra for p in params]
                        grads.append(list(map(kept, params, used)))
                        optimizer.step()
                        if scheduler is not None and schedule == "loop":
                            scheduler.step()
                        optimizer.zero_grad()
                    if left_over:
                        holder[0](normal(5, 6, seed=rank), True).backward()
        finally:
            holder.clear()
            gc.collect()
    momenta = [optimizer.state[p]["exp_avg"] for p in params]
    return Trained(
        grads=grads,
        params=[p.detach() for p in params],
        momenta=momenta,
        steps=optimizer.steps,
        overlapped=optimizer.wire.overlapped,
        abstentions=optimizer.wire.abstentions,
        lr=float(optimizer.param_groups[0]["lr"]),
        joining=optimizer._join_config.enable,
    )


def hold_to_the_rule(
    ranks: Sequence[Trained],
    batches: Sequence[Sequence[int]],
    *,
    decay: float = 1.0,
    aggregation: str = "majority",
) -> OracleLion:
    """Holds all ranks to the rule in which a rank without data abstains."""
    params = [p.detach() for p in Net().parameters()]
    nothing: list[Tensor | None] = [None] * len(params)
    groups = [OracleGroup(params, lr=LR, weight_decay=0.1)]
    oracle = OracleLion(groups, len(ranks), aggregation=aggregation)  # type: ignore[arg-type]
    done = [0] * len(ranks)
    for counts in batches:
        for t in range(max(counts)):
            grads = [
                trained.grads[done[r] + t] if t < counts[r] else nothing
                for r, trained in enumerate(ranks)
            ]
            oracle.step(grads)
            oracle.groups[0].lr *= decay
        done = [before + count for before, count in zip(done, counts, strict=True)]
    for r, trained in enumerate(ranks):
        assert trained.steps == oracle.steps
        assert len(trained.grads) == done[r]
        assert all(map(same_bits, trained.params, oracle.params)), f"rank {r}"
        assert all(map(same_bits, trained.momenta, oracle.exp_avg[r])), f"rank {r}"
    return oracle


UNEVEN = {2: [[5, 2], [1, 4]], 3: [[3, 5, 0], [2, 2, 2]]}
LOOPS: dict[str, dict[str, Any]] = {
    "bare": {},
    "ddp": {"ddp": {"find_unused_parameters": True}},
    "overlap": {"options": {"overlap": True, "exchange": "two_phase"}},
    "overlap in ddp": {"options": {"overlap": True}, "ddp": {"find_unused_parameters": True}},
    "average": {"options": {"aggregation": "average", "exchange": "gather"}},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("world_size", UNEVEN)
def test_a_rank_without_data_abstains(ranks: RankPools, world_size: int, loop: str) -> None:
    batches = UNEVEN[world_size]
    found = ranks(world_size).run(train_with, batches, loop)
    aggregation = LOOPS[loop].get("options", {}).get("aggregation", "majority")
    oracle = hold_to_the_rule(found, batches, aggregation=aggregation)
    assert oracle.steps == sum(map(max, batches))
    for trained in found:
        # The first step agrees on the messages.
        assert trained.overlapped == ("overlap" in loop) * (trained.steps - 1)


def train_with(rank: int, world_size: int, batches: Sequence[Sequence[int]], loop: str) -> Trained:
    return train(rank, world_size, batches, **LOOPS[loop])


def train_and_say(
    rank: int, world_size: int, batches: Sequence[Sequence[int]], loop: dict[str, Any]
) -> Trained | str:
    try:
        return train(rank, world_size, batches, **loop)
    except (RuntimeError, NotImplementedError) as error:
        return str(error)


def test_a_schedule_that_follows_the_optimizer_goes_on_without_data(ranks: RankPools) -> None:
    found = ranks(2).run(train_and_say, [[5, 2]], {"schedule": "hook"})
    hold_to_the_rule(found, [[5, 2]], decay=0.8)
    assert [trained.lr for trained in found] == [found[0].lr] * 2


def test_a_schedule_that_follows_the_batches_is_told_on_every_rank(ranks: RankPools) -> None:
    for said in ranks(2).run(train_and_say, [[5, 2]], {"schedule": "loop"}):
        assert "'group 0 lr'" in said
        assert "register_step_post_hook" in said


def test_what_an_accumulation_leaves_over_is_no_gradient(ranks: RankPools) -> None:
    hold_to_the_rule(ranks(2).run(train_and_say, [[3, 1]], {"left_over": True}), [[3, 1]])


def test_where_nobody_has_a_gradient_nothing_happens(ranks: RankPools) -> None:
    found = ranks(2).run(train_and_say, [[4, 1]], {"bad": 2})
    assert hold_to_the_rule(found, [[4, 1]]).steps == 3
    # A rank without data is not one whose gradient is not finite.
    assert [trained.abstentions for trained in found] == [1, 1]


def test_the_end_of_a_join_is_the_end_of_its_messages(ranks: RankPools) -> None:
    for trained in ranks(2).run(train_and_say, [[2, 2]], {}):
        assert not trained.joining


class Buffered(Net):
    """A net whose wrapper broadcasts a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))


def refuse(rank: int, world_size: int, what: str) -> str:
    model = Buffered() if "buffers" in what else Net()
    ddp = {"broadcast_buffers": False} if what == "local buffers" else {what: True}
    wrapped = DistributedDataParallel(model, **(ddp if what in DDP_OPTIONS else {}))
    optimizer = DistributedLion(model.parameters(), local_group=2 if what == "nodes" else None)
    holder = [wrapped]
    del wrapped
    try:
        with Join(holder if what == "wrapper" else [optimizer]):
            for _ in range(1 + rank):
                holder[0](torch.ones(5, 6), True).backward()
                optimizer.step()
                optimizer.zero_grad()
    except (RuntimeError, NotImplementedError) as error:
        return str(error)
    finally:
        holder.clear()
        gc.collect()
    return "accepted"


DDP_OPTIONS = ("local buffers", "gradient_as_bucket_view", "static_graph")


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("wrapper", "Give Join the optimizer alone"),
        ("buffers", "broadcast_buffers=False"),
        ("local buffers", "accepted"),
        ("gradient_as_bucket_view", "without gradient_as_bucket_view"),
        ("static_graph", "static_graph"),
        ("nodes", "local_group=2"),
    ],
)
def test_what_a_rank_without_data_could_not_shadow_is_refused(
    ranks: RankPools, what: str, message: str
) -> None:
    for said in ranks(2).run(refuse, what, timeout=30):
        assert message in said
        assert said == "accepted" or "give every rank as many batches" in said


def throw(rank: int, world_size: int) -> str:
    param = nn.Parameter(torch.ones(3))
    optimizer = DistributedLion([param])
    try:
        with Join([optimizer], throw_on_early_termination=True):
            for _ in range(1 + rank):
                param.square().sum().backward()
                optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "went on"


def test_a_join_that_may_throw_throws_on_every_rank(ranks: RankPools) -> None:
    first, second = ranks(2).run(throw)
    assert first == "Rank 0 exhausted all inputs."
    assert second.startswith("Detected at least one rank that exhausted inputs")


def train_with_accelerate(rank: int, world_size: int) -> tuple[int, list[Tensor], int]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Net()
    optimizer = DistributedLion(model.parameters(), lr=LR)
    data = torch.utils.data.DataLoader([normal(6, seed=k) for k in range(10)], batch_size=2)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    batches = 0
    # Accelerate joins on GPUs only; with CPUs it takes torch's Join.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Accelerator, "multi_device", True)
        with accelerator.join_uneven_inputs([optimizer.optimizer], even_batches=False):
            for x in data:
                accelerator.backward(model(x, True))
                optimizer.step()
                optimizer.zero_grad()
                batches += 1
    bits = [p.detach().clone() for p in model.parameters()]
    steps = optimizer.optimizer.steps
    del model
    accelerator.free_memory()
    gc.collect()
    return batches, bits, steps


def test_accelerate_joins_uneven_inputs(ranks: RankPools) -> None:
    (more, left, steps), (fewer, right, other_steps) = ranks(2).run(train_with_accelerate)
    assert (more, fewer, steps, other_steps) == (3, 2, 3, 3)
    assert all(map(torch.equal, left, right))
