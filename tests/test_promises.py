"""Promises besides the arithmetic: cost of a step, lost ranks, forgotten `attach`."""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

import hf_dlion
from hf_dlion import guards
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.wire import LostRank
from tests.support.spawn import ends_of, forked, on_ranks, run_script
from tests.support.steps import backward, bits_of, plain, single, take_step
from tests.support.training import batch, error_of, is_equal_everywhere, warned

pytestmark = pytest.mark.multiproc
PACKAGE = str(Path(hf_dlion.__file__).parent) + os.sep


@pytest.mark.parametrize(
    ("when", "what"), [("local step", "a header"), ("exchange", "how far weights were moved")]
)
def test_a_lost_rank_is_named_at_the_next_exchange(tmp_path: Path, when: str, what: str) -> None:
    assert ends_of([forked(leaves, rank, tmp_path, when) for rank in (0, 1)]) == [0, 0]
    said = (tmp_path / "said").read_text()
    assert said.startswith(f"step 7: rank 0 lost rank 1 while waiting for {what}")


def leaves(rank: int, folder: Path, when: str) -> None:
    """Ends rank 1 before its sixth step, or in its second exchange."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    model, optimizer = plain(vote_every=4)
    for step in range(12):
        backward(model, batch(step, rank))
        if rank == 1 and (when, step) == ("local step", 5):
            os._exit(0)
        if rank == 1 and (when, step) == ("exchange", 7):
            optimizer.local.exchange = lambda *_: os._exit(0)  # type: ignore[method-assign]
        try:
            optimizer.step()
        except LostRank as error:
            (folder / "said").write_text(f"step {step}: {error}")
            os._exit(0)


@pytest.mark.parametrize("kind", ["ddp", "one of two", "local"])
@on_ranks(2)
def test_a_forgotten_attach_trains_and_warns_once(rank: int, kind: str) -> None:
    model: nn.Module = nn.Linear(64, 4)
    head: nn.Module = nn.Linear(4, 2)
    if kind != "local":
        model, head = DistributedDataParallel(model), DistributedDataParallel(head)
    named = [*model.named_parameters(), *head.named_parameters("head")]
    optimizer = DistributedLion(named, lr=0.1)
    if kind == "one of two":
        optimizer.attach(model)
    with warned() as texts:
        for step in range(2):
            optimizer.zero_grad()
            head(model(batch(step, rank))).square().sum().backward()
            optimizer.step()
    assert is_equal_everywhere(next(model.parameters()))
    found = [text for text in texts if "attach" in text]
    assert len(found) == (rank == 0 and kind != "local")
    assert all("add optimizer.attach(ddp_model)" in text for text in found)


@on_ranks(2, timeout=20)
def test_a_warning_that_is_an_error_comes_after_the_step(rank: int) -> None:
    param, optimizer = single()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        said = error_of(optimizer.step)
    assert (said != "") == (rank == 0)
    assert rank or said.startswith("UserWarning: all ranks have equal gradients")
    assert is_equal_everywhere(param)
    assert bool((param != 1.0).all())


@pytest.mark.parametrize("has_scheduler", [False, True])
@on_ranks(2)
def test_a_warning_shows_the_line_of_the_caller(rank: int, has_scheduler: bool) -> None:
    """Also if a scheduler of torch has wrapped `step`, whose warnings transformers turns off."""
    param, optimizer = single(vote_every=2)
    if has_scheduler:
        LambdaLR(optimizer, lambda _: 1.0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", category=UserWarning, module="torch.optim.lr_scheduler")
        optimizer.step()
        with torch.no_grad():
            param.fill_(torch.nan)
        optimizer.exchange_now()
    assert len(caught) == (2 if rank == 0 else 1)
    assert {warning.filename for warning in caught} == {__file__}


@pytest.mark.parametrize(("detaches", "vote_every"), [(True, 1), (False, 1), (False, 2)])
@on_ranks(2)
def test_a_second_wrapper_that_is_not_attached_warns(
    rank: int, detaches: bool, vote_every: int
) -> None:
    """Wraps again after a detach, or with more to train, and forgets to attach the new wrapper."""
    module, optimizer = plain(vote_every=vote_every)
    first = next(module.parameters()).requires_grad_(detaches)
    with warned() as texts:
        for attaches in (True, False):
            model = DistributedDataParallel(module)
            if attaches:
                optimizer.attach(model)
            take_step(optimizer, model, batch(0, rank))
            if attaches:
                assert not texts
                optimizer.detach() if detaches else first.requires_grad_()
    assert len(texts) == (rank == 0)
    assert all("add optimizer.attach(ddp_model)" in text for text in texts)


@on_ranks(2)
def test_a_second_wrapper_is_also_noticed_where_nothing_else_changes(rank: int) -> None:
    module, optimizer = plain()
    first = DistributedDataParallel(module)
    optimizer.attach(first)
    with mock.patch.object(guards, "COMPARED_FROM", 4), warned() as texts:
        for step in range(5):
            model = first if step < 2 else DistributedDataParallel(module)
            take_step(optimizer, model, batch(step, rank))
    assert ["add optimizer.attach(ddp_model)" in text for text in texts] == [True] * (rank == 0)
    optimizer.detach()


@on_ranks(2)
def test_a_second_optimizer_that_is_not_attached_is_missed_in_backward() -> None:
    model = DistributedDataParallel(nn.Linear(64, 2))
    first = DistributedLion([model.module.weight])
    second = DistributedLion([model.module.bias])
    first.attach(model)  # Which accepts that the second one comes later.
    loss = model(torch.ones(1, 64)).sum()
    with pytest.raises(RuntimeError, match="attach the DistributedLion that has them"):
        loss.backward()
    assert second.steps == 0


def normal(seed: int, rows: int) -> torch.Tensor:
    """Returns random numbers, from NumPy: torch's depend on the instructions."""
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, 70)).astype("f4"))


def main() -> None:
    """Trains on this rank and prints a hash of its parameters; run under torchrun."""
    if os.environ["RANK"] == "1":
        # Read when torch first computes: other instructions than on rank 0.
        os.environ["ATEN_CPU_CAPABILITY"] = "default"
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    hashes = []
    options: list[dict[str, Any]] = [
        {},
        {"aggregation": "average"},
        {"bits": 4},
        {"full_precision": "1"},
        {"vote_every": 3},
        {"vote_every": 3, "bits": 8},
    ]
    for own in options:
        for dtype in (torch.float32, torch.bfloat16):
            params = [(str(k), nn.Parameter(normal(0, n).to(dtype))) for k, n in [(0, 333), (1, 7)]]
            optimizer = DistributedLion(params, lr=0.013, weight_decay=0.11, **own)
            for step in range(5):
                for _, param in params:
                    param.grad = normal(10 * rank + step + 1, len(param)).to(dtype)
                optimizer.step()
            optimizer.exchange_now()
            tensors = [param for _, param in params]
            if "full_precision" in own:  # This momentum follows the mean gradient on all ranks.
                tensors.append(optimizer.state[params[1][1]]["exp_avg"])
            hashes += [hashlib.sha256(bits_of(tensor)).hexdigest()[:16] for tensor in tensors]
    capability = torch.backends.cpu.get_cpu_capability()
    sys.stdout.write(f"rank {rank} {capability} {' '.join(hashes)}\n")
    dist.destroy_process_group()


def test_replicas_are_equal_with_other_cpu_instructions() -> None:
    done = run_script(2, ["-m", "tests.test_promises"])
    lines = sorted(line for line in done.stdout.splitlines() if line.startswith("rank "))
    (_, _, first, *mine), (_, _, second, *theirs) = (line.split() for line in lines)
    assert second == "DEFAULT"
    assert first != second
    assert mine == theirs
    # The votes on the first parameter are the same whether the second one is averaged.
    assert len(set(mine)) == 24


if __name__ == "__main__":
    main()
