"""The network interface between nodes, and the lines that start ranks on several of them."""

from __future__ import annotations

import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from benchmarks.emulate import Network, emulated
from hf_dlion.launch import network
from hf_dlion.launch.network import ANYWHERE, VARIABLES, Route, interfaces, name_interface, route_to
from tests.support.spawn import free_port, run_command

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "guides" / "multi_node.md").read_text()
FILES = [ROOT / "examples" / "accelerate" / f"machine_{rank}.yaml" for rank in (0, 1)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]

# The network interface


def test_the_interface_of_each_of_this_machines_addresses_is_found() -> None:
    route = route_to("127.0.0.1")
    assert route.is_loopback
    assert "127.0.0.1" in interfaces()[route.interface]
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET:
                assert route_to(entry.address) == Route(name, entry.address)
            elif entry.family == socket.AF_INET6:  # Several interfaces may have the same one.
                assert route_to(entry.address).address == entry.address.partition("%")[0]
    with pytest.raises(OSError, match=r"(?i)name|resolution"):
        route_to("no-such-host.invalid")


BOTH = "GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME"
ETH1 = {"10.0.0.1": Route("eth1", "10.0.0.7")}
LOOPBACK = {"10.0.0.1": Route("lo", "127.0.1.1"), ANYWHERE: Route("wlan0", "192.168.1.2")}


@pytest.mark.parametrize(
    ("changes", "routes", "said", "interfaces"),
    [
        ({}, ETH1, f"set {BOTH}==eth1, which leads to 10.0.0.1", ["eth1", "=eth1"]),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, ETH1, "set NCCL_SOCKET_IFNAME==eth1, ", ["ib0", "=eth1"]),
        # One node, no address of rank 0, no route, and a node whose own name is a loopback address.
        ({"LOCAL_WORLD_SIZE": "4"}, ETH1, "", [None, None]),
        ({"MASTER_ADDR": ""}, LOOPBACK, "", [None, None]),
        ({"MASTER_ADDR": "nowhere"}, ETH1, "", [None, None]),
        (
            {},
            LOOPBACK,
            "which has the default route, because no interface leads to 10.0.0.1",
            ["wlan0", "=wlan0"],
        ),
    ],
)
def test_unset_interfaces_are_set_between_nodes_and_set_ones_stay(
    changes: dict[str, str], routes: dict[str, Route], said: str, interfaces: list[str | None]
) -> None:
    def answer(host: str) -> Route:
        if host not in routes:
            raise OSError("Network is unreachable")
        return routes[host]

    several = {"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", **changes}
    with mock.patch.object(network, "route_to", answer), mock.patch.dict(os.environ):
        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(several)
        output = name_interface()
        assert said in output if said else not output
        assert [os.environ.get(name) for name in VARIABLES] == interfaces
        assert name_interface() == ""


# Several nodes: the lines and files of the page


def on_both(run: Callable[[int], Any]) -> list[Any]:
    with ThreadPoolExecutor(2) as nodes:
        return list(nodes.map(run, (0, 1)))


def test_the_page_and_the_files_of_accelerate_agree() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    configs = [load_config_from_file(str(path)).to_dict() for path in FILES]
    assert [config.pop("machine_rank") for config in configs] == [0, 1]
    assert configs[0] == configs[1]
    assert configs[0]["distributed_type"] == "MULTI_GPU"  # which starts torchrun
    named = re.findall(r"^accelerate .* --config_file (\S+)", PAGE, re.M)
    assert named == [path.relative_to(ROOT).as_posix() for path in FILES]


@pytest.mark.multiproc
@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_the_lines_of_the_page_train_on_two_nodes(tmp_path: Path, launcher: str) -> None:
    lines = re.findall(rf"^({launcher} .*)$", PAGE, re.M)[:2]
    local = {"10.0.0.1": "127.0.0.1", "29500": free_port()}
    environment = {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}

    def run(rank: int) -> str:
        _, *words = shlex.split(lines[rank])
        words = [local.get(word, word) for word in words]
        words = [str(ROOT / w) if w.startswith("examples/") else w for w in words]
        if launcher == "torchrun":
            command = [*TORCHRUN, *words, "--steps", "100"]
        else:
            # The files have the address and the port of node 0.
            there = ["--main_process_ip", "127.0.0.1", "--main_process_port", local["29500"]]
            command = [*ACCELERATE, *there, *words[1:], "--epochs", "1"]
        return run_command(command, env=environment, cwd=tmp_path, timeout=240).stdout

    output = on_both(run)[0]
    assert "held-out loss" in output
    sent = re.search(r"rank 0 sent ([\d,]+) bytes in the last step", output)
    assert sent is not None
    assert int(sent[1].replace(",", "")) > 1000


# The commands that the script calls, on two nodes that are this machine.
COMMANDS = {
    "srun": 'for node in 0 1; do SLURM_NODEID=$node "$@"; done',
    "scontrol": "[ \"$*\" = 'show hostnames node[7-8]' ] && printf 'node7\\nnode8\\n'",
    "torchrun": 'printf "%s|" $GLOO_SOCKET_IFNAME $NCCL_SOCKET_IFNAME "$@"; echo',
}


def test_the_script_for_slurm_starts_torchrun_on_each_node(tmp_path: Path) -> None:
    for name, text in COMMANDS.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_NNODES": "2", "IFNAME": "ib0",
        "RANKS_PER_NODE": "4", "PATH": f"{tmp_path}:/usr/bin:/bin",
    }  # fmt: skip
    command = ["bash", ROOT / "examples" / "slurm.sh", "train.py", "--name", "two words"]
    assert run_command(command, env=environment).stdout.splitlines() == [
        f"ib0|ib0|--nnodes|2|--nproc_per_node|4|--node_rank|{node}|--master_addr|node7|"
        "--master_port|29500|train.py|--name|two words|"
        for node in (0, 1)
    ]


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Two network namespaces, joined by eth0, in which the machine's own name is the loopback."""
    try:
        with emulated(Network.parse("2x1gbit")) as hosts:
            yield hosts
    except OSError as error:
        pytest.skip(f"no network namespaces: {error}")


@pytest.mark.multiproc
@pytest.mark.slow
def test_two_nodes_get_their_interface_and_the_doctor_measures(
    nodes: list[str], tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, torch\nprint('took', os.environ['GLOO_SOCKET_IFNAME'])\n")

    def run(rank: int, module: list[str]) -> str:
        clean = ["env", "-u", "GLOO_SOCKET_IFNAME", "-u", "NCCL_SOCKET_IFNAME"]
        there = ["ip", "netns", "exec", nodes[rank], *clean, *TORCHRUN, "--nnodes=2"]
        there += ["--nproc_per_node=1", f"--node_rank={rank}"]
        there += ["--master_addr=10.9.0.1", "--master_port=29500", "-m", *module]
        done = run_command(there, timeout=150)
        return done.stderr + done.stdout

    for text in on_both(lambda rank: run(rank, ["hf_dlion.launch", str(script)])):
        assert "GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME==eth0, which leads to 10.9.0.1" in text
        assert "took eth0" in text
    output = on_both(lambda rank: run(rank, ["hf_dlion", "doctor"]))[0]
    assert "all ranks are on one node" not in output
    assert re.search(r"slowest link +rank \d to rank \d: [\d,]+ Mbit/s\n\nready to train", output)
