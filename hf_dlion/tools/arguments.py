"""What the command lines share: types of arguments, and how an error is told."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn, TypeVar

from hf_dlion.tools.report import FORMATS

T = TypeVar("T")


def checked(kind: Callable[[str], T], holds: Callable[[T], bool], rule: str) -> Callable[[str], T]:
    """Returns a type for argparse that refuses values which break a rule.

    Args:
        kind: Makes the value of a word; argparse tells its ValueErrors.
        holds: Whether a value follows the rule.
        rule: Follows the word in the error message, for example "must be at least 1".
    """

    def value_of(text: str) -> T:
        value = kind(text)
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text} {rule}")
        return value

    # argparse says "invalid int value" by this name.
    value_of.__name__ = kind.__name__
    return value_of


class Parser(argparse.ArgumentParser):
    """Tells an error in one line, without a page of usage before it."""

    def error(self, message: str) -> NoReturn:
        """Prints the message; exits with code 2."""
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def add_format(parser: argparse.ArgumentParser) -> None:
    """Adds `--format`."""
    parser.add_argument(
        "--format",
        choices=FORMATS,
        default=FORMATS[0],
        help="of what is printed; of json the result alone, as in the file (table)",
    )


positive = checked(int, lambda value: value >= 1, "must be at least 1")


def exit_code(command: str, run: Callable[[], object], *told: type[Exception]) -> int:
    """Returns the exit code of a command: 0, or 2 after an error that a user can put right.

    Args:
        command: What the user called.
        run: The command; an int that it returns is the exit code.
        told: Errors that are printed in one line; others go on as they are.
    """
    try:
        code = run()
    except told as error:
        print(f"{command}: {error}", file=sys.stderr)
        return 2
    return code if isinstance(code, int) else 0
