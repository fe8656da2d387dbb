"""`hf-dlion run COMMAND`: any command, with `optim="dlion"` in its Python processes."""

from __future__ import annotations

import argparse

import hf_dlion.launch as launch


def run(args: argparse.Namespace) -> int:
    """Replaces this process by the command. Raises what `hf_dlion.launch.run` raises."""
    words = args.words[1:] if args.words[0] == "--" else args.words
    if not words:
        raise ValueError("there is no command after --")
    launch.run(words)
