"""Runs an unedited script after `hf_dlion.register()`, so `optim="dlion"` works in it.

usage: python -m hf_dlion.launch SCRIPT [ARGS...]
       python -m hf_dlion.launch -m MODULE [ARGS...]

Put "torchrun ..." or "accelerate launch ..." in place of "python". Examples:

    torchrun --nproc_per_node 2 -m hf_dlion.launch run_clm.py --optim dlion ...
    accelerate launch --multi_gpu --num_processes 2 -m hf_dlion.launch run_clm.py --optim dlion ...

The script sees the command line, `sys.path`, and `__main__` of `python SCRIPT ...`. On several
nodes, if `GLOO_SOCKET_IFNAME` or `NCCL_SOCKET_IFNAME` is unset, it is set to the network interface
that leads to `MASTER_ADDR`, and rank 0 of each node prints it. transformers is imported before the
script, so set variables such as `HF_HOME` outside of it.
"""

from __future__ import annotations

import gc
import ipaddress
import os
import runpy
import socket
import sys
from typing import NamedTuple, NoReturn

import psutil

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Address that stands for any other node; reserved for documentation (RFC 5737).
ANYWHERE = "192.0.2.1"


class Route(NamedTuple):
    """How this node reaches another one.

    Attributes:
        interface: Name of this node's network interface, for example "eth0".
        address: This node's address on that interface.
    """

    interface: str
    address: str

    @property
    def is_loopback(self) -> bool:
        """Whether the route ends on this node."""
        return ipaddress.ip_address(self.address).is_loopback


def interfaces() -> dict[str, list[str]]:
    """Returns the IP addresses of every network interface, by the interface's name."""
    kinds = (socket.AF_INET, socket.AF_INET6)
    return {
        name: [entry.address.partition("%")[0] for entry in entries if entry.family in kinds]
        for name, entries in psutil.net_if_addrs().items()
    }


def route_to(host: str) -> Route:
    """Returns how this node reaches a host; asks the kernel and sends nothing.

    Raises:
        OSError: If the host's name is unknown, or there is no route to it.
    """
    failure = OSError(f"{host} has no address")
    for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)
                local = probe.getsockname()[0].partition("%")[0]
        except OSError as error:
            failure = error
            continue
        for name, addresses in interfaces().items():
            if local in addresses:
                return Route(name, local)
    raise failure


def name_interface() -> str:
    """Sets the interface that gloo and NCCL use between nodes, if the user set none.

    Otherwise gloo binds to the address of the node's own name, which is often the loopback address.
    Call this function before torch.distributed is initialized. It does nothing if all ranks are on
    one node.

    Returns:
        A line for the user with what was set and why, or "" if no variable was set.
    """
    unset = [name for name in VARIABLES if name not in os.environ]
    host = os.environ.get("MASTER_ADDR", "")
    sizes = {os.environ.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    if not unset or not host or len(sizes) == 1:
        return ""
    for target in (host, ANYWHERE):
        try:
            route = route_to(target)
        except OSError:  # torch.distributed will report that it cannot connect.
            continue
        # On rank 0's node MASTER_ADDR may be a loopback address.
        if not route.is_loopback:
            os.environ.update(dict.fromkeys(unset, route.interface))
            names = " ".join(f"{name}={route.interface}" for name in unset)
            destination = host if target == host else "other nodes"
            return f"set {names}, which leads to {destination}. To use another one, export it"
    return ""


def main(argv: list[str] | None = None) -> None:
    """Calls `hf_dlion.register()`, then runs a script or module.

    Args:
        argv: Script and its arguments, or "-m", module and its arguments (default: those of this
            process).

    Raises:
        SystemExit: With code 2 and the usage, if there is no such script; with code 2 and one line,
            if `optim_args` is wrong; otherwise with the script's own code.
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
        _fail(f"{first} comes before the script: put options after the script's name")
    elif not os.path.isfile(first):
        _fail(f"{first}: no such script")
    if (note := name_interface()) and os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"hf_dlion.launch: {note}", file=sys.stderr)
    import torch.distributed as dist

    import hf_dlion  # Not earlier: it takes seconds, and a usage error doesn't need it.

    hf_dlion.register()
    code: object = None
    try:
        _run(argv)
    except (TypeError, ValueError, NotImplementedError) as error:
        # The user's options are wrong, so the script's traceback wouldn't help. Every rank prints
        # the line, because a launcher ends all ranks as soon as one has ended.
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
        # As `python SCRIPT` does; -m put the current folder there.
        sys.path[0] = os.path.dirname(os.path.realpath(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")


def _fail(reason: str) -> NoReturn:
    print(f"hf_dlion.launch: {reason}\n\n{__doc__}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
