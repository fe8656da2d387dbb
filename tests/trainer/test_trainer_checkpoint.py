"""Momenta of all ranks in Trainer's checkpoints: whatever asks for one, whoever resumes."""

from __future__ import annotations

import contextlib
import errno
import re
import shutil
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainingArguments,
)

import hf_dlion.trainer.patches as patches
from hf_dlion import CheckpointError, Disagreement
from tests.support.spawn import RankPools, on_ranks
from tests.support.tiny import (
    VOCABULARY,
    At,
    logged,
    tiny_args,
    tiny_data,
    tiny_llama,
    tiny_trainer,
    trained,
    weights_digest,
)
from tests.support.training import (
    agree,
    check_error,
    error_of,
    is_equal_everywhere,
    same,
    warned,
)

STEPS, HALF = 8, 4
SAVE_FILE = "hf_dlion.checkpoint.momentum_file.save_file"
LONG = {"max_steps": STEPS, "save_every": HALF}


def saved(folder: str | Path) -> list[str]:
    """Returns the momentum files below a folder, with their folders."""
    found = Path(folder).rglob("dlion_momentum*")
    return sorted(str(path.relative_to(folder)) for path in found)


def names(steps: list[int]) -> list[str]:
    files = [f"dlion_momentum_{rank}_of_2.safetensors" for rank in range(2)]
    return sorted(f"checkpoint-{step}/{file}" for step in steps for file in files)


def momenta_of(trainer: Trainer) -> list[torch.Tensor]:
    return [state["exp_avg"].clone() for state in trainer.optimizer.optimizer.state.values()]


def train_all(rank: int, world_size: int, folder: str) -> tuple[str, list[torch.Tensor]]:
    trainer = trained(tiny_args(folder, **LONG))
    return weights_digest(trainer.model), momenta_of(trainer)


def train_rest(folder: Path) -> tuple[Trainer, list[str]]:
    """Resumes from the checkpoint in the middle; returns what is warned of momenta, too."""
    with warned() as texts:
        trainer = trained(tiny_args(folder, **LONG), resume=f"{folder}/checkpoint-{HALF}")
    assert trainer.optimizer.optimizer.steps == STEPS
    return trainer, [text for text in texts if "moment" in text]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory, pools: RankPools) -> tuple[Path, Any]:
    """A run on two ranks with a checkpoint in the middle, never interrupted."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    return folder, pools(2).run(train_all, str(folder))


@pytest.fixture
def half(uninterrupted: tuple[Path, Any], tmp_path: Path) -> Path:
    """What a run that was killed after its checkpoint has left."""
    shutil.copytree(uninterrupted[0] / f"checkpoint-{HALF}", tmp_path / f"checkpoint-{HALF}")
    return tmp_path


@pytest.mark.smoke
@on_ranks(2)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(
    rank: int, uninterrupted: tuple[Path, Any], half: Path
) -> None:
    digest, momenta = uninterrupted[1][rank]
    # Momenta are in the files of the ranks only.
    assert torch.load(half / f"checkpoint-{HALF}" / "optimizer.pt")["state"] == {}
    trainer, messages = train_rest(half)
    assert agree(digest, weights_digest(trainer.model))
    assert same(momenta, momenta_of(trainer))
    assert not is_equal_everywhere(momenta[0])
    assert not messages
    assert saved(half) == names([HALF, STEPS])


def test_a_process_alone_also_finds_its_momenta_in_the_common_state(tmp_path: Path) -> None:
    """Ray Tune's checkpoints have nothing else."""
    with warned():
        trainer = trained(tiny_args(tmp_path, max_steps=2, save_strategy="steps", save_steps=2))
    kept = torch.load(tmp_path / "checkpoint-2" / "optimizer.pt")["state"]
    assert same([state["exp_avg"] for state in kept.values()], momenta_of(trainer))


def test_a_process_alone_misses_the_momenta_of_several_ranks(half: Path) -> None:
    for path in (half / f"checkpoint-{HALF}").glob("dlion_momentum*"):
        path.unlink()
    with (
        warned(),
        pytest.raises(CheckpointError, match="momenta were not saved"),
    ):
        trained(tiny_args(half, **LONG), resume=f"{half}/checkpoint-{HALF}")


@on_ranks(2)
def test_saving_changes_nothing_and_a_trainer_goes_back_to_its_checkpoint(
    uninterrupted: tuple[Path, Any], half: Path
) -> None:
    expected = uninterrupted[1][0][0]
    trainer = trained(tiny_args(half, max_steps=STEPS))
    assert weights_digest(trainer.model) == expected
    trainer.train(resume_from_checkpoint=f"{half}/checkpoint-{HALF}")
    assert weights_digest(trainer.model) == expected


@on_ranks(2)
def test_a_state_that_one_rank_cannot_load_is_refused_on_every_rank(rank: int, half: Path) -> None:
    where = "torch.optim.lr_scheduler.LambdaLR.load_state_dict"
    damaged = mock.patch(where, side_effect=OSError("bad sector"))
    with damaged if rank == 1 else contextlib.nullcontext():
        check_error(error_of(train_rest, half), "{named}OSError: bad sector$", rank)


@pytest.mark.parametrize(
    ("step", "remedy"),
    [
        (STEPS, "step 8, .* step 4. The folder mixes two saves: resume from another checkpoint"),
        (None, r"earlier one\). Resume from another checkpoint, or load this one's model"),
    ],
)
@on_ranks(2)
def test_momenta_of_another_save_or_none_have_a_remedy_for_trainer(
    rank: int, uninterrupted: tuple[Path, Any], half: Path, step: int | None, remedy: str
) -> None:
    for path in (half / f"checkpoint-{HALF}").glob(f"dlion_momentum_{rank}_*"):
        path.unlink()
        if step is not None:
            shutil.copy(uninterrupted[0] / f"checkpoint-{step}" / path.name, path)
    dist.barrier()
    with pytest.raises(CheckpointError, match=remedy):
        train_rest(half)


@pytest.mark.parametrize("remedied", [False, True])
@on_ranks(2)
def test_weights_that_trainer_does_not_load_are_named(
    rank: int, tmp_path: Path, remedied: bool
) -> None:
    """The file has another name for each expert, under which the model doesn't find its own."""
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=2, num_experts_per_tok=1,
    )  # fmt: skip
    models = []
    for resume in (None, f"{tmp_path}/checkpoint-{HALF}"):
        torch.manual_seed(len(models))
        if models and remedied:
            models.append(MixtralForCausalLM.from_pretrained(resume, dtype=torch.float32))
        else:
            models.append(MixtralForCausalLM(config))
        with warned() as texts:
            trained(tiny_args(tmp_path, **LONG), resume=resume, model=models[-1])
    assert sum("from_pretrained(checkpoint)" in t for t in texts) == (not remedied and rank == 0)
    assert (weights_digest(models[0]) == weights_digest(models[1])) == remedied


@on_ranks(2)
def test_a_checkpoint_that_one_rank_alone_resumes_from_is_refused(rank: int, half: Path) -> None:
    resume = f"{half}/checkpoint-{HALF}" if rank == 0 else None
    text = re.escape(f"(rank 0: {half}/checkpoint-{HALF}; rank 1: None)")
    with pytest.raises(CheckpointError, match=text):
        trained(tiny_args(half, **LONG), resume=resume)


@pytest.mark.parametrize(
    ("first", "second", "error"),
    [("adamw_torch", "dlion", ValueError), ("dlion", "adamw_torch", CheckpointError)],
)
@on_ranks(2)
def test_a_checkpoint_of_another_optimizer_is_refused_on_every_rank(
    tmp_path: Path, first: str, second: str, error: type[Exception]
) -> None:
    trained(tiny_args(tmp_path, optim=first, max_steps=2, save_every=2))
    with pytest.raises(error, match="oad the model's weights") as caught:
        trained(tiny_args(tmp_path, optim=second), resume=f"{tmp_path}/checkpoint-2")
    assert agree(str(caught.value))


class SavesOnRank0(Trainer):
    """What a user may write who thinks that one rank should save."""

    full_disk = False

    def save_model(self, output_dir: str | None = None, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            if self.full_disk:
                raise OSError("no space left")
            super().save_model(output_dir, **kwargs)


@pytest.mark.parametrize("full_disk", [False, True])
@on_ranks(2, timeout=120)
def test_an_overridden_save_may_write_on_rank_0(rank: int, tmp_path: Path, full_disk: bool) -> None:
    """Trains with a best model, for which Trainer has a barrier after each save."""
    args = tiny_args(
        tmp_path, save_every=2, eval_every=2, load_best_model_at_end=True, optim_args="vote_every=3"
    )
    trainer = tiny_trainer(args, SavesOnRank0, eval_dataset=tiny_data(8))
    trainer.full_disk = full_disk
    if full_disk:
        text = ("^no space left$", "^save failed on 1 of 2 ranks: rank 0: OSError: no space left$")
        with pytest.raises((OSError, Disagreement)[rank], match=text[rank]):
            trainer.train()
    else:
        trainer.train()
        best = trainer.state.best_model_checkpoint
        assert agree(best)
        assert Path(best, "trainer_state.json").exists()
        assert Path(best, "model.safetensors").exists()


@on_ranks(2)
def test_different_output_folders_are_refused_before_a_step(rank: int, tmp_path: Path) -> None:
    trainer = tiny_trainer(tiny_args(tmp_path / str(rank), save_every=2))
    text = f"output_dir differs between ranks (rank 0: {tmp_path}/0; rank 1: {tmp_path}/1)"
    with pytest.raises(CheckpointError, match=re.escape(text)):
        trainer.train()
    assert trainer.state.global_step == 0


@on_ranks(2)
def test_a_rank_that_resumes_from_weights_alone_fails_all_ranks(rank: int, tmp_path: Path) -> None:
    trained(tiny_args(tmp_path, max_steps=2, save_every=2))
    folder = tmp_path / str(rank)
    shutil.copytree(tmp_path / "checkpoint-2", folder / "checkpoint-2")
    for name in ("dlion*", "optimizer*", "scheduler*") if rank == 1 else ():
        for path in (folder / "checkpoint-2").glob(name):
            path.unlink()
    text = "ranks are at different steps: rank 0: 2, rank 1: 0"
    with contextlib.chdir(folder), pytest.raises(Disagreement, match=text):
        trained(tiny_args(folder), resume="checkpoint-2")


@on_ranks(2)
def test_a_rank_that_cannot_load_the_weights_fails_all_ranks(rank: int, tmp_path: Path) -> None:
    trained(tiny_args(tmp_path, max_steps=2, save_every=2))
    folder = tmp_path / str(rank)
    shutil.copytree(tmp_path / "checkpoint-2", folder / "checkpoint-2")
    if rank == 1:
        (folder / "checkpoint-2" / "model.safetensors").unlink()
    error = (CheckpointError, ValueError)[rank]
    text = (
        r"other ranks can't load the model's weights \(rank 1: ValueError: Can't find",
        "Can't find",
    )
    with contextlib.chdir(folder), pytest.raises(error, match=text[rank]):
        trained(tiny_args(folder), resume="checkpoint-2")


def save_now(control: TrainerControl, **_: Any) -> None:
    control.should_save = True


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


_BEST = {"eval_every": 1, "metric_for_best_model": "loss", "load_best_model_at_end": True}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "callbacks", "end", "saves"),
    [
        pytest.param({"save_strategy": "epoch", "max_steps": 12}, [], 12, [6, 12], id="epoch"),
        pytest.param({"save_strategy": "best", **_BEST}, [], 4, None, id="best"),
        pytest.param({"save_every": 1, "save_total_limit": 1, **_BEST}, [], 4, None, id="limit"),
        pytest.param({}, [At(3, save_now)], 4, [3], id="callback"),
        pytest.param({"enable_jit_checkpoint": True}, [Terminate()], 3, [3], id="just in time"),
    ],
)
@on_ranks(2)
def test_momenta_are_saved_with_every_kind_of_checkpoint(
    tmp_path: Path, changes: dict[str, Any], callbacks: Any, end: int, saves: list[int] | None
) -> None:
    args = tiny_args(tmp_path, **changes)
    trainer = tiny_trainer(args, callbacks=callbacks, eval_dataset=tiny_data(4))
    act_at_once(trainer)
    # Just in time, all ranks remove one file, and here each finds that another was faster.
    with mock.patch("os.remove", side_effect=FileNotFoundError):
        trainer.train()
    assert agree(weights_digest(trainer.model))
    assert trainer.state.global_step == end
    kept = saves or [int(path.name.split("-")[1]) for path in tmp_path.glob("checkpoint-*")]
    assert kept
    assert saved(tmp_path) == names(kept)


@on_ranks(2)
def test_a_checkpoint_of_weights_alone_resumes_with_a_message(tmp_path: Path) -> None:
    trained(tiny_args(tmp_path, save_every=2, save_only_model=True))
    assert saved(tmp_path) == []
    with logged() as messages:
        trainer = trained(tiny_args(tmp_path), resume=f"{tmp_path}/checkpoint-2")
    assert "holds weights only" in messages[0]
    assert agree(weights_digest(trainer.model))
    # Its own count of steps starts with its momenta.
    assert trainer.optimizer.optimizer.steps == 2


@on_ranks(2)
def test_momenta_on_some_nodes_alone_are_refused_on_all(rank: int, tmp_path: Path) -> None:
    """The second node's disk also has files of an earlier run."""
    trained(tiny_args(tmp_path / "shared", save_every=2, save_only_model=True))
    node = tmp_path / f"node{rank}"
    shutil.copytree(tmp_path / "shared" / "checkpoint-2", node / "checkpoint-2")
    if rank == 1:
        (node / "checkpoint-2" / "dlion_momentum_1_of_2.safetensors").touch()
    text = r"checkpoint-2 has momenta differs between ranks \(rank 0: False; rank 1: True\)"
    with contextlib.chdir(node), pytest.raises(CheckpointError, match=text):
        trained(tiny_args(tmp_path), resume="checkpoint-2")


@on_ranks(2)
def test_every_rank_gets_its_own_scaler_back(rank: int, tmp_path: Path) -> None:
    """Trainer has no GradScaler on a CPU, so the test gives it one."""
    trainer = tiny_trainer(tiny_args(tmp_path, save_every=2))
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (3 + rank))
    trainer.accelerator.scaler.scale(torch.ones(()))
    trainer.train()
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    trainer.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-2")
    assert trainer.accelerator.scaler.state_dict()["scale"] == 2.0 ** (3 + rank)


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


@pytest.mark.slow
@pytest.mark.parametrize(("who", "where"), FAILURES.values(), ids=FAILURES)
@on_ranks(2)
def test_a_full_disk_on_one_rank_raises_on_all_and_leaves_the_older_checkpoint(
    rank: int, tmp_path: Path, who: int, where: str
) -> None:
    args = tiny_args(
        tmp_path, save_every=2, save_total_limit=1, eval_every=2, metric_for_best_model="loss"
    )
    # Before the second save; the last save has no step after it.
    callbacks = [At(4, lambda **_: mock.patch(where, _full).start())] if rank == who else []
    trainer = tiny_trainer(args, callbacks=callbacks, eval_dataset=tiny_data(4))
    try:
        with pytest.raises((OSError, CheckpointError, Disagreement)) as caught:
            trainer.train()
    finally:
        mock.patch.stopall()
    if rank == who:
        assert caught.type in (OSError, CheckpointError)
        assert "No space left" in str(caught.value)
    else:
        assert caught.type is Disagreement
        assert f"save failed on 1 of 2 ranks: rank {who}" in str(caught.value)
    dist.barrier()
    assert (tmp_path / "checkpoint-2" / "trainer_state.json").exists()
    complete = (tmp_path / "checkpoint-4" / "trainer_state.json").exists()
    assert complete == where.endswith("rotate_checkpoints")


@pytest.mark.parametrize(
    ("disks", "sharded", "count"), [(1, False, 0), (2, False, 1), (2, True, 0)]
)
@on_ranks(2)
def test_a_disk_per_node_without_save_on_each_node_warns_once(
    rank: int, tmp_path: Path, disks: int, sharded: bool, count: int
) -> None:
    """Saves by a relative path; ranks have one disk together, or one each."""
    disk, messages = tmp_path / str(rank % disks), list[str]()
    disk.mkdir(exist_ok=True)
    with (
        contextlib.chdir(disk),
        mock.patch.object(patches.logger, "warning", messages.append),
        mock.patch.object(patches, "shards_model", return_value=sharded),
    ):
        # Transformers logs a message once per text in a process.
        trained(tiny_args(f"out {disks} {sharded}", save_every=2))
    assert ["Set save_on_each_node=True" in text for text in messages] == [True] * count * rank


@pytest.mark.parametrize("adapter", [False, True])
@on_ranks(2)
def test_a_run_resumes_from_checkpoints_on_a_disk_per_node(
    rank: int, tmp_path: Path, adapter: bool
) -> None:
    """Each rank is the first of a node, and has a folder of its own."""
    disk = tmp_path / str(rank)
    disk.mkdir()

    def run(resume: str | None = None) -> str:
        torch.manual_seed(0)
        args = tiny_args("out", save_every=2, save_on_each_node=True)
        model = tiny_llama()
        if adapter:
            model = get_peft_model(
                model, LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
            )
        return weights_digest(trained(args, model=model, resume=resume).model)

    with contextlib.chdir(disk), mock.patch.object(TrainingArguments, "should_save", True):
        straight = run()
        weights = "adapter_model.safetensors" if adapter else "model.safetensors"
        assert Path("out", "checkpoint-2", weights).exists()
        assert run("out/checkpoint-2") == straight


@on_ranks(2)
def test_a_failed_save_over_a_checkpoint_leaves_it_incomplete(rank: int, tmp_path: Path) -> None:
    """Saves again where a complete checkpoint of the same step is, and fails."""
    args = tiny_args(tmp_path, max_steps=2, save_every=2)
    trained(args)
    state = Path(tmp_path, "checkpoint-2", "trainer_state.json")
    assert state.exists() or rank == 1
    with mock.patch(SAVE_FILE, _full), pytest.raises(CheckpointError):
        trained(args)
    assert not state.exists()
