"""Chooses the network interface that gloo uses in a run on several nodes. By default, gloo advertises the address to which a
rank's host name resolves. On Debian, this is 127.0.1.1, and a rank that connects to 127.0.1.1 reaches its own node."""

import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from socket import AF_INET, AF_INET6

import psutil

OUTSIDE = ("192.0.2.1", "2001:db8::1")
"""Addresses that no machine has (RFC 5737, RFC 3849), used only to find the default route."""


def gloo_interface(environment: Mapping[str, str], master: str) -> str | None:
    """Return the name of an interface for gloo, or None if NCCL_SOCKET_IFNAME allows no interface. The first choice is the
    interface with the route to `master`, unless this node is `master` and its name resolves to 127.0.1.1. The second choice is
    the interface of the default route, and the third choice is any allowed interface."""
    wanted = environment.get("NCCL_SOCKET_IFNAME", "")
    allowed = {name: addresses for name, addresses in interfaces().items() if allows(wanted, name)}
    for host in (master, *OUTSIDE):
        for source in sources(host):
            for name, addresses in allowed.items():
                if source in addresses:
                    return name
    return next(iter(allowed), None)


def allows(wanted: str, name: str) -> bool:
    """Return whether NCCL_SOCKET_IFNAME allows `name`: `eth` allows eth0 and eth1; `=eth0` allows eth0; `^eth` forbids both."""
    prefixes = [each for each in wanted.lstrip("^=").split(",") if each]
    exactly = wanted.lstrip("^").startswith("=")
    named = any(name == each if exactly else name.startswith(each) for each in prefixes)
    if wanted.startswith("^") or not prefixes:
        return not named and name != "lo"
    return named


def sources(host: str) -> Iterator[str]:
    """Yield the source addresses that this machine would use for packets to a host."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as sender:
                sender.connect(address)  # a datagram socket looks up the route and sends nothing
                yield sender.getsockname()[0]


def interfaces() -> dict[str, list[str]]:
    """Return the IP addresses of the interfaces that are up, keyed by interface name. Omit link-local IPv6 addresses."""
    found = {}
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    for name, addresses in psutil.net_if_addrs().items():
        own = [each.address for each in addresses if each.family in (AF_INET, AF_INET6)]
        if name in up and (routable := [address for address in own if not address.startswith("fe80:")]):
            found[name] = routable
    return found
