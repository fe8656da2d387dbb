"""Comparisons by hashes: parameters must be equal, gradients and momenta must not be."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hf_dlion.core.flat import numbers
from hf_dlion.ranks.header import Disagreement, raise_together
from hf_dlion.ranks.wire import Wire, digest

AVERAGED_GRADIENTS = (
    "all ranks have equal gradients. If a model is wrapped in DistributedDataParallel, it still "
    "averages them, at full traffic: add optimizer.attach(ddp_model), with Accelerate "
    "hf_dlion.accelerate.attach(accelerator, model), and with Trainer call hf_dlion.register() "
    "first. If none is, all ranks train on the same data: check the sampler"
)
CHANGED_PARAMETERS = (
    "Something changed parameters on some ranks only: code that runs on one rank or uses its "
    "gradients (as AdaLoRA does), weights loaded there, nn.Embedding(max_norm=...), another type "
    "of device or version of torch, or faulty memory. Remove the cause, and resume from an earlier "
    "checkpoint"
)
COPIED_MOMENTA = (
    "all ranks loaded the same momentum, which is right after optimizer.synchronize_momentum(). "
    "Otherwise, save each rank's own with hf_dlion.save_momentum() and load it with "
    "hf_dlion.load_momentum() after optimizer.load_state_dict(), which replaces it. Training "
    "continues, and the momenta become different again in about 50 steps"
)


def all_ranks_have(tensors: Sequence[Tensor], voters: Wire, what: str) -> bool:
    """Returns whether all voters hold equal tensors that aren't zero; every voter must call this.

    Bytes per rank: 16 * (N - 1).
    """
    nonzero = any(numbers([tensor.any() for tensor in tensors]))
    table = voters.gather_words([digest(fingerprints(tensors)), int(nonzero)], what).tolist()
    return nonzero and len(table) > 1 and bool(table.count(table[0]) == len(table))


def compare_parameters(
    named: Callable[[], Sequence[tuple[str, Tensor]]],
    wire: Wire,
    same_parts: Sequence[Sequence[int]],
    remedy: str,
    *,
    when: str = "",
) -> None:
    """Verifies that parameters are bitwise equal; every rank must call this.

    `named` returns names and parameters, frozen ones included, with this rank's parts of sharded
    ones. `same_parts` has the groups of ranks that hold the same parts. Bytes per rank: 16 (N - 1),
    and a `gather_objects` of all names and hashes if ranks differ.

    Raises:
        Disagreement: On every rank, with the first parameter that differs and the ranks in the
            minority.
    """
    entries: list[tuple[str, str, int]] = []
    failure = None
    try:
        pairs = named()
        values = fingerprints([param for _, param in pairs])
        for (name, param), value in zip(pairs, values, strict=True):
            entries.append((name, f"{tuple(param.shape)} {param.dtype}", value))
    except Exception as error:  # The other ranks wait for a hash.
        failure = error
    words = [failure is not None, digest(entries)]
    failed, hashes = wire.gather_words(words, "a hash of parameters").t().tolist()
    if any(failed):
        raise_together(failure, wire, "the comparison of parameters")
    different = [ranks for ranks in same_parts if len({hashes[rank] for rank in ranks}) > 1]
    if different:
        # Several groups may differ. Every rank describes the first one.
        ranks, tables = different[0], wire.gather_objects(entries)
        difference = _difference(ranks, [tables[rank] for rank in ranks], wire)
        raise Disagreement(f"replicas differ{when} in {difference}. {remedy}")


def _difference(ranks: Sequence[int], tables: Sequence[Sequence[Any]], wire: Wire) -> str:
    texts = [repr(table) for table in tables]
    counts = Counter(texts).most_common()
    most, count = counts[0]  # If two are equally frequent, the one of the lowest rank.
    majority = [rank for rank, text in zip(ranks, texts, strict=True) if text == most]
    minority = [rank for rank in ranks if rank not in majority]
    tied = len(counts) > 1 and counts[1][1] == count
    length = max(map(len, tables))
    padded = [[*table, *[None] * (length - len(table))] for table in tables]
    rows = zip(*padded, strict=True)
    different = [row for row in rows if any(entry != row[0] for entry in row)]
    first = next(entry for entry in different[0] if entry is not None)
    return (
        f"{len(different)} of {length} parameters, first in {first[0]!r}: {wire.named(minority)} "
        f"from {wire.named(majority)} ({'no majority' if tied else 'the majority'})"
    )


# 64-bit hashes of tensors' bits, computed on the tensors' devices.

# Words per row: a row of weights and a row of products stay in a core's cache.
ROW_WORDS = 1 << 15
WORD_BYTES = 4
# Rows hashed at once: 16 MiB of products keep a GPU busy, and one row stays in a core's cache.
_ROWS_AT_ONCE = {"cpu": 1}
_ROWS_ELSEWHERE = 64

_ELEMENTS, _ROWS = 1, 2


def fingerprints(tensors: Sequence[Tensor]) -> list[int]:
    """Returns a 64-bit hash of every tensor's elements, in row-major order, as int64.

    The bytes are read as signed 32-bit words, the last one padded with zeros, in rows of 2**15:

        hash = sum over rows r of b[r] * (sum over k of a[k] * word[r, k])   modulo 2**64

    with pseudo-random odd a and b. Equal elements have equal hashes on every device and for any
    strides. A change inside one word is always found, because a and b are odd. Other changes are
    missed with a probability of 2**-64 if they include the lowest bit of a word, and of up to
    2**-33 if they only touch higher bits. Shape and dtype don't count.

    Only the hashes are copied to the host. Memory: a few rows, and a copy of one tensor at a time
    if it isn't contiguous.
    """
    return numbers([_hash(tensor.detach()) for tensor in tensors])


def _hash(tensor: Tensor) -> Tensor:
    """Returns a tensor's hash, int64 and 0-D, on the tensor's device."""
    # Not view(-1): a single element passes for contiguous with any stride, and keeps it.
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    rows_at_once = _ROWS_AT_ONCE.get(flat.device.type, _ROWS_ELSEWHERE)
    weights = _weights(ROW_WORDS, _ELEMENTS, flat.device)
    per_row = ROW_WORDS * WORD_BYTES // flat.element_size()
    in_rows = flat.numel() - flat.numel() % per_row
    sums = []
    for start in range(0, in_rows, per_row * rows_at_once):
        words = _words(flat[start : min(start + per_row * rows_at_once, in_rows)])
        sums.append((words.view(-1, ROW_WORDS) * weights).sum(dim=1))
    words = _words(flat[in_rows:])
    sums.append((words * weights[: words.numel()]).sum().view(1))
    rows = torch.cat(sums)
    # A power of two, so few tables are created.
    row_weights = _weights(1 << rows.numel().bit_length(), _ROWS, flat.device)
    return (rows * row_weights[: rows.numel()]).sum()


def _words(part: Tensor) -> Tensor:
    """Returns contiguous elements as int32, copied if they don't begin and end at words."""
    per_word = max(1, WORD_BYTES // part.element_size())
    if part.numel() % per_word or part.storage_offset() % per_word:
        padded = part.new_zeros(-(-part.numel() // per_word) * per_word)
        padded[: part.numel()] = part
        part = padded
    return part.view(torch.int32)


@functools.lru_cache(maxsize=64)
def _weights(count: int, stream: int, device: torch.device) -> Tensor:
    """Returns `count` odd pseudo-random numbers, int64, of a stream (splitmix64)."""
    golden = 0x9E3779B97F4A7C15
    z = (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(stream << 32)) * np.uint64(golden)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) | np.uint64(1)
    return torch.from_numpy(z.view(np.int64)).to(device)
