"""What a rank's own work costs: measured on this machine, or computed from a GPU's limits."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hf_dlion.cli.plan.workload import Workload
from hf_dlion.exchange.rule import Majority
from hf_dlion.vote import codec
from hf_dlion.vote.message import Shape, messages
from hf_dlion.vote.update import Scratch, Turn, encode, move

POWER_RANK = 4
BITS = tuple(codec.TOP)
# Large enough to leave the caches, small enough for seconds.
NUMEL, COLUMNS = 1 << 23, 1024
# The share of its peak at which a GPU trains: 38 to 43% for Llama 3 405B on H100s (arXiv
# 2407.21783, table 4).
MFU = 0.4
TOKENS = {"cpu": 128, "cuda": 2048}
# Two transformers that are timed: layers, width, tokens of a sequence.
_LAYERS, _WIDTH, _SEQUENCE = (1, 4), 512, 128


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Published limits.

    Attributes:
        name: Name for people, after "an".
        flops: Dense bfloat16 operations per second.
        bytes_per_s: Memory bandwidth.
        memory_bytes: Size of the memory.
    """

    name: str
    flops: float
    bytes_per_s: float
    memory_bytes: float


# From the data sheets of NVIDIA; an H100's 1,979 TFLOPS are with sparsity.
GPUS = {
    "h200": Gpu(name="H200", flops=989.4e12, bytes_per_s=4800e9, memory_bytes=141e9),
    "h100": Gpu(name="H100", flops=989.4e12, bytes_per_s=3350e9, memory_bytes=80e9),
    "a100": Gpu(name="A100", flops=312e12, bytes_per_s=2039e9, memory_bytes=80e9),
    "rtx4090": Gpu(name="RTX 4090", flops=165.2e12, bytes_per_s=1008e9, memory_bytes=24e9),
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Seconds per element of a rank's own work.

    Attributes:
        adamw_s: A fused AdamW step.
        copy_s: Copying a gradient, as DDP does into a bucket and out of it.
        cast_s: A float32 gradient to bfloat16 and back.
        power_s: PowerSGD's products, error, and decompression.
        encode_s: Votes and momentum, by bits.
        count_s: Counting, by bits: whatever the number of votes, and for each vote.
        move_s: Moving parameters by a verdict.
        memory_bytes: Memory of a rank.
        device: "cpu" or "cuda".
        name: The device's name, after "an" or "a".
        source: Where the constants come from.
    """

    adamw_s: float
    copy_s: float
    cast_s: float
    power_s: float
    encode_s: dict[int, float]
    count_s: dict[int, tuple[float, float]]
    move_s: float
    memory_bytes: float
    device: str
    name: str
    source: str


def here() -> tuple[torch.device, str, float]:
    """Returns the device that a rank has on this machine, its name, and its memory in bytes."""
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        return device, torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
    return torch.device("cpu"), "CPU", psutil.virtual_memory().total


def measured(dtype: torch.dtype) -> Machine:
    """Returns the constants of this machine."""
    device, name, memory = here()
    param = torch.randn(NUMEL // COLUMNS, COLUMNS, device=device).mul_(0.02).to(dtype)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return _machine(
        param, lambda call: _median_s(call, device) / NUMEL, memory_bytes=memory,
        device=device.type, name=name, source=f"measured on this machine ({name}{threads})",
    )  # fmt: skip


def computed(gpu: Gpu, dtype: torch.dtype) -> Machine:
    """Returns the constants of a GPU: bytes that its operations read and write, at full bandwidth.

    The bytes are counted in torch operations on tensors without data.
    """
    with torch.device("meta"):
        param = torch.empty(1 << 10, COLUMNS, dtype=dtype)

    def seconds(call: Callable[[], object]) -> float:
        call()  # Makes scratch and rows.
        with _CountBytes() as counted:
            call()
        return float(counted.moved / param.numel() / gpu.bytes_per_s)

    return _machine(
        param, seconds, memory_bytes=gpu.memory_bytes, device="cuda", name=gpu.name,
        source=f"computed, not measured, at the full {gpu.bytes_per_s / 1e9:,.0f} GB/s of an "
        f"{gpu.name}",
    )  # fmt: skip


def measured_compute_s(work: Workload, tokens: int, dtype: torch.dtype) -> float:
    """Returns the seconds of forward and backward, on the line through two small transformers."""
    device, _, _ = here()
    data = torch.randn(
        -(-tokens // _SEQUENCE), min(tokens, _SEQUENCE), _WIDTH, device=device, dtype=dtype
    )
    points: list[float] = []
    for layers in _LAYERS:
        model = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(_WIDTH, 8, dropout=0.0, batch_first=True)
                for _ in range(layers)
            )
        ).to(device, dtype)
        points.append(sum(param.numel() for param in model.parameters()))
        points.append(_median_s(partial(_forward_and_backward, model, data), device))
    fixed, each = _line(*points)
    # Backward leaves out the gradients of frozen weights, a third of the work.
    return fixed + each * (2 * work.parameters + work.trainable) / 3


def computed_compute_s(gpu: Gpu, work: Workload, tokens: int) -> float:
    """Returns the seconds of forward and backward.

    Per token, forward takes 2 FLOPs for each parameter, and backward 2 for each parameter and 2 for
    each trained one (Kaplan et al., arXiv 2001.08361, 2.1).
    """
    return (4 * work.parameters + 2 * work.trainable) * tokens / (MFU * gpu.flops)


def _machine(
    param: Tensor, seconds: Callable[[Callable[[], object]], float], **rest: Any
) -> Machine:
    """Times one step's work on a tensor, without the wire."""
    param.grad = torch.randn_like(param)
    other = torch.empty_like(param)
    # No fused AdamW without data: it reads four tensors and writes three.
    if param.is_meta:
        adamw = seconds(lambda: [other.copy_(param) for _ in range(3)] + [param.sum()])
    else:
        adamw = seconds(torch.optim.AdamW([param], lr=1e-4, fused=True).step)
    votes = {bits: _Votes(param, bits) for bits in BITS}
    return Machine(
        adamw_s=adamw,
        copy_s=seconds(lambda: other.copy_(param)),
        cast_s=seconds(lambda: other.copy_(param.to(torch.bfloat16).div_(2))),
        power_s=seconds(_power(param, other)),
        encode_s={bits: seconds(own.encode) for bits, own in votes.items()},
        count_s={
            bits: _line(2, seconds(partial(own.count, 2)), 4, seconds(partial(own.count, 4)))
            for bits, own in votes.items()
        },
        move_s=seconds(votes[1].move),
        **rest,
    )


class _Votes:
    """Encoding, counting, and moving one tensor, again and again."""

    def __init__(self, param: Tensor, bits: int) -> None:
        assert param.grad is not None
        flat = param.detach().view(-1)
        self._bits, self._params = bits, [flat]
        self._grads, self._momenta = [param.grad.view(-1)], [torch.zeros_like(flat)]
        self._messages = messages([Shape.of(param, 0)])
        group = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}
        self._turn = Turn(
            step=1, voter=0, seed=0, bits=bits, level_scale="word", exchange="gather",
            groups=[group], scratch=Scratch(),
        )  # fmt: skip
        self._rule = Majority("alternate")
        self.encode()

    def encode(self) -> None:
        self._votes = [
            list(encode(message, self._grads, self._momenta, self._turn, ()).planes)
            for message in self._messages
        ]

    def count(self, ranks: int) -> None:
        total = ranks * codec.TOP[self._bits]
        for own in self._votes:
            self._rule.decide(codec.tally([own] * ranks, self._bits), total, 1)

    def move(self) -> None:
        for message, own in zip(self._messages, self._votes, strict=True):
            move(message, self._params, own[:1], None, self._rule, self._turn)


def _power(param: Tensor, other: Tensor) -> Callable[[], None]:
    """Returns what powerSGD_hook does with a matrix between its collectives."""
    error = torch.zeros_like(param)
    right = torch.randn(COLUMNS, POWER_RANK, device=param.device).to(param.dtype)

    def step() -> None:
        nonlocal error
        other.add_(error)
        saved = other.clone()
        left = torch.linalg.qr(torch.matmul(other, right).float()).Q.to(param.dtype)
        torch.matmul(left, torch.matmul(other.t(), left).t(), out=other)
        error = saved - other

    other.copy_(param)
    return step


class _CountBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes that operations read and write; views move none.

    Attributes:
        moved: The bytes.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            # Of these, the first argument is written only.
            overwrites = func._schema.name.endswith(("copy_", "zero_", "fill_"))
            # What changes a list in place returns nothing.
            written = args[0] if result is None else result
            for tensor in (*_tensors(args[overwrites:]), *_tensors(written)):
                self.moved += tensor.numel() * tensor.element_size()
        return result


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for own in value:
            yield from _tensors(own)


def _forward_and_backward(model: nn.Module, data: Tensor) -> None:
    model.zero_grad()
    model(data).sum().backward()


def _median_s(call: Callable[[], object], device: torch.device) -> float:
    """Returns the median seconds of three calls, after one that warms up."""
    times = []
    for _ in range(4):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def _line(x0: float, y0: float, x1: float, y1: float) -> tuple[float, float]:
    """Returns intercept and slope of the line through two points; neither is below 0."""
    slope = max((y1 - y0) / (x1 - x0), 0.0)
    return max(y0 - slope * x0, 0.0), slope
