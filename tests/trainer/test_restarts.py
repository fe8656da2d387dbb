"""A rank dies, torchrun restarts all, and the script of the FAQ resumes to the same end."""

from __future__ import annotations

import re
import shlex
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.spawn import free_port, run_command, run_script

pytestmark = [pytest.mark.multiproc, pytest.mark.slow]

PAGE = (Path(__file__).parents[2] / "docs" / "faq.md").read_text()
ANSWER = PAGE.split("## What happens when a node dies?\n")[1].split("\n## ")[0]
SCRIPT, COMMANDS = (
    re.findall(rf"^```{language}\n(.*?)^```$", ANSWER, re.M | re.S)[0]
    for language in ("python", "bash")
)
SETTINGS, *LINES = COMMANDS.splitlines()

# Runs the script of the page. Rank 1 may kill itself once, and each rank notes where it begins.
KILLER = """
import os, runpy, signal, sys
from pathlib import Path

import hf_dlion.checkpoint.momentum_file
from transformers import Trainer, TrainerCallback

WHERE, RANK = sys.argv[1], os.environ["RANK"]


def die(*_, **__):
    Path("died").touch()
    if WHERE == "node":
        os.kill(os.getppid(), signal.SIGKILL)  # torchrun
    os.kill(os.getpid(), signal.SIGKILL)


class Note(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        with open(f"began_{RANK}", "a") as file:
            file.write(f"{state.global_step} ")

    def on_step_end(self, args, state, control, **kwargs):
        if RANK == "1" and not Path("died").exists():
            if WHERE == "save" and state.global_step == 10:
                hf_dlion.checkpoint.momentum_file.save_file = die
            if WHERE in ("step", "node") and state.global_step == 13:
                die()


def watched(self, *args, original=Trainer.__init__, **kwargs):
    original(self, *args, **kwargs)
    self.add_callback(Note())


Trainer.__init__ = watched
runpy.run_path("train.py", run_name="__main__")
"""


def settings() -> dict[str, str]:
    """Returns the variables that the page sets, with the interface of this machine."""
    _, *words = shlex.split(SETTINGS)
    return {**dict(word.split("=") for word in words), "GLOO_SOCKET_IFNAME": "lo"}


def folder_for(path: Path) -> Path:
    path.mkdir()
    (path / "train.py").write_text(SCRIPT)
    (path / "killer.py").write_text(KILLER)
    return path


def end(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the weights, and the momenta of both ranks, after the last step."""
    tensors = {}
    for path in sorted((folder / "out" / "checkpoint-20").glob("*.safetensors")):
        tensors |= {f"{path.name} {name}": own for name, own in load_file(path).items()}
    assert {name.split()[0] for name in tensors} == {
        "model.safetensors",
        "dlion_momentum_0_of_2.safetensors",
        "dlion_momentum_1_of_2.safetensors",
    }
    return tensors


def assert_resumed(folder: Path, whole: dict[str, torch.Tensor], step: int) -> None:
    for rank in range(2):
        assert (folder / f"began_{rank}").read_text().split() == ["0", str(step)]
    resumed = end(folder)
    assert resumed.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """What an uninterrupted run ends with."""
    folder = folder_for(tmp_path_factory.mktemp("runs") / "whole")
    run_script(2, ["killer.py", "nowhere"], cwd=folder)
    return end(folder)


# A death in a save leaves that checkpoint without the file that is written last.
def test_after_a_rank_died_in_a_save_torchrun_restarts_and_the_end_is_the_same(
    whole: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    folder = folder_for(tmp_path / "run")
    words = ["--max-restarts=1", "killer.py", "save"]
    run_script(2, words, env=settings(), cwd=folder, timeout=240)
    assert (folder / "died").exists()
    assert_resumed(folder, whole, 5)


@pytest.mark.parametrize("where", ["step", "node"])
def test_the_lines_of_the_page_survive_the_death_of_a_rank_and_of_a_node(
    whole: dict[str, torch.Tensor], tmp_path: Path, where: str
) -> None:
    folder, port = folder_for(tmp_path / "run"), free_port()

    def run(node: int) -> int:
        line = LINES[node].replace("10.0.0.", "127.0.0.").replace("29500", port)
        _, *words, script = shlex.split(line)
        assert script == "train.py"
        command = [sys.executable, "-m", "torch.distributed.run", *words, "killer.py", where]
        done = run_command(command, env=settings(), cwd=folder, timeout=240, check=False)
        return done.returncode

    with ThreadPoolExecutor(2) as nodes:
        first, second = nodes.submit(run, 0), nodes.submit(run, 1)
        if where == "node":
            assert second.result() < 0  # killed
            second = nodes.submit(run, 1)
        assert (first.result(), second.result()) == (0, 0)
    assert (folder / "died").exists()
    assert_resumed(folder, whole, 10)
