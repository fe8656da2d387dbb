"""Step times of the study's methods: measured ones are taken, others computed, and told apart."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.convergence.cli import main
from benchmarks.convergence.clock import ROWS, Time, clock_of
from benchmarks.convergence.methods import METHODS as STUDIED
from benchmarks.convergence.results import Result
from benchmarks.methods import LOCAL
from benchmarks.methods import METHODS as TIMED
from hf_dlion.tools.names import DLION, FP32, NONE
from hf_dlion.tools.plan.cost import TCP_EFFICIENCY
from tests.support.tiny_study import TINY

NUMEL = 1_000_000
LINKS = ["10mbit", "100mbit", "1gbit"]


def of(method: str, bytes_per_step: float, rounds: float = 2.0) -> Result:
    """A result that has trained a million parameters, with a gradient of 0.25 s."""
    record = {"parameters": NUMEL, "bytes_per_step": bytes_per_step, "rounds_per_step": rounds}
    records = [{**record, "gradient_ms": 250.0}]
    return Result(TINY.replace(method=method), {}, {0: 1.0}, records)


STEP = {"batch": TINY.batch, "sequence": TINY.sequence}
SENT = {FP32: 4e6, DLION: 0.125e6}


def bench(path: Path, link: str | None, ms: dict[str, float], **config: Any) -> str:
    """The JSON of a benchmark of the same model."""
    config = {"parameters": NUMEL, "ranks": 2, "emulate": link, **STEP, **config}
    rows = [
        {"name": name, "median_ms": value, "bytes_per_step": SENT.get(name, 0)}
        for name, value in ms.items()
    ]
    path.write_text(json.dumps({"bench": "train", "config": config, "rows": rows}))
    return str(path)


def wire_s(sent: float, bits_per_s: float, rounds: int = 2) -> float:
    return rounds * 1e-4 + 8 * sent / (bits_per_s * TCP_EFFICIENCY)


ADAMW = of("adamw", 4e6)
VOTES = of("majority", 0.125e6, 1)


def test_without_a_measurement_a_step_is_the_gradient_and_then_the_network() -> None:
    clock = clock_of(LINKS, [], None, [ADAMW, VOTES])
    assert clock.step(ADAMW, "1gbit") == Time(pytest.approx(0.25 + wire_s(4e6, 1e9)))
    assert clock.step(VOTES, "10mbit") == Time(pytest.approx(0.25 + wire_s(0.125e6, 1e7, 1)))


def test_what_was_measured_is_taken_and_of_other_links_only_the_network_is_computed(
    tmp_path: Path,
) -> None:
    # The machine was faster in the second run: each counts from 0.3 s without communication.
    fast = bench(tmp_path / "fast", "2x1gbit", {NONE: 310.0, FP32: 410.0, DLION: 320.0})
    slow = bench(tmp_path / "slow", "2x100mbit", {NONE: 290.0, FP32: 690.0})
    local = of("localsgd8", 4e6 / 8, 0.25)
    clock = clock_of(LINKS, [fast, slow], None, [ADAMW, VOTES, local])
    assert clock.step(ADAMW, "1gbit") == Time(pytest.approx(0.4), measured=True)
    assert clock.step(ADAMW, "100mbit") == Time(pytest.approx(0.7), measured=True)
    # From the fastest link, where the network took least.
    own = 0.4 - wire_s(4e6, 1e9)
    assert clock.step(ADAMW, "10mbit") == Time(pytest.approx(own + wire_s(4e6, 1e7)))
    own = 0.31 - wire_s(0.125e6, 1e9, 1)
    assert clock.step(VOTES, "100mbit") == Time(pytest.approx(own + wire_s(0.125e6, 1e8, 1)))
    # PowerSGD's first steps send more than those that were timed.
    more = of("adamw", 5e6)
    assert clock.step(more, "1gbit") == Time(pytest.approx(0.4 + wire_s(1e6, 1e9, 0)), True)
    assert clock.step(more, "10mbit") == Time(
        pytest.approx(0.4 - wire_s(4e6, 1e9) + wire_s(5e6, 1e7))
    )
    # A method without a row: the step without communication, and the network.
    expected = 0.3 + wire_s(4e6 / 8, 1e9, 0)
    assert clock.step(local, "1gbit") == Time(pytest.approx(expected))


def test_a_gradient_elsewhere_makes_all_times_computed(tmp_path: Path) -> None:
    fast = bench(tmp_path / "fast", "2x1gbit", {NONE: 300.0, FP32: 400.0})
    clock = clock_of(LINKS, [fast], 0.01, [ADAMW])
    assert clock.step(ADAMW, "1gbit") == Time(pytest.approx(0.01 + wire_s(4e6, 1e9)))


@pytest.mark.parametrize(
    ("link", "config", "told"),
    [
        ("2x1gbit", {"parameters": 7}, "times 7 parameters, and the study trained 1,000,000"),
        ("2x1gbit", {"ranks": 4}, "times steps of 4 ranks x 2 x 16 tokens, .* has 2 x 2 x 16"),
        ("2x1gbit", {"batch": 64}, "times steps of 2 ranks x 64 x 16"),
        ("2x1gbit", {"sequence": 4096}, "times steps of 2 ranks x 2 x 4096"),
        (None, {}, "is of no emulated network"),
    ],
)
def test_a_benchmark_of_something_else_is_refused(
    tmp_path: Path, link: str | None, config: dict[str, int], told: str
) -> None:
    file = bench(tmp_path / "other", link, {FP32: 1.0}, **config)
    with pytest.raises(ValueError, match=told):
        clock_of(LINKS, [file], None, [ADAMW])


def test_rows_are_those_of_the_benchmark_and_methods_those_of_the_study() -> None:
    assert set(ROWS) <= set(STUDIED)
    assert ROWS["localsgd8"] == LOCAL.format(8)
    # What both call by one name is timed for the study.
    assert set(STUDIED) & set(TIMED) <= set(ROWS)


def test_the_command_tells_what_was_measured(tmp_path: Path, capsys: Any) -> None:
    words = ["--scale", "smoke", "--steps", "2", "--seeds", "1", "--out", str(tmp_path)]
    words += ["--lr-adamw", "1e-3", "--lr-lion", "1e-3"]
    for wrong, told in {
        "--links=fast": "--links fast: write a rate",
        f"--times={bench(tmp_path / 'other', '2x1gbit', {}, batch=64)}": "ranks x 64 x 16 tokens",
        f"--times={tmp_path / 'none.json'}": "No such file",
        "--compute-s=0": "must be above 0",
    }.items():
        with pytest.raises(SystemExit) if "compute" in wrong else contextlib.nullcontext():
            assert main([*words, wrong]) == 2
        assert told in capsys.readouterr().err
        assert not (tmp_path / "runs.jsonl").exists()
    assert main([*words, "--plot"]) == 0
    assert "computed from what was measured" not in capsys.readouterr().out
    numel = json.loads((tmp_path / "runs.jsonl").read_text().splitlines()[0])["parameters"]
    file = bench(tmp_path / "f", "2x1gbit", {NONE: 9.0, FP32: 70.0, DLION: 10.0}, parameters=numel)
    assert main([*words, "--report", "--plot", "--times", file, "--links", "1gbit", "10mbit"]) == 0
    told = capsys.readouterr().out
    assert "computed from what was measured" in told
    adamw, lion, votes = json.loads((tmp_path / "summary.json").read_text())
    assert adamw["step_s"]["1gbit"] == {"seconds": 0.07, "measured": True}
    assert votes["step_s"]["1gbit"] == {"seconds": 0.01, "measured": True}
    assert not lion["step_s"]["1gbit"]["measured"]
    assert not votes["step_s"]["10mbit"]["measured"]
    # Of a grid, and of methods, what is there.
    words += ["--lr-adamw", "1e-3", "7e-3", "--methods", "adamw", "bits2", "--report"]
    assert main(words) == 0
    assert [own["grid"].keys() for own in json.loads((tmp_path / "summary.json").read_text())] == [
        {"0.001"}
    ]
