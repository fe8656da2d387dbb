"""What a rank's own work costs on a GPU that is not here: computed from published limits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hf_dlion.tools.plan.machine import Machine
from hf_dlion.tools.plan.model import Workload

# The share of its peak at which a GPU trains: 38 to 43 % for Llama 3 405B on H100s (arXiv
# 2407.21783, table 4).
MFU = 0.4
# Tokens of a sequence, where none is given.
SEQUENCE = 2048


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Published limits.

    Attributes:
        name: For people, after "an".
        flops: Per second, dense products of bfloat16 summed in float32.
        bytes_per_s: Of its memory.
        memory_bytes: How large that is.
        source: Where these are published.
    """

    name: str
    flops: float
    bytes_per_s: float
    memory_bytes: float
    source: str


GPUS = {
    # Half of the 1,979 TFLOPS with sparsity.
    "h100": Gpu(
        name="H100 SXM", flops=989.4e12, bytes_per_s=3350e9, memory_bytes=80e9,
        source="https://www.nvidia.com/en-us/data-center/h100/",
    ),
    "a100": Gpu(
        name="A100 80GB SXM", flops=312e12, bytes_per_s=2039e9, memory_bytes=80e9,
        source="https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/"
        "nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf",
    ),
    "rtx4090": Gpu(
        name="RTX 4090", flops=165.2e12, bytes_per_s=1008e9, memory_bytes=24e9,
        source="https://images.nvidia.com/aem-dam/Solutions/geforce/ada/"
        "nvidia-ada-gpu-architecture.pdf",
    ),
}  # fmt: skip


def compute_s(gpu: Gpu, work: Workload, tokens: int, mfu: float) -> float:
    """Returns the seconds of forward and backward.

    Per token 2 FLOPs for every parameter in forward, and in backward 2 for every parameter and 2
    for every trained one (Kaplan et al., arXiv 2001.08361, 2.1).

    Args:
        gpu: Where.
        work: What.
        tokens: Of a rank, per step.
        mfu: Share of the GPU's peak.
    """
    return (4 * work.parameters + 2 * work.trainable) * tokens / (mfu * gpu.flops)


def machine_of(gpu: Gpu, dtype: torch.dtype, bits: int) -> Machine:
    """Returns the constants of a GPU: bytes that must be read and written, at its full bandwidth.

    Args:
        gpu: Which.
        dtype: Of parameters and gradients.
        bits: Of a vote.
    """
    size, vote = dtype.itemsize, bits / 8
    moved = {
        "adamw_ns": 7 * size,  # reads parameter, gradient and two momenta, writes all but one
        "encode_ns": 3 * size + vote,  # gradient, momentum, its new value and the vote
        "count_ns": vote,  # the verdict; and per rank its votes:
        "count_vote_ns": vote,
        "apply_ns": 2 * size + vote,
        "copy_ns": 2 * size,
        "cast_ns": (size + 2) + (2 + 2) + (2 + size),  # to bfloat16, divided, and back
        "power_ns": 11 * size,  # error added, copy, two products, decompression, new error
        # float32 as in `machine._public`, votes in int64; sorting them in torch.mode is left out.
        "public_ns": 130,
        "public_vote_ns": 36,
    }
    ns = {name: 1e9 * count / gpu.bytes_per_s for name, count in moved.items()}
    source = (
        f"computed, not measured, from the bytes moved at the full {gpu.bytes_per_s / 1e9:,.0f} "
        f"GB/s of an {gpu.name}"
    )
    return Machine(**ns, source=source)


def memory_note(gpu: Gpu, work: Workload, dtype: torch.dtype, shards: int = 1) -> str:
    """Returns a sentence if the memory cannot hold the training, else "".

    Args:
        gpu: Of one rank.
        work: What is trained.
        dtype: Of parameters, gradients and momenta.
        shards: Ranks that share it out; 1 of DDP, which has all of it on every rank.
    """
    adamw, lion = (
        dtype.itemsize * (work.parameters + count * work.trainable) / shards for count in (3, 2)
    )
    if adamw <= gpu.memory_bytes:
        return ""
    return (
        f"memory: weights, gradients and momenta take {adamw / 1e9:,.0f} GB with AdamW, "
        f"{lion / 1e9:,.0f} GB with DistributedLion, on every rank, and an {gpu.name} has "
        f"{gpu.memory_bytes / 1e9:.0f} GB"
    )
