"""Checks of the parameters and gradients that a user passes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from hf_dlion.options.parts import TWO_LINES, check_placed_alike, check_placement, is_sharded

FLOATING = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def holds_numbers(value: object) -> TypeGuard[Tensor]:
    """Returns whether a value is a dense floating tensor that has values."""
    return (
        isinstance(value, Tensor)
        and value.dtype in FLOATING
        and value.layout == torch.strided
        and not value.is_meta
    )


def check_trainable(param: Tensor) -> None:
    """Checks that a parameter is one that DistributedLion can move.

    Raises:
        TypeError: If its dtype is not floating, or it is not dense.
        NotImplementedError: If it is sharded otherwise than FSDP2 does inside a replica.
    """
    check_placement(param)
    sharded = {
        "FSDP1": getattr(param, "_is_flat_param", False) or hasattr(param, "_fsdp_flattened"),
        "DeepSpeed ZeRO-3": hasattr(param, "ds_id"),
    }
    for what, found in sharded.items():
        if found:
            raise NotImplementedError(
                f"DistributedLion does not support sharded parameters of {what}, only of FSDP2 "
                f"inside a replica: {TWO_LINES}"
            )
    if param.layout != torch.strided:
        raise TypeError(f"DistributedLion takes dense parameters, got layout {param.layout}")
    if param.requires_grad and not is_sharded(param) and _is_of_others(param):
        raise TypeError(
            f"DistributedLion trains parameters that hold their own values, got one of "
            f"{type(param).__name__}: leave it out of the groups"
        )
    if param.dtype not in FLOATING:
        allowed = ", ".join(map(str, FLOATING))
        raise TypeError(
            f"DistributedLion takes parameters of {allowed}, got {param.dtype}; leave quantised "
            f"and complex ones out of the groups"
        )


def check_distinct(params: Sequence[Tensor]) -> None:
    """Checks that no parameter is there twice: it would vote, and move, twice in every step.

    Raises:
        ValueError: If one is; torch itself only warns.
    """
    seen: dict[int, int] = {}
    for position, param in enumerate(params):
        first = seen.setdefault(id(param), position)
        if first != position:
            raise ValueError(
                f"parameters {first} and {position} of the group are one and the same: pass each "
                f"once, as model.named_parameters() does with tied weights"
            )


def settle_gradient(param: Tensor) -> None:
    """Makes a parameter's gradient, if it has one, what codecs can read: values in its memory.

    Its strides may be any; its dtype may be another one that is computed alike (`grad_dtype`). Of
    a collective that is under way its result is awaited, and a negation that torch has put off is
    made up for.

    Raises:
        TypeError: If it is sparse, of a dtype that is not computed as the parameter's is, or made
            of other tensors.
        RuntimeError: If it is on the meta device, or of another shape, device or placement.
    """
    check_placed_alike(param)
    grad = param.grad
    if grad is None:
        return
    if isinstance(grad, AsyncCollectiveTensor):
        param.grad = grad = grad.wait()
    if grad.is_neg():
        param.grad = grad = grad.resolve_neg()
    if grad._is_zerotensor():
        param.grad = grad = torch.zeros(grad.shape, dtype=grad.dtype, device=grad.device)
    if _is_of_others(grad):
        raise TypeError(
            f"DistributedLion takes gradients that hold their own values, got one of "
            f"{type(grad).__name__}: set the parameter's `grad` to a plain tensor"
        )
    if grad.is_meta:
        raise RuntimeError(
            "DistributedLion got a gradient on the meta device, which holds no values: load the "
            "model's weights (or model.to_empty(...)) before the optimizer is made"
        )
    if grad.layout != torch.strided:
        raise TypeError(
            "DistributedLion takes no sparse gradients: build the embedding with sparse=False; "
            "rows without a gradient abstain anyway"
        )
    # Codecs go by the parameter's shape, on its device.
    if grad.shape != param.shape or grad.device != param.device:
        raise RuntimeError(
            f"a gradient of shape {tuple(grad.shape)} on {grad.device} does not fit its parameter "
            f"of shape {tuple(param.shape)} on {param.device}: after a change of param.data call "
            f"zero_grad() and run backward again"
        )
    if grad.dtype != param.dtype and (
        grad.dtype not in FLOATING or torch.float64 in (grad.dtype, param.dtype)
    ):
        raise TypeError(
            f"a gradient of {grad.dtype} does not fit its parameter of {param.dtype}: float64 goes "
            f"with float64 alone, narrower floating dtypes with one another; after a change of "
            f"param.data call zero_grad() and run backward again"
        )


def gradient_dtype(param: Tensor) -> torch.dtype:
    """Returns the dtype that autograd gives a parameter's gradient, the same on all ranks."""
    # Of newer torch; where it is None, the loop may set gradients of any.
    dtype: torch.dtype | None = getattr(getattr(param, "whole", param), "grad_dtype", None)
    return dtype or param.dtype


def no_gradient(param: Tensor) -> Tensor:
    """Returns the gradient of a parameter that others have and this rank has not: zeros."""
    return torch.zeros_like(param, dtype=gradient_dtype(param))


def _is_of_others(tensor: Tensor) -> bool:
    """Returns whether a tensor's values are those of other tensors, and its own memory is none."""
    return is_traceable_wrapper_subclass(tensor)
