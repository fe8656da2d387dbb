"""The doctor says what would keep a training from running, and lets processes try."""

from __future__ import annotations

import argparse
import multiprocessing
import re
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import hf_dlion
from hf_dlion import cli, user_warning
from hf_dlion.cli import doctor
from hf_dlion.gpu import form
from hf_dlion.launch.network import Route
from tests.support.spawn import run_command, run_script

LAUNCHED = ("RANK", "MASTER_ADDR", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher, and no second process: those have tests of their own."""
    for name in LAUNCHED:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "_two_ranks", lambda: (doctor.OK, "trained"))
    monkeypatch.setattr(doctor, "route_to", lambda host: Route("eth0", "10.0.0.7"))
    monkeypatch.setitem(vars(hf_dlion), "register", lambda: None)
    return monkeypatch


@pytest.fixture
def report(alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[int], str]:
    """Runs the doctor, which ends with a code, and returns what it prints."""

    def report(code: int) -> str:
        assert cli.main(["doctor"]) == code
        return capsys.readouterr().out

    return report


def line_of(what: str, said: str) -> str:
    return next(line for line in said.splitlines() if what in line)


def test_a_machine_that_can_train_passes(report: Any) -> None:
    said = report(code=0)
    assert said.endswith("ready to train\n")
    assert f"hf_dlion        {hf_dlion.__version__}" in said
    assert "torch 2." in line_of("packages", said)
    assert "accepts optim='dlion'" in line_of("Trainer", said)
    assert "export GLOO_SOCKET_IFNAME=eth0" in line_of("network", said)


def test_an_old_triton_is_named(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(form, "_failed", {})
    alone.setattr(user_warning, "_deferred", [])  # Or the next step in this process would warn.
    alone.setattr(torch.cuda, "is_available", lambda: True)
    alone.setattr("triton.__version__", "3.3.1")
    found, text = doctor._kernels()
    assert found == doctor.WARN
    assert "kernels need triton 3.4, which torch 2.8 installs (got 3.3.1)" in text


def test_a_gpu_that_torch_cannot_use_is_named(alone: pytest.MonkeyPatch) -> None:
    alone.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    alone.setattr(doctor, "GPU_DRIVERS", ("/no such file", "/dev/null"))
    found, text = doctor._device_found()
    assert found == doctor.WARN
    assert re.search(r"has a GPU that torch 2\S+, built for \S+, can't use", text)


def test_a_gpu_on_which_torch_fails_would_not_train(alone: pytest.MonkeyPatch, report: Any) -> None:
    if torch.cuda.is_available():
        pytest.skip("here torch doesn't fail")
    alone.setattr(form, "_failed", {})
    alone.setattr(user_warning, "_deferred", [])  # Or the next step in this process would warn.
    alone.setattr(torch.cuda, "is_available", lambda: True)
    alone.setattr(torch.cuda, "device_count", lambda: 1)
    alone.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    assert re.search(r"(?m)^FAIL  device  .*\n(.*\n)*this would not train$", report(code=1))


def test_a_rank_that_sees_one_gpu_takes_it(alone: pytest.MonkeyPatch) -> None:
    alone.setattr(torch.cuda, "device_count", lambda: 1)
    alone.setenv("LOCAL_RANK", "1")
    assert doctor._own_gpu() == torch.device("cuda", 0)


def test_several_interfaces_may_be_named(alone: Any, report: Any) -> None:
    alone.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    alone.setattr(doctor, "interfaces", lambda: {"lo": ["127.0.0.1"], "eth0": ["10.0.0.1"]})
    assert report(code=0).endswith("ready to train\n")


def test_each_failure_is_one_line_and_ends_with_code_1(alone: Any, report: Any) -> None:
    def lacking(*_: Any) -> Any:
        raise RuntimeError(
            "\n\n-- Process 1 terminated\nTraceback:\n  ...\nValueError: the cause\n"
        )

    alone.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    alone.setitem(vars(hf_dlion), "register", lacking)
    alone.setattr(doctor, "_two_ranks", lacking)
    said = report(code=1)
    assert said.endswith("this would not train\n")
    assert "FAIL  network         GLOO_SOCKET_IFNAME=nosuch0, but this machine has" in said
    assert "FAIL  Trainer         RuntimeError: ValueError: the cause\n" in said
    assert "FAIL  two ranks here  RuntimeError: ValueError: the cause\n" in said


def test_ranks_that_cannot_connect_fail(alone: Any, report: Any) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}
    for name, value in launched.items():
        alone.setenv(name, value)
    said = report(code=1)
    assert "FAIL  all ranks       cannot join them: " in said
    assert said.endswith("this would not train\n")


@pytest.mark.multiproc
@pytest.mark.smoke
def test_two_processes_of_this_machine_take_steps() -> None:
    said = run_command([sys.executable, "-m", "hf_dlion", "doctor"], timeout=120).stdout
    assert line_of("two ranks here", said).startswith("ok")
    assert said.endswith("ready to train\n")


def hang(rank: int, meeting: str) -> None:
    time.sleep(600)


@pytest.mark.multiproc
def test_two_processes_that_hang_are_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "_rank", hang)
    monkeypatch.setattr(doctor, "HANGS_S", 1.0)
    report = doctor.Report()
    report.check("two ranks here", doctor._two_ranks)
    assert report.failed
    assert "TimeoutError: two processes didn't take 3 steps in 1 s" in capsys.readouterr().out
    for process in multiprocessing.active_children():
        process.join(10.0)
    assert not multiprocessing.active_children()


def planned(said: str) -> tuple[argparse.Namespace, str]:
    """The arguments of the command that a report ends with, and what it says of them."""
    found = re.search(r"To predict whether it pays: hf-dlion (plan .*)\n(.*)\n$", said)
    assert found is not None, said
    return cli._parser().parse_args(found[1].replace("MODEL", "7b").split()), found[2]


@pytest.mark.multiproc
def test_ranks_of_a_launcher_take_steps_and_measure_links_and_name_the_command() -> None:
    said = run_script(2, ["-m", "hf_dlion", "doctor"], timeout=120).stdout
    assert "GB" in line_of("rank 1   ", said)
    assert "3 steps with DDP and gloo, equal weights" in line_of("all ranks", said)
    assert "Mbit/s" in line_of("link 2 of 2", said)
    assert said.count("ready to train") == 1
    args, explained = planned(said)
    # The rate of a machine's memory is no network's.
    assert (args.link, args.ranks, args.ranks_per_node, args.efficiency) == (1e9, 2, 1, 0.94)
    assert "Replace MODEL by a parameter count such as 7b" in explained
    assert "1gbit by your network's rate" in explained


def test_between_nodes_the_command_has_the_slowest_links_rate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def there_and_back_s(a: int, b: int, count: int, device: Any) -> float:
        return 2e-3 + (count / (1e8 if a == 1 else 5e7) if count > 1 else 0)

    monkeypatch.setattr(doctor, "_there_and_back_s", there_and_back_s)
    print(doctor._links(doctor.Report(), ["a", "a", "b", "b"], torch.device("cpu")))
    said = capsys.readouterr().out
    assert "rank 3 to rank 0: 400 Mbit/s" in line_of("slowest link", said)
    args, explained = planned(said)
    assert (args.link, args.ranks, args.ranks_per_node) == (4e8, 4, 2)
    assert (args.efficiency, args.latency_ms) == (1.0, 1.0)
    assert "your network" not in explained


FAILING = """
import os
import hf_dlion
from hf_dlion.cli import doctor, main
def steps(device):
    if os.environ["RANK"] == "1":
        raise ValueError("rank 1 has no disk")
    return own(device)
own, doctor._steps = doctor._steps, steps
hf_dlion.register = lambda: None  # A rank then needs no transformers, whose import takes seconds.
raise SystemExit(main(["doctor"]))
"""


@pytest.mark.multiproc
def test_a_rank_that_fails_neither_hangs_nor_aborts_other_ranks(tmp_path: Any) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    done = run_script(2, [str(script)], timeout=60, check=False)
    assert done.returncode != 0
    assert "rank 1: all ranks: ValueError: rank 1 has no disk" in done.stderr
    assert "terminate called" not in done.stderr
