"""Tables of numbers and addresses that kernels read, and how kernels are launched.

A table has a line for each stretch of elements that follow one another, and a program of a kernel
finds the line that it works on:

    program          0  1  2  3 | 4 | 5  6 | ...
    line             0          | 1 | 2    | ...
"""

from __future__ import annotations

import enum
import weakref
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hf_dlion.core.codec import WORD
from hf_dlion.core.flat import on_device
from hf_dlion.core.votes import Rows

# Words of a tile and tiles of a program, for kernels that take the elements of tensors.
WORDS_OF_A_TILE, TILES_OF_A_PROGRAM = 16, 8
# Words of a program, for kernels that take the words of a message.
WORDS_OF_A_PROGRAM = 256
# A fused operation would round once where the rule rounds twice, and hashes overflow on purpose,
# which TRITON_DEBUG=1 would take for an error.
OPTIONS = {"num_warps": 4, "enable_fp_fusion": False, "sanitize_overflow": False}


class Column(enum.IntEnum):
    """Columns of a table, int64.

    First the number of the line's first program, and the fields of `Line`; then addresses of
    tensors, keys of random bits, and float32 numbers.
    """

    PROGRAM = 0
    SIZE = 1
    WORD = 2
    ROW = 3
    SKIPPED = 4
    ROW_WORDS = 5
    GRAD = 6
    MOMENTUM = 7
    MOVING = 8
    ANCHOR = 9
    COMPENSATION = 10
    OLD = 11
    KEY_MOMENTUM = 12
    KEY_PARAM = 13
    KEY_COMPENSATION = 14
    W1 = 15
    W2 = 16
    LR = 17
    DECAY = 18
    UNIT = 19


class Line(NamedTuple):
    """Elements that follow one another, which begin with the message's word `word`.

    The message's row `row` begins `skipped` words before it, and has `row_words` words.
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
    """Lines that one copy brings to the device."""

    def __init__(self, device: torch.device) -> None:
        """Begins without lines."""
        self.device = device
        self._arrays: list[np.ndarray] = []
        self._count = 0
        self._memory: Tensor | None = None

    def address(self, line: int) -> int:
        """Returns the address of a line; no line can be added after the first call."""
        if self._memory is None:
            self._memory = on_device(torch.from_numpy(np.concatenate(self._arrays)), self.device)
        return int(self._memory.data_ptr() + 8 * len(Column) * line)

    def add(
        self,
        lines: Sequence[Line],
        types: tuple[Any, ...] = (),
        columns: Mapping[Column, Sequence[Any]] | None = None,
    ) -> Lines:
        """Adds lines for tensors of the same types.

        Args:
            lines: The lines, by rising `word`.
            types: Triton's types of the tensors.
            columns: Values of the columns beyond those of `Line`, one for each line.
        """
        array = np.zeros((len(lines), len(Column)), np.int64)
        sizes = np.array([line.size for line in lines])
        programs = -(-sizes // (WORD * WORDS_OF_A_TILE * TILES_OF_A_PROGRAM))
        array[:, Column.PROGRAM] = np.cumsum(programs) - programs
        array[:, Column.SIZE : Column.ROW_WORDS + 1] = lines
        for column, values in (columns or {}).items():
            array[:, column] = values
        first, self._count = self._count, self._count + len(lines)
        self._arrays.append(array)
        return Lines(self, first, len(lines), int(programs.sum()), types)


_of_rows: weakref.WeakKeyDictionary[Rows, Lines] = weakref.WeakKeyDictionary()


def lines_of(rows: Rows) -> Lines:
    """Returns lines for all rows of a message, kept as long as its rows."""
    if rows not in _of_rows:
        lines = []
        word = 0
        row = 0
        for row_count, row_words in rows.lengths:
            lines.append(Line(row_count * row_words * WORD, word, row, 0, row_words))
            word, row = word + row_count * row_words, row + row_count
        _of_rows[rows] = Table(rows.device).add(lines)
    return _of_rows[rows]


def addresses(*tensors: Tensor | None) -> list[int]:
    """Returns addresses of tensors, 0 for None."""
    return [0 if tensor is None else tensor.data_ptr() for tensor in tensors]


def launch(kernel: Any, device: torch.device, programs: int, *arguments: Any) -> None:
    """Launches a kernel on the device's current stream."""
    current: AbstractContextManager[Any] = torch.get_device_module(device).device(device)
    with current:  # Triton launches there.
        kernel[(programs,)](*arguments, **OPTIONS)
