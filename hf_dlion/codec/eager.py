"""The codec in plain torch operations, for any device: the whole tensor at once."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hf_dlion.codec.bits import expand_rows, pack_bits, unpack_bits
from hf_dlion.layout import MessageLayout, Run
from hf_dlion.lion import (
    PARAMETER_STREAM,
    alternating_word,
    compute_dtype,
    interpolate,
    momentum_stream,
    random_bits,
    round_stochastically,
    rounding_key,
    saturate,
    zero_phase,
)
from hf_dlion.verdict import TensorRule, Verdict


@functools.lru_cache(maxsize=4096)
def whole_run(shape: torch.Size) -> Run:
    """Returns the stretch that is one whole parameter of `shape`."""
    layout = MessageLayout.of([(0, shape)])
    return layout.shard(0, layout.words).runs[0]


def store(target: Tensor, value: Tensor, rule: TensorRule, stream: int) -> None:
    """Writes `value` into `target`, rounding stochastically below float32 (design S1, S7).

    Args:
        target: Shape (n,), contiguous, any floating dtype.
        value: Shape (n,), float32 or float64.
        rule: Gives step, index, seed and whether to round stochastically.
        stream: `PARAMETER_STREAM` or `momentum_stream(rank)`.
    """
    if target.dtype in (torch.float32, torch.float64) or not rule.step_rule.stochastic_rounding:
        target.copy_(value)
        return
    step_rule = rule.step_rule
    value = value.to(torch.float32)
    for high in range(-(-target.numel() // (1 << 32))):
        part = slice(high << 32, min(target.numel(), (high + 1) << 32))
        counter = torch.arange(part.stop - part.start, device=target.device).to(torch.int32)
        key = rounding_key(step_rule.seed, step_rule.step, rule.index, stream, high)
        bits = random_bits(
            counter, key, out=torch.empty_like(counter), scratch=torch.empty_like(counter)
        )
        target[part].copy_(round_stochastically(value[part], bits, target.dtype))


class EagerCodec:
    """Implements `hf_dlion.codec.Codec` without chunks or buffers of its own."""

    def encode(
        self, grad: Tensor, exp_avg: Tensor, words: Tensor, active: Tensor, rule: TensorRule
    ) -> None:
        """See `Codec.encode`."""
        if grad.numel() == 0:
            return
        direction = self._advance(grad, exp_avg, rule)
        zero = direction == 0
        run = whole_run(grad.shape)
        torch.any(~zero.view(run.rows, run.row_numel), dim=1, out=active)
        pack_bits(direction < 0, words)
        step = rule.step_rule
        fill = alternating_word(zero_phase(step.step, step.rank, step.world_size))
        words |= pack_bits(zero) & fill
        kept = torch.empty_like(words)
        expand_rows(active, run, kept)
        words &= kept

    def apply(self, param: Tensor, verdict: Verdict, rule: TensorRule) -> None:
        """See `Codec.apply`."""
        if param.numel() == 0:
            return
        bits = [unpack_bits(plane, param.numel()) for plane in verdict.planes]
        counts = verdict.counts.repeat_interleave(whole_run(param.shape).row_numel)
        if rule.step_rule.aggregation == "majority":
            nonzero = counts > 0
            if len(bits) == 2:
                nonzero &= bits[1]
            offset = torch.where(nonzero, 2 - 2 * bits[0].to(torch.int32), 1)
        else:
            negative = sum(bit.to(torch.int32) << place for place, bit in enumerate(bits))
            offset = rule.step_rule.world_size + counts - 2 * negative
        moves = rule.moves(compute_dtype(param.dtype)).to(param.device)
        self._move(param, moves[offset], rule)

    def step_alone(self, param: Tensor, grad: Tensor, exp_avg: Tensor, rule: TensorRule) -> None:
        """See `Codec.step_alone`."""
        if param.numel() == 0:
            return
        direction = self._advance(grad, exp_avg, rule)
        lr = torch.tensor(rule.lr, dtype=direction.dtype).item()
        self._move(param, direction.sign_().mul_(lr), rule)

    def _advance(self, grad: Tensor, exp_avg: Tensor, rule: TensorRule) -> Tensor:
        """Returns the direction, shape (numel,), and advances the momentum in place."""
        dtype = compute_dtype(grad.dtype)
        new = grad.contiguous().view(-1).to(dtype)
        old = exp_avg.view(-1).to(dtype)
        scratch = torch.empty_like(new)
        direction = interpolate(old, new, rule.betas[0], out=torch.empty_like(new), scratch=scratch)
        following = interpolate(old, new, rule.betas[1], out=torch.empty_like(new), scratch=scratch)
        saturate(following, exp_avg.dtype)
        store(exp_avg.view(-1), following, rule, momentum_stream(rule.step_rule.rank))
        return direction

    def _move(self, param: Tensor, moves: Tensor, rule: TensorRule) -> None:
        """Applies decay and moves, shape (numel,), to the parameter in place."""
        flat = param.contiguous().view(-1)
        value = flat.to(moves.dtype, copy=True).mul_(rule.decay).sub_(moves)
        store(flat, value, rule, PARAMETER_STREAM)
        if not param.is_contiguous():
            param.copy_(flat.view(param.shape))
