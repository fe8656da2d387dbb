"""The codec for CUDA: a Triton kernel over many tensors at once, few launches per message.

Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hf_dlion.codec.codec import (
    AdvanceJob,
    AloneJob,
    ApplyJob,
    Codec,
    EncodeJob,
    Magnitudes,
)
from hf_dlion.codec.cuda import gradients
from hf_dlion.codec.cuda.edges import TritonEdges
from hf_dlion.codec.cuda.launch import (
    Kernels,
    is_rehearsal,
    key_of,
    on_device,
    rehearsing,
    run,
    written,
)
from hf_dlion.codec.cuda.levels import encode_levels
from hf_dlion.codec.cuda.tables import Launch, entry_of, launches
from hf_dlion.codec.cuda.tally import TritonTally
from hf_dlion.codec.edges import Edges, Ends
from hf_dlion.codec.lion import momentum_stream
from hf_dlion.codec.rule import StepRule
from hf_dlion.codec.tally import Segments, Tally


class TritonCodec(Codec):
    """Implements `hf_dlion.codec.Codec` for CUDA tensors of every dtype that can be trained.

    Autograd does not see what kernels write, so it is told.
    """

    def __init__(self, found: Kernels) -> None:
        """Takes the kernels."""
        self._found = found
        self._kernels = found.codec
        self._levels = found.levels
        self._language = found.triton.tl

    def encode_all(self, jobs: Sequence[EncodeJob]) -> None:
        """See `Codec.encode_all`."""
        self._vote(jobs, ADVANCE=True)

    def preview_all(self, jobs: Sequence[EncodeJob], scale: float) -> list[bool]:
        """See `Codec.preview_all`."""
        self._vote(jobs, scale, ADVANCE=False)
        # To know whether they are finite the host would have to wait.
        return [False] * len(jobs)

    def _vote(self, jobs: Sequence[EncodeJob], scale: float = 1.0, *, ADVANCE: bool) -> None:
        """Makes votes, and advances momenta if ADVANCE."""
        jobs = [job for job in jobs if job.grad.numel()]
        if not jobs:
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
            for on in launches(entries, grads[0].device):
                run(self._found.gradients.prepare, on.blocks, on.jobs, on.job_of)
                zeros_in = torch.empty(on.blocks, dtype=torch.uint8, device=grads[0].device)
                flags = {"ADVANCE": ADVANCE, "SCALED": scale != 1.0}
                step = jobs[0].rule.step_rule
                if step.bits > 1:
                    of_kind = [j for j, e in zip(jobs, entries, strict=True) if e.kind == on.kind]
                    encode_levels(self._levels, on, of_kind, zeros_in, self._types(on, step), flags)
                    continue
                self._encode(on, zeros_in, step, {**flags, "VOTE": True})
                run(self._kernels.clear, on.blocks, on.jobs, on.job_of, zeros_in)
        if ADVANCE:
            written([job.exp_avg for job in jobs])

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
        written([job.exp_avg for job in jobs])

    def _encode(self, on: Launch, zeros_in: Tensor, step: StepRule, flags: dict[str, bool]) -> None:
        run(
            self._kernels.encode, on.blocks, on.jobs, on.constants, on.job_of, zeros_in,
            key_of(step), momentum_stream(step.rank), step.zero_phase,
            **self._types(on, step), **flags,
        )  # fmt: skip

    def apply_all(self, jobs: Sequence[ApplyJob]) -> None:
        """See `Codec.apply_all`."""
        jobs = [job for job in jobs if job.param.numel()]
        if not jobs:
            return
        step = jobs[0].rule.step_rule
        whole = {id(job.param): job.param for job in jobs}
        flats = {key: param.contiguous() for key, param in whole.items()}
        entries = []
        for param, verdict, rule, stretch in jobs:
            flat = flats[id(param)]
            if stretch is not None:
                flat = flat.view(-1)[stretch.start : stretch.stop]
            entries.append(
                entry_of(rule, param=flat, words=verdict.planes, rows=verdict.counts, run=stretch)
            )
        device = jobs[0].param.device
        with on_device(device):
            for on in launches(entries, device):
                run(
                    self._kernels.apply, on.blocks, on.jobs, on.constants, on.job_of, key_of(step),
                    step.world_size, **self._types(on, step), PLANES=step.planes,
                    AVERAGE=step.aggregation == "average",
                )  # fmt: skip
        _hand_back(list(flats.values()), list(whole.values()))

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
                    self._kernels.step_alone, on.blocks, on.jobs, on.constants, on.job_of,
                    key_of(step), momentum_stream(step.rank), **self._types(on, step),
                )  # fmt: skip
        written([job.exp_avg for job in jobs])
        _hand_back(flats, [job.param for job in jobs])

    def all_finite(self, grads: Sequence[Tensor], scale: Tensor | None = None) -> Tensor:
        """See `Codec.all_finite`."""
        return gradients.all_finite(self._found, grads, scale)

    def magnitudes(self, grads: Sequence[Tensor]) -> Magnitudes:
        """See `Codec.magnitudes`."""
        return gradients.magnitudes(self._found, grads)

    def rehearse(self, work: Callable[[], None]) -> None:
        """See `Codec.rehearse`."""
        with rehearsing():
            work()

    def tally(self, segments: Segments, device: torch.device) -> Tally:
        """See `Codec.tally`."""
        return TritonTally(self._found, segments, device)

    def edges(self, ends: Sequence[Ends], device: torch.device) -> Edges:
        """See `Codec.edges`."""
        return TritonEdges(self._found, ends, device)

    def _types(self, on: Launch, step: StepRule) -> dict[str, object]:
        """Returns what the compiler must know of the tensors."""
        # Triton's names are torch's.
        found: dict[str, object] = {
            name: getattr(self._language, str(dtype).removeprefix("torch."))
            for name, dtype in on.kind.dtypes
        }
        found["WIDE"] = self._language.float64 if on.kind.wide else self._language.float32
        return found | {"ALIGNED": on.kind.aligned, "STOCHASTIC": step.stochastic_rounding}


def _hand_back(flats: Sequence[Tensor], params: Sequence[Tensor]) -> None:
    """Copies the results to parameters that are not contiguous; tells autograd of the others."""
    written(flats)
    if is_rehearsal():
        return
    for flat, param in zip(flats, params, strict=True):
        if flat is not param:
            param.copy_(flat)
