"""Launches of Triton kernels, and which form of the arithmetic a device has.

On a GPU, the kernels do the work of a step that they cover. Everything else, and every other
device, takes the form of torch operations, which has the same bits. So ranks with different forms
can train together. Triton is imported when the first tensor on a GPU is used.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.torch_version import TorchVersion

# Types of devices on which the kernels run, dtypes of tensors, and most ranks whose votes they add.
DEVICES = ("cuda",)
DTYPES = (torch.float32, torch.bfloat16)
MOST_RANKS = 127
# Set it to 0 to take the form of torch operations.
SWITCH = "HF_DLION_TRITON"
# A fused operation would round once where the rule rounds twice, and hashes overflow on purpose,
# which TRITON_DEBUG=1 would take for an error.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False, "sanitize_overflow": False}
# Warnings for the end of the next step, because other ranks wait for it until then.
_warnings: list[str] = []
# Why kernels failed, by device.
_failed: dict[torch.device, str] = {}


def refusal(device: torch.device) -> str:
    """Returns why the kernels don't run on a device; empty if they do, or before `try_out`."""
    if device.type not in DEVICES:
        return f"kernels run on {' and '.join(DEVICES)}, not on {device.type}"
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH}=0"
    return _failed.get(device, "")


def new_warnings() -> list[str]:
    """Returns the warnings since the last call, for the end of a step."""
    found = [*_warnings]
    _warnings.clear()
    return found


def try_out(trial: Callable[[], None], device: torch.device) -> None:
    """Calls a trial of kernels; if it fails, none runs on the device any more (see `new_warnings`).

    Raises:
        RuntimeError: If memory runs out, of which torch operations need more than the kernels.
    """
    try:
        version = _kernels().triton.__version__
        if TorchVersion(version) < "3.4":  # Which can't compile them.
            raise RuntimeError(f"kernels need triton 3.4, which torch 2.8 installs (got {version})")
        trial()
    except Exception as error:  # Missing triton or compiler, a cache that can't be written, ...
        text = str(error)  # Of torch, triton, or the system; a later step may have enough.
        if isinstance(error, MemoryError) or "out of memory" in text or "allocate mem" in text:
            raise
        why = _failed[device] = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        _warnings.append(
            f"hf_dlion's kernels can't run on {device} ({why}), so the optimizer's work takes "
            f"several times as long, with the same result. hf-dlion doctor checks this. Set "
            f"{SWITCH}=0 to hide the warning"
        )


@functools.cache
def _kernels() -> Any:
    """Returns the module of the kernels for words; the first call imports triton."""
    import hf_dlion.exchange.count_kernels as kernels

    return kernels


class Stretch(NamedTuple):
    """Elements of a tensor in words that follow one another, which have a line in a table.

    The first element is in the message's word `word`. The message's row `row` begins `skipped`
    words before it, and has `row_words` words.
    """

    size: int
    word: int
    row: int
    skipped: int
    row_words: int


@dataclass(frozen=True)
class Lines:
    """Lines of a table, one after the other, whose tensors have the same types."""

    table: Table
    first: int
    count: int
    programs: int
    types: tuple[Any, ...]

    @property
    def arguments(self) -> tuple[int, int, int]:
        """The address, the number of lines, and the step with which a search begins."""
        return self.table.address(self.first), self.count, 1 << (self.count - 1).bit_length() >> 1


class Table:
    """What kernels need to know of tensors; one copy brings it to the device.

    A line has numbers, addresses of tensors, and bits of float32 numbers. Programs find the line
    that they work on:

        program          0  1  2  3 | 4 | 5  6 | ...
        line             0          | 1 | 2    | ...
    """

    def __init__(self, device: torch.device) -> None:
        """Begins without lines."""
        self.device = device
        self._arrays: list[np.ndarray] = []
        self._count = 0
        self._memory: Tensor | None = None

    def address(self, line: int) -> int:
        """Returns the address of a line; no line can be added after the first call."""
        if self._memory is None:
            self._memory = sent(torch.from_numpy(np.concatenate(self._arrays)), self.device)
        return int(self._memory.data_ptr() + 8 * self._arrays[0].shape[1] * line)

    def add(
        self, stretches: Sequence[Stretch], types: tuple[Any, ...], columns: Mapping[int, Any]
    ) -> Lines:
        """Adds a line for each stretch of tensors of the same types.

        Args:
            stretches: The stretches, by rising `word`.
            types: Triton's types of the tensors.
            columns: Values of the columns beyond those of stretches, one for each stretch.
        """
        kernels = _kernels()
        lines = np.zeros((len(stretches), kernels.COLUMNS.value), np.int64)
        sizes = np.array([own.size for own in stretches])
        programs = -(-sizes // (64 * kernels.ROWS.value * kernels.TILES.value))
        # As `count_kernels` numbers them.
        lines[:, 0] = np.cumsum(programs) - programs
        lines[:, 1:6] = stretches
        for column, values in columns.items():
            lines[:, column] = values
        first, self._count = self._count, self._count + len(stretches)
        self._arrays.append(lines)
        return Lines(self, first, len(stretches), int(programs.sum()), types)

    def add_rows(self, lengths: Sequence[tuple[int, int]]) -> Lines:
        """Adds lines for stretches of rows: the number of rows, and words per row."""
        stretches, word, row = [], 0, 0
        for rows, words in lengths:
            stretches.append(Stretch(rows * words * 64, word, row, 0, words))
            word, row = word + rows * words, row + rows
        return self.add(stretches, (), {})


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device; the host doesn't wait for what the device still does."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def addresses(*tensors: Tensor | None) -> list[int]:
    """Returns addresses of tensors, 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def launch(kernel: Any, device: torch.device, programs: int, *arguments: Any) -> None:
    """Launches a kernel on the device's current stream."""
    current: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    with current:  # Triton launches there.
        kernel[(programs,)](*arguments, **OPTIONS)


def abstain(spans: Lines, words: int, planes: Tensor, active: Tensor, packed: Tensor) -> None:
    """Clears the votes in rows that aren't active, and words after the message; packs `active`.

    Args:
        spans: The message's rows.
        words: Number of words in the message.
        planes: Votes, int64, one plane, at least as long as the message.
        active: Whether this rank votes on a row, int8, shape (R,).
        packed: Output, one bit per row, int64, shape (ceil(R / 64),).
    """
    kernels = _kernels()
    programs = -(-max(planes.numel(), active.numel()) // kernels.BLOCK.value)
    launch(
        kernels.abstain, planes.device, programs, *spans.arguments, *addresses(planes), words,
        planes.numel(), *addresses(active), active.numel(), *addresses(packed),
    )  # fmt: skip


def count(
    spans: Lines, planes: Tensor, packed: Tensor, verdict: Tensor, voters: Tensor, *,
    first: int, size: int, tie: int, rule: str,
) -> None:  # fmt: skip
    """Counts votes of one bit on some words of a message, and decides.

    Args:
        spans: The message's rows.
        planes: Votes of each rank on these words, int64, shape (N, W) or longer.
        packed: One bit per row of the message and rank, int64, shape (N, ceil(R / 64)).
        verdict: Output, planes of the verdict, int64; zero after `size` words.
        voters: Output, number of voters of each of the message's rows, int32, shape (R,).
        first: The first of these words in the message.
        size: Number of words.
        tie: Word that decides ties.
        rule: "alternate", "zero", or "average".
    """
    kernels, each = _kernels(), verdict.shape[1]
    programs = -(-max(each, voters.numel()) // kernels.BLOCK.value)
    launch(
        kernels.count, planes.device, programs, *spans.arguments, *addresses(planes),
        planes.stride(0), first, size, *addresses(packed), packed.stride(0), voters.numel(),
        *addresses(verdict), each, *addresses(voters), tie, planes.shape[0], rule,
    )  # fmt: skip
