"""What is looked at in gradients beside votes, in a launch per kind; no wait for the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_dlion.codec.codec import PROBED, Magnitudes
from hf_dlion.codec.cuda.launch import Kernels, on_device, run, written
from hf_dlion.codec.cuda.tables import Entry, Kind, Launch, launches
from hf_dlion.codec.lion import compute_dtype


def all_finite(found: Kernels, grads: Sequence[Tensor], scale: Tensor | None) -> Tensor:
    """Checks gradients of one device, and divides them by a scale; see `Codec.all_finite`."""
    device = grads[0].device
    finite = torch.ones(1, dtype=torch.uint8, device=device)
    # In whatever order they lie in memory; those with gaps, or on top of one another, take longer.
    dense = [(grad, _in_memory(grad)) for grad in grads if grad.numel()]
    if scale is not None:
        scale = scale.detach().to(device, torch.float64).view(())
    with on_device(device):
        for on in launches([_entry(flat) for _, flat in dense if flat is not None], device):
            run(
                found.gradients.check, on.blocks, on.jobs, on.job_of,
                finite if scale is None else scale, finite,
                **_types(found, on), WIDE=_wide(found, on), ALIGNED=on.kind.aligned,
                SCALED=scale is not None,
            )  # fmt: skip
    for grad, flat in dense:
        if flat is None:
            if scale is not None:
                grad.mul_(scale.reciprocal())
            finite &= grad.isfinite().all().view(1)
    if scale is not None:
        written(grads)
    return finite.view(torch.bool).view(())


def magnitudes(found: Kernels, grads: Sequence[Tensor]) -> Magnitudes:
    """Looks at some elements of gradients of one device, not empty; see `Codec.magnitudes`."""
    device = grads[0].device
    # Copies must live until the kernels are launched.
    flats = [grad.contiguous() for grad in grads]
    entries = [_entry(flat) for flat in flats]
    told: Magnitudes = []
    with on_device(device):
        for on in launches(entries, device):
            places = [place for place, entry in enumerate(entries) if entry.kind == on.kind]
            sums = torch.empty(len(places), dtype=torch.float64, device=device)
            run(
                found.gradients.probe, len(places), on.jobs, sums, **_types(found, on),
                PROBED=PROBED,
            )  # fmt: skip
            told.append((places, sums))
    return told


def _entry(flat: Tensor) -> Entry:
    dtype = flat.dtype
    aligned = flat.data_ptr() % 16 == 0
    return Entry(
        kind=Kind((("GRAD", dtype),), compute_dtype(dtype) == torch.float64, aligned),
        tensors=(0, flat.data_ptr(), 0),
        words=0,
        rows=0,
        numel=flat.numel(),
    )


def _in_memory(grad: Tensor) -> Tensor | None:
    """Returns a gradient's elements in the order of memory, None where they are not neighbours."""
    expected = 1
    for size, stride in sorted(zip(grad.shape, grad.stride(), strict=True), key=lambda p: p[1]):
        if size != 1:
            if stride != expected:
                return None
            expected *= size
    return grad.detach().as_strided((grad.numel(),), (1,))


def _types(found: Kernels, on: Launch) -> dict[str, object]:
    """Returns Triton's name of the gradients' dtype, which is torch's."""
    name, dtype = on.kind.dtypes[0]
    return {name: getattr(found.triton.tl, str(dtype).removeprefix("torch."))}


def _wide(found: Kernels, on: Launch) -> object:
    return found.triton.tl.float64 if on.kind.wide else found.triton.tl.float32
