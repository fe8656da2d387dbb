"""The shapes of a model's trainable tensors, from a parameter count, a folder, or a hub name."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_dlion.cli.arguments import parse_count

# A transformer of width h has about h / 128 layers of 12 h^2 elements each.
_WIDTH_PER_LAYER, _LAYER = 128, 12
# A prediction for so many takes a minute.
MOST_PARAMETERS = 10**13


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The tensors of a training step."""

    name: str
    parameters: int
    shapes: tuple[tuple[int, ...], ...]  # Shapes of the trainable tensors, in order.
    note: str = ""  # Assumptions about the shapes.
    active_share: float = 1.0  # Share of the parameters that a token uses; experts aren't all used.

    @property
    def numels(self) -> list[int]:
        """Number of elements of each trainable tensor."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def trainable(self) -> int:
        """Number of trained parameters."""
        return sum(self.numels)

    def weight_bytes(self, dtype: torch.dtype) -> int:
        """Returns the bytes of all weights: trained ones have `dtype`, and frozen ones bfloat16."""
        frozen = self.parameters - self.trainable
        return torch.bfloat16.itemsize * frozen + dtype.itemsize * self.trainable

    def shard(self, ranks: int) -> Workload:
        """Returns one rank's shards under FSDP2, which splits the first dimensions."""
        parts = tuple((-(-shape[0] // ranks), *shape[1:]) if shape else () for shape in self.shapes)
        return replace(self, shapes=parts)


def workload(model: str, trainable: int | None = None) -> Workload:
    """Returns the workload of a count ("7b"), a folder with a config.json, or a hub name.

    Raises:
        ValueError: If there is no such model, or it has fewer parameters than `trainable`.
    """
    count = parse_count(model)
    if count is not None and count > MOST_PARAMETERS:
        raise ValueError(
            f"{model} is more than {MOST_PARAMETERS:,} parameters, which would take hours"
        )
    if count is not None:
        found = Workload(name=model, parameters=count, shapes=usual_shapes(count))
    else:
        with torch.device("meta"):
            built = _build(_config(model))
        total = sum(param.numel() for param in built.parameters())
        shapes = tuple(tuple(p.shape) for p in built.parameters() if p.requires_grad)
        share = 1 - _unused_by_a_token(built) / total
        found = Workload(name=model, parameters=total, shapes=shapes, active_share=share)
    if trainable is not None:
        if trainable > found.parameters:
            raise ValueError(
                f"--trainable {trainable:,} is more than the {found.parameters:,} parameters of "
                f"{model}"
            )
        shapes = adapter_shapes(trainable, found.parameters)
        note = f"{len(shapes)} tensors, adapters of low rank"
        return replace(found, shapes=shapes, note=note)
    if count is None:
        return found
    note = f"{len(found.shapes)} tensors, matrices of {found.shapes[0][-1]} x {found.shapes[0][-1]}"
    return replace(found, note=note)


def usual_shapes(count: int) -> tuple[tuple[int, ...], ...]:
    """Returns shapes of matrices as in a transformer of `count` elements, and of a rest.

    All matrices but the last are square. PowerSGD sends vectors whole, so none may be long.
    """
    width = max(1, round(math.cbrt(_WIDTH_PER_LAYER * count / _LAYER)))
    matrices, rest = divmod(count, width * width)
    rows, rest = divmod(rest, width)
    last = ((rows, width),) if rows else ()
    return ((width, width),) * matrices + last + (((rest,),) if rest else ())


def adapter_shapes(count: int, parameters: int) -> tuple[tuple[int, ...], ...]:
    """Returns shapes of LoRA's factors of `count` elements, on all matrices of a transformer."""
    matrices = usual_shapes(parameters)
    width = matrices[0][-1]
    rank = max(1, round(count / (2 * width * len(matrices))))
    pairs, rest = divmod(count, 2 * rank * width)
    factors = ((rank, width), (width, rank)) * pairs
    return factors + (((rest,),) if rest else ())


def _unused_by_a_token(model: Any) -> float:
    """Returns how many parameters of a mixture of experts a token doesn't use."""
    config = model.config.get_text_config()
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((n for name in names if (n := getattr(config, name, None))), 0)
    used = getattr(config, "num_experts_per_tok", None) or experts
    in_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return float(in_experts * (1 - used / experts)) if experts else 0.0


def _config(model: str) -> Any:
    from transformers import AutoConfig

    folder = Path(model)
    looks_local = model.startswith((".", "/", "~")) or model.count("/") > 1 or folder.exists()
    if looks_local and not (folder / "config.json").is_file():
        missing = "has no config.json" if folder.is_dir() else "is not a folder"
        raise ValueError(
            f"{model} {missing}; pass a folder written by save_pretrained(), a name on the Hugging "
            f"Face hub, or a parameter count such as 7b"
        )
    try:
        return AutoConfig.from_pretrained(model)
    except Exception as error:  # Of transformers and huggingface_hub, which have many.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"cannot read the config of {model}: {reason} Pass a folder, or a parameter count such "
            f"as 7b"
        ) from error


def _build(config: Any) -> nn.Module:
    """Returns the model of a config, with its saved head."""
    import transformers

    for name in config.architectures or ():
        if hasattr(transformers, name):
            model: nn.Module = getattr(transformers, name)(config)
            return model
    try:
        model = transformers.AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    except ValueError as error:  # Its other lines list all models.
        raise ValueError(str(error).splitlines()[0]) from error
    return model
