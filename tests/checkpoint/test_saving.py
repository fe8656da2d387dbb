"""A save that fails on one rank fails on all, and leaves the checkpoint before it whole."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import os
import random
import resource
import shutil
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from torch import nn
from transformers import TrainerCallback

import hf_dlion
from hf_dlion import DistributedLion, last_whole_checkpoint, saving
from hf_dlion.checkpoint import whole as whole_checkpoint
from hf_dlion.checkpoint.access import gather_objects
from hf_dlion.checkpoint.agreed import agreed_checkpoint
from hf_dlion.checkpoint.momentum_file import CheckpointError
from hf_dlion.checkpoint.whole import INCOMPLETE
from hf_dlion.ranks.agreement import Disagreement
from tests.support.accelerate_training import Loop
from tests.support.spawn import RankPools
from tests.support.tiny import StopAt, tiny_args, tiny_data, tiny_trainer, weights_digest

pytestmark = pytest.mark.multiproc


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Lets this process write the first `size` bytes of a file only; the kernel refuses more."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def step(model: nn.Module, optimizer: DistributedLion, rank: int) -> None:
    for p in model.parameters():
        generator = torch.Generator().manual_seed(10 * optimizer.steps + rank)
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()


def save_by_hand(model: nn.Module, optimizer: DistributedLion, folder: str) -> None:
    with saving(optimizer, folder) as place:
        if optimizer.rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, place / "state.pt")
        hf_dlion.save_momentum(optimizer, place)


def fill_disk_by_hand(rank, world_size, folder, failing, seeds):
    """Saves, fails to save, goes on and saves again; returns what was raised."""
    torch.manual_seed(0)
    model = nn.Linear(40, 7)
    optimizer = DistributedLion(model.named_parameters())
    step(model, optimizer, rank)
    save_by_hand(model, optimizer, f"{folder}/checkpoint_1")
    told = []
    for seed in seeds:
        step(model, optimizer, rank)
        size = random.Random(seed).randrange(1500)
        try:
            with full_disk(size if rank == failing else 1 << 30):
                save_by_hand(model, optimizer, f"{folder}/checkpoint_{optimizer.steps}")
        except Exception as error:
            told.append((type(error).__name__, str(error)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert last_whole_checkpoint(folder) == f"{folder}/checkpoint_1"
    assert not list(Path(folder).rglob("*.tmp"))
    save_by_hand(model, optimizer, f"{folder}/checkpoint_100")
    assert last_whole_checkpoint(folder) == f"{folder}/checkpoint_100"
    return told


@pytest.mark.parametrize("failing", [0, 1])
def test_a_full_disk_is_an_error_on_every_rank(ranks: RankPools, tmp_path, failing):
    seeds = range(8)
    told = ranks(2).run(fill_disk_by_hand, str(tmp_path), failing, list(seeds), timeout=30)
    for own, other in zip(told[failing], told[1 - failing], strict=True):
        assert other[0] == "Disagreement"
        assert f"saving a checkpoint failed on 1 of 2 ranks: rank {failing}: {own[0]}" in other[1]
    assert len(told[0]) == len(seeds)


def gather_of(optimizer: DistributedLion):
    return functools.partial(gather_objects, optimizer)


def save_on_one_rank(rank, world_size, folder):
    model = nn.Linear(4, 2)
    optimizer = DistributedLion(model.named_parameters())
    step(model, optimizer, 0)
    act = save_by_hand if rank == 1 else step
    with pytest.raises(Disagreement) as caught:
        act(model, optimizer, folder if rank == 1 else 0)
    return str(caught.value)


def test_a_rank_that_does_not_save_is_named(ranks, tmp_path):
    for said in ranks(2).run(save_on_one_rank, str(tmp_path / "checkpoint_1"), timeout=30):
        assert "first in 'saving': rank 0: 'missing', rank 1: 'after step 1'" in said


def resume_apart(rank, world_size, folders):
    optimizer = DistributedLion([nn.Parameter(torch.zeros(2))])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        arguments = (gather_of(optimizer), rank, None, folders[rank], lambda size: [rank])
        found = agreed_checkpoint(*arguments)
    return found, [str(warning.message) for warning in caught]


def test_nodes_with_disks_of_their_own_take_what_is_whole_on_all(ranks, tmp_path):
    folders = [tmp_path / "node0", tmp_path / "node1"]
    ranks(2).run(save_apart, [str(folder) for folder in folders])
    (folders[1] / "checkpoint_2" / "dlion_momentum_1_of_2.pt").write_bytes(b"")
    shutil.rmtree(folders[0] / "checkpoint_3")
    results = ranks(2).run(resume_apart, [str(folder) for folder in folders])
    for rank, (found, said) in enumerate(results):
        assert found == str(folders[rank] / "checkpoint_1")
        assert len(said) == (rank == 0)
    assert "rank 1: dlion_momentum_1_of_2.pt is damaged" in results[0][1][0]
    assert "rank 0: there is no" in results[0][1][0]


def save_apart(rank, world_size, folders):
    model = nn.Linear(4, 2)
    optimizer = DistributedLion(model.named_parameters())
    for number in (1, 2, 3):
        step(model, optimizer, rank)
        with saving(optimizer, f"{folders[rank]}/checkpoint_{number}") as place:
            hf_dlion.save_momentum(optimizer, place)


def note_what_is_opened(rank, world_size, folder):
    optimizer = DistributedLion([nn.Parameter(torch.zeros(2))])
    opened: list[str] | None = []

    def note(event, args):
        if event == "open" and opened is not None and "momentum" in str(args[0]):
            opened.append(Path(args[0]).name)

    sys.addaudithook(note)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        agreed_checkpoint(gather_of(optimizer), rank, None, folder)
    found, opened = opened, None  # The hook stays for ever.
    return found


def test_a_rank_opens_the_momenta_of_its_share(ranks, tmp_path):
    ranks(2).run(save_apart, [str(tmp_path)] * 2)
    opened = ranks(2).run(note_what_is_opened, str(tmp_path))
    assert [set(names) for names in opened] == [
        {f"dlion_momentum_{rank}_of_2.pt"} for rank in (0, 1)
    ]


def list_nothing_on_one_rank(rank, world_size, folder):
    optimizer = DistributedLion([nn.Parameter(torch.zeros(2))])
    iterdir = Path.iterdir

    def fail(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    if rank == 1:
        Path.iterdir = fail
    try:
        with pytest.raises(CheckpointError) as caught:
            agreed_checkpoint(gather_of(optimizer), rank, None, folder)
    finally:
        Path.iterdir = iterdir
    return str(caught.value)


def test_a_rank_that_cannot_list_the_checkpoints_tells_all(ranks, tmp_path):
    ranks(2).run(save_apart, [str(tmp_path)] * 2)
    for said in ranks(2).run(list_nothing_on_one_rank, str(tmp_path), timeout=20):
        assert "rank 1: PermissionError" in said


def states(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder, "checkpoints").iterdir())


def fill_disk_with_accelerate(rank, world_size, folder, failing, size):
    project = ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=True, total_limit=1
    )
    loop = Loop(project=project)
    loop.train(2)
    loop.accelerator.save_state()
    before = loop.momenta()
    loop.train(1)
    try:
        with full_disk(size if rank == failing else 1 << 30):
            loop.accelerator.save_state()
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    half = Path(folder, "checkpoints", "checkpoint_1")
    assert (half / INCOMPLETE).exists()
    with pytest.raises(CheckpointError, match="its saving did not end"):
        loop.accelerator.load_state(str(half))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loop.accelerator.load_state()
    passed = [str(w.message) for w in caught if "passed over" in str(w.message)]
    assert all(map(torch.equal, before, loop.momenta()))
    loop.accelerator.save_state()
    return said, passed, states(folder)


@pytest.mark.parametrize(("failing", "size"), [(0, 100), (0, 1900), (1, 1000), (1, 5000)])
def test_accelerate_keeps_the_last_whole_state(ranks, tmp_path, failing, size):
    results = ranks(2).run(fill_disk_with_accelerate, str(tmp_path), failing, size, timeout=50)
    assert (
        f"Disagreement: saving a checkpoint failed on 1 of 2 ranks: rank {failing}"
        in (results[1 - failing][0])
    )
    assert "Disagreement" not in results[failing][0]
    assert [len(passed) for _, passed, _ in results] == [1, 0]
    assert results[0][2] == results[1][2] == ["checkpoint_1"]


def automatic_loop(folder, limit=None, **changes):
    project = ProjectConfiguration(
        project_dir=folder, automatic_checkpoint_naming=True, total_limit=limit, **changes
    )
    return Loop(project=project)


def restart(rank, world_size, folder, limit, half, load, iteration=0):
    """Saves three states, then one in a new job; returns its name, and those that are kept."""
    loop = automatic_loop(folder, limit)
    for _ in range(3):
        loop.train(1)
        loop.accelerator.save_state()
    if rank == 0 and half:
        whole_checkpoint.begin(Path(folder, "checkpoints", half))
    loop = automatic_loop(folder, limit, iteration=iteration)  # Its preparation has the ranks meet.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if load:
            loop.accelerator.load_state()
    loop.train(1)
    place = loop.accelerator.save_state()
    momenta = loop.momenta()
    loop.train(1)
    loop.accelerator.load_state(place)
    assert all(map(torch.equal, momenta, loop.momenta()))
    return Path(place).name, states(folder)


@pytest.mark.parametrize(
    ("limit", "half", "load", "iteration", "saved", "kept"),
    [
        (1, "", True, 0, "checkpoint_3", ["checkpoint_3"]),
        (1, "checkpoint_3", True, 0, "checkpoint_4", ["checkpoint_4"]),
        (1, "", False, 0, "checkpoint_0", ["checkpoint_0"]),
        (2, "checkpoint_9", False, 0, "checkpoint_0", ["checkpoint_0", "checkpoint_2"]),
        (1, "checkpoint_9", False, 3, "checkpoint_3", ["checkpoint_3"]),
        (2, "checkpoint_3", True, 3, "checkpoint_3", ["checkpoint_2", "checkpoint_3"]),
        (2, "", True, 8, "checkpoint_8", ["checkpoint_2", "checkpoint_8"]),
    ],
)
def test_a_restart_keeps_what_it_saves(ranks, tmp_path, limit, half, load, iteration, saved, kept):
    results = ranks(2).run(restart, str(tmp_path), limit, half, load, iteration)
    assert results == [(saved, kept)] * 2


def find_the_number_taken(rank, world_size, folder):
    own = f"{folder}/{rank}"
    if rank == 1:
        Path(own, "checkpoints", "checkpoint_0").mkdir(parents=True)
        Path(own, "checkpoints", "checkpoint_0", "something").touch()
    loop = automatic_loop(own, save_on_each_node=True)
    loop.train(1)
    start = time.monotonic()
    with pytest.raises((ValueError, Disagreement)) as caught:
        loop.accelerator.save_state()
    took = time.monotonic() - start
    loop.train(1)
    return str(caught.value), took, loop.accelerator.save_iteration, loop.digest()


def test_what_fails_before_accelerates_barrier_is_raised_on_every_rank(ranks, tmp_path):
    one, two = ranks(2).run(find_the_number_taken, str(tmp_path), timeout=40)
    assert "failed on 1 of 2 ranks: rank 1: ValueError: Checkpoint directory" in one[0]
    assert "already exists" in two[0]
    assert max(one[1], two[1]) < 20
    assert one[2:] == two[2:]


def save_late(rank, world_size, folder):
    """Returns the names of the files that this rank brings to the disk, in order."""
    loop = automatic_loop(folder)
    loop.train(1)
    synced, fsync = [], os.fsync

    def note(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    if rank == 1:  # Its random state is written after this hook.
        loop.accelerator.register_save_state_pre_hook(lambda *args: time.sleep(0.5))
    os.fsync = note
    try:
        loop.accelerator.save_state()
    finally:
        os.fsync = fsync
    return synced


def test_what_accelerate_writes_last_is_on_the_disk_before_the_mark(ranks, tmp_path):
    synced, _ = ranks(2).run(save_late, str(tmp_path))
    assert {"random_states_1.pkl", "dlion_momentum_1_of_2.pt", "optimizer.bin"} <= set(synced)


class FillDisk(TrainerCallback):
    """Fills the disk of one rank after a step."""

    def __init__(self, at: int, size: int) -> None:
        self.at, self.size = at, size

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.at:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, resource.RLIM_INFINITY))


TRAINER = {"max_steps": 6, "save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}

BEST = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}


def train(rank, world_size, folder, failing=None, size=0, resume=None, **changes):
    hf_dlion.register()
    arguments = {**TRAINER, **(BEST if changes.pop("best", False) else {}), **changes}
    trainer = tiny_trainer(tiny_args(folder, **arguments), eval_dataset=tiny_data(8))
    if rank == failing:
        trainer.add_callback(FillDisk(4, size))
    error = ""
    # The log of a rank is a file that would be full, too.
    silent = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with warnings.catch_warnings(record=True) as caught, silent[0], silent[1]:
        warnings.simplefilter("always")
        try:
            trainer.train(resume_from_checkpoint=resume)
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
    passed = [str(w.message) for w in caught if "passed over" in str(w.message)]
    return error, weights_digest(trainer.model), passed


def fill_and_resume(rank, world_size, folder, failing, size, best):
    error, _, _ = train(rank, world_size, folder, failing, size, best=best)
    kept = sorted(path.name for path in Path(folder).glob("checkpoint-*"))
    # What the rank that failed left is there for all to see.
    torch.distributed.barrier()
    _, digest, passed = train(rank, world_size, folder, resume=True, best=best)
    return error, kept, digest, passed


@pytest.fixture(scope="module")
def digests(ranks, tmp_path_factory):
    """Weights of uninterrupted runs without and with evaluation, which draws random numbers."""
    folder = str(tmp_path_factory.mktemp("straight"))
    return {best: ranks(2).run(train_straight, folder, best)[0][1] for best in (False, True)}


def train_straight(rank, world_size, folder, best):
    return train(rank, world_size, folder, best=best)


# Of 7 KB of weights and as much state; 6 KB of random state are written before a momentum.
@pytest.mark.parametrize(
    ("failing", "size", "best"),
    [(0, 300, False), (0, 300, True), (0, 14_000, False), (1, 3_000, False), (1, 14_500, False)],
)
def test_trainer_resumes_from_the_checkpoint_before_the_disk_was_full(
    ranks, tmp_path, digests, failing, size, best
):
    results = ranks(2).run(fill_and_resume, str(tmp_path), failing, size, best, timeout=50)
    assert results[failing][0]
    assert "Disagreement" not in results[failing][0]
    assert f"saving a checkpoint failed on 1 of 2 ranks: rank {failing}" in results[1 - failing][0]
    assert "checkpoint-2" in results[0][1]
    assert [len(passed) for *_, passed in results] == [1, 0]
    assert "checkpoint-4, which is not whole" in results[0][3][0]
    assert results[0][2] == results[1][2] == digests[best]


def resume_half(rank, world_size, folder):
    hf_dlion.register()
    trainer = tiny_trainer(tiny_args(folder))
    with pytest.raises(CheckpointError) as caught:
        trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-6")
    with pytest.raises(CheckpointError, match="no checkpoint is whole"):
        trainer.train(resume_from_checkpoint=True)
    return str(caught.value)


def test_a_half_checkpoint_that_is_asked_for_is_refused_on_every_rank(ranks, tmp_path):
    ranks(2).run(train, str(tmp_path))
    (tmp_path / "checkpoint-6" / "trainer_state.json").unlink()
    (tmp_path / "checkpoint-6" / "rng_state_1.pth").unlink()
    said = ranks(2).run(resume_half, str(tmp_path))
    assert said[0] == said[1]
    assert "trainer_state.json is missing" in said[0]


def save_slowly(rank, world_size, folder):
    """Returns what rank 1 sees of the older checkpoint when it begins to write the newer one."""
    seen = []
    original = hf_dlion.checkpoint.rank_files.save_momentum

    def slow(lion, output_dir, **kwargs):
        if rank == 1:
            time.sleep(1.0)
            seen.append(sorted(path.name for path in Path(folder).iterdir()))
        return original(lion, output_dir, **kwargs)

    hf_dlion.checkpoint.rank_files.save_momentum = slow
    try:
        train(rank, world_size, folder, max_steps=4)
    finally:
        hf_dlion.checkpoint.rank_files.save_momentum = original
    return seen


def test_older_checkpoints_go_only_when_all_ranks_have_saved(ranks, tmp_path):
    _, seen = ranks(2).run(save_slowly, str(tmp_path))
    assert seen == [["checkpoint-2"], ["checkpoint-2", "checkpoint-4"]]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-4"]


def interrupt(rank, world_size, folder):
    """Writes checkpoint-2 anew, and is interrupted between the momenta and the end."""
    hf_dlion.register()
    trainer = tiny_trainer(tiny_args(folder, **TRAINER), callbacks=[StopAt(2)])
    trainer.train()
    state = trainer.state

    def killed(path):
        raise KeyboardInterrupt

    try:
        if rank == 0:
            state.save_to_json = killed
        trainer._save_checkpoint(trainer.model, None)
    except (KeyboardInterrupt, Disagreement):
        pass


def test_a_checkpoint_that_is_written_anew_is_not_whole_meanwhile(ranks, tmp_path):
    ranks(1).run(interrupt, str(tmp_path))
    with pytest.warns(UserWarning, match=r"trainer_state\.json is missing"):
        assert last_whole_checkpoint(tmp_path) is None
