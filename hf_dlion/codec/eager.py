"""The codec in plain torch operations, for any device, in chunks that bound its temporaries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from hf_dlion.codec.bits import expand_rows, pack_bits, unpack_bits
from hf_dlion.codec.codec import (
    PROBED,
    AdvanceJob,
    AloneJob,
    ApplyJob,
    EncodeJob,
    Magnitudes,
)
from hf_dlion.codec.count import CountingCodec
from hf_dlion.codec.layout import Run, whole_run, words_for
from hf_dlion.codec.levels import clear_levels, encode_levels, row_of
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

# Elements per chunk: a power of two, so no chunk crosses element 2**32. A chunk's temporaries
# take about 50 bytes per element.
CHUNK = 1 << 21

J = TypeVar("J", EncodeJob, ApplyJob)
T = TypeVar("T")


class EagerCodec(CountingCodec):
    """Implements `hf_dlion.codec.Codec` without buffers of its own.

    A tensor goes by in chunks. A codec with a faster way to treat a chunk replaces the methods
    after `step_alone_all`.
    """

    def encode_all(self, jobs: Sequence[EncodeJob]) -> None:
        """See `Codec.encode_all`."""
        self._vote(jobs, None)

    def preview_all(self, jobs: Sequence[EncodeJob], scale: float) -> list[bool]:
        """See `Codec.preview_all`."""
        return self._vote(jobs, scale)

    def _vote(self, jobs: Sequence[EncodeJob], scale: float | None) -> list[bool]:
        """Encodes; with a `scale`, previews. Returns what `preview_all` does."""
        filled = [job for job in jobs if job.grad.numel()]
        for job in filled:
            job.active.zero_()
        finite = iter(self.each(filled, lambda job: self.make_votes(job, scale)))
        # Once all jobs have marked the rows that vote: a row may be another one's, too.
        for job in filled:
            self.clear_votes(job)
        return [next(finite) if job.grad.numel() else True for job in jobs]

    def all_finite(self, grads: Sequence[Tensor], scale: Tensor | None = None) -> Tensor:
        """See `Codec.all_finite`; the host waits for the device.

        A finite sum proves it in one pass without a temporary; a sum may overflow where no element
        did, and only then the elements are looked at one by one.
        """
        if scale is not None:
            inverse = 1.0 / float(scale)
            for grad in grads:
                grad.mul_(inverse)
        sums = [grad.sum(dtype=compute_dtype(grad.dtype)).to(torch.float64) for grad in grads]
        finite = torch.stack(sums).isfinite().all()
        if not bool(finite):
            finite = torch.stack([grad.isfinite().all() for grad in grads]).all()
        return finite

    def magnitudes(self, grads: Sequence[Tensor]) -> Magnitudes:
        """See `Codec.magnitudes`."""
        return [(list(range(len(grads))), torch.stack([_magnitude(grad) for grad in grads]))]

    def make_votes(self, job: EncodeJob, scale: float | None) -> bool:
        """Writes a job's votes, as if all its rows voted, and marks those that do.

        Args:
            job: Not empty.
            scale: To preview, or None to encode.

        Returns:
            Whether the scaled gradient is known to be finite.
        """
        grad, exp_avg, words, active, rule, stretch = job
        run = stretch or whole_run(grad.shape)
        new, old = grad.contiguous().view(-1), exp_avg.view(-1)

        def foresee(chunk: slice) -> Tensor:
            here = run.within(chunk)
            return self.foreseen(new[here], old[here], rule, 1.0 if scale is None else scale)

        def direct(chunk: slice) -> Tensor:
            here = run.within(chunk)
            if scale is None:
                return self.advanced(new[here], old[here], chunk.start, rule)
            return self.foreseen(new[here], old[here], rule, scale)

        if rule.step_rule.bits > 1:
            encode_levels(grad, words, active, rule, run, self.chunk_numel, foresee, direct)
        else:
            self.pack_signs(words, active, rule.step_rule, run, direct)
        return False

    def clear_votes(self, job: EncodeJob) -> None:
        """Sets the bits of rows that abstain to 0: counters then need no mask for them."""
        run, bits = job.run or whole_run(job.grad.shape), job.rule.step_rule.bits
        if job.active.device.type == "cpu" and bool(job.active.all()):
            return
        if bits > 1:
            clear_levels(job.words, job.active, bits, run, self.chunk_numel)
        else:
            kept = torch.empty_like(job.words)
            expand_rows(job.active, run, kept)
            job.words.bitwise_and_(kept)

    def advance_all(self, jobs: Sequence[AdvanceJob]) -> None:
        """See `Codec.advance_all`."""
        for grad, exp_avg, rule, stretch in jobs:
            if grad.numel() == 0:
                continue
            run = stretch or whole_run(grad.shape)
            new, old = grad.contiguous().view(-1), exp_avg.view(-1)
            for chunk in run.chunks(self.chunk_numel):
                here = run.within(chunk)
                self.advanced(new[here], old[here], chunk.start, rule)

    def apply_all(self, jobs: Sequence[ApplyJob]) -> None:
        """See `Codec.apply_all`."""
        filled = [job for job in jobs if job.param.numel()]
        params = {id(job.param): job.param for job in filled}
        flats = {key: param.contiguous().view(-1) for key, param in params.items()}
        self.each(filled, lambda job: self.apply_flat(flats[id(job.param)], job))
        for key, param in params.items():
            _hand_back(flats[key], param)

    def step_alone_all(self, jobs: Sequence[AloneJob]) -> None:
        """See `Codec.step_alone_all`."""
        for param, grad, exp_avg, rule, stretch in jobs:
            if param.numel() == 0:
                continue
            run = stretch or whole_run(param.shape)
            new, old = grad.contiguous().view(-1), exp_avg.view(-1)
            flat = param.contiguous().view(-1)
            for chunk in run.chunks(self.chunk_numel):
                here = run.within(chunk)
                direction = self.advanced(new[here], old[here], chunk.start, rule)
                self.move(flat[here], direction.sign_().mul_(rule.lr), chunk.start, rule)
            _hand_back(flat, param)

    @property
    def chunk_numel(self) -> int:
        """Elements per chunk."""
        return CHUNK

    def each(self, jobs: Sequence[J], work: Callable[[J], T]) -> list[T]:
        """Returns what `work` does for each job; a codec with threads may do several at once."""
        return [work(job) for job in jobs]

    def pack_signs(
        self,
        words: Tensor,
        active: Tensor,
        step: StepRule,
        run: Run,
        direct: Callable[[slice], Tensor],
    ) -> None:
        """Writes votes of one bit, as if all rows voted, and marks the rows that do.

        Args:
            words: int64, shape (run.words,).
            active: bool, shape (run.rows,).
            step: The step's constants.
            run: The elements.
            direct: Returns the direction of a chunk; called once for each, in order.
        """
        votes = torch.zeros(run.rows, dtype=torch.uint8, device=words.device)
        for chunk in run.chunks(self.chunk_numel):
            here = run.within(chunk)
            direction = direct(chunk)
            zero = direction == 0
            votes.scatter_reduce_(0, row_of(run, chunk, words.device), (~zero).byte(), "amax")
            part = words[here.start // 64 : words_for(here.stop)]
            pack_bits(direction < 0, part)
            part |= pack_bits(zero) & step.zero_word
        active |= votes.to(torch.bool)

    def apply_flat(self, flat: Tensor, job: ApplyJob) -> None:
        """Moves a parameter, given as a contiguous vector that is not empty."""
        param, verdict, rule, stretch = job
        run = stretch or whole_run(param.shape)
        moves = rule.moves(compute_dtype(param.dtype)).to(param.device)
        for chunk in run.chunks(self.chunk_numel):
            here, count = run.within(chunk), chunk.stop - chunk.start
            planes = verdict.planes[:, here.start // 64 : words_for(here.stop)]
            bits = [unpack_bits(plane, count) for plane in planes]
            counts = verdict.counts[row_of(run, chunk, param.device)]
            if rule.step_rule.aggregation == "majority":
                nonzero = counts > 0
                if len(bits) == 2:
                    nonzero &= bits[1]
                offset = torch.where(nonzero, 2 - 2 * bits[0].to(torch.int32), 1)
            else:
                negative = sum(bit.to(torch.int32) << place for place, bit in enumerate(bits))
                offset = rule.step_rule.world_size + counts - 2 * negative
            self.move(flat[chunk], moves[offset], chunk.start, rule)

    def advanced(self, grad: Tensor, exp_avg: Tensor, start: int, rule: TensorRule) -> Tensor:
        """Returns a chunk's direction and advances its momentum in place.

        Args:
            grad: Vector.
            exp_avg: Vector, changed in place.
            start: Where in the parameter they begin.
            rule: The constants.
        """
        dtype = compute_dtype(grad.dtype)
        new, old = grad.to(dtype), exp_avg.to(dtype)
        scratch, direction, following = (torch.empty_like(new) for _ in range(3))
        interpolate(old, new, rule.betas[0], out=direction, scratch=scratch)
        interpolate(old, new, rule.betas[1], out=following, scratch=scratch)
        saturate(following, exp_avg.dtype)
        store(exp_avg, following, start, rule, momentum_stream(rule.step_rule.rank))
        return direction

    def foreseen(self, grad: Tensor, exp_avg: Tensor, rule: TensorRule, scale: float) -> Tensor:
        """Returns a chunk's direction for the gradient times `scale`, and changes nothing."""
        dtype = compute_dtype(grad.dtype)
        new, old = grad.to(dtype, copy=True).mul_(scale), exp_avg.to(dtype)
        direction = torch.empty_like(new)
        return interpolate(old, new, rule.betas[0], out=direction, scratch=torch.empty_like(new))

    def move(self, param: Tensor, move: Tensor, start: int, rule: TensorRule) -> None:
        """Applies decay and a move to a chunk of a parameter, in place."""
        value = param.to(move.dtype, copy=True).mul_(rule.decay).sub_(move)
        store(param, value, start, rule, PARAMETER_STREAM)


def _magnitude(grad: Tensor) -> Tensor:
    flat = grad.contiguous().view(-1)
    some = flat[:: -(-flat.numel() // PROBED) or 1].to(torch.float64)
    return some.abs().add_(some, alpha=0.5).sum()


def _hand_back(flat: Tensor, param: Tensor) -> None:
    """Copies the result to a parameter that is not contiguous."""
    if not param.is_contiguous():
        param.copy_(flat.view(param.shape))


def store(target: Tensor, value: Tensor, start: int, rule: TensorRule, stream: int) -> None:
    """Writes a chunk that begins at element `start`, rounding stochastically below float32."""
    if target.dtype in (torch.float32, torch.float64) or not rule.step_rule.stochastic_rounding:
        target.copy_(value)
        return
    step = rule.step_rule
    key = rounding_key(step.seed, step.step, rule.index, stream, start >> 32)
    low = start & 0xFFFFFFFF
    # To int32 through int64: the low 32 bits, whatever their sign.
    counter = torch.arange(low, low + value.numel(), device=value.device).to(torch.int32)
    bits = random_bits(
        counter, key, out=torch.empty_like(counter), scratch=torch.empty_like(counter)
    )
    target.copy_(round_stochastically(value.to(torch.float32), bits, target.dtype))
