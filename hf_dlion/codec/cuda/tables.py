"""Tables of jobs for the Triton kernels, and their way to the device.

A table of addresses goes up in one copy, and only when it is not there already: gradients mostly
come back at the addresses of the step before. Constants, which change with the learning rate, have
a small table of their own. Nothing here but `table_of` waits for the device.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hf_dlion.codec.layout import Run, whole_run
from hf_dlion.codec.lion import compute_dtype
from hf_dlion.codec.rule import TensorRule

# Elements per program: with 16 per thread enough loads are under way to keep the memory busy. A
# power of two, so no block crosses element 2**32.
BLOCK = 2048


class Constants(NamedTuple):
    """The floating columns of a job, in the order of the table."""

    beta1: float
    rest1: float
    beta2: float
    rest2: float
    decay: float
    lr: float
    scale: float


class Kind(NamedTuple):
    """What the compiler must know of a job: jobs of one kind share a launch.

    Attributes:
        dtypes: Of the tensors, by the kernel's name for them.
        wide: Whether the arithmetic is float64.
        aligned: Whether all of them begin at multiples of 16 bytes.
    """

    dtypes: tuple[tuple[str, torch.dtype], ...]
    wide: bool
    aligned: bool


NO_TENSORS = Kind((), False, False)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One job: a row of a table, but for the column that says where its blocks begin.

    `hf_dlion.codec.cuda.triton` names the columns.
    """

    kind: Kind = NO_TENSORS
    tensors: tuple[int, ...] = (0, 0, 0)
    words: int
    rows: int
    numel: int
    row_numel: int = 0
    index: int = 0
    stride: int = 0
    constants: tuple[int, ...] = (0,) * len(Constants._fields)
    skipped: int = 0
    start: int = 0

    def blocks(self, block: int) -> int:
        """Returns the number of programs that the job takes, of `block` elements each."""
        return -(-self.numel // block)

    def row(self, first_block: int, constants: int = 0) -> tuple[int, ...]:
        """Returns all columns, given the first of its blocks and the row of its constants."""
        return (
            *(*self.tensors, self.words, self.rows, self.numel, self.row_numel, first_block),
            *(self.index, self.stride, constants, self.skipped, self.start),
        )


def entry_of(
    rule: TensorRule,
    *,
    param: Tensor | None = None,
    grad: Tensor | None = None,
    exp_avg: Tensor | None = None,
    words: Tensor | None = None,
    rows: Tensor | None = None,
    scale: float = 1.0,
    run: Run | None = None,
) -> Entry:
    """Returns the job of a codec's call on one parameter, which is not empty.

    Args:
        rule: The step's constants for this parameter.
        param: The parameter, contiguous, if the kernel sees it.
        grad: Its gradient, likewise; it decides how wide the arithmetic is.
        exp_avg: Its momentum, likewise.
        words: int64, the votes, or the planes of a verdict, of contiguous rows.
        rows: The rows' activity or counts, contiguous.
        scale: Of the gradient.
        run: The stretch of the parameter that the tensors are, or None for the whole of it.
    """
    found = {"PARAM": param, "GRAD": grad, "AVG": exp_avg}
    seen = {name: tensor for name, tensor in found.items() if tensor is not None}
    first = param if grad is None else grad
    assert first is not None, "a job has a parameter or a gradient"
    run, dtype = run or whole_run(first.shape), compute_dtype(first.dtype)
    beta1, beta2 = rule.betas
    constants = Constants(beta1, 1.0 - beta1, beta2, 1.0 - beta2, rule.decay, rule.lr, scale)
    return Entry(
        kind=Kind(
            tuple((name, tensor.dtype) for name, tensor in seen.items()),
            dtype == torch.float64,
            all(tensor.data_ptr() % 16 == 0 for tensor in seen.values()),
        ),
        tensors=tuple(0 if tensor is None else tensor.data_ptr() for tensor in found.values()),
        words=0 if words is None else words.data_ptr(),
        rows=0 if rows is None else rows.data_ptr(),
        numel=run.numel,
        row_numel=run.row_numel,
        index=rule.index,
        # Kernels take words of 32 bits.
        stride=0 if words is None else 2 * words.stride(0),
        constants=_bits(constants, dtype),
        skipped=run.start - run.first_row * run.row_numel,
        start=run.start,
    )


@functools.lru_cache(maxsize=256)
def _bits(constants: Constants, dtype: torch.dtype) -> tuple[int, ...]:
    """Returns the bits of the constants, rounded to float32 or float64."""
    integer = torch.int64 if dtype == torch.float64 else torch.int32
    return tuple(torch.tensor(constants, dtype=dtype, device="cpu").view(integer).tolist())


class Launch(NamedTuple):
    """What a kernel is launched on.

    Attributes:
        kind: Of all the jobs.
        jobs: The table, int64 of shape (jobs, columns).
        constants: int64, the sets of constants that jobs name.
        job_of: int32 of shape (blocks,), the job of each block.
        blocks: Number of programs.
    """

    kind: Kind
    jobs: Tensor
    constants: Tensor
    job_of: Tensor
    blocks: int


def launches(entries: Sequence[Entry], device: torch.device) -> Iterator[Launch]:
    """Yields one launch per kind of job; the tables of all of them go up in one copy."""
    kinds: dict[Kind, list[Entry]] = {}
    for entry in entries:
        kinds.setdefault(entry.kind, []).append(entry)
    # In one order, so the messages of a step, whose parameters are of the same groups, share them.
    sets = sorted({entry.constants for entry in entries})
    place = {held: number for number, held in enumerate(sets)}
    rows: list[tuple[int, ...]] = []
    for group in kinds.values():
        first = 0
        for entry in group:
            rows.append(entry.row(first, place[entry.constants]))
            first += entry.blocks(BLOCK)
    # A copy that was made on one stream may not be there yet for a kernel on another.
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    table, first = _uploaded(tuple(rows), device, stream), 0
    constants = _uploaded(tuple(sets), device, stream)
    for kind, group in kinds.items():
        blocks = tuple(entry.blocks(BLOCK) for entry in group)
        jobs = table[first : first + len(group)]
        first += len(group)
        yield Launch(kind, jobs, constants, _job_of(blocks, device, stream), sum(blocks))


def table_of(entries: Sequence[Entry], device: torch.device, block: int) -> Launch:
    """Returns a launch of jobs of one kind, to be kept: its tables are there on every stream.

    Args:
        entries: The jobs, not empty in elements.
        device: Where they are.
        block: Elements per program.
    """
    rows, blocks, first = [], [entry.blocks(block) for entry in entries], 0
    for entry, count in zip(entries, blocks, strict=True):
        rows.append(entry.row(first))
        first += count
    table = torch.tensor(rows, dtype=torch.int64, device="cpu")
    jobs = torch.arange(len(rows), dtype=torch.int32, device="cpu")
    job_of = jobs.repeat_interleave(torch.tensor(blocks, dtype=torch.int64, device="cpu"))
    table = table.to(device)
    return Launch(NO_TENSORS, table, table, job_of.to(device), first)


@functools.lru_cache(maxsize=256)
def _uploaded(rows: tuple[tuple[int, ...], ...], device: torch.device, stream: int) -> Tensor:
    """Returns a table on the device; the same one, without a copy, where it is unchanged."""
    del stream  # it only tells tables apart
    return _on_device(torch.tensor(rows, dtype=torch.int64, device="cpu"), device)


@functools.lru_cache(maxsize=4096)
def _job_of(blocks: tuple[int, ...], device: torch.device, stream: int) -> Tensor:
    """Returns the job of each block."""
    del stream
    jobs = torch.arange(len(blocks), dtype=torch.int32, device="cpu")
    return _on_device(jobs.repeat_interleave(torch.tensor(blocks, device="cpu")), device)


def _on_device(table: Tensor, device: torch.device) -> Tensor:
    # torch does not use pinned memory again before the copy from it is done.
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
