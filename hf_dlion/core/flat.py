"""Parameters, gradients, and momenta as flat tensors in the memory order of the parameter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

# The dtypes of parameters, and those that are rounded stochastically.
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LOW_PRECISION = (torch.bfloat16, torch.float16)


def check_param(part: Tensor) -> None:
    """Refuses a parameter, given by this rank's part, that can't be voted on.

    Raises:
        TypeError: If it isn't a real float.
        NotImplementedError: If it has gaps in memory.
    """
    if part.dtype not in DTYPES:
        raise TypeError(
            f"parameters must be floats of 16, 32, or 64 bits (got {part.dtype}): "
            f"pass only those that train, without a quantized base"
        )
    flat_view(part)


def momentum_of(state: dict[str, Any], param: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns the momentum in a parameter's state, in the parameter's memory layout.

    It is created as zeros at the first call, and copied if its device, dtype, or strides differ.
    `dtype` is that of the momentum (default: the parameter's).

    Raises:
        RuntimeError: If it has another shape than the parameter.
    """
    if "exp_avg" not in state:
        state["exp_avg"] = torch.zeros_like(param, dtype=dtype)
    momentum: Tensor = state["exp_avg"]
    if momentum.shape != param.shape:
        raise RuntimeError(
            f"a momentum of shape {tuple(momentum.shape)} does not fit its parameter of shape "
            f"{tuple(param.shape)}: load the optimizer state of this model, or "
            f"make a new optimizer after a parameter was resized"
        )
    momentum = state["exp_avg"] = fitted(momentum, param, dtype or param.dtype)
    return momentum


def fitted(tensor: Tensor, param: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a tensor with a parameter's device and strides: a copy only if something differs."""
    if (tensor.device, tensor.dtype, tensor.stride()) == (param.device, dtype, param.stride()):
        return tensor
    return torch.empty_like(param, dtype=dtype).copy_(tensor)


def flat_view(tensor: Tensor) -> Tensor:
    """Returns a view of a tensor's elements in memory order, shape (numel,).

    Raises:
        NotImplementedError: If the elements have gaps between them or overlap in memory.
    """
    if tensor.is_contiguous():
        return tensor.detach().view(-1)
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        raise NotImplementedError(
            f"a parameter of shape {tuple(tensor.shape)} with strides {tensor.stride()} has gaps "
            f"in memory: pass parameters without gaps, such as torch.nn.Parameter(x.contiguous())"
        )
    return tensor.detach().as_strided((tensor.numel(),), (1,))


def flat_gradient(name: str, grad: Tensor, param: Tensor) -> Tensor:
    """Returns a gradient's elements in the memory order of its parameter, shape (numel,).

    The result is a view if the strides are equal, and a copy otherwise.

    Raises:
        NotImplementedError: If the gradient is sparse.
        RuntimeError: If the gradient has another shape than the parameter.
    """
    if grad.layout != torch.strided:
        raise NotImplementedError(
            f"the gradient of {name!r} must be dense (got {grad.layout}): use "
            f"nn.Embedding(sparse=False)"
        )
    if grad.shape != param.shape:
        raise RuntimeError(
            f"the gradient of {name!r} must have the shape of its parameter, {tuple(param.shape)} "
            f"(got {tuple(grad.shape)})"
        )
    if grad.stride() != param.stride():
        grad = torch.empty_like(param, dtype=grad.dtype).copy_(grad)
    return flat_view(grad)


def check_unscalable(grads: Sequence[Tensor]) -> None:
    """Refuses gradients that `unscale` can't unscale.

    Raises:
        ValueError: If one is float16.
    """
    if any(grad.dtype == torch.float16 for grad in grads):
        raise ValueError(
            "GradScaler scaled float16 gradients, which can't hold small numbers once they are "
            "unscaled: load the model with dtype=torch.float32 or torch.bfloat16"
        )


def unscale(grads: list[Tensor], scale: float) -> None:
    """Unscales gradients that GradScaler left scaled, in place."""
    if grads and scale != 1:
        torch._foreach_mul_(grads, 1.0 / scale)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor on a device; the host doesn't wait for what the device still does."""
    if tensor.device.type == "cpu" and device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def numbers(values: Sequence[Tensor]) -> list[Any]:
    """Returns 0-D tensors of one dtype as numbers; the host waits once if one device has them."""
    if not values:
        return []
    on_one_device = [value.to(values[0].device) for value in values]
    as_numbers: list[Any] = torch.stack(on_one_device).tolist()
    return as_numbers
