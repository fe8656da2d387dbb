"""Text that every Python has: the source of its standard library, and the prose in it."""

from __future__ import annotations

import ast
import functools
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# Files that are kept for validation.
HELD_OUT = ("argparse.py", "json/decoder.py", "statistics.py", "tarfile.py", "textwrap.py")


@dataclass(frozen=True)
class Corpus:
    """A text to learn from, and one to be tested on; one token is one byte."""

    train: Bytes
    validation: Bytes


@functools.cache
def code() -> Corpus:
    """Returns the source of the standard library."""
    return _corpus(lambda number: True, Path.read_bytes)


@functools.cache
def base_code() -> Corpus:
    """Returns the source of every other file, so a base has not seen all docstrings."""
    return _corpus(lambda number: number % 2 == 0, Path.read_bytes)


@functools.cache
def prose() -> Corpus:
    """Returns the docstrings of the files that `base_code` leaves out."""
    return _corpus(lambda number: number % 2 == 1, _docstrings)


def blocks(text: Bytes, length: int, count: int) -> Bytes:
    """Returns up to `count` pieces of a text, evenly spread over it, shape (pieces, length)."""
    whole = text[: len(text) // length * length].reshape(-1, length)
    taken = min(count, len(whole))
    return whole[np.arange(taken) * len(whole) // max(taken, 1)]


def _corpus(learned: Callable[[int], bool], text_of: Callable[[Path], bytes]) -> Corpus:
    """Returns a text of files to learn from, by their numbers, and of those that are held out."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [*root.glob("*.py"), *(root / "json").glob("*.py"), *(root / "email").glob("*.py")]
    train, validation = [], []
    for number, path in enumerate(sorted(found)):
        if path.relative_to(root).as_posix() in HELD_OUT:
            validation.append(text_of(path))
        elif learned(number):
            train.append(text_of(path))
    return Corpus(*(np.frombuffer(b"".join(part), np.uint8) for part in (train, validation)))


def _docstrings(path: Path) -> bytes:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (n for n in ast.walk(ast.parse(path.read_bytes())) if isinstance(n, documented))
    texts = [text for node in nodes if (text := ast.get_docstring(node))]
    return "".join(f"{text}\n\n" for text in texts).encode()
