"""What a rank's own work costs: measured on this machine, or computed from a GPU's limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
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
from hf_dlion.vote.update import Scratch, Turn, encode, move, plain_lion

POWER_RANK = 4
BITS = tuple(codec.TOP)
# Large enough to leave the caches, small enough for seconds.
NUMEL, COLUMNS = 1 << 23, 1024
# How often everything is measured: at least, at most, and for how long if that is less.
LEAST_ROUNDS, MOST_ROUNDS, BUDGET_S = 3, 8, 15.0
# The share of its peak at which a GPU trains: 38 to 43% for Llama 3 405B on H100s (arXiv
# 2407.21783, table 4).
MFU = 0.4
TOKENS = {"cpu": 128, "cuda": 2048}
# Two transformers that are timed: layers, width, tokens of a sequence.
_LAYERS, _WIDTH, _SEQUENCE = (1, 4), 512, 128


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU's published limits."""

    name: str  # After "an".
    flops: float  # Dense bfloat16 operations per second.
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
    """What a rank's own work costs; times are seconds per element."""

    adamw_s: float  # A fused AdamW step.
    copy_s: float  # Copying a gradient into DDP's bucket, or out of it.
    cast_s: float  # A float32 gradient to bfloat16 and back.
    power_s: float  # PowerSGD's products, error, and decompression.
    encode_s: dict[int, float]  # Votes and momentum, by bits.
    count_s: dict[int, tuple[float, float]]  # By bits: for any number of votes, and for each.
    move_s: float  # Moving parameters by a verdict.
    lion_s: float  # A step of plain Lion.
    memory_bytes: float
    device: str  # "cpu" or "cuda".
    name: str  # After "an" or "a".
    source: str  # Where the times come from.


def here() -> tuple[torch.device, str, float]:
    """Returns the device that a rank has on this machine, its name, and its memory in bytes."""
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        return device, torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
    return torch.device("cpu"), "CPU", psutil.virtual_memory().total


def measured(
    work: Workload, dtype: torch.dtype, tokens: int, given_s: float | None = None
) -> tuple[list[tuple[Machine, float]], float]:
    """Measures this machine in rounds, so work of other processes shows as a difference.

    Without `given_s`, forward and backward lie on the line through two small transformers.

    Returns:
        The machine and the seconds of forward and backward, by the shortest times and by the
        longest; and the share of all cores that other processes used meanwhile.
    """
    device, name, memory = here()
    param = torch.randn(NUMEL // COLUMNS, COLUMNS, device=device).mul_(0.02).to(dtype)
    calls = {**_work(param), "adamw": torch.optim.AdamW([param], lr=1e-4, fused=True).step}
    sizes = {}
    if given_s is None:
        shape = (-(-tokens // _SEQUENCE), min(tokens, _SEQUENCE), _WIDTH)
        data = torch.randn(shape, device=device, dtype=dtype)
        for layers in _LAYERS:
            layer = nn.TransformerEncoderLayer(_WIDTH, 8, dropout=0.0, batch_first=True)
            model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            model.to(device, dtype)
            calls[f"{layers} layers"] = partial(_forward_and_backward, model, data)
            sizes[f"{layers} layers"] = sum(param.numel() for param in model.parameters())
    others_share = _cores_of_others()
    times = _rounds(calls, device)
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    source = f"measured on this machine ({name}{threads})"
    found = []
    # The longest time of a call is left out: one hiccup makes no machine busy.
    for place in (0, -2):
        picked = {name: sorted(own)[place] for name, own in times.items()}
        machine = _machine(
            picked, NUMEL, memory_bytes=memory, device=device.type, name=name, source=source
        )
        compute_s = given_s
        if compute_s is None:
            (small, x0), (large, x1) = sizes.items()
            fixed, each = _line(x0, picked[small], x1, picked[large])
            # Backward leaves out the gradients of frozen weights, a third of the work.
            compute_s = fixed + each * (2 * work.parameters + work.trainable) / 3
        found.append((machine, compute_s))
    return found, others_share()


def computed(gpu: Gpu, dtype: torch.dtype) -> Machine:
    """Returns the constants of a GPU: bytes that its operations read and write, at full bandwidth.

    The bytes are counted in torch operations on tensors without data.
    """
    with torch.device("meta"):
        param = torch.empty(1 << 10, COLUMNS, dtype=dtype)
    # Reads four tensors and writes three; torch has no fused AdamW without data.
    moved = {"adamw": 7.0 * param.numel() * dtype.itemsize}
    for name, call in _work(param).items():
        call()  # Makes scratch and rows.
        with _CountBytes() as counted:
            call()
        moved[name] = counted.moved
    return _machine(
        {name: size / gpu.bytes_per_s for name, size in moved.items()},
        param.numel(), memory_bytes=gpu.memory_bytes, device="cuda", name=gpu.name,
        source=f"computed, not measured, at the full {gpu.bytes_per_s / 1e9:,.0f} GB/s of an "
        f"{gpu.name}",
    )  # fmt: skip


def computed_compute_s(gpu: Gpu, work: Workload, tokens: int) -> float:
    """Returns the seconds of forward and backward.

    Per token, forward takes 2 FLOPs for each parameter, and backward 2 for each parameter and 2 for
    each trained one (Kaplan et al., arXiv 2001.08361, 2.1).
    """
    return (4 * work.parameters + 2 * work.trainable) * tokens / (MFU * gpu.flops)


def _work(param: Tensor) -> dict[str, Callable[[], object]]:
    """Returns one step's work on a tensor, by name: all but the wire and AdamW."""
    param.grad = torch.randn_like(param)
    other = torch.empty_like(param)
    calls: dict[str, Callable[[], object]] = {
        "copy": lambda: other.copy_(param),
        "cast": lambda: other.copy_(param.to(torch.bfloat16).div_(2)),
        "power": _power(param),
    }
    for bits in BITS:
        votes = _Votes(param, bits)
        calls[f"encode {bits}"] = votes.encode
        calls[f"count {bits} from 2"] = partial(votes.count, 2)
        calls[f"count {bits} from 4"] = partial(votes.count, 4)
        if bits == 1:
            calls["move"], calls["lion"] = votes.move, votes.lion
    return calls


def _machine(seconds: Mapping[str, float], numel: int, **rest: Any) -> Machine:
    """Returns the constants from the seconds of `_work` on a tensor of `numel` elements."""
    each = {name: own / numel for name, own in seconds.items()}
    return Machine(
        adamw_s=each["adamw"],
        copy_s=each["copy"],
        cast_s=each["cast"],
        power_s=each["power"],
        move_s=each["move"],
        lion_s=each["lion"],
        encode_s={bits: each[f"encode {bits}"] for bits in BITS},
        count_s={
            bits: _line(2, each[f"count {bits} from 2"], 4, each[f"count {bits} from 4"])
            for bits in BITS
        },
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

    def lion(self) -> None:
        for message in self._messages:
            plain_lion(message, self._params, self._grads, self._momenta, self._turn)


def _power(param: Tensor) -> Callable[[], None]:
    """Returns what powerSGD_hook does with a matrix between its collectives."""
    error, other = torch.zeros_like(param), param.clone()
    right = torch.randn(COLUMNS, POWER_RANK, device=param.device).to(param.dtype)

    def step() -> None:
        nonlocal error
        other.add_(error)
        saved = other.clone()
        left = torch.linalg.qr(torch.matmul(other, right).float()).Q.to(param.dtype)
        torch.matmul(left, torch.matmul(other.t(), left).t(), out=other)
        error = saved - other

    return step


class _CountBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts in `moved` the bytes that operations read and write; views move none."""

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


def _rounds(
    calls: Mapping[str, Callable[[], object]], device: torch.device
) -> dict[str, list[float]]:
    """Returns the seconds of each call in each round, after a round that warms up."""
    for call in calls.values():
        call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    began = time.perf_counter()
    for done in range(MOST_ROUNDS):
        if done >= LEAST_ROUNDS and time.perf_counter() - began > BUDGET_S:
            break
        for name, call in calls.items():
            times[name].append(seconds_of(call, device))
    return times


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Returns the seconds that `call` takes on an idle device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def _cores_of_others() -> Callable[[], float]:
    """Returns what returns the share of all cores that other processes have used since now.

    Not the load average, which still counts an earlier run of this command.
    """
    own = psutil.Process()
    psutil.cpu_percent()
    own.cpu_percent()
    cores = psutil.cpu_count() or 1
    return lambda: (psutil.cpu_percent() - own.cpu_percent() / cores) / 100


def _line(x0: float, y0: float, x1: float, y1: float) -> tuple[float, float]:
    """Returns intercept and slope of the line through two points; neither is below 0."""
    slope = max((y1 - y0) / (x1 - x0), 0.0)
    return max(y0 - slope * x0, 0.0), slope
