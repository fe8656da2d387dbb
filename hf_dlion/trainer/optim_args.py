"""Turns `TrainingArguments(optim_args="bits=2,momentum_dtype=bfloat16")` into checked options."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

import torch

from hf_dlion.options import Options

OPTIM_NAME = "dlion"

# Names of the options, with the types of each.
_TYPES = {name: get_args(hint) or (hint,) for name, hint in get_type_hints(Options).items()}
# Names that are set elsewhere, and where.
_ELSEWHERE = {
    "lr": "set TrainingArguments(learning_rate=...)",
    "learning_rate": "set TrainingArguments(learning_rate=...)",
    "weight_decay": "set TrainingArguments(weight_decay=...)",
    "process_group": "make the optimizer: Trainer(optimizers=(DistributedLion(...), None))",
    "replicate": "set TrainingArguments(parallelism_config=...), see docs/guides/fsdp2.md",
    "eps": "Lion has no epsilon",
}
# Options that another optimizer of transformers also has.
_SHARED = ("momentum_dtype",)
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def as_text(optim_args: Mapping[str, Any]) -> str:
    """Returns options as text: commas separate options, and semicolons the parts of a list.

    Raises:
        ValueError: If a value would be split.
        TypeError: If a value is a function.
    """

    def value_text(name: str, value: Any) -> str:
        if callable(value):
            raise TypeError(
                f"optim_args: {name} can't be a function: use patterns of names, or make the "
                f"optimizer, Trainer(optimizers=(DistributedLion(...), None))"
            )
        text = ";".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        # Spaces in a text are dropped; those in a list's parts may be meant.
        if set(text) & set(",=" if isinstance(value, str) else ",= "):
            raise ValueError(
                f"optim_args: {name}={value!r} must not contain a comma, an equals sign, or a "
                f'space: write a list as ["*norm*", "*embed*"]'
            )
        return text

    return ",".join(f"{name}={value_text(name, value)}" for name, value in optim_args.items())


def parse_optim_args(
    given: str | Mapping[str, Any] | None, chosen: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Returns the keyword arguments in an `optim_args`, with "beta1" and "beta2" as floats.

    A text has options of `Options`, `beta1`, `beta2`, or `betas=0.9;0.98`, separated by commas.
    Semicolons separate the parts of a list. Options in `chosen` override the text, and are checked
    together with it.

    Raises:
        ValueError: If an item is not name=value, is unknown or set twice, or has a bad value.
        TypeError: If a value has the wrong type.
        NotImplementedError: If options don't work together yet.
    """
    parsed: dict[str, Any] = {}
    text = as_text(given) if isinstance(given, Mapping) else given
    for name, value in _items(text):
        new = _converted(name, value)
        if repeated := parsed.keys() & new.keys():
            raise ValueError(f"optim_args={text!r}: {min(repeated)} is set twice: keep one of them")
        parsed |= new
    options = {name: value for name, value in parsed.items() if name in _TYPES}
    try:
        Options(**{**options, **(chosen or {})})
    except (TypeError, ValueError, NotImplementedError) as error:
        if not options:
            raise
        raise type(error)(f"optim_args={text!r}: {error}") from None
    return parsed


def check_known(name: str, others: Sequence[str], where: str) -> None:
    """Refuses an option that is neither in `Options` nor in `others`.

    Raises:
        ValueError: If the name is unknown; the message has the closest one, or where to set it.
    """
    known = [*_TYPES, *others]
    if name in known:
        return
    if name in _ELSEWHERE:
        raise ValueError(f"{where}: {name} is not an option here: {_ELSEWHERE[name]}")
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    meant = f", did you mean {close[0]!r}?" if close else "."
    raise ValueError(f"{where}: there is no option {name!r}{meant} Options: {', '.join(known)}")


def only_ours(given: str | Mapping[str, Any] | None) -> list[str]:
    """Returns the options in an `optim_args` that only DistributedLion has."""
    items = given if isinstance(given, Mapping) else (given or "").split(",")
    names = [str(item).partition("=")[0].strip() for item in items]
    return [name for name in names if name in _TYPES and name not in _SHARED]


def _items(text: str | None) -> list[tuple[str, str]]:
    # Without spaces, as Trainer splits it for other optimizers.
    text_items = (text or "").replace(" ", "")
    items = []
    for item in text_items.split(",") if text_items else []:
        name, equals, value = item.partition("=")
        if not (name and equals and value) or "=" in value:
            raise ValueError(
                f"optim_args={text!r}: {item!r} is not name=value. Separate options by commas and "
                f"the parts of a list by semicolons, for example 'bits=2,betas=0.9;0.98'"
            )
        items.append((name, value))
    return items


def _converted(name: str, value: str) -> dict[str, Any]:
    if name == "betas":
        parts = value.split(";")
        if len(parts) != 2:
            raise ValueError(f"optim_args: betas={value} must be two numbers, such as 0.9;0.98")
        return {f"beta{k}": _beta(f"beta{k}", part) for k, part in enumerate(parts, 1)}
    if name in ("beta1", "beta2"):
        return {name: _beta(name, value)}
    check_known(name, ("beta1", "beta2", "betas"), "optim_args")
    return {name: _option(name, value)}


def _beta(name: str, value: str) -> float:
    try:
        beta = float(value)
    except ValueError:
        raise ValueError(f"optim_args: {name}={value} must be a number") from None
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"optim_args: {name}={value} must be at least 0 and below 1")
    return beta


def _option(name: str, value: str) -> Any:
    """Returns a value in a type that the option has; Options checks whether it is allowed."""
    types = _TYPES[name]
    if value.lower() == "none" and type(None) in types:
        return None
    if torch.dtype in types:
        dtype = _DTYPES.get(value.lower()) or getattr(torch, value.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"optim_args: {name}={value} is not a dtype; use float32, bfloat16, or float16"
            )
        return dtype
    if int in types:
        try:
            return int(value)
        except ValueError:
            if not set(types) <= {int, type(None)}:
                return value  # "node", for example.
            raise ValueError(f"optim_args: {name}={value} must be an integer") from None
    return value
