"""The optimizer's state dict: what it has, and what is loaded from one.

kept between two steps                     in                          state dict   momentum file
momenta                                    `optimizer.state`           rank 0's     each rank's
ages of rows                               `optimizer.state`           no           each rank's
lr, betas, weight decay                    `optimizer.param_groups`    yes          no
number of steps                            `optimizer.param_groups`    yes          yes
number of exchanges                        `LocalSteps`                no           yes
anchors, compensations, steps of a period  `Params`, `LocalSteps`      no           no
names of the model, the layout             `Params`                    no           no
what the ranks have compared and counted   `Meetings`, `Guards`        no           no

A save ends the period. A single rank's state dict also has ages. `checkpoint` has the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_dlion import fsdp
from hf_dlion.core.idle_rows import AGE
from hf_dlion.options import Groups, check_group, numbered

# What every group of a state dict has. torch adds more to the optimizer's own defaults.
_IN_GROUPS = ("step", "lr", "betas", "weight_decay")


def momenta_only(states: Mapping[Any, Mapping[str, Any]]) -> dict[Any, dict[str, Any]]:
    """Returns states of parameters without ages.

    torch.distributed.checkpoint needs the same keys and sizes in every save and load. Ages exist
    for a while, on some ranks, and for this rank's shard.
    """
    return {
        key: {name: value for name, value in state.items() if name == "exp_avg"}
        for key, state in states.items()
    }


def loaded_state(
    saved: Mapping[str, Any], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Returns copies of the momentum, in a dtype, and of the age in a parameter's saved state."""
    loaded = {}
    if (momentum := saved.get("exp_avg")) is not None:
        # Without Infs and NaNs, which would decide the vote forever.
        most = min(torch.finfo(dtype).max, torch.finfo(momentum.dtype).max)
        loaded["exp_avg"] = momentum.nan_to_num(0.0).clamp_(-most, most).to(device, dtype)
    if isinstance(age := saved.get(AGE), Tensor):  # torch's flattened state has {} for none.
        loaded[AGE] = age.to(device, torch.int32, copy=True)
    return loaded


class Loading:
    """A load of torch's `load_state_dict`, which calls `check` before and `complete` after it.

    Attributes:
        is_own: Whether the momenta are the optimizer's own tensors, so that no momentum is loaded.
    """

    def __init__(
        self, groups: Groups, states: Mapping[Tensor, dict[str, Any]], dtype: torch.dtype | None
    ) -> None:
        """Notes what the optimizer has; `dtype` is that of momenta, None for the parameters'."""
        self._names = [group.get("param_names") for group in groups]
        self._before, self._dtype = dict(states), dtype
        self._saved: list[Mapping[str, Any]] = []
        self.is_own = False

    def check(self, lion: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Checks what the hooks of users have made of a state dict.

        Raises:
            ValueError: See `DistributedLion.load_state_dict`.
        """
        groups, states = state_dict["param_groups"], state_dict["state"]
        for group in groups:
            try:
                if missing := [name for name in _IN_GROUPS if name not in group]:
                    raise ValueError(f"its groups have no {missing[0]!r}")
                check_group(group)
            except (TypeError, ValueError) as error:
                raise ValueError(
                    f"the state dict is another optimizer's, which DistributedLion can't load: "
                    f"{error}. Load the model's weights only, and start with a new optimizer"
                ) from error
        params, keys = numbered(lion.param_groups), numbered(groups)
        self._saved = [states.get(key, {}) for key in keys]
        # torch.distributed.checkpoint has names as keys, and fills the optimizer's own tensors.
        saved_steps, steps = ([g["step"] for g in some] for some in (groups, lion.param_groups))
        same = keys == [*range(len(params))] and saved_steps == steps
        for param, saved in zip(params, self._saved, strict=False):  # torch compares lengths.
            fsdp.check_placement(param, momentum := saved.get("exp_avg"))
            same = same and momentum is self._before.get(param, {}).get("exp_avg")
        self.is_own = same

    def complete(self, lion: torch.optim.Optimizer) -> None:
        """Gives parameters their names, and momenta their bits; before the hooks of users."""
        for group, passed in zip(lion.param_groups, self._names, strict=True):
            group.pop("param_names", None)
            if passed is not None:
                group["param_names"] = passed
        if self.is_own:
            lion.state.update(self._before)
            return
        for param, saved in zip(numbered(lion.param_groups), self._saved, strict=True):
            if (state := lion.state.get(param)) is not None:
                # torch casts both to the parameter's dtype, which loses bits.
                state.pop(AGE, None)
                state.update(loaded_state(saved, self._dtype or param.dtype, param.device))
