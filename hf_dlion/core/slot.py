"""A trainable tensor with all that a step knows of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_dlion.core.codec import WORD
from hf_dlion.core.flat import LOW_PRECISION, fitted, flat_view

# What ranks compare of a trainable parameter: name, shape, dtype, strides, device type, and whether
# its gradient is averaged ("full") or voted on ("vote").
Signature = tuple[object, ...]

NO_TENSOR = torch.empty(0)


@dataclass(eq=False, slots=True)
class LocalState:
    """What a period of local steps keeps of a parameter, with its shape and strides.

    Attributes:
        anchor: Weights with which the period began, equal on all ranks.
        compensation: What the rounding of a 16-bit parameter leaves out, in its dtype: this rank
            trains p + c. None for 32 and 64 bits.
        used: Whether this rank had a finite gradient of the parameter in the period.
        decay: Product D of 1 - lr * weight_decay over the period.
        path: Sum of lr over the period, how far the steps can have moved an element.
        own: This rank's weights while the model holds the anchor (`common_weights`), else None.
    """

    anchor: Tensor
    compensation: Tensor | None
    used: bool = False
    decay: float = 1.0
    path: float = 0.0
    own: Tensor | None = None

    @classmethod
    def of(cls, part: Tensor) -> LocalState:
        """Returns the state of a rank's part of a parameter with which a period begins."""
        is_low = part.dtype in LOW_PRECISION
        return cls(part.clone(), torch.zeros_like(part) if is_low else None)

    def restore_anchor(self, part: Tensor) -> None:
        """Puts the anchor into the parameter, unless the model shows it."""
        if self.own is None and self.anchor.shape == part.shape:
            part.copy_(self.anchor)

    def show(self, part: Tensor) -> None:
        """Puts the anchor into the parameter, and keeps this rank's weights."""
        own = part.clone()
        self.restore_anchor(part)
        self.own = own

    def hide(self, part: Tensor) -> None:
        """Puts this rank's weights back, and moves them as what was written moved the anchor."""
        if (own := self.own) is None:
            return
        same = part == self.anchor
        wide = torch.promote_types(part.dtype, torch.float32)
        w = self.anchor.to(wide) - own
        if self.compensation is not None:
            w -= self.compensation
        y = part.to(wide) - w
        self.anchor.copy_(part)
        moved = y.to(part.dtype)
        if self.compensation is not None:
            left = (y - moved).to(part.dtype)
            self.compensation.copy_(torch.where(same, self.compensation, left))
        part.copy_(torch.where(same, own, moved))
        self.own = None

    def fit(self, name: str, part: Tensor) -> None:
        """Gives the tensors the parameter's device, dtype, and strides, which may have changed.

        Raises:
            RuntimeError: If the parameter has another shape.
        """
        if self.anchor.shape != part.shape:
            raise RuntimeError(
                f"{name!r} had shape {tuple(self.anchor.shape)} in the last local step, and has "
                f"{tuple(part.shape)} now: give it that shape again, or load the last checkpoint. "
                f"To resize it, call optimizer.exchange_now() on every rank first, and then make "
                f"a new optimizer"
            )
        self.anchor = fitted(self.anchor, part, part.dtype)
        if self.own is not None:
            self.own = fitted(self.own, part, part.dtype)
        if part.dtype not in LOW_PRECISION:
            self.compensation = None
        elif self.compensation is None:
            self.compensation = torch.zeros_like(part)
        else:
            self.compensation = fitted(self.compensation, part, part.dtype)


@dataclass(eq=False, slots=True)
class Slot:
    """A trainable tensor of this rank. Its tensors are flat, in memory order, and local parts.

    The layout depends on the attributes up to `name`, which are equal on all voters. The others are
    those of the step.

    Attributes:
        size: Number of elements.
        row_size: Elements per row, 0 if the tensor is one row.
        group: Index of the parameter group.
        full_precision: Whether its gradient is averaged instead of voted on.
        synced: Whether the voters average momenta of it that differ.
        name: Name of the parameter.
        param: The model's parameter, a DTensor with FSDP2.
        part: This rank's part of the parameter, with its shape.
        p: The weights in the model, `part` in memory order.
        moves: Whether this step moves it, which `core.lion` and kernels do.
        grad: Gradient, changed only by unscaling; None if this rank's voter abstains.
        momentum: Momentum of `grad`, changed in place.
        idle: Rows of `grad` that are zero, bool, shape (R,); None if none is.
        old: Rows in which u is 0, because they were idle for long (`idle_rows`); None if none is.
        local: What a period of local steps keeps of the parameter; None between two periods.
        magnitude: The number a to which codes are relative, if the tensor has one.
        mean: Mean over the voters of what `full_precision` averages.
    """

    size: int
    row_size: int
    group: int
    dtype: torch.dtype
    device: torch.device
    full_precision: bool = False
    synced: bool = False
    name: str = ""
    param: Tensor = NO_TENSOR
    part: Tensor = NO_TENSOR
    p: Tensor = NO_TENSOR
    moves: bool = False
    grad: Tensor | None = None
    momentum: Tensor | None = None
    idle: Tensor | None = None
    old: Tensor | None = None
    local: LocalState | None = None
    magnitude: float | Tensor = 0.0
    mean: Tensor | None = None

    @classmethod
    def of(cls, param: Tensor, group: int, part: Tensor | None = None) -> Slot:
        """Returns the slot of a parameter, of which this rank has `part` (default: all of it)."""
        part = param.detach() if part is None else part
        length = part.stride(0) if part.dim() and part.numel() else 0
        # If the first dimension isn't the outermost in memory, its slices aren't contiguous.
        outermost = length * part.shape[0] == part.numel() if length else False
        row_size = length if outermost and length % WORD == 0 else 0
        return cls(
            part.numel(), row_size, group, part.dtype, part.device,
            param=param, part=part, p=flat_view(part),
        )  # fmt: skip

    @property
    def moving(self) -> Tensor | None:
        """`p` if this step moves the tensor."""
        return self.p if self.moves else None

    @property
    def anchor(self) -> Tensor | None:
        """The anchor x of local steps, if the tensor moves."""
        return None if self.local is None or not self.moves else flat_view(self.local.anchor)

    @property
    def compensation(self) -> Tensor | None:
        """The compensation c of a tensor of 16 bits, if it moves by local steps."""
        if self.local is None or self.local.compensation is None or not self.moves:
            return None
        return flat_view(self.local.compensation)

    @property
    def moved_in_period(self) -> bool:
        """Whether this rank has a gradient now, or had a finite one in the period."""
        return self.grad is not None or (self.local is not None and self.local.used)

    def get(self, field: Field) -> Tensor | None:
        """Returns one of the slot's tensors."""
        tensor: Tensor | None = getattr(self, field)
        return tensor

    def signature(self, place: int) -> Signature:
        """What ranks compare: that of the complete parameter, because shards may differ in size.

        `place` is that of its device among the rank's devices, between which messages are cut.
        """
        p, how = self.param, "full" if self.full_precision else "vote"
        device = f"{p.device.type} {place}" if place else p.device.type
        return self.name, tuple(p.shape), str(p.dtype), p.stride(), device, how


class Field(enum.StrEnum):
    """Attribute of a slot with a tensor that pieces or kernels read and write."""

    GRAD = "grad"
    MOMENTUM = "momentum"
    MOVING = "moving"
    ANCHOR = "anchor"
    COMPENSATION = "compensation"
    MEAN = "mean"
