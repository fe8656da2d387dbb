"""What a rank's own work costs: measured on this machine, or computed from a GPU's data sheet."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hf_dlion.cli.gpus import Gpu
from hf_dlion.cli.plan.workload import Workload
from hf_dlion.core.context import StepContext
from hf_dlion.core.flat import flat_view
from hf_dlion.core.idle_rows import survey
from hf_dlion.core.layout import Layout, Scratch
from hf_dlion.core.lion import encode, tensor_maxima, tensor_sums
from hf_dlion.core.quantized_mean import Mean
from hf_dlion.core.rule import Average, Majority
from hf_dlion.core.slot import Slot
from hf_dlion.core.votes import Verdict, Votes
from hf_dlion.gpu import form
from hf_dlion.gpu.launches import KernelVote, moved_bytes
from hf_dlion.gpu.warm_up import warm_up
from hf_dlion.options import LOCAL_BITS, Options
from hf_dlion.ranks.agreement import Period
from hf_dlion.ranks.stats import WireStats
from hf_dlion.steps.displacement import SCALES, displacement, move_by_mean
from hf_dlion.steps.local import LocalSteps
from hf_dlion.steps.momentum_sync import apply_mean, read_momentum

Calls = dict[str, Callable[[], object]]

POWER_RANK = 4
# Bits per vote, and per displacement of local steps.
BITS = (1, LOCAL_BITS)
# Elements of the measured tensor: large enough to leave the caches, small enough for seconds. A GPU
# would wait for Python with less, and has at least so many bytes for each element that is measured.
NUMEL = {"cpu": 1 << 23, "cuda": 1 << 27}
COLUMNS = 1024
BYTES_EACH = 128
# Fewest and most rounds of measurement, and seconds after which no round begins.
LEAST_ROUNDS = 3
MOST_ROUNDS = 8
BUDGET_S = 15.0
# The share of its peak at which a GPU trains: 38 to 43% for Llama 3 405B on H100s (arXiv
# 2407.21783, table 4).
MFU = 0.4
# Default number of tokens of a rank per step, and the most that are timed: on a GPU Trainer's batch
# of 8, with 1,024 tokens each.
TOKENS = {"cpu": 128, "cuda": 8192}
# Two transformers that are timed: layers, width, tokens of a sequence.
_LAYERS = (1, 4)
_WIDTH = 512
_SEQUENCE = 128


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a rank's own work costs."""

    each_s: Mapping[str, float]  # Seconds per element; see `step_work` and `measured`.
    compute_s: float  # Forward and backward of the model, without DDP.
    memory_bytes: float
    device: str  # "cpu" or "cuda".
    name: str  # After "each".
    sources: tuple[str, str]  # Where `compute_s` and `each_s` come from.

    def count_s(self, bits: int, ranks: int) -> float:
        """Returns the seconds per element of counting the votes of any number of ranks."""
        points = [(known, self.each_s[f"count {bits} of {known}"]) for known in (2, 4)]
        fixed, each = _fit(*points)
        return fixed + ranks * each


def here() -> tuple[torch.device, str, float]:
    """Returns the device that a rank has on this machine, its name, and its memory in bytes."""
    if torch.cuda.is_available():
        device = torch.device("cuda", torch.cuda.current_device())
        return device, torch.cuda.get_device_name(device), torch.cuda.mem_get_info(device)[1]
    return torch.device("cpu"), "CPU", psutil.virtual_memory().total


def computed(
    gpu: Gpu, work: Workload, dtype: torch.dtype, tokens: int | None, given_s: float | None
) -> Machine:
    """Returns a GPU that is not here, with all of its bandwidth and `MFU` of its peak.

    Per token, forward takes 2 FLOPs for each parameter, and backward 2 for each parameter and 2 for
    each trained one (Kaplan et al., arXiv 2001.08361, 2.1).
    """
    tokens = tokens or TOKENS["cuda"]
    flops = (4 * work.parameters + 2 * work.trainable) * work.active_share * tokens
    return Machine(
        each_s={name: moved / gpu.bytes_per_s for name, moved in bytes_on_a_gpu(dtype).items()},
        compute_s=given_s or flops / (MFU * gpu.flops),
        memory_bytes=gpu.memory_bytes, device="cuda", name=gpu.name,
        sources=(
            f"{tokens:,} tokens per rank at {MFU:.0%} of the peak of an {gpu.name}",
            f"computed, not measured, at the full {gpu.bytes_per_s / 1e9:,.0f} GB/s of an "
            f"{gpu.name}",
        ),
    )  # fmt: skip


def measured(
    work: Workload, dtype: torch.dtype, tokens: int | None, given_s: float | None
) -> tuple[list[Machine], float]:
    """Measures this machine in rounds, so work of other processes shows as a difference.

    Without `given_s`, forward and backward lie on the line through two small transformers. It
    returns the machine by the shortest times and by the longest, and the share of all cores that
    other processes used meanwhile.
    """
    device, name, memory = here()
    tokens = tokens or TOKENS[device.type]
    numel = min(NUMEL[device.type], int(memory) // BYTES_EACH) // COLUMNS * COLUMNS
    param = torch.randn(numel // COLUMNS, COLUMNS, device=device).mul_(0.02).to(dtype)
    calls: Calls = {
        **step_work(param), "survey": partial(survey, _layout_of([param]).slots),
        "adamw": torch.optim.AdamW([param], lr=1e-4, fused=True).step,
    }  # fmt: skip
    sizes, sequence = {}, min(tokens, _SEQUENCE)
    sequences = -(-min(tokens, TOKENS[device.type]) // sequence)
    if given_s is None:
        data = torch.randn(sequences, sequence, _WIDTH, device=device, dtype=dtype)
        for layers in _LAYERS:
            layer = nn.TransformerEncoderLayer(_WIDTH, 8, dropout=0.0, batch_first=True)
            model = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
            model.to(device, dtype)
            calls[f"{layers} layers"] = partial(
                _forward_and_backward, model, data,
                bf16=device.type == "cuda" and dtype == torch.float32,
            )  # fmt: skip
            sizes[f"{layers} layers"] = sum(param.numel() for param in model.parameters())
    busy_share = _share_of_other_processes()
    times = _rounds(calls, device)
    count = torch.get_num_threads()
    threads = f", {count} thread{'s' * (count > 1)}" if device.type == "cpu" else ""
    found = []
    # The longest time of a call is left out: one hiccup makes no machine busy.
    for place in (0, -2):
        picked = {call: sorted(taken)[place] for call, taken in times.items()}
        compute_s = given_s
        if compute_s is None:
            fixed, each = _fit(*((size, picked[model]) for model, size in sizes.items()))
            # Backward leaves out the gradients of frozen weights, a third of the work.
            elements = (2 * work.parameters + work.trainable) / 3
            # The last sequence is timed as a complete one, and of many only the first ones.
            share = tokens / (sequences * sequence)
            compute_s = share * (fixed + each * elements * work.active_share)
        each_s = {call: picked[call] / numel for call in calls if call not in sizes}
        each_s["exchange"] = each_s["encode displacement"] + each_s["end period"]
        found.append(Machine(
            each_s=each_s,
            compute_s=compute_s,
            memory_bytes=memory, device=device.type, name=name,
            sources=(
                f"{tokens:,} tokens per rank, from two small transformers on this machine",
                f"measured on this machine ({name}{threads})",
            ),
        ))  # fmt: skip
    return found, busy_share()


@functools.cache
def bytes_on_a_gpu(dtype: torch.dtype) -> dict[str, float]:
    """Returns the bytes per element that each part of a step's work reads and writes on a GPU.

    They are counted in the operations of torch. Votes of one bit, local steps, and the end of their
    periods take kernels.
    """
    param = torch.empty(1 << 10, COLUMNS, dtype=dtype, device="meta")
    # AdamW reads four tensors and writes three, and the search for NaN reads the gradient; neither
    # can be counted without data.
    found = {"adamw": 7.0 * dtype.itemsize, "survey": float(dtype.itemsize)}
    for name, call in step_work(param).items():
        call()  # Makes scratch and rows.
        with _CountBytes() as mode:  # type: ignore[no-untyped-call]
            call()
        found[name] = mode.moved / param.numel()
    moved = partial(moved_bytes, dtype=dtype)
    return {
        **found,
        "local step": moved("local step"), "move": moved("move"), "encode 1": moved("encode"),
        **{f"count 1 of {ranks}": (ranks + 1) / 8 for ranks in (2, 4)},
        "exchange": found["encode displacement"] + moved("end of period"),
    }  # fmt: skip


class _CountBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts in `moved` the bytes that operations read and write; views move none."""

    moved = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            # Operations with these names only write their first argument.
            overwrites = func._schema.name.endswith(("copy_", "zero_", "fill_"))
            # Operations that change a list in place return nothing.
            written = args[0] if result is None else result
            leaves = tree_leaves((args[overwrites:], written))
            self.moved += sum(own.nbytes for own in leaves if isinstance(own, Tensor))
        return result


def step_work(param: Tensor) -> Calls:
    """Returns the work of a step on a matrix by name; AdamW's is left out."""
    param.grad = torch.randn_like(param)
    other = torch.empty_like(param)
    calls: Calls = {
        "copy": lambda: other.copy_(param),
        "cast": lambda: other.copy_(param.to(torch.bfloat16).div_(2)),
        "power": _power(param),
    }
    for bits in reversed(BITS):
        calls |= vote_work([param], bits, (2, 4))  # The last "move" is that of one bit.
    return calls | _local_work(param)


def _local_work(param: Tensor) -> Calls:
    """Returns the work of a local step, and of an exchange of two ranks in 4 bits."""
    layout = _layout_of([param])
    local = LocalSteps(2)
    bits = LOCAL_BITS
    context, ranks = _context(bits), 2
    warm_up(layout, Options(vote_every=2), ranks)
    step = partial(local.step, layout, context, Period())
    step()
    (slot,), source = layout.slots, partial(displacement, context=context)
    slot.magnitude = 1.0
    sent: list[Votes] = []

    def encode_displacement() -> None:
        tensor_maxima(layout.slots, layout.messages, source)
        sent[:] = [encode(m, context, source, bits=bits, by_tensor=True) for m in layout.messages]

    encode_displacement()
    rule, means = Average(ranks, bits), list[Mean]()
    for votes in sent:
        verdict = form.count_equal_votes(votes, ranks, rule, context.phase)
        means.append(Mean(votes, verdict, rule, SCALES[bits], context))

    def end_period() -> None:
        for message, mean in zip(layout.messages, means, strict=True):
            move_by_mean(WireStats(), message, mean)

    def average_momenta() -> None:
        of_momenta = partial(read_momentum, context=context)
        tensor_sums(layout.slots, layout.messages, of_momenta, context)
        for message, mean in zip(layout.messages, means, strict=True):
            encode(message, context, of_momenta, bits=bits, by_tensor=True)
            apply_mean(message, mean)

    return {
        "local step": step,
        "encode displacement": encode_displacement,
        "end period": end_period,
        "momenta": average_momenta,
    }


def vote_work(
    params: Sequence[Tensor], bits: int, ranks: Sequence[int], *, kernels: bool = True
) -> Calls:
    """Returns what a step of DistributedLion does between its collectives, by name.

    The votes that it counts are those of this rank, once for every rank. Without `kernels`, a GPU
    takes the form of torch operations.
    """
    rule = Majority("alternate")
    context = _context(bits)
    layout = _layout_of(params)
    for n in ranks:
        warm_up(layout, context.options, n)
    steps: list[form.TorchVote | KernelVote] = []
    chosen = form.vote_of if kernels else form.TorchVote
    sent: list[Votes] = []
    verdicts: list[Verdict] = []

    def encode_all() -> None:
        steps[:] = [chosen(message, context) for message in layout.messages]
        sent[:] = [step.encode() for step in steps]

    def count_all(n: int) -> None:
        verdicts[:] = [form.count_equal_votes(votes, n, rule, context.phase) for votes in sent]

    def move_all() -> None:
        for step, verdict in zip(steps, verdicts, strict=True):
            step.move(verdict, rule)

    # Makes scratch, rows, and what the next call needs.
    for call in (encode_all, partial(count_all, ranks[0])):
        call()
    counts = {f"count {bits} of {n}": partial(count_all, n) for n in ranks}
    return {f"encode {bits}": encode_all, **counts, "move": move_all}


def _layout_of(params: Sequence[Tensor]) -> Layout:
    """Returns parameters with gradients and momenta as a step has them."""
    slots = [Slot.of(param, 0) for param in params]
    for slot, param in zip(slots, params, strict=True):
        assert param.grad is not None
        slot.moves, slot.grad = True, flat_view(param.grad)
        slot.momentum = torch.zeros_like(slot.p)
    return Layout(slots=slots)


def _context(bits: int) -> StepContext:
    return StepContext(
        number=1, voter=0, voters=2, options=Options(bits=bits),
        groups=[{"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}],
        scratch=Scratch(),
    )  # fmt: skip


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


def _forward_and_backward(model: nn.Module, data: Tensor, *, bf16: bool) -> None:
    """Computes as Trainer does; `bf16` is its argument."""
    model.zero_grad()
    with torch.autocast(data.device.type, torch.bfloat16, enabled=bf16):
        out = model(data)
    out.sum().backward()


def _rounds(calls: Calls, device: torch.device) -> dict[str, list[float]]:
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


def _share_of_other_processes() -> Callable[[], float]:
    """Returns a function that returns the share of all cores that other processes used since now.

    The load average won't do: it still counts an earlier run of this command.
    """
    process = psutil.Process()
    psutil.cpu_percent()
    process.cpu_percent()
    cores = psutil.cpu_count() or 1
    return lambda: (psutil.cpu_percent() - process.cpu_percent() / cores) / 100


def _fit(*points: tuple[float, float]) -> tuple[float, float]:
    """Returns intercept and slope of the line through two points; neither is below 0."""
    (x0, y0), (x1, y1) = points
    slope = max((y1 - y0) / (x1 - x0), 0.0)
    return max(y0 - slope * x0, 0.0), slope
