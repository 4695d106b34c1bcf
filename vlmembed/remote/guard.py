"""Connections to the addresses of other machines only.

Lists and columns hold URLs that nobody has looked at. Such a URL must not reach what listens on this machine alone, or
the cloud's metadata service, which gives out credentials. So a host's name is resolved here, every address that it has
is checked, and the connection is made to a checked address: a second look-up of the name could give another one.

Private ranges (10.0.0.0/8 and the like) are allowed, since data often lies on servers in them; but not this machine's
own address there, which a connection shows by having it at both ends.
"""

from __future__ import annotations

import socket
import time
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import TYPE_CHECKING, TypeAlias

import httpcore2

if TYPE_CHECKING:
    from collections.abc import Iterable

Address: TypeAlias = IPv4Address | IPv6Address

_THIS_NETWORK = ip_network("0.0.0.0/8")
_NAT64 = IPv6Network("64:ff9b::/96")
_AWS_SERVICES = IPv6Network("fd00:ec2::/32")
_METADATA = frozenset(map(ip_address, ("fd20:ce::254", "100.100.100.200", "192.0.0.192", "168.63.129.16")))
"""Clouds' services for the machines in them, where they are not link-local: Google, Alibaba, Oracle, Azure."""


class LocalAddressError(OSError):
    """A host has an address that is not connected to; the message says which, and why."""


class GuardedBackend(httpcore2.NetworkBackend):
    """Opens connections for `httpcore2`; with `allow_local` to every address."""

    def __init__(self, *, allow_local: bool) -> None:
        self._allow_local = allow_local
        self._backend = httpcore2.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.NetworkStream:
        """Connect to the first address of the host that answers, within `timeout` seconds.

        Raises:
            LocalAddressError: one of them is refused.
            OSError: the name cannot be resolved.
        """
        addresses = resolve(host, port)
        if not self._allow_local:
            for address in addresses:
                if kind := local_kind(ip_address(address)):
                    msg = f"{host} is {address}, {kind}" if host != address else f"{address} is {kind}"
                    raise LocalAddressError(msg)
        deadline = None if timeout is None else time.monotonic() + timeout
        for index, address in enumerate(addresses):
            left = None if deadline is None else max(0.1, deadline - time.monotonic()) / (len(addresses) - index)
            try:
                stream = self._backend.connect_tcp(address, port, left, local_address, socket_options)
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout):
                if index == len(addresses) - 1:
                    raise
            else:
                return stream if self._allow_local else _elsewhere(stream, host)
        raise AssertionError


def _elsewhere(stream: httpcore2.NetworkStream, host: str) -> httpcore2.NetworkStream:
    """A connection, unless it is one with this machine."""
    try:
        peer, own = (stream.get_extra_info(name)[0] for name in ("server_addr", "client_addr"))
    except OSError:  # it is broken already: the request will say so
        return stream
    if peer != own:
        return stream
    stream.close()
    msg = f"{host} is this machine ({peer})"
    raise LocalAddressError(msg)


def resolve(host: str, port: int) -> list[str]:
    """Addresses of a host, in the system's order, without repetition.

    Raises:
        OSError: there are none, or they cannot be found out.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def local_kind(address: Address) -> str | None:
    """What kind of address it is that is refused; None where it is not. What stands for an IPv4 address counts as that
    address."""
    address = _embedded(address)
    kinds = {
        "a loopback address": address.is_loopback,
        "a link-local address, as clouds' metadata services have": address.is_link_local,
        "an unspecified address": address.is_unspecified or address in _THIS_NETWORK,
        "a multicast address": address.is_multicast,
        "a cloud's metadata service": address in _METADATA or address in _AWS_SERVICES,
        "a reserved address": address.is_reserved,
    }
    return next((kind for kind, is_so in kinds.items() if is_so), None)


def _embedded(address: Address) -> Address:
    if isinstance(address, IPv4Address):
        return address
    if inner := address.ipv4_mapped or address.sixtofour:
        return inner
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFFFFFF)
    if address.teredo:
        return address.teredo[1]
    return IPv6Address(int(address))  # without its scope
