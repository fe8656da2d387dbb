"""Starts commands in whose Python processes `optim="dlion"` is a valid name.

usage: python -m hf_dlion.launch SCRIPT [ARGS...]
       python -m hf_dlion.launch -m MODULE [ARGS...]

These lines are for launchers, such as torchrun. `hf-dlion run COMMAND` does the same for a complete
command, and has its own guide.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import NoReturn

# Its sitecustomize.py is imported by every Python process whose PYTHONPATH begins with it.
STARTUP = str(Path(__file__).resolve().parent / "startup")


def run(command: Sequence[str]) -> NoReturn:
    """Replaces this process by a command, in whose Python processes `optim="dlion"` is valid.

    The command keeps this process's number, so it receives its signals and sets its exit code.

    Args:
        command: Program, and its arguments.

    Raises:
        SystemExit: With a message, and code 127 if there is no such program, or 126 if it can't be
            run.
    """
    program = command[0]
    found = shutil.which(program)
    if found is None:
        # Puts this Python's scripts on PATH, as activating its environment would.
        scripts = os.path.dirname(sys.executable)
        if found := shutil.which(program, path=scripts):
            os.environ["PATH"] = os.pathsep.join([scripts, os.environ.get("PATH", os.defpath)])
        elif not os.path.exists(program):
            _fail(f"{program}: command not found", 127)
        else:
            py = f". To run a script, write hf-dlion run python {program}"
            _fail(f"{program} isn't executable{py if program.endswith('.py') else ''}", 126)
    add_startup(os.environ)
    _become(found, command)


def add_startup(environment: MutableMapping[str, str]) -> None:
    """Puts the folder `startup` first in PYTHONPATH."""
    # An empty entry is the current folder, but an empty variable has none.
    earlier = environment["PYTHONPATH"].split(os.pathsep) if environment.get("PYTHONPATH") else []
    entries = [STARTUP, *(entry for entry in earlier if entry != STARTUP)]
    environment["PYTHONPATH"] = os.pathsep.join(entries)


def main() -> None:
    """Replaces `python -m hf_dlion.launch SCRIPT` by `python SCRIPT`, where "dlion" is valid.

    Raises:
        SystemExit: With code 2 and the usage, if there is no script; otherwise as `run`.
    """
    argv = sys.argv[1:]
    if argv[:1] in (["-h"], ["--help"]):
        print(__doc__)
        return
    options = sys.orig_argv[1 : len(sys.orig_argv) - len(argv) - 2]  # Before -m hf_dlion.launch.
    if not argv:
        _fail(f"no script given\n\n{__doc__}")
    run([sys.executable, *options, *argv])


def _become(program: str, command: Sequence[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execv(program, list(command))
    except OSError as error:
        hint = ""
        if error.errno == errno.ENOEXEC:
            hint = f". If it is a script without a #! line, write hf-dlion run bash {command[0]}"
        _fail(f"{command[0]} can't be run: {error.strerror}{hint}", 126)


def _fail(reason: str, code: int = 2) -> NoReturn:
    print(f"hf-dlion run: {reason}", file=sys.stderr)
    raise SystemExit(code)
