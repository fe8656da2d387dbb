"""Types of arguments, and a parser that suggests what was meant. Imports no torch.

A type raises `argparse.ArgumentTypeError` if a text stands for none of its values.
"""

from __future__ import annotations

import argparse
import difflib
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from hf_dlion.cli.gpus import GPUS

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
_RATES = {"k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_DTYPES = {
    **dict.fromkeys(("float32", "fp32", "float"), "float32"),
    **dict.fromkeys(("bfloat16", "bf16"), "bfloat16"),
}


class Parser(argparse.ArgumentParser):
    """Prints errors in two lines and suggests the closest option."""

    def __init__(self, **settings: Any) -> None:
        """See argparse; options cannot be abbreviated."""
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=form, **settings)
        self._words: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown words here, where the command's own options are known."""
        self._words = args or ()
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown argument {unknown[0]!r}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Prints the message; exits with code 2."""
        known = [name for action in self._actions for name in action.option_strings]
        for name in (word.partition("=")[0] for word in self._words):
            # A misspelled option is the cause of any other error, such as a missing option.
            if name.startswith("--") and name not in ("--", *known):
                message = f"unknown option {name}{did_you_mean(name, known)}"
                break
        self.exit(2, f"{self.prog}: {message}\nSee {self.prog} --help.\n")


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """Returns a question that names the closest known word, or ""."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.7)
    return f", did you mean {near[0]}?" if near else ""


def parse_count(text: str) -> int | None:
    """Returns the number that "7b", "29.5M" or "350000000" stands for, or None for other texts.

    >>> parse_count("29.5M"), parse_count("gpt2")
    (29500000, None)
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmbt]?)", text.lower().replace("_", ""))
    return round(float(found[1]) * _COUNTS[found[2]]) or None if found else None


def count(text: str) -> int:
    """Returns a number of parameters."""
    if (number := parse_count(text)) is not None:
        return number
    # Units such as "bb" or "mb": keep the first letter, if it is a unit.
    meant = re.match(r"\d+(?:\.\d+)?[kmbt]", text.lower())
    hint = "write a number such as 350m or 7b"
    if meant and parse_count(meant[0]):
        hint = f"did you mean {meant[0]}?"
    raise argparse.ArgumentTypeError(f"{text!r} is not a count of parameters; {hint}")


def model(text: str) -> str:
    """Returns a model's name, refusing a misspelled count, which is no name on the hub."""
    if re.fullmatch(r"[\d.,_]+(e\d+)?[a-z]{0,2}", text.lower()) and not Path(text).exists():
        count(text)
    return text


def rate(text: str) -> float:
    """Returns bits per second: of "25gbit", "1g", "100mbps", "1 Gbit/s", and the like."""
    unit = r"(?:[bB]its?|b|bps)?(?:/s)?"
    found = re.fullmatch(rf"(\d+(?:\.\d+)?)\s*([kKmMgGtT]){unit}", text.strip())
    if found and float(found[1]):
        return float(found[1]) * _RATES[found[2].lower()]
    hint = " (1 GB/s is 8gbit)" if re.search(r"\d\s*[kKmMgG]i?B", text) else ""
    raise argparse.ArgumentTypeError(
        f"{text!r} is not a rate; write bits per second such as 100mbit, 1gbit, or 25g{hint}"
    )


def dtype(text: str) -> str:
    """Returns "float32" or "bfloat16"."""
    name = text.lower().removeprefix("torch.")
    if name in _DTYPES:
        return _DTYPES[name]
    known = "float32 (fp32), bfloat16 (bf16)"
    raise argparse.ArgumentTypeError(f"{text!r} is unknown; use {known}")


def gpu(text: str) -> str:
    """Returns a name in `GPUS`; other variants, such as a laptop's, have other limits."""
    name = re.sub(r"nvidia|[\s_-]", "", text.lower())
    if name not in GPUS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is unknown; use {', '.join(GPUS)}, or run without --gpu on the machine "
            f"itself"
        )
    return name


def positive(text: str, least: int = 1) -> int:
    """Returns an integer of at least `least`, or refuses the text."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"must be an integer of at least {least} (got {text})")
    return int(text)


def above_zero(text: str, most: float = math.inf) -> float:
    """Returns a finite number above 0 and at most `most`, or refuses the text."""
    allowed = "a number above 0" if most == math.inf else f"above 0 and at most {most:g}"
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= most or value == math.inf:
        raise argparse.ArgumentTypeError(f"must be {allowed} (got {text})")
    return value
