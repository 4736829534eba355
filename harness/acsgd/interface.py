"""Which network interface gloo binds to: as AC-SGD's environment says, else the one that leads to --dist-url's host."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from thinpipe.harness.errors import UserError, near_miss

# In this order: traffic is gloo's, but AC-SGD's scripts set both.
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def choose(dist_url: str, environment: Mapping[str, str], local: Mapping[str, Sequence[str]]) -> str:
    """The interface's name. local: interface -> its addresses. Raises UserError where there is none to be had."""
    host, port = endpoint(dist_url)
    for variable in VARIABLES:
        name = environment.get(variable)
        if name and name not in local:
            raise UserError(f"{variable} is {name!r}, which is no interface of this machine.{near_miss(name, local)}")
        if name:
            return name
    address = own_address(host, port)
    for name, addresses in local.items():
        if address in addresses:
            return name
    raise UserError(f"no interface has the address {address}, which leads to {host}: set {VARIABLES[0]}.")


def endpoint(dist_url: str) -> tuple[str, int]:
    """(host, port) of tcp://HOST:PORT. Raises UserError for anything else."""
    parts = urlsplit(dist_url)
    try:
        if parts.scheme == "tcp" and parts.hostname and parts.port and not parts.path.strip("/"):
            return parts.hostname, parts.port
    except ValueError:  # of a port that is none
        pass
    raise UserError(f"--dist-url {dist_url!r} must be tcp://HOST:PORT: rank 0's address and a free port there.")


def own_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`; nothing is sent. Raises UserError for a host that is not known."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(f"--dist-url: no way to {host} ({error.strerror or error}).") from None
