"""Momenta per rank in Trainer's checkpoints: whatever asks for a checkpoint, whoever resumes."""

from __future__ import annotations

import os
import shutil
import signal
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainerCallback

import hf_dlion
from hf_dlion.checkpoint import momentum_file
from hf_dlion.checkpoint.momentum_file import CheckpointError
from hf_dlion.trainer import DistributedLionCallback
from tests.support.spawn import RankPools
from tests.support.tiny import StopAt, tiny_args, tiny_data, tiny_trainer, weights_digest

pytestmark = pytest.mark.multiproc

STEPS = 40
HALF = 20


def files(folder: str | Path) -> list[str]:
    """Returns the names of all momentum files below a folder, with their folders."""
    found = Path(folder).rglob("*momentum*")
    return sorted(str(path.relative_to(folder)) for path in found)


def train(rank, world_size, folder, changes, *, resume=None, stop=None, **trainer_changes):
    """Trains, and returns the hash of the weights, the momenta, and what was warned of."""
    hf_dlion.register()
    args = tiny_args(folder, **changes)
    callbacks = [StopAt(stop)] if stop else []
    trainer = tiny_trainer(args, callbacks=callbacks, **trainer_changes)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.train(resume_from_checkpoint=resume)
    lion = trainer.optimizer.optimizer
    momenta = [s["exp_avg"].clone() for s in lion.state.values()]
    said = [str(w.message) for w in caught if "moment" in str(w.message)]
    return weights_digest(trainer.model), momenta, said, lion.steps


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


LONG = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": HALF, "logging_steps": 10}


def run_whole(rank, world_size, folder):
    return train(rank, world_size, folder, LONG)


def run_rest(rank, world_size, folder, changes=LONG):
    return train(rank, world_size, folder, changes, resume=f"{folder}/checkpoint-{HALF}")


@pytest.fixture(scope="module")
def whole(tmp_path_factory, ranks: RankPools):
    """A run of 40 steps on two ranks with a checkpoint at 20, never interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    return folder, ranks(2).run(run_whole, str(folder))


@pytest.fixture
def half(whole, tmp_path):
    """What is left of that run if it was killed after step 20."""
    shutil.copytree(whole[0] / f"checkpoint-{HALF}", tmp_path / f"checkpoint-{HALF}")
    return tmp_path


def test_every_rank_saves_beside_its_random_state(whole):
    names = {path.name for path in (whole[0] / "checkpoint-20").iterdir()}
    assert {"dlion_momentum_0_of_2.pt", "dlion_momentum_1_of_2.pt", "rng_state_1.pth"} <= names
    assert not same(whole[1][0][1], whole[1][1][1])


def test_a_resumed_run_ends_with_the_same_bits(whole, half, ranks):
    for rank, (digest, momenta, said, steps) in enumerate(ranks(2).run(run_rest, str(half))):
        assert digest == whole[1][0][0] == whole[1][1][0]
        assert same(momenta, whole[1][rank][1])
        assert not said
        assert steps == STEPS


def test_losing_a_momentum_would_show(whole, half, ranks):
    first, second = (half / "checkpoint-20" / f"dlion_momentum_{r}_of_2.pt" for r in range(2))
    momentum_file.write(second, replace(momentum_file.read(first), rank=1))
    results = ranks(2).run(run_rest, str(half))
    assert results[0][0] == results[1][0] != whole[1][0][0]


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_resumes(half, ranks, world_size):
    results = ranks(world_size).run(run_rest, str(half))
    assert len({digest for digest, *_ in results}) == 1
    assert [len(said) for _, _, said, _ in results] == [1] + [0] * (world_size - 1)
    assert {steps for *_, steps in results} == {STEPS}


def refused(rank, world_size, folder):
    with pytest.raises(CheckpointError) as caught:
        run_rest(rank, world_size, folder)
    return str(caught.value)


@pytest.mark.parametrize("which", ["one", "all", "optimizer"])
def test_missing_or_damaged_files_are_refused_on_every_rank(half, ranks, which):
    if which == "optimizer":
        (half / "checkpoint-20" / "optimizer.pt").write_bytes(b"junk")
        words = "optimizer.pt is damaged"
    else:
        (half / "checkpoint-20" / "dlion_momentum_1_of_2.pt").unlink()
        words = "dlion_momentum_1_of_2.pt is missing"
    if which == "all":
        (half / "checkpoint-20" / "dlion_momentum_0_of_2.pt").unlink()
        words = "no momentum of any rank"
    said = ranks(2).run(refused, str(half))
    assert said[0] == said[1]
    assert words in said[0]


class SaveAt(TrainerCallback):
    """What a user writes who wants a checkpoint at one step."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 3


class Terminate(TrainerCallback):
    """Stands for the scheduler that ends a job: every rank gets SIGTERM."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2:
            signal.raise_signal(signal.SIGTERM)


def act_at_once(trainer):
    """Has a SIGTERM count at once, not three seconds later in another thread."""
    for callback in trainer.callback_handler.callbacks:
        if hasattr(callback, "jit_manager"):
            callback.jit_manager.kill_wait = 0
            signal.signal(signal.SIGTERM, lambda *_, m=callback.jit_manager: m._enable_checkpoint())


def save_somehow(rank, world_size, folder, how):
    hf_dlion.register()
    best = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
    changes, callbacks = {
        "epoch": ({"save_strategy": "epoch", "max_steps": 12}, []),
        "best": ({"save_strategy": "best", **best, "load_best_model_at_end": True}, []),
        "limit": (
            {"save_strategy": "steps", "save_steps": 1, **best, "eval_strategy": "steps"}
            | {"save_total_limit": 1, "load_best_model_at_end": True},
            [],
        ),
        "callback": ({}, [SaveAt()]),
        "just in time": ({"enable_jit_checkpoint": True}, [Terminate()]),
        "model only": ({"save_strategy": "steps", "save_steps": 2, "save_only_model": True}, []),
    }[how]
    trainer = tiny_trainer(
        tiny_args(folder, **changes), callbacks=callbacks, eval_dataset=tiny_data(4)
    )
    act_at_once(trainer)
    trainer.train()
    return trainer.state.global_step


@pytest.mark.parametrize(
    ("how", "steps"),
    [
        ("epoch", [6, 12]),
        ("callback", [3]),
        ("just in time", [3]),
        ("model only", []),
    ],
)
def test_a_momentum_is_saved_whatever_asks_for_it(ranks, tmp_path, how, steps):
    ranks(2).run(save_somehow, str(tmp_path), how)
    expected = [f"checkpoint-{s}/dlion_momentum_{r}_of_2.pt" for s in steps for r in range(2)]
    assert files(tmp_path) == sorted(expected)


class TerminateOne(TrainerCallback):
    """One machine alone is taken away, or hears of it first."""

    def __init__(self, rank):
        self.rank = rank

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2 and args.process_index == self.rank:
            signal.raise_signal(signal.SIGTERM)


def terminate_one(rank, world_size, folder):
    hf_dlion.register()
    trainer = tiny_trainer(
        tiny_args(folder, enable_jit_checkpoint=True, max_steps=6), callbacks=[TerminateOne(1)]
    )
    act_at_once(trainer)
    trainer.train()
    return trainer.state.global_step, weights_digest(trainer.model)


def test_a_signal_to_one_rank_has_all_of_them_save_after_the_same_step(ranks, tmp_path):
    left, right = ranks(2).run(terminate_one, str(tmp_path))
    assert left == right
    assert left[0] == 3
    assert files(tmp_path) == [f"checkpoint-3/dlion_momentum_{r}_of_2.pt" for r in range(2)]
    assert hf_dlion.last_whole_checkpoint(tmp_path) == str(tmp_path / "checkpoint-3")


@pytest.mark.parametrize("how", ["best", "limit"])
def test_a_momentum_is_saved_with_the_best_model(ranks, tmp_path, how):
    ranks(2).run(save_somehow, str(tmp_path), how)
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert kept
    assert files(tmp_path) == [f"{k}/dlion_momentum_{r}_of_2.pt" for k in kept for r in range(2)]


def resume_model_only(rank, world_size, folder):
    changes = {"save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    train(rank, world_size, folder, changes)
    return train(rank, world_size, folder, changes, resume=f"{folder}/checkpoint-2")


def test_a_checkpoint_of_the_model_alone_resumes_with_a_new_momentum(ranks, tmp_path):
    results = ranks(2).run(resume_model_only, str(tmp_path))
    assert results[0][0] == results[1][0]
    assert [steps for *_, steps in results] == [2, 2]


MEAN = {**LONG, "max_steps": 8, "save_steps": 4, "optim_args": "checkpoint=mean"}


def mean_run(rank, world_size, folder, resume_with):
    whole = train(rank, world_size, folder, MEAN)
    changes = {**MEAN, "optim_args": resume_with}
    rest = train(rank, world_size, folder, changes, resume=f"{folder}/checkpoint-4")
    return whole, rest


@pytest.mark.parametrize("resume_with", ["checkpoint=mean", "checkpoint=per_rank"])
def test_the_mean_needs_one_file(ranks, tmp_path, resume_with):
    results = ranks(2).run(mean_run, str(tmp_path), resume_with)
    for whole, rest in results:
        assert whole[0] == rest[0] == results[0][0][0]
    kept = files(tmp_path / "checkpoint-4")
    assert not kept


def test_saving_the_momentum_does_not_change_the_training(whole, ranks, tmp_path):
    changes = {**LONG, "save_strategy": "no"}
    results = ranks(2).run(train, str(tmp_path), changes)
    assert results[0][0] == whole[1][0][0]


def resume_twice_on_one_trainer(rank, world_size, folder):
    hf_dlion.register()
    trainer = tiny_trainer(tiny_args(folder, **LONG))
    trainer.train()
    first = weights_digest(trainer.model)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{HALF}")
    callbacks = trainer.callback_handler.callbacks
    ours = sum(isinstance(callback, DistributedLionCallback) for callback in callbacks)
    return first, weights_digest(trainer.model), ours


def test_the_same_trainer_goes_back_to_its_checkpoint(whole, ranks, tmp_path):
    for first, second, ours in ranks(2).run(resume_twice_on_one_trainer, str(tmp_path)):
        assert first == second == whole[1][0][0]
        assert ours == 1


def scaler_goes_along(rank, world_size, folder):
    """Trainer has no GradScaler on the CPU: give it one, with another scale on every rank."""
    hf_dlion.register()
    trainer = tiny_trainer(tiny_args(folder, save_strategy="steps", save_steps=2))
    scale = 2.0 ** (3 + rank)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    trainer.accelerator.scaler.scale(torch.ones(()))
    trainer.train()
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return trainer.accelerator.scaler.state_dict()["scale"]


def test_every_rank_gets_its_own_scaler_back(ranks, tmp_path):
    assert ranks(2).run(scaler_goes_along, str(tmp_path)) == [8.0, 16.0]


def resume_differently(rank, world_size, folder, asked):
    train(rank, world_size, folder, {"max_steps": 2, "save_strategy": "steps", "save_steps": 1})
    with pytest.raises(CheckpointError) as caught:
        train(rank, world_size, folder, {}, resume=asked[rank])
    return str(caught.value)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((True, None), "True on ranks [0], nothing on ranks [1]"),
        ((False, "checkpoint-1"), "nothing on ranks [0], a name on ranks [1]"),
        ((True, "checkpoint-1"), "True on ranks [0], a name on ranks [1]"),
    ],
)
def test_ranks_that_resume_from_different_things_are_told_at_once(ranks, tmp_path, asked, words):
    asked = [str(tmp_path / own) if isinstance(own, str) else own for own in asked]
    for said in ranks(2).run(resume_differently, str(tmp_path), asked, timeout=30):
        assert said.startswith(f"cannot resume: resume_from_checkpoint is {words}")


def rotate(rank, world_size, folder, limit):
    """Goes back to checkpoint-1 where a crash left a half one of a higher number, and saves."""
    every = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    train(rank, world_size, folder, every)
    half = Path(folder, "checkpoint-2").rename(Path(folder, "checkpoint-20"))
    (half / "trainer_state.json").unlink()
    # As if it were the newest; where the times say nothing, its number says so.
    os.utime(half, (2e9, 2e9))
    train(
        rank,
        world_size,
        folder,
        {**every, "save_total_limit": limit},
        resume=f"{half.parent}/checkpoint-1",
    )
    return sorted(path.name for path in half.parent.glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("limit", "kept"), [(1, ["checkpoint-2"]), (2, ["checkpoint-1", "checkpoint-2"])]
)
def test_half_checkpoints_go_before_whole_ones_and_the_new_one_never(ranks, tmp_path, limit, kept):
    assert ranks(1).run(rotate, str(tmp_path), limit) == [kept]


class OwnNames(Trainer):
    """What a user writes who saves the weights in a file of another name."""

    def _save(self, output_dir=None, state_dict=None):
        Path(output_dir).mkdir(exist_ok=True)
        torch.save(self.model.state_dict(), Path(output_dir, "lora.pt"))

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None):
        state = torch.load(Path(resume_from_checkpoint, "lora.pt"), weights_only=True)
        self.model.load_state_dict(state)


def resume_own_names(rank, world_size, folder):
    hf_dlion.register()
    digests = []
    for resume in (None, True):
        args = tiny_args(folder, max_steps=3, save_strategy="steps", save_steps=2)
        trainer = tiny_trainer(args, OwnNames)
        trainer.train(resume_from_checkpoint=resume)
        digests.append(weights_digest(trainer.model))
        shutil.rmtree(Path(folder, "checkpoint-3"))
    return digests


def test_weights_of_another_name_are_weights(ranks, tmp_path):
    ((whole, resumed),) = ranks(1).run(resume_own_names, str(tmp_path))
    assert whole == resumed
    (tmp_path / "checkpoint-2" / "lora.pt").unlink()
    with pytest.warns(UserWarning, match="the model's weights are missing"):
        assert hf_dlion.last_whole_checkpoint(tmp_path) is None
