"""The network interface that leads to the other machines, for which gloo does not look.

Unless `GLOO_SOCKET_IFNAME` names one, gloo binds to the address that the machine's own name stands
for. That is often a loopback address: then one rank ends with "connectFullMesh failed" and the
others wait for it.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import MutableMapping
from typing import NamedTuple

import psutil

VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Stands for other machines where no address is known: reserved for documentation, RFC 5737.
ANYWHERE = "192.0.2.1"


class Route(NamedTuple):
    """How this machine reaches another one.

    Attributes:
        interface: Its network interface, for example "eth0".
        address: Of this machine on it.
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
    """Returns how this machine reaches a host; asks the kernel, and sends nothing.

    Args:
        host: A name or an address.

    Raises:
        OSError: If the name is not known, or nothing leads there.
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
    """Names the interface that leads to the first rank, for gloo and NCCL, where nobody did.

    To be called before torch.distributed is initialised, in a process that torchrun or accelerate
    launch started. Changes nothing where all ranks are on one machine.

    Returns:
        What was set and why, for a user to read; nothing if nothing was.
    """
    unset = [name for name in VARIABLES if name not in environment]
    host = environment.get("MASTER_ADDR", "")
    ranks, here = (environment.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if not unset or not host or ranks == here:
        return ""
    for target in (host, ANYWHERE):
        try:
            route = route_to(target)
        except OSError:  # torch.distributed will say that it cannot reach it.
            continue
        # A machine's own name may stand for a loopback address on it.
        if not route.is_loopback:
            environment.update(dict.fromkeys(unset, route.interface))
            names = " ".join(f"{name}={route.interface}" for name in unset)
            whither = host if target == host else "other machines"
            return f"{names}, which leads to {whither}; export another one if votes are to take it"
    return ""
