"""The optimizer's state dict: what it has, and what is loaded from one.

kept between two steps                     in                          state dict   momentum file
momenta                                    `optimizer.state`           rank 0's     each rank's
ages of rows                               `Params`                    no           each rank's
lr, betas, weight decay                    `optimizer.param_groups`    yes          no
number of steps                            `optimizer.param_groups`    yes          yes
number of exchanges                        `LocalSteps`                no           yes
anchors, compensations, steps of a period  `Params`, `LocalSteps`      no           no
names of the model, the layout             `Params`                    no           no
what the ranks have compared and counted   `Meetings`, `Guards`        no           no

A save ends the period. `checkpoint` has the files.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_dlion import fsdp
from hf_dlion.options import Groups, check_group, numbered

# What every group of a state dict has. torch adds more to the optimizer's own defaults.
_IN_GROUPS = ("step", "lr", "betas", "weight_decay")
# Key of a state dict without momenta, in a checkpoint in which every rank has a file for its own.
MOMENTA_APART = "momenta_apart"


def loaded_momentum(momentum: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Returns a copy in a dtype, without Infs and NaNs, which would decide the vote forever."""
    most = min(torch.finfo(dtype).max, torch.finfo(momentum.dtype).max)
    return momentum.nan_to_num(0.0).clamp_(-most, most).to(device, dtype)


class Loading:
    """A load of torch's `load_state_dict`, which calls `check` before and `complete` after it.

    Attributes:
        lacks_momenta: Whether the momenta are in the ranks' own files (`MOMENTA_APART`).
    """

    def __init__(self, groups: Groups, dtype: torch.dtype | None) -> None:
        """Notes names; `dtype` is that of momenta, None for the parameters'."""
        self._names = [group.get("param_names") for group in groups]
        self._dtype = dtype
        self._saved: list[Mapping[str, Any]] = []
        self.lacks_momenta = False

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
        self.lacks_momenta = MOMENTA_APART in state_dict
        for param, saved in zip(params, self._saved, strict=False):  # torch compares lengths.
            fsdp.check_placement(param, saved.get("exp_avg"))

    def complete(self, lion: torch.optim.Optimizer) -> None:
        """Gives parameters their names, and momenta their bits; before the hooks of users."""
        for group, passed in zip(lion.param_groups, self._names, strict=True):
            group.pop("param_names", None)
            if passed is not None:
                group["param_names"] = passed
        for param, saved in zip(numbered(lion.param_groups), self._saved, strict=True):
            if (momentum := saved.get("exp_avg")) is not None:
                # torch casts it to the parameter's dtype, which loses bits.
                dtype = self._dtype or param.dtype
                lion.state[param]["exp_avg"] = loaded_momentum(momentum, dtype, param.device)
