"""`hf-dlion plan` answers for GPUs that are not here, and does not contradict itself."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from hf_dlion.tools import cli
from hf_dlion.tools.names import FP32, NONE
from hf_dlion.tools.plan import gpu, machine
from hf_dlion.tools.plan.cli import COLUMNS, _parser
from hf_dlion.tools.plan.cost import Cluster, Link
from hf_dlion.tools.plan.gpu import GPUS
from hf_dlion.tools.plan.methods import (
    DLION,
    NODE_VOTES,
    OVERLAPPED,
    POWER,
    Case,
    Prediction,
    predict,
)
from hf_dlion.tools.plan.model import Workload, workload
from hf_dlion.tools.plan.report import verdict

# Two machines with four GPUs each.
CLUSTER = ["--ranks=8", "--ranks-per-node=4", "--link=10gbit"]


@pytest.fixture
def quick_machine(monkeypatch):
    monkeypatch.setattr(machine, "NUMEL", 1 << 14)
    monkeypatch.setattr(machine, "SMALL_NUMEL", 1 << 12)


def no_measurement(*args: Any, **options: Any) -> Any:
    raise AssertionError("nothing is measured here")


# The verdict: the best all-reduce takes 100 ms, and waits `wire` of them.


def said(
    wire: float,
    step: float,
    overlapped: float,
    power: float = 1000.0,
    together: float | None = None,
) -> str:
    shapes = ((10, 10),)
    case = Case(
        work=Workload(name="m", parameters=100, shapes=shapes), cluster=Cluster(ranks=2),
        link=Link(bits_per_s=1e9, latency_s=1e-4), compute_s=0.1,
        machine=gpu.machine_of(GPUS["h100"], torch.float32, 1),
    )  # fmt: skip
    steps = {NONE: (100 - wire, 0.0), FP32: (100 - wire, wire), POWER: (power, 0.0)}
    steps |= {DLION: (step, 0.0), OVERLAPPED: (overlapped, 0.0)}
    steps |= {} if together is None else {NODE_VOTES: (together, 0.0)}
    predictions = {
        name: Prediction(name=name, wire_bytes=0, parts={"compute": own / 1e3, "wire": waits / 1e3})
        for name, (own, waits) in steps.items()
    }
    return verdict(case, predictions)


@pytest.mark.parametrize(
    ("times", "wanted", "unwanted"),
    [
        ((0, 120, 110), ["does not pay", "hides its all-reduce", "1.10 times as long"], ["bits:"]),
        ((0, 80, 90), ["does not pay", "1.25 times as fast, but not for"], ["as long"]),
        ((0, 100, 100), ["does not pay", "predicted to take as long."], ["times as"]),
        ((30, 96, 98), ["does not pay", "only 1.04 times as fast", "Use AdamW."], ["as long"]),
        ((30, 120, 125), ["does not pay", "1.20 times as long", "Use AdamW."], ["as fast"]),
        ((60, 50, 40), ["1-bit exchange pays: ", "2.00 times as fast", "at most 2.50 times"], []),
        ((60, 50, 60), ["exchange pays: ", "overlap=True gains nothing"], ["at most", "1.67"]),
        ((60, 95, 50), ["pays with overlap=True only", "at most 2.00", "1.05 times as fast"], []),
        ((60, 120, 50), ["pays with overlap=True only", "1.20 times as long without"], []),
        ((60, 50, 40, 20), ["PowerSGD", "faster still: 2.00 times as fast as"], ["without"]),
        ((60, 95, 50, 50), ["PowerSGD", "be 1.90 times as fast as", "without ov"], ["still"]),
        ((60, 50, 40, 48), ["at most 2.50 times"], ["PowerSGD"]),
        ((60, 50, 45, 1e3, 25), ['local_group="node" is', "4.00", "overlap=True gains"], ["2.00"]),
        ((60, 50, 20, 1e3, 25), ['"node" is', "4.00", "5.00 times with overlap=True instead"], []),
        ((60, 50, 50, 1e3, 60), ["DistributedLion is predicted to be 2.00"], ["local_group"]),
        ((30, 96, 98, 50), ["Use AdamW. PowerSGD", "2.00 times as fast as DDP fp32"], ["still"]),
    ],
)
def test_a_verdict_agrees_with_itself(times, wanted, unwanted):
    text = said(*times)
    for part in wanted:
        assert part in text
    for part in unwanted:
        assert part not in text
    # Whatever is slower is said to take longer, not to be 0.9 times as fast.
    factors = [float(number) for number in re.findall(r"(\d+\.\d\d) times", text)]
    assert all(factor > 1 for factor in factors)
    assert text.endswith(".")


# What the output means


def test_the_help_explains_every_row_and_column(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    told = _parser().format_help()
    assert max(map(len, told.splitlines())) <= 80
    rows = [name for dtype in (torch.float32, torch.bfloat16) for name in names_of(dtype)]
    for name in {*rows, *COLUMNS.values()}:
        assert re.search(rf"^  {re.escape(name)} {{2,}}\w", told, re.MULTILINE), name


def names_of(dtype: torch.dtype) -> list[str]:
    own = gpu.machine_of(GPUS["h100"], dtype, 1)
    wire = Link(bits_per_s=1e10, latency_s=1e-4)
    case = Case(
        work=workload("1m"), cluster=Cluster(ranks=8, ranks_per_node=4), link=wire, machine=own,
        compute_s=0.2, dtype=dtype,
    )  # fmt: skip
    return list(predict(case))


def test_no_time_is_below_zero():
    for ranks in range(2, 40):
        case = Case(
            work=workload("29.5m"), cluster=Cluster(ranks=ranks), compute_s=0.2 / ranks,
            link=Link(bits_per_s=1e13, latency_s=1e-9),
            machine=gpu.machine_of(GPUS["h100"], torch.float32, 1),
        )  # fmt: skip
        for prediction in predict(case).values():
            assert min(prediction.parts.values()) >= 0, (ranks, prediction)


# GPUs that are not here


def test_seven_billion_parameters_on_two_machines_are_answered_in_one_command(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(machine, "measure", no_measurement)
    monkeypatch.setattr(machine, "stand_in_s", no_measurement)
    out = tmp_path / "plan.json"
    words = [*CLUSTER, "--gpu=h100", "--dtype=bfloat16", f"--json={out}"]
    assert cli.main(["plan", "7b", *words]) == 0
    told = " ".join(capsys.readouterr().out.split())
    result = json.loads(out.read_text())
    # 6 x 7e9 x 2048 FLOPs at 0.4 of 989.4e12 per second.
    assert result["compute_ms"] == pytest.approx(217.3, rel=1e-3)
    assert "computed" in result["machine"]["source"]
    # A ring of bfloat16 gradients: 2 x 7/8 x 14 GB through one card.
    rows = {row["name"]: row for row in result["rows"]}
    reduced = rows["DDP bf16 gradients, AdamW"]
    assert reduced["wire_ms"] == pytest.approx(8 * 24.5e9 / 1e7 / 0.9415, rel=0.02)
    assert "1-bit exchange pays: at 10 Gbit/s with 8 ranks on 2 nodes" in told
    assert "40 % of the 989 TFLOPS of an H100 SXM" in told
    assert "https://www.nvidia.com" in told
    assert "CAUTION" not in told
    assert NODE_VOTES in rows
    assert 'DistributedLion with local_group="node" is predicted' in told
    assert "overlap=True gains nothing" in told


def test_lora_leaves_out_the_gradients_of_frozen_weights():
    full, some = workload("7b"), workload("7b", trainable=40_000_000)
    both = [gpu.compute_s(GPUS["a100"], work, 2048, 0.4) for work in (full, some)]
    assert both[0] == pytest.approx(6 * 7e9 * 2048 / (0.4 * 312e12))
    assert both[1] / both[0] == pytest.approx(2 / 3, rel=0.01)


def test_a_gpus_constants_are_bytes_over_bandwidth():
    own = gpu.machine_of(GPUS["rtx4090"], torch.float32, 1)
    assert own.copy_ns == pytest.approx(8 / 1008)
    assert own.adamw_ns == pytest.approx(28 / 1008)
    assert own.encode_ns == pytest.approx((12 + 1 / 8) / 1008)
    half = gpu.machine_of(GPUS["rtx4090"], torch.bfloat16, 4)
    assert half.apply_ns == pytest.approx((4 + 4 / 8) / 1008)


def test_a_model_that_the_gpus_memory_cannot_hold_is_told_of(capsys):
    assert cli.main(["plan", "7b", *CLUSTER, "--gpu=rtx4090", "--dtype=bfloat16"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "56 GB with AdamW, 42 GB with DistributedLion" in told
    assert "an RTX 4090 has 24 GB" in told
    assert cli.main(["plan", "1b", *CLUSTER, "--gpu=h100", "--dtype=bfloat16"]) == 0
    assert "GB with AdamW" not in capsys.readouterr().out


@pytest.mark.usefixtures("quick_machine")
@pytest.mark.skipif(torch.cuda.is_available(), reason="then a GPU is measured")
def test_a_cluster_predicted_with_this_cpu_is_told_loudly(capsys):
    assert cli.main(["plan", "1m", *CLUSTER, "--step-ms=5"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "CAUTION: the work per element was measured on the CPU of this machine" in told
    assert "--gpu h100, a100 or rtx4090" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--mfu=0.5"], "--mfu is a share of a GPU's peak: give --gpu"),
        (["--gpu=h100", "--codec=x.json"], "--gpu computes the constants that --codec"),
        (["--gpu=h100", "--step-ms=measure"], "--gpu computes the time that --step-ms measure"),
    ],
)
def test_options_that_contradict_a_gpu_are_refused(words, message, capsys):
    assert cli.main(["plan", "1m", *CLUSTER, *words]) == 2
    assert message in capsys.readouterr().err


def test_shards_are_the_ranks_of_a_node(capsys, tmp_path):
    file = tmp_path / "plan.json"
    words = ["plan", "13b", "--ranks=16", "--link=25gbit", "--gpu=a100", "--dtype=bfloat16"]
    assert cli.main([*words, "--shard=8", f"--json={file}"]) == 0
    said = capsys.readouterr().out
    assert "16 ranks on 2 nodes" in said
    assert "no GPU ran it" in said
    assert "memory:" not in said  # 104 GB with AdamW do not fit on one GPU, an eighth does.
    assert json.loads(file.read_text())["cluster"] == {"ranks": 16, "ranks_per_node": 8}
    assert cli.main(words) == 0
    assert "memory: weights" in capsys.readouterr().out
    assert cli.main([*words, "--shard=8", "--ranks-per-node=4"]) == 2
    assert "one replica in each node" in " ".join(capsys.readouterr().err.split())


def test_of_a_sharded_model_a_rank_sends_the_votes_on_its_part():
    case = Case(
        work=workload("7b"), cluster=Cluster(ranks=2), link=Link(bits_per_s=1e9, latency_s=1e-4),
        compute_s=0.1, machine=gpu.machine_of(GPUS["h100"], torch.float32, 1),
    )  # fmt: skip
    whole = predict(case)
    parts = predict(replace(case, cluster=Cluster(ranks=8, ranks_per_node=4), sharded=True))
    # A bit of each parameter of a quarter; what leaves a node is what left a rank of DDP.
    assert 4 * parts[DLION].wire_bytes == pytest.approx(case.work.trainable / 8, rel=0.01)
    assert 4 * parts[FP32].wire_bytes == pytest.approx(whole[FP32].wire_bytes, rel=0.01)
    for name in (DLION, FP32):
        before, after = whole[name].parts, parts[name].parts
        assert after["wire"] == pytest.approx(before["wire"], rel=0.05)
    assert 4 * parts[DLION].parts["apply"] == pytest.approx(whole[DLION].parts["apply"], rel=0.01)
    assert parts.keys() < whole.keys()
