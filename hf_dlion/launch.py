"""Runs a script that knows nothing of hf_dlion, after `hf_dlion.register()`.

    accelerate launch -m hf_dlion.launch run_clm.py --optim dlion ...
    torchrun --nproc_per_node 2 -m hf_dlion.launch run_clm.py --optim dlion ...
    python -m hf_dlion.launch -m package.module --optim dlion ...

Between machines it names the network interface that leads to the first one, in GLOO_SOCKET_IFNAME
and NCCL_SOCKET_IFNAME where they are unset, and says so.

The script sees the command line, `sys.path` and `__main__` that `python run_clm.py ...` would give
it. transformers is imported before it, so environment variables that configure transformers at its
import (`HF_HOME`) must be set outside the script.
"""

from __future__ import annotations

import gc
import os
import runpy
import sys
from typing import NoReturn

USAGE = """\
usage: python -m hf_dlion.launch SCRIPT [ARGS...]
       python -m hf_dlion.launch -m MODULE [ARGS...]
(the same after "accelerate launch" and "torchrun ...", instead of "python")

Runs SCRIPT or MODULE as python would, with optim="dlion" available in TrainingArguments."""


def main(argv: list[str] | None = None) -> None:
    """Registers, then runs the script or module that `argv` names.

    Args:
        argv: The script and its arguments, or "-m", the module and its arguments; by default those
            of this process.

    Raises:
        SystemExit: With code 2 and the usage, if `argv` names nothing that can be run; with code 2
            and one line, if it asks for options in `optim_args` that there are not; otherwise as
            the script does.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    if not argv:
        _fail("no script given")
    if argv[0] == "-m" and len(argv) < 2:
        _fail("no module given after -m")
    if argv[0] != "-m" and argv[0].startswith("-"):
        _fail(f"{argv[0]} stands before the script; the script's options go after its name")
    if argv[0] != "-m" and not os.path.isfile(argv[0]):
        _fail(f"there is no script {argv[0]}")

    # They take seconds, which a usage error need not.
    from hf_dlion.ranks.interface import name_interface
    from hf_dlion.trainer import register

    if (named := name_interface()) and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"hf_dlion.launch: {named}", file=sys.stderr)
    register()
    try:
        _run(argv)
    except (TypeError, ValueError, NotImplementedError) as error:
        # Every error about `optim_args` begins so. No line of the script is to blame for it. Each
        # rank says it: a launcher ends them all as soon as one has ended, be it rank 0 or another.
        if not str(error).startswith("optim_args"):
            raise
        print(f"hf_dlion.launch: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    _end_process_group()


def _run(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = argv
    if not sys.flags.safe_path:
        # What `python script` puts there; -m left the current folder.
        sys.path[0] = os.path.dirname(os.path.realpath(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")


def _end_process_group() -> None:
    """Ends what the script left: a gloo group that outlives Python may abort the process."""
    import torch.distributed as dist

    gc.collect()  # a DDP model that outlives its group may abort it too
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _fail(reason: str) -> NoReturn:
    print(f"hf_dlion.launch: {reason}\n{USAGE}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
