"""What a rank's own work costs on this machine, in nanoseconds per element."""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hf_dlion.codec import codec_for
from hf_dlion.codec.layout import MessageLayout
from hf_dlion.codec.rule import StepRule, TensorRule, Verdict
from hf_dlion.tools.bench.traffic import POWER_RANK

# Large enough to leave the caches, small enough for all of it in seconds; the second is about what
# a layer's tensor holds, for work that is done tensor by tensor.
NUMEL = 1 << 25
SMALL_NUMEL = 1 << 20
COLUMNS = 1024
REPEATS = 3


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Nanoseconds per element of a rank's own work.

    Attributes:
        adamw_ns: A fused AdamW step.
        encode_ns: Direction, votes and momentum.
        count_ns: Counting votes, whatever their number.
        count_vote_ns: Counting votes, for each vote.
        apply_ns: Verdict and decay.
        copy_ns: Copying a gradient, as DDP does into a bucket and out of it.
        cast_ns: A float32 gradient to bfloat16 and back.
        power_ns: PowerSGD: the factors' products, error and decompression.
        public_ns: The public distributed-lion's tensor operations, whatever the number of votes.
        public_vote_ns: The same, for each vote.
        source: Where the constants come from.
    """

    adamw_ns: float
    encode_ns: float
    count_ns: float
    count_vote_ns: float
    apply_ns: float
    copy_ns: float
    cast_ns: float
    power_ns: float
    public_ns: float
    public_vote_ns: float
    source: str = "given"

    def count_s(self, numel: float, votes: int) -> float:
        """Returns the seconds of counting `votes` votes on `numel` elements."""
        return 1e-9 * numel * (self.count_ns + votes * self.count_vote_ns)


def measure(dtype: torch.dtype, device: torch.device, bits: int = 1) -> Machine:
    """Returns the constants of this machine; takes less than ten seconds.

    Args:
        dtype: Of parameters and gradients.
        device: Where they lie.
        bits: Of a vote.
    """
    param = torch.randn(NUMEL // COLUMNS, COLUMNS, device=device).mul_(0.02).to(dtype)
    param.grad = torch.randn_like(param)
    other = torch.empty_like(param)
    adamw = torch.optim.AdamW([param], lr=1e-4, fused=True)
    clock = _Clock(device)
    times = {
        "adamw_ns": clock.ns(NUMEL, adamw.step),
        "copy_ns": clock.ns(NUMEL, lambda: other.copy_(param)),
    }
    del adamw
    times |= _cast_and_power(param, other, clock)
    times |= _codec(param, other.zero_(), clock, bits)
    times |= _public(device, clock)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return Machine(**times, source=f"measured on this machine ({where}{threads})")


def of_codec_bench(path: Path, bits: int = 1) -> dict[str, float]:
    """Returns those of a `Machine`'s constants that `bench codec` measured.

    Args:
        path: Its JSON.
        bits: Of a vote.

    Raises:
        ValueError: If the file is something else, or tells nothing of such votes.
    """
    result = json.loads(path.read_text())
    if result.get("bench") != "codec":
        raise ValueError(f"{path} is not the JSON of `hf-dlion bench codec`")
    numel = result["config"]["parameters"]
    rows = {row["name"]: row for row in result["rows"] if row["dtype"] == "float32"}
    told = "" if bits == 1 else f", {bits} bits"
    kinds = [kind for kind in ("native", "eager") if f"{kind}, 2 ranks{told}" in rows]
    if not kinds:
        raise ValueError(f"{path} lacks votes with bits={bits}: run bench codec --bits {bits}")
    kind = kinds[0]
    two, four = rows[f"{kind}, 2 ranks{told}"], rows[f"{kind}, 4 ranks{told}"]
    fixed, each = _line(2, two["count_ms"], 4, four["count_ms"])
    ns = 1e6 / numel
    return {
        "adamw_ns": rows["fused AdamW step"]["median_ms"] * ns,
        "copy_ns": rows["copy"]["median_ms"] * ns,
        "encode_ns": two["encode_ms"] * ns,
        "apply_ns": two["apply_ms"] * ns,
        "count_ns": fixed * ns,
        "count_vote_ns": each * ns,
    }


class _Clock:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def ns(self, numel: int, call: Callable[[], Any]) -> float:
        """Returns the median nanoseconds per element of `call`, after one call for warming up."""
        call()
        times = []
        for _ in range(REPEATS):
            begin = self._now()
            call()
            times.append(self._now() - begin)
        return 1e9 * statistics.median(times) / numel

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _cast_and_power(param: Tensor, other: Tensor, clock: _Clock) -> dict[str, float]:
    error = torch.zeros_like(param)
    right = torch.randn(COLUMNS, POWER_RANK, device=param.device).to(param.dtype)

    def cast() -> None:
        # The bf16 hook makes a tensor of its own on the way there.
        other.copy_(param.to(torch.bfloat16).div_(2))

    def power() -> None:
        # What powerSGD_hook does with a matrix, between its collectives; new tensors where it
        # makes new ones.
        nonlocal error
        other.add_(error)
        saved = other.clone()
        left = torch.linalg.qr(torch.matmul(other, right).float()).Q.to(param.dtype)
        torch.matmul(left, torch.matmul(other.t(), left).t(), out=other)
        error = saved - other

    other.copy_(param)
    return {"cast_ns": clock.ns(NUMEL, cast), "power_ns": clock.ns(NUMEL, power)}


def _codec(param: Tensor, momentum: Tensor, clock: _Clock, bits: int) -> dict[str, float]:
    device = param.device
    layout = MessageLayout.of([(0, param.shape)])
    shard = layout.shard(0, layout.words)
    row_numels = shard.row_numels(device)
    codec = codec_for(device)
    votes = torch.randint(-(2**62), 2**62, (4, bits * layout.words), device=device)
    active = torch.ones((4, layout.rows), dtype=torch.bool, device=device)
    assert param.grad is not None, "given one by the caller"
    grad = param.grad
    rule = _rule(2, bits)
    tensor_rule = TensorRule(step_rule=rule, index=0, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.1)
    encode = clock.ns(NUMEL, lambda: codec.encode(grad, momentum, votes[0], active[0], tensor_rule))

    def count(ranks: int) -> float:
        rows = votes[:ranks], active[:ranks]
        return clock.ns(NUMEL, lambda: codec.count(*rows, shard, row_numels, _rule(ranks, bits)))

    fixed, each = _line(2, count(2), 4, count(4))
    found = codec.count(votes[:2], active[:2], shard, row_numels, rule)
    verdict = Verdict(found.planes, found.counts)
    return {
        "encode_ns": encode,
        "count_ns": fixed,
        "count_vote_ns": each,
        "apply_ns": clock.ns(NUMEL, lambda: codec.apply(param, verdict, tensor_rule)),
    }


def _rule(ranks: int, bits: int) -> StepRule:
    return StepRule(
        step=1, rank=0, world_size=ranks, aggregation="majority", ties="alternate",
        stochastic_rounding=True, seed=0, bits=bits,
    )  # fmt: skip


def _public(device: torch.device, clock: _Clock) -> dict[str, float]:
    """Times kyleliang919/distributed-lion-pytorch's kind of work: 8 bits in an int64, torch.mode.

    The shift by an int64 tensor makes int64 of every byte, so that 8 votes travel in 8 bytes.
    """
    param, grad, momentum = (torch.randn(SMALL_NUMEL, device=device) for _ in range(3))
    shifts = torch.arange(8, device=device)

    def step(ranks: int) -> None:
        param.mul_(0.99)
        signs = momentum.clone().mul_(0.9).add(grad, alpha=0.1).sign_() > 0
        packed = (signs.view(-1, 8).byte() << shifts).sum(dim=-1)
        votes = [((packed.unsqueeze(-1) >> shifts) % 2 == 1).flatten() for _ in range(ranks)]
        verdict = torch.mode(torch.stack(votes), dim=0).values
        param.add_(verdict.bool() * 2 - 1, alpha=-1e-4)
        momentum.mul_(0.99).add_(grad, alpha=0.01)

    two, four = (clock.ns(SMALL_NUMEL, functools.partial(step, ranks)) for ranks in (2, 4))
    fixed, each = _line(2, two, 4, four)
    return {"public_ns": fixed, "public_vote_ns": each}


def _line(x0: float, y0: float, x1: float, y1: float) -> tuple[float, float]:
    """Returns intercept and slope through two points; neither below 0, for times."""
    slope = max((y1 - y0) / (x1 - x0), 0.0)
    return max(y0 - slope * x0, 0.0), slope
