"""Nodes that vote as one (`local_group`), on real ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.header import Disagreement, Kind
from tests.support.local_definition import lions_of
from tests.support.spawn import on_ranks
from tests.support.steps import attached, backward, plain, take_step
from tests.support.training import (
    batch,
    error_of,
    everyones,
    gathered,
    gradients_of,
    is_equal_everywhere,
    model_of,
    same,
    warned,
)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        pytest.param(2, {}, marks=pytest.mark.smoke),
        (2, {"local_group": 2}),  # Lion on the mean gradient
        (4, {"local_group": 2, "exchange": "gather"}),
        (4, {"local_group": 2, "exchange": "two_phase"}),
        (4, {"local_group": 2, "vote_every": 3}),
        (4, {"local_group": 2, "exchange": "two_phase", "vote_every": 3}),
    ],
)
@on_ranks("ranks")
def test_attached_wrappers_equal_the_definition(
    rank: int, ranks: int, options: dict[str, Any]
) -> None:
    """Compares training under DDP with the definition on the gradients of every node."""
    ddp, optimizer = attached(weight_decay=0.1, **options)
    bare, params = model_of(), list(ddp.parameters())
    node, every = options.get("local_group", 1), options.get("vote_every", 1)
    lions = lions_of(params, ranks // node, every)
    first = rank - rank % node
    for step in range(7):
        bare.load_state_dict(ddp.module.state_dict())
        backward(ddp, batch(step, rank))
        members = [gradients_of(bare, batch(step, first + k)) for k in range(node)]
        for p, *grads in zip(params, *members, strict=True):
            # DDP may round the mean in a node differently.
            tolerance = {"rtol": 0.0, "atol": 0.0} if node == 1 else {}
            torch.testing.assert_close(p.grad, sum(grads) / node, **tolerance)
            assert torch.equal(p.grad, everyones(p.grad)[first])
        if step == 4 and rank == node:
            params[0].grad = None  # So it doesn't count on any rank of the node.
        lions.step(gathered([p.grad for p in params])[::node])
        optimizer.step()
        assert same(params, lions.params if every == 1 else lions.own[rank // node]), step
    optimizer.exchange_now()
    assert all(map(is_equal_everywhere, params))
    optimizer.detach()


@pytest.mark.parametrize("every", [1, 3])
@on_ranks(4)
def test_full_precision_averages_over_nodes_as_over_ranks(rank: int, every: int) -> None:
    """Compares two nodes with two ranks without nodes that have the nodes' gradients."""
    options = {"full_precision": "*bias", "vote_every": every, "weight_decay": 0.1}
    ddp, optimizer = attached(local_group=2, **options)
    voters = optimizer.peers.ranks.voters.group
    alone, other = plain(process_group=voters, **options)
    for step in range(7):
        backward(ddp, batch(step, rank))
        for p, own in zip(ddp.parameters(), alone.parameters(), strict=True):
            own.grad = p.grad.clone()
        optimizer.step()
        other.step()
        assert same(list(ddp.parameters()), list(alone.parameters())), step
    optimizer.exchange_now()
    assert all(map(is_equal_everywhere, ddp.parameters()))
    assert is_equal_everywhere(optimizer.state[ddp.module[0].bias]["exp_avg"]) == (every == 1)
    optimizer.detach()


@pytest.mark.parametrize("case", ["new", "resumed", "detached", "dropped", "on rank 1"])
@on_ranks(2)
def test_nodes_need_attach(rank: int, case: str) -> None:
    model, optimizer = plain(local_group=None if case == "on rank 1" and rank == 0 else 2)
    if case == "detached":
        model = DistributedDataParallel(model)
        optimizer.attach(model)
        take_step(optimizer, model, batch(0, rank))
        optimizer.detach()
    if case == "dropped":
        wrapper = DistributedDataParallel(model)
        optimizer.attach(wrapper)
        take_step(optimizer, wrapper, batch(0, rank))
        del wrapper
        gc.collect()
    if case == "resumed":
        state = optimizer.state_dict()
        state["param_groups"][0]["step"] = 7
        optimizer.load_state_dict(state)
    model(batch(0, rank)).sum().backward()
    text = r"local_group=2 needs optimizer.attach\(ddp_model\)"
    if case == "on rank 1" and rank == 0:
        text = f"step failed on 1 of 2 ranks: rank 1: RuntimeError: {text}"
    with pytest.raises(RuntimeError, match=f"^{text}"):
        optimizer.step()


@on_ranks(2)
def test_nodes_of_one_rank_need_no_attach(rank: int) -> None:
    model, optimizer = plain(local_group=1)
    take_step(optimizer, model, batch(0, rank))
    assert optimizer.steps == 1


@on_ranks(4, timeout=30)
def test_an_attach_that_is_refused_on_one_rank_does_not_hang(rank: int) -> None:
    ddp, optimizer = plain(DistributedDataParallel(model_of()), local_group=2)
    if rank == 1:
        with pytest.raises(TypeError, match=r"attach\(\) needs a DistributedDataParallel"):
            optimizer.attach(ddp.module)
    else:
        optimizer.attach(ddp)
    optimizer.detach()


@on_ranks(2, timeout=30)
def test_a_save_that_fails_on_one_rank_of_a_node_raises_on_both(rank: int) -> None:
    """Fails before the inner block, as Trainer's save may, and both ranks go on."""
    ddp, optimizer = attached(local_group=2, vote_every=2)
    take_step(optimizer, ddp, batch(0, rank))

    def save() -> None:
        with optimizer.peers.together(Kind.SAVE):
            if rank == 1:
                raise OSError("full")
            with optimizer.peers.together(Kind.WEIGHTS):
                pass

    said = error_of(save)
    assert said.startswith("OSError: full" if rank == 1 else "Disagreement: ")
    assert "OSError: full" in said
    take_step(optimizer, ddp, batch(1, rank))
    assert optimizer.steps == 2


@on_ranks(4, timeout=30)
def test_ranks_of_a_node_that_do_different_things_raise_in_all_nodes(rank: int) -> None:
    ddp, optimizer = attached(local_group=2, vote_every=4)
    take_step(optimizer, ddp, batch(0, rank))
    take_step(optimizer, ddp, batch(1, rank))
    if rank == 1:
        said = error_of(optimizer.synchronize_momentum)
    else:
        said = error_of(optimizer.exchange_now)
    assert said.startswith("Disagreement: rank 1 synchronizes momenta while"), said
    optimizer.exchange_now()
    assert all(map(is_equal_everywhere, ddp.parameters()))


@pytest.mark.parametrize(
    ("how", "name"),
    [
        ("unfrozen", "0.weight"),
        ("unfrozen before attach", "0.weight"),
        ("unfrozen before attach, with state", "0.weight"),
        ("outside", "outside"),
    ],
)
@on_ranks(4)
def test_nodes_refuse_parameters_that_no_hook_averages(rank: int, how: str, name: str) -> None:
    model, outside = model_of(), nn.Parameter(torch.ones(3))
    weight = model[0].weight
    weight.requires_grad_(how == "outside")
    ddp = DistributedDataParallel(model)
    weight.requires_grad_(how != "unfrozen")
    named = [*model.named_parameters(), *([("outside", outside)] if how == "outside" else [])]
    optimizer = DistributedLion(named, lr=0.01, local_group=2)
    optimizer.attach(ddp)
    if how.endswith("with state"):
        get_optimizer_state_dict(ddp, optimizer)  # takes a step on gradients of zero
    weight.requires_grad_(True)
    backward(ddp, batch(0, rank))
    outside.grad = torch.full((3,), float(rank))
    with pytest.raises(RuntimeError, match=f"DDP doesn't average the gradient of '{name}' inside"):
        optimizer.step()
    optimizer.detach()


@on_ranks(4)
def test_another_wrapper_is_checked_like_the_first(rank: int) -> None:
    """Its hook doesn't average what was frozen when it was made."""
    ddp, optimizer = attached(local_group=2)
    model = ddp.module
    take_step(optimizer, ddp, batch(0, rank))
    del ddp
    gc.collect()
    model[0].weight.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    model[0].weight.requires_grad_(True)
    optimizer.attach(ddp)
    backward(ddp, batch(1, rank))
    with pytest.raises(RuntimeError, match="DDP doesn't average the gradient of"):
        optimizer.step()
    optimizer.detach()


@on_ranks(2)
def test_a_step_that_failed_can_be_taken_again(rank: int) -> None:
    ddp, optimizer = attached(local_group=2)
    take_step(optimizer, ddp, batch(0, rank))
    backward(ddp, batch(1, rank))
    for group in optimizer.param_groups:
        group["lr"] *= 1 + rank
    assert "first in 'group 0 lr'" in error_of(optimizer.step)
    for group in optimizer.param_groups:
        group["lr"] /= 1 + rank
    optimizer.step()
    assert optimizer.steps == 2


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("how", ["the model", "no_sync", "an unused parameter"])
@on_ranks(2)
def test_gradients_that_no_hook_averaged_in_the_node_are_refused(
    rank: int, how: str, every: int
) -> None:
    ddp, optimizer = attached(local_group=2, vote_every=every)
    optimizer.step()  # Without gradients.
    take_step(optimizer, ddp, batch(0, rank))
    ddp.module[0].bias.requires_grad_(how != "an unused parameter")
    with ddp.no_sync() if how == "no_sync" else contextlib.nullcontext():
        backward(ddp.module if how == "the model" else ddp, batch(1, rank))
    remedy = "call the DDP" if ddp.module[0].bias.requires_grad else "find_unused_parameters=True"
    with pytest.raises(RuntimeError, match=f"averaged no gradients inside the node.*: .*{remedy}"):
        optimizer.step()
    optimizer.detach()


@on_ranks(4)
def test_a_node_abstains_from_a_local_step_that_fails_on_one_of_its_ranks(rank: int) -> None:
    ddp, optimizer = attached(local_group=2, vote_every=9)
    for step in range(3):
        fails = (rank, step) == (1, 2)
        backward(ddp, batch(step, rank))
        with optimizer.common_weights() if fails else contextlib.nullcontext():
            assert (error_of(optimizer.step) != "") == fails
    for param in ddp.parameters():
        first, second, *_ = everyones(param.detach())
        assert torch.equal(first, second)
    optimizer.detach()


@on_ranks(2)
def test_nodes_on_one_rank_only_are_refused(rank: int) -> None:
    model, optimizer = plain(
        DistributedDataParallel(nn.Linear(64, 2)), local_group=2 if rank else None
    )
    backward(model, torch.ones(1, 64))
    call = functools.partial(optimizer.attach, model) if rank else optimizer.step
    with pytest.raises(Disagreement, match="rank 1 has local_group= while rank 0 steps: "):
        call()


@on_ranks(4)
def test_bytes_of_a_step_are_counted_inside_a_node_and_to_others(rank: int) -> None:
    ddp, optimizer = attached(local_group=2)
    for step in range(2):
        before = dataclasses.replace(optimizer.wire)
        take_step(optimizer, ddp, batch(step, rank))
        found = optimizer.wire
        assert 0 < found.last_bytes_sent == found.bytes_sent - before.bytes_sent
        assert 0 < found.last_node_bytes_sent == found.node_bytes_sent - before.node_bytes_sent
    optimizer.detach()


@on_ranks(4)
def test_the_ranks_of_a_node_that_abstains_are_named(rank: int) -> None:
    ddp, optimizer = attached(local_group=2, max_abstained_steps=1)
    backward(ddp, torch.full((1, 64), math.nan if rank == 3 else 1.0))
    with pytest.raises(RuntimeError, match="gradients of ranks 2 and 3 held a NaN or an Inf in 1"):
        optimizer.step()
    assert optimizer.wire.abstentions == 2


@pytest.mark.parametrize("how", ["noise", "no_sync"])
@on_ranks(4)
def test_a_node_whose_ranks_have_different_gradients_is_named(rank: int, how: str) -> None:
    ddp, optimizer = attached(local_group=2)
    backward(ddp, batch(0, rank))
    if how == "no_sync":
        with ddp.no_sync():
            ddp(batch(1, rank)).square().mean().backward()
    elif rank == 3:
        ddp.module[0].weight.grad.neg_()
    with warned() as texts:
        optimizer.step()
    node = "ranks 0 and 1" if how == "no_sync" else "ranks 2 and 3"
    assert len(texts) == (rank == 0)
    for text in texts:
        assert text.startswith(f"{node} vote as one node, but their gradients differ")


@pytest.mark.parametrize("options", [{"vote_every": 2}, {"vote_every": 1}])
@on_ranks(4, timeout=60)
def test_a_ddp_that_makes_nodes_wait_in_local_steps_is_announced(
    rank: int, options: dict[str, Any]
) -> None:
    local = options["vote_every"] > 1
    for wrapper in ({"find_unused_parameters": True}, {}, {"static_graph": True}):
        model = model_of()
        optimizer = DistributedLion(model.named_parameters(), local_group=2, **options)
        with warned() as texts:
            optimizer.attach(DistributedDataParallel(model, **wrapper))
        expected = rank == 0 and local and "find_unused_parameters" in wrapper
        assert [("ddp_find_unused_parameters=False" in text) for text in texts] == [True] * expected


@pytest.mark.parametrize("vote_every", [1, 2])
@on_ranks(2)
def test_a_single_node_is_warned_of_nothing(rank: int, vote_every: int) -> None:
    """Its only voter has the gradients of all voters, and waits for no other node."""
    model = model_of()
    optimizer = DistributedLion(model.named_parameters(), local_group=2, vote_every=vote_every)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    with warned() as texts:
        optimizer.attach(ddp)
        take_step(optimizer, ddp, batch(0, rank))
    assert texts == []
    optimizer.detach()


@pytest.mark.parametrize("how", ["gradient", "weight", "nan"])
@on_ranks(4, timeout=60)
def test_ranks_of_a_node_that_differ_are_found_at_the_exchange(rank: int, how: str) -> None:
    """They would send parts of different votes, and the common weights would differ for good."""
    ddp, optimizer = attached(local_group=2, vote_every=2)
    backward(ddp, batch(0, rank))
    weight = ddp.module[0].weight
    if rank == 3 and how == "gradient":
        weight.grad.neg_()
    optimizer.step()
    backward(ddp, batch(1, rank))
    if rank == 3 and how != "gradient":
        weight.data[0, 0] = math.nan if how == "nan" else 0.0
    with pytest.raises(Disagreement, match="ranks 2 and 3 vote as one node, but their weights"):
        optimizer.step()
