"""Runs an unedited script after `hf_dlion.register()`, so `--optim dlion` works in it.

    torchrun --nproc_per_node 2 -m hf_dlion.launch run_clm.py --optim dlion ...
    accelerate launch --multi_gpu --num_processes 2 -m hf_dlion.launch run_clm.py --optim dlion ...
    python -m hf_dlion.launch -m package.module --optim dlion ...

The script gets the command line, `sys.path`, and `__main__` that `python run_clm.py ...` would give
it. On several nodes, `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` are set to the network interface
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

USAGE = """\
usage: python -m hf_dlion.launch SCRIPT [ARGS...]
       python -m hf_dlion.launch -m MODULE [ARGS...]

Runs SCRIPT or MODULE as python would, with optim="dlion" available in TrainingArguments.
Also after "torchrun ..." and "accelerate launch ..." instead of "python".

examples:
  torchrun --nproc_per_node 2 -m hf_dlion.launch run_clm.py --optim dlion --output_dir out
  accelerate launch --multi_gpu -m hf_dlion.launch -m trl.scripts.sft --optim dlion"""

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Any other machine, if none is known: an address reserved for documentation (RFC 5737).
ANYWHERE = "192.0.2.1"


class Route(NamedTuple):
    """How this machine reaches another one.

    Attributes:
        interface: Name of its network interface, for example "eth0".
        address: Address of this machine on that interface.
    """

    interface: str
    address: str

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

    Args:
        host: Name or address.

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
    if argv and argv[0] in ("-h", "--help"):
        print(USAGE)
        return
    if not argv:
        _fail("no script given")
    if argv[0] == "-m" and len(argv) < 2:
        _fail("no module given after -m")
    if argv[0] != "-m" and argv[0].startswith("-"):
        _fail(f"{argv[0]} comes before the script; put the script's options after its name")
    if argv[0] != "-m" and not os.path.isfile(argv[0]):
        _fail(f"{argv[0]}: no such script")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        for told in (name_interface(), _alone()):
            if told:
                print(f"hf_dlion.launch: {told}", file=sys.stderr)
    else:
        name_interface()
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
    # Here, because an exception's traceback keeps the script's model alive.
    if not code:
        _end_process_group()
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


def _end_process_group() -> None:
    """Ends the script's process group: a gloo group that outlives Python may abort the process."""
    import torch.distributed as dist

    gc.collect()  # A DDP model that outlives its group may abort it, too.
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


def _fail(reason: str) -> NoReturn:
    print(f"hf_dlion.launch: {reason}\n{USAGE}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()
