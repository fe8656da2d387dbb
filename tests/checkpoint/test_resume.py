"""Runs go on with more or fewer ranks, and with parameters that were thawed or added."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import TrainerCallback

import hf_dlion
from hf_dlion import DistributedLion, load_momentum, saving
from tests.support.accelerate_training import Loop
from tests.support.spawn import RankPools
from tests.support.tiny import tiny_args, tiny_trainer, weights_digest


def by_hand(rank, world_size, folder, load):
    torch.manual_seed(0)
    model = nn.Linear(9, 3)
    optimizer = DistributedLion(model.named_parameters(), lr=1e-2)
    if load:
        state = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        load_momentum(optimizer, folder)
    loaded = [s["exp_avg"].clone() for s in optimizer.state.values()]
    step(optimizer, rank, 2)
    if not load:
        with saving(optimizer, folder) as place:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            if rank == 0:
                torch.save(state, place / "state.pt")
            hf_dlion.save_momentum(optimizer, place)
        loaded = [s["exp_avg"].clone() for s in optimizer.state.values()]
    return loaded, weights_digest(model), optimizer.steps


def step(optimizer: DistributedLion, rank: int, steps: int) -> None:
    for _ in range(steps):
        for index, p in enumerate(p for g in optimizer.param_groups for p in g["params"]):
            seed = 100 * optimizer.steps + 10 * index + rank
            noise = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
            p.grad = noise if p.requires_grad else None
        optimizer.step()


def with_accelerate(rank, world_size, folder, load):
    loop = Loop()
    if load:
        loop.accelerator.load_state(folder)
        loaded = loop.momenta()
        loop.train(2)
    else:
        loop.train(2)
        loop.accelerator.save_state(folder)
        loaded = loop.momenta()
    return loaded, loop.digest(), loop.lion.steps


class Note(TrainerCallback):
    """Notes the momenta as the training begins."""

    def on_train_begin(self, args, state, control, optimizer=None, **kwargs):
        self.momenta = [s["exp_avg"].clone() for s in optimizer.state.values()]


def with_trainer(rank, world_size, folder, load):
    hf_dlion.register()
    output_dir, note = Path(folder).parent, Note()
    changes = {"max_steps": 4 if load else 2, "save_strategy": "steps", "save_steps": 2}
    trainer = tiny_trainer(tiny_args(output_dir, **changes), callbacks=[note])
    trainer.train(resume_from_checkpoint=load or None)
    lion = trainer.optimizer.optimizer
    last = [s["exp_avg"].clone() for s in lion.state.values()]
    return note.momenta if load else last, weights_digest(trainer.model), lion.steps


def resume(rank, world_size, folder, route):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        momenta, digest, steps = globals()[route](rank, world_size, folder, True)
    said = [str(w.message) for w in caught if "mean of the saved momenta" in str(w.message)]
    return momenta, digest, steps, said


@pytest.mark.multiproc
@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2), (2, 1), (1, 2)])
@pytest.mark.parametrize("route", ["by_hand", "with_accelerate", "with_trainer"])
def test_more_or_fewer_ranks_go_on_from_the_mean(ranks: RankPools, tmp_path, route, before, after):
    folder = str(tmp_path / "checkpoint-2")
    saved = ranks(before).run(globals()[route], folder, False)
    total = [sum(same[1:], same[0].clone()) for same in zip(*(s[0] for s in saved), strict=True)]
    results = ranks(after).run(resume, folder, route)
    for rank, (momenta, digest, steps, said) in enumerate(results):
        assert len(momenta) == len(total) > 0
        for found, summed in zip(momenta, total, strict=True):
            assert torch.equal(found, summed / before)
        assert (digest, steps) == (results[0][1], 4)
        assert len(said) == (rank == 0)


def thaw_by_hand(rank, world_size, folder, thaw_at, save_at, local_group, resume):
    """Takes six steps with a layer that is frozen at first and one that is added after two."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(8, 16)])
    named = list(model.named_parameters())
    optimizer = DistributedLion(named[:4], lr=1e-2, local_group=local_group)
    for p in model[1].parameters():
        p.requires_grad_(thaw_at == 0)
    if resume:
        state = torch.load(folder / "state.pt", weights_only=True)
        if save_at > 2:
            optimizer.add_param_group({"params": named[4:]})
        for p in model[1].parameters():
            p.requires_grad_(save_at > thaw_at)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        load_momentum(optimizer, folder)
    node_rank = rank if local_group is None else rank // local_group
    while optimizer.steps < 6:
        if optimizer.steps == thaw_at:
            for p in model[1].parameters():
                p.requires_grad_(True)
            fresh = [optimizer.state.get(p, {}) for p in model[1].parameters()]
            assert not any(state["exp_avg"].any() for state in fresh if state)
        if optimizer.steps == 2 and len(optimizer.param_groups) == 1:
            optimizer.add_param_group({"params": named[4:]})
        step(optimizer, node_rank, 1)
        if optimizer.steps == save_at and not resume:
            with saving(optimizer, folder) as place:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                if rank == 0:
                    torch.save(state, place / "state.pt")
                hf_dlion.save_momentum(optimizer, place)
    return weights_digest(model)


@pytest.mark.parametrize("local_group", [None, 2])
@pytest.mark.parametrize(("thaw_at", "save_at"), [(2, 4), (4, 2), (4, 3), (3, 3)])
def test_a_run_that_thaws_and_adds_parameters_goes_on_bit_for_bit(
    ranks, tmp_path, thaw_at, save_at, local_group
):
    pool, arguments = ranks(2 if local_group is None else 4), (thaw_at, save_at, local_group)
    straight = pool.run(thaw_by_hand, tmp_path, *arguments, False)
    resumed = pool.run(thaw_by_hand, tmp_path, *arguments, True)
    assert len({*straight, *resumed}) == 1


class Thaw(TrainerCallback):
    """Trains the first layer's weights from a step on, as a gradual thawing does."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_begin(self, args, state, control, model=None, **kwargs):
        model.model.embed_tokens.weight.requires_grad_(state.global_step >= self.at)


def thaw_in_trainer(rank, world_size, folder, resume):
    hf_dlion.register()
    changes = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2}
    changes |= {"ddp_find_unused_parameters": True}
    trainer = tiny_trainer(tiny_args(folder, **changes), callbacks=[Thaw(3)])
    trainer.train(resume_from_checkpoint=resume and f"{folder}/checkpoint-{resume}")
    return weights_digest(trainer.model)


@pytest.mark.multiproc
@pytest.mark.parametrize("resume_at", [2, 4])
def test_trainer_goes_on_bit_for_bit_when_a_callback_thaws(ranks, tmp_path, resume_at):
    straight = ranks(2).run(thaw_in_trainer, str(tmp_path), None)
    resumed = ranks(2).run(thaw_in_trainer, str(tmp_path), resume_at)
    assert len({*straight, *resumed}) == 1
