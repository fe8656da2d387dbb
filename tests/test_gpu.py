"""What holds on CPU holds on GPUs, bit for bit: the codec, the staged exchange, NCCL."""

from __future__ import annotations

import dataclasses
import gc
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hf_dlion import DistributedLion
from hf_dlion.codec import ApplyJob, EncodeJob, codec_for, eager
from hf_dlion.codec.cpu import CpuCodec
from hf_dlion.codec.cuda import tables
from hf_dlion.codec.cuda.codec import TritonCodec
from hf_dlion.codec.layout import MessageLayout, words_for
from hf_dlion.codec.reference import votes as reference
from hf_dlion.codec.rule import TensorRule, Verdict, verdict_planes
from hf_dlion.ranks.fingerprint import ROW, fingerprints
from hf_dlion.step.message import Stretch, stretches_of
from tests.support.codec_cases import gradients, rule, verdict_of
from tests.support.oracle import bits_of
from tests.support.random_training import DTYPES, normal
from tests.support.spawn import LASTING, RankPools, run_script
from tests.support.tally_cases import ballots_of, exchanged

# With "cpu" and "gloo" the same tests run where there is no GPU, which shows that they can run.
DEVICE, NCCL = "cuda", "nccl"
CPU, ONE_GPU = ["cpu"] * 2, [f"{DEVICE}:0"] * 2
TWO_GPUS = [f"{DEVICE}:{k if DEVICE == 'cuda' else 0}" for k in range(2)]
GPUS = torch.cuda.device_count() if DEVICE == "cuda" else 2
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS < 1, reason="needs a GPU")]

SHAPES: list[tuple[int, ...]] = [(), (0,), (1,), (200,), (9, 70), (3, 64), (5, 128), (4, 5, 30)]
STOCHASTIC = pytest.mark.parametrize("stochastic", [True, False], ids=["stochastic", "nearest"])
DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def same_on_both(call: Callable[..., None], *tensors: Tensor) -> None:
    """Calls with each codec and its copies of the tensors; the copies must end equal."""
    ours = [tensor.clone() for tensor in tensors]
    call(CpuCodec(), *ours)
    for codec in (eager.EagerCodec(), codec_for(torch.device(DEVICE))):
        # Blocks that small tensors cross, and those that are used.
        for block in (128, tables.BLOCK) if isinstance(codec, TritonCodec) else (128,):
            theirs = [tensor.to(DEVICE, copy=True) for tensor in tensors]
            with mock.patch.object(eager, "CHUNK", 128), mock.patch.object(tables, "BLOCK", block):
                call(codec, *theirs)
            for position, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
                where = f"{type(codec).__name__}, {block}, argument {position}, {tuple(mine.shape)}"
                assert bits_of(mine) == bits_of(other), where


@DTYPE
@STOCHASTIC
@pytest.mark.parametrize("narrow", [None, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_encode_and_step_alone(dtype: Any, stochastic: bool, narrow: torch.dtype | None) -> None:
    for seed, shape in enumerate(SHAPES):
        for rank, zero_share in enumerate((0.1, 0.7, 1.0)):
            grad = gradients(shape, seed, zero_share, dtype)
            old = gradients(shape, seed + 100, 0.0, torch.float32)
            exp_avg = torch.where(grad == 0, 0.0, old).to(narrow or dtype)  # some rows abstain
            words = torch.full((words_for(grad.numel()),), -1)
            active = torch.ones(reference.row_count(shape), dtype=torch.bool)
            of_three = rule(rank=rank, step=seed + 1, stochastic_rounding=stochastic)
            same_on_both(lambda c, *a, r=of_three: c.encode(*a, r), grad, exp_avg, words, active)
            param = gradients(shape, seed + 1, 0.3, dtype)
            of_one = rule(rank=0, world_size=1, stochastic_rounding=stochastic)
            same_on_both(lambda c, *a, r=of_one: c.step_alone(*a, r), param, grad, exp_avg)


@DTYPE
@pytest.mark.parametrize("level_scale", ["word", "tensor"])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_encode_levels(dtype: torch.dtype, level_scale: str, bits: int) -> None:
    for seed, shape in enumerate([*SHAPES, (1000, 7), (5001,)]):
        for rank, zero_share in enumerate((0.0, 0.1, 0.7)):
            grad = gradients(shape, seed, zero_share, dtype)
            old = gradients(shape, seed + 100, 0.0, dtype)
            exp_avg = torch.where(grad == 0, 0.0, old).to(dtype)  # some rows abstain
            words = torch.full((bits * words_for(grad.numel()),), -1)
            active = torch.ones(reference.row_count(shape), dtype=torch.bool)
            made = rule(rank=rank, step=seed + 1)
            step = dataclasses.replace(made.step_rule, bits=bits, level_scale=level_scale)
            own = dataclasses.replace(made, step_rule=step)
            same_on_both(lambda c, *a, r=own: c.encode(*a, r), grad, exp_avg, words, active)
            same_on_both(lambda c, *a, r=own: c.preview(*a, r, 0.5), grad, exp_avg, words, active)


@DTYPE
@STOCHASTIC
@pytest.mark.parametrize("options", [{}, {"ties": "zero"}, {"aggregation": "average"}], ids=str)
def test_apply(dtype: torch.dtype, stochastic: bool, options: dict[str, str]) -> None:
    constants = rule(stochastic_rounding=stochastic, **options)
    for seed, shape in enumerate(SHAPES):
        random, row = np.random.default_rng(seed), reference.row_of_element(shape)
        votes = random.integers(0, 4, reference.row_count(shape))  # of three ranks; 0: all abstain
        sums = votes[row] - 2 * random.integers(0, votes[row] + 1)
        if not options:
            sums[(sums == 0) & (votes[row] > 0)] = 1  # no tie is left after the exchange
        made = verdict_of(sums, votes, row, constants.step_rule)
        param = gradients(shape, seed, 0.1, dtype)
        tensors = param, made.planes, made.counts
        same_on_both(lambda c, p, *parts: c.apply(p, Verdict(*parts), constants), *tensors)


@pytest.mark.skipif(DEVICE == "cpu", reason="the CPU has no Triton")
def test_triton_is_used() -> None:
    assert type(codec_for(torch.device(DEVICE))) is TritonCodec


@DTYPE
def test_large_tensors_and_blocks_of_full_length(dtype: torch.dtype) -> None:
    for shape in [(3, 70_001), (1000, 7), (300_000,), (5, 64, 512)]:
        grad = gradients(shape, 1, 0.1, dtype)
        exp_avg = torch.where(grad == 0, 0.0, gradients(shape, 2, 0.0, dtype).double()).to(dtype)
        words = torch.full((words_for(grad.numel()),), -1)
        active = torch.ones(reference.row_count(shape), dtype=torch.bool)
        param = gradients(shape, 3, 0.1, dtype)

        def both(codec: Any, param: Tensor, grad: Tensor, *rest: Tensor) -> None:
            exp_avg, words, active = rest
            codec.encode_all([EncodeJob(grad, exp_avg, words, active, rule())])
            codec.apply_all([ApplyJob(param, Verdict(words[None], active.int()), rule())])

        same_on_both(both, param, grad, exp_avg, words, active)


def vote_and_move(
    codec: Any, *tensors: Tensor, stretches: list[Stretch], votes: TensorRule
) -> None:
    param, grad, exp_avg, words, active = tensors
    bits, encode, apply = votes.step_rule.bits, [], []
    for one in stretches:
        made = words[one.segment, bits * one.words.start : bits * one.words.stop]
        parts = one.of(grad), one.of(exp_avg), made, active[one.rows]
        encode.append(EncodeJob(*parts, votes, one.run))
        verdict = Verdict(words[one.segment, one.words][None], active[one.rows].int())
        apply.append(ApplyJob(param, verdict, rule(), one.run))
    codec.encode_all(encode)
    codec.apply_all(apply)


@DTYPE
@pytest.mark.parametrize("bits", [1, 4])
@pytest.mark.parametrize("count", [2, 5])
def test_segments_of_a_message(dtype: torch.dtype, bits: int, count: int) -> None:
    votes = dataclasses.replace(rule(), step_rule=dataclasses.replace(rule().step_rule, bits=bits))
    for seed, shape in enumerate([(300,), (9, 70), (130, 3), (70, 640)]):
        grad = gradients(shape, seed, 0.9, dtype)
        exp_avg = torch.where(grad == 0, 0.0, gradients(shape, 9, 0.0, dtype).double()).to(dtype)
        layout = MessageLayout.of([(votes.index, grad.shape)])
        words = torch.full((count, bits * -(-layout.words // count) + 3), -1)
        active = torch.ones(layout.rows, dtype=torch.bool)
        stretches = list(stretches_of(layout, count, [(votes.index, grad)]))
        task = partial(vote_and_move, stretches=stretches, votes=votes)
        same_on_both(task, gradients(shape, 3, 0.1, dtype), grad, exp_avg, words, active)


@pytest.mark.parametrize("absent_share", [0.0, 0.3])
@pytest.mark.parametrize(
    "options", [{}, {"ties": "zero"}, {"aggregation": "average"}, {"bits": 2}, {"bits": 8}], ids=str
)
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_tally(absent_share: float, options: dict[str, Any], world_size: int) -> None:
    shapes = [shape for shape in SHAPES if shape and 0 not in shape] + [(70, 640), (5000, 1)]
    layout = MessageLayout.of([(k, torch.Size(shape)) for k, shape in enumerate(shapes)])
    bits = options.get("bits", 1)
    kinds = {name: value for name, value in options.items() if name != "bits"}
    made = rule(step=4, world_size=world_size, **kinds).step_rule
    step = dataclasses.replace(made, bits=bits)
    planes = verdict_planes(step.aggregation, step.ties, world_size)
    ballots = ballots_of(shapes, world_size, 5, absent_share, bits)
    for count, elsewhere in ((1, True), (world_size, False), (world_size, True)):
        found = [
            exchanged(codec_for(device), layout, count, planes, ballots, step, elsewhere, device)
            for device in (torch.device("cpu"), torch.device(DEVICE))
        ]
        for mine, other in zip(*found, strict=True):
            assert mine.tolist() == other.tolist()


@DTYPE
def test_hash(dtype: Any) -> None:
    lengths = [0, 1, 63, ROW + 1, 2 * ROW - 1, 130 * ROW, 150 * ROW + 7]
    tensors = [normal(length, seed=k, dtype=dtype) for k, length in enumerate(lengths)]
    tensors.append(normal(50, 70, seed=9, dtype=dtype).t())
    theirs = [tensor.to(DEVICE) for tensor in tensors]
    assert fingerprints([*theirs, *tensors]) == 2 * fingerprints(tensors)


class Weighted(nn.Module):
    """A parameter's gradient is the weight it is given: the same bits on every device."""

    def __init__(self) -> None:
        super().__init__()
        kinds = [(dtype, shape) for dtype in DTYPES for shape in [(20, 3), (129,), (4, 64), ()]]
        params = [normal(*shape, seed=k, dtype=dtype) for k, (dtype, shape) in enumerate(kinds)]
        self.params = nn.ParameterList(map(nn.Parameter, params))

    def forward(self, weights: list[Tensor]) -> Tensor:
        pairs = zip(self.params, weights, strict=False)
        return torch.stack([(p * w.to(p.device, p.dtype)).sum().double() for p, w in pairs]).sum()


def train(rank: int, _: int, devices: list[str], backend: str, ddp: bool, options: Any) -> Any:
    """Returns the parameters' bits after every step, the momenta's, and the bytes sent."""
    device = torch.device(devices[rank])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group = dist.new_group(backend=backend)
    model = Weighted().to(device)
    wrap = {"process_group": group, "find_unused_parameters": True}
    called = [DistributedDataParallel(model, **wrap) if ddp else model]  # type: ignore[arg-type]
    params = list(model.parameters())
    optimizer = DistributedLion(params, lr=0.01, weight_decay=0.1, process_group=group, **options)
    bits = []
    for step in range(6):
        weights = [normal(*p.shape, seed=97 * step + 7 * k + rank) for k, p in enumerate(params)]
        for weight in weights[::4]:
            weight[rank : rank + 2] = 0.0  # a row that no rank sees, and one of each
        if (rank, step) == (1, 3):
            weights[1][5] = float("inf")  # rank 1 abstains
        if rank == 0 and step % 2:
            weights.pop()  # rank 0 does not use the last parameter
        called[0](weights).backward()
        optimizer.step()
        optimizer.zero_grad()
        bits.append([bits_of(p) for p in params])
    called.clear()  # before its group
    gc.collect()
    dist.destroy_process_group(group)
    return bits, [bits_of(optimizer.state[p]["exp_avg"]) for p in params], optimizer.wire.bytes_sent


def train_parts(rank: int, _: int, device_type: str, backend: str) -> Any:
    """Returns this rank's parts after every step, as bits: two replicas of two ranks."""
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    lines = [dist.new_group(ranks, backend=backend) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks, backend=backend) for ranks in ([0, 2], [1, 3])]
    # torch goes on naming a mesh's groups wherever a later one is like it.
    LASTING.update({lines[rank // 2], columns[rank % 2]})
    mesh = DeviceMesh.from_group(
        [columns[rank % 2], lines[rank // 2]],
        device.type,
        mesh=[[0, 1], [2, 3]],
        mesh_dim_names=("replicate", "shard"),
    )
    model = Weighted().to(device)
    # One unit of FSDP takes one dtype, and no parameter of no dimension.
    model.params = nn.ParameterList(p for p in model.params if p.ndim and p.dtype == torch.float32)
    fully_shard(model, mesh=mesh["shard"])
    optimizer = DistributedLion(model.named_parameters(), lr=0.01, replicate=mesh["replicate"])
    params, bits = list(model.parameters()), []
    for step in range(5):
        weights = [normal(*p.shape, seed=97 * step + 7 * k + rank) for k, p in enumerate(params)]
        if (rank, step) == (1, 3):
            weights[1][5] = float("inf")  # the first replica abstains
        model(weights).backward()
        optimizer.step()
        optimizer.zero_grad()
        bits.append([bits_of(p.to_local()) for p in params])
    return bits


NEEDS_FOUR = pytest.mark.skipif(GPUS < 4, reason="needs four GPUs")


@NEEDS_FOUR
@pytest.mark.multiproc
def test_fsdp2_inside_replicas(ranks: RankPools) -> None:
    found = ranks(4).run(train_parts, DEVICE, NCCL)
    assert found[:2] == found[2:]
    assert found == ranks(4).run(train_parts, "cpu", "gloo")


@NEEDS_FOUR
@pytest.mark.multiproc
def test_trainer_shards_inside_replicas(tmp_path: Path) -> None:
    said = run_script(4, ["-m", "tests.support.fsdp2", str(tmp_path)]).stdout
    digests = re.findall(r"^rank \d: ([0-9a-f]{64})$", said, re.MULTILINE)
    assert len(digests) == 8
    assert len(set(digests)) == 1


def test_a_momentum_follows_its_parameter_to_the_gpu() -> None:
    found = []
    for device in ("cpu", DEVICE):
        param = nn.Parameter(normal(40, 30, seed=9))
        optimizer = DistributedLion([param], lr=0.01)
        for seed in range(4):
            param.grad = None
            if seed == 2:
                param.data = param.data.to(device)
            param.grad = normal(40, 30, seed=seed).to(device if seed > 1 else "cpu")
            optimizer.step()
        momentum = optimizer.state[param]["exp_avg"]
        assert momentum.device == param.device
        found.append([bits_of(param), bits_of(momentum)])
    assert found[0] == found[1]


NEEDS_TWO = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")


@pytest.mark.parametrize(
    "place", [(ONE_GPU, "gloo"), pytest.param((TWO_GPUS, NCCL), marks=NEEDS_TWO)], ids=str
)
@pytest.mark.parametrize("ddp", [False, True], ids=["bare", "ddp"])
@pytest.mark.parametrize(
    "options",
    [
        {"exchange": "gather", "check_replicas_every": 2},
        {"exchange": "two_phase", "aggregation": "average", "momentum_dtype": torch.bfloat16},
        {"exchange": "two_phase", "ties": "zero", "stochastic_rounding": False},
        {"exchange": "two_phase", "bits": 4, "momentum_sync_every": 3},
        {"exchange": "gather", "bits": 2, "level_scale": "tensor", "ties": "zero"},
    ],
    ids=str,
)
def test_training(ranks: RankPools, place: Any, ddp: bool, options: dict[str, Any]) -> None:
    first, second = found = ranks(2).run(train, *place, ddp, options)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert found == ranks(2).run(train, CPU, "gloo", ddp, options)
