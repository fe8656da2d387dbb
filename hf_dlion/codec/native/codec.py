"""The CPU codec in C.

The eager codec in `cpu` makes a dozen passes over each chunk; one compiled pass moves only the
bytes that must move.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_dlion.codec.codec import AdvanceJob, AloneJob, ApplyJob, EncodeJob
from hf_dlion.codec.cpu import CpuCodec
from hf_dlion.codec.eager import J, T
from hf_dlion.codec.layout import Run, whole_run
from hf_dlion.codec.levels import LEVELS
from hf_dlion.codec.lion import (
    PARAMETER_STREAM,
    momentum_stream,
    rounding_key,
)
from hf_dlion.codec.native.library import Rule
from hf_dlion.codec.rule import StepRule, TensorRule

# Elements per thread: below, starting a thread costs more than it saves. A multiple of 64.
PART = 1 << 18

# Elements whose magnitudes native.c adds up together.
GROUP = 1 << 16

_NARROW = {torch.float32: 0, torch.bfloat16: 1}
_VOTE, _ADVANCE = 1, 2


def _rule_for(rule: TensorRule, *tensors: Tensor) -> Rule:
    """Returns the constants for a call on `tensors`; random keys only if one of them is narrow."""
    shared = _shared_rule(rule.step_rule, rule.lr, rule.betas, rule.decay)
    step = rule.step_rule
    if step.stochastic_rounding and any(_NARROW[tensor.dtype] for tensor in tensors):
        shared = Rule.from_buffer_copy(shared)
        streams = momentum_stream(step.rank), PARAMETER_STREAM
        shared.momentum_key, shared.param_key = (
            rounding_key(step.seed, step.step, rule.index, stream) for stream in streams
        )
    return shared


@functools.lru_cache(maxsize=64)
def _shared_rule(step: StepRule, lr: float, betas: tuple[float, float], decay: float) -> Rule:
    beta1, beta2 = betas
    return Rule(
        beta1=beta1,
        rest1=1.0 - beta1,
        beta2=beta2,
        rest2=1.0 - beta2,
        decay=decay,
        lr=lr,
        stochastic=step.stochastic_rounding,
        fill=step.zero_word % 2**64,
    )


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="hf_dlion")


def _in_parts(run: Run, work: Callable[[int, int], T], unit: int = 64) -> list[T]:
    """Returns what `work(start, stop)` does for all elements, on as many threads as torch uses.

    Args:
        run: The elements.
        work: Is called on parts that begin at multiples of `unit` elements, counted from the first.
        unit: See `work`.
    """
    numel = run.numel
    threads = min(torch.get_num_threads(), -(-numel // PART))
    if threads <= 1:
        return [work(run.start, run.stop)]
    size = -(-numel // (threads * unit)) * unit
    starts = range(run.start, run.stop, size)
    # ctypes lets go of the interpreter's lock during a call.
    return list(_pool(threads).map(lambda start: work(start, min(start + size, run.stop)), starts))


def _element_0(tensor: Tensor, run: Run) -> int:
    """Returns where the parameter's element 0 would lie, if `tensor` holds those of a stretch."""
    return tensor.data_ptr() - run.start * tensor.element_size()


class NativeCodec(CpuCodec):
    """Implements `hf_dlion.codec.Codec` for float32 and bfloat16 CPU tensors.

    What the library does not do goes to `CpuCodec`: float16, float64, averages, and tensors of
    2**32 elements or more. Autograd does not see what C writes, so it is told.
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        """Takes the compiled library."""
        self._library = library

    def each(self, jobs: Sequence[J], work: Callable[[J], T]) -> list[T]:
        """Does jobs on threads that are too short to be cut; see `EagerCodec.each`.

        Others take threads by themselves, or write to rows that they share with others.
        """
        found: dict[int, T] = {}
        lots: list[list[int]] = []
        room = 0
        for place, job in enumerate(jobs):
            numel = _numel(job)
            if numel > PART or not _job_supported(job):
                found[place] = work(job)
                continue
            if numel > room:
                lots.append([])
                room = PART
            lots[-1].append(place)
            room -= numel

        def do(lot: list[int]) -> list[T]:
            with torch.no_grad():  # A thread has its own mode.
                return [work(jobs[place]) for place in lot]

        threads = min(torch.get_num_threads(), len(lots))
        done = map(do, lots) if threads <= 1 else _pool(torch.get_num_threads()).map(do, lots)
        for lot, results in zip(lots, done, strict=True):
            found.update(zip(lot, results, strict=True))
        return [found[place] for place in range(len(jobs))]

    def make_votes(self, job: EncodeJob, scale: float | None) -> bool:
        """See `EagerCodec.make_votes`."""
        if not _supported(job.grad, job.exp_avg, run=job.run):
            return super().make_votes(job, scale)
        what, factor = (_VOTE | _ADVANCE, 1.0) if scale is None else (_VOTE, scale)
        if job.rule.step_rule.bits > 1:
            finite = self._encode_levels(job, what, factor)
        else:
            finite = self._encode_bits(*job[:5], what, factor, job.run)
        if scale is None:
            increment_version(job.exp_avg)
        return finite

    def advance_all(self, jobs: Sequence[AdvanceJob]) -> None:
        """See `Codec.advance_all`."""
        for job in jobs:
            if not _supported(job.grad, job.exp_avg, run=job.run):
                super().advance_all([job])
            elif job.grad.numel():
                self._encode_bits(
                    job.grad, job.exp_avg, None, None, job.rule, _ADVANCE, run=job.run
                )
                increment_version(job.exp_avg)

    def clear_votes(self, job: EncodeJob) -> None:
        """See `EagerCodec.clear_votes`."""
        bits = job.rule.step_rule.bits
        if bits == 1 or not _supported(job.grad, job.exp_avg, run=job.run):
            super().clear_votes(job)
        elif not bool(job.active.all()):
            run, votes = job.run or whole_run(job.grad.shape), job.active.to(torch.int32)
            codes, counts = _codes_0(job.words, run, bits), _row_0(votes, run)

            def clear(start: int, stop: int) -> None:
                self._library.dlion_clear(codes, counts, run.row_numel, start, stop, bits)

            _in_parts(run, clear)

    def _encode_bits(
        self,
        grad: Tensor,
        exp_avg: Tensor,
        words: Tensor | None,
        active: Tensor | None,
        rule: TensorRule,
        what: int,
        scale: float = 1.0,
        run: Run | None = None,
    ) -> bool:
        """Encodes; a vote alone tells whether the gradient times `scale` is finite."""
        run, native_rule = run or whole_run(grad.shape), _rule_for(rule, grad, exp_avg)
        grad = grad.contiguous()
        signs = None if words is None else _codes_0(words, run, 1)
        rows = None if active is None else _row_0(active, run)

        def work(start: int, stop: int) -> bool:
            finite: int = self._library.dlion_encode(
                _element_0(grad, run), _element_0(exp_avg, run), signs, rows, run.row_numel,
                start, stop, scale, what, _NARROW[grad.dtype], _NARROW[exp_avg.dtype], native_rule,
            )  # fmt: skip
            return bool(finite)

        return all(_in_parts(run, work))

    def _encode_levels(self, job: EncodeJob, what: int, scale: float = 1.0) -> bool:
        """Encodes; tells whether the gradient times `scale` is finite."""
        run = job.run or whole_run(job.grad.shape)
        job = job._replace(grad=job.grad.contiguous(), run=run)
        # C would write past the end of votes made for fewer bits.
        bits = job.rule.step_rule.bits
        assert job.words.numel() == bits * run.words, "as many words as the bits take"
        if job.rule.step_rule.level_scale == "word":
            return self._encode_word_levels(job, run, what, scale)
        return self._encode_tensor_levels(job, run, what, scale)

    def _encode_word_levels(self, job: EncodeJob, run: Run, what: int, scale: float) -> bool:
        """Encodes in one pass."""
        grad, exp_avg, words, active, rule, _ = job
        native_rule, bits = _rule_for(rule, grad, exp_avg), rule.step_rule.bits
        codes, rows = _codes_0(words, run, bits), _row_0(active, run)

        def encode(start: int, stop: int) -> bool:
            finite: int = self._library.dlion_word_levels(
                _element_0(grad, run), _element_0(exp_avg, run), codes, rows, run.row_numel, start,
                stop, scale, bits, what, _NARROW[grad.dtype], _NARROW[exp_avg.dtype], native_rule,
            )  # fmt: skip
            return bool(finite)

        return all(_in_parts(run, encode))

    def _encode_tensor_levels(self, job: EncodeJob, run: Run, what: int, scale: float) -> bool:
        """Encodes in two passes, the first of which measures."""
        grad, exp_avg, words, active, rule, _ = job
        assert run.start == 0, "a stretch has no mean of the tensor"
        native_rule, bits = _rule_for(rule, grad, exp_avg), rule.step_rule.bits
        narrow = _NARROW[grad.dtype], _NARROW[exp_avg.dtype]
        groups = -(-grad.numel() // GROUP)
        sums = (ctypes.c_double * groups)()

        def measure(start: int, stop: int) -> bool:
            finite: int = self._library.dlion_measure(
                grad.data_ptr(), exp_avg.data_ptr(), sums, active.data_ptr(), run.row_numel,
                start, stop, scale, *narrow, native_rule,
            )  # fmt: skip
            return bool(finite)

        finite = all(_in_parts(run, measure, GROUP))
        total = self._library.dlion_fold(sums, groups)
        rows = int(np.count_nonzero(active.numpy()))
        factor = factor_of(total, rows * run.row_numel, bits)

        def encode(start: int, stop: int) -> None:
            self._library.dlion_levels(
                grad.data_ptr(), exp_avg.data_ptr(), words.data_ptr(), start, stop, scale, factor,
                bits, what, *narrow, native_rule,
            )  # fmt: skip

        _in_parts(run, encode)
        return finite

    def apply_flat(self, flat: Tensor, job: ApplyJob) -> None:
        """See `EagerCodec.apply_flat`."""
        param, verdict, rule, stretch = job
        if rule.step_rule.aggregation != "majority" or not _supported(param):
            super().apply_flat(flat, job)
            return
        run, native_rule = stretch or whole_run(param.shape), _rule_for(rule, param)
        everywhere = bool(verdict.counts.all())
        counts = None if everywhere else _row_0(verdict.counts, run)
        negative, *more = (_codes_0(plane, run, 1) for plane in verdict.planes)
        nonzero = more[0] if more else None

        def work(start: int, stop: int) -> None:
            self._library.dlion_apply(
                flat.data_ptr(), negative, nonzero, counts, run.row_numel, start, stop,
                _NARROW[flat.dtype], native_rule,
            )  # fmt: skip

        _in_parts(run, work)
        increment_version(flat)

    def step_alone_all(self, jobs: Sequence[AloneJob]) -> None:
        """See `Codec.step_alone_all`."""
        for job in jobs:
            alike = job.param.dtype == job.grad.dtype
            if not (alike and _supported(job.param, job.exp_avg, run=job.run)):
                super().step_alone_all([job])
            elif job.param.numel():
                self._step_alone(job)

    def _step_alone(self, job: AloneJob) -> None:
        param, grad, exp_avg, rule, stretch = job
        run = stretch or whole_run(param.shape)
        native_rule = _rule_for(rule, param, exp_avg)
        flat, grad = param.contiguous(), grad.contiguous()

        def work(start: int, stop: int) -> None:
            self._library.dlion_alone(
                _element_0(flat, run), _element_0(grad, run), _element_0(exp_avg, run), start, stop,
                _NARROW[flat.dtype], _NARROW[exp_avg.dtype], native_rule,
            )  # fmt: skip

        _in_parts(run, work)
        increment_version((flat, exp_avg))
        if flat is not param:
            param.copy_(flat)

    def count_bits(
        self, votes: Tensor, totals: Tensor | None, out: Tensor, rule: StepRule
    ) -> int | Tensor:
        """See `CountingCodec.count_bits`."""
        change: int = self._library.dlion_count(
            votes.data_ptr(), votes.stride(0), rule.world_size, votes.shape[1],
            rule.aggregation == "average", rule.tie.to_zero, rule.tie.word % 2**64,
            None if totals is None else totals.data_ptr(),
            0 if totals is None else totals.stride(0), out.data_ptr(), out.stride(0),
        )  # fmt: skip
        return change

    def add_levels(
        self, votes: Tensor, voters: Tensor | None, out: Tensor, rule: StepRule
    ) -> tuple[int | Tensor, int | Tensor]:
        """See `CountingCodec.add_levels`."""
        sums = (ctypes.c_int64 * 2)()
        self._library.dlion_sum(
            votes.data_ptr(), votes.stride(0), rule.world_size, out.shape[1], rule.bits,
            rule.tie.to_zero, rule.tie.word % 2**64, None if voters is None else voters.data_ptr(),
            out.data_ptr(), out.stride(0), sums,
        )  # fmt: skip
        return sums[0], sums[1]


def factor_of(total: float, count: int, bits: int) -> float:
    """Returns `hf_dlion.codec.levels.factor_of` for one float32 tensor, before it is rounded."""
    mean = total / count if count else math.nan
    if bits == 2:
        return 1.5 * mean
    if not mean > 0:
        return 0.0
    return min(LEVELS[bits].largest / 2 / mean, torch.finfo(torch.float32).max)


def _codes_0(words: Tensor, run: Run, bits: int) -> int:
    """Returns where the codes of the parameter's word 0 would lie, if `words` are a stretch's."""
    return words.data_ptr() - run.start // 64 * bits * words.element_size()


def _numel(job: EncodeJob | ApplyJob) -> int:
    whole = job.grad if isinstance(job, EncodeJob) else job.param
    return whole.numel() if job.run is None else job.run.numel


def _job_supported(job: EncodeJob | ApplyJob) -> bool:
    if isinstance(job, ApplyJob):
        return _supported(job.param)
    return _supported(job.grad, job.exp_avg, run=job.run)


def _row_0(rows: Tensor, run: Run) -> int:
    """Returns where the entry of the parameter's row 0 would lie, if `rows` are a stretch's."""
    return rows.data_ptr() - run.first_row * rows.element_size()


def _supported(*tensors: Tensor, run: Run | None = None) -> bool:
    stop = tensors[0].numel() if run is None else run.stop
    return stop < 1 << 32 and all(tensor.dtype in _NARROW for tensor in tensors)
