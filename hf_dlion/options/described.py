"""Descriptions of the options, put where a user asks for them: the optimizer's `help()`."""

from __future__ import annotations

import inspect
from typing import TypeVar

from hf_dlion.options.options import Options

C = TypeVar("C", bound=type)

# The line of the class docstring, among its arguments, that the descriptions replace.
PLACEHOLDER = "    ...: The fields of `hf_dlion.Options`; `help()` lists them here."


def describes_options(cls: C) -> C:
    """Returns a class after it got the descriptions of `Options` into its docstring."""
    if cls.__doc__ is not None and Options.__doc__ is not None:  # None under python -OO.
        fields = inspect.cleandoc(Options.__doc__).partition("\nAttributes:\n")[2]
        described = fields.partition("\n\n")[0]
        cls.__doc__ = inspect.cleandoc(cls.__doc__).replace(PLACEHOLDER, described)
    return cls
