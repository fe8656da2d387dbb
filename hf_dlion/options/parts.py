"""Parameters of FSDP2, and the part of each that one rank holds: votes are cast on that.

    replica 0: rank 0 holds rows 0 1 2, rank 1 rows 3 4     FSDP reduces gradients along a line,
    replica 1: rank 2 holds rows 0 1 2, rank 3 rows 3 4     votes travel along a column

What a step does goes by parts, plain tensors that share the memory of the sharded parameters; what
torch and a user see (groups, state, hooks) goes by the parameters.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

TWO_LINES = (
    'with a mesh of the dimensions "replicate" and "shard" call fully_shard(module, '
    'mesh=mesh["shard"]) for each layer and the model, and DistributedLion('
    'model.named_parameters(), replicate=mesh["replicate"]); a model that fits on one rank goes '
    "into DistributedDataParallel, or into no wrapper"
)


class Part(Tensor):
    """The part of a sharded parameter that this rank holds, in the parameter's own memory.

    Its `grad` and `requires_grad` are those of the parameter.

    Attributes:
        copied: Whether every rank of the replica holds all of it (Replicate).
    """

    # As of nn.Parameter: what is computed from a part is a plain tensor.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _local: Tensor
    _whole: weakref.ref[Tensor]
    copied: bool

    @staticmethod
    def of(whole: Tensor) -> Part:
        """Returns the part of a sharded parameter, which it does not keep alive."""
        local = local_of(whole)
        part: Part = Tensor._make_subclass(Part, local)
        part._local, part._whole = local, weakref.ref(whole)
        part.copied = all(placement.is_replicate() for placement in cast(Any, whole).placements)
        return part

    @property
    def whole(self) -> Tensor:
        """The sharded parameter."""
        whole = self._whole()
        assert whole is not None, "whoever has a part has its optimizer, which has the parameter"
        return whole

    def is_of(self, param: Tensor) -> bool:
        """Returns whether this is, still, the part of a parameter."""
        return self._whole() is param and self._local is cast(Any, param)._local_tensor

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """Whether the parameter requires a gradient."""
        return self.whole.requires_grad

    @property
    def grad(self) -> Tensor | None:
        """What this rank holds of the parameter's gradient: its part, once that is checked.

        It never raises, since it is read where other ranks wait (`params.settle_gradient` does).
        """
        grad = self.whole.grad
        if grad is None:
            return None
        local = local_of(grad)
        # A gradient that other ranks are still to add to: the codecs read its memory.
        wait = getattr(local, "wait", None)
        return local if wait is None else cast(Tensor, wait())

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.whole.grad = None if value is None else sharded_like(self.whole, value)


class Parts:
    """The parts of an optimizer's sharded parameters, each made once."""

    def __init__(self) -> None:
        """Knows none yet."""
        self._parts: dict[int, Part] = {}

    def of(self, param: Tensor) -> Tensor:
        """Returns this rank's part of a parameter: of a plain one itself."""
        if not is_sharded(param):
            return param
        part = self._parts.get(id(param))
        if part is None or not part.is_of(param):
            part = self._parts[id(param)] = Part.of(param)
        return part

    def groups(self, groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Returns parameter groups that hold the parts; others are let go, with their memory."""
        found = [{**group, "params": [self.of(p) for p in group["params"]]} for group in groups]
        keys = {id(param) for group in groups for param in group["params"]}
        if len(self._parts) > len(keys):
            self._parts = {key: part for key, part in self._parts.items() if key in keys}
        return found

    def forget(self) -> None:
        """Lets go of the parts."""
        self._parts.clear()


def is_sharded(tensor: object) -> bool:
    """Returns whether a tensor is a DTensor, which ranks hold in parts."""
    return type(tensor).__name__ == "DTensor"


def local_of(tensor: Tensor) -> Tensor:
    """Returns what this rank holds of a tensor, in the same memory: of a plain one all."""
    return cast(Tensor, cast(Any, tensor)._local_tensor) if is_sharded(tensor) else tensor


def whole_of(param: Tensor) -> Tensor:
    """Returns the parameter that a part belongs to: of a plain one itself."""
    return param.whole if isinstance(param, Part) else param


def held_in_parts(param: Tensor) -> bool:
    """Returns whether the ranks of a replica hold different parts of a parameter, or of a part."""
    return isinstance(param, Part) and not param.copied


def sharded_like(whole: Tensor, local: Tensor) -> Tensor:
    """Returns a tensor that is sharded as another one, from what this rank holds of it."""
    from torch.distributed.tensor import DTensor

    like = cast(Any, whole)
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def check_placed_alike(param: Tensor) -> None:
    """Checks that a part's gradient, if there is one, is sharded as its parameter is.

    Raises:
        RuntimeError: If it is not.
    """
    if not isinstance(param, Part):
        return
    whole = cast(Any, param.whole)
    placed = None if whole.grad is None else getattr(whole.grad, "placements", "none")
    if placed not in (None, whole.placements):
        raise RuntimeError(
            f"a parameter of placement {whole.placements} has a gradient of placement {placed}: "
            f"call zero_grad() and run backward again, through FSDP's own forward"
        )


def told_shape(param: Tensor) -> str:
    """Returns a parameter's whole shape, and how it is sharded, in the same words on every rank."""
    whole = whole_of(param)
    sharded = f", {cast(Any, whole).placements[0]}" if is_sharded(whole) else ""
    return f"{tuple(whole.shape)}{sharded}"


def check_placement(param: Tensor) -> None:
    """Checks that a parameter, if it is sharded, is so by rows and inside its replica only.

    Args:
        param: A parameter, or a part of one.

    Raises:
        NotImplementedError: If it is sharded otherwise.
    """
    whole = cast(Any, whole_of(param))
    if not is_sharded(whole):
        return
    placements, mesh = whole.placements, whole.device_mesh
    kinds = [type(placement).__name__ for placement in placements]
    if kinds == ["Replicate", "Shard"]:
        why = "FSDP averages gradients over the first dimension of its mesh itself (HSDP)"
    elif mesh.ndim > 1:
        why = "the mesh of a parameter may have one dimension (no tensor parallelism beside FSDP)"
    elif kinds == ["Shard"] and placements[0].dim == 0:
        here, rows, place = whole._local_tensor.shape[0], whole.shape[0], mesh.get_coordinate()[0]
        most = -(-rows // mesh.size())
        if here == max(0, min(rows - place * most, most)):
            return
        why = f"part {place} of {mesh.size()} holds {here} of {rows} rows, not {most} as FSDP2 does"
    elif kinds == ["Replicate"]:
        return
    else:
        why = "parts are rows, Shard(0) (no tensor parallelism, no shard_placement_fn)"
    raise NotImplementedError(
        f"DistributedLion got a parameter of placement {placements} on a mesh of "
        f"{tuple(mesh.shape)} ranks: {why}; {TWO_LINES}"
    )
