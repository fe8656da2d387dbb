"""torch's optimizer state as steps see it: of a sharded parameter the momentum of a part.

In `optimizer.state` such a momentum is a DTensor like its parameter, which torch's distributed
checkpoints understand.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, cast

from torch import Tensor

from hf_dlion.momentum.shares import Range
from hf_dlion.options.parts import is_sharded, local_of, sharded_like, whole_of


class PartState:
    """The state of one sharded parameter."""

    def __init__(self, state: MutableMapping[str, Any], whole: Tensor) -> None:
        """Takes torch's."""
        self._state, self._whole = state, whole

    def __contains__(self, name: object) -> bool:
        return name in self._state

    def __getitem__(self, name: str) -> Any:
        return local_of(self._state[name])

    def __setitem__(self, name: str, local: Tensor) -> None:
        if name not in self._state or self[name] is not local:
            self._state[name] = sharded_like(self._whole, local)


class PartStates:
    """The state of all parameters, by parameter, or by part where one is sharded."""

    def __init__(self, states: MutableMapping[Tensor, dict[str, Any]]) -> None:
        """Takes torch's, which makes an empty state for a parameter that has none."""
        self._states = states

    def __getitem__(self, param: Tensor) -> PartState | dict[str, Any]:
        whole = whole_of(param)
        state = self._states[whole]
        return state if whole is param else PartState(state, whole)

    def get(self, param: Tensor) -> PartState | dict[str, Any]:
        """Returns the state of a parameter; where there is none, one that is not kept."""
        whole = whole_of(param)
        state = self._states.get(whole, {})
        return state if whole is param else PartState(state, whole)


def stretch_of(param: Tensor) -> Range:
    """Returns start and stop, in elements in row-major order, of this rank's part of a parameter.

    Args:
        param: Sharded by rows, or replicated.
    """
    mesh, local = cast(Any, param).device_mesh, local_of(param)
    if local.shape == param.shape:
        return 0, param.numel()
    rows = param.shape[0]
    start = min(mesh.get_coordinate()[0] * -(-rows // mesh.size()), rows) * (param.numel() // rows)
    return start, start + local.numel()


def momentum_of_part(param: Tensor, momentum: Tensor) -> Tensor:
    """Returns a plain momentum as a sharded parameter's, of which this rank holds a part.

    Args:
        param: The sharded parameter.
        momentum: The whole, of its shape, or this rank's part, 1-D.
    """
    if momentum.shape == param.shape:
        start, stop = stretch_of(param)
        momentum = momentum.reshape(-1)[start:stop]
    return sharded_like(param, momentum.reshape(local_of(param).shape))


def part_entry(params: Sequence[Tensor]) -> list[int] | None:
    """Returns which part of sharded parameters this rank holds, and of how many; None of none."""
    for param in filter(is_sharded, params):
        mesh = cast(Any, param).device_mesh
        return [mesh.get_coordinate()[0], mesh.size()]
    return None
