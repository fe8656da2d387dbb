"""torch's optimizer state as steps see it: of a sharded parameter the momentum of a part.

In `optimizer.state` such a momentum is a DTensor like its parameter, which torch's distributed
checkpoints understand.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import Tensor

from hf_dlion.options.parts import local_of, sharded_like, whole_of


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
