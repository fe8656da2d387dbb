"""The interface that leads to the first machine is found, and named where nobody did."""

from __future__ import annotations

import socket

import psutil
import pytest

from hf_dlion.ranks import interface
from hf_dlion.ranks.interface import ANYWHERE, Route, interfaces, name_interface, route_to

TWO_MACHINES = {"MASTER_ADDR": "10.0.0.1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Route]:
    """What the kernel would answer, by host; a test may add to it."""
    known = {"10.0.0.1": Route("eth1", "10.0.0.7")}

    def answer(host: str) -> Route:
        if host not in known:
            raise OSError("Network is unreachable")
        return known[host]

    monkeypatch.setattr(interface, "route_to", answer)
    return known


def test_the_way_to_this_machine_is_its_loopback() -> None:
    route = route_to("127.0.0.1")
    assert route.is_loopback
    assert "127.0.0.1" in interfaces()[route.interface]


def test_the_way_to_an_address_of_this_machine_is_the_interface_that_has_it() -> None:
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            if entry.family == socket.AF_INET:
                assert route_to(entry.address) == Route(name, entry.address)


def test_an_unknown_name_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match=r"(?i)name|resolution"):
        route_to("no-such-host.invalid")


def test_what_is_unset_is_named_between_machines(routes: dict[str, Route]) -> None:
    environment = dict(TWO_MACHINES)
    said = name_interface(environment)
    assert environment["GLOO_SOCKET_IFNAME"] == environment["NCCL_SOCKET_IFNAME"] == "eth1"
    assert said.startswith("GLOO_SOCKET_IFNAME=eth1 NCCL_SOCKET_IFNAME=eth1, which leads to 10.0.0")


def test_what_is_set_stays(routes: dict[str, Route]) -> None:
    environment = {**TWO_MACHINES, "GLOO_SOCKET_IFNAME": "ib0"}
    assert name_interface(environment).startswith("NCCL_SOCKET_IFNAME=eth1, ")
    assert environment["GLOO_SOCKET_IFNAME"] == "ib0"
    environment = {**TWO_MACHINES, "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib"}
    assert name_interface(dict(environment)) == ""


@pytest.mark.parametrize(
    "environment", [{}, {**TWO_MACHINES, "LOCAL_WORLD_SIZE": "4"}, {"MASTER_ADDR": "10.0.0.1"}]
)
def test_on_one_machine_nothing_is_named(
    environment: dict[str, str], routes: dict[str, Route]
) -> None:
    before = dict(environment)
    assert name_interface(environment) == ""
    assert environment == before


def test_where_the_first_machines_name_is_a_loopback_address_the_way_out_is_named(
    routes: dict[str, Route],
) -> None:
    routes.update({"10.0.0.1": Route("lo", "127.0.1.1"), ANYWHERE: Route("wlan0", "192.168.1.2")})
    environment = dict(TWO_MACHINES)
    assert "which leads to other machines" in name_interface(environment)
    assert environment["GLOO_SOCKET_IFNAME"] == "wlan0"


def test_where_nothing_leads_there_nothing_is_named(routes: dict[str, Route]) -> None:
    routes.clear()
    assert name_interface(dict(TWO_MACHINES)) == ""
