"""What lasts from step to step ends with the optimizer, and with its process group."""

from __future__ import annotations

import copy
import gc
from typing import Any

import torch
from torch import nn

from hf_dlion import DistributedLion


def trained(**options: Any) -> tuple[nn.Linear, DistributedLion]:
    """Returns a model and its optimizer after one step."""
    model = nn.Linear(6, 4)
    optimizer = DistributedLion(model.named_parameters(), lr=0.1, **options)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_an_engine_that_a_traceback_keeps_has_no_parameters_left() -> None:
    model, optimizer = trained(overlap=True)
    engine = optimizer._engine
    assert engine.alive
    del optimizer
    gc.collect()
    assert not engine.alive
    assert engine.groups == []
    assert not engine.joins
    # Neither a gradient nor a wrapper's search stumbles over it.
    model(torch.ones(2, 6)).sum().backward()
    assert engine.groups == []


def test_messages_of_a_process_group_that_is_gone_are_not_sent() -> None:
    model, optimizer = trained(overlap=True)
    # What a flight would need, and does not have.
    optimizer._engine.early._messages = [object()]  # type: ignore[attr-defined]
    before = model.weight.detach().clone()
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    assert optimizer.steps == 2
    assert not torch.equal(model.weight, before)


def test_a_share_of_a_momentum_is_made_whole_where_every_rank_votes() -> None:
    for local_group in (None, 1):
        model, optimizer = trained(local_group=local_group)
        state = copy.deepcopy(optimizer.state_dict())
        for group in state["param_groups"]:
            group.pop("dlion", None)
        whole = state["state"][0]["exp_avg"]
        state["state"][0]["exp_avg"] = whole.view(-1)[:12].clone()
        state["dlion"]["shard"] = {"members": [[0, 1]], "ranges": {0: [0, 12]}}
        optimizer.load_state_dict(state)
        loaded = optimizer.state[model.weight]["exp_avg"]
        assert loaded.shape == whole.shape
        assert torch.equal(loaded.view(-1)[:12], whole.view(-1)[:12])
        assert not loaded.view(-1)[12:].any()


def test_a_state_can_be_set_twice() -> None:
    _, optimizer = trained()
    state = optimizer.__getstate__()
    for _ in range(2):
        twin = DistributedLion.__new__(DistributedLion)
        twin.__setstate__(state)
        assert twin.steps == 1


def test_a_parameter_with_the_number_of_one_that_is_gone_is_watched() -> None:
    gone, new = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))
    optimizer = DistributedLion([gone])
    handles = optimizer._engine.hooks._handles
    handles[id(new)] = handles.pop(id(gone))
    optimizer.param_groups[0]["params"] = [new]
    del gone
    gc.collect()
    for _ in range(2):
        new.sum().backward()
        seen = optimizer._engine.presence.seen([new])
        optimizer.step()
    assert seen == [new]
