"""Half checkpoints are not taken for whole ones, whatever is missing or damaged."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from hf_dlion import DistributedLion, last_whole_checkpoint, save_momentum
from hf_dlion.checkpoint import momentum_file
from hf_dlion.checkpoint.agreed import agreed_checkpoint
from hf_dlion.checkpoint.durable import replace_file, sync_tree
from hf_dlion.checkpoint.momentum_file import CheckpointError
from hf_dlion.checkpoint.whole import (
    COMPLETE,
    INCOMPLETE,
    begin,
    examine,
    finish,
    judged,
    problems_in,
)


def write_checkpoint(folder: Path, world_size: int = 2, steps: int = 3) -> Path:
    """Writes what Trainer writes on so many ranks."""
    folder.mkdir(parents=True)
    model = nn.Linear(20, 3)
    optimizer = DistributedLion(model.named_parameters())
    for _ in range(steps):
        model(torch.ones(1, 20)).sum().backward()
        optimizer.step()
    shards = {
        "model-00001-of-00002.safetensors": "weight",
        "model-00002-of-00002.safetensors": "bias",
    }
    for name, parameter in shards.items():
        save_file({parameter: model.state_dict()[parameter]}, folder / name)
    weight_map = {parameter: name for name, parameter in shards.items()}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    own = momentum_file.read(save_momentum(optimizer, folder))
    (folder / "dlion_momentum_0_of_1.pt").unlink()
    for rank in range(world_size):
        name = f"dlion_momentum_{rank}_of_{world_size}.pt"
        content = {**vars(own), "rank": rank, "world_size": world_size}
        momentum_file.write(folder / name, momentum_file.MomentumFile(**content))
        torch.save({"cpu": torch.get_rng_state()}, folder / f"rng_state_{rank}.pth")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 3}))
    return folder


FILES = (
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state_1.pth",
    "dlion_momentum_0_of_2.pt",
    "dlion_momentum_1_of_2.pt",
    "trainer_state.json",
)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_by_one(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def zero(path: Path) -> None:
    """What a power cut leaves of a file whose size was written before its content."""
    path.write_bytes(bytes(path.stat().st_size))


def zero_the_start(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(bytes(64) + content[64:])


def zero_the_end(path: Path) -> None:
    content = path.read_bytes()
    half = len(content) // 2
    path.write_bytes(content[:half] + bytes(len(content) - half))


DAMAGES = [
    (name, damage)
    for name in FILES
    for damage in (Path.unlink, cut, cut_by_one, empty, zero, zero_the_start, zero_the_end)
    # Zeros are weights like others.
    if damage is not zero_the_end or not name.endswith(".safetensors")
]


@pytest.mark.parametrize(("name", "damage"), DAMAGES, ids=lambda v: getattr(v, "__name__", v))
def test_a_checkpoint_without_one_of_its_files_is_passed_over(
    tmp_path: Path, name: str, damage: Callable[[Path], None]
) -> None:
    whole = write_checkpoint(tmp_path / "checkpoint-9")
    half = Path(shutil.copytree(whole, tmp_path / "checkpoint-10"))
    assert last_whole_checkpoint(tmp_path) == str(half)
    assert problems_in(half) == []
    damage(half / name)
    with pytest.warns(UserWarning, match=f"checkpoint-10, which is not whole: .*{name}"):
        assert last_whole_checkpoint(tmp_path) == str(whole)


def test_what_to_do_without_a_whole_checkpoint_is_said(tmp_path: Path) -> None:
    begin(tmp_path / "checkpoint_0")
    with pytest.raises(CheckpointError) as caught:
        agreed_checkpoint(lambda value: [value], 0, None, tmp_path)
    assert "checkpoint_0, which is not whole: its saving did not end" in str(caught.value)
    assert f"to start anew, delete {tmp_path}/checkpoint_0" in str(caught.value)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert last_whole_checkpoint(tmp_path) is None
    assert last_whole_checkpoint(tmp_path / "nowhere") is None


@pytest.mark.parametrize("what", ["momentum", "optimizer"])
def test_files_of_different_steps_are_no_checkpoint(tmp_path: Path, what: str) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint-3")
    other = write_checkpoint(tmp_path / "other", steps=2)
    name = "dlion_momentum_1_of_2.pt" if what == "momentum" else "optimizer.pt"
    shutil.copy(other / name, folder / name)
    (problem,) = problems_in(folder)
    assert "of different steps" in problem
    assert f"{name} after step 2" in problem


def test_momenta_of_two_runs_are_no_checkpoint(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint-3")
    other = write_checkpoint(tmp_path / "other", world_size=3)
    for path in other.glob("*_of_3.pt"):
        shutil.copy(path, folder)
    assert any("runs with [2, 3] ranks" in problem for problem in problems_in(folder))


def test_another_nodes_files_need_not_be_here(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint-3")
    (folder / "dlion_momentum_1_of_2.pt").unlink()
    (folder / "rng_state_1.pth").unlink()
    assert judged([examine(folder, lambda world_size: [0])]) == []
    assert len(problems_in(folder)) == 2


def test_a_checkpoint_of_the_model_alone_is_whole(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint-3")
    for name in ("optimizer.pt", "scheduler.pt"):
        (folder / name).unlink()
    for path in [*folder.glob("rng*"), *folder.glob("dlion*")]:
        path.unlink()
    assert problems_in(folder) == []
    for path in folder.glob("model-*"):
        path.unlink()
    (folder / "model.safetensors.index.json").unlink()
    assert problems_in(folder) == ["the model's weights are missing"]


def test_the_mark_of_a_save_decides_where_trainer_did_not_write(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint_7"
    begin(folder)
    assert problems_in(folder) == ["its saving did not end"]
    finish(folder)
    assert problems_in(folder) == []
    finish(folder)  # Another rank does so, too.
    begin(folder)
    assert sorted(path.name for path in folder.iterdir()) == [INCOMPLETE]
    (folder / INCOMPLETE).unlink()
    with pytest.raises(FileNotFoundError):
        finish(folder)
    assert COMPLETE not in {path.name for path in folder.iterdir()}


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    (tmp_path / ".file.pt.123.tmp").write_bytes(b"half")
    replace_file(path, lambda file: file.write(b"whole"))
    assert [p.name for p in tmp_path.iterdir()] == ["file.pt"]
    assert path.read_bytes() == b"whole"


def test_a_file_and_its_name_are_on_the_disk_in_this_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def note_sync(descriptor: int) -> None:
        did.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).suffix}")
        fsync(descriptor)

    def note_rename(path: Path, target: Path) -> Path:
        did.append("rename")
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_rename)
    replace_file(tmp_path / "file.pt", lambda file: file.write(b"whole"))
    assert did == ["sync .tmp", "rename", "sync "]


def test_a_system_that_opens_no_folders_still_gets_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_open = os.open

    def refuse_folders(path: str | Path, *args: int, **kwargs: int) -> int:
        if os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return really_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", refuse_folders)
    replace_file(tmp_path / "file.pt", lambda file: file.write(b"whole"))
    sync_tree(tmp_path)
    assert (tmp_path / "file.pt").read_bytes() == b"whole"


def test_another_ranks_mark_is_found_where_names_are_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path)
    finish(tmp_path)
    exists = Path.exists
    # An NFS client looked for the name in `begin`, and still knows that it is not there.
    monkeypatch.setattr(Path, "exists", lambda path: path.name != COMPLETE and exists(path))
    finish(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [COMPLETE]


def test_a_folder_in_which_nothing_was_written_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("checkpoint_7", "checkpoint-7", "mine"):
        (tmp_path / name / "logs").mkdir(parents=True)
        (tmp_path / name / "logs" / "notes.txt").write_text("not ours")
        assert problems_in(tmp_path / name) == ["it is empty"]


def test_accelerates_folder_needs_a_mark_or_a_state(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint_7"
    folder.mkdir()
    save_file({"weight": torch.ones(2)}, folder / "model.safetensors")
    assert problems_in(folder) == ["it holds neither a momentum nor an optimizer's state"]
    torch.save({}, folder / "optimizer.bin")
    assert problems_in(folder) == []
    (folder / "optimizer.bin").unlink()
    (folder / COMPLETE).touch()
    assert problems_in(folder) == []


def test_files_of_other_programs_damage_nothing(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint-3")
    for name in ("best_of_5.pt", "epoch_3_of_5.pt"):
        torch.save({"x": 1}, folder / name, _use_new_zipfile_serialization=False)
    (folder / "epoch_4_of_5.pt").write_bytes(b"what is not zipped")
    (folder / "notes.index.json").write_text("[]")
    deeper = folder / "runs"
    deeper.mkdir()
    (deeper / "config.json").write_text("// with a comment")
    (deeper / "optimizer.pt").write_bytes(b"")
    assert problems_in(folder) == []
    shutil.copy(folder / "dlion_momentum_0_of_2.pt", folder / "mine_0_of_2.pt")
    assert problems_in(folder) == ["mine_1_of_2.pt is missing"]


def test_an_adapter_beside_the_first_is_judged(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint-3")
    (folder / "second").mkdir()
    adapter = folder / "second" / "adapter_model.safetensors"
    save_file({"weight": torch.ones(2)}, adapter)
    assert problems_in(folder) == []
    cut(adapter)
    (problem,) = problems_in(folder)
    assert "adapter_model.safetensors is damaged" in problem


@pytest.mark.parametrize("damage", [cut, zero_the_start, None])
def test_ranks_that_share_the_files_out_find_what_one_finds(
    tmp_path: Path, damage: Callable[[Path], None] | None
) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint-3", world_size=4)
    for rank in range(4):
        (folder / f"rng_state_{rank}.pth").rename(folder / f"random_states_{rank}.pkl")
    (folder / "trainer_state.json").unlink()
    if damage is None:  # Which no rank can see in its own share.
        other = write_checkpoint(tmp_path / "other", world_size=4, steps=2)
        shutil.copy(other / "dlion_momentum_2_of_4.pt", folder)
    else:
        damage(folder / "dlion_momentum_2_of_4.pt")
        damage(folder / "random_states_3.pkl")
    alone = problems_in(folder)
    shares = [examine(folder, reads=lambda saved, r=rank: saved % 2 == r) for rank in range(2)]
    together = judged(shares)
    for problem in alone:
        assert any(problem in said for said in together)
    assert len(alone) == (2 if damage is None else 3)
    for share in shares:
        assert len([file for file in share.momenta["dlion_momentum"].steps if "_of_4" in file]) <= 2
