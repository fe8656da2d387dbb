"""The doctor says what would keep a training from running, and lets processes try."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import hf_dlion
from hf_dlion.codec.native import library as native
from hf_dlion.ranks.interface import Route
from hf_dlion.tools import cli, doctor
from hf_dlion.tools.doctor import FAIL, OK, WARN, Finding
from tests.support.spawn import run_command, run_script

ALONE = ("RANK", "MASTER_ADDR", "WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """No launcher, and no second process: those have tests of their own."""
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "_two_ranks", lambda: (OK, "trained"))
    monkeypatch.setattr(doctor, "route_to", lambda host: Route("eth0", "10.0.0.7"))
    return monkeypatch


def report(capsys: pytest.CaptureFixture[str], code: int) -> str:
    assert cli.main(["doctor"]) == code
    return capsys.readouterr().out


def line_of(what: str, said: str) -> str:
    return next(line for line in said.splitlines() if what in line)


def test_a_machine_that_can_train_is_told_so(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = report(capsys, code=0)
    assert said.endswith("ready to train\n")
    assert f"hf_dlion        {hf_dlion.__version__}" in said
    assert "torch 2." in line_of("packages", said)
    assert "takes optim='dlion'" in line_of("Trainer", said)
    assert "gloo" in line_of("backends", said)
    assert "export GLOO_SOCKET_IFNAME=eth0" in line_of("network", said)


def test_an_interface_that_is_not_there_keeps_it_from_training(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    alone.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    said = report(capsys, code=1)
    assert said.endswith("this would not train\n")
    assert line_of("network", said).startswith("FAIL")
    assert "GLOO_SOCKET_IFNAME=nosuch0: this machine has" in said


def test_a_codec_that_is_not_compiled_is_told_with_its_cause(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    native.library.cache_clear()
    alone.setenv("CC", "/no/such/compiler")
    alone.setenv("XDG_CACHE_HOME", str(Path("/proc/no/such/folder")))
    try:
        said = report(capsys, code=0)
    finally:
        native.library.cache_clear()
    assert line_of("CPU codec", said).startswith("warn")
    assert "two to five times slower" in said


def test_a_transformers_that_does_not_fit_keeps_it_from_training(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def lacking() -> None:
        raise RuntimeError("hf_dlion needs Trainer.create_optimizer")

    alone.setattr(doctor, "register", lacking)
    said = report(capsys, code=1)
    assert "FAIL  Trainer         RuntimeError: hf_dlion needs Trainer.create_optimizer" in said


def test_ranks_that_cannot_train_together_are_told_and_the_cause_is_one_line(
    alone: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> tuple[str, str]:
        raise RuntimeError(
            "\n\n-- Process 1 terminated\nTraceback:\n  ...\nValueError: the cause\n"
        )

    alone.setattr(doctor, "_two_ranks", failing)
    assert "two ranks here  RuntimeError: ValueError: the cause\n" in report(capsys, code=1)


def test_what_other_ranks_have_and_rank_0_has_not_is_told() -> None:
    common = [Finding(OK, "hf_dlion", "1"), Finding(OK, "packages", "torch 2.13.0")]
    here = [*common, Finding(OK, "CPU codec", "compiled")]
    there = [common[0], Finding(OK, "packages", "torch 2.12.0"), Finding(WARN, "CPU codec", "slow")]
    assert list(doctor._differences([here, there, here])) == [
        Finding(WARN, "packages", "rank 1 has torch 2.12.0"),
        Finding(WARN, "CPU codec", "rank 1: slow"),
    ]


def test_ranks_that_cannot_meet_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "x"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    found = doctor._among_ranks([])
    assert [(finding.grade, finding.what) for finding in found] == [(FAIL, "all ranks")]


@pytest.mark.multiproc
def test_two_processes_of_this_machine_take_steps() -> None:
    said = run_command([sys.executable, "-m", "hf_dlion", "doctor"], timeout=120).stdout
    assert line_of("two ranks here", said).startswith("ok")
    assert said.endswith("ready to train\n")


@pytest.mark.long
@pytest.mark.multiproc
def test_ranks_of_a_launcher_take_steps_and_measure_their_links() -> None:
    said = run_script(2, ["-m", "hf_dlion", "doctor"], timeout=120).stdout
    assert "2 took 3 steps with DDP and gloo and hold equal weights; each sent" in said
    assert line_of("slowest link", said).startswith("ok")
    assert said.count("ready to train") == 1


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("--version", f"hf-dlion {hf_dlion.__version__}\n"),
        ("docter", "hf-dlion: there is no command 'docter', did you mean doctor?\n"),
        ("xyz", "hf-dlion: there is no command 'xyz'\n"),
    ],
)
def test_the_console_script_has_a_version_and_names_unknown_words(
    word: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([word]) == (0 if word == "--version" else 2)
    out, err = capsys.readouterr()
    assert (out or err).startswith(said)
