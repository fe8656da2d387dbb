"""Parameters that a user selects by name: patterns, or a function of name and parameter."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

SEPARATOR = ";"

Selector = Callable[[str, Tensor], bool]
Selection = str | Sequence[str] | Selector


def check_selection(option: str, selection: object) -> None:
    """Checks the form of a selection.

    Raises:
        TypeError: If it is neither a string, a sequence of strings nor a function.
        ValueError: If it holds an empty pattern.
    """
    if callable(selection) and not isinstance(selection, type):
        return
    named = isinstance(selection, (str, list, tuple))
    if not named or not all(isinstance(pattern, str) for pattern in selection):  # type: ignore[attr-defined]
        raise TypeError(
            f"{option}={selection!r} must be a pattern of parameter names such as '*norm*', a "
            f"sequence of them, or a function of name and parameter; got {type(selection).__name__}"
        )
    patterns = patterns_of(selection)  # type: ignore[arg-type]
    if not patterns or not all(patterns):
        raise ValueError(f"{option}={selection!r} holds an empty pattern")


def patterns_of(selection: str | Sequence[str]) -> tuple[str, ...]:
    """Returns the patterns of a selection; a string may hold several, separated by semicolons."""
    return tuple(selection.split(SEPARATOR) if isinstance(selection, str) else selection)


def selected(
    option: str, selection: Selection, groups: Sequence[Mapping[str, Any]]
) -> frozenset[int]:
    """Returns the indices of the parameters that a selection matches.

    Args:
        option: The name of the option, for error messages.
        selection: Checked. Patterns are those of `fnmatch`, case counts.
        groups: The parameter groups, of named parameters.

    Raises:
        ValueError: If the parameters have no names.
    """
    if any("param_names" not in group for group in groups):
        raise ValueError(
            f"{option}={selection!r} selects parameters by name, and they have none: use "
            f"DistributedLion(model.named_parameters())"
        )
    pairs = _named(groups)
    if callable(selection):
        return frozenset(index for index, pair in enumerate(pairs) if selection(*pair))
    patterns = patterns_of(selection)
    return frozenset(
        index
        for index, (name, _) in enumerate(pairs)
        if any(fnmatchcase(name, pattern) for pattern in patterns)
    )


def check_matches(
    option: str, selection: Selection, groups: Sequence[Mapping[str, Any]], words: Sequence[str]
) -> None:
    """Checks that every pattern matches at least one parameter.

    Args:
        option: The name of the option, for the error message.
        selection: Checked.
        groups: The parameter groups, of named parameters.
        words: What the option may be besides patterns.

    Raises:
        ValueError: If one does not; the message names what is close to it.
    """
    if callable(selection):
        return
    names = [name for name, _ in _named(groups)]
    for pattern in patterns_of(selection):
        if not any(fnmatchcase(name, pattern) for name in names):
            bare = pattern.strip("*")
            near = [word for word in words if difflib.get_close_matches(pattern, [word])]
            near += [name for name in names if bare and bare.lower() in name.lower()][:3]
            near += difflib.get_close_matches(bare, names, n=3, cutoff=0.0)
            close = ", ".join(map(repr, list(dict.fromkeys(near))[:4]))
            raise ValueError(
                f"{option}={selection!r}: no parameter's name matches {pattern!r} (* stands for "
                f"any text); close to it: {close}"
            )


def _named(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, Tensor]]:
    return [
        pair for group in groups for pair in zip(group["param_names"], group["params"], strict=True)
    ]
