"""What happens in a Python process of `hf-dlion run` once it has imported torch or transformers."""

from __future__ import annotations

import os
import sys

from hf_dlion.launch.network import name_interface


def set_interface() -> None:
    """Sets the network interface as `name_interface` does; one rank of each node prints it."""
    if (note := name_interface()) and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"hf-dlion: {note}", file=sys.stderr)


def accept_name() -> None:
    """Makes "dlion" a valid `optim`."""
    from hf_dlion.trainer.arguments import add_name

    add_name()


def register() -> None:
    """Calls `hf_dlion.register()`."""
    import hf_dlion

    hf_dlion.register()
