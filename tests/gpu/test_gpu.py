"""A step on a GPU has the bits of the same step on a CPU, and NCCL works.

Without a GPU, the steps run on a device made of CPU memory, and the tests of NCCL are skipped.
"""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import hf_dlion.gpu.form
from hf_dlion import DistributedLion
from hf_dlion.core.codec import divided
from hf_dlion.fsdp import local_part
from hf_dlion.gpu import launches
from hf_dlion.guards import Guards
from hf_dlion.peers import Peers
from hf_dlion.ranks.header import Disagreement
from tests.support.forms import DEVICE, form
from tests.support.spawn import RankPools, on_ranks
from tests.support.steps import bits_of
from tests.support.training import replicas_of_shards, warned

GPUS = torch.cuda.device_count()
pytestmark = pytest.mark.gpu
a_gpu = pytest.mark.skipif(not GPUS, reason="needs a GPU")
two_gpus = pytest.mark.skipif(GPUS < 2, reason="NCCL refuses two ranks on one GPU")

ONE_GPU, TWO_GPUS = [f"{DEVICE}:0"] * 2, [f"{DEVICE}:0", f"{DEVICE}:1"]
# The second voter's random bits are its own.
CPU, EAGER, MIXED = ["cpu"] * 2, ["eager"] * 2, ["eager", "kernels"]
SHAPES = [(3, 64), (5,), (), (0, 4), (130, 128), (7, 3), (2, 200)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
CASES: list[dict[str, Any]] = [
    {"bits": 1, "exchange": "gather", "check_replicas_every": 1},
    {"bits": 1, "exchange": "two_phase", "ties": "zero"},
    {"bits": 2},
    {"bits": 4, "exchange": "two_phase"},
    {"bits": 4, "level_scale": "tensor"},
    {"bits": 8},
    {"aggregation": "average", "exchange": "gather", "momentum_dtype": torch.float32},
    {"aggregation": "average", "exchange": "two_phase"},
    {"momentum_sync_every": 2, "full_precision": "0.*"},
    {"vote_every": 2},
    {"vote_every": 2, "bits": 4, "full_precision": "1.*"},
]
# Voters of two ranks.
PAIRS: list[dict[str, Any]] = [
    {"local_group": 2, "exchange": "two_phase"}, {"local_group": 2, "vote_every": 2},
    {"shards": 2, "ties": "zero"}, {"shards": 2, "vote_every": 2},
]  # fmt: skip


@a_gpu
def test_a_mean_is_rounded_once_as_on_a_cpu() -> None:
    x = torch.arange(1.0, 1000.0)
    for ranks in (3, 7, 11, 49):
        found = divided(x.clone().to(DEVICE), ranks).cpu()
        assert torch.equal(found, torch.from_numpy(x.numpy() / x.numpy().dtype.type(ranks)))


def gradient(param: Tensor, *seeds: int) -> Tensor:
    """Returns 64ths between -1 and 1, a quarter of the rows zero.

    With betas of 1/2, every device has the same direction, and the same momentum before it rounds.
    Rows are old after two steps without a gradient.
    """
    seed = sum(1000**k * own for k, own in enumerate(seeds))
    generator = torch.Generator().manual_seed(seed)
    grad = torch.randint(-64, 65, param.shape, generator=generator) / 64
    if grad.dim():
        grad[torch.rand(grad.shape[0], generator=generator) < 0.25] = 0.0
    return grad.to(param.device, param.dtype)


def train(
    rank: int, _: int, devices: list[str], backend: str, forms: list[str],
    dtypes: list[torch.dtype], options: dict[str, Any],
) -> Any:  # fmt: skip
    """Returns the bits of common weights, own weights, and momenta, and the bytes sent."""
    # Kernels get the larger tensors in two parts.
    with form(forms[rank]), mock.patch.object(launches, "_SAME_KEY", 1 << 14):
        return _train(rank, torch.device(devices[rank]), backend, dtypes, options)


def _train(
    rank: int, device: torch.device, backend: str, dtypes: list[torch.dtype], options: Any
) -> Any:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    group, shards = dist.new_group(backend=backend), options.get("shards", 1)
    mesh = replicas_of_shards(2, shards, device.type) if shards > 1 else None
    ranks_each = max(options.get("local_group", 1), shards)
    voter = rank // ranks_each
    given = {name: own for name, own in options.items() if name != "shards"}
    if mesh is not None:
        given["replicate"] = mesh["replicate"]
    elif ranks_each == 1:
        given["process_group"] = group

    def placed(local: Tensor) -> Tensor:
        if mesh is None:
            return local
        return DTensor.from_local(local, mesh["shard"], [Shard(0)], run_check=False)

    torch.manual_seed(0)
    named = [
        (f"{k}.{place}", nn.Parameter(placed(torch.randn(shape).to(device, dtype))))
        for k, dtype in enumerate(dtypes)
        for place, shape in enumerate(SHAPES)
        if shape or mesh is None
    ]
    optimizer = DistributedLion(named, lr=0.01, betas=(0.5, 0.5), weight_decay=0.1, **given)
    params, found = [param for _, param in named], []
    optimizer.params.fsdp_models.append(nn.ParameterList(params))
    for step in range(5):
        for k, param in enumerate(params):
            grad = gradient(local_part(param.detach()), step, voter, k)
            if step == 3 and voter == 1 and k == 0:
                grad[1, 5] = torch.nan
            param.grad = placed(grad)
        if step == 2 and voter == 0:
            params[-1].grad = None
        # No wrapper averages the gradients of a node, which are equal.
        with mock.patch.object(Guards, "_check_hooks"):
            optimizer.step()
        momenta = [optimizer.state[param]["exp_avg"] for param in params]
        assert {momentum.device for momentum in momenta} == {params[0].device}
        own = list(map(bits_of, [*params, *momenta]))
        with optimizer.common_weights():
            found.append((list(map(bits_of, params)), own))
    sent = optimizer.wire.bytes_sent
    dist.destroy_process_group(group)
    return found, sent


@pytest.mark.multiproc
@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=two_gpus)])
@pytest.mark.parametrize("options", CASES, ids=str)
def test_steps_have_the_bits_of_the_cpu(
    pools: RankPools, backend: str, options: dict[str, Any]
) -> None:
    equal_the_cpu(pools, backend, EAGER, DTYPES, options)


@pytest.mark.multiproc
@pytest.mark.parametrize("options", [own for own in CASES if own.get("bits", 1) == 1], ids=str)
def test_ranks_with_kernels_and_without_have_the_bits_of_the_cpu(
    pools: RankPools, options: dict[str, Any]
) -> None:
    equal_the_cpu(pools, "gloo", MIXED, DTYPES[:2], options)


@pytest.mark.multiproc
@pytest.mark.parametrize("options", PAIRS, ids=str)
def test_nodes_and_shards_have_the_bits_of_the_cpu(
    pools: RankPools, options: dict[str, Any]
) -> None:
    equal_the_cpu(pools, "gloo", MIXED[::-1] + MIXED, DTYPES[:2], options)


def equal_the_cpu(
    pools: RankPools, backend: str, forms: list[str], dtypes: list[torch.dtype], options: Any
) -> None:
    ranks, places = len(forms), TWO_GPUS if backend == "nccl" else ONE_GPU * 2
    found = pools(ranks).run(train, places, backend, forms, dtypes, options, timeout=300)
    assert found == pools(ranks).run(train, ["cpu"] * ranks, "gloo", CPU * 2, dtypes, options)
    (first, _), *_, (last, _) = found
    if "shards" not in options:
        assert [params for params, _ in first] == [params for params, _ in last]


def variants(rank: int, _: int, dtypes: list[torch.dtype], options: dict[str, Any]) -> Any:
    """Returns what is launched before headers, and after them, where nothing can be compiled.

    The first step comes before the process group. The last two parameters are trained from the
    fourth step on, without a gradient in the fifth. In the last step, only rank 0 has finite ones.
    """
    seen: dict[bool, set[Any]] = {False: set(), True: set()}

    def noted(kernel: Any, device: Any, programs: int, *given: Any) -> None:
        types = kernel.fn.__annotations__.values()
        chosen = [str(own) for own, name in zip(given, types, strict=True) if "constexpr" in name]
        variant = kernel.fn.__name__, *chosen
        seen[met.called].add(variant)
        assert variant in seen[False], f"{variant} is compiled after a header"
        launch(kernel, device, programs, *given)

    agreed = mock.patch.object(Peers, "agree", autospec=True, side_effect=Peers.agree)
    with form("kernels"), agreed as met:
        launch = launches.launch
        with mock.patch.object(launches, "launch", noted):
            kinds = [(dtype, shape) for dtype in dtypes for shape in [(2, 64), (5,)]]
            params = [nn.Parameter(torch.ones(s, dtype=d, device=DEVICE)) for d, s in kinds]
            optimizer = DistributedLion(params, **options)
            for step in range(6):
                optimizer.param_groups[0]["lr"] = 1e-3 * (step > 0)
                for k, param in enumerate(params):
                    is_late = k >= len(params) - 2
                    param.requires_grad_(not is_late or step > 2)
                    param.grad = None if is_late and step != 3 else gradient(param, step, rank, k)
                    if step == 5 and rank and param.grad is not None:
                        param.grad.fill_(torch.nan)
                if step in (1, 3):
                    met.reset_mock()
                with nullcontext() if step else mock.patch.object(Peers, "world_size", 1):
                    optimizer.step()
            optimizer.exchange_now()
        assert hf_dlion.gpu.form.refusal(params[0].device) == ""
    return seen


@pytest.mark.multiproc
@pytest.mark.parametrize(("ranks", "dtypes", "options"), [
    (1, DTYPES[:2], {"momentum_dtype": torch.bfloat16}),
    (2, DTYPES[:2], {"momentum_dtype": torch.bfloat16}),
    (3, DTYPES[:2], {"ties": "zero", "exchange": "two_phase"}),
    (4, DTYPES[:2], {"aggregation": "average", "momentum_dtype": torch.float32}),
    (3, DTYPES[:3], {"aggregation": "average"}),
    (3, DTYPES[:2], {"bits": 2, "ties": "zero"}),
    (2, DTYPES[:2], {"bits": 4, "level_scale": "tensor"}),
    (2, DTYPES[:2], {"momentum_dtype": torch.float16}),
    (2, DTYPES[:2], {"vote_every": 2, "momentum_dtype": torch.float32}),
    (3, DTYPES[:2], {"vote_every": 2}),
    (2, DTYPES[:2], {"vote_every": 2, "bits": 4}),
])  # fmt: skip
def test_all_that_a_step_launches_is_compiled_before_its_header(
    pools: RankPools, ranks: int, dtypes: list[torch.dtype], options: dict[str, Any]
) -> None:
    """And nothing else is."""
    for seen in pools(ranks).run(variants, dtypes, options):
        assert seen[False] == seen[True]


LAUNCH = "hf_dlion.gpu.launches.launch"
OLD = "kernels need triton 3.4, which torch 2.8 installs (got 3.3.1)"


def compiles_until(name: str, kernel: Any, *_: Any) -> None:
    if kernel.fn.__name__ == name:
        raise RuntimeError("Failed to find C compiler.\nSet CC.")


@pytest.mark.parametrize(("what", "wrong", "why"), [
    (LAUNCH, partial(compiles_until, "each_tile"), "Failed to find C compiler."),
    (LAUNCH, partial(compiles_until, "count_votes"), "Failed to find C compiler."),
    ("triton.__version__", "3.3.1", OLD),
])  # fmt: skip
@on_ranks(2)
def test_a_gpu_on_which_kernels_fail_warns_once_and_trains(
    rank: int, what: str, wrong: Any, why: str
) -> None:
    param = nn.Parameter(torch.zeros(64, device=DEVICE))
    optimizer = DistributedLion([param], lr=1.0)
    param.grad = torch.full_like(param, rank + 1.0)
    with (
        form("eager"),
        mock.patch.dict(os.environ, {hf_dlion.gpu.form.SWITCH: "1"}),
        mock.patch.dict(hf_dlion.gpu.form._failed, clear=True),
        mock.patch(what, wrong),
        warned() as texts,
    ):
        optimizer.step()
        optimizer.step()
    assert len(texts) == 1
    assert "can't run on" in texts[0]
    assert f"(RuntimeError: {why})" in texts[0]
    assert param.tolist() == [-2.0] * 64


@pytest.mark.parametrize(
    "text",
    ["CUDA out of memory.", "Triton Error [CUDA]: out of memory", "Cannot allocate memory"],
)
@on_ranks(2)
def test_memory_that_runs_out_fails_a_step_of_all_ranks_and_no_later_one(
    rank: int, text: str
) -> None:
    error = torch.OutOfMemoryError(text) if text.startswith("CUDA") else RuntimeError(text)
    param = nn.Parameter(torch.zeros(64, device=DEVICE))
    optimizer = DistributedLion([param], lr=1.0)
    param.grad = torch.full_like(param, rank + 1.0)
    with form("kernels"):
        fails = mock.patch(LAUNCH, side_effect=error) if rank else nullcontext()
        with fails, pytest.raises(type(error) if rank else Disagreement):
            optimizer.step()
        assert param.tolist() == [0.0] * 64
        optimizer.step()  # With kernels.
    assert param.tolist() == [-1.0] * 64


@on_ranks(1)
def test_kernels_wait_for_a_gradient_of_an_asynchronous_collective() -> None:
    """Such a gradient has no address before."""
    param = nn.Parameter(torch.zeros(64, device=DEVICE))
    optimizer = DistributedLion([param], lr=1.0)
    param.grad = AsyncCollectiveTensor(torch.ones_like(param).detach())
    with form("kernels"):
        optimizer.step()
    assert param.tolist() == [-1.0] * 64


@on_ranks(2)
def test_scratch_memory_is_free_between_steps(rank: int) -> None:
    """Then forward and backward have it. On a CPU it is kept, because new memory is slow."""
    for device, kept in ((DEVICE, False), ("cpu", True)):
        param = nn.Parameter(torch.zeros(64, device=device))
        optimizer = DistributedLion([param], lr=1.0, vote_every=2)
        param.grad = torch.ones_like(param)
        with form("eager"):
            optimizer.step()
            optimizer.step()
        assert bool(optimizer._scratch._buffers) is kept


@a_gpu
@on_ranks(2)
def test_a_step_of_one_message_makes_at_most_250_launches(rank: int) -> None:
    """Counts kernels, copies, and fills of the third step of 24 tensors, one message."""
    shapes = 4 * [(512, 2048), (2048,), (2048, 512), (512,), (512, 512), (512,)]
    params = [nn.Parameter(torch.zeros(shape, device=DEVICE)) for shape in shapes]
    optimizer = DistributedLion(params, lr=0.01)
    for step in range(3):
        for k, param in enumerate(params):
            param.grad = gradient(param, step, rank, k)
        if step < 2:
            optimizer.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        optimizer.step()
        torch.cuda.synchronize()
    names = ("cudaLaunchKernel", "cuLaunchKernel", "cudaMemcpyAsync", "cudaMemsetAsync")
    assert 0 < sum(own.count for own in profiled.key_averages() if own.key.startswith(names)) <= 250


@a_gpu
def test_one_rank_of_nccl_trains_as_no_group_does() -> None:
    ends = []
    for grouped in (False, True):
        torch.manual_seed(0)
        model: nn.Module = nn.Linear(64, 4).to(DEVICE)
        if grouped:
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
            model = DistributedDataParallel(model)
        try:
            optimizer = DistributedLion(model.named_parameters(), lr=0.01)
            if grouped:
                optimizer.attach(model)
            for step in range(3):
                optimizer.zero_grad()
                model(gradient(torch.empty(2, 64, device=DEVICE), step)).square().sum().backward()
                optimizer.step()
            ends.append([bits_of(param) for param in model.parameters()])
            del model, optimizer
        finally:
            if grouped:
                gc.collect()  # the wrapper before its group
                dist.destroy_process_group()
    assert ends[0] == ends[1]
