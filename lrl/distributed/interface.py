"""The network interface by which this machine reaches another one, and the variables that tell gloo
and NCCL of it.

Left to itself gloo takes the address of the machine's name. That is often 127.0.0.1: then a rank of
another machine connects to itself, fails, and rank 0 waits for it.
"""

import os
import socket
from typing import NamedTuple

import psutil

from lrl.errors import ConfigError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
"""The variables; each library reads its own as it connects. Gloo takes one name, NCCL also prefixes
and `^` for not."""
ANY_PORT = 9
"""Connecting a UDP socket sends nothing: the kernel only chooses the way."""


class Interface(NamedTuple):
    """A network interface of this machine, and an address of it."""

    name: str
    address: str


def resolve(host: str) -> str:
    """Returns the first address of a host's name. Raises ConfigError if there is none."""
    try:
        return str(socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR is {host!r}, which this machine ({socket.gethostname()}) cannot resolve "
            f"({error.strerror}). Give an address of rank 0's machine that all machines reach."
        ) from None


def interfaces() -> list[Interface]:
    """Returns the interfaces of this machine, one for each address."""
    return [
        Interface(name, one.address.partition("%")[0])
        for name, addresses in psutil.net_if_addrs().items()
        for one in addresses
        if one.family in (socket.AF_INET, socket.AF_INET6)
    ]


def with_address(address: str) -> Interface | None:
    """Returns the interface that has an address, None if there is none."""
    return next((one for one in interfaces() if one.address == address), None)


def tell_libraries(found: Interface) -> None:
    """Has gloo and NCCL take this interface, where the user has not set another one."""
    # Without the sign eth1 would also be eth10.
    for variable, value in ((GLOO, found.name), (NCCL, f"={found.name}")):
        os.environ[variable] = os.environ.get(variable) or value


def chosen_interface(host: str) -> Interface:
    """Returns the interface that the user has set in the variables, or else the one that leads to
    `host`, this machine itself included.

    Raises:
        ConfigError: A variable names an interface that this machine does not have, or none leads to
            the host.
    """
    there, known = resolve(host), interfaces()
    wanted = os.environ.get(NCCL, "")
    for prefix in wanted.removeprefix("=").split(",") if wanted and wanted[0] != "^" else []:
        found = [one.name for one in known if one.name.startswith(prefix)]
        if not found or (wanted[0] == "=" and prefix not in found):
            raise _wrong(NCCL, f"has no interface {prefix}")
    if wanted := os.environ.get(GLOO, "").split(",")[0]:
        if wanted not in {one.name for one in known}:
            raise _wrong(GLOO, "has no such interface")
        for one in known:
            if one.name == wanted and family(one.address) == family(there):
                return one
        raise _wrong(GLOO, f"has no address there from which MASTER_ADDR, {there}, can be reached")
    with socket.socket(family(there), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, ANY_PORT))
            own = with_address(probe.getsockname()[0])
        except OSError:
            own = None
    if own is None:
        raise ConfigError(
            f"MASTER_ADDR is {host!r}, and no network interface of this machine "
            f"({socket.gethostname()}) leads to {there}; it has {_listed()}. Give an address of "
            f"rank 0's machine on a network that all machines have, or set {GLOO}."
        )
    return own


def _wrong(variable: str, what: str) -> ConfigError:
    return ConfigError(
        f"{variable} is {os.environ[variable]!r}, and this machine ({socket.gethostname()}) {what}; "
        f"it has {_listed()}. Leave it out: lrl sets it to the one that leads to MASTER_ADDR."
    )


def _listed() -> str:
    return ", ".join(f"{name} ({address})" for name, address in interfaces())


def family(address: str) -> socket.AddressFamily:
    """Returns the kind of an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
