"""Address, port and TLS of a server, for itself and for its clients.

The default is plain HTTP on loopback. An address that other machines reach needs TLS or `insecure`:
plain HTTP would show the token to the whole network. A handshake in memory checks the certificate
before a server starts.
"""

import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from lrl.errors import ConfigError

LOOPBACK = "127.0.0.1"
ANY_PORT = 9
TlsTrust = Literal["certificate", "system"]


@dataclass(frozen=True)
class Location:
    """The URL of a server, and the certificates by which its clients know it; travels as JSON."""

    url: str = ""
    """Empty while the server starts."""
    certificate: str = ""
    """The text of the PEM file; without it an https server is known by this machine's CAs."""

    def context(self) -> ssl.SSLContext | None:
        """Returns the TLS context of its clients; None without TLS."""
        if urlsplit(self.url).scheme in ("", "http"):
            return None
        return trust_only(self.certificate) if self.certificate else ssl.create_default_context()


@dataclass
class Endpoint:
    """The address without its port; see `lrl.generators.settings.ServerSettings` for the fields."""

    host: str = LOOPBACK
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_trust: TlsTrust = "certificate"
    insecure: bool = False

    def check(self) -> None:
        """Raises ConfigError if others could read the token on its way, or the trainer would not
        trust `tls_cert`."""
        if bool(self.tls_cert) != bool(self.tls_key):
            lacking = "tls_cert" if self.tls_key else "tls_key"
            raise ConfigError(
                f"strategy.server.{lacking} is not set: give a certificate with its key."
            )
        if self.tls_cert and self.tls_key:
            try:
                self._shake_hands(self.location(0).context())
            except OSError as error:  # SSLError is one
                raise ConfigError(
                    f"strategy.server.tls_cert={self.tls_cert!r} with tls_key={self.tls_key!r} and "
                    f"tls_trust={self.tls_trust!r} fails: {error}. Give a certificate valid for "
                    f"{self._host_from_here!r} with its own key, not encrypted, both PEM."
                ) from error
        elif not is_loopback(self.host) and not self.insecure:
            raise ConfigError(
                f"strategy.server.host is {self.host!r}, which other machines may reach: plain "
                "HTTP would show them the run's token. Set tls_cert and tls_key (PEM files), or "
                "insecure: true if nobody else is on that network."
            )

    def reserve_port(self, port: int = 0, setting: str = "strategy.join_port") -> socket.socket:
        """Returns a socket that reserves a port of `host`, by default a free one; raises
        ConfigError if `host` is not this machine's, or the port is taken, which is the value of
        `setting`."""
        reservation = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET)
        # Bound and never listening: vLLM, which sets SO_REUSEADDR too, can bind and listen next to
        # it, while the kernel gives the port to no process that requests a free one. A port that
        # was found and released is sometimes lost.
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reservation.bind((self.host, port))
        except OSError as error:
            reservation.close()
            what = f"{setting} is {port}, which" if port else "A port"
            raise ConfigError(
                f"{what} cannot be had at strategy.server.host {self.host} ({error}): give another "
                "port, or another address of this machine."
            ) from error
        return reservation

    def url(self, port: int, address: str = "") -> str:
        """Returns the URL of a server on `port` for clients that reach it at `address`, by default
        those on this machine."""
        host, scheme = address or self._host_from_here, "https" if self.tls_cert else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def location(self, port: int, address: str = "") -> Location:
        """Returns where clients reach a server on `port`; see `url`."""
        known = self.tls_cert if self.tls_trust == "certificate" else None
        return Location(self.url(port, address), first_certificate(known) if known else "")

    def identity(self) -> ssl.SSLContext | None:
        """Returns a server's TLS context, with certificate and key; None without TLS."""
        if not self.tls_cert:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # vLLM gives no password; without one here, OpenSSL would ask for it on the terminal.
        context.load_cert_chain(self.tls_cert, self.tls_key, password="")
        return context

    @property
    def is_everywhere(self) -> bool:
        """Whether `host` stands for every address of this machine."""
        with contextlib.suppress(ValueError):  # a name
            return ipaddress.ip_address(self.host or "0.0.0.0").is_unspecified
        return False

    @property
    def elsewhere(self) -> str:
        """The address for other machines: `host`, or if that is every address, where the ranks of
        several nodes meet, or this machine's name."""
        if not self.is_everywhere:
            return self.host
        meeting = os.environ.get("MASTER_ADDR", "")
        return meeting if meeting and not is_loopback(meeting) else socket.gethostname()

    @property
    def _host_from_here(self) -> str:
        if self.is_everywhere:
            return "::1" if ":" in self.host else LOOPBACK
        return self.host

    def _shake_hands(self, trust: ssl.SSLContext | None) -> None:
        """Does a handshake in memory between the trainer's end and vLLM's."""
        context = self.identity()
        assert trust is not None and context is not None, "only with a certificate"
        requests, responses = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trust.wrap_bio(responses, requests, server_hostname=self._host_from_here)
        server = context.wrap_bio(requests, responses, server_side=True)
        for end in (client, server, client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                end.do_handshake()


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`; a name but localhost may stand for any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def stays_here(host: str) -> bool:
    """Whether a connection to `host` stays on this machine; one to 0.0.0.0 does, too."""
    return is_loopback(host) or host in ("0.0.0.0", "::")


def own_address_towards(url: str) -> str:
    """Returns this machine's address as a server at `url` sees it; loopback for one on it."""
    there, own = way_to(urlsplit(url).hostname)
    return LOOPBACK if is_loopback(own) or own == there else own


def way_to(host: str | None) -> tuple[str, str]:
    """Returns the address of `host`, and this machine's own on the way there."""
    family, kind, _, _, there = socket.getaddrinfo(host, ANY_PORT, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # Sends nothing; the kernel only chooses the address it would send from.
        probe.connect(there)
        return str(there[0]), str(probe.getsockname()[0])


def first_certificate(path: str) -> str:
    """Returns the first certificate in a PEM file, without a private key in the same file."""
    text = Path(path).read_text("ascii", errors="ignore").partition(ssl.PEM_HEADER)[2]
    return ssl.PEM_HEADER + text.partition(ssl.PEM_FOOTER)[0] + ssl.PEM_FOOTER


def trust_only(certificate: str) -> ssl.SSLContext:
    """Returns a client's TLS context that accepts this certificate (its text) and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False  # the certificate itself is the identity
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # it needs no signature of an authority
    context.load_verify_locations(cadata=certificate)
    return context


def connect(server: Location, timeout_s: float) -> http.client.HTTPConnection:
    """Returns a connection to a server of the run: a generator's, or the registry's."""
    # Not urllib, which would send loopback through a cluster's HTTP proxy.
    address, trust = urlsplit(server.url), server.context()
    assert address.hostname is not None, "every server has an address"
    host, port = address.hostname, address.port
    if trust is None:
        return http.client.HTTPConnection(host, port, timeout=timeout_s)
    return http.client.HTTPSConnection(host, port, timeout=timeout_s, context=trust)
