"""Calls in an order that nobody intends: they raise on all ranks, and lose nothing."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.checkpoint import load_momentum, save_momentum
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.failures import Disagreement
from tests.support.spawn import RankPools
from tests.support.training import is_equal_everywhere

multiproc = pytest.mark.multiproc


def filled(value: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Returns 128 equal weights with a gradient of one."""
    param = nn.Parameter(torch.full((128,), value, dtype=dtype))
    param.grad = torch.ones_like(param)
    return param


def replaces_weights_within_a_period(rank: int, world_size: int) -> None:
    param = filled(1.0, torch.bfloat16)
    optimizer = DistributedLion([param], lr=0.01, vote_every=4)
    for _ in range(2):
        optimizer.step()
    with torch.no_grad():
        param.fill_(7.0)
    for refused in (optimizer.step, optimizer.eval, optimizer.step, optimizer.detach):
        with pytest.raises(RuntimeError, match="values were changed between two steps"):
            refused()
        assert bool((param == 7.0).all())
    optimizer.step()  # Local steps begin again at the new weights.
    assert bool((param < 7.0).any())


@multiproc
def test_replaced_weights_are_refused_until_the_optimizer_is_detached(pools: RankPools) -> None:
    pools(2).run(replaces_weights_within_a_period)


def steps_a_detached_node(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(nn.Linear(64, 2))
    optimizer = DistributedLion(model.named_parameters(), lr=0.01, local_group=2)
    optimizer.attach(model)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.detach()
    with pytest.raises(RuntimeError, match=r"local_group=2 needs optimizer\.attach"):
        optimizer.step()


@multiproc
def test_a_node_without_its_hook_cannot_step(pools: RankPools) -> None:
    pools(2).run(steps_a_detached_node)


def has_a_node_alone(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(nn.Linear(64, 2))
    optimizer = DistributedLion(model.named_parameters(), local_group=2 if rank else None)
    said = ""
    try:
        optimizer.attach(model)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    except Disagreement as error:
        said = str(error)
    return said


@multiproc
def test_nodes_on_one_rank_only_are_refused(pools: RankPools) -> None:
    for text in pools(2).run(has_a_node_alone):
        assert text.startswith("rank 1 has local_group= while rank 0 steps: ")


def freezes_alone(rank: int, world_size: int) -> str:
    params = [filled(1.0), filled(2.0)]
    sync = {"momentum_sync_every": 1}
    optimizer = DistributedLion([("a", params[0]), ("b", params[1])], vote_every=2, **sync)
    optimizer.step()
    params[1].requires_grad_(rank == 0)
    with pytest.raises(Disagreement) as caught:
        optimizer.step()
    return str(caught.value)


@multiproc
def test_a_parameter_frozen_on_one_rank_between_exchanges_is_named(pools: RankPools) -> None:
    for text in pools(2).run(freezes_alone):
        assert "first in 'frozen parameters': rank 0: [], rank 1: ['b']" in text


def loads_momenta_that_differ(rank: int, world_size: int, folder: str) -> None:
    """Saves momenta that follow each rank's own gradients, and loads them to be averaged."""
    param = filled(1.0)
    optimizer = DistributedLion([("norm", param)], lr=0.01)
    param.grad = torch.linspace(-1, 1, 128) * (-1) ** rank
    optimizer.step()
    save_momentum(optimizer, folder)
    param = filled(1.0)
    optimizer = DistributedLion([("norm", param)], lr=0.01, full_precision="norm")
    optimizer.step()
    load_momentum(optimizer, folder)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert is_equal_everywhere(param)
    assert is_equal_everywhere(optimizer.state[param]["exp_avg"])


@multiproc
def test_momenta_of_averaged_gradients_are_equal_after_a_load(
    pools: RankPools, tmp_path: Path
) -> None:
    pools(2).run(loads_momenta_that_differ, str(tmp_path))


def loads_what_one_process_saved(rank: int, world_size: int, folder: str) -> list[str]:
    param = filled(1.0)
    optimizer = DistributedLion([("w", param)], lr=0.01)
    optimizer.load_state_dict(torch.load(f"{folder}/optimizer.pt"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_momentum(optimizer, folder)
        param.grad = torch.linspace(-1, 1, 128) * (-1) ** rank
        optimizer.step()
    return [str(one.message) for one in caught]


@multiproc
def test_ranks_that_load_one_ranks_momentum_are_told_once(pools: RankPools, tmp_path: Path) -> None:
    optimizer = DistributedLion([("w", filled(1.0))], lr=0.01)
    optimizer.step()
    save_momentum(optimizer, tmp_path)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    (said,), others = pools(2).run(loads_what_one_process_saved, str(tmp_path))
    assert "was saved by 1 rank and is loaded by 2" in said
    assert others == []


def abstains_in_a_node(rank: int, world_size: int) -> str:
    model = DistributedDataParallel(nn.Linear(64, 2))
    optimizer = DistributedLion(model.named_parameters(), local_group=2, max_abstained_steps=1)
    optimizer.attach(model)
    model(torch.full((1, 64), math.nan if rank == 3 else 1.0)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert optimizer.wire.abstentions == 2
    return str(caught.value)


@multiproc
def test_the_ranks_of_a_node_that_abstains_are_named(pools: RankPools) -> None:
    for text in pools(4).run(abstains_in_a_node):
        assert text.startswith(
            "gradients of ranks 2 and 3 held a NaN or an Inf in 1 steps in a row"
        )


def exchanges_replaced_weights(rank: int, world_size: int) -> str:
    param = filled(1.0)
    optimizer = DistributedLion([("w", param)], lr=0.01, vote_every=4)
    optimizer.step()
    with torch.no_grad():
        param.add_(100.0 * rank)
    optimizer.eval()
    with pytest.raises(Disagreement) as caught:
        optimizer.exchange_now()
    assert bool((param == 1.0).all())  # Still the common weights.
    return str(caught.value)


@multiproc
def test_an_exchange_that_fails_after_eval_leaves_the_common_weights(pools: RankPools) -> None:
    for text in pools(2).run(exchanges_replaced_weights):
        assert text.startswith("the weights of 'w' on rank 1 are farther")


def attaches_once_of_twice(rank: int, world_size: int) -> list[str]:
    """Wraps the model again after a detach, and forgets to attach the new wrapper."""
    torch.manual_seed(0)
    module = nn.Linear(64, 4)
    optimizer = DistributedLion(module.named_parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for attaches in (True, False):
            model = DistributedDataParallel(module)
            if attaches:
                optimizer.attach(model)
            x = torch.randn(2, 64, generator=torch.Generator().manual_seed(rank))
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if attaches:
                assert not caught
                optimizer.detach()
    return [str(one.message) for one in caught]


def steps_another_optimizer(rank: int, world_size: int) -> None:
    model = DistributedDataParallel(nn.Linear(64, 2))
    first = DistributedLion([model.module.weight])
    second = DistributedLion([model.module.bias])
    first.attach(model)  # Which accepts that the second one comes later.
    model(torch.ones(1, 64)).sum().backward()
    with pytest.raises(RuntimeError, match="attach this one too, or call detach"):
        second.step()


@multiproc
def test_a_second_optimizer_that_is_not_attached_cannot_step(pools: RankPools) -> None:
    pools(2).run(steps_another_optimizer)


@multiproc
def test_a_second_wrapper_that_is_not_attached_warns(pools: RankPools) -> None:
    first, second = pools(2).run(attaches_once_of_twice)
    assert len(first) == 1
    assert "add optimizer.attach(ddp_model)" in first[0]
    assert second == []


@pytest.mark.parametrize("word", ["all", "auto"])
def test_the_words_of_momentum_sync_are_patterns_elsewhere(word: str) -> None:
    with pytest.raises(ValueError, match=f"no parameter's name matches '{word}'"):
        DistributedLion([("weight", filled(1.0))], full_precision=word)


def test_bits_must_be_an_integer() -> None:
    with pytest.raises(ValueError, match=r"bits must be 1, 2, 4, or 8 \(got 2.0\)"):
        DistributedLion([filled(1.0)], bits=2.0)
