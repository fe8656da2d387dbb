"""The network interface that leads to other nodes."""

from __future__ import annotations

import ipaddress
import os
import socket
from typing import NamedTuple

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
    import psutil  # Not earlier: most processes are on one node.

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
                local = probe.getsockname()[0]
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
        except (OSError, UnicodeError):  # torch.distributed will report that it cannot connect.
            continue
        # On rank 0's node MASTER_ADDR may be a loopback address.
        if not route.is_loopback:
            # NCCL takes each interface whose name begins so, but for "=" before it.
            values = dict(zip(VARIABLES, (route.interface, f"={route.interface}"), strict=True))
            os.environ.update({name: values[name] for name in unset})
            names = " ".join(f"{name}={values[name]}" for name in unset)
            if target == host:
                return f"set {names}, which leads to {host}. To use another one, export it"
            return (
                f"set {names}, which has the default route, because no interface leads to {host}. "
                f"If it doesn't lead to the other nodes, pass node 0's IP address as "
                f"MASTER_ADDR, or export another one"
            )
    return ""
