"""What a rank's own work costs on this machine: its step, and forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_dlion.codec import codec_for
from hf_dlion.tools.clock import median_s
from hf_dlion.tools.models import UnknownModelError, language_model, llama, vocabulary
from hf_dlion.tools.names import POWER_RANK
from hf_dlion.tools.plan.model import parse_count
from hf_dlion.tools.report import read_bench, track
from hf_dlion.tools.work import Work

# Large enough to leave the caches, small enough for all of it in seconds; the second is about what
# a layer's tensor holds, for work that is done tensor by tensor.
NUMEL = 1 << 25
SMALL_NUMEL = 1 << 20
COLUMNS = 1024
# Parameters of the Llamas that stand in for a model of which only the size is known.
STAND_INS = (1, 29_500_000)


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
    """Returns the constants of this machine for votes of `bits` bits, in less than ten seconds.

    Args:
        dtype: Of parameters and gradients.
        device: Where they lie.
        bits: Of a vote.
    """
    param = torch.randn(NUMEL // COLUMNS, COLUMNS, device=device).mul_(0.02).to(dtype)
    param.grad = torch.randn_like(param)
    other = torch.empty_like(param)

    def tasks() -> Iterator[tuple[str, Callable[[], object]]]:
        # What the other methods do besides their collectives ...
        yield "adamw_ns", torch.optim.AdamW([param], lr=1e-4, fused=True).step
        yield "copy_ns", lambda: other.copy_(param)
        # The bf16 hook makes a tensor of its own on the way there.
        yield "cast_ns", lambda: other.copy_(param.to(torch.bfloat16).div_(2))
        yield "power_ns", _power(param, other)
        # ... and what DistributedLion does.
        codec, works = codec_for(device), {ranks: Work([param], ranks, bits) for ranks in (2, 4)}
        yield "encode_ns", partial(works[2].encode, codec)
        yield "apply_ns", partial(works[2].apply, codec)
        yield "two", partial(works[2].count, codec)
        yield "four", partial(works[4].count, codec)

    times = {}
    for name, call in track(tasks(), "measuring this machine", 8):
        times[name] = 1e9 * median_s(call, device) / NUMEL
        del call  # and what it holds: AdamW's momenta are as large again
    # Counting is a line through 2 and 4 votes.
    fixed, each = _line(2, times.pop("two"), 4, times.pop("four"))
    times |= {"count_ns": fixed, "count_vote_ns": each, **_public(device)}
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    threads = f", {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return Machine(**times, source=f"measured on this machine ({where}{threads})")


def of_codec_bench(path: Path, dtype: str = "float32", bits: int = 1) -> dict[str, float]:
    """Returns those of a `Machine`'s constants that `benchmarks/codec.py` measured on a CPU.

    Args:
        path: The JSON.
        dtype: Of the gradients, a key of `DTYPES` there.
        bits: Of a vote.

    Raises:
        ValueError: If the file is something else, or tells nothing of such votes.
    """
    result = read_bench(path, "codec")
    rows = {row["name"]: row for row in result["rows"] if row["dtype"] == dtype}
    told = "" if bits == 1 else f", {bits} bits"
    kinds = [kind for kind in ("native", "eager") if f"{kind}, 2 ranks{told}" in rows]
    if not kinds:
        raise ValueError(
            f"{path} lacks votes of a CPU with bits={bits} on {dtype}: run "
            f"benchmarks/codec.py --bits {bits} --device cpu"
        )
    kind = kinds[0]
    two, four = rows[f"{kind}, 2 ranks{told}"], rows[f"{kind}, 4 ranks{told}"]
    fixed, each = _line(2, two["count_ms"], 4, four["count_ms"])
    ns = 1e6 / result["config"]["parameters"]
    return {
        "adamw_ns": rows["fused AdamW step"]["median_ms"] * ns,
        "copy_ns": rows["copy"]["median_ms"] * ns,
        "encode_ns": two["encode_ms"] * ns,
        "apply_ns": two["apply_ms"] * ns,
        "count_ns": fixed * ns,
        "count_vote_ns": each * ns,
    }


def stand_in_s(parameters: int, batch: int, sequence: int, device: torch.device) -> float:
    """Returns the seconds of forward and backward, on the line through two of `llama`'s sizes.

    The small one tells what a step takes at least, the large one what each parameter adds.

    Args:
        parameters: Of the model that is meant.
        batch: Sequences per rank and step.
        sequence: Tokens in each.
        device: Where the Llamas run.
    """
    points: list[float] = []
    for count in track(STAND_INS, "forward and backward"):
        model = llama(count).to(device)
        points.append(sum(param.numel() for param in model.parameters()))
        points.append(_compute_s(model, vocabulary(model), batch, sequence))
    fixed, each = _line(*points)
    return fixed + each * parameters


def model_s(
    name: str, dtype: torch.dtype, batch: int, sequence: int, device: torch.device
) -> float:
    """Returns the seconds of forward and backward of the model itself, with random weights.

    Args:
        name: Folder or hub name of a language model.
        dtype: Of its parameters.
        batch: Sequences per rank and step.
        sequence: Tokens in each.
        device: Where it runs.

    Raises:
        UnknownModelError: If it is only a count, or does not predict tokens.
    """
    if parse_count(name) is not None:
        raise UnknownModelError(
            f"--step-ms measure needs a model, and {name} is only a count: give a folder with a "
            f"config.json, or the time in ms"
        )
    try:
        model = language_model(name).to(device, dtype)
    except UnknownModelError as error:
        raise UnknownModelError(f"{error}: give the time in ms") from error
    return _compute_s(model, vocabulary(model), batch, sequence, f"forward and backward of {name}")


def _compute_s(model: nn.Module, tokens: int, batch: int, sequence: int, text: str = "") -> float:
    device = next(model.parameters()).device
    data = torch.randint(tokens, (batch, sequence), device=device)

    def step() -> None:
        model.zero_grad()
        model(input_ids=data, labels=data).loss.backward()

    return median_s(step, device, text=text)


def _power(param: Tensor, other: Tensor) -> Callable[[], None]:
    """Returns what powerSGD_hook does with a matrix between its collectives.

    It makes new tensors where the hook makes new ones.
    """
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


def _public(device: torch.device) -> dict[str, float]:
    """Times kyleliang919/distributed-lion-pytorch's kind of work: 8 bits in an int64, torch.mode.

    The shift by an int64 tensor makes int64 of every byte, so 8 votes travel in 8 bytes.
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

    two, four = (1e9 * median_s(partial(step, r), device) / SMALL_NUMEL for r in (2, 4))
    fixed, each = _line(2, two, 4, four)
    return {"public_ns": fixed, "public_vote_ns": each}


def _line(x0: float, y0: float, x1: float, y1: float) -> tuple[float, float]:
    """Returns intercept and slope through two points; neither below 0, for times."""
    slope = max((y1 - y0) / (x1 - x0), 0.0)
    return max(y0 - slope * x0, 0.0), slope
