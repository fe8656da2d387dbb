"""The command `hf-dlion`: its first word says what to do."""

from __future__ import annotations

import difflib
import importlib
import sys

# By word, the module whose `main` takes the words after it.
COMMANDS = {
    "doctor": "hf_dlion.tools.doctor",
    "plan": "hf_dlion.tools.plan.cli",
}
USAGE = """\
usage: hf-dlion doctor
       hf-dlion plan MODEL --ranks N --link RATE [OPTIONS...]
       hf-dlion --version

  doctor   say whether this machine, or under torchrun all ranks, can train
  plan     predict what a step costs, and whether the exchange pays (hf-dlion plan --help)

Under torchrun: torchrun ... -m hf_dlion doctor"""


def main(argv: list[str] | None = None) -> int:
    """Runs the command that the first word of `argv` names; returns the exit code.

    Args:
        argv: The words after `hf-dlion`; by default those of this process.
    """
    word, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    if word in COMMANDS:
        # Each command needs packages of its own.
        code: int = importlib.import_module(COMMANDS[word]).main(rest)
        return code
    if word == "--version":
        from hf_dlion import __version__

        print("hf-dlion", __version__)
        return 0
    if word in ("-h", "--help"):
        print(USAGE)
        return 0
    near = difflib.get_close_matches(word, COMMANDS, n=1)
    if word:
        meant = f", did you mean {near[0]}?" if near else ""
        print(f"hf-dlion: there is no command {word!r}{meant}", file=sys.stderr)
    print(USAGE, file=sys.stderr)
    return 2
