"""Unedited scripts under `hf_dlion.launch`, on one node and on several."""

from __future__ import annotations

import json
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
import torch.distributed as dist

import hf_dlion
from benchmarks.emulate import Network, emulated
from hf_dlion import launch
from hf_dlion.launch import ANYWHERE, VARIABLES, Route, interfaces, name_interface, route_to
from tests.support import tiny
from tests.support.help_text import refused
from tests.support.spawn import free_port, run_command, run_script

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guides" / "multi_node.md").read_text()
FILES = [ROOT / "examples" / "accelerate" / f"machine_{rank}.yaml" for rank in (0, 1)]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]

# What a script sees


RECORDER = """
import json, sys
with open(sys.argv[1], "w") as file:
    json.dump({"name": __name__, "argv": sys.argv, "path": sys.path[0], "file": __file__}, file)
"""


@pytest.fixture
def recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A script that writes down what it sees, in a process whose argv and path may change."""
    monkeypatch.setattr(sys, "argv", ["launch"])
    monkeypatch.setattr(sys, "path", [str(Path.cwd()), *sys.path])
    monkeypatch.setitem(vars(hf_dlion), "register", lambda: None)
    path = tmp_path / "project" / "record.py"
    path.parent.mkdir()
    path.write_text(RECORDER)
    return path


def test_a_script_or_module_sees_what_python_would_show_it(
    recorder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [str(tmp_path / "seen"), "--flag", "-m"]
    launch.main([str(recorder), *words])
    seen = json.loads((tmp_path / "seen").read_text())
    own = {"name": "__main__", "argv": [str(recorder), *words], "file": str(recorder)}
    assert seen == {**own, "path": str(recorder.parent)}
    monkeypatch.syspath_prepend(str(recorder.parent))
    launch.main(["-m", "record", *words])
    seen = json.loads((tmp_path / "seen").read_text())
    assert {name: seen[name] for name in own} == own


def test_a_script_that_exits_ends_the_process_group(recorder: Path, tmp_path: Path) -> None:
    for code in (0, 7):
        recorder.write_text(
            "import sys, torch.distributed as dist\n"
            f"dist.init_process_group('gloo', init_method='file://{tmp_path}/{code}', rank=0, "
            f"world_size=1)\nsys.exit({code})\n"
        )
        with pytest.raises(SystemExit) as caught:
            launch.main([str(recorder)])
        assert caught.value.code == code
        # After an error other ranks may be waiting in a collective.
        assert dist.is_initialized() == (code != 0)
        if code:
            dist.destroy_process_group()


def test_an_error_about_optim_args_is_one_line_and_any_other_keeps_its_traceback(
    recorder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder.write_text("raise ValueError(\"optim_args='bits=3': bits must be 1\")")
    said = refused(launch.main, [str(recorder)], capsys)
    assert said == "hf_dlion.launch: optim_args='bits=3': bits must be 1"
    recorder.write_text("raise ValueError('about something else')")
    with pytest.raises(ValueError, match="about something else"):
        launch.main([str(recorder)])


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        ([], "no script given"),
        (["-m"], "no module given after -m"),
        (["--optim", "dlion"], "--optim comes before the script"),
        (["nowhere.py"], "nowhere.py: no such script"),
    ],
)
def test_what_cannot_run_ends_with_the_usage(
    argv: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    output = refused(launch.main, argv, capsys)
    assert reason in output
    assert "usage: python -m hf_dlion.launch SCRIPT" in output
    launch.main(["--help"])
    assert capsys.readouterr().out.count("--optim dlion") == 2


# Trainer


STRANGER = """
import json, sys
from transformers import HfArgumentParser, Trainer, TrainingArguments
from neighbor import tiny_data, tiny_llama, weights_digest

if __name__ == "__main__":
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    trainer = Trainer(model=tiny_llama(), args=args, train_dataset=tiny_data())
    trainer.train()
    kind = type(trainer.optimizer.optimizer).__name__
    result = [weights_digest(trainer.model), kind, args.world_size]
    with open(f"{args.output_dir}/result_{args.process_index}.json", "w") as file:
        json.dump(result, file)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that knows nothing of hf_dlion, with a module next to it."""
    (tmp_path / "neighbor.py").write_text(Path(tiny.__file__).read_text())
    (tmp_path / "run_clm.py").write_text(STRANGER)
    return tmp_path / "run_clm.py"


def arguments(script: Path, optim_args: str) -> list[str]:
    options = {
        "output_dir": script.parent, "optim": "dlion", "optim_args": optim_args, "max_steps": 4,
        "report_to": "none", "disable_tqdm": True, "use_cpu": True, "save_strategy": "no",
    }  # fmt: skip
    return [str(word) for name, value in options.items() for word in (f"--{name}", value)]


@pytest.mark.smoke
@pytest.mark.slow
@pytest.mark.multiproc
def test_accelerate_launch_trains_an_unedited_script_with_votes(script: Path) -> None:
    # --cpu would start one process; --multi_gpu starts torchrun, with or without GPUs.
    words = ["--multi_gpu", "--num_processes=2", "--num_machines=1", "--mixed_precision=no"]
    words += ["--num_cpu_threads_per_process=1", "--main_process_port=0", "-m", "hf_dlion.launch"]
    run_command([*ACCELERATE, *words, str(script), *arguments(script, "aggregation=majority")])
    texts = [(script.parent / f"result_{rank}.json").read_text() for rank in (0, 1)]
    assert texts[0] == texts[1]
    assert json.loads(texts[0])[1:] == ["DistributedLion", 2]


@pytest.mark.slow
@pytest.mark.multiproc
def test_a_bad_option_ends_every_rank_with_one_line(script: Path) -> None:
    words = ["-m", "hf_dlion.launch", str(script), *arguments(script, "agregation=average")]
    done = run_script(2, words, timeout=60, check=False)
    assert done.returncode != 0
    # torchrun may have ended one of the ranks before it could print.
    assert 1 <= len(re.findall(r"hf_dlion.launch: optim_args.*aggregation", done.stderr)) <= 2
    assert "parse_args_into_dataclasses" not in done.stderr
    assert not list(script.parent.glob("result_*"))


# The network interface


def test_the_interface_of_each_of_this_machines_addresses_is_found() -> None:
    route = route_to("127.0.0.1")
    assert route.is_loopback
    assert "127.0.0.1" in interfaces()[route.interface]
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET:
                assert route_to(entry.address) == Route(name, entry.address)
    with pytest.raises(OSError, match=r"(?i)name|resolution"):
        route_to("no-such-host.invalid")


BOTH = "GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME"
ETH1 = {"10.0.0.1": Route("eth1", "10.0.0.7")}
LOOPBACK = {"10.0.0.1": Route("lo", "127.0.1.1"), ANYWHERE: Route("wlan0", "192.168.1.2")}


@pytest.mark.parametrize(
    ("changes", "routes", "said", "interfaces"),
    [
        ({}, ETH1, f"set {BOTH}=eth1, which leads to 10.0.0.1", ["eth1", "eth1"]),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, ETH1, "set NCCL_SOCKET_IFNAME=eth1, ", ["ib0", "eth1"]),
        # One node, no route, and a node that resolves its own name to a loopback address.
        ({"LOCAL_WORLD_SIZE": "4"}, ETH1, "", [None, None]),
        ({"MASTER_ADDR": "nowhere"}, ETH1, "", [None, None]),
        ({}, LOOPBACK, "which leads to other nodes", ["wlan0", "wlan0"]),
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
    with mock.patch.object(launch, "route_to", answer), mock.patch.dict(os.environ):
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


# What SLURM's own commands do, for two nodes that are this machine.
SLURM = {
    "srun": 'pids=()\nfor node in 0 1; do SLURM_NODEID=$node "$@" & pids+=($!); done\n'
    'for pid in "${pids[@]}"; do wait "$pid" || exit 1; done',
    "scontrol": "[ \"$*\" = 'show hostnames node[0-1]' ] && printf '127.0.0.1\\nnode1\\n'",
    "torchrun": f'exec {shlex.join(TORCHRUN)} "$@"',
}


@pytest.mark.multiproc
@pytest.mark.slow
def test_the_script_for_slurm_trains_on_two_nodes(tmp_path: Path) -> None:
    for name, text in SLURM.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_NNODES": "2", "IFNAME": "lo",
        "PATH": f"{tmp_path}:/usr/bin:/bin", "MASTER_PORT": free_port(), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    script = [str(ROOT / "examples" / "ddp_loop.py"), "--steps", "100"]
    command = ["bash", str(ROOT / "examples" / "slurm.sh"), *script]
    assert "rank 0 sent" in run_command(command, env=environment, cwd=tmp_path, timeout=240).stdout


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
    script.write_text("import os\nprint('took', os.environ['GLOO_SOCKET_IFNAME'])\n")

    def run(rank: int, module: list[str]) -> str:
        clean = ["env", "-u", "GLOO_SOCKET_IFNAME", "-u", "NCCL_SOCKET_IFNAME"]
        there = ["ip", "netns", "exec", nodes[rank], *clean, *TORCHRUN, "--nnodes=2"]
        there += ["--nproc_per_node=1", f"--node_rank={rank}"]
        there += ["--master_addr=10.9.0.1", "--master_port=29500", "-m", *module]
        done = run_command(there, timeout=150)
        return done.stderr + done.stdout

    for text in on_both(lambda rank: run(rank, ["hf_dlion.launch", str(script)])):
        assert "GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0, which leads to 10.9.0.1" in text
        assert "took eth0" in text
    output = on_both(lambda rank: run(rank, ["hf_dlion", "doctor"]))[0]
    assert "all ranks are on one node" not in output
    assert re.search(r"slowest link +rank \d to rank \d: [\d,]+ Mbit/s\n\nready to train", output)
