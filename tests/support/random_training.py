"""Parameters with random values, steps with random gradients."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from tests.support.oracle import same_bits

SIXTEEN_BITS = [torch.bfloat16, torch.float16]
DTYPES = [torch.float32, torch.float64, *SIXTEEN_BITS]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Returns normal random numbers that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_param(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    """Returns a parameter of normal random numbers."""
    return nn.Parameter(normal(*shape, seed=seed, dtype=dtype))


def mixed_params() -> list[nn.Parameter]:
    """Returns a parameter of every dtype, and two of float32."""
    dtypes = (*DTYPES, torch.float32)
    return [random_param(20, 3, seed=k, dtype=dtype) for k, dtype in enumerate(dtypes)]


def backward(params: Sequence[nn.Parameter], seed: int) -> list[Tensor | None]:
    """Gives each parameter a fresh random gradient, through autograd; returns the gradients."""
    for k, p in enumerate(params):
        p.grad = None
        if p.requires_grad:
            (p * normal(*p.shape, seed=1000 * seed + k, dtype=p.dtype)).sum().backward()
    return [None if p.grad is None else p.grad.clone() for p in params]


def take_steps(
    optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter], seeds: range
) -> None:
    """Takes a step with random gradients for each seed."""
    for seed in seeds:
        backward(params, seed)
        optimizer.step()


def all_same_bits(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    """Returns whether two lists of tensors hold the same bytes."""
    return all(same_bits(p, q) for p, q in zip(a, b, strict=True))


@contextlib.contextmanager
def ignored_warnings() -> Iterator[None]:
    """Ignores a warning that a process gives once, so in whichever test comes first."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
