"""A momentum per rank, saved and loaded by hand."""

from __future__ import annotations

import copy
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import hf_dlion
from hf_dlion import DistributedLion
from hf_dlion.checkpoint import momentum_file
from hf_dlion.checkpoint.access import lion_in
from hf_dlion.checkpoint.momentum_file import CheckpointError
from hf_dlion.checkpoint.rank_files import load_momentum, save_momentum
from tests.support.spawn import RankPools


def make(width: int = 3, momentum_dtype: torch.dtype | None = None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, 4), torch.nn.Linear(4, 2).bfloat16())
    options = {"lr": 1e-2, "momentum_dtype": momentum_dtype}
    return model, DistributedLion(model.named_parameters(), **options)


def train(model, optimizer, rank, steps):
    for _ in range(steps):
        for index, p in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(97 * optimizer.steps + 7 * index + rank)
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


def momenta(optimizer):
    groups = optimizer.param_groups
    return [optimizer.state[p]["exp_avg"].clone() for g in groups for p in g["params"]]


def equal(left, right):
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(left, right, strict=True))


def save_run(rank, world_size, folder, momentum_dtype=None):
    """Trains three steps and saves everything as a loop would; returns this rank's momenta."""
    model, optimizer = make(momentum_dtype=momentum_dtype)
    train(model, optimizer, rank, 3)
    if rank == 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save(state, Path(folder, "state.pt"))
    save_momentum(optimizer, folder)
    return momenta(optimizer)


def load_run(rank, world_size, folder, momentum_dtype=None):
    """Loads everything; returns model, optimizer and what was warned of."""
    model, optimizer = make(momentum_dtype=momentum_dtype)
    state = torch.load(Path(folder, "state.pt"), weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load_momentum(optimizer, folder)
    return model, optimizer, [str(warning.message) for warning in caught]


def continue_run(rank, world_size, folder, momentum_dtype=None):
    model, optimizer, caught = load_run(rank, world_size, folder, momentum_dtype)
    loaded, steps = momenta(optimizer), optimizer.steps
    train(model, optimizer, rank, 2)
    return loaded, steps, list(model.state_dict().values()), caught


def uninterrupted_run(rank, world_size):
    model, optimizer = make()
    train(model, optimizer, rank, 5)
    return list(model.state_dict().values()), momenta(optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory, ranks: RankPools):
    """A folder that two ranks saved to, and their momenta."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, ranks(2).run(save_run, str(folder))


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved[0], tmp_path / "copy"))


def test_ranks_have_momenta_of_their_own(saved):
    assert not equal(*saved[1])


def test_as_many_ranks_continue_bit_for_bit(saved, ranks):
    uninterrupted = ranks(2).run(uninterrupted_run)
    for rank, (loaded, steps, weights, caught) in enumerate(
        ranks(2).run(continue_run, str(saved[0]))
    ):
        assert equal(loaded, saved[1][rank])
        assert steps == 3
        assert equal(weights, uninterrupted[rank][0])
        assert not caught


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_loads_the_mean_and_says_so(saved, ranks, world_size):
    mean = [((a.float() + b.float()) / 2).to(a.dtype) for a, b in zip(*saved[1], strict=True)]
    results = ranks(world_size).run(continue_run, str(saved[0]))
    for rank, (loaded, steps, weights, caught) in enumerate(results):
        assert equal(loaded, mean)
        assert steps == 3
        assert equal(weights, results[0][2])
        assert len(caught) == (rank == 0)
    assert "saved by 2 ranks" in results[0][3][0]
    assert "mean" in results[0][3][0]


def test_the_momentum_keeps_its_own_dtype(ranks, tmp_path):
    before = ranks(2).run(save_run, str(tmp_path), torch.float32)
    after = ranks(2).run(continue_run, str(tmp_path), torch.float32)
    for rank in range(2):
        assert {m.dtype for m in before[rank]} == {torch.float32}
        assert equal(before[rank], after[rank][0])


def load_alone(rank, world_size, folder):
    _, optimizer = make()
    load_momentum(optimizer, folder)
    return optimizer.steps, momenta(optimizer)


def test_a_new_optimizer_takes_the_step_from_the_file(saved, ranks):
    for rank, (steps, loaded) in enumerate(ranks(2).run(load_alone, str(saved[0]))):
        assert steps == 3
        assert equal(loaded, saved[1][rank])


def refuse(rank, world_size, folder, change=None):
    """Returns the text of the error, after checking that the optimizer is as it was."""
    model, optimizer = make(width=5 if change == "shape" else 3)
    if change == "names":
        optimizer = DistributedLion([(f"x.{n}", p) for n, p in model.named_parameters()])
    train(model, optimizer, rank, 1 if change == "step" else 0)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError) as caught:
        load_momentum(optimizer, folder)
    after = optimizer.state_dict()
    assert after["dlion"] == before["dlion"]
    assert after["state"].keys() == before["state"].keys()
    for index, state in after["state"].items():
        assert torch.equal(state["exp_avg"], before["state"][index]["exp_avg"])
    return str(caught.value)


def refused(ranks: RankPools, folder, world_size=2, change=None) -> str:
    """Returns the text that all ranks raised alike."""
    said = ranks(world_size).run(refuse, str(folder), change)
    assert len(set(said)) == 1
    return said[0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_missing_file_is_named_on_every_rank(folder, ranks, world_size):
    (folder / "dlion_momentum_1_of_2.pt").unlink()
    said = refused(ranks, folder, world_size)
    assert "dlion_momentum_1_of_2.pt is missing" in said
    assert ("rank 0" in said) == (world_size == 3)


def test_no_file_at_all_is_said(tmp_path, ranks):
    assert "were not saved there" in refused(ranks, tmp_path)


def damage(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        # The first bytes of the first tensor, which torch.load does not check.
        payload = torch.load(path, weights_only=True)
        bits = payload["exp_avg"][0].contiguous().view(torch.uint8).numpy().tobytes()
        start = content.index(bits)
        path.write_bytes(content[:start] + bytes([content[start] ^ 1]) + content[start + 1 :])


@pytest.mark.parametrize("how", ["cut", "empty", "flipped"])
def test_a_damaged_file_is_refused(folder, ranks, how):
    damage(folder / "dlion_momentum_1_of_2.pt", how)
    said = refused(ranks, folder)
    assert "dlion_momentum_1_of_2.pt is damaged" in said
    assert "rank 1" in said
    assert "rank 0" not in said


def test_a_file_of_something_else_is_refused(folder, ranks):
    torch.save({"weights": torch.zeros(3)}, folder / "dlion_momentum_0_of_2.pt")
    assert "does not hold the momentum of a DistributedLion" in refused(ranks, folder)


def test_a_file_of_a_later_version_is_refused(folder, ranks):
    path = folder / "dlion_momentum_0_of_2.pt"
    torch.save({**torch.load(path, weights_only=True), "version": 4}, path)
    assert "has version 4, this hf_dlion reads versions up to 3" in refused(ranks, folder)


def test_a_renamed_file_is_refused(folder, ranks):
    shutil.copy(folder / "dlion_momentum_0_of_2.pt", folder / "dlion_momentum_1_of_2.pt")
    assert "holds the momentum of rank 0 of 2" in refused(ranks, folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("shape", "parameter 0 is 0.weight (4, 3) there and 0.weight (4, 5) here"),
        ("names", "parameter 0 is 0.weight (4, 3) there and x.0.weight (4, 3) here"),
        ("step", "was saved after step 3, the optimizer is at step 1"),
    ],
)
def test_momenta_of_another_run_are_refused(saved, ranks, change, words):
    assert words in refused(ranks, saved[0], change=change)


def test_files_of_different_steps_are_not_averaged(folder, ranks):
    path = folder / "dlion_momentum_1_of_2.pt"
    momentum_file.write(path, replace(momentum_file.read(path), steps=4))
    assert "do not belong together" in refused(ranks, folder, world_size=1)


def see_different_folders(rank, world_size, folder, other):
    return refuse(rank, world_size, [folder, other][rank])


def test_ranks_that_see_different_checkpoints_refuse(folder, saved, ranks):
    path = folder / "dlion_momentum_1_of_2.pt"
    momentum_file.write(path, replace(momentum_file.read(path), steps=4))
    said = ranks(2).run(see_different_folders, str(saved[0]), str(folder))
    assert said[0] == said[1]
    assert "different checkpoints" in said[0]


def save_twice(rank, world_size, folder):
    save_run(rank, world_size, folder)
    save_run(rank, world_size, folder)


def test_a_save_removes_the_files_of_another_number_of_ranks(folder, ranks):
    ranks(1).run(save_twice, str(folder))
    assert sorted(p.name for p in folder.glob("*momentum*")) == ["dlion_momentum_0_of_1.pt"]


def test_names_keep_several_optimizers_apart(tmp_path):
    for width, name in ((3, "first"), (5, "first_1")):
        model, optimizer = make(width)
        train(model, optimizer, 0, 1)
        save_momentum(optimizer, tmp_path, name=name)
    for width, name in ((3, "first"), (5, "first_1")):
        _, optimizer = make(width)
        load_momentum(optimizer, tmp_path, name=name)
        assert optimizer.steps == 1


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    model, optimizer = make()
    train(model, optimizer, 0, 1)
    path = save_momentum(optimizer, tmp_path)
    before = path.read_bytes()

    def fail(payload, file):
        file.write(b"half a fi")
        raise OSError("no space left on device")

    monkeypatch.setattr(momentum_file.torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        save_momentum(optimizer, tmp_path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_the_scaler_goes_along_with_its_rank(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 0, 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(torch.ones(()))
    save_momentum(optimizer, tmp_path, scaler=scaler)
    assert load_momentum(optimizer, tmp_path) == scaler.state_dict()


def test_what_a_subclass_keeps_beside_the_momentum_stays(tmp_path):
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = DistributedLion([param])
    param.grad = torch.ones(3)
    optimizer.step()
    hf_dlion.save_momentum(optimizer, tmp_path)
    saved = optimizer.state[param]["exp_avg"].clone()
    optimizer.state[param]["ema"] = torch.full((3,), 7.0)
    optimizer.state[param]["exp_avg"].zero_()
    hf_dlion.load_momentum(optimizer, tmp_path)
    assert torch.equal(optimizer.state[param]["exp_avg"], saved)
    assert optimizer.state[param]["ema"].tolist() == [7.0, 7.0, 7.0]


def test_wrappers_around_names_do_not_matter(tmp_path):
    model, optimizer = make()
    train(model, optimizer, 0, 1)
    save_momentum(optimizer, tmp_path)
    named = [(f"module._orig_mod.{n}", p) for n, p in model.named_parameters()]
    load_momentum(DistributedLion(named), tmp_path)


def test_another_optimizer_is_refused(tmp_path):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    with pytest.raises(TypeError, match="must be a DistributedLion, got SGD"):
        save_momentum(optimizer, tmp_path)
    assert lion_in(optimizer) is None
    with pytest.raises(TypeError, match="must be a DistributedLion, got SGD"):
        hf_dlion.unwrap(optimizer)


def test_a_distributed_lion_is_found_in_the_wrappers_around_it():
    _, optimizer = make()
    assert hf_dlion.unwrap(optimizer) is optimizer
    assert (
        hf_dlion.unwrap(SimpleNamespace(optimizer=SimpleNamespace(optimizer=optimizer)))
        is optimizer
    )


def fail_on_one_rank(rank, world_size, folder):
    _, optimizer = make()
    failure = ValueError("this rank has no disk") if rank == 1 else None
    with pytest.raises(CheckpointError, match="rank 1: ValueError: this rank has no disk"):
        load_momentum(optimizer, folder, failure=failure)


def test_what_failed_before_on_one_rank_is_raised_on_all(saved, ranks):
    ranks(2).run(fail_on_one_rank, str(saved[0]))
