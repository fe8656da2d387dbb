"""Emulates a slow network on one Linux machine: network namespaces are hosts, a bridge a switch.

    host 0  eth0 --- p0 \
                         bridge        every line is a veth pair with `tc tbf` on both ends
    host 1  eth0 --- p1 /

The bridge has a separate namespace, so the machine's own interfaces are not involved. Names contain
the id of the process that created them, so the next start removes what a killed process left.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hf_dlion.cli.arguments import rate

PREFIX = "hfdlion"
INTERFACE = "eth0"


@dataclass(frozen=True)
class Network:
    """Hosts and the rate of each host's link.

    Attributes:
        hosts: Number of hosts.
        rate: Rate of a host's link as it was written, for example "100mbit".
    """

    hosts: int
    rate: str

    def __str__(self) -> str:
        return f"{self.hosts}x{self.rate}"

    @staticmethod
    def parse(text: str) -> Network:
        """Returns the network of a text such as "2x100mbit".

        Raises:
            argparse.ArgumentTypeError: If the text is not a network.
        """
        hosts, _, speed = text.partition("x")
        if not hosts.isdecimal() or not 2 <= int(hosts) <= 64:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not a network; use 2 to 64 hosts, for example 2x100mbit"
            )
        rate(speed)
        return Network(int(hosts), speed)


def address(host: int) -> str:
    """Returns the address of a host."""
    return f"10.9.0.{host + 1}"


def check_possible() -> None:
    """Checks that this process can create a network.

    Raises:
        OSError: If it can't.
    """
    reason = ""
    if sys.platform != "linux":
        reason = "needs Linux's network namespaces"
    elif os.geteuid() != 0:
        reason = "creates network namespaces and needs root"
    elif missing := [tool for tool in ("ip", "tc") if shutil.which(tool) is None]:
        reason = f"needs {' and '.join(missing)}, so install iproute2"
    if reason:
        raise OSError(f"--emulate {reason}; run without --emulate, or with torchrun on real hosts")


@contextlib.contextmanager
def emulated(network: Network) -> Iterator[list[str]]:
    """Yields the names of a network's namespaces, one per host; removes those of dead processes.

    Raises:
        OSError: If the network cannot be created here.
    """
    check_possible()
    remove_stale()
    stem = f"{PREFIX}-{os.getpid()}-"
    hosts = [f"{stem}h{host}" for host in range(network.hosts)]
    try:
        try:
            _build(network, f"{stem}sw", hosts)
        except subprocess.CalledProcessError as error:
            words = " ".join(error.cmd)
            raise OSError(f"--emulate: {words} failed: {error.stderr.strip()}") from error
        yield hosts
    finally:
        for name in namespaces(stem):
            _remove(name)


def enter(hosts: Sequence[str], host: int) -> None:
    """Moves this process into the namespace of a host, and onto its core."""
    with Path("/run/netns", hosts[host]).open() as namespace:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(namespace.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {hosts[host]}")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[host % len(cores)]})


def _build(network: Network, switch: str, hosts: Sequence[str]) -> None:
    _run("ip", "netns", "add", switch)
    _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
    _run("ip", "-n", switch, "link", "set", "bridge", "up")
    for host, name in enumerate(hosts):
        port = f"p{host}"
        _run("ip", "netns", "add", name)
        pair = ["link", "add", INTERFACE, "type", "veth", "peer", "name", port]
        _run("ip", "-n", name, *pair, "netns", switch)
        _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
        _run("ip", "-n", name, "addr", "add", f"{address(host)}/24", "dev", INTERFACE)
        _run("ip", "-n", name, "link", "set", INTERFACE, "up")
        _run("ip", "-n", name, "link", "set", "lo", "up")
        # Use Linux's default congestion control; bbr's probing does not suit bursts.
        route = ["10.9.0.0/24", "dev", INTERFACE, "congctl", "cubic"]
        _run("ip", "-n", name, "route", "replace", *route)
        for namespace, device in ((name, INTERFACE), (switch, port)):
            # The bucket must hold the bytes between two ticks of a slow kernel clock.
            bits = rate(network.rate)
            burst = max(64 * 1024, int(bits / 8 * 0.004))
            limit = ["tbf", "rate", f"{bits:.0f}bit", "burst", str(burst), "latency", "50ms"]
            _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *limit)


def namespaces(prefix: str = PREFIX + "-") -> list[str]:
    """Returns the names of namespaces that begin with `prefix`."""
    lines = _run("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.startswith(prefix)]


def remove_stale() -> None:
    """Removes the namespaces of processes that ended, and kills the processes inside."""
    for name in namespaces():
        if not Path("/proc", name.split("-")[1]).exists():
            _remove(name)


def _remove(name: str) -> None:
    # Another process may be removing the same namespace.
    with contextlib.suppress(subprocess.CalledProcessError):
        deadline = time.monotonic() + 5.0
        while (inside := _run("ip", "netns", "pids", name).split()) and time.monotonic() < deadline:
            for pid in inside:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        _run("ip", "netns", "del", name)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
