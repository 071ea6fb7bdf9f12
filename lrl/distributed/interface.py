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
    """A network interface of this machine, and its address that the other machine sees."""

    name: str
    address: str

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return self.address.startswith("127.") or self.address == "::1"


def resolve(host: str) -> str:
    """Returns the first address of a host's name. Raises ConfigError if there is none."""
    try:
        return str(socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0][4][0])
    except OSError as error:
        raise ConfigError(
            f"MASTER_ADDR is {host!r}, which this machine ({socket.gethostname()}) cannot resolve "
            f"({error.strerror}). Give an address of rank 0's machine that all machines reach."
        ) from None


def interface_to(host: str) -> Interface:
    """Returns the interface that leads to a host, this machine itself included.

    Raises:
        ConfigError: The host has no address, or no interface leads there.
    """
    there = resolve(host)
    with socket.socket(family(there), socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, ANY_PORT))
        except OSError as error:
            raise ConfigError(
                f"MASTER_ADDR is {host!r}, and no network interface of this machine "
                f"({socket.gethostname()}) leads to {there} ({error.strerror}); it has "
                f"{_listed(interfaces())}. Give an address of rank 0's machine on a network that "
                "all machines have."
            ) from None
        own = probe.getsockname()[0]
    found = with_address(own)
    if found is None:
        raise ConfigError(
            f"This machine has the address {own} on the way to {host}, and on no interface: set "
            f"{GLOO}."
        )
    return found


def interfaces() -> dict[str, list[str]]:
    """Returns the addresses of each interface of this machine."""
    inet = (socket.AF_INET, socket.AF_INET6)
    rows = psutil.net_if_addrs().items()
    return {
        name: [one.address.partition("%")[0] for one in found if one.family in inet]
        for name, found in rows
    }


def with_address(address: str) -> Interface | None:
    """Returns the interface that has an address, None if there is none."""
    return next(
        (Interface(name, address) for name, found in interfaces().items() if address in found), None
    )


def tell_libraries(found: Interface) -> None:
    """Has gloo and NCCL take this interface, where the user has not set another one."""
    # Without the sign eth1 would also be eth10.
    for variable, value in (
        (GLOO, found.name),
        (NCCL, f"={found.name}"),
    ):
        os.environ[variable] = os.environ.get(variable) or value


def chosen_interface(host: str) -> Interface:
    """Returns the interface that the user has set in the variables, or else the one that leads to
    `host`.

    Raises:
        ConfigError: A variable names an interface that this machine does not have, or that has no
            address of the kind of the host's.
    """
    there = resolve(host)
    _check_nccl()
    if not (names := os.environ.get(GLOO, "")):
        return interface_to(host)
    name, known = names.split(",")[0], interfaces()
    if name not in known:
        raise ConfigError(
            f"{GLOO} is {names!r}, and this machine ({socket.gethostname()}) has no such "
            f"interface; it has {_listed(known)}. {_remedy(GLOO, host)}"
        )
    address = next((one for one in known[name] if family(one) == family(there)), None)
    if address is None:
        raise ConfigError(
            f"{GLOO} is {names!r}, which has no address on {socket.gethostname()} from which "
            f"MASTER_ADDR, {there}, can be reached; there are {_listed(known)}. "
            f"{_remedy(GLOO, host)}"
        )
    return Interface(name, address)


def _check_nccl() -> None:
    names = os.environ.get(NCCL, "")
    if not names or names.startswith("^"):
        return
    exact, known = names.startswith("="), interfaces()
    for name in names.removeprefix("=").split(","):
        if not any(one == name or (one.startswith(name) and not exact) for one in known):
            raise ConfigError(
                f"{NCCL} is {names!r}, and this machine ({socket.gethostname()}) has no interface "
                f"{name}; it has {_listed(known)}. Correct it, or leave it out: lrl sets it."
            )


def _remedy(variable: str, host: str) -> str:
    try:
        return (
            "Leave it out, and lrl sets it to the one that leads to MASTER_ADDR: "
            f"{interface_to(host).name}."
        )
    except ConfigError:
        return f"Set {variable} to the one that leads to the other machines."


def _listed(known: dict[str, list[str]]) -> str:
    return (
        ", ".join(f"{name} ({found[0]})" for name, found in known.items() if found)
        or "none with an address"
    )


def family(address: str) -> socket.AddressFamily:
    """Returns the kind of an address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET
