"""One fault and all that must hold afterwards, whatever it was and wherever it struck."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from hf_dlion.checkpoint import momentum_file
from hf_dlion.checkpoint.whole import number_of
from tests.support.faults import SIGNALS, Fate, Fault, run_struck
from tests.support.faulty_training import MODES, Job, train, whole_checkpoints

# What the ranks that were not struck are told.
LOST = "waited in vain for"
AGREED = ("the step failed on 1 of", "saving a checkpoint failed on 1 of")
INJECTED = {"raise": "InjectedError: injected at", "disk": "OSError: [Errno 28]"}
# In which DDP, where it uses its buckets, tells all ranks about new ones: it waits for a lost rank
# then, and gloo's words are all that it says.
DDP_STEP, DDP_LOST = 2, "gloo"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A training on some ranks, and what happens to one of them."""

    job: Job
    world_size: int
    fault: Fault


def undisturbed(job: Job, world_size: int, folder: Path) -> list[Fate]:
    """Returns what becomes of the ranks if nothing happens to them."""
    fates = run_struck(train, world_size, job, folder)
    assert [fate.code for fate in fates] == [0] * world_size, fates
    _check_equal(fates)
    assert sorted(fates[0].digests) == list(range(1, job.steps + 1))
    # Faults in the middle of an exchange need several messages; one node alone sends none.
    assert fates[0].passed[2].get("before a vote", 4) == 4
    return fates


def endure(trial: Trial, reference: Sequence[Fate], folder: Path) -> list[Fate]:
    """Lets the fault happen, checks what it left, and resumes the training from there.

    Args:
        trial: The training and the fault.
        reference: Of the same training, undisturbed.
        folder: Empty; receives the checkpoints.

    Returns:
        What became of the ranks that the fault met.
    """
    job, world_size, fault = trial.job, trial.world_size, trial.fault
    fates = run_struck(train, world_size, job, folder, fault)
    _check_equal(fates)
    expected = reference[0].digests
    if fault.kind in ("nan", "inf"):
        _check_abstention(trial, fates, expected)
    else:
        _check_ends(trial, fates)
        for fate in fates:
            assert fate.digests.items() <= expected.items(), "another step than undisturbed"
            # Nobody can finish a step of which a rank did not even send its header.
            assert max(fate.digests) <= fault.step
    _check_checkpoints(folder, world_size)
    if fault.kind not in ("nan", "inf"):
        saved = [number_of(path.name) for path in whole_checkpoints(folder)]
        assert (
            saved
            == [step for step in range(1, fault.step + 1) if step % job.save_every == 0][
                : len(saved)
            ]
        )
        assert len(saved) >= (fault.step - 1) // job.save_every
        resumed = run_struck(train, world_size, job, folder)
        assert [fate.code for fate in resumed] == [0] * world_size, resumed
        first = max(saved, default=0) + 1
        rest = {step: digest for step, digest in expected.items() if step >= first}
        assert all(fate.digests == rest for fate in resumed), "resumed to something else"
    return fates


def _check_equal(fates: Sequence[Fate]) -> None:
    """Checks that no step ended differently on two of the ranks that finished it."""
    for step in set().union(*(fate.digests for fate in fates)):
        found = {fate.digests[step] for fate in fates if step in fate.digests}
        assert len(found) == 1, f"replicas differ after step {step}"


def _check_ends(trial: Trial, fates: Sequence[Fate]) -> None:
    """Checks that the struck rank ended as the fault says, and the others with a clear error."""
    fault = trial.fault
    options, in_ddp = MODES[trial.job.mode]
    waits_in_ddp = in_ddp and "local_group" in options and fault.step == DDP_STEP
    for rank, fate in enumerate(fates):
        if rank == fault.rank and fault.kind in ("kill", "term"):
            assert fate.code == -SIGNALS[fault.kind], fate
            continue
        assert fate.code == 1, fate
        assert fate.error is not None, fate
        text = fate.error[1]
        if rank == fault.rank and fault.kind in ("raise", "disk"):
            assert "injected" in text, fate
        elif fault.kind in ("raise", "disk") and any(said in text for said in AGREED):
            assert f"rank {fault.rank}: {INJECTED[fault.kind]}" in text
        else:
            assert fault.kind != "disk", "a full disk is told to all ranks"
            assert LOST in text or (waits_in_ddp and DDP_LOST in text), fate


def _check_abstention(trial: Trial, fates: Sequence[Fate], expected: dict[int, str]) -> None:
    """Checks that training went on, and that the step moved parameters only if somebody voted."""
    fault = trial.fault
    assert [fate.code for fate in fates] == [0] * trial.world_size, fates
    found = fates[0].digests
    assert found.keys() == expected.keys()
    before = [step for step in found if step < fault.step]
    assert all(found[step] == expected[step] for step in before)
    voters = trial.world_size // MODES[trial.job.mode][0].get("local_group", 1)
    moved = fault.rank != -1 and voters > 1
    assert (found[fault.step] != found[fault.step - 1]) == moved
    counts = fates[0].abstained
    assert counts[fault.step] - counts[fault.step - 1] == (voters if fault.rank == -1 else 1)


def _check_checkpoints(folder: Path, world_size: int) -> None:
    """Checks what is taken for whole, and that every momentum with a name is, of half ones too."""
    for path in whole_checkpoints(folder):
        content = torch.load(path / "state.pt", weights_only=True)
        assert path.name == f"checkpoint_{content['step']}"
        assert momentum_file.saved_ranks(path, "dlion_momentum") == {
            world_size: set(range(world_size))
        }
    for path in folder.rglob("dlion_momentum_*.pt"):
        assert momentum_file.read(path).world_size == world_size
