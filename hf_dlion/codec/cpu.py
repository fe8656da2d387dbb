"""The CPU codec: one pass over each tensor in chunks that stay in cache.

Fresh large temporaries cost more in page faults than the arithmetic does, so every buffer is
as long as a chunk and made once per thread.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from hf_dlion.codec.codec import ApplyJob
from hf_dlion.codec.eager import EagerCodec
from hf_dlion.codec.layout import Run, whole_run
from hf_dlion.codec.lion import (
    PARAMETER_STREAM,
    compute_dtype,
    interpolate,
    momentum_stream,
    random_bits,
    round_stochastically,
    rounding_key,
    saturate,
)
from hf_dlion.codec.rule import StepRule, TensorRule

# Elements per chunk: a power of two, so no chunk crosses element 2**32. Four float32 buffers
# of this length take 1 MiB, which fits a core's second-level cache.
CHUNK = 1 << 16


class _Buffers(threading.local):
    """Scratch memory of one thread, made at first use."""

    def __init__(self) -> None:
        self._floating = {
            dtype: [torch.empty(CHUNK, dtype=dtype, device="cpu") for _ in range(4)]
            for dtype in (torch.float32, torch.float64)
        }
        self.counter = torch.arange(CHUNK, dtype=torch.int32, device="cpu")
        self.hashed, self.hash_scratch, self.hash_counter = (
            torch.empty(CHUNK, dtype=torch.int32, device="cpu") for _ in range(3)
        )
        self.flags = np.empty(CHUNK, dtype=bool)
        self.zeros = np.empty(CHUNK, dtype=bool)

    def floating(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """Returns four buffers of `count` elements."""
        if count == CHUNK:
            return self._floating[dtype]
        return [buffer[:count] for buffer in self._floating[dtype]]


_buffers = _Buffers()


def _rows_of(run: Run, chunk: slice) -> tuple[slice, np.ndarray]:
    """Returns the stretch's rows that a chunk touches, and where each begins inside the chunk."""
    first, last = chunk.start // run.row_numel, (chunk.stop - 1) // run.row_numel
    starts = np.arange(first, last + 1) * run.row_numel - chunk.start
    return slice(first - run.first_row, last + 1 - run.first_row), np.maximum(starts, 0)


def _store(target: Tensor, value: Tensor, start: int, rule: TensorRule, stream: int) -> None:
    """Writes a chunk that begins at element `start`, rounding stochastically below float32."""
    if target.dtype in (torch.float32, torch.float64) or not rule.step_rule.stochastic_rounding:
        target.copy_(value)
        return
    step = rule.step_rule
    count = value.numel()
    key = rounding_key(step.seed, step.step, rule.index, stream, start >> 32)
    low = start & 0xFFFFFFFF
    counter = _buffers.hash_counter[:count]
    torch.add(_buffers.counter[:count], low - (1 << 32) if low >> 31 else low, out=counter)
    bits = random_bits(
        counter, key, out=_buffers.hashed[:count], scratch=_buffers.hash_scratch[:count]
    )
    # A float64 value is narrowed first: a step in float32 is far below one in float16.
    target.copy_(round_stochastically(value.to(torch.float32), bits, target.dtype))


def _widened(tensor: Tensor, buffer: Tensor) -> Tensor:
    """Returns `tensor` in the dtype of `buffer`: itself, or a copy in the buffer."""
    return tensor if tensor.dtype == buffer.dtype else buffer.copy_(tensor)


class CpuCodec(EagerCodec):
    """Implements `hf_dlion.codec.Codec` for CPU tensors."""

    @property
    def chunk_numel(self) -> int:
        """Elements per chunk."""
        return CHUNK

    def pack_signs(
        self,
        words: Tensor,
        active: Tensor,
        step: StepRule,
        run: Run,
        direct: Callable[[slice], Tensor],
    ) -> None:
        """See `EagerCodec.pack_signs`."""
        as_bytes = words.numpy().view(np.uint8)
        votes = active.numpy()
        as_bytes[-8:] = 0
        for chunk in run.chunks(CHUNK):
            here = run.within(chunk)
            direction = direct(chunk).numpy()
            count = direction.size
            flags = np.less(direction, 0, out=_buffers.flags[:count])
            zeros = np.equal(direction, 0, out=_buffers.zeros[:count])
            rows, starts = _rows_of(run, chunk)
            if zeros.any():
                # A zero is not negative yet; it is sent so where k + phase is odd.
                flags[1 - step.zero_phase :: 2] |= zeros[1 - step.zero_phase :: 2]
                votes[rows] |= np.logical_or.reduceat(~zeros, starts)
            else:
                votes[rows] = True
            packed = np.packbits(flags, bitorder="little")
            as_bytes[here.start // 8 : here.start // 8 + packed.size] = packed

    def apply_flat(self, flat: Tensor, job: ApplyJob) -> None:
        """See `EagerCodec.apply_flat`."""
        param, verdict, rule, stretch = job
        run = stretch or whole_run(param.shape)
        dtype = compute_dtype(param.dtype)
        moves = rule.moves(dtype).numpy()
        majority = rule.step_rule.aggregation == "majority"
        octets = _octets_of_moves(rule.lr, dtype) if majority else None
        planes = [plane.numpy().view(np.uint8) for plane in verdict.planes]
        counts = verdict.counts.numpy()
        same = int(counts[0]) if (counts == counts[0]).all() else None
        for chunk in run.chunks(CHUNK):
            first, count = run.within(chunk).start // 8, chunk.stop - chunk.start
            move = _buffers.floating(dtype, count)[0]
            size = -(-count // 8)
            parts = [plane[first : first + size] for plane in planes]
            per_element = same if same is not None else _repeated(counts, run, chunk)
            if octets is not None:
                by_octet = _buffers.floating(dtype, CHUNK)[0].numpy().reshape(-1, 8)
                np.take(octets, parts[0], axis=0, out=by_octet[:size], mode="clip")
                if same is None or same == 0:
                    np.copyto(move.numpy(), 0.0, where=np.equal(per_element, 0))
                if len(parts) == 2:
                    nonzero = np.unpackbits(parts[1], count=count, bitorder="little")
                    np.copyto(move.numpy(), 0.0, where=nonzero == 0)
            else:
                offset = np.full(count, rule.step_rule.world_size, dtype=np.int32)
                offset += per_element
                for place, part in enumerate(parts):
                    bit = np.unpackbits(part, count=count, bitorder="little")
                    offset -= bit.astype(np.int32) << (place + 1)
                np.take(moves, offset, out=move.numpy(), mode="clip")
            self.move(flat[chunk], move, chunk.start, rule)

    def advanced(self, grad: Tensor, exp_avg: Tensor, start: int, rule: TensorRule) -> Tensor:
        """See `EagerCodec.advanced`; the direction is in a buffer."""
        dtype = compute_dtype(grad.dtype)
        direction, scratch, wide_grad, wide_avg = _buffers.floating(dtype, grad.numel())
        new, old = _widened(grad, wide_grad), _widened(exp_avg, wide_avg)
        interpolate(old, new, rule.betas[0], out=direction, scratch=scratch)
        interpolate(old, new, rule.betas[1], out=old, scratch=scratch)
        if old is not exp_avg:
            saturate(old, exp_avg.dtype)
            _store(exp_avg, old, start, rule, momentum_stream(rule.step_rule.rank))
        return direction

    def foreseen(self, grad: Tensor, exp_avg: Tensor, rule: TensorRule, scale: float) -> Tensor:
        """See `EagerCodec.foreseen`; the direction is in a buffer."""
        direction, scratch, new, wide_avg = _buffers.floating(
            compute_dtype(grad.dtype), grad.numel()
        )
        new.copy_(grad).mul_(scale)
        old = _widened(exp_avg, wide_avg)
        return interpolate(old, new, rule.betas[0], out=direction, scratch=scratch)

    def move(self, param: Tensor, move: Tensor, start: int, rule: TensorRule) -> None:
        """See `EagerCodec.move`."""
        value = _widened(param, _buffers.floating(move.dtype, param.numel())[3])
        if rule.decay != 1.0:
            value.mul_(rule.decay)
        value.sub_(move)
        if value is not param:
            _store(param, value, start, rule, PARAMETER_STREAM)


@functools.lru_cache(maxsize=64)
def _octets_of_moves(lr: float, dtype: torch.dtype) -> np.ndarray:
    """Returns, in row b, the eight moves -lr or +lr of the verdicts in byte b; shape (256, 8)."""
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    step = torch.tensor(lr, dtype=dtype, device="cpu").numpy()
    return np.where(bits == 1, -step, step)


def _repeated(counts: np.ndarray, run: Run, chunk: slice) -> np.ndarray:
    """Returns each element's entry of the per-row `counts`, for the elements of a chunk."""
    rows, starts = _rows_of(run, chunk)
    return np.repeat(counts[rows], np.diff(starts, append=chunk.stop - chunk.start))
