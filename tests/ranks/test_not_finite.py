"""A gradient that is not finite, in every mode: its ranks abstain, and all the rest is the rule."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from hf_dlion import DistributedLion
from tests.support.messages import message_numel
from tests.support.oracle import OracleGroup, OracleLion, bits_of, same_bits
from tests.support.random_training import ignored_warnings, normal
from tests.support.spawn import RankPools
from tests.support.zoo import foreseen_of

pytestmark = pytest.mark.multiproc

STEPS, FAULT = 6, 3
SCALE = 1024.0


@dataclass(frozen=True)
class Mode:
    """How the ranks train."""

    world_size: int
    options: Mapping[str, Any]
    wrapped: bool = False

    @property
    def size(self) -> int:
        """How many ranks vote as one."""
        return int(self.options.get("local_group", 1))


MODES = {
    "in the step": Mode(3, {}),
    "overlap": Mode(2, {"overlap": True, "exchange": "two_phase"}),
    "overlap in DDP": Mode(3, {"overlap": True}, wrapped=True),
    "nodes": Mode(4, {"local_group": 2}),
}
# What happens in step FAULT: a NaN or an Inf written into an element of one parameter, whose
# message no other shares; the largest number of float16 exceeded in one; or everywhere.
CAUSES = ["NaN in the first", "Inf in the last", "-Inf in the middle", "overflow", "loss"]


class Net(nn.Module):
    """Three parameters, each of which is a message and a bucket."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(normal(9, 8, seed=1))
        self.middle = nn.Parameter(normal(70, seed=2, dtype=torch.float16))
        self.last = nn.Parameter(normal(130, seed=3))

    def forward(self, seed: int, factor: float) -> Tensor:
        loss = (self.first * normal(9, 8, seed=seed)).sum()
        # Autograd multiplies the scale with this in float16.
        loss = loss + (self.middle * factor * normal(70, seed=seed + 1).half()).float().sum()
        return loss + (self.last * normal(130, seed=seed + 2)).sum()


@dataclass
class Record:
    """What one rank saw and made in one step."""

    grads: list[Tensor]
    foreseen: dict[int, Any]
    params: list[Tensor]
    momenta: list[Tensor]
    ranges: dict[int, list[int]]
    lr: float
    steps: int
    scale: float


def train(rank: int, world_size: int, name: str, cause: str, everyone: bool) -> list[Record]:
    """Trains through Accelerate with a GradScaler and a schedule."""
    from accelerate.optimizer import AcceleratedOptimizer
    from accelerate.scheduler import AcceleratedScheduler

    from accelerate import Accelerator

    Accelerator(cpu=True)
    mode, model = MODES[name], Net()
    params = list(model.parameters())
    holder: list[Any] = [
        DistributedDataParallel(model, bucket_cap_mb=1e-4) if mode.wrapped else model
    ]
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=100)
    with message_numel(1):
        inner = DistributedLion(params, lr=0.1, weight_decay=0.1, **mode.options)
    optimizer = AcceleratedOptimizer(inner, scaler=scaler if scaled(name, cause) else None)
    schedule = LambdaLR(inner, lambda t: 0.9**t)
    scheduler = AcceleratedScheduler(schedule, [optimizer], split_batches=True)
    records = []
    with ignored_warnings():
        for t in range(STEPS):
            fault = t == FAULT and (everyone or rank == world_size - 1)
            factor = 1000.0 if fault and cause == "overflow" else 1.0
            loss = holder[0](10 * (10 * t + rank), factor)
            if fault and cause == "loss":
                loss = loss * float("inf")
            (scaler.scale(loss) if optimizer.scaler else loss).backward()
            if fault and " in the " in cause:
                value, place = cause.split(" in the ")
                dict(model.named_parameters())[place].grad.view(-1)[-1] = float(value)
            lr = inner.param_groups[0]["lr"]
            foreseen, overlapped = foreseen_of(inner, params), inner.wire.overlapped
            optimizer.step()
            assert not optimizer.step_was_skipped
            scheduler.step()
            records.append(
                Record(
                    # Unscaled, and averaged in the node.
                    grads=[p.grad.clone() for p in params],
                    foreseen=foreseen if inner.wire.overlapped > overlapped else {},
                    params=[p.detach().clone() for p in params],
                    momenta=[inner.state[p]["exp_avg"].clone() for p in params],
                    ranges=inner.state_dict()["dlion"].get("shard", {}).get("ranges", {}),
                    lr=lr,
                    steps=inner.steps,
                    scale=scaler.get_scale(),
                )
            )
            optimizer.zero_grad()
    holder.clear()
    gc.collect()
    return records


def scaled(name: str, cause: str) -> bool:
    """Returns whether there is a GradScaler.

    Where DDP averages scaled gradients, ranks of a node whose loop writes a NaN on one of them
    would have different scales from then on, under any optimizer.
    """
    return " in the " not in cause or not (MODES[name].wrapped and MODES[name].size > 1)


def node_gradients(records: Sequence[Record]) -> list[Tensor]:
    """Returns the gradient of the ranks that vote as one, one that is not finite if any has."""
    bad = [r for r in records if not all(bool(g.isfinite().all()) for g in r.grads)]
    if not bad:
        assert all(all(map(same_bits, r.grads, records[0].grads)) for r in records)
    return (bad or records)[0].grads


@pytest.mark.parametrize("everyone", [False, True], ids=["one", "all"])
@pytest.mark.parametrize("cause", CAUSES)
@pytest.mark.parametrize("name", MODES)
def test_it_abstains_and_the_others_go_on(
    ranks: RankPools, name: str, cause: str, everyone: bool
) -> None:
    mode = MODES[name]
    found = ranks(mode.world_size).run(train, name, cause, everyone)
    nodes = [found[r : r + mode.size] for r in range(0, mode.world_size, mode.size)]
    params = [p.detach() for p in Net().parameters()]
    oracle = OracleLion([OracleGroup(params, lr=0.1, weight_decay=0.1)], len(nodes))
    for t in range(STEPS):
        oracle.groups[0].lr = found[0][t].lr
        before = [list(momenta) for momenta in oracle.exp_avg]
        oracle.step(
            [node_gradients([member[t] for member in node]) for node in nodes],
            [node[0][t].foreseen for node in nodes],
        )
        assert oracle.steps == t + 1 - (everyone and t >= FAULT)
        for number, node in enumerate(nodes):
            stays = t == FAULT and (everyone or number == len(nodes) - 1)
            assert stays == all(map(same_bits, before[number], oracle.exp_avg[number]))
            for member in node:
                record = member[t]
                assert (record.steps, record.lr) == (oracle.steps, found[0][t].lr)
                assert all(map(same_bits, record.params, oracle.params)), f"step {t}"
                for k, momentum in enumerate(record.momenta):
                    start, stop = record.ranges.get(k, [0, momentum.numel()])
                    expected = oracle.exp_avg[number][k].reshape(-1)[start:stop]
                    assert bits_of(momentum) == bits_of(expected), f"{k} in step {t}"
    overlapped = [bool(found[0][t].foreseen) for t in range(STEPS)]
    # The first step agrees on the messages, and the votes of a faulty one are dropped.
    assert overlapped == [
        bool(mode.options.get("overlap")) and t not in (0, FAULT) for t in range(STEPS)
    ]
    # A scale is halved where the overflow was: on every rank to which DDP has handed it.
    wide = mode.size if mode.wrapped else 1
    for rank, member in enumerate(found):
        hit = everyone or rank >= mode.world_size - wide
        assert member[-1].scale == (SCALE / 2 if hit and scaled(name, cause) else SCALE)
