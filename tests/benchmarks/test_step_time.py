"""The scripts that time and draw run once, tiny, and write what they promise."""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import codec, emulate, plot, step_time
from benchmarks.emulate import Network, emulated, namespaces, remove_stale
from benchmarks.methods import METHODS, Method, Rank
from hf_dlion.cli.plan.machine import vote_work
from tests.support.command_line import refused
from tests.support.spawn import run_command, run_script
from tests.support.tiny import tiny_llama

STEP_TIME = str(Path(step_time.__file__))
TINY = ["--sequence=16", "--steps=3"]
TIMES = {"repeats", "min_ms", "max_ms", "times_ms"}
DATA = Path(__file__).parents[2] / "docs" / "results" / "data"


def checked(path: Path, bench: str) -> list[dict[str, Any]]:
    """The rows of a result that has every promised field."""
    result = json.loads(path.read_text())
    assert result["bench"] == bench
    assert {"processor", "cores", "torch", "python", "load_average"} <= set(result["environment"])
    assert result["config"]["parameters"] > 0
    for row in result["rows"]:
        assert set(row) >= TIMES
        assert row["repeats"] == len(row["times_ms"])
        # An exchange is in one step of many, so a method with periods has no medians.
        kind, other = ("mean", "median") if row.get("steps_per_time", 1) > 1 else ("median", "mean")
        assert row[f"{kind}_ms"] == getattr(statistics, kind)(row["times_ms"])
        assert row["min_ms"] <= row[f"{kind}_ms"] <= row["max_ms"]
        assert f"{other}_ms" not in row
    return result["rows"]


def rows_of(folder: Path, *words: str) -> list[dict[str, Any]]:
    """The rows of a short run of a tiny model."""
    out = folder / "train.json"
    run_command([sys.executable, STEP_TIME, "--parameters=5000", *TINY, f"--json={out}", *words])
    return checked(out, "train")


def test_codec_times_every_number_of_bits_and_fused_adamw(tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "new" / "codec.json"
    assert codec.main(["--parameters=5000", "--repeats=2", "--ranks=4", f"--json={out}"]) == 0
    rows = {(row["name"], row["dtype"]): row for row in checked(out, "codec")}
    assert len(rows) == 12
    for dtype in ("float32", "bfloat16"):
        assert rows["fused AdamW step", dtype]["ratio"] == 1.0
        launches = [rows[f"{k} bit{'s' * (k > 1)}, 4 ranks", dtype]["launches"] for k in (1, 2, 4)]
        assert 24 < launches[0] < launches[1] < launches[2]  # The message has 24 tensors.
        row = rows["4 bits, 4 ranks", dtype]
        parts = [row[f"{part}_ms"] for part in codec.PARTS]
        assert 0 < sum(parts) <= 1.5 * row["max_ms"]
        assert row["ns_per_element"] == 1e6 * row["median_ms"] / 5000
    shown = capsys.readouterr().out
    assert "launches per message" in shown
    assert f"written: {out}" in shown


def test_codec_does_the_work_of_a_step() -> None:
    param = torch.randn(128, 64)
    param.grad = torch.randn_like(param)
    before, work = param.clone(), vote_work([param], 2, [4])
    for call in work.values():
        call()
    torch.testing.assert_close((param - before * (1 - 1e-5)).abs(), torch.full_like(param, 1e-4))


@pytest.mark.multiproc
def test_step_time_compares_every_usual_method(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    names = [name for name, method in METHODS.items() if method.usual]
    assert [row["name"] for row in rows] == [METHODS[name].title for name in names]
    sent = dict(zip(names, (row["bytes_per_step"] for row in rows), strict=True))
    assert sent["none"] == sent["alone"] == sent["adamw-alone"] == 0
    assert sent["adamw"] == 2 * sent["bf16"] == sent["ddp-lion"]
    assert 0 < sent["majority"] < sent["powersgd"] < sent["bf16"]
    assert rows[0]["ratio"] == 1.0
    assert {"encode_ms", "exchange_ms", "apply_ms"} <= set(rows[-1])


@pytest.mark.multiproc
def test_step_time_under_torchrun_times_whole_periods_of_a_given_model(tmp_path: Path) -> None:
    """What meets in every k-th step sends a k-th of an all-reduce per step."""
    out, folder = tmp_path / "train.json", tmp_path / "tiny"
    tiny_llama().config.save_pretrained(folder)
    words = [f"--model={folder}", "--sequence=16", "--steps=2", "--warmup=0", f"--json={out}"]
    names = ["adamw", "localsgd8", "diloco16", "demo", "bits4:exchange=gather", "every16"]
    run_script(2, [STEP_TIME, *words, "--methods", *names])
    adamw, local, diloco, demo, bits, ours = checked(out, "train")
    config = json.loads(out.read_text())["config"]
    assert config["parameters"] == sum(param.numel() for param in tiny_llama().parameters())
    assert adamw["bytes_per_step"] == 4 * config["parameters"]
    assert local["bytes_per_step"] == adamw["bytes_per_step"] / 8
    assert diloco["bytes_per_step"] == adamw["bytes_per_step"] / 16
    assert demo["bytes_per_step"] > 0
    assert [row["steps_per_time"] for row in (adamw, local, diloco, demo)] == [1, 8, 16, 1]
    assert bits["name"] == "DistributedLion, 4 bits, exchange=gather"
    assert [row["repeats"] for row in (adamw, local, diloco, ours)] == [2] * 4
    words = sum(-(-param.numel() // 64) for param in tiny_llama().parameters())
    assert 2 * words <= ours["bytes_per_step"] < 3 * words  # 4 bits
    parts = [ours[f"{part}_ms"] for part in step_time.PARTS]
    assert 0 < sum(parts) < ours["mean_ms"]


class Uneven(Rank):
    """Sends 12 bytes in every sixth step."""

    def step(self) -> None:
        self._taken += 1
        self.bytes_sent += 12.0 * (self._taken % 6 == 0)


def test_times_and_bytes_of_periods_are_means_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    method = Method("uneven", "", lambda model, hyper: Uneven(model, None), every=2)
    seconds = iter([1.0, 1.0, 4.0])

    def lap(call: Any, device: torch.device) -> float:
        call()
        return next(seconds)

    monkeypatch.setattr(step_time, "method_of", lambda name: method)
    monkeypatch.setattr(step_time, "slowest", lap)
    args = argparse.Namespace(parameters=5000, model=None, emulate=None)
    timed = step_time.Timed("uneven", args, torch.zeros(1, 4, dtype=torch.int64))
    timed.warm_up(1)
    for _ in range(6):
        timed.measure(seconds=0.0)
    row = timed.row()
    assert row["times_ms"] == [500.0, 500.0, 2000.0]
    assert row["mean_ms"] == 1000.0
    assert row["bytes_per_step"] == 2


@pytest.mark.multiproc
def test_ranks_of_a_node_vote_together(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, "--ranks=4", "--local-ranks=2", "--methods", "majority", "node")
    flat, node = (row["bytes_per_step"] for row in rows)
    # Each rank sends votes on half of the model, to one other rank instead of three.
    assert 0 < node < flat / 2


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--methods", "magic"], "unknown method 'magic'; use one of none, alone, adamw"),
        (["--methods", "majority:bits=3"], "bits must be 1, 2, 4, or 8 (got 3)"),
        (["--ranks=4", "--emulate=2x1gbit"], "use --local-ranks, not --ranks"),
        (["--ranks=3", "--local-ranks=2"], "--ranks (3) must be a multiple of --local-ranks (2)"),
        (["--json=/dev/null/x.json"], "/dev/null"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_ranks_start(
    words: list[str], text: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(step_time, "launch", lambda *_, **__: pytest.fail("ranks were started"))
    assert text in refused(step_time.main, words, capsys)


def test_a_picture_has_a_panel_for_each_file(tmp_path: Path, capsys: Any) -> None:
    out, wrong = tmp_path / "new" / "step.png", tmp_path / "wrong.json"
    files = [str(DATA / f"local_steps_2x{rate}.json") for rate in ("100mbit", "1gbit")]
    assert plot.main([*files, f"--out={out}"]) == 0
    assert out.read_bytes().startswith(b"\x89PNG")
    wrong.write_text('{"bench": "codec"}')
    said = refused(plot.main, [str(wrong), f"--out={out}"], capsys)
    assert f"{wrong} is not a JSON file of benchmarks/step_time.py" in said


def test_a_network_is_hosts_and_a_rate() -> None:
    assert Network.parse("4x2.5gbit") == Network(4, "2.5gbit")
    assert str(Network.parse("2x10mbit")) == "2x10mbit"
    for bad in ("1x1gbit", "x1gbit", "2x0mbit", "2x100", "2xfast", "2x1GB/s"):
        with pytest.raises(
            argparse.ArgumentTypeError, match=r"is not a (network|rate); (use|write)"
        ):
            Network.parse(bad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.setattr(emulate.os, "geteuid", lambda: 1000), "needs root"),
        (lambda m: m.setattr(emulate.sys, "platform", "darwin"), "needs Linux"),
        (lambda m: m.setattr(emulate.shutil, "which", lambda tool: None), "install iproute2"),
    ],
    ids=["not root", "not Linux", "no tools"],
)
def test_emulation_refuses_to_start_if_it_cannot_work(
    change: Any, message: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(emulate.os, "geteuid", lambda: 0)
        patched.setattr(emulate.shutil, "which", lambda tool: tool)
        change(patched)
        assert message in refused(step_time.main, ["--emulate", "2x100mbit"], capsys)


@pytest.fixture
def network() -> None:
    """Skips if no network can be built."""
    try:
        with emulated(Network.parse("2x1gbit")):
            pass
    except OSError as error:
        pytest.skip(f"no network can be built here: {error}")


HOLD = """
import signal, sys, time
sys.path.insert(0, ".")
from benchmarks.emulate import Network, emulated
from benchmarks.ranks import _termination_raises
# A shell's background job, and all that it starts, ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
with _termination_raises(), emulated(Network.parse("2x1gbit")) as hosts:
    print(*hosts, flush=True)
    time.sleep(60)
"""


def hold() -> tuple[subprocess.Popen[str], set[str]]:
    """A process that keeps a network, and the names of its namespaces."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, set(process.stdout.readline().split())


@pytest.mark.full
@pytest.mark.usefixtures("network")
def test_an_interrupted_run_leaves_no_network_and_the_next_start_removes_a_killed_ones() -> None:
    running, kept = hold()
    process, names = hold()
    with process, running:
        assert len(names) == 2
        process.kill()
        process.wait(30)
        assert names <= set(namespaces())
        remove_stale()
        assert not names & set(namespaces())
        assert kept <= set(namespaces()), "the network of a live process stays"
        running.send_signal(signal.SIGTERM)
        running.wait(30)
    assert not kept & set(namespaces())


@pytest.mark.multiproc
@pytest.mark.usefixtures("network")
def test_emulated_hosts_of_two_ranks_send_over_a_link_of_the_given_rate(tmp_path: Path) -> None:
    words = ["--local-ranks=2", "--emulate=2x2mbit", "--methods", "majority", "node", "adamw"]
    flat, node, adamw = rows = rows_of(tmp_path, *words)
    assert 0 < node["interface_bytes"] < flat["interface_bytes"] < adamw["interface_bytes"]
    # All bytes beyond a burst leave at the given rate. Between laps, which aren't timed, few do.
    seconds = sum(1e-3 * sum(row["times_ms"]) for row in rows)
    sent = sum(row["repeats"] * row["interface_bytes"] for row in rows) - 64 * 1024
    assert seconds > 0.8 * 8 * sent / 2e6 > 0.5
    assert not namespaces()
