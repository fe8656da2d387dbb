"""A slow network on one Linux machine: hosts are network namespaces, a bridge is their switch.

    host 0  eth0 --- p0 \
                         bridge        every line is a veth pair with `tc tbf` on both ends
    host 1  eth0 --- p1 /

All of it, the bridge too, lies in namespaces made here: no interface of the machine takes part.
Their names tell which process made them, so the next start can remove what a killed one left.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from hf_dlion.tools.plan.link import bits_per_s

PREFIX = "hfdlion"
INTERFACE = "eth0"
CONGESTION_CONTROL = "cubic"


class EmulationRefusedError(RuntimeError):
    """The network cannot be built here; the text says why and what to do."""


@dataclass(frozen=True)
class Network:
    """Hosts and the rate of each host's link.

    Attributes:
        hosts: Number of hosts.
        rate: As `tc` writes it, for example "100mbit".
        bits_per_s: The same as a number.
    """

    hosts: int
    rate: str
    bits_per_s: float

    def __str__(self) -> str:
        return f"{self.hosts}x{self.rate}"

    @staticmethod
    def parse(text: str) -> Network:
        """Returns the network that "2x100mbit" stands for."""
        hosts, _, rate = text.lower().partition("x")
        bits = bits_per_s(rate)
        if bits is None or not hosts.isdecimal() or not 2 <= int(hosts) <= 64:
            raise ValueError(
                f"{text!r} is no network: write hosts (2 to 64), x, and a rate in kbit, mbit or "
                f"gbit, for example 2x100mbit"
            )
        return Network(int(hosts), rate, bits)


def check_possible() -> None:
    """Checks that this process may build a network."""
    advice = "; leave --emulate out, or run under torchrun on real hosts"
    if sys.platform != "linux":
        raise EmulationRefusedError(f"--emulate needs Linux's network namespaces{advice}")
    if os.geteuid() != 0:
        raise EmulationRefusedError(f"--emulate makes network namespaces and needs root{advice}")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise EmulationRefusedError(
            f"--emulate needs {' and '.join(missing)}: install iproute2{advice}"
        )


class Emulation:
    """The namespaces of a network while the context lasts.

    Attributes:
        namespaces: One per host.
    """

    def __init__(self, network: Network) -> None:
        self._network = network
        self._stem = f"{PREFIX}-{os.getpid()}-{_start_of(os.getpid())}"
        self._switch = f"{self._stem}-sw"
        self.namespaces = [f"{self._stem}-h{host}" for host in range(network.hosts)]

    def __enter__(self) -> Emulation:
        """Removes what dead processes left, and builds."""
        check_possible()
        remove_stale()
        try:
            self._build()
        except subprocess.CalledProcessError as error:
            self.close()
            raise EmulationRefusedError(
                f"--emulate: {' '.join(error.cmd)} failed: {error.stderr.strip()}"
            ) from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for name in namespaces(self._stem + "-"):
            _remove(name)

    def _build(self) -> None:
        switch = self._switch
        # A namespace with a bridge is the switch ...
        _run("ip", "netns", "add", switch)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        # ... and each host a namespace whose one card ends in a port of it.
        for host, name in enumerate(self.namespaces):
            port = f"p{host}"
            _run("ip", "netns", "add", name)
            pair = ["link", "add", INTERFACE, "type", "veth", "peer", "name", port]
            _run("ip", "-n", name, *pair, "netns", switch)
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "addr", "add", f"10.9.0.{host + 1}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            # Linux's default, whatever this host prefers. 3.7 MB both ways at 100 Mbit/s take 305
            # to 318 ms with it, and 180 to 510 ms with bbr, whose probing does not suit bursts.
            route = ["10.9.0.0/24", "dev", INTERFACE, "congctl", CONGESTION_CONTROL]
            _run("ip", "-n", name, "route", "replace", *route)
            for where, device in ((name, INTERFACE), (switch, port)):
                self._limit(where, device)

    def _limit(self, namespace: str, device: str) -> None:
        # The bucket must hold what arrives between two ticks of a slow kernel clock.
        burst = max(64 * 1024, int(self._network.bits_per_s / 8 * 0.004))
        limit = ["tbf", "rate", self._network.rate, "burst", str(burst), "latency", "50ms"]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", *limit)


def namespaces(prefix: str = PREFIX + "-") -> list[str]:
    """Returns the names of the namespaces that begin with `prefix`."""
    lines = _run("ip", "netns", "list").splitlines()
    return [line.split()[0] for line in lines if line.startswith(prefix)]


def remove_stale() -> None:
    """Removes the namespaces whose maker no longer runs, and ends what runs inside."""
    for name in namespaces():
        maker = re.match(rf"{PREFIX}-(\d+)-(\d+)-", name)
        if maker is not None and _start_of(int(maker[1])) != maker[2]:
            _remove(name)


def _remove(name: str) -> None:
    # Another process may be removing the same leftovers.
    with contextlib.suppress(subprocess.CalledProcessError):
        deadline = time.monotonic() + 5.0
        while (inside := _run("ip", "netns", "pids", name).split()) and time.monotonic() < deadline:
            for pid in inside:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            time.sleep(0.05)
        _run("ip", "netns", "del", name)


def _start_of(pid: int) -> str | None:
    """Returns when a process started, in ticks: with the pid, a name that is not used twice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19]
    except OSError:
        return None


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout
