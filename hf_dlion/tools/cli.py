"""The command `hf-dlion`: its first word says what to do."""

from __future__ import annotations

import importlib
import sys

COMMANDS = ("bench", "plan", "study")
USAGE = """\
usage: hf-dlion bench {codec,exchange,memory,train,plot} [OPTIONS...]
       hf-dlion plan MODEL --ranks N --link RATE [OPTIONS...]
       hf-dlion study [--scale {smoke,small,medium,full}] [OPTIONS...]

  bench    measure on this machine or cluster (hf-dlion bench --help)
  plan     predict what a step costs, and whether the exchange pays (hf-dlion plan --help)
  study    train with each method at its best learning rate, compare (hf-dlion study --help)"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command that the first word of `argv` names; returns the exit code.

    Args:
        argv: The words after `hf-dlion`; by default those of this process.
    """
    word, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if word in COMMANDS:
        # Each command needs packages of its own.
        code: int = importlib.import_module(f"hf_dlion.tools.{word}.cli").main(rest)
        return code
    asked = word in ("-h", "--help")
    print(USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
