"""Ranks that are killed, stall or fail at every point of a step: the others end and say why.

Nobody hangs, nobody takes another step than an undisturbed run would, and what was saved resumes
to the same bits.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import DistributedLion, LostRank
from tests.support.fault_trial import LOST, Trial, endure, undisturbed
from tests.support.faults import SHORT_TIMEOUT_S, Fate, Fault, Injector, Journal, run_struck
from tests.support.faulty_training import Job, Net, digest_of, tokens_of, train, whole_checkpoints

pytestmark = pytest.mark.multiproc

TWO_PHASE = {"exchange": "two_phase"}
JOBS = {
    "plain": (Job(mode="plain"), 3),
    "ddp": (Job(mode="ddp", options=TWO_PHASE, dtype="bfloat16"), 2),
    "overlap": (Job(mode="overlap", options=TWO_PHASE), 2),
    "node": (Job(mode="node", options=TWO_PHASE), 4),
    "overlap on four": (Job(mode="overlap", options=TWO_PHASE), 4),
    "node plain": (Job(mode="node plain"), 4),
}

References = Callable[[str], list[Fate]]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> References:
    """What becomes of the ranks of each of JOBS if nothing happens to them."""

    @functools.cache
    def find(name: str) -> list[Fate]:
        return undisturbed(*JOBS[name], tmp_path_factory.mktemp(name))

    return find


# Where the struck rank is, and what the others then wait for.
PHASES = {
    "in backward": ("in backward", 2, {"a header", "gradients"}),
    "before the header": ("before the header", 0, {"a header"}),
    "before the first vote": ("after the header", 0, {"votes", "a verdict"}),
    "between votes and verdict": ("before counting", 1, {"votes", "a verdict", "a header"}),
    "before applying": ("before applying", 1, {"a verdict", "a header"}),
    "after applying": ("after applying", 3, {"a verdict", "a header"}),
    "after the step": ("after the step", 0, {"a header"}),
}


@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("plain", "before the header"),
        pytest.param("plain", "after applying", marks=pytest.mark.smoke),
        ("ddp", "before the first vote"),
        ("ddp", "between votes and verdict"),
        ("ddp", "before applying"),
        ("overlap", "in backward"),
        ("overlap", "between votes and verdict"),
        ("node", "in backward"),
        ("node", "before applying"),
        ("node", "after the step"),
    ],
)
def test_the_others_end_and_name_the_phase_in_which_a_rank_is_killed(
    reference: References, tmp_path: Path, name: str, phase: str
) -> None:
    point, nth, awaited = PHASES[phase]
    job, world_size = JOBS[name]
    # A step after which a checkpoint is made, so that survivors that finish it meet there.
    fault = Fault(kind="kill", rank=1, step=4, point=point, nth=nth)
    trial = Trial(job=job, world_size=world_size, fault=fault)
    fates = endure(trial, reference(name), tmp_path)
    told = [fate.error[1] for fate in fates if fate.error is not None]
    assert len(told) == world_size - 1
    for text in told:
        assert any(f"{LOST} {what} from rank" in text for what in awaited), text
        assert "timeout of 0:10:00" in text
        assert "start all ranks again from a checkpoint. torch says: " in text


@pytest.mark.parametrize(
    ("kind", "rank", "point", "nth"),
    [
        ("kill", 0, "before a beginning", 0),
        ("kill", 1, "after a beginning", 0),
        ("kill", 0, "within a file", 0),
        ("kill", 0, "before a file", 1),
        ("kill", 1, "within a file", 0),
        ("kill", 1, "before a renaming", 0),
        ("kill", 0, "before a sync", -5),
        ("kill", 0, "before an end", 0),
        ("kill", 1, "before an end", 0),
        ("kill", 0, "after an end", 0),
        ("disk", 0, "within a file", 0),
        ("disk", 1, "within a file", 0),
        ("disk", 0, "before a sync", -5),
    ],
    ids=[
        *("before the mark", "other rank after it", "in the state", "between state and momentum"),
        *("in a momentum", "momentum without name", "between files on the disk and not"),
        *("before the end", "other rank before it", "all done"),
        *("disk full at the state", "at a momentum", "when synchronised"),
    ],
)
def test_a_fault_while_a_checkpoint_is_written_leaves_a_whole_one_or_none(
    reference: References, tmp_path: Path, kind: str, rank: int, point: str, nth: int
) -> None:
    job, world_size = JOBS["ddp"]
    # Counted from the last one that an undisturbed run passes in this step.
    nth += reference("ddp")[rank].passed[4][point] if nth < 0 else 0
    fault = Fault(kind=kind, rank=rank, step=4, point=point, nth=nth)
    endure(Trial(job=job, world_size=world_size, fault=fault), reference("ddp"), tmp_path)
    names = [path.name for path in whole_checkpoints(tmp_path)]
    assert names == ["checkpoint_2", "checkpoint_4", "checkpoint_6"]


@pytest.mark.parametrize("name", ["overlap", "node"])
def test_the_others_end_when_a_rank_stalls_beyond_the_timeout(
    reference: References, tmp_path: Path, name: str
) -> None:
    job, world_size = JOBS[name]
    fault = Fault(kind="stop", rank=1, step=4, point="before counting", nth=2)
    fates = endure(Trial(job=job, world_size=world_size, fault=fault), reference(name), tmp_path)
    # The rank that went on when the others were gone ends as they did.
    assert fates[1].error is not None
    assert any("Timed out" in (fate.error or ("", ""))[1] for fate in fates)


@pytest.mark.parametrize("name", ["plain", "overlap", "node"])
def test_an_exception_in_the_loop_of_one_rank_ends_the_others(
    reference: References, tmp_path: Path, name: str
) -> None:
    job, world_size = JOBS[name]
    fault = Fault(kind="raise", rank=0, step=5, point="before the step")
    endure(Trial(job=job, world_size=world_size, fault=fault), reference(name), tmp_path)


def test_a_wait_in_the_background_for_ranks_that_wait_does_not_keep_them_all_from_ending(
    reference: References, tmp_path: Path
) -> None:
    # Two ranks learn of the end at once, one waits for the end of these, and they for its votes.
    fault = Fault(kind="kill", rank=3, step=4, point="before a gathering", nth=1)
    job, world_size = JOBS["overlap on four"]
    trial = Trial(job=job, world_size=world_size, fault=fault)
    endure(trial, reference("overlap on four"), tmp_path)


@pytest.mark.parametrize("name", ["overlap", "node"])
def test_a_message_whose_sending_fails_is_not_sent_again(
    reference: References, tmp_path: Path, name: str
) -> None:
    # It has left by then: the others would take a second one for the message after it.
    fault = Fault(kind="raise", rank=0, step=3, point="after a scattering", nth=2)
    job, world_size = JOBS[name]
    endure(Trial(job=job, world_size=world_size, fault=fault), reference(name), tmp_path)


def go_on(
    rank: int, world_size: int, job: Job, folder: Path, injector: Injector, journal: Journal
) -> None:
    """Catches the error, and tries to take another step."""
    model = Net()
    wrapped = DistributedDataParallel(model)
    optimizer = DistributedLion(model.named_parameters(), **job.options)
    for step in (1, 2, 3, 4):
        injector.step = step
        wrapped(tokens_of(rank, step)).backward()
        injector.reach("before the step")
        try:
            optimizer.step()
        except LostRank:
            before = digest_of(model)
            with pytest.raises(LostRank):
                optimizer.step()
            assert digest_of(model) == before
            raise
        journal.note(step=step, digest=digest_of(model), abstained=0)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_rank_that_catches_the_error_can_take_no_further_step(
    tmp_path: Path, overlap: bool
) -> None:
    job = Job(mode="ddp", options={**TWO_PHASE, "overlap": overlap})
    fault = Fault(kind="kill", rank=1, step=3, point="before the step")
    fates = run_struck(go_on, 2, job, tmp_path, fault)
    assert fates[0].code == 1
    assert fates[0].error is not None
    assert fates[0].error[0] == "LostRank"
    assert sorted(fates[0].digests) == [1, 2]


# Near the end of the first step, with overlap, process groups are made and meet.
@pytest.mark.parametrize(
    ("name", "point", "left"),
    [
        ("overlap", "a gathering", 2),
        ("node", "a gathering", 6),
        ("node", "a process group", 1),
        ("node plain", "a process group", 2),
    ],
)
def test_a_rank_that_is_killed_while_process_groups_are_made_is_missed(
    reference: References, tmp_path: Path, name: str, point: str, left: int
) -> None:
    job, world_size = JOBS[name]
    count = reference(name)[1].passed[1][f"before {point}"]
    fault = Fault(kind="kill", rank=1, step=1, point=f"before {point}", nth=count - left)
    # The making of a group is the one thing that takes the timeout to fail.
    fates = run_struck(train, world_size, job, tmp_path, fault, timeout_s=SHORT_TIMEOUT_S)
    for rank in set(range(world_size)) - {1}:
        error = fates[rank].error
        assert error is not None
        awaited = "a process group" if name == "node plain" else ""
        assert f"{LOST} {awaited}" in error[1], error
