"""The command `hf-dlion`: its first word says what to do."""

from __future__ import annotations

import sys

USAGE = """\
usage: hf-dlion bench {codec,exchange,memory,train} [OPTIONS...]
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
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["bench"]:
        from hf_dlion.tools.bench.cli import main as bench

        return bench(words[1:])
    if words[:1] == ["plan"]:
        from hf_dlion.tools.plan.cli import main as plan

        return plan(words[1:])
    if words[:1] == ["study"]:
        from hf_dlion.tools.study.cli import main as study

        return study(words[1:])
    asked = words[:1] in (["-h"], ["--help"])
    print(USAGE, file=sys.stdout if asked else sys.stderr)
    return 0 if asked else 2
