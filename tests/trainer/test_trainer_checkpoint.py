"""Momenta of all ranks in Trainer's checkpoints: whatever asks for one, whoever resumes."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import Trainer, TrainerCallback

import hf_dlion
import hf_dlion.trainer.patches as patches
from hf_dlion import CheckpointError
from tests.support.spawn import RankPools, on_ranks
from tests.support.tiny import StopAt, logged, tiny_args, tiny_data, tiny_trainer, weights_digest
from tests.support.training import warned

pytestmark = pytest.mark.multiproc

STEPS, HALF = 8, 4
SAVE_FILE = "hf_dlion.checkpoint.momentum_file.save_file"
LONG = {"max_steps": STEPS, "save_strategy": "steps", "save_steps": HALF}


def saved(folder: str | Path) -> list[str]:
    """Returns the momentum files below a folder, with their folders."""
    found = Path(folder).rglob("dlion_momentum*")
    return sorted(str(path.relative_to(folder)) for path in found)


def names(steps: list[int], ranks: int = 2) -> list[str]:
    return sorted(
        f"checkpoint-{step}/dlion_momentum_{rank}_of_{ranks}.safetensors"
        for step in steps
        for rank in range(ranks)
    )


def train(
    rank: int, world_size: int, folder: str, changes: dict[str, Any], **how: Any
) -> tuple[str, list[torch.Tensor], list[str], int]:
    """Trains; returns a hash of the weights, the momenta, what was warned of, and the steps."""
    callbacks = [StopAt(how["stop"])] if "stop" in how else []
    trainer = tiny_trainer(tiny_args(folder, **changes), callbacks=callbacks)
    with warned() as texts:
        trainer.train(resume_from_checkpoint=how.get("resume"))
    lion = trainer.optimizer.optimizer
    momenta = [state["exp_avg"].clone() for state in lion.state.values()]
    messages = [text for text in texts if "moment" in text]
    return weights_digest(trainer.model), momenta, messages, lion.steps


def run_rest(rank: int, world_size: int, folder: str, changes: dict[str, Any] = LONG) -> Any:
    return train(rank, world_size, folder, changes, resume=f"{folder}/checkpoint-{HALF}")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, pools: RankPools) -> tuple[Path, Any]:
    """A run on two ranks with a checkpoint in the middle, never interrupted."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, pools(2).run(train, str(folder), LONG)


@pytest.fixture
def half(uninterrupted: tuple[Path, Any], tmp_path: Path) -> Path:
    """What a run that was killed after its checkpoint has left."""
    shutil.copytree(uninterrupted[0] / f"checkpoint-{HALF}", tmp_path / f"checkpoint-{HALF}")
    return tmp_path


@pytest.mark.smoke
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    uninterrupted: tuple[Path, Any], half: Path, pools: RankPools
) -> None:
    straight = uninterrupted[1]
    assert not all(map(torch.equal, straight[0][1], straight[1][1]))  # Momenta differ.
    for rank, (digest, momenta, messages, steps) in enumerate(pools(2).run(run_rest, str(half))):
        assert digest == straight[0][0] == straight[1][0]
        assert all(map(torch.equal, momenta, straight[rank][1]))
        assert not messages
        assert steps == STEPS
    assert saved(half) == names([HALF, STEPS])


def train_without_a_save(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    """Also goes back to a checkpoint with a Trainer that has trained."""
    trainer = tiny_trainer(tiny_args(folder, **{**LONG, "save_strategy": "no"}))
    trainer.train()
    first = weights_digest(trainer.model)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-{HALF}")
    return first, weights_digest(trainer.model)


def test_saving_changes_nothing_and_a_trainer_goes_back_to_its_checkpoint(
    uninterrupted: tuple[Path, Any], half: Path, pools: RankPools
) -> None:
    expected = uninterrupted[1][0][0]
    assert pools(2).run(train_without_a_save, str(half)) == [(expected, expected)] * 2


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_resumes_with_a_warning(
    half: Path, pools: RankPools, world_size: int
) -> None:
    results = pools(world_size).run(run_rest, str(half))
    assert len({digest for digest, *_ in results}) == 1
    assert [len(messages) for _, _, messages, _ in results] == [1] + [0] * (world_size - 1)
    assert "was saved by 2 ranks" in results[0][2][0]
    assert {steps for *_, steps in results} == {STEPS}


def refused_after_a_damaged_state(rank: int, world_size: int, folder: str) -> str:
    def fail(*_: Any) -> None:
        raise OSError("bad sector")

    where = "torch.optim.lr_scheduler.LambdaLR.load_state_dict"
    damaged = mock.patch(where, fail) if rank == 1 else contextlib.nullcontext()
    error = OSError if rank == 1 else hf_dlion.Disagreement
    with damaged, pytest.raises(error) as caught:
        run_rest(rank, world_size, folder)
    return str(caught.value)


def adamw_resumes(rank: int, world_size: int, folder: str, first: str, second: str) -> str:
    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    tiny_trainer(tiny_args(folder, optim=first, **changes)).train()
    other = tiny_trainer(tiny_args(folder, optim=second, **changes))
    error: Any = ValueError if second == "dlion" else CheckpointError
    with pytest.raises(error, match="load the model's weights") as caught:
        other.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return str(caught.value)


def resume_on_one(rank: int, world_size: int, folder: str) -> str:
    resume = f"{folder}/checkpoint-{HALF}" if rank == 0 else None
    with pytest.raises(CheckpointError) as caught:
        train(rank, world_size, folder, LONG, resume=resume)
    return str(caught.value)


class SavesOnRank0(Trainer):
    """What a user may write who thinks that one rank should save."""

    full_disk = False

    def save_model(self, output_dir: str | None = None, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            if self.full_disk:
                raise OSError("no space left")
            super().save_model(output_dir, **kwargs)


def save_on_rank_0(rank: int, world_size: int, folder: str, full_disk: bool) -> str:
    """Trains with a best model, for which Trainer has a barrier after each save."""
    saving = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True}
    evaluating = {"eval_strategy": "steps", "eval_steps": 2, "optim_args": "vote_every=3"}
    args = tiny_args(folder, max_steps=4, **saving, **evaluating)
    trainer = tiny_trainer(args, SavesOnRank0, eval_dataset=tiny_data(8))
    trainer.full_disk = full_disk
    try:
        trainer.train()
    except (OSError, hf_dlion.Disagreement) as error:
        return f"{type(error).__name__}: {error}"
    return str(trainer.state.best_model_checkpoint)


@pytest.mark.parametrize("full_disk", [False, True])
def test_an_overridden_save_may_write_on_rank_0_alone(
    pools: RankPools, tmp_path: Path, full_disk: bool
) -> None:
    zero, one = pools(2).run(save_on_rank_0, str(tmp_path), full_disk, timeout=120)
    if full_disk:
        assert zero == "OSError: no space left"
        assert one == ("Disagreement: save failed on 1 of 2 ranks: rank 0: OSError: no space left")
    else:
        assert zero == one
        assert Path(zero, "trainer_state.json").exists()
        assert Path(zero, "model.safetensors").exists()


def ranks_that_differ(rank: int, world_size: int, folder: str, how: str) -> tuple[int, str]:
    """Returns the step at which a training ended, and its error."""
    place = f"{folder}/{rank}" if how in ("output_dir", "weights") else folder
    saving = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    trainer = tiny_trainer(tiny_args(place, **saving))
    resume = None
    if how == "weights":  # Rank 1 has a copy of the weights and nothing else.
        trainer = tiny_trainer(tiny_args(place, max_steps=4))
        resume = Path(place, "checkpoint-2")
        shutil.copytree(Path(folder, "uninterrupted", "checkpoint-2"), resume)
        for path in resume.glob("*") if rank else ():
            if path.name.startswith(("dlion", "optimizer", "scheduler")):
                path.unlink()
        os.chdir(place)
    with pytest.raises((CheckpointError, hf_dlion.Disagreement)) as caught:
        trainer.train(resume_from_checkpoint=resume and resume.name)
    return trainer.state.global_step, str(caught.value)


def test_ranks_that_differ_around_a_checkpoint_raise_together(
    pools: RankPools, tmp_path: Path
) -> None:
    for step, text in pools(2).run(ranks_that_differ, str(tmp_path), "output_dir"):
        assert step == 0
        assert (
            f"output_dir differs between ranks (rank 0: {tmp_path}/0; rank 1: {tmp_path}/1)" in text
        )
    pools(2).run(train, str(tmp_path / "uninterrupted"), {**LONG, "max_steps": 2, "save_steps": 2})
    for _, text in pools(2).run(ranks_that_differ, str(tmp_path), "weights"):
        assert "ranks are at different steps: rank 0: 2, rank 1: 0" in text


def test_what_cannot_be_loaded_is_refused_on_every_rank(
    half: Path, pools: RankPools, tmp_path: Path
) -> None:
    left, right = pools(2).run(refused_after_a_damaged_state, str(half))
    assert right == "bad sector"
    assert "rank 1: OSError: bad sector" in left
    left, right = pools(2).run(resume_on_one, str(half))
    assert left == right
    assert f"(rank 0: {half}/checkpoint-{HALF}; rank 1: None)" in left
    for pair in (("adamw_torch", "dlion"), ("dlion", "adamw_torch")):
        left, right = pools(2).run(adamw_resumes, str(tmp_path / pair[0]), *pair)
        assert left == right


class SaveAt(TrainerCallback):
    """What a user writes who wants a checkpoint at one step."""

    def on_step_end(self, args, state, control, **kwargs):
        control.should_save = state.global_step == 3


class Terminate(TrainerCallback):
    """A scheduler ends the job; only one rank hears of it."""

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == 2 and args.process_index == 1:
            signal.raise_signal(signal.SIGTERM)


def act_at_once(trainer: Trainer) -> None:
    """Makes a SIGTERM count at once, not three seconds later in another thread."""
    for callback in trainer.callback_handler.callbacks:
        if manager := getattr(callback, "jit_manager", None):
            signal.signal(signal.SIGTERM, lambda *_, m=manager: m._enable_checkpoint())


_BEST = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
HOW: dict[str, tuple[dict[str, Any], list[TrainerCallback]]] = {
    "epoch": ({"save_strategy": "epoch", "max_steps": 12}, []),
    "best": ({"save_strategy": "best", **_BEST, "load_best_model_at_end": True}, []),
    "limit": (
        {"save_strategy": "steps", "save_steps": 1, **_BEST, "save_total_limit": 1}
        | {"load_best_model_at_end": True},
        [],
    ),
    "callback": ({}, [SaveAt()]),
    "just in time": ({"enable_jit_checkpoint": True, "max_steps": 6}, [Terminate()]),
    "weights only": ({"save_strategy": "steps", "save_steps": 2, "save_only_model": True}, []),
}


def save_somehow(rank: int, world_size: int, folder: str) -> dict[str, tuple[int, str]]:
    results = {}
    for how, (changes, callbacks) in HOW.items():
        args = tiny_args(f"{folder}/{how}", **changes)
        trainer = tiny_trainer(args, callbacks=list(callbacks), eval_dataset=tiny_data(4))
        act_at_once(trainer)
        trainer.train()
        results[how] = trainer.state.global_step, weights_digest(trainer.model)
    return results


def resume_weights_only(rank: int, world_size: int, folder: str) -> tuple[str, int]:
    with logged() as messages:
        digest, _, _, steps = train(rank, world_size, folder, {}, resume=f"{folder}/checkpoint-2")
    assert "holds weights only" in messages[0]
    return digest, steps


@pytest.mark.slow
def test_momenta_are_saved_with_every_kind_of_checkpoint(pools: RankPools, tmp_path: Path) -> None:
    left, right = pools(2).run(save_somehow, str(tmp_path), timeout=120)
    assert left == right
    assert saved(tmp_path / "epoch") == names([6, 12])
    assert saved(tmp_path / "callback") == names([3])
    assert left["just in time"][0] == 3
    assert saved(tmp_path / "just in time") == names([3])
    assert saved(tmp_path / "weights only") == []
    for how in ("best", "limit"):
        kept = [int(path.name.split("-")[1]) for path in (tmp_path / how).glob("checkpoint-*")]
        assert kept
        assert saved(tmp_path / how) == names(kept)
    results = pools(2).run(resume_weights_only, str(tmp_path / "weights only"))
    assert results[0] == results[1]
    assert results[0][1] == 2  # Its own count of steps starts with its momenta.


def keep_scalers(rank: int, world_size: int, folder: str) -> float:
    """Trainer has no GradScaler on a CPU: gives it one, with another scale on every rank."""
    trainer = tiny_trainer(tiny_args(folder, save_strategy="steps", save_steps=2))
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + rank))
    trainer.accelerator.scaler.scale(torch.ones(()))
    trainer.train()
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return float(trainer.accelerator.scaler.state_dict()["scale"])


def test_every_rank_gets_its_own_scaler_back(pools: RankPools, tmp_path: Path) -> None:
    assert pools(2).run(keep_scalers, str(tmp_path)) == [8.0, 16.0]


def _full(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


# On which rank what fails in the second save.
FAILURES: dict[str, tuple[int, str]] = {
    "weights": (0, "transformers.Trainer._save"),
    "state": (0, "transformers.Trainer._save_scaler"),
    "random state": (1, "torch.random.get_rng_state"),
    "momentum": (1, SAVE_FILE),
    "end": (0, "transformers.TrainerState.save_to_json"),
    "rotation": (0, "transformers.trainer.rotate_checkpoints"),
}


def fail_to_save(rank: int, world_size: int, folder: str) -> dict[str, tuple[str, str]]:
    class Fill(TrainerCallback):
        """Fills the disk before the second save; the last save has no step after it."""

        def __init__(self, where: str) -> None:
            self.patch = mock.patch(where, _full)

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 4:
                self.patch.start()

    results = {}
    for name, (who, where) in FAILURES.items():
        best = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
        args = tiny_args(
            f"{folder}/{name}", save_strategy="steps", save_steps=2, save_total_limit=1, **best
        )
        fill = Fill(where)
        trainer = tiny_trainer(
            args, callbacks=[fill] if rank == who else [], eval_dataset=tiny_data(4)
        )
        try:
            trainer.train()
            results[name] = "nothing", ""
        except BaseException as error:
            results[name] = type(error).__name__, str(error)
        finally:
            mock.patch.stopall()
    return results


@pytest.mark.slow
def test_a_full_disk_on_one_rank_raises_on_all_and_leaves_the_older_checkpoint(
    pools: RankPools, tmp_path: Path
) -> None:
    results = pools(2).run(fail_to_save, str(tmp_path), timeout=120)
    for name, (who, _) in FAILURES.items():
        kind, text = results[who][name]
        assert kind in ("OSError", "CheckpointError"), (name, kind, text)
        assert "No space left" in text, name
        kind, text = results[1 - who][name]
        assert kind == "Disagreement", (name, kind, text)
        assert f"save failed on 1 of 2 ranks: rank {who}" in text, name
        older = tmp_path / name / "checkpoint-2"
        assert (older / "trainer_state.json").exists(), name
        complete = (tmp_path / name / "checkpoint-4" / "trainer_state.json").exists()
        assert complete == (name == "rotation"), name


def save_by_relative_path(
    rank: int, world_size: int, folder: str, disks: int, sharded: bool
) -> list[str]:
    """Returns the warnings of a run that saves; ranks have one disk together, or one each."""
    before, messages = os.getcwd(), list[str]()
    disk = Path(folder, str(rank % disks))
    disk.mkdir(exist_ok=True)
    os.chdir(disk)
    try:
        every = {"save_strategy": "steps", "save_steps": 2}
        with (
            mock.patch.object(patches.logger, "warning", messages.append),
            mock.patch.object(patches, "is_sharded", return_value=sharded),
        ):
            tiny_trainer(tiny_args(f"out {disks} {sharded}", **every)).train()
    finally:
        os.chdir(before)
    return messages


@pytest.mark.parametrize(
    ("disks", "sharded", "count"), [(1, False, 0), (2, False, 1), (2, True, 0)]
)
def test_a_disk_per_node_without_save_on_each_node_warns_once(
    pools: RankPools, tmp_path: Path, disks: int, sharded: bool, count: int
) -> None:
    first, second = pools(2).run(save_by_relative_path, str(tmp_path), disks, sharded)
    assert first == []
    assert ["Set save_on_each_node=True" in text for text in second] == [True] * count


@on_ranks(2)
def test_a_failed_save_over_a_complete_checkpoint_leaves_it_incomplete(
    rank: int, tmp_path: Path
) -> None:
    """Saves again where a complete checkpoint of the same step is, and fails."""
    changes = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2}
    tiny_trainer(tiny_args(tmp_path, **changes)).train()
    state = Path(tmp_path, "checkpoint-2", "trainer_state.json")
    assert state.exists() or rank == 1
    again: Callable[[], Any] = tiny_trainer(tiny_args(tmp_path, **changes)).train
    with mock.patch(SAVE_FILE, _full), pytest.raises(CheckpointError):
        again()
    assert not state.exists()
