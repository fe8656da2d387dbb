"""Calls in an unusual order or place: they work, or raise on all ranks and lose nothing."""

from __future__ import annotations

import copy
import math
import threading
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.checkpoint import load_momentum, save_momentum
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.failures import Disagreement
from tests.support.spawn import RankPools, on_ranks
from tests.support.training import is_equal_everywhere

multiproc = pytest.mark.multiproc


def filled(value: float, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Returns 128 equal weights with a gradient of one."""
    param = nn.Parameter(torch.full((128,), value, dtype=dtype))
    param.grad = torch.ones_like(param)
    return param


@on_ranks(2)
def test_replaced_weights_are_refused_until_the_optimizer_is_detached() -> None:
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


@on_ranks(2)
def test_a_node_without_its_hook_cannot_step() -> None:
    model = DistributedDataParallel(nn.Linear(64, 2))
    optimizer = DistributedLion(model.named_parameters(), lr=0.01, local_group=2)
    optimizer.attach(model)
    model(torch.ones(1, 64)).sum().backward()
    optimizer.step()
    optimizer.detach()
    with pytest.raises(RuntimeError, match=r"local_group=2 needs optimizer\.attach"):
        optimizer.step()


@on_ranks(2)
def test_nodes_on_one_rank_only_are_refused(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(64, 2))
    optimizer = DistributedLion(model.named_parameters(), local_group=2 if rank else None)
    said = ""
    try:
        optimizer.attach(model)
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
    except Disagreement as error:
        said = str(error)
    assert said.startswith("rank 1 has local_group= while rank 0 steps: ")


@on_ranks(2)
def test_a_parameter_frozen_on_one_rank_between_exchanges_is_named(rank: int) -> None:
    params = [filled(1.0), filled(2.0)]
    sync = {"momentum_sync_every": 1}
    optimizer = DistributedLion([("a", params[0]), ("b", params[1])], vote_every=2, **sync)
    optimizer.step()
    params[1].requires_grad_(rank == 0)
    with pytest.raises(Disagreement) as caught:
        optimizer.step()
    assert "first in 'frozen parameters': rank 0: [], rank 1: ['b']" in str(caught.value)


@on_ranks(2)
def test_momenta_of_averaged_gradients_are_equal_after_a_load(rank: int, tmp_path: Path) -> None:
    """Saves momenta that follow each rank's own gradients, and loads them to be averaged."""
    param = filled(1.0)
    optimizer = DistributedLion([("norm", param)], lr=0.01)
    param.grad = torch.linspace(-1, 1, 128) * (-1) ** rank
    optimizer.step()
    save_momentum(optimizer, tmp_path)
    param = filled(1.0)
    optimizer = DistributedLion([("norm", param)], lr=0.01, full_precision="norm")
    optimizer.step()
    load_momentum(optimizer, tmp_path)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert is_equal_everywhere(param)
    assert is_equal_everywhere(optimizer.state[param]["exp_avg"])


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


@on_ranks(4)
def test_the_ranks_of_a_node_that_abstains_are_named(rank: int) -> None:
    model = DistributedDataParallel(nn.Linear(64, 2))
    optimizer = DistributedLion(model.named_parameters(), local_group=2, max_abstained_steps=1)
    optimizer.attach(model)
    model(torch.full((1, 64), math.nan if rank == 3 else 1.0)).sum().backward()
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    assert optimizer.wire.abstentions == 2
    assert str(caught.value).startswith(
        "gradients of ranks 2 and 3 held a NaN or an Inf in 1 steps in a row"
    )


@on_ranks(2)
def test_an_exchange_that_fails_after_eval_leaves_the_common_weights(rank: int) -> None:
    param = filled(1.0)
    optimizer = DistributedLion([("w", param)], lr=0.01, vote_every=4)
    optimizer.step()
    with torch.no_grad():
        param.add_(100.0 * rank)
    optimizer.eval()
    with pytest.raises(Disagreement) as caught:
        optimizer.exchange_now()
    assert bool((param == 1.0).all())  # Still the common weights.
    assert str(caught.value).startswith("the weights of 'w' on rank 1 are farther")


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


@on_ranks(2)
def test_a_second_optimizer_that_is_not_attached_cannot_step() -> None:
    model = DistributedDataParallel(nn.Linear(64, 2))
    first = DistributedLion([model.module.weight])
    second = DistributedLion([model.module.bias])
    first.attach(model)  # Which accepts that the second one comes later.
    model(torch.ones(1, 64)).sum().backward()
    with pytest.raises(RuntimeError, match="attach this one too, or call detach"):
        second.step()


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


def exchanges_nothing(rank: int, world_size: int) -> list[float]:
    """Calls `exchange_now` before an evaluation that follows an exchange."""
    param = filled(1.0)
    optimizer = DistributedLion([("w", param)], lr=0.01, vote_every=2, check_replicas_every=2)
    found = []
    for _ in range(8):
        optimizer.exchange_now()
        for _ in range(2):
            param.grad = torch.full_like(param, (-1.0) ** rank)
            before = optimizer.wire.bytes_sent
            optimizer.step()
        found.append(optimizer.wire.bytes_sent - before)
    return found


@multiproc
def test_replicas_are_compared_if_empty_exchanges_come_between(pools: RankPools) -> None:
    first, *found = pools(2).run(exchanges_nothing)[0]
    assert found[1::2] == [found[1]] * 3
    assert found[0::2] == [found[1] + 24] * 4, first


@on_ranks(2)
def test_equal_optimizers_that_step_in_another_order_are_refused(rank: int) -> None:
    params = [filled(1.0), filled(1.0)]
    optimizers = [DistributedLion([("w", param)]) for param in params]
    first, second = optimizers[:: (-1) ** rank]
    first.step()
    with pytest.raises(Disagreement) as caught:
        second.step()
    assert str(caught.value).startswith("ranks use different optimizers: ")


@on_ranks(2)
def test_a_layout_changed_between_eval_and_train_is_refused(rank: int) -> None:
    model = nn.Conv2d(3, 4, 3)
    for param in model.parameters():
        param.grad = torch.full_like(param, (-1.0) ** rank)
    optimizer = DistributedLion(model.named_parameters(), lr=0.01, vote_every=4)
    optimizer.step()
    optimizer.eval()
    model.to(memory_format=torch.channels_last)
    with pytest.raises(RuntimeError, match="dtype or memory layout was changed"):
        optimizer.train()


@pytest.mark.parametrize("vote_every", [1, 2])
@on_ranks(2)
def test_a_compiled_function_may_step(rank: int, vote_every: int) -> None:
    def trained(compiled: bool) -> torch.Tensor:
        torch.manual_seed(0)
        model = nn.Linear(64, 2)
        optimizer = DistributedLion(model.named_parameters(), lr=0.01, vote_every=vote_every)

        def train(x: torch.Tensor) -> None:
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        step = torch.compile(train, backend="eager") if compiled else train
        for number in range(4):
            generator = torch.Generator().manual_seed(10 * number + rank)
            step(torch.randn(2, 64, generator=generator))
        return model.weight.detach()

    torch.testing.assert_close(trained(True), trained(False), rtol=0, atol=0)


@on_ranks(2)
def test_an_evaluation_in_inference_mode_may_exchange() -> None:
    param = filled(1.0)
    optimizer = DistributedLion([("w", param)], lr=0.01, vote_every=2)
    optimizer.step()
    with torch.inference_mode():
        optimizer.synchronize_momentum()
        optimizer.exchange_now()
        optimizer.eval()
        optimizer.train()
    for _ in range(2):
        optimizer.step()
    assert optimizer.wire.exchanges == 2
    assert is_equal_everywhere(optimizer.state[param]["exp_avg"])


@on_ranks(2)
def test_local_steps_go_on_after_the_error_about_abstentions(rank: int) -> None:
    param = filled(1.0)
    optimizer = DistributedLion([param], lr=0.01, vote_every=2, max_abstained_steps=3)
    raised = []
    for number in range(10):
        param.grad = torch.full_like(param, math.nan if rank and number < 3 else 1.0)
        try:
            optimizer.step()
        except RuntimeError:
            raised.append(number)
    assert raised == [3]


class Chooser:
    """Something that can't be copied, as a Trainer can't."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def choose(self, name: str, param: torch.Tensor) -> bool:
        return name == "norm"


def test_a_method_may_select_parameters() -> None:
    optimizer = DistributedLion([("norm", filled(1.0))], full_precision=Chooser().choose)
    optimizer.step()
    assert optimizer.steps == 1


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_passed_twice_is_refused() -> None:
    param = filled(1.0)
    with pytest.raises(ValueError, match="a parameter is in its group twice"):
        DistributedLion([param, param])


@on_ranks(2)
def test_gradients_are_unscaled_once_after_a_step_that_raised(rank: int) -> None:
    param = nn.Parameter(torch.ones(128))
    optimizer = DistributedLion([param], lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = []
    for number in range(3):
        scaler.scale((param * 2.0).sum()).backward()
        optimizer.param_groups[0]["lr"] = 0.02 if (rank, number) == (1, 1) else 0.01
        try:
            scaler.step(optimizer)
        except Disagreement:
            assert number == 1
        assert param.grad is not None
        found.append(float(param.grad[0]))
        scaler.update()
        optimizer.zero_grad()
    assert found == [2.0] * 3


@on_ranks(2)
def test_a_copy_would_lose_its_process_group() -> None:
    optimizer = DistributedLion([filled(1.0)], process_group=dist.group.WORLD)
    with pytest.raises(TypeError, match="can't be copied or pickled"):
        copy.deepcopy(optimizer)


@on_ranks(2)
def test_a_rank_without_parameters_is_named(rank: int) -> None:
    optimizer = DistributedLion([{"params": [filled(1.0)] if rank else []}])
    with pytest.raises(Disagreement) as caught:
        optimizer.step()
    assert "first in 'group 0 parameters': rank 0: 0, rank 1: 1" in str(caught.value)
