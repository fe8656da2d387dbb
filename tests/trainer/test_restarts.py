"""A rank or a node dies, or a node joins, and torchrun restarts the script of the FAQ."""

from __future__ import annotations

import functools
import re
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

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
SETTINGS, RUN, *LINES = COMMANDS.splitlines()

# Runs the script of the page. Rank 1 kills itself in the named places in turn, a rank alone waits
# for another one, and each rank notes where it begins and with what it ends.
KILLER = """
import hashlib, os, runpy, signal, sys, time
from pathlib import Path

import hf_dlion.checkpoint.momentum_file
from transformers import Trainer, TrainerCallback

PLACES, RANK, RANKS = sys.argv[1].split(), os.environ["RANK"], os.environ["WORLD_SIZE"]


def die(*_, **__):
    with open("died", "a") as file:
        file.write("once ")
    if "node" in PLACES:
        os.kill(os.getppid(), signal.SIGKILL)  # torchrun
    os.kill(os.getpid(), signal.SIGKILL)


class Note(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        with open(f"began_{RANK}", "a") as file:
            file.write(f"{state.global_step} ")

    def on_step_end(self, args, state, control, **kwargs):
        deaths = len(Path("died").read_text().split()) if Path("died").exists() else 0
        if RANK == "1" and deaths < len(PLACES):
            if PLACES[deaths] == "save" and state.global_step == 10:
                hf_dlion.checkpoint.momentum_file.save_file = die
            if PLACES[deaths] in ("step", "node") and state.global_step == 13:
                die()
        if RANKS == "1" and state.global_step == (17 if deaths else 1):
            Path("alone").write_text(str(state.global_step))
            time.sleep(300)  # until a node joins, and torchrun ends this rank

    def on_train_end(self, args, state, control, model=None, **kwargs):
        bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
        Path(f"ended_{RANK}").write_text(hashlib.sha256(bits).hexdigest())


def watched(self, model, args, original=Trainer.__init__, **kwargs):
    args.optim_args = sys.argv[2] if sys.argv[2:] else None
    original(self, model, args, **kwargs)
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


def run_line(
    folder: Path, port: str, changes: dict[str, str], places: str, node: int, options: str = ""
) -> CompletedProcess[str]:
    """Runs the page's line for a node, with changes; a node is a torchrun of this machine."""
    (assignment,) = shlex.split(RUN)
    line = LINES[node].replace("$run", assignment.removeprefix("run="))
    for old, new in {"10.0.0.": "127.0.0.", "29500": port, **changes}.items():
        assert old in line
        line = line.replace(old, new)
    torchrun, *words, script = shlex.split(line)
    assert (torchrun, script) == ("torchrun", "train.py")
    command = [sys.executable, "-m", "torch.distributed.run", *words, "killer.py", places]
    command += [options] if options else []
    return run_command(command, env=settings(), cwd=folder, timeout=240, check=False)


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


def assert_resumed(folder: Path, whole: dict[str, torch.Tensor], began: str) -> None:
    for rank in range(2):
        assert (folder / f"began_{rank}").read_text().strip() == began
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
@pytest.mark.parametrize(("places", "began"), [("save step", "0 5 10"), ("node", "0 10")])
def test_the_lines_of_the_page_survive_the_death_of_a_rank_and_of_a_node(
    whole: dict[str, torch.Tensor], tmp_path: Path, places: str, began: str
) -> None:
    folder, port = folder_for(tmp_path / "run"), free_port()
    run = functools.partial(run_line, folder, port, {}, places)
    with ThreadPoolExecutor(2) as nodes:
        first, second = nodes.submit(run, 0), nodes.submit(run, 1)
        if places == "node":
            assert second.result().returncode < 0  # killed
            second = nodes.submit(run, 1)
        assert (first.result().returncode, second.result().returncode) == (0, 0)
    assert_resumed(folder, whole, began)


def test_a_node_leaves_and_joins_again_and_the_ranks_end_with_equal_weights(tmp_path: Path) -> None:
    """Node 1 dies after step 13, and joins node 0, which went back to step 10, after step 17."""
    folder, port = folder_for(tmp_path / "run"), free_port()
    # The page's change, and shorter waits than torchrun's 15 and 30 seconds.
    changes = {
        "--nnodes 2": "--nnodes 1:2",
        "is_host": "keep_alive_interval=3,last_call_timeout=3,is_host",
    }
    assert "replace `--nnodes 2` by `--nnodes 1:2`" in PAGE
    run = functools.partial(run_line, folder, port, changes, "node", options="vote_every=4")
    with ThreadPoolExecutor(2) as nodes:
        first, second = nodes.submit(run, 0), nodes.submit(run, 1)
        assert second.result().returncode < 0  # killed
        while not (folder / "alone").exists() or (folder / "alone").read_text() != "17":
            assert not first.done(), first.result().stderr
            time.sleep(0.1)
        second = nodes.submit(run, 1)
        assert (first.result().returncode, second.result().returncode) == (0, 0)
    # A node that starts late on a busy machine finds that the other one has begun without it.
    began = [(folder / f"began_{rank}").read_text() for rank in range(2)]
    assert re.fullmatch("(0 )+(10 )+(15 )+", began[0])
    assert re.fullmatch("(0 )+(15 )+", began[1])
    assert "was saved by 2 ranks and is loaded by 1." in first.result().stderr
    assert "was saved by 1 rank and is loaded by 2." in first.result().stderr
    assert (folder / "ended_0").read_text() == (folder / "ended_1").read_text()
    end(folder)
