"""A node's votes that leave during backward: the rule and the outcome of step mode, whatever comes.

DDP averages the gradients inside the node, bucket by bucket, and votes leave as it does.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import Disagreement, DistributedLion
from hf_dlion.codec.layout import shards_of
from hf_dlion.exchange.node import NodeExchange, RowEdges
from hf_dlion.options import warn_once
from hf_dlion.ranks.header import header_wire_bytes
from hf_dlion.step import plan as step_plan
from tests.backward.test_ddp import Model, new_model, optimizer_of, released
from tests.ranks.test_node import nodes_of
from tests.support import zoo
from tests.support.spawn import RankPools

pytestmark = pytest.mark.multiproc

# With a message per parameter or two, several of them are on their way at once.
SHORT = 150
STEPS = 8
ODD = 3
MANY_BUCKETS = {"bucket_cap_mb": 0.001}


@contextlib.contextmanager
def short_messages() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_plan, "MESSAGE_NUMEL", SHORT)
        yield


def train_zoo(
    rank: int, world_size: int, steps: int, options: dict[str, Any], ddp: dict[str, Any]
) -> list[zoo.Record]:
    with short_messages():
        return zoo.train_ddp(rank, world_size, steps, options, ddp, everything=True)


@pytest.mark.parametrize(
    ("ddp", "options"),
    [
        ({"bucket_cap_mb": 1e-4}, {"exchange": "two_phase"}),
        ({"bucket_cap_mb": 1e-4}, {"exchange": "gather", "momentum_dtype": torch.bfloat16}),
        ({"gradient_as_bucket_view": True}, {"exchange": "two_phase", "ties": "zero"}),
        ({}, {"exchange": "two_phase", "aggregation": "average"}),
    ],
    ids=["many_buckets", "gather", "bucket_view", "average"],
)
@pytest.mark.parametrize(("nodes", "size"), [(2, 2), (2, 3)])
def test_every_step_equals_the_simulation(
    ranks: RankPools, nodes: int, size: int, ddp: dict[str, Any], options: dict[str, Any]
) -> None:
    options = {**options, "overlap": True, "local_group": size}
    records = ranks(nodes * size).run(train_zoo, 15, options, ddp)
    zoo.replay(zoo.as_nodes(records, nodes_of(nodes, size), averaged=True), options)
    # The zoo clips, so that what is foreseen differs from what the loop leaves.
    for mine in records:
        seen = [len(record.foreseen) for record in mine]
        in_step = (0, zoo.ONE_NAN_STEP, zoo.ALL_INF_STEP)
        assert [t for t, count in enumerate(seen) if count == 0] == list(in_step), seen
        # All but the empty ones.
        assert max(seen) == len(mine[0].grads) - 2


def generator_of(rank: int, t: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * t + rank)


def tokens_of(rank: int, t: int) -> Tensor:
    return torch.randint(0, 11, (3, 5), generator=generator_of(rank, t))


def momenta_of(optimizer: DistributedLion, model: nn.Module) -> list[Tensor]:
    """Returns whole momenta, after the last step: ranges depend on how messages are cut."""
    optimizer.synchronize_momentum()
    return [optimizer.state[p]["exp_avg"].clone() for p in model.parameters()]


Happening = Callable[[int, Model, nn.Module, DistributedLion], None]


def drop_all(rank: int, model: Model, wrapped: nn.Module, optimizer: DistributedLion) -> None:
    optimizer.zero_grad()
    wrapped(tokens_of(rank, 0)).backward()


def drop_one(rank: int, model: Model, wrapped: nn.Module, optimizer: DistributedLion) -> None:
    if rank == 1:
        model.second.weight.grad = None


def put_a_nan(rank: int, model: Model, wrapped: nn.Module, optimizer: DistributedLion) -> None:
    if rank == 1:
        assert model.second.weight.grad is not None
        model.second.weight.grad[-1, -1] = float("nan")


def go_past_the_wrapper(
    rank: int, model: Model, wrapped: nn.Module, optimizer: DistributedLion
) -> None:
    if rank == 1:
        model(tokens_of(rank, 0)).backward()


def drop_everywhere(
    rank: int, model: Model, wrapped: nn.Module, optimizer: DistributedLion
) -> None:
    optimizer.zero_grad()


def change_betas(rank: int, model: Model, wrapped: nn.Module, optimizer: DistributedLion) -> None:
    optimizer.param_groups[0]["betas"] = (0.5, 0.9)


def change_lr(rank: int, model: Model, wrapped: nn.Module, optimizer: DistributedLion) -> None:
    optimizer.param_groups[0]["lr"] *= 0.5


def average(rank: int, model: Model, wrapped: nn.Module, optimizer: DistributedLion) -> None:
    optimizer.synchronize_momentum()


def load(rank: int, model: Model, wrapped: nn.Module, optimizer: DistributedLion) -> None:
    state = optimizer.state_dict()
    entries = {k: {"exp_avg": 0.5 * v["exp_avg"]} for k, v in state["state"].items()}
    optimizer.load_state_dict({**state, "state": entries})


# What happens between the backward pass and the step, and how many of the steps hold after all.
HAPPENINGS: dict[str, tuple[Happening | None, int]] = {
    "nothing": (None, STEPS - 1),
    "drop_all": (drop_all, STEPS - 2),
    "drop_one": (drop_one, STEPS - 2),
    "put_a_nan": (put_a_nan, STEPS - 2),
    "go_past_the_wrapper": (go_past_the_wrapper, STEPS - 2),
    "drop_everywhere": (drop_everywhere, STEPS - 2),
    "change_betas": (change_betas, STEPS - 2),
    "change_lr": (change_lr, STEPS - 1),
    "average": (average, STEPS - 2),
    "load": (load, STEPS - 2),
}
# Six ranks take long on a few cores; these stand for the others.
AT_THREE = ("nothing", "drop_one", "put_a_nan")


def train(
    rank: int,
    world_size: int,
    size: int,
    overlap: bool,
    what: str = "nothing",
    ddp: dict[str, Any] = MANY_BUCKETS,
    options: dict[str, Any] | None = None,
    micro_steps: int = 1,
) -> dict[str, Any]:
    model = new_model()
    options = {"exchange": "two_phase", **(options or {})}
    optimizer = optimizer_of(model, overlap=overlap, local_group=size, **options)
    holder: list[Any] = [DistributedDataParallel(model, **ddp)]
    happening, sent = HAPPENINGS[what][0], []
    warn_once._given.discard("overlap")
    with released(holder), short_messages(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(STEPS):
            for number in range(micro_steps):
                last = number == micro_steps - 1
                with contextlib.nullcontext() if last else holder[0].no_sync():
                    holder[0](tokens_of(rank, t + number)).backward()
            if t == ODD and happening is not None:
                happening(rank, model, holder[0], optimizer)
            optimizer.step()
            optimizer.zero_grad()
            sent.append((optimizer.wire.sent_in_backward, len(optimizer.messages)))
        bits = [p.detach().clone().view(torch.int32) for p in model.parameters()]
        momenta = momenta_of(optimizer, model)
    told = [str(w.message) for w in caught if "overlap=True" in str(w.message)]
    return {
        "bits": bits,
        "momenta": momenta,
        "sent": sent,
        "overlapped": optimizer.wire.overlapped,
        "exchanges": optimizer.wire.exchanges,
        "told": told,
    }


def equal_in_all_but_time(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine["bits"], found[0]["bits"])), "replicas differ"
        assert all(map(torch.equal, mine["bits"], theirs["bits"]))
        assert all(map(torch.equal, mine["momenta"], theirs["momenta"]))
        assert mine["exchanges"] == theirs["exchanges"]


@pytest.mark.parametrize(
    ("size", "what"),
    [
        *((2, what) for what in HAPPENINGS),
        *(
            pytest.param(3, what, marks=[] if what in AT_THREE else pytest.mark.long)
            for what in HAPPENINGS
        ),
    ],
)
def test_whatever_happens_before_the_step_the_outcome_is_that_of_step_mode(
    ranks: RankPools, size: int, what: str
) -> None:
    expected = ranks(2 * size).run(train, size, False, what)
    found = ranks(2 * size).run(train, size, True, what)
    equal_in_all_but_time(found, expected)
    for mine in found:
        assert mine["overlapped"] == HAPPENINGS[what][1]
        assert mine["told"] == []
        # All votes left in backward from the second step on, and there are several messages.
        assert all(sent == count > 3 for sent, count in mine["sent"][2:])


@pytest.mark.parametrize(
    ("ddp", "options", "micro_steps"),
    [
        ({"gradient_as_bucket_view": True}, {}, 1),
        ({}, {"exchange": "gather"}, 1),
        (MANY_BUCKETS, {"momentum_dtype": torch.bfloat16}, 3),
        ({"gradient_as_bucket_view": True}, {"exchange": "gather"}, 2),
        (MANY_BUCKETS, {"bits": 4}, 1),
    ],
    ids=["bucket_view", "one_bucket_gather", "accumulation", "accumulation_bucket_view", "4_bits"],
)
def test_however_it_is_wrapped_the_outcome_is_that_of_step_mode(
    ranks: RankPools, ddp: dict[str, Any], options: dict[str, Any], micro_steps: int
) -> None:
    words = "nothing", ddp, options, micro_steps
    expected, found = (ranks(4).run(train, 2, overlap, *words) for overlap in (False, True))
    equal_in_all_but_time(found, expected)
    for mine in found:
        assert mine["overlapped"] == STEPS - 1
        assert all(sent == count > 3 for sent, count in mine["sent"][1:])


@pytest.mark.parametrize("ddp", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_a_wrapper_that_may_leave_gradients_out_exchanges_in_the_step(
    ranks: RankPools, ddp: dict[str, Any]
) -> None:
    expected, found = (ranks(4).run(train, 2, overlap, "nothing", ddp) for overlap in (False, True))
    equal_in_all_but_time(found, expected)
    for mine in found:
        assert mine["overlapped"] == 0
        (said,) = mine["told"]
        assert "ddp_find_unused_parameters=False" in said


def train_unwrapped(rank: int, world_size: int, overlap: bool) -> list[Tensor]:
    model = new_model()
    optimizer = optimizer_of(model, overlap=overlap, local_group=2)
    warn_once._given.discard("overlap")
    with short_messages(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for t in range(STEPS):
            model(tokens_of(rank, t)).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert optimizer.wire.overlapped == 0
    assert len([w for w in caught if "overlap=True" in str(w.message)]) == overlap
    return [p.detach().clone().view(torch.int32) for p in model.parameters()]


def test_without_a_wrapper_votes_go_in_the_step(ranks: RankPools) -> None:
    expected, found = (ranks(4).run(train_unwrapped, overlap) for overlap in (False, True))
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))


def train_alone(rank: int, world_size: int, overlap: bool) -> list[Tensor]:
    return train(rank, world_size, world_size, overlap)["bits"]  # type: ignore[no-any-return]


def test_one_node_alone_has_nothing_to_overlap(ranks: RankPools) -> None:
    expected, found = (ranks(2).run(train_alone, overlap) for overlap in (False, True))
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))


def fail_once(rank: int, world_size: int, how: str) -> tuple[list[str], list[Tensor], int]:
    """Rank 1 fails in its fourth step, while votes leave or before the header; all go on."""
    model = new_model()
    optimizer = optimizer_of(model, overlap=True, local_group=2, exchange="two_phase")
    holder = [DistributedDataParallel(model, **MANY_BUCKETS)]
    raised: list[str] = []
    with released(holder), short_messages():
        for t in range(STEPS):
            bad = t == ODD and rank == 1
            with pytest.MonkeyPatch.context() as patch:
                if bad and how == "sender":
                    patch.setattr(optimizer, "stretch_of", _raise)
                holder[0](tokens_of(rank, t)).backward()
            try:
                optimizer.step(_raise if bad and how == "closure" else None)
            except (Disagreement, ValueError) as error:
                raised.append(f"{t} {type(error).__name__}: {error}")
            optimizer.zero_grad()
    bits = [p.detach().clone().view(torch.int32) for p in model.parameters()]
    return raised, bits, optimizer.wire.overlapped


def _raise(*args: object) -> float:
    raise ValueError("the data loader is empty")


@pytest.mark.parametrize("how", ["sender", "closure"])
def test_what_fails_on_one_rank_is_raised_on_all_and_the_next_step_is_whole(
    ranks: RankPools, how: str
) -> None:
    results = ranks(4).run(fail_once, how)
    for rank, (raised, bits, overlapped) in enumerate(results):
        (message,) = raised
        kind = "ValueError: " if rank == 1 else "Disagreement: the step failed on 1 of 4 ranks"
        assert message.startswith(f"{ODD} {kind}")
        assert "the data loader is empty" in message
        assert all(map(torch.equal, bits, results[0][1]))
        assert overlapped == STEPS - 2


def resume(rank: int, world_size: int, stop: int | None) -> list[Tensor]:
    """Trains, from `stop` on with a new model, optimizer and wrapper that load what was saved."""
    model = new_model()
    optimizer = optimizer_of(model, overlap=True, local_group=2)
    holder = [DistributedDataParallel(model, **MANY_BUCKETS)]
    with released(holder), short_messages():
        for t in range(STEPS):
            if t == stop:
                saved = model.state_dict(), optimizer.state_dict()
                assert optimizer.wire.overlapped == t - 1
                holder.clear()
                model = new_model()
                optimizer = optimizer_of(model, overlap=True, local_group=2)
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                holder.append(DistributedDataParallel(model, **MANY_BUCKETS))
            holder[0](tokens_of(rank, t)).backward()
            optimizer.step()
            optimizer.zero_grad()
        bits = [p.detach().clone().view(torch.int32) for p in model.parameters()]
        return bits + momenta_of(optimizer, model)


def test_a_resumed_run_equals_the_uninterrupted_one(ranks: RankPools) -> None:
    expected, found = (ranks(4).run(resume, stop) for stop in (None, 4))
    for mine, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, mine, theirs))


def count_bytes(rank: int, world_size: int, exchange: str) -> list[tuple[int, int, int, int]]:
    size = 2
    model = new_model()
    optimizer = optimizer_of(model, overlap=True, local_group=size, exchange=exchange)
    holder = [DistributedDataParallel(model)]
    found = []
    total = sum(p.numel() for p in model.parameters())
    with released(holder), short_messages():
        for t in range(4):
            holder[0](tokens_of(rank, t)).backward()
            optimizer.step()
            optimizer.zero_grad()
            sent = optimizer.wire.last_bytes_sent, optimizer.wire.last_node_bytes_sent
            outside = sum(m.wire_bytes for m in optimizer.messages)
            # One message header, of eight parameters; a ring of float32 gradients in one bucket.
            header = header_wire_bytes(8, world_size) // (world_size - 1)
            inside = header * (size - 1) + 2 * (size - 1) * -(-total // size) * 4
            for message in optimizer.messages:
                exchanged, layout = message._exchange, message._layout
                assert isinstance(exchanged, NodeExchange)
                shards = shards_of(layout, size)
                inside += RowEdges.wire_bytes(shards)
                inside += exchanged._gather.wire_bytes(shards, (1, 1))
            found.append((*sent, outside + header * (world_size - size), inside))
    assert optimizer.wire.overlapped == 3
    return found[2:]


@pytest.mark.parametrize("exchange", ["gather", "two_phase"])
def test_bytes_of_a_step_are_the_documented_formula(ranks: RankPools, exchange: str) -> None:
    for found in ranks(4).run(count_bytes, exchange):
        for outside, inside, expected_outside, expected_inside in found:
            assert outside == expected_outside
            assert inside == expected_inside


def share_a_wrapper(rank: int, world_size: int) -> list[Tensor]:
    """Two optimizers of one wrapper, one of which exchanges votes during backward."""
    models = nn.ModuleList([new_model(), new_model()])

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.models = models

        def forward(self, tokens: Tensor) -> Tensor:
            return self.models[0](tokens) + self.models[1](tokens)

    optimizers = [
        optimizer_of(model, overlap=overlap, local_group=2)
        for model, overlap in zip(models, (True, False), strict=True)
    ]
    holder = [DistributedDataParallel(Both(), **MANY_BUCKETS)]
    with released(holder), short_messages():
        for t in range(STEPS):
            holder[0](tokens_of(rank, t)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    assert [optimizer.wire.overlapped for optimizer in optimizers] == [STEPS - 1, 0]
    return [p.detach().clone().view(torch.int32) for p in models.parameters()]


def test_optimizers_that_share_a_wrapper_are_told_of_its_buckets(ranks: RankPools) -> None:
    for bits in ranks(4).run(share_a_wrapper):
        half = len(bits) // 2
        assert all(map(torch.equal, bits[:half], bits[half:]))
