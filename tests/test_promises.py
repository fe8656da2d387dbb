"""Promises of the pages that no other module holds: errors, limits, byte counts, versions."""

from __future__ import annotations

import dataclasses
import gc
import re
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

import hf_dlion
from hf_dlion import DistributedLion
from hf_dlion.exchange import WireStats
from tests.support import zoo
from tests.support.option_cases import BAD_OPTIONS
from tests.support.random_training import backward, random_param
from tests.support.spawn import RankPools, run_script
from tests.support.tiny import tiny_args

ROOT = Path(__file__).parent.parent
INSTALL, LOGGING, WIRE = (
    (ROOT / "docs" / page).read_text() for page in ("install.md", "guides/logging.md", "wire.md")
)


def provoke(rank: int, world_size: int, what: str) -> str:
    """Does on rank 1 what a row of the table of errors is about."""
    odd = rank == 1
    params = [random_param(4, 5, seed=7 if odd and what == "parameter values" else 0)]
    lr, every = 0.2 if odd and "lr" in what else 0.1, int("replicas differ" in what)
    optimizer = DistributedLion([("weight", params[0])], lr=lr, check_replicas_every=every)
    if odd and what == "trainable parameters":
        optimizer.add_param_group({"params": [("more", random_param(3))]})
    if odd and what == "different steps":
        optimizer.load_state_dict(state_at_step_7(optimizer))
    bad = float("nan") if odd and what == "NaN" else 1.0

    def closure() -> float:
        if odd and what == "step failed":
            raise ArithmeticError("the closure of rank 1")
        return 0.0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(20):
            backward(params, step)
            assert params[0].grad is not None
            params[0].grad *= bad
            if odd and what == "replicas differ" and step == 2:
                params[0].data[3, 4] *= 1.5
            try:
                optimizer.step(closure)
            except Exception as error:
                return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def state_at_step_7(optimizer: DistributedLion) -> dict[str, Any]:
    state = optimizer.state_dict()
    state["dlion"]["steps"] = 7
    return state


@pytest.mark.multiproc
@pytest.mark.parametrize(
    "what",
    [
        "'group 0 lr'",
        "parameter values",
        "replicas differ",
        "trainable parameters",
        "different steps",
        "step failed",
        "NaN",
    ],
)
def test_an_error_reads_as_on_the_page(ranks: RankPools, what: str) -> None:
    table = INSTALL.split("## Errors you may meet")[1].split("\n## ")[0]
    (listed,) = [row for row in re.findall(r"^\| `(.+?)` ", table, re.MULTILINE) if what in row]
    pattern = ".*".join(re.escape(part.strip()) for part in listed.split("..."))
    said = ranks(2).run(provoke, what, timeout=30)
    assert re.search(pattern, said[0], re.DOTALL), said[0]
    if what == "step failed":
        assert said[1] == "ArithmeticError: the closure of rank 1"
    else:
        assert said[1] == said[0]


def refuse_every_bad_option(rank: int, world_size: int) -> list[str]:
    holder = [DistributedDataParallel(nn.Linear(3, 2))]
    said = []
    for name, value, _ in BAD_OPTIONS:
        try:
            DistributedLion(holder[0].parameters(), **{name: value})
        except (TypeError, ValueError) as error:
            said.append(f"{name} in {error}" if name in str(error) else f"unnamed: {error}")
        else:
            said.append(f"{name}={value!r} was accepted")
    holder[0](torch.ones(1, 3)).sum().backward()  # the ranks are still together
    holder.clear()
    gc.collect()
    return said


@pytest.mark.multiproc
def test_each_bad_option_is_refused_on_every_rank_and_none_hangs(ranks: RankPools) -> None:
    for said in ranks(2).run(refuse_every_bad_option, timeout=30):
        assert [line for line in said if " in " not in line] == []
        assert len(said) == len(BAD_OPTIONS)


BAD_SCRIPT = """
import torch, torch.distributed as dist
from hf_dlion import DistributedLion
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = DistributedLion(model.parameters(), lr=1e-3, aggregation="median")
"""


@pytest.mark.long
@pytest.mark.multiproc
@pytest.mark.slow
def test_a_script_with_a_bad_option_ends(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text(BAD_SCRIPT)
    done = run_script(2, [str(tmp_path / "bad.py")], timeout=60, check=False)
    assert done.returncode != 0
    error = "ValueError: aggregation='median' is unknown; choose one of majority, average"
    assert 1 <= done.stderr.count(error) <= 2  # once per rank that torchrun let finish


@pytest.mark.multiproc
@pytest.mark.parametrize("world_size", [2, 3])
def test_the_first_step_sends_80_bytes_more(ranks: RankPools, world_size: int) -> None:
    assert "The first step sends 80·(N−1) bytes more" in WIRE
    for records in ranks(world_size).run(zoo.train, 2, {}):
        assert records[0].bytes_sent - records[1].bytes_sent == 80 * (world_size - 1)


def train_ddp_in_subgroups(rank: int, world_size: int, members: list[list[int]]) -> Any:
    groups = [dist.new_group(ranks) for ranks in members]
    mine = next(group for group, ranks in zip(groups, members, strict=True) if rank in ranks)
    ddp = {"process_group": mine, "find_unused_parameters": True}
    place = dist.get_rank(mine), dist.get_world_size(mine)
    return zoo.train(
        *(*place, 8, {"process_group": mine}),
        wrap=lambda model: DistributedDataParallel(model, **ddp),  # type: ignore[arg-type]
    )


@pytest.mark.multiproc
def test_ddp_in_a_process_group_of_some_ranks_trains_by_itself(ranks: RankPools) -> None:
    members = [[1, 3], [0, 2]]
    records = ranks(4).run(train_ddp_in_subgroups, members)
    for group in members:
        zoo.replay([records[rank] for rank in group], {})


def train_with_batch_norm(rank: int, world_size: int) -> tuple[list[Any], list[Any]]:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    optimizer = DistributedLion(model.named_parameters(), lr=1e-2)
    holder = [DistributedDataParallel(model)]
    generator = torch.Generator().manual_seed(rank)
    for _ in range(4):
        holder[0](torch.randn(8, 4, generator=generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert optimizer.wire.exchanges == 4
    holder[0](torch.zeros(8, 4))  # DDP sends rank 0's buffers at the forward
    before = [b.tolist() for b in model.buffers()]
    holder.clear()
    gc.collect()
    return [p.tolist() for p in model.parameters()], before


@pytest.mark.multiproc
def test_ddp_goes_on_sending_buffers(ranks: RankPools) -> None:
    first, second = ranks(2).run(train_with_batch_norm)
    assert first == second


def join_by_torch(rank: int, world_size: int) -> str:
    model = nn.Linear(3, 2)
    optimizer = DistributedLion(model.parameters())
    holder = [DistributedDataParallel(model)]
    try:
        with Join(holder):  # what Accelerate's join_uneven_inputs enters
            holder[0](torch.ones(1, 3)).sum().backward()
            optimizer.step()
    except RuntimeError as error:
        return str(error)
    finally:
        holder.clear()
        gc.collect()
    return "accepted"


@pytest.mark.multiproc
def test_join_uneven_inputs_is_refused(ranks: RankPools) -> None:
    for message in ranks(2).run(join_by_torch):
        assert "give every rank as many batches" in message


@pytest.mark.full
def test_saved_arguments_load_only_after_registration(tmp_path: Path) -> None:
    hf_dlion.register()
    path = tmp_path / "training_args.bin"
    torch.save(tiny_args(tmp_path), path)
    assert torch.load(path, weights_only=False).optim == "dlion"
    load = f"import torch; torch.load({str(path)!r}, weights_only=False)"
    command = [sys.executable, "-c", load]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert "dlion is not a valid OptimizerNames" in refused.stderr


def test_the_figures_of_the_wire_have_the_names_on_the_page() -> None:
    sentence = LOGGING.split("`optimizer.wire` tells what is sent instead of the gradients:")[
        1
    ].split(".\n")[0]
    fields = {field.name for field in dataclasses.fields(WireStats)}
    # Kept as `agreed`, so that it is waited for when it is read.
    assert set(re.findall(r"`(\w+)`", sentence)) == fields - {"agreed"} | {"agreement"}


def test_the_log_entries_have_the_names_on_the_page() -> None:
    entries = [
        set(re.findall(r"`(dlion/[\w/]+)`", text or ""))
        for text in (LOGGING, hf_dlion.DistributedLionCallback.__doc__)
    ]
    assert len(entries[0]) == 9
    assert entries[0] == entries[1]


def test_versions_are_those_of_requirements_and_pyproject() -> None:
    pinned = dict(re.findall(r"^(\S+)==(\S+)$", (ROOT / "requirements.txt").read_text(), re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = dict(re.split(">=", dependency) for dependency in project["dependencies"])
    table = INSTALL.split("## Versions")[1]
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+)", table, re.MULTILINE)
    named = {name: versions for name, *versions in rows if name != "Python"}
    assert named == {name: [pinned[name], oldest[name]] for name in oldest}
