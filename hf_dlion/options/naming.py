"""Names of parameters: given to those that came without, and freed of wrappers' prefixes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

from torch import Tensor

# Wrappers put these before a parameter's name. The first ends like the last, so they are taken off
# in this order.
_WRAPPER_PREFIXES = ("_checkpoint_wrapped_module.", "_orig_mod.", "module.")

_names: ContextVar[Mapping[Tensor, str] | None] = ContextVar("names", default=None)


@contextlib.contextmanager
def named_by(named: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
    """Gives the parameters of optimizers that are made inside the names that a model has for them.

    Args:
        named: The model's named parameters.
    """
    token = _names.set({param: name for name, param in named})
    try:
        yield
    finally:
        _names.reset(token)


def with_names(params: Iterable[Any]) -> Iterable[Any]:
    """Returns parameter groups whose parameters have names, if `named_by` knows all of them.

    Args:
        params: What an optimizer is given; everything but groups of unnamed parameters is returned
            as it is.
    """
    names = _names.get()
    if names is None:
        return params
    groups = list(params)
    if not all(isinstance(group, dict) for group in groups):
        return groups
    members = [list(group["params"]) for group in groups]
    if not all(isinstance(p, Tensor) and p in names for group in members for p in group):
        return groups
    return [
        # torch looks at a group's members to see whether they have names. An empty group (with
        # LoRA nothing is left for the one without weight decay) needs the list of names itself.
        {**group, "params": [(names[p], p) for p in own]} if own else {**group, "param_names": []}
        for group, own in zip(groups, members, strict=True)
    ]


def bare(name: str) -> str:
    """Returns a parameter's name without what torch's wrappers put before it."""
    for prefix in _WRAPPER_PREFIXES:
        name = name.replace(prefix, "")
    return name
