"""The form of the arithmetic that does a message's work: Triton kernels, or torch operations.

On a GPU, kernels do the work of a step that they cover. Everything else, and every other device,
takes torch operations, which have the same bits. So ranks with different forms can train together.
On a CPU, `core.codec` packs bits by NumPy, which is faster there.
This module chooses for each message what both forms can do. Votes of several bits are encoded by
torch operations in any case, and means are averaged by them: displacements, momenta, and gradients
of `full_precision`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from hf_dlion.core import lion, votes
from hf_dlion.core.context import StepContext
from hf_dlion.core.layout import Message
from hf_dlion.core.quantized_mean import Mean
from hf_dlion.core.rule import Rule
from hf_dlion.core.slot import Field
from hf_dlion.core.votes import Rows, Verdict, Votes
from hf_dlion.gpu import launches
from hf_dlion.gpu.launches import MOST_VOTERS, KernelVote
from hf_dlion.user_warning import defer_warning

# Types of devices on which the kernels run, and dtypes of their tensors.
DEVICES = ("cuda",)
DTYPES = (torch.float32, torch.bfloat16)
# Set it to 0 to take the form of torch operations.
SWITCH = "HF_DLION_TRITON"
# Why kernels failed, by device.
_failed: dict[torch.device, str] = {}


def refusal(device: torch.device) -> str:
    """Returns why the kernels don't run on a device; empty if they do, or before `try_out`."""
    if device.type not in DEVICES:
        return f"kernels run on {' and '.join(DEVICES)}, not on {device.type}"
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH}=0"
    interpreted = os.environ.get("TRITON_INTERPRET", "").lower() in ("1", "true", "on", "yes", "y")
    if device.type == "cuda" and interpreted:
        return "TRITON_INTERPRET is set, whose interpreter would read a GPU's addresses on the CPU"
    return _failed.get(device, "")


def try_out(trial: Callable[[], None], device: torch.device) -> None:
    """Calls a trial of kernels; if it fails, none runs on the device any more, and a step warns.

    Raises:
        RuntimeError: If memory runs out, of which torch operations need more than the kernels.
    """
    try:
        version = launches.triton_kernels().triton.__version__
        if TorchVersion(version) < "3.4":  # Which can't compile them.
            raise RuntimeError(f"kernels need triton 3.4, which torch 2.8 installs (got {version})")
        trial()
    except getattr(torch, "AcceleratorError", ()):  # The device itself failed, maybe elsewhere.
        raise
    except Exception as error:  # Missing triton or compiler, a cache that can't be written, ...
        text = str(error)  # Of torch, triton, or the system; a later step may have enough.
        if isinstance(error, MemoryError) or "out of memory" in text or "allocate mem" in text:
            raise
        why = _failed[device] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        defer_warning(
            f"hf_dlion's kernels can't run on {device} ({why}), so the optimizer's work takes "
            f"several times as long, with the same result. hf-dlion doctor checks this. Set "
            f"{SWITCH}=0 to hide the warning"
        )


def covers(message: Message, context: StepContext, voters: int = 1) -> bool:
    """Returns whether the kernels do the work of a message that so many voters exchange."""
    if voters > MOST_VOTERS or refusal(message.device):
        return False
    # Apart from the tensors, because a rank that abstains, or a trial, has no momenta.
    if context.options.momentum_dtype not in (None, *DTYPES):
        return False
    for slot in (span.slot for span in message.spans):
        tensors = slot.p, slot.grad, slot.momentum
        if not all([t is None or (t.dtype in DTYPES and _has_address(t)) for t in tensors]):
            return False
    return True


def _has_address(tensor: Tensor) -> bool:
    """Returns whether kernels can read a tensor, which isn't one of another library's classes."""
    return tensor.data_ptr() != 0 or not tensor.numel()


# What both forms do.


class TorchVote:
    """A step by votes on a message: `encode`, and then `move` by the verdict."""

    def __init__(self, message: Message, context: StepContext) -> None:
        """Does nothing yet."""
        self._message, self._context = message, context

    def encode(self) -> Votes:
        """Returns the votes, and updates the momenta."""
        source = partial(lion.direction, context=self._context)
        return lion.encode(self._message, self._context, source, bits=self._context.bits)

    def move(self, verdict: Verdict, rule: Rule) -> None:
        """Moves the parameters."""
        lion.apply_verdict(self._message, verdict, rule, self._context)


def vote_of(message: Message, context: StepContext) -> TorchVote | KernelVote:
    """Returns a step by votes on a message, in its form."""
    chosen = KernelVote if covers(message, context, context.voters) else TorchVote
    return chosen(message, context)


def plain_lion(messages: Iterable[Message], context: StepContext) -> None:
    """Takes Lion's step without votes."""
    others = _launched(messages, context, launches.plain_lion)
    lion.plain_lion(others, context)


def local_step(messages: Iterable[Message], context: StepContext) -> None:
    """Takes a local step."""
    others = _launched(messages, context, launches.local_step)
    lion.local_step(others, context)


def end_period(message: Message, mean: Mean) -> None:
    """Moves a message's parameters from their anchors by the mean of the displacements."""
    context = mean.context
    if covers(message, context, mean.rule.voters):
        launches.end_period(message, mean.verdict, mean.rule, mean.scale.unit, context)
        return
    for piece in message.pieces:
        if piece.has(Field.MOVING):
            lion.move_from_anchor(piece, mean.of(piece), context)


def count_votes(
    planes: Tensor, active: Tensor, rows: Rows, words: slice, rule: Rule, phase: int, size: int
) -> Verdict:
    """Returns the verdict of all ranks' votes on a slice of a message's words.

    `planes` has shape (N, bits, W), and `active` one bit per row, shape (N, ceil(R / 64)).
    Kernels return planes of `size` words, with zeros after the slice.
    """
    voters, bits, _ = planes.shape
    if bits == 1 and voters <= MOST_VOTERS and not refusal(planes.device):
        return launches.count_votes(planes, active, rows, words, rule, phase, size)
    return votes.count_votes(planes, active, rows, words, rule, phase)


def count_equal_votes(sent: Votes, voters: int, rule: Rule, phase: int) -> Verdict:
    """Returns the verdict if all voters send the same votes, without any communication."""
    planes, active = sent.planes.expand(voters, -1, -1), sent.row_bits.expand(voters, -1)
    words = planes.shape[2]
    return count_votes(planes, active, sent.rows, slice(0, words), rule, phase, words)


def _launched(
    messages: Iterable[Message],
    context: StepContext,
    work: Callable[[list[Message], StepContext], None],
) -> list[Message]:
    """Does work on the covered messages of each device; returns the other messages."""
    covered, others = dict[torch.device, list[Message]](), list[Message]()
    for message in messages:
        if covers(message, context):
            covered.setdefault(message.device, []).append(message)
        else:
            others.append(message)
    for of_device in covered.values():
        work(of_device, context)
    return others
