"""What a command prints if it refuses its words."""

from __future__ import annotations

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
