"""Which checkpoints are deleted for a new one, and what a killed deletion leaves."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hf_dlion.checkpoint.rotation import delete_superseded, remove
from hf_dlion.checkpoint.whole import (
    COMPLETE,
    INCOMPLETE,
    TRAINER_STATE,
    checkpoint_names,
    is_unfinished,
)


def make(folder: Path, name: str, *files: str) -> Path:
    """Makes a checkpoint that holds empty files of these names."""
    place = folder / name
    place.mkdir()
    for file in files:
        (place / file).touch()
    return place


@pytest.mark.parametrize(
    ("name", "files", "unfinished"),
    [
        ("checkpoint_1", [], True),
        ("checkpoint_1", [INCOMPLETE, "optimizer.bin"], True),
        ("checkpoint_1", [INCOMPLETE, COMPLETE], True),  # Written anew, and just begun.
        ("checkpoint_1", [COMPLETE, "optimizer.bin"], False),
        ("checkpoint_1", ["optimizer.bin"], False),  # Saved by Accelerate alone.
        ("checkpoint-1", ["optimizer.pt"], True),
        ("checkpoint-1", ["optimizer.pt", TRAINER_STATE], False),
        ("checkpoint-1", ["optimizer.pt", TRAINER_STATE, INCOMPLETE], False),
        ("checkpoint-1", ["state.pt", COMPLETE], False),
    ],
)
def test_a_checkpoint_without_its_mark_is_unfinished(tmp_path, name, files, unfinished):
    assert is_unfinished(make(tmp_path, name, *files)) is unfinished


@pytest.mark.parametrize(
    ("limit", "best", "kept"),
    [
        (None, None, [1, 2, 3, 4, 5]),
        (0, None, [1, 2, 3, 4, 5]),
        (5, None, [1, 2, 3, 4, 5]),
        (4, None, [1, 2, 3, 5]),  # 4 is the unfinished one.
        (3, None, [2, 3, 5]),
        (1, None, [2]),
        (3, 1, [1, 2, 5]),
        (1, 1, [1, 2]),
    ],
)
def test_unfinished_ones_go_first_then_the_oldest(tmp_path, limit, best, kept):
    found = [
        make(tmp_path, f"checkpoint_{n}", INCOMPLETE if n == 4 else COMPLETE) for n in range(1, 6)
    ]
    written = found[1]  # A run that went back to its start wrote it.
    best = None if best is None else tmp_path / f"checkpoint_{best}"
    delete_superseded(written, found, limit, best=best)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"checkpoint_{n}" for n in kept]


def test_what_a_killed_deletion_leaves_is_no_checkpoint_and_goes_with_the_next(
    tmp_path, monkeypatch
):
    one, two = (make(tmp_path, f"checkpoint_{n}", COMPLETE) for n in (1, 2))

    def killed(path, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            remove(one)
    assert checkpoint_names(tmp_path) == ["checkpoint_2"]
    assert len(list(tmp_path.iterdir())) == 2
    remove(two)
    assert not list(tmp_path.iterdir())


def test_one_that_cannot_be_deleted_stays_only_where_that_is_allowed(tmp_path, monkeypatch):
    found = [make(tmp_path, f"checkpoint_{n}", COMPLETE) for n in (1, 2, 3)]
    rename = Path.rename

    def refuse(path, target):
        if path.name == "checkpoint_1":
            raise PermissionError(path)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with pytest.raises(PermissionError):
        delete_superseded(found[2], found, 1)
    delete_superseded(found[2], found, 1, ignore_errors=True)
    assert checkpoint_names(tmp_path) == ["checkpoint_3", "checkpoint_1"]


def test_one_that_never_goes_does_not_keep_the_next_ones(tmp_path, monkeypatch):
    found = [make(tmp_path, f"checkpoint_{n}", COMPLETE) for n in (1, 2, 3)]
    rmtree = shutil.rmtree

    def in_use(path, ignore_errors=False):
        if Path(path).name == "_deleted_0":
            if not ignore_errors:
                raise OSError(f"{path} is in use")
            return
        rmtree(path, ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", in_use)
    delete_superseded(found[2], found, 1, ignore_errors=True)
    assert checkpoint_names(tmp_path) == ["checkpoint_3"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["_deleted_0", "checkpoint_3"]


def test_of_a_linked_checkpoint_the_link_goes(tmp_path):
    elsewhere = make(tmp_path, "kept_elsewhere", COMPLETE)
    link = tmp_path / "checkpoint_1"
    link.symlink_to(elsewhere)
    remove(link)
    assert not link.is_symlink()
    assert elsewhere.is_dir()


def test_one_that_another_process_deletes_meanwhile_is_no_error(tmp_path):
    written = make(tmp_path, "checkpoint_2", COMPLETE)
    found = [tmp_path / "checkpoint_1", written]
    delete_superseded(written, found, 1, ignore_errors=True)
    assert checkpoint_names(tmp_path) == ["checkpoint_2"]
