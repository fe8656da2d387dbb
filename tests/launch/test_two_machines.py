"""The lines, files and script for several machines, with all launchers on this one."""

from __future__ import annotations

import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.emulate import Emulation, EmulationRefusedError, Network
from tests.support.spawn import run_command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "several_machines.md").read_text()
FILES = [ROOT / "examples" / "accelerate" / f"machine_{rank}.yaml" for rank in (0, 1)]
SLURM = ROOT / "examples" / "slurm.sh"
# Both launchers reach each other here.
LOCAL = {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
MODULES = {"torchrun": "torch.distributed.run", "accelerate": "accelerate.commands.launch"}
# Short runs of the two examples.
SHORT = {"ddp_loop.py": ["--steps", "100"], "accelerate_loop.py": ["--epochs", "1"]}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def lines_of_the_page(launcher: str) -> list[str]:
    """The lines for machine 0 and machine 1 that start with a launcher."""
    lines = re.findall(rf"^({launcher} .*)$", PAGE, re.MULTILINE)[:2]
    assert len(lines) == 2
    return lines


def words_for_this_machine(line: str, port: int) -> list[str]:
    """A line of the page as it would read with this machine's address, a free port and paths."""
    launcher, *words = shlex.split(line)
    if launcher == "accelerate":
        assert words.pop(0) == "launch"
        # The files have the address and the port of machine 0.
        words[:0] = ["--main_process_ip", "127.0.0.1", "--main_process_port", str(port)]
    address = {"10.0.0.1": "127.0.0.1", "29500": str(port)}
    script = Path(words[-1]).name
    words = [address.get(word, word) for word in words]
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in words]
    return [sys.executable, "-m", MODULES[launcher], *words, *SHORT[script]]


def test_the_two_files_of_accelerate_differ_in_the_rank_alone() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    configs = [load_config_from_file(str(path)).to_dict() for path in FILES]
    assert [config.pop("machine_rank") for config in configs] == [0, 1]
    assert configs[0] == configs[1]
    assert configs[0]["num_machines"] == 2
    assert configs[0]["num_processes"] == 2
    assert configs[0]["distributed_type"] == "MULTI_GPU"  # which starts torchrun


def test_the_page_names_the_files_of_accelerate() -> None:
    lines = lines_of_the_page("accelerate")
    named = [re.findall(r"--config_file (\S+)", line) for line in lines]
    assert named == [[path.relative_to(ROOT).as_posix()] for path in FILES]


def test_the_page_shows_the_file_of_machine_0() -> None:
    assert re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.M | re.S) == [FILES[0].read_text()]


def test_the_page_and_the_files_have_the_same_address() -> None:
    for line in lines_of_the_page("torchrun"):
        address = dict(re.findall(r"--master_(addr|port) (\S+)", line))
        for path in FILES:
            found = dict(re.findall(r"^main_process_(ip|port): (\S+)$", path.read_text(), re.M))
            assert {"addr": found["ip"], "port": found["port"]} == address


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "said"),
    [("torchrun", r"step  100  held-out loss"), ("accelerate", r"epoch 1  held-out loss")],
)
def test_the_lines_of_the_page_train_on_two_machines(
    tmp_path: Path, launcher: str, said: str
) -> None:
    port = free_port()
    commands = [words_for_this_machine(line, port) for line in lines_of_the_page(launcher)]

    def run(command: list[str]) -> str:
        return run_command(command, env=LOCAL, cwd=tmp_path, timeout=240).stdout

    with ThreadPoolExecutor(2) as machines:
        outputs = list(machines.map(run, commands))
    assert re.search(said, outputs[0])
    # Both ranks voted.
    sent = re.findall(r"rank 0 sent ([\d,]+) bytes in the last step", outputs[0])
    assert int(sent[0].replace(",", "")) > 1000


def test_the_script_for_slurm_is_bash() -> None:
    subprocess.run(["bash", "-n", SLURM], check=True)


# What SLURM's own commands do, for two nodes that are this machine.
SRUN = """#!/usr/bin/env bash
pids=()
for node in 0 1; do SLURM_NODEID=$node "$@" & pids+=($!); done
for pid in "${pids[@]}"; do wait "$pid" || exit 1; done
"""
SCONTROL = """#!/usr/bin/env bash
[ "$*" = "show hostnames node[0-1]" ] && printf '127.0.0.1\\nnode1\\n'
"""
TORCHRUN = f"""#!/usr/bin/env bash
exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"
"""


@pytest.mark.multiproc
@pytest.mark.slow
def test_the_script_for_slurm_trains_on_two_nodes(tmp_path: Path) -> None:
    for name, text in {"srun": SRUN, "scontrol": SCONTROL, "torchrun": TORCHRUN}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "IFNAME": "lo"}
    path = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    env = {**LOCAL, **slurm, **path, "MASTER_PORT": str(free_port())}
    script = [str(ROOT / "examples" / "ddp_loop.py"), *SHORT["ddp_loop.py"]]
    done = run_command(["bash", str(SLURM), *script], env=env, cwd=tmp_path, timeout=240)
    assert "step  100  held-out loss" in done.stdout
    assert "rank 0 sent" in done.stdout


@pytest.fixture
def machines() -> Iterator[list[str]]:
    """Two network namespaces, whose link is eth0, and whose own name is a loopback address."""
    with ExitStack() as stack:
        try:
            emulation = stack.enter_context(Emulation(Network.parse("2x1gbit")))
        except EmulationRefusedError as error:
            pytest.skip(str(error))
        yield emulation.namespaces


def on_two_machines(machines: list[str], module: list[str]) -> list[str]:
    """What module 0 and module 1 say, started by torchrun without an interface's name."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]

    def run(rank: int) -> str:
        clean = ["env", "-u", "GLOO_SOCKET_IFNAME", "-u", "NCCL_SOCKET_IFNAME"]
        there = ["ip", "netns", "exec", machines[rank], *clean]
        meeting = [f"--node_rank={rank}", "--master_addr=10.9.0.1", "--master_port=29500"]
        done = run_command([*there, *torchrun, *meeting, "-m", *module], timeout=120)
        return done.stderr + done.stdout

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, (0, 1)))


@pytest.mark.multiproc
@pytest.mark.slow
def test_launch_names_the_interface_between_two_machines(machines: list[str]) -> None:
    script = str(ROOT / "examples" / "ddp_loop.py")
    said = on_two_machines(machines, ["hf_dlion.launch", script, "--steps", "3"])
    named = "GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0, which leads to 10.9.0.1"
    assert [text.count(f"hf_dlion.launch: {named}") for text in said] == [1, 1]
    assert "rank 0 sent" in said[0]


@pytest.mark.multiproc
@pytest.mark.slow
def test_the_doctor_measures_the_link_between_two_machines(machines: list[str]) -> None:
    said = on_two_machines(machines, ["hf_dlion", "doctor"])[0]
    rate = re.findall(r"slowest link +rank \d to rank \d: ([\d,]+) Mbit/s", said)
    # Over the emulated link, which carries 1 Gbit/s, and not over the loopback.
    assert 0 < float(rate[0].replace(",", "")) < 1200
    assert said.rstrip().endswith("ready to train")
