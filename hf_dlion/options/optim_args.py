"""The text of `TrainingArguments(optim_args=...)` -> keyword arguments of `DistributedLion`."""

from __future__ import annotations

import difflib
import types
from collections.abc import Callable, Mapping
from typing import Any, Union, get_args, get_origin, get_type_hints

import torch

from hf_dlion.options.options import Options

LIST_SEPARATOR = ";"

# What people look for here, but set on TrainingArguments.
_ELSEWHERE = {
    "lr": "set TrainingArguments(learning_rate=...)",
    "learning_rate": "set TrainingArguments(learning_rate=...)",
    "weight_decay": "set TrainingArguments(weight_decay=...)",
    "process_group": "make the optimizer: Trainer(optimizers=(DistributedLion(...), None))",
    "replicate": "give TrainingArguments a parallelism_config (docs/guides/fsdp2.md)",
    "eps": "Lion has no epsilon",
}
# Options that another optimizer of transformers has, too.
_SHARED = ("momentum_dtype",)
# Trainer has flags of these names.
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


def parse_optim_args(
    text: str | None,
    defaults: Mapping[str, Any] | None = None,
    chosen: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Returns the keyword arguments that `optim_args` asks for, converted and checked.

    It may name every option of `hf_dlion.Options`, and `beta1` and `beta2`, or `betas=0.9;0.99`.
    Semicolons separate the parts of a list. The text of an error begins with "optim_args" if
    anything was asked for.

    Args:
        text: For example "aggregation=average,beta2=0.98". None and "" ask for nothing.
        defaults: Options that hold unless the text says otherwise.
        chosen: Options that hold whatever the text says. All of them together are checked.

    Returns:
        Some of the names of `Options`, and "beta1", "beta2" (float).

    Raises:
        ValueError: If an item is not of the form option=value, comes twice, is unknown, or has a
            value that is not allowed.
        TypeError: If a value has the wrong type.
        NotImplementedError: If options do not go together yet.
    """
    kinds = get_type_hints(Options)
    parsed: dict[str, Any] = {}
    for name, value in _items(text):
        new: dict[str, Any]
        if name == "betas":
            new = _betas(value)
        elif name in ("beta1", "beta2"):
            new = {name: _beta(name, value)}
        else:
            _check_known(name, [*kinds, "beta1", "beta2", "betas"])
            new = {name: _convert(name, value, kinds[name])}
        twice = parsed.keys() & new.keys()
        if twice:
            raise ValueError(f"optim_args={text!r}: {min(twice)} is given twice; keep one of them")
        parsed |= new
    options = {name: value for name, value in parsed.items() if name in kinds}
    try:
        Options(**{**(defaults or {}), **options, **(chosen or {})})
    except (TypeError, ValueError, NotImplementedError) as error:
        if not options:
            raise
        raise type(error)(f"optim_args={text!r}: {error}") from None
    return parsed


def only_ours(text: str | None) -> list[str]:
    """Returns the names in an `optim_args` that no optimizer but DistributedLion has."""
    names = [item.partition("=")[0].strip() for item in (text or "").split(",")]
    return [name for name in names if name in get_type_hints(Options) and name not in _SHARED]


def check_names(names: list[str]) -> None:
    """Checks names of keyword arguments against those of `Options`, lr and betas.

    Raises:
        ValueError: If one is unknown; the text names the closest valid one.
    """
    for name in names:
        if name not in ("lr", "betas"):
            _check_known(name, [*get_type_hints(Options), "lr", "betas"], source="dlion")


def _items(text: str | None) -> list[tuple[str, str]]:
    # Trainer drops all spaces before it splits, so "a=1, b=2" is fine.
    squeezed = (text or "").replace(" ", "")
    items = []
    for item in squeezed.split(",") if squeezed else []:
        name, equals, value = item.partition("=")
        if not (name and equals and value) or "=" in value:
            raise ValueError(
                f"optim_args={text!r}: {item!r} is not of the form option=value; separate options "
                "by commas and the parts of a list by semicolons, for example "
                "optim_args='aggregation=average,betas=0.9;0.98'"
            )
        items.append((name, value))
    return items


def _check_known(name: str, known: list[str], source: str = "optim_args") -> None:
    if name in known:
        return
    if name in _ELSEWHERE:
        raise ValueError(f"{source}: {name} is not an option here; {_ELSEWHERE[name]}")
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
    raise ValueError(
        f"{source}: there is no option {name!r}, did you mean {close!r}? "
        f"Valid options: {', '.join(known)}"
    )


def _betas(value: str) -> dict[str, float]:
    parts = value.split(LIST_SEPARATOR)
    if len(parts) != 2:
        raise ValueError(f"optim_args: betas={value} must be two numbers, for example 0.9;0.99")
    return {name: _beta(name, part) for name, part in zip(("beta1", "beta2"), parts, strict=True)}


def _beta(name: str, value: str) -> float:
    beta: float = _number(name, value, float, "a number")
    if not 0.0 <= beta < 1.0:
        raise ValueError(f"optim_args: {name}={value} must be at least 0 and below 1")
    return beta


def _convert(name: str, value: str, kind: Any) -> Any:
    """Returns `value` as the type that `Options` declares; `Options` checks what is allowed."""
    if get_origin(kind) in (Union, types.UnionType):
        if value.lower() == "none":
            return None
        parts = [part for part in get_args(kind) if part is not type(None)]
        # Of a number or a name, what ends in a digit is the number.
        kind = int if int in parts and value[-1:].isdigit() else parts[0]
    if kind is bool:
        return _boolean(name, value)
    if kind is int:
        return _number(name, value, int, "an integer")
    if kind is float:
        return _number(name, value, float, "a number")
    if kind is torch.dtype:
        return _dtype(name, value)
    if get_origin(kind) in (tuple, list):
        parts = value.split(LIST_SEPARATOR)
        return tuple(_convert(name, part, get_args(kind)[0]) for part in parts)
    return value


def _boolean(name: str, value: str) -> bool:
    if value.lower() not in _TRUE + _FALSE:
        raise ValueError(f"optim_args: {name}={value} must be true or false")
    return value.lower() in _TRUE


def _number(name: str, value: str, kind: Callable[[str], Any], what: str) -> Any:
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"optim_args: {name}={value} must be {what}") from None


def _dtype(name: str, value: str) -> torch.dtype:
    dtype = _DTYPES.get(value.lower()) or getattr(torch, value.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(
            f"optim_args: {name}={value} is not a dtype; choose none, fp32 (float32), "
            "bf16 (bfloat16) or fp16 (float16)"
        )
    return dtype
