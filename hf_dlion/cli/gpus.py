"""The GPUs for which a plan can be computed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU's published limits."""

    name: str  # After "an".
    flops: float  # Dense bfloat16 operations per second.
    bytes_per_s: float
    memory_bytes: float


# From NVIDIA's data sheets: without sparsity, and with sums in float32.
GPUS = {
    "h200": Gpu(name="H200", flops=989.4e12, bytes_per_s=4800e9, memory_bytes=141e9),
    "h100": Gpu(name="H100", flops=989.4e12, bytes_per_s=3350e9, memory_bytes=80e9),
    "a100": Gpu(name="A100", flops=312e12, bytes_per_s=2039e9, memory_bytes=80e9),
    "l40s": Gpu(name="L40S", flops=362.1e12, bytes_per_s=864e9, memory_bytes=48e9),
    "rtx5090": Gpu(name="RTX 5090", flops=209.5e12, bytes_per_s=1792e9, memory_bytes=32e9),
    "rtx4090": Gpu(name="RTX 4090", flops=165.2e12, bytes_per_s=1008e9, memory_bytes=24e9),
    "rtx3090": Gpu(name="RTX 3090", flops=71.2e12, bytes_per_s=936e9, memory_bytes=24e9),
}
