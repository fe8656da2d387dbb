"""Text that every Python has: the source of its standard library, and the prose in it."""

from __future__ import annotations

import ast
import functools
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

# Files that are kept for validation, as in examples/finetune_llm.py.
HELD_OUT = ("argparse.py", "json/decoder.py", "statistics.py", "tarfile.py", "textwrap.py")


@dataclass(frozen=True)
class Corpus:
    """A text to learn from, and one to be tested on; one token is one byte."""

    train: Bytes
    validation: Bytes


@functools.cache
def code() -> Corpus:
    """Returns the source of the standard library."""
    train, validation = bytearray(), bytearray()
    for path, held_out in _modules():
        (validation if held_out else train).extend(path.read_bytes())
    return _corpus(train, validation)


@functools.cache
def base_code() -> Corpus:
    """Returns the source of every other file, so that a base has not seen all docstrings."""
    train, validation = bytearray(), bytearray()
    for number, (path, held_out) in enumerate(_modules()):
        if held_out:
            validation.extend(path.read_bytes())
        elif number % 2 == 0:
            train.extend(path.read_bytes())
    return _corpus(train, validation)


@functools.cache
def prose() -> Corpus:
    """Returns the docstrings of the files that `base_code` leaves out."""
    train, validation = bytearray(), bytearray()
    for number, (path, held_out) in enumerate(_modules()):
        if held_out or number % 2:
            for text in _docstrings(path.read_bytes()):
                (validation if held_out else train).extend(text.encode() + b"\n\n")
    return _corpus(train, validation)


def blocks(text: Bytes, length: int, count: int) -> Bytes:
    """Returns up to `count` pieces of a text, evenly spread over it, shape (pieces, length)."""
    whole = text[: len(text) // length * length].reshape(-1, length)
    taken = min(count, len(whole))
    return whole[np.arange(taken) * len(whole) // max(taken, 1)]


def _modules() -> Iterator[tuple[Path, bool]]:
    """Yields the files, and whether each is held out."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [*root.glob("*.py"), *(root / "json").glob("*.py"), *(root / "email").glob("*.py")]
    for path in sorted(found):
        yield path, path.relative_to(root).as_posix() in HELD_OUT


def _docstrings(source: bytes) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented):
            text = ast.get_docstring(node)
            if text:
                yield text


def _corpus(train: bytearray, validation: bytearray) -> Corpus:
    return Corpus(np.frombuffer(bytes(train), np.uint8), np.frombuffer(bytes(validation), np.uint8))
