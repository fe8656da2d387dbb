"""The codec in plain torch operations, for any device, in chunks that bound its temporaries."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hf_dlion.codec.bits import expand_rows, pack_bits, unpack_bits
from hf_dlion.codec.count import CountingCodec
from hf_dlion.codec.layout import MessageLayout, Run, words_for
from hf_dlion.codec.levels import encode_levels, row_of
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
from hf_dlion.codec.rule import TensorRule, Verdict

# Elements per chunk: a power of two, so that no chunk crosses element 2**32. A chunk's temporaries
# take about 50 bytes per element.
CHUNK = 1 << 21


@functools.lru_cache(maxsize=4096)
def whole_run(shape: torch.Size) -> Run:
    """Returns the stretch that is one whole parameter of `shape`."""
    layout = MessageLayout.of([(0, shape)])
    return layout.shard(0, layout.words).runs[0]


class EagerCodec(CountingCodec):
    """Implements `hf_dlion.codec.Codec` without buffers of its own."""

    def encode(
        self,
        grad: Tensor,
        exp_avg: Tensor,
        words: Tensor,
        active: Tensor,
        rule: TensorRule,
        run: Run | None = None,
    ) -> None:
        """See `Codec.encode`."""
        self._encode(grad, exp_avg, words, active, rule, run=run)

    def preview(
        self,
        grad: Tensor,
        exp_avg: Tensor,
        words: Tensor,
        active: Tensor,
        rule: TensorRule,
        scale: float,
        run: Run | None = None,
    ) -> bool:
        """See `Codec.preview`."""
        self._encode(grad, exp_avg, words, active, rule, scale, run)
        return False

    def advance(
        self, grad: Tensor, exp_avg: Tensor, rule: TensorRule, run: Run | None = None
    ) -> None:
        """See `Codec.advance`."""
        if grad.numel() == 0:
            return
        run = run or whole_run(grad.shape)
        new, old = grad.contiguous().view(-1), exp_avg.view(-1)
        for chunk in run.chunks(CHUNK):
            here = run.within(chunk)
            _advance(new[here], old[here], chunk.start, rule)

    @staticmethod
    def _encode(
        grad: Tensor,
        exp_avg: Tensor,
        words: Tensor,
        active: Tensor,
        rule: TensorRule,
        scale: float | None = None,
        run: Run | None = None,
    ) -> None:
        """Encodes; with a `scale`, previews."""
        if grad.numel() == 0:
            return
        step = rule.step_rule
        run = run or whole_run(grad.shape)
        new, old = grad.contiguous().view(-1), exp_avg.view(-1)

        def foresee(chunk: slice) -> Tensor:
            here = run.within(chunk)
            return _foreseen(new[here], old[here], rule, 1.0 if scale is None else scale)

        def direct(chunk: slice) -> Tensor:
            here = run.within(chunk)
            if scale is None:
                return _advance(new[here], old[here], chunk.start, rule)
            return _foreseen(new[here], old[here], rule, scale)

        if step.bits > 1:
            encode_levels(grad, words, active, rule, run, CHUNK, foresee, direct)
            return
        votes = torch.zeros(run.rows, dtype=torch.uint8, device=grad.device)
        for chunk in run.chunks(CHUNK):
            here = run.within(chunk)
            direction = direct(chunk)
            zero = direction == 0
            votes.scatter_reduce_(0, row_of(run, chunk, grad.device), (~zero).byte(), "amax")
            part = words[here.start // 64 : words_for(here.stop)]
            pack_bits(direction < 0, part)
            part |= pack_bits(zero) & step.zero_word
        active.copy_(votes)
        kept = torch.empty_like(words)
        expand_rows(active, run, kept)
        words &= kept

    def apply(self, param: Tensor, verdict: Verdict, rule: TensorRule) -> None:
        """See `Codec.apply`."""
        if param.numel() == 0:
            return
        run = whole_run(param.shape)
        moves = rule.moves(compute_dtype(param.dtype)).to(param.device)
        flat = param.contiguous().view(-1)
        for chunk in run.chunks(CHUNK):
            count = chunk.stop - chunk.start
            planes = verdict.planes[:, chunk.start // 64 : words_for(chunk.stop)]
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
            _move(flat[chunk], moves[offset], chunk.start, rule)
        if not param.is_contiguous():
            param.copy_(flat.view(param.shape))

    def step_alone(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        rule: TensorRule,
        run: Run | None = None,
    ) -> None:
        """See `Codec.step_alone`."""
        if param.numel() == 0:
            return
        run = run or whole_run(param.shape)
        new, old = grad.contiguous().view(-1), exp_avg.view(-1)
        flat = param.contiguous().view(-1)
        for chunk in run.chunks(CHUNK):
            here = run.within(chunk)
            direction = _advance(new[here], old[here], chunk.start, rule)
            _move(flat[here], direction.sign_().mul_(rule.lr), chunk.start, rule)
        if not param.is_contiguous():
            param.copy_(flat.view(param.shape))


def _advance(grad: Tensor, exp_avg: Tensor, start: int, rule: TensorRule) -> Tensor:
    """Returns a chunk's direction and advances its momentum in place."""
    dtype = compute_dtype(grad.dtype)
    new, old = grad.to(dtype), exp_avg.to(dtype)
    scratch, direction, following = (torch.empty_like(new) for _ in range(3))
    interpolate(old, new, rule.betas[0], out=direction, scratch=scratch)
    interpolate(old, new, rule.betas[1], out=following, scratch=scratch)
    saturate(following, exp_avg.dtype)
    store(exp_avg, following, start, rule, momentum_stream(rule.step_rule.rank))
    return direction


def _foreseen(grad: Tensor, exp_avg: Tensor, rule: TensorRule, scale: float) -> Tensor:
    """Returns a chunk's direction for the gradient times `scale`."""
    dtype = compute_dtype(grad.dtype)
    new, old = grad.to(dtype, copy=True).mul_(scale), exp_avg.to(dtype)
    direction = torch.empty_like(new)
    return interpolate(old, new, rule.betas[0], out=direction, scratch=torch.empty_like(new))


def _move(param: Tensor, move: Tensor, start: int, rule: TensorRule) -> None:
    """Applies decay and a move to a chunk of a parameter."""
    value = param.to(move.dtype, copy=True).mul_(rule.decay).sub_(move)
    store(param, value, start, rule, PARAMETER_STREAM)


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
