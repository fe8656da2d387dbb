"""What happens in a Python process of `hf-dlion run` once it has imported torch or transformers."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from hf_dlion.launch.network import name_interface


def set_interface() -> None:
    """Sets the network interface as `name_interface` does; one rank of each node prints it."""
    if (note := name_interface()) and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"hf-dlion: {note}", file=sys.stderr)


def accept_name() -> None:
    """Makes "dlion" a valid `optim`; an error about `optim_args` has no traceback then.

    Every rank prints its line, because a launcher ends all ranks as soon as one has ended.
    """
    from hf_dlion.trainer.arguments import add_name

    add_name()
    original = sys.excepthook

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        # The user's options are wrong, so the script's traceback wouldn't help.
        is_option = isinstance(error, (TypeError, ValueError, NotImplementedError))
        if is_option and str(error).startswith("optim_args"):
            print(f"hf-dlion: {error}", file=sys.stderr)
        else:
            original(kind, error, traceback)

    sys.excepthook = excepthook


def register() -> None:
    """Calls `hf_dlion.register()`."""
    import hf_dlion

    hf_dlion.register()
