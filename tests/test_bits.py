"""Bits of eight runs: weights, momenta, files, and what is sent. A change of structure keeps them.

Numbers are dyadic and betas powers of two, so no processor rounds differently. After a change of
the rule, the wire, or the file, `python -m tests.test_bits` prints the table of new hashes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from hf_dlion.checkpoint import save_momentum
from hf_dlion.optimizer import DistributedLion
from hf_dlion.ranks.wire import Wire
from tests.support.spawn import RankPool
from tests.support.steps import bits_of
from tests.support.training import replicas_of_shards

pytestmark = pytest.mark.multiproc

SHAPES = {"a": (5, 64), "b": (17, 65536), "c": (7, 3), "d.norm": (70,), "e": (3, 128), "f": (130,)}
F32, BF16, MIXED = ["float32"], ["bfloat16"], ["float32", "bfloat16", "float64", "float16"]
# dtypes of the parameters in turns, ranks, and options.
RUNS: dict[str, tuple[list[str], int, dict[str, Any]]] = {
    "float32": (F32, 2, {}),
    "bfloat16": (BF16, 3, {"momentum_dtype": torch.float32, "exchange": "two_phase"}),
    "mixed dtypes": (MIXED, 2, {"ties": "zero"}),
    "4 bits": (F32, 2, {"bits": 4, "level_scale": "tensor"}),
    "nodes": (F32, 4, {"local_group": 2}),
    "local steps": (
        MIXED,
        2,
        {
            "vote_every": 4,
            "full_precision": "*norm",
            "momentum_sync_every": 2,
            "momentum_sync": "?",
        },
    ),
    "full precision": (
        BF16,
        2,
        {"full_precision": "*norm;f", "momentum_sync_every": 2, "aggregation": "average"},
    ),
    "FSDP2": (F32, 4, {"replicate": True}),
}
# Weights, momenta, files, and sent bytes of all ranks.
HASHES = {
    "float32": "04e1da8c 4d459bc4 12816c66 794834f2",
    "bfloat16": "01664423 1e7f658d 731aec3b 0565c80a",
    "mixed dtypes": "c5b9d244 4deae080 096edb32 8289210c",
    "4 bits": "e0837a4f 4d459bc4 7c9fae21 5f270255",
    "nodes": "0c2c1334 818f27a5 d99fe163 31a049cc",
    "local steps": "54cfa25f 9325e771 a891180c 6bc84215",
    "full precision": "45616cd9 acac28b0 e6f1633b e375ac53",
    "FSDP2": "3d417d3c 3f7bc19c e857d974 cb20e402",
}


def numbers(shape: tuple[int, ...], *seed: int) -> Tensor:
    """Returns multiples of 1/16 from -1/2 to 1/2."""
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.integers(-8, 9, size=shape).astype("f4")) / 16


@contextlib.contextmanager
def hashed() -> Iterator[Any]:
    """Yields a hash of all that this rank sends in a `with` statement."""
    sent, start = hashlib.sha256(), Wire._start

    def _start(wire: Wire, what: str, collective: Any, *tensors: Tensor) -> Any:
        sent.update(bits_of(tensors[-1]))
        return start(wire, what, collective, *tensors)

    with mock.patch.object(Wire, "_start", _start):
        yield sent


def run(rank: int, ranks: int, name: str, folder: str) -> list[bytes]:
    """Trains, saves, and exchanges; returns hashes of weights, momenta, the file, and what left."""
    dtypes, _, options = RUNS[name]
    model: nn.Module = nn.Module()
    for k, (param, shape) in enumerate(SHAPES.items()):
        values = numbers(shape, k).to(getattr(torch, dtypes[k % len(dtypes)]))
        model.register_parameter(param.replace(".", "_"), nn.Parameter(values))
    voter = rank // options.get("local_group", 2 if name == "FSDP2" else 1)
    if name == "FSDP2":
        mesh = replicas_of_shards(2, 2)
        fully_shard(model, mesh=mesh["shard"])
        options = {"replicate": mesh["replicate"]}
    if name == "nodes":
        model = DistributedDataParallel(model)
    named = list(zip(SHAPES, model.parameters(), strict=True))
    optimizer = DistributedLion(
        named, lr=0.03, betas=(0.5, 0.75), weight_decay=0.1, seed=7, **options
    )
    if name in ("nodes", "FSDP2"):
        optimizer.attach(model)
    optimizer.guards._check_averages = lambda _: None  # Gradients are equal inside a node.
    with hashed() as sent, contextlib.chdir(folder), mock.patch("secrets.token_hex", "0".__mul__):
        for step in range(6):
            for k, (param, p) in enumerate(named):
                grad = numbers(SHAPES[param], step + 1, voter, k).to(p.dtype)
                if step and (k == 5 or (k, voter) == (4, 1)):
                    grad[: None if k == 5 else 1] = 0  # A row that is old after four steps.
                if isinstance(p, DTensor):
                    grad = distribute_tensor(grad, p.device_mesh, p.placements)
                p.grad = None if (step, k, voter) == (2, 2, 0) else grad
            optimizer.step()
            with optimizer.common_weights():
                pass
        save_momentum(optimizer, ".")
        optimizer.exchange_now()
    weights, momenta = hashlib.sha256(), hashlib.sha256()
    for _, p in named:
        for total, tensor in ((weights, p.detach()), (momenta, optimizer.state[p]["exp_avg"])):
            part = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            total.update(bits_of(part))
    file = Path(folder, f"dlion_momentum_{rank}_of_{ranks}.safetensors")
    return [weights.digest(), momenta.digest(), hashlib.sha256(file.read_bytes()).digest(),
            sent.digest()]  # fmt: skip


def hashes_of(name: str, folder: str) -> str:
    """Returns the hashes of all ranks together: of weights, momenta, files, and what was sent."""
    pool = RankPool(RUNS[name][1])  # A new one, because headers have how many optimizers have met.
    by_rank = pool.run(run, name, folder)
    pool.close()
    together = (hashlib.sha256(b"".join(column)) for column in zip(*by_rank, strict=True))
    return " ".join(found.hexdigest()[:8] for found in together)


@pytest.mark.parametrize("name", RUNS)
def test_a_run_has_the_same_bits_as_ever(name: str, tmp_path: Path) -> None:
    assert hashes_of(name, str(tmp_path)) == HASHES[name]


if __name__ == "__main__":
    module = importlib.import_module("tests.test_bits")
    for name in RUNS:
        with tempfile.TemporaryDirectory() as folder:
            sys.stdout.write(f'    "{name}": "{module.hashes_of(name, folder)}",\n')
