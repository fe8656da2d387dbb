"""Tensors to packed votes, all ranks' votes to a verdict, and a verdict to moved tensors.

In come gradients, momenta and the step's constants (`rule`), out go words of votes (`layout` says
where each lies), counted verdicts and changed tensors. `codec` is the protocol, `ties` decides ties
and zeros, `lion` is the arithmetic. `reference` is the definition, in NumPy; a backend is a file
or a folder that equals it bit for bit: `eager` is plain torch for every device, `cpu` works in
chunks that stay in cache, `native` does the same in C, `cuda` launches Triton kernels on many
tensors at once. `codec_for` alone chooses among them.
"""

from __future__ import annotations

import torch

from hf_dlion.codec.codec import AdvanceJob, AloneJob, ApplyJob, Codec, EncodeJob

__all__ = ["AdvanceJob", "AloneJob", "ApplyJob", "Codec", "EncodeJob", "codec_for"]


def codec_for(device: torch.device) -> Codec:
    """Returns the codec of tensors on `device`: the one place that chooses a backend."""
    if device.type == "cpu":
        from hf_dlion.codec.cpu import CpuCodec
        from hf_dlion.codec.native.codec import NativeCodec
        from hf_dlion.codec.native.library import library

        compiled = library()
        return CpuCodec() if compiled is None else NativeCodec(compiled)
    if device.type == "cuda":
        from hf_dlion.codec.cuda.codec import TritonCodec
        from hf_dlion.codec.cuda.launch import kernels

        found = kernels(device)
        if found is not None:
            return TritonCodec(found)
    from hf_dlion.codec.eager import EagerCodec

    return EagerCodec()
