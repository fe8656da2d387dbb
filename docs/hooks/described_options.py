"""An extension of griffe: describes the options where `DistributedLion` leaves a place for them.

The package does the same when it is imported (`hf_dlion.options.described`); griffe reads sources.
"""

from __future__ import annotations

import ast
from typing import Any

from griffe import Docstring, Extension, Module


class DescribedOptions(Extension):
    """Replaces the placeholder in the docstring of `DistributedLion` by the fields of `Options`."""

    def on_package(self, *, pkg: Module, **_: Any) -> None:
        """Fills the docstring, once the whole package has been read."""
        options = pkg["options.options.Options"].docstring
        optimizer = pkg["optimizer.DistributedLion"].docstring
        placeholder = ast.literal_eval(str(pkg["options.described.PLACEHOLDER"].value))
        filled = with_fields(optimizer.value, options.value, placeholder)
        pkg["optimizer.DistributedLion"].docstring = Docstring(
            filled,
            lineno=optimizer.lineno,
            endlineno=optimizer.endlineno,
            parent=optimizer.parent,
            parser=optimizer.parser,
            parser_options=optimizer.parser_options,
        )


def with_fields(docstring: str, options: str, placeholder: str) -> str:
    """Returns a docstring with the attributes of another one in the place of a line.

    Raises:
        ValueError: If one of them has no such place.
    """
    _, found, after = options.partition("\nAttributes:\n")
    if not found or placeholder not in docstring:
        raise ValueError("the docstrings of Options and DistributedLion have changed their form")
    return docstring.replace(placeholder, after.partition("\n\n")[0])
