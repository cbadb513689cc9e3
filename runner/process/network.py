"""
The network interface of gloo in a run on several nodes.

By itself gloo takes the address that the host's name stands for. Debian writes 127.0.1.1 there, and ranks of other nodes would
connect to themselves.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

OUTSIDE = ("192.0.2.1", "2001:db8::1")
"""Addresses for documentation: what routes to them is the default route. Nothing is sent there."""
SIOCGIFCONF, INTERFACE_BYTES = 0x8912, 40
"""The request for all IPv4 addresses (netdevice(7)), and the bytes of one in its answer."""
IPV6_ADDRESSES = Path("/proc/net/if_inet6")


def gloo_interface(environment: Mapping[str, str], master: str) -> str | None:
    """
    The interface over which gloo is to connect: of those that NCCL_SOCKET_IFNAME allows, the one that routes to the rendezvous.

    The loopback is no such interface, unless NCCL_SOCKET_IFNAME names it. On the host of the rendezvous itself, where its name
    may stand for 127.0.1.1, it is the interface of the default route.

    Args:
        environment: of the workers.
        master: host of the rendezvous.

    Returns:
        The first of those allowed where none of them routes there; None where none is allowed.
    """
    wanted = environment.get("NCCL_SOCKET_IFNAME", "")
    allowed = {name: addresses for name, addresses in interfaces().items() if allows(wanted, name)}
    for host in (master, *OUTSIDE):
        for source in sources(host):
            for name, addresses in allowed.items():
                if source in addresses:
                    return name
    return next(iter(allowed), None)


def allows(wanted: str, name: str) -> bool:
    """Whether a value of NCCL_SOCKET_IFNAME allows an interface: `eth,ib` as prefixes, `=eth0` exactly, `^docker` all others."""
    prefixes = [each for each in wanted.lstrip("^=").split(",") if each]
    exactly = wanted.lstrip("^").startswith("=")
    named = any(name == each if exactly else name.startswith(each) for each in prefixes)
    if wanted.startswith("^") or not prefixes:
        return not named and name != "lo"
    return named


def sources(host: str) -> Iterator[str]:
    """The addresses from which this machine would send to a host."""
    with suppress(OSError):
        for family, kind, protocol, _, address in socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, kind, protocol) as sender:
                sender.connect(address)  # of a datagram socket: looks up the route and sends nothing
                yield sender.getsockname()[0]


def interfaces() -> dict[str, list[str]]:
    """The addresses of every interface that is up, but for those of one link alone (IPv6)."""
    found: dict[str, list[str]] = {}
    buffer = bytearray(INTERFACE_BYTES * 1024)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        place = (ctypes.c_char * len(buffer)).from_buffer(buffer)
        answer = fcntl.ioctl(asked, SIOCGIFCONF, struct.pack("iP", len(buffer), ctypes.addressof(place)))
    for at in range(0, struct.unpack("iP", answer)[0], INTERFACE_BYTES):
        name = bytes(buffer[at : at + 16]).partition(b"\0")[0].decode()
        found.setdefault(name, []).append(socket.inet_ntoa(buffer[at + 20 : at + 24]))
    with suppress(OSError):  # no IPv6 here
        for line in IPV6_ADDRESSES.read_text().splitlines():
            address, _, _, scope, _, name = line.split()
            if scope != "20":
                found.setdefault(name, []).append(socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address)))
    return found
