"""The benchmarks run, and write what they promise."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import codec, emulate, plot, rivals, step_time
from benchmarks.emulate import (
    Emulation,
    EmulationRefusedError,
    Network,
    namespaces,
    remove_stale,
)
from benchmarks.methods import FSDP2, METHODS, NODE, ON_DEMAND, methods_of, sensible_methods
from hf_dlion import DistributedLion
from tests.support.spawn import RankPools, run_command, run_script
from tests.support.tiny import tiny_llama

FOLDER = Path(codec.__file__).parent
EXCHANGE, MEMORY, STEP_TIME = (
    [sys.executable, str(FOLDER / f"{name}.py")] for name in ("exchange", "memory", "step_time")
)

TIMES = {"repeats", "median_ms", "min_ms", "max_ms", "times_ms"}


def checked(path: Path, bench: str) -> list[dict[str, Any]]:
    """The rows of a result that has every promised field."""
    result = json.loads(path.read_text())
    assert result["bench"] == bench
    assert {"processor", "cores", "torch", "python", "load_average"} <= set(result["environment"])
    assert result["config"]["parameters"] > 0
    for row in result["rows"]:
        assert set(row) >= TIMES
        assert row["min_ms"] <= row["median_ms"] <= row["max_ms"]
        assert row["repeats"] == len(row["times_ms"])
    return result["rows"]


def test_codec_times_every_backend_beside_fused_adamw(tmp_path, capfd):
    out = tmp_path / "new" / "codec.json"
    words = ["--parameters=5000", "--repeats=2", f"--json={out}"]
    assert codec.main(words) == 0
    rows = checked(out, "codec")
    names = {(row["name"], row["dtype"]) for row in rows}
    for dtype in ("float32", "bfloat16"):
        wanted = {"fused AdamW step", "copy", "eager, 2 ranks", "eager, 4 ranks"}
        wanted |= {"hash of all parameters"}
        assert {(name, dtype) for name in wanted} <= names
    assert "fused AdamW step" in capfd.readouterr().out


def test_on_a_device_codecs_are_timed_beside_a_copy_of_as_many_bytes(tmp_path):
    out = tmp_path / "codec.json"
    args = argparse.Namespace(
        device="cpu", parameters=5000, repeats=2, json=str(out), format="json"
    )
    codec.run_on_device(args)
    rows = {(row["name"], row["dtype"]): row for row in checked(out, "codec")}
    assert rows["encode", "float32"]["megabytes"] == (3 * 4 * 5000 + 8 * 79) / 1e6
    assert rows["eager apply", "bfloat16"]["ratio"] > 0
    assert rows["hash", "bfloat16"]["megabytes"] == 2 * 5000 / 1e6


@pytest.mark.multiproc
@pytest.mark.long
def test_exchange_compares_both_strategies_with_all_reduces(tmp_path):
    out = tmp_path / "exchange.json"
    run_command([*EXCHANGE, "--parameters=70000", "--repeats=2", f"--json={out}"])
    rows = {row["name"]: row for row in checked(out, "exchange")}
    assert list(rows) == ["all-reduce fp32", "all-reduce bf16", "gather", "two_phase"]
    assert rows["all-reduce fp32"]["bytes_per_step"] == 70000 * 4
    assert rows["all-reduce bf16"]["bytes_per_step"] == 70000 * 2
    assert 1 < rows["gather"]["bits_per_parameter"] < 1.2


@pytest.mark.multiproc
@pytest.mark.parametrize("launcher", ["spawned", pytest.param("torchrun", marks=pytest.mark.long)])
def test_train_compares_every_method(tmp_path, launcher):
    out = tmp_path / "train.json"
    words = ["--parameters=5000", "--sequence=16", "--steps=3", f"--json={out}"]
    if launcher == "torchrun":
        run_script(2, [STEP_TIME[1], *words])
    else:
        run_command([*STEP_TIME, *words])
    rows = checked(out, "train")
    # What the ranks of a node do together is for several nodes.
    names = [name for name in METHODS if name not in (NODE, FSDP2, *ON_DEMAND)]
    sent = [row["bytes_per_step"] for row in rows]
    bytes_of = dict(zip(names, sent, strict=True))
    assert bytes_of["none"] == bytes_of["alone"] == 0
    assert bytes_of["fp32"] == 2 * bytes_of["bf16"] == bytes_of["lion"]
    assert 0 < bytes_of["dlion"] <= bytes_of["overlap"] < bytes_of["powersgd"] < bytes_of["bf16"]
    assert rows[0]["ratio"] == 1.0
    assert {"encode_ms", "exchange_ms", "apply_ms"} <= set(rows[-1])


@pytest.mark.multiproc
def test_train_times_rivals_over_whole_periods_on_a_model_of_ones_own(tmp_path):
    """What meets in every k-th step sends a k-th of an all-reduce per step."""
    out, folder = tmp_path / "train.json", tmp_path / "tiny"
    config = tiny_llama().config
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    words = [f"--model={folder}", "--sequence=16", "--steps=1", f"--json={out}"]
    names = ["fp32", "localsgd8", "diloco16", "demo"]
    run_command([*STEP_TIME, *words, "--methods", *names])
    fp32, local, diloco, demo = checked(out, "train")
    config = json.loads(out.read_text())["config"]
    assert config["model"] == str(folder)
    assert config["parameters"] == sum(param.numel() for param in tiny_llama().parameters())
    assert fp32["bytes_per_step"] == 4 * config["parameters"]
    assert local["bytes_per_step"] == fp32["bytes_per_step"] / 8
    assert diloco["bytes_per_step"] == fp32["bytes_per_step"] / 16
    assert demo["bytes_per_step"] > 0
    periods = [row["steps_per_time"] for row in (fp32, local, diloco, demo)]
    assert periods == [1, 8, 16, 1]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--methods", "diloco16"], "torchft is not installed: pip install torchft"),
        (["--model", "./nowhere"], "./nowhere is no folder"),
    ],
)
def test_train_refuses_what_it_lacks_before_it_starts_ranks(words, text, monkeypatch, capsys):
    monkeypatch.setattr(rivals.importlib.util, "find_spec", lambda name: None)
    started = "benchmarks.ranks.launch"
    monkeypatch.setattr(started, lambda *args: pytest.fail("ranks were started"))
    assert step_time.main(words) == 2
    assert text in capsys.readouterr().err


@pytest.mark.multiproc
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 3])
def test_votes_take_about_four_tenths_of_a_byte_per_parameter(tmp_path, ranks):
    out = tmp_path / "memory.json"
    words = [f"--ranks={ranks}", "--parameters=12000000", f"--json={out}"]
    run_command([*MEMORY, *words])
    rows = json.loads(out.read_text())["rows"]
    used = {row["name"]: row["bytes_per_parameter"] for row in rows}
    # Pages of DDP's buckets that are never written to are never there (4 bytes).
    assert used["DistributedLion"] - used["DDP fp32, Lion"] < 0.4 - 3.0
    # Beside Lion without any wrapper; gloo and Python take a little, too.
    assert 0.25 < used["DistributedLion"] - used["one host alone, Lion"] < 0.55


def buffer_bytes(rank: int, world_size: int, exchange: str) -> float:
    """Bytes per parameter of all tensors that the messages of a step keep."""
    param = nn.Parameter(torch.zeros(1 << 9, 1 << 11))
    param.grad = torch.ones_like(param)
    optimizer = DistributedLion([param], exchange=exchange)
    optimizer.step()
    seen: dict[int, int] = {}

    def look(value: object) -> None:
        if isinstance(value, torch.Tensor) and value is not param:
            storage = value.untyped_storage()
            seen[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, list | tuple):
            for entry in value:
                look(entry)
        elif type(value).__module__.startswith("hf_dlion.exchange") and hasattr(value, "__dict__"):
            for entry in vars(value).values():
                look(entry)

    for message in optimizer._engine.messages:
        for entry in vars(message).values():
            look(entry)
    return sum(seen.values()) / param.numel()


@pytest.mark.multiproc
@pytest.mark.parametrize(
    ("world_size", "exchange"), [(2, "gather"), (2, "two_phase"), (3, "auto"), (4, "auto")]
)
@pytest.mark.long
def test_the_messages_keep_less_than_four_tenths_of_a_byte_per_parameter(
    ranks: RankPools, world_size: int, exchange: str
) -> None:
    for found in ranks(world_size).run(buffer_bytes, exchange):
        # One message only, so room for its votes is an eighth.
        assert 0.25 < found < 0.4


@pytest.mark.long
@pytest.mark.multiproc
def test_train_measures_what_the_ranks_of_a_node_do_together(tmp_path):
    out = tmp_path / "train.json"
    words = ["--parameters=5000", "--sequence=16", "--steps=3", f"--json={out}"]
    nodes = ["--ranks=4", "--local-ranks=2", "--methods", "dlion", NODE, FSDP2]
    run_command([*STEP_TIME, *words, *nodes])
    flat, node, sharded = checked(out, "train")
    assert node["name"] == "DistributedLion, a vote per node"
    for row in (node, sharded):
        assert 0 < row["bytes_per_step"] < flat["bytes_per_step"] / 2


class Layers(nn.Module):
    """Called as a Llama is, whose import takes longer than all of this."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        hidden = nn.functional.one_hot(input_ids, 64).float()
        for layer in self.model.layers:
            hidden = layer(hidden)
        return SimpleNamespace(loss=hidden.square().mean())


def steps_with_shards(rank: int, world_size: int) -> list[tuple[str, int]]:
    """Takes a step of two nodes of two ranks; returns names, and the bytes that a rank sent."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOCAL_WORLD_SIZE", "2")
        assert {NODE, FSDP2} <= set(sensible_methods())
        methods = methods_of(["dlion", FSDP2], [1], Layers)
    for method in methods:
        method.step(torch.arange(8)[None])
    return [(method.name, method.bytes_sent) for method in methods]


@pytest.mark.multiproc
def test_train_measures_shards_inside_each_node(ranks: RankPools) -> None:
    for flat, sharded in ranks(4).run(steps_with_shards):
        assert sharded[0] == "DistributedLion, FSDP2 in the node"
        # Each rank votes on half of the model, with one other rank in place of three.
        assert 0 < sharded[1] < flat[1] / 2


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.usefixtures("network")
def test_an_emulated_host_may_have_several_ranks(tmp_path):
    out = tmp_path / "train.json"
    words = ["--parameters=5000", "--sequence=16", "--steps=3", f"--json={out}"]
    nodes = ["--emulate=2x1gbit", "--local-ranks=2", "--methods", "dlion", NODE]
    run_command([*STEP_TIME, *words, *nodes])
    flat, node = checked(out, "train")
    assert 0 < node["interface_bytes"] < flat["interface_bytes"]


def test_bits_are_refused_where_nothing_votes(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert step_time.main(["--methods", "fp32", "lion", "--bits", "4"]) == 2
    assert "of --methods fp32 lion none votes" in capsys.readouterr().err


def test_what_cannot_be_measured_is_refused_before_it_is(monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    assert step_time.main(["--ranks=4", "--emulate=2x1gbit"]) == 2
    assert "give --local-ranks, not --ranks" in capsys.readouterr().err
    assert codec.main(["--json=/dev/null/x.json"]) == 2
    assert "/dev/null" in capsys.readouterr().err
    assert step_time.main(["--ranks=3", "--local-ranks=2"]) == 2
    assert "--ranks=3 cannot be divided" in capsys.readouterr().err


def test_a_network_is_written_as_hosts_and_rate():
    assert Network.parse("4x2.5gbit") == Network(4, "2.5gbit", 2.5e9)
    for bad in ("100mbit", "1x1gbit", "2x0mbit", "2x100", "2xfast"):
        with pytest.raises(ValueError, match="for example 2x100mbit"):
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
def test_emulation_refuses_where_it_cannot_work(change, message, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    with monkeypatch.context() as patched:
        patched.setattr(emulate.os, "geteuid", lambda: 0)
        patched.setattr(emulate.shutil, "which", lambda tool: tool)
        change(patched)
        assert step_time.main(["--emulate", "2x100mbit"]) == 2
    assert message in capsys.readouterr().err


def possible() -> bool:
    """Whether this machine builds networks."""
    try:
        with Emulation(Network.parse("2x1gbit")):
            return True
    except EmulationRefusedError:
        return False


@pytest.fixture
def network() -> None:
    """Skips where no network can be built."""
    if not possible():
        pytest.skip("no network can be built here (not root, no iproute2, or no tbf)")


HOLD = """
import signal
import time
from benchmarks.emulate import Emulation, Network
from benchmarks.ranks import _termination_raises
# A shell's background job, and all that it starts, ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
with _termination_raises(), Emulation(Network.parse("2x1gbit")) as emulation:
    print(*emulation.namespaces, flush=True)
    time.sleep(60)
"""


def hold() -> tuple[subprocess.Popen[str], set[str]]:
    """A process that keeps a network, and the names of its namespaces."""
    process = subprocess.Popen([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, set(process.stdout.readline().split())


@pytest.mark.full
@pytest.mark.usefixtures("network")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_no_network(number):
    process, names = hold()
    with process:
        assert len(names) == 2
        assert names <= set(namespaces())
        process.send_signal(number)
        process.wait(30)
    assert not names & set(namespaces())


@pytest.mark.full
@pytest.mark.usefixtures("network")
def test_what_a_killed_run_left_goes_at_the_next_start():
    running, others = hold()
    process, names = hold()
    with process, running:
        process.kill()
        process.wait(30)
        assert names <= set(namespaces())
        remove_stale()
        assert not names & set(namespaces())
        assert others <= set(namespaces()), "the network of a live process stays"
        running.terminate()
    assert not others & set(namespaces())


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.usefixtures("network")
def test_a_slow_link_carries_the_same_bytes_more_slowly(tmp_path):
    rows = []
    for rate in ("2mbit", "1gbit"):
        out = tmp_path / f"{rate}.json"
        words = ["--parameters=100000", "--repeats=3", f"--json={out}", f"--emulate=2x{rate}"]
        run_command([*EXCHANGE, *words])
        rows.append(checked(out, "exchange")[0])
    slow, fast = rows
    assert slow["bytes_per_step"] == fast["bytes_per_step"] == 400_000
    # 3.2 Mbit at 2 Mbit/s, less what the bucket lets through at once, on any machine.
    assert slow["min_ms"] > 500


BENCHES = ("step_time", "exchange", "memory")


@pytest.mark.full
@pytest.mark.multiproc
@pytest.mark.skipif(sys.platform != "linux", reason="a terminal of its own")
@pytest.mark.parametrize("bench", [pytest.param(name, marks=pytest.mark.long) for name in BENCHES])
def test_of_several_ranks_one_shows_progress(bench, tmp_path):
    words = ["--parameters=5000", "--json", str(tmp_path / "out.json")]
    words += {"exchange": ["--repeats=2"], "step_time": ["--steps=2", "--methods", "dlion"]}.get(
        bench, []
    )
    screen, terminal = pty.openpty()
    env = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    with subprocess.Popen(
        [sys.executable, str(FOLDER / f"{bench}.py"), *words],
        stderr=terminal, stdout=subprocess.DEVNULL, env=env,
    ) as process:  # fmt: skip
        os.close(terminal)
        text = b""
        with contextlib.suppress(OSError):  # at the end
            while part := os.read(screen, 4096):
                text += part
        assert process.wait(120) == 0
    os.close(screen)
    # The cursor is hidden where a bar begins; training warms up before it is measured.
    assert text.count(b"\x1b[?25l") == (2 if bench == "step_time" else 1), text
    assert b"100%" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device=cuda"], "--device cuda needs a GPU that torch can use"),
        (["--device=gpu"], "--device gpu is no device: give cpu or cuda"),
        (["--bits=4", "--device=cuda"], "--device cuda needs a GPU"),
    ],
)
def test_a_missing_gpu_is_told_in_one_sentence(words, message, tmp_path, capsys):
    assert codec.main([*words, f"--json={tmp_path / 'x.json'}"]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.count("\n") == 1
    assert message in found.err


def test_json_on_stdout_is_that_of_the_file_and_nothing_else(tmp_path, capsys):
    out = tmp_path / "result.json"
    words = ["--parameters=5000", "--repeats=2", f"--json={out}", "--format=json"]
    assert codec.main(words) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(out.read_text())


def test_a_file_of_another_benchmark_is_refused_by_name(tmp_path, capsys):
    path = tmp_path / "x.json"
    path.write_text('{"bench": "codec"}')
    assert plot.main([str(path)]) == 2
    assert "is not the JSON of benchmarks/step_time.py" in capsys.readouterr().err
