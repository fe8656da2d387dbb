"""The codec for CUDA: a Triton kernel over many tensors at once, few launches per message.

Nothing here waits for the device. `HF_DLION_TRITON=0` in the environment leaves Triton alone.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_dlion.codec import AdvanceJob, AloneJob, ApplyJob, Codec, EncodeJob, tables
from hf_dlion.codec.eager import EagerCodec
from hf_dlion.codec.tables import Launch, entry_of, launches
from hf_dlion.layout import Run
from hf_dlion.lion import momentum_stream, signed32, step_key, zero_phase
from hf_dlion.verdict import StepRule, TensorRule, Verdict

logger = logging.getLogger(__name__)

ENVIRONMENT = "HF_DLION_TRITON"
WARPS = 4


class Kernels(NamedTuple):
    """The modules that hold Triton code: the common parts, the codec's kernels, the counting."""

    triton: Any
    codec: Any
    count: Any


@functools.cache
def kernels(device: torch.device) -> Kernels | None:
    """Returns the Triton kernels, or None, and says so once, where a device cannot have them."""
    if os.environ.get(ENVIRONMENT) == "0":
        return None
    names = ("triton", "triton_kernels", "triton_count")
    try:
        found = Kernels(*(importlib.import_module(f"hf_dlion.codec.{name}") for name in names))
        if device.type == "cuda" and torch.cuda.is_available():
            _try_out(found, device)
    # Triton needs a C compiler and a driver that fits; what it raises without them is its own.
    except Exception as error:
        logger.warning(
            "the codec's CUDA kernels cannot be used, and CUDA tensors are encoded and applied in "
            "plain torch, several times slower (%s: %s): install triton, which comes with torch "
            "for CUDA, and a C compiler, or set %s=0 to be content with it",
            type(error).__name__,
            error,
            ENVIRONMENT,
        )
        return None
    return found


def _try_out(found: Kernels, device: torch.device) -> None:
    """Compiles and launches a kernel on nothing: this is where Triton fails, if it does."""
    with on_device(device):
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        run(found.codec.clear, 1, nothing, nothing.int(), nothing.byte())


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which kernels are launched on `device`; Triton takes the current one."""
    # In the interpreter tensors are on the CPU.
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def run(kernel: Any, blocks: int, *args: object, **constants: object) -> None:
    """Launches a kernel on `blocks` blocks, on the current device and stream."""
    # Without fusion every product is rounded before it is added.
    options = {"BLOCK": tables.BLOCK, "num_warps": WARPS, "enable_fp_fusion": False}
    kernel[(blocks,)](*args, **(options | constants))


class TritonCodec(Codec):
    """Implements `hf_dlion.codec.Codec` for CUDA tensors of every dtype that can be trained.

    Votes of more than one bit are encoded by `EagerCodec`; all else is the same for them.
    """

    def __init__(self, found: Kernels) -> None:
        """Takes the kernels."""
        self._kernels = found.codec
        self._language = found.triton.tl

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
        self.encode_all([EncodeJob(grad, exp_avg, words, active, rule, run)])

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
        return self.preview_all([EncodeJob(grad, exp_avg, words, active, rule, run)], scale)[0]

    def advance(
        self, grad: Tensor, exp_avg: Tensor, rule: TensorRule, run: Run | None = None
    ) -> None:
        """See `Codec.advance`."""
        self.advance_all([AdvanceJob(grad, exp_avg, rule, run)])

    def apply(self, param: Tensor, verdict: Verdict, rule: TensorRule) -> None:
        """See `Codec.apply`."""
        self.apply_all([ApplyJob(param, verdict, rule)])

    def step_alone(
        self,
        param: Tensor,
        grad: Tensor,
        exp_avg: Tensor,
        rule: TensorRule,
        run: Run | None = None,
    ) -> None:
        """See `Codec.step_alone`."""
        self.step_alone_all([AloneJob(param, grad, exp_avg, rule, run)])

    def encode_all(self, jobs: Sequence[EncodeJob]) -> None:
        """See `Codec.encode_all`."""
        self._vote(jobs, ADVANCE=True)

    def preview_all(self, jobs: Sequence[EncodeJob], scale: float) -> list[bool]:
        """See `Codec.preview_all`."""
        self._vote(jobs, scale, ADVANCE=False)
        # To know better the host would have to wait.
        return [False] * len(jobs)

    def _vote(self, jobs: Sequence[EncodeJob], scale: float = 1.0, *, ADVANCE: bool) -> None:
        jobs = [job for job in jobs if job.grad.numel()]
        if not jobs:
            return
        if jobs[0].rule.step_rule.bits > 1:
            if ADVANCE:
                EagerCodec().encode_all(jobs)
            else:
                EagerCodec().preview_all(jobs, scale)
            return
        # Copies, of gradients that need one, must live until the kernels are launched.
        grads = [job.grad.contiguous() for job in jobs]
        entries = [
            entry_of(
                job.rule,
                grad=grad,
                exp_avg=job.exp_avg.view(-1),
                words=job.words,
                rows=job.active,
                scale=scale,
                run=job.run,
            )
            for job, grad in zip(jobs, grads, strict=True)
        ]
        with on_device(grads[0].device):
            torch._foreach_zero_([job.active.view(torch.uint8) for job in jobs])
            for on in launches(entries, grads[0].device):
                zeros_in = torch.empty(on.blocks, dtype=torch.uint8, device=grads[0].device)
                flags = {"ADVANCE": ADVANCE, "VOTE": True, "SCALED": scale != 1.0}
                self._encode(on, zeros_in, jobs[0].rule.step_rule, flags)
                run(self._kernels.clear, on.blocks, on.jobs, on.job_of, zeros_in)

    def advance_all(self, jobs: Sequence[AdvanceJob]) -> None:
        """See `Codec.advance_all`."""
        jobs = [job for job in jobs if job.grad.numel()]
        if not jobs:
            return
        grads = [job.grad.contiguous() for job in jobs]
        entries = [
            entry_of(job.rule, grad=grad, exp_avg=job.exp_avg.view(-1), run=job.run)
            for job, grad in zip(jobs, grads, strict=True)
        ]
        with on_device(grads[0].device):
            for on in launches(entries, grads[0].device):
                flags = {"ADVANCE": True, "VOTE": False, "SCALED": False}
                self._encode(on, on.job_of, jobs[0].rule.step_rule, flags)

    def _encode(self, on: Launch, zeros_in: Tensor, step: StepRule, flags: dict[str, bool]) -> None:
        phase = zero_phase(step.step, step.rank, step.world_size) % 2
        run(
            self._kernels.encode, on.blocks, on.jobs, on.job_of, zeros_in,
            _key(step), momentum_stream(step.rank), phase, **self._types(on, step), **flags,
        )  # fmt: skip

    def apply_all(self, jobs: Sequence[ApplyJob]) -> None:
        """See `Codec.apply_all`."""
        jobs = [job for job in jobs if job.param.numel()]
        if not jobs:
            return
        step = jobs[0].rule.step_rule
        flats = [job.param.contiguous() for job in jobs]
        entries = [
            entry_of(job.rule, param=flat, words=job.verdict.planes, rows=job.verdict.counts)
            for job, flat in zip(jobs, flats, strict=True)
        ]
        with on_device(flats[0].device):
            for on in launches(entries, flats[0].device):
                run(
                    self._kernels.apply, on.blocks, on.jobs, on.job_of, _key(step),
                    step.world_size, **self._types(on, step), PLANES=step.planes,
                    AVERAGE=step.aggregation == "average",
                )  # fmt: skip
        _hand_back(flats, [job.param for job in jobs])

    def step_alone_all(self, jobs: Sequence[AloneJob]) -> None:
        """See `Codec.step_alone_all`."""
        jobs = [job for job in jobs if job.param.numel()]
        if not jobs:
            return
        step = jobs[0].rule.step_rule
        flats = [job.param.contiguous() for job in jobs]
        grads = [job.grad.contiguous() for job in jobs]
        entries = [
            entry_of(job.rule, param=flat, grad=grad, exp_avg=job.exp_avg.view(-1), run=job.run)
            for job, flat, grad in zip(jobs, flats, grads, strict=True)
        ]
        with on_device(flats[0].device):
            for on in launches(entries, flats[0].device):
                run(
                    self._kernels.step_alone, on.blocks, on.jobs, on.job_of, _key(step),
                    momentum_stream(step.rank), **self._types(on, step),
                )  # fmt: skip
        _hand_back(flats, [job.param for job in jobs])

    def _types(self, on: Launch, step: StepRule) -> dict[str, object]:
        """Returns what the compiler must know of the tensors."""
        # Triton's names are torch's.
        found: dict[str, object] = {
            name: getattr(self._language, str(dtype).removeprefix("torch."))
            for name, dtype in on.kind.dtypes
        }
        found["WIDE"] = self._language.float64 if on.kind.wide else self._language.float32
        return found | {"ALIGNED": on.kind.aligned, "STOCHASTIC": step.stochastic_rounding}


def _key(step: StepRule) -> int:
    # As int32, because Triton would compile once for small numbers and once for others.
    return signed32(step_key(step.seed, step.step))


def _hand_back(flats: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Copies the results to parameters that are not contiguous."""
    for flat, param in zip(flats, params, strict=True):
        if flat is not param:
            param.copy_(flat)
