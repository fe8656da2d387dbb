"""What is trained: the shapes of the trainable tensors of a count, a folder or a name."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from hf_dlion.tools.models import UnknownModelError, build, load_config

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
# A transformer of width h has about h / 128 layers of 12 h^2 elements each.
_WIDTH_PER_LAYER, _LAYER = 128, 12


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What one training step works on.

    Attributes:
        name: For people.
        parameters: Elements of all parameters; they decide how long forward and backward take.
        shapes: Of the trainable tensors, in the order of their registration.
        note: What was assumed, or "".
    """

    name: str
    parameters: int
    shapes: tuple[tuple[int, ...], ...]
    note: str = ""

    @property
    def numels(self) -> list[int]:
        """Elements of each trainable tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def trainable(self) -> int:
        """Elements of all trainable tensors."""
        return sum(self.numels)


def workload(model: str, trainable: int | None = None) -> Workload:
    """Returns what `model` stands for.

    Args:
        model: A count ("7b"), a folder with a config.json, or a name on the Hugging Face hub.
        trainable: Elements that are trained, where these are not all: LoRA's, for example.

    Raises:
        UnknownModelError: If there is no such model, or it has fewer elements than `trainable`.
    """
    count = parse_count(model)
    if (
        count is None
        and re.fullmatch(r"[\d.,_]+[a-z]*", model.lower())
        and not Path(model).exists()
    ):
        raise UnknownModelError(
            f"{model!r} is no count of parameters: write a number above 0 with k, m, b or t, such "
            f"as 350m or 7b; or give a folder written by save_pretrained() as ./{model}"
        )
    if count is None:
        with torch.device("meta"):
            built = build(load_config(model))
        shapes = tuple(tuple(p.shape) for p in built.parameters() if p.requires_grad)
        found = Workload(
            name=model, parameters=sum(p.numel() for p in built.parameters()), shapes=shapes
        )
    else:
        shapes = usual_shapes(count)
        found = Workload(name=model, parameters=count, shapes=shapes, note=_assumption(shapes))
    if trainable is None:
        return found
    if trainable > found.parameters:
        raise UnknownModelError(
            f"--trainable {trainable:,} is more than the {found.parameters:,} parameters of {model}"
        )
    shapes = usual_shapes(trainable)
    return replace(found, shapes=shapes, note=_assumption(shapes))


def parse_count(text: str) -> int | None:
    """Returns the number that "7b", "29.5M" or "350000000" stands for, or None for other texts.

    >>> parse_count("29.5M"), parse_count("gpt2")
    (29500000, None)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbt]?)", text.lower().replace("_", ""))
    count = round(float(found[1]) * _UNITS[found[2]]) if found else 0
    return count or None


def usual_shapes(count: int) -> tuple[tuple[int, ...], ...]:
    """Returns matrices as wide as a transformer of `count` elements, and a vector of fewer.

    All matrices but the last are square. PowerSGD sends vectors whole, so none may be long.

    Args:
        count: Elements of all tensors.
    """
    width = max(1, round(math.cbrt(_WIDTH_PER_LAYER * count / _LAYER)))
    matrices, rest = divmod(count, width * width)
    rows, rest = divmod(rest, width)
    last = ((rows, width),) if rows else ()
    return ((width, width),) * matrices + last + (((rest,),) if rest else ())


def _assumption(shapes: tuple[tuple[int, ...], ...]) -> str:
    width = shapes[0][-1]
    return f"shapes are assumed: {len(shapes)} tensors, matrices of {width} x {width}"
