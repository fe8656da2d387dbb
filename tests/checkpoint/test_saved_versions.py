"""Files of earlier versions load; damaged ones are refused, wherever the damage is."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
import torch

from hf_dlion import load_momentum
from hf_dlion.checkpoint import momentum_file
from hf_dlion.checkpoint.momentum_file import CheckpointError, MomentumFile
from tests.support import saved_versions
from tests.support.spawn import RankPools

FOLDERS = sorted(path for path in saved_versions.DATA.iterdir() if path.is_dir())
PRESENT = saved_versions.DATA / f"momentum_v{momentum_file.VERSION}"


def version_of(path: Path) -> int:
    return torch.load(path, weights_only=True)["version"]


def test_each_version_has_its_files_and_they_are_small():
    for folder in FOLDERS:
        number = int(folder.name.split("_")[1].removeprefix("v"))
        for path in folder.glob("*_of_*.pt"):
            assert version_of(path) == number
            assert path.stat().st_size < 20_000
    names = {folder.name for folder in FOLDERS}
    assert {f"momentum_v{v}" for v in range(1, momentum_file.VERSION + 1)} <= names


def run(rank: int, world_size: int, folder: str | None, size: int | None):
    """Loads after three steps, or trains them, and goes on; returns momenta and weights."""
    model, optimizer = saved_versions.make(size)
    said = []
    if folder is None:
        saved_versions.train(model, optimizer, saved_versions.STEPS)
    else:
        state = torch.load(Path(folder, "state.pt"), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load_momentum(optimizer, folder)
        said = [str(warning.message) for warning in caught]
    assert optimizer.steps == saved_versions.STEPS
    momenta = [s["exp_avg"].clone() for s in optimizer.state_dict()["state"].values()]
    saved_versions.train(model, optimizer, 2)
    return momenta, [p.detach().clone() for p in model.parameters()], said


def same(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_version_is_continued_bit_for_bit(ranks: RankPools, folder: Path) -> None:
    size = 2 if folder.name.endswith("nodes_of_2") else None
    pool = ranks(4 if size else 2)
    loaded, trained = pool.run(run, str(folder), size), pool.run(run, None, size)
    for after, straight in zip(loaded, trained, strict=True):
        assert same(after[0], straight[0])
        assert same(after[1], straight[1])
        assert not after[2]


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_every_version_is_loaded_by_one_rank(ranks: RankPools, folder: Path) -> None:
    ((momenta, _, said),) = ranks(1).run(run, str(folder), None)
    assert all(momentum.any() for momentum in momenta)
    assert len(said) == 1


def content_of(path: Path) -> MomentumFile | None:
    try:
        return momentum_file.read(path)
    except CheckpointError:
        return None


def is_same(found: MomentumFile, expected: MomentumFile) -> bool:
    rest = [{**vars(content), "exp_avg": None} for content in (found, expected)]
    momenta = [content.exp_avg for content in (found, expected)]
    return (
        rest[0] == rest[1]
        and momenta[0].keys() == momenta[1].keys()
        and same(momenta[0].values(), momenta[1].values())
    )


@pytest.mark.parametrize("seed", range(4))
def test_a_changed_byte_is_refused_or_changes_nothing(tmp_path: Path, seed: int) -> None:
    source = PRESENT / "dlion_momentum_1_of_2.pt"
    expected, data = momentum_file.read(source), source.read_bytes()
    path, generator = tmp_path / source.name, random.Random(seed)
    refused = 0
    for start in range(seed, len(data), 16):
        changed = bytearray(data)
        changed[start] ^= 1 << generator.randrange(8)
        path.write_bytes(changed)
        found = content_of(path)
        refused += found is None
        assert found is None or is_same(found, expected), f"byte {start}"
    assert refused > 50


def test_a_file_that_is_cut_or_ends_in_zeros_is_refused(tmp_path: Path) -> None:
    source = PRESENT / "dlion_momentum_1_of_2.pt"
    data = source.read_bytes()
    path = tmp_path / source.name
    for end in [*range(0, len(data), 61), len(data) - 1]:
        for rest in (b"", bytes(len(data) - end)):
            path.write_bytes(data[:end] + rest)
            if path.read_bytes() == data:
                continue
            assert content_of(path) is None, f"{end} bytes, {len(rest)} zeros"
