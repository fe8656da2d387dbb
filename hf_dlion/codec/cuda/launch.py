"""The Triton kernels: whether a device can have them, and their launching.

Nothing here waits for the device. `HF_DLION_TRITON=0` in the environment leaves Triton alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hf_dlion.codec.cuda import tables
from hf_dlion.codec.lion import signed32, step_key
from hf_dlion.codec.rule import StepRule

logger = logging.getLogger(__name__)

ENVIRONMENT = "HF_DLION_TRITON"
WARPS = 4
_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)
NAMES = ("kernels", "count", "levels", "tally", "gradients", "edges")


class Kernels(NamedTuple):
    """The modules that hold Triton code: the common parts, and those of `NAMES`, in that order."""

    triton: Any
    codec: Any
    count: Any
    levels: Any
    tally: Any
    gradients: Any
    edges: Any


@functools.cache
def kernels(device: torch.device) -> Kernels | None:
    """Returns the Triton kernels, or None, and says so once, where a device cannot have them."""
    if os.environ.get(ENVIRONMENT) == "0":
        return None
    names = ("triton", *(f"triton_{name}" for name in NAMES))
    try:
        found = Kernels(*(importlib.import_module(f"hf_dlion.codec.cuda.{name}") for name in names))
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
        run(found.levels.clear_levels, 1, nothing, nothing.int(), nothing.byte(), BITS=4)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Returns a context in which kernels are launched on `device`; Triton takes the current one."""
    # In the interpreter tensors are on the CPU.
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def run(kernel: Any, blocks: int, *args: object, **constants: object) -> None:
    """Launches a kernel on `blocks` blocks, on the current device and stream."""
    # Without fusion every product is rounded before it is added.
    options = {"BLOCK": tables.BLOCK, "num_warps": WARPS, "enable_fp_fusion": False} | constants
    if is_rehearsal():
        kernel.warmup(*args, grid=(blocks,), **options)
    else:
        kernel[(blocks,)](*args, **options)


@contextlib.contextmanager
def rehearsing() -> Iterator[None]:
    """Compiles the kernels that are run inside, and launches none."""
    token = _rehearsing.set(True)
    try:
        yield
    finally:
        _rehearsing.reset(token)


def is_rehearsal() -> bool:
    """Returns whether kernels are compiled only."""
    return _rehearsing.get()


def written(tensors: Sequence[Tensor]) -> None:
    """Tells autograd, which does not see what kernels write."""
    if not is_rehearsal():
        increment_version(list(tensors))


def key_of(step: StepRule) -> int:
    """Returns the step's key, as kernels take it."""
    # As int32, because Triton would compile once for small numbers and once for others.
    return signed32(step_key(step.seed, step.step))
