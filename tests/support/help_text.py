"""What every command prints: its --help, and what it says about words that it refuses."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def refused(
    main: Callable[[Sequence[str]], Any], words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> str:
    """Returns what a command that ends with code 2 prints about its words, as one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        sys.exit(main(words))
    assert ended.value.code == 2
    return " ".join(capsys.readouterr().err.split())


def checked_help(
    main: Callable[[Sequence[str]], Any],
    words: Sequence[str],
    examples: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> str:
    """Returns the help, which explains every option and has at least two examples.

    Args:
        main: Function of the command line.
        words: Words before --help.
        examples: Pattern of the first words of an example.
        monkeypatch: Fixture that sets the width of the terminal.
        capsys: Fixture that has what is printed.
    """
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        main([*words, "--help"])
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert len(re.findall(rf"^  (?:{examples}) ", text, re.MULTILINE)) >= 2
    section = text.partition("\noptions:\n")[2].split("\n\n")[0]
    options = [" ".join(option.split()) for option in re.split(r"\n  (?=--)", section)[1:]]
    usage = text.partition("\n\n")[0]
    assert {option.split()[0] for option in options} == set(re.findall(r"--[\w-]+", usage))
    for option in options:
        assert re.search(r"\((default: [^()]+|required)\)\.$", option), option
    return text
