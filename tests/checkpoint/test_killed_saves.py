"""A job that is killed anywhere in Accelerate's save_state resumes from the last whole state."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from accelerate.utils import ProjectConfiguration
from torch import nn

import hf_dlion
from accelerate import Accelerator
from hf_dlion.checkpoint.whole import begin
from tests.support.spawn import run_command

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")


class Killer:
    """Kills this process at one of the times at which it opens, makes or removes a file."""

    def __init__(self) -> None:
        self.left = 0
        sys.addaudithook(self._count)

    def _count(self, event: str, args: tuple[object, ...]) -> None:
        if self.left and event in EVENTS:
            self.left -= 1
            if not self.left:
                os.kill(os.getpid(), signal.SIGKILL)


class Loop:
    """A training whose states are all named by Accelerate."""

    def __init__(self, folder: Path) -> None:
        project = ProjectConfiguration(str(folder), automatic_checkpoint_naming=True, total_limit=1)
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True, project_config=project)
        self.model = nn.Linear(3, 2)
        self.lion = hf_dlion.DistributedLion(self.model.named_parameters(), lr=1e-2)
        self.accelerator.prepare(self.model, self.lion)
        hf_dlion.accelerate.attach(self.accelerator)

    def step(self) -> list[torch.Tensor]:
        """Takes a step and returns all that a state holds."""
        self.model(torch.randn(4, 3)).square().sum().backward()
        self.lion.step()
        self.lion.zero_grad()
        return self.bits()

    def bits(self) -> list[torch.Tensor]:
        """Returns all that a state holds."""
        parameters = list(self.model.parameters())
        held = [*parameters, *(self.lion.state[p]["exp_avg"] for p in parameters)]
        return [torch.tensor(self.lion.steps), torch.get_rng_state(), *(t.clone() for t in held)]


def forked(act: Callable[[], int]) -> int:
    """Returns what `act` returns in a copy of this process, or minus the signal that killed it."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = act()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_everywhere(folder: Path, leftover: str) -> None:
    """Saves again and again from the same files, killed one event later each time."""
    warnings.simplefilter("ignore")
    root, origin = folder / "root", folder / "origin"
    killer, loop = Killer(), Loop(root)
    saved = [loop.step()]
    loop.accelerator.save_state()
    if leftover:
        begin(root / "checkpoints" / leftover)
    shutil.copytree(root, origin)
    saved.append(loop.step())

    def save(number: int) -> int:
        killer.left = number
        loop.accelerator.save_state()
        killer.left = 0
        return 1

    def resume() -> int:
        loop.accelerator.project_configuration.iteration = 0  # A new job's.
        loop.accelerator.load_state()
        found = [all(map(torch.equal, bits, loop.bits())) for bits in saved]
        loop.step()
        loop.accelerator.save_state()  # What was left behind is not in the way.
        after = loop.bits()
        loop.step()
        loop.accelerator.load_state()
        assert all(map(torch.equal, after, loop.bits()))
        assert len(list((root / "checkpoints").iterdir())) == 1
        return found.index(True)

    resumed, ended = [], -signal.SIGKILL
    while ended == -signal.SIGKILL:
        shutil.rmtree(root)
        shutil.copytree(origin, root)
        ended = forked(lambda: save(len(resumed) + 1))
        resumed.append(forked(resume))
    print(ended, *resumed)


# An unfinished state that an earlier job left: none, of the number that is next, of a higher one.
LEFTOVERS = ("", "checkpoint_1", "checkpoint_7")


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[int]]:
    """By what was left over, the exit codes that `kill_everywhere` prints."""
    program = f"import sys, pathlib, {__name__} as t\n"
    program += "for name in t.LEFTOVERS:\n"
    program += "    t.kill_everywhere(pathlib.Path(sys.argv[1], 'left' + name), name)"
    # A process of its own: this one may have threads, which a fork does not copy.
    command = [sys.executable, "-c", program, str(tmp_path_factory.mktemp("killed"))]
    done = run_command(command, cwd=Path(__file__).parents[2], timeout=250)
    lines = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
    return dict(zip(LEFTOVERS, lines, strict=True))


@pytest.mark.parametrize("leftover", LEFTOVERS)
def test_a_job_killed_at_any_event_of_a_save_resumes_from_the_last_whole_state(
    endings: dict[str, list[int]], leftover: str
) -> None:
    ended, *resumed = endings[leftover]
    assert ended == 1
    assert len(resumed) > 20
    # Each resumed: from the state before until the new one was whole, from that one afterwards.
    assert resumed == sorted(resumed)
    assert set(resumed) == {0, 1}
