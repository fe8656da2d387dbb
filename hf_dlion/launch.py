"""Runs an unedited script after `hf_dlion.register()`, so `optim="dlion"` works in it.

usage: python -m hf_dlion.launch SCRIPT [ARGS...]
       python -m hf_dlion.launch -m MODULE [ARGS...]

Put "torchrun ..." or "accelerate launch ..." in place of "python". Examples:

    torchrun --nproc_per_node 2 -m hf_dlion.launch run_clm.py --optim dlion ...
    accelerate launch --multi_gpu --num_processes 2 -m hf_dlion.launch run_clm.py --optim dlion ...

The script gets the command line, `sys.path`, and `__main__` that `python SCRIPT ...` would give it.
On several nodes, `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` are set to the network interface
that leads to `MASTER_ADDR` if they are unset, and rank 0 of each node prints it. transformers is
imported before the script, so set variables such as `HF_HOME` outside of it.
"""

from __future__ import annotations

import gc
import ipaddress
import os
import runpy
import socket
import sys
from collections.abc import MutableMapping
from typing import NamedTuple, NoReturn

import psutil

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Any other machine, if none is known: an address reserved for documentation (RFC 5737).
ANYWHERE = "192.0.2.1"


class Route(NamedTuple):
    """How this machine reaches another one."""

    interface: str  # Name of its network interface, for example "eth0".
    address: str  # Its address on that interface.

    @property
    def is_loopback(self) -> bool:
        """Whether it leads no further than this machine."""
        return ipaddress.ip_address(self.address).is_loopback


def interfaces() -> dict[str, list[str]]:
    """Returns the addresses of every network interface, by its name."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in kinds]
        for name, entries in psutil.net_if_addrs().items()
    }


def route_to(host: str) -> Route:
    """Returns how this machine reaches a host; asks the kernel and sends nothing.

    Raises:
        OSError: If the name is unknown, or no route leads there.
    """
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, where in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                own = probe.getsockname()[0].partition("%")[0]
        except OSError as error:
            failure = error
            continue
        for name, addresses in interfaces().items():
            if own in addresses:
                return Route(name, own)
    raise failure


def name_interface(environment: MutableMapping[str, str] = os.environ) -> str:
    """Sets the interface that gloo and NCCL use between nodes, if the user set none.

    gloo otherwise binds to the address of the machine's own name, which often is the loopback.
    Call it before torch.distributed is initialized. Changes nothing if all ranks are on one node.

    Returns:
        What was set and why, for a user to read; "" if nothing was.
    """
    unset = [name for name in VARIABLES if name not in environment]
    host = environment.get("MASTER_ADDR", "")
    ranks, here = (environment.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not unset or not host or ranks == here:
        return ""
    for target in (host, ANYWHERE):
        try:
            route = route_to(target)
        except OSError:  # torch.distributed will say that it cannot connect.
            continue
        # On rank 0's node its own name may stand for a loopback address.
        if not route.is_loopback:
            environment.update(dict.fromkeys(unset, route.interface))
            names = " ".join(f"{name}={route.interface}" for name in unset)
            destination = host if target == host else "other machines"
            return f"set {names}, which leads to {destination}; to use another one, export it"
    return ""


def main(argv: list[str] | None = None) -> None:
    """Registers, then runs the script or module that `argv` names.

    Args:
        argv: Script and its arguments, or "-m", module and its arguments (default: those of this
            process).

    Raises:
        SystemExit: With code 2 and the usage, if `argv` names nothing that can be run; with code 2
            and one line, if `optim_args` is wrong; otherwise as the script does.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    first = argv[0] if argv else ""
    if first in ("-h", "--help"):
        print(__doc__)
        return
    if not argv:
        _fail("no script given")
    if first == "-m":
        if len(argv) < 2:
            _fail("no module given after -m")
    elif first.startswith("-"):
        _fail(f"{first} comes before the script; put the script's options after its name")
    elif not os.path.isfile(first):
        _fail(f"{first}: no such script")
    for told in (name_interface(), _alone()):
        if told and os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"hf_dlion.launch: {told}", file=sys.stderr)
    import torch.distributed as dist

    import hf_dlion  # Takes seconds, which a usage error doesn't need.

    hf_dlion.register()
    code: object = None
    try:
        _run(argv)
    except (TypeError, ValueError, NotImplementedError) as error:
        # Errors about `optim_args` begin so; no line of the script is to blame for them. Every rank
        # prints one, because a launcher ends all ranks as soon as one has ended.
        if not str(error).startswith("optim_args"):
            raise
        print(f"hf_dlion.launch: {error}", file=sys.stderr)
        code = 2
    except SystemExit as end:
        code = end.code
    if not code:
        # Not inside `except`, where the traceback keeps the script's model alive: a DDP model that
        # outlives its gloo group, or a group that outlives Python, may abort the process.
        gc.collect()
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()
    if code is not None:
        raise SystemExit(code)


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


def _alone() -> str:
    """Returns what to say if Accelerate was asked for several processes and started one."""
    # It names an address only if it was asked for several processes or nodes.
    asked = {"ACCELERATE_DYNAMO_BACKEND", "MASTER_ADDR"} <= os.environ.keys()
    if not asked or "WORLD_SIZE" in os.environ:
        return ""
    return (
        "accelerate launch was asked for several processes and started only this one, as it does "
        "with --cpu or without --multi_gpu. Pass --multi_gpu (without GPUs also set "
        "ACCELERATE_USE_CPU=true), or use torchrun"
    )


def _fail(reason: str) -> NoReturn:
    print(f"hf_dlion.launch: {reason}\n\n{__doc__}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
