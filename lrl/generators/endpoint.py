"""Where a generator listens, and how it is reached there: address, port, TLS.

Loopback in plain HTTP unless told otherwise. On an address that other machines reach, the token would cross the network
readable by all of it; so such an address needs TLS, or a user who says `insecure`. What can be wrong with a certificate
is found before a server starts, by a handshake with it in memory.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from lrl.runtime.config_errors import ConfigError

LOOPBACK = "127.0.0.1"
OPEN_TO_A_NETWORK = (
    "strategy.server.insecure: the generators listen on {host!r} in plain HTTP. Whoever can read that network sees "
    "every prompt, every response and the run's token; with the token one can stop the run, replace its weights and "
    "call any method of vLLM's worker as your user. Use it only where nobody else is on that network; otherwise set "
    "tls_cert and tls_key."
)
READABLE_KEY = (
    "strategy.server.tls_key={key!r} can be read by other users of this machine, who could then pose as a generator. "
    "Type: chmod 600 {key}"
)


@dataclass(frozen=True)
class Listening:
    """The address of a generator without its port; see `lrl.generators.settings.ServerSettings` for the fields."""

    host: str = LOOPBACK
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_trust: str = "certificate"
    insecure: bool = False

    def check(self) -> None:
        """Raise ValueError if others could read the token on its way, or the trainer would not trust `tls_cert`."""
        if not self.host:
            raise ConfigError("strategy.server.host is empty: give an address of this machine, or 0.0.0.0 for all.")
        if bool(self.tls_cert) != bool(self.tls_key):
            lacking = "tls_cert" if self.tls_key else "tls_key"
            raise ConfigError(f"strategy.server.{lacking} is not set: a certificate and its key are given together.")
        if self.tls_cert and self.insecure:
            raise ConfigError("strategy.server.insecure is true, but tls_cert is set: leave one of the two out.")
        if self.tls_cert:
            self._try_certificate()
        elif not is_loopback(self.host) and not self.insecure:
            raise ConfigError(
                f"strategy.server.host is {self.host!r}, which other machines may reach: plain HTTP would show them "
                "the run's token. Set tls_cert and tls_key (PEM files), or insecure: true if nobody else is on that "
                "network."
            )

    def warn(self) -> None:
        """Say what is allowed but not safe. Python shows a warning of the same text once."""
        if self.insecure and not is_loopback(self.host):
            warnings.warn(OPEN_TO_A_NETWORK.format(host=self.host), stacklevel=1)
        if self.tls_key and Path(self.tls_key).stat().st_mode & 0o077:
            warnings.warn(READABLE_KEY.format(key=self.tls_key), stacklevel=1)

    def reserve_port(self) -> socket.socket:
        """A free port of `host`, held for as long as the socket is kept; raises ValueError if `host` is not ours.

        Bound, never listening, and with SO_REUSEADDR: vLLM, which sets it too, may bind and listen beside it, while the
        kernel gives the port to nobody who asks for any free one. A port found and let go again is sometimes lost.
        """
        reservation = socket.socket(socket.AF_INET6 if ":" in self.host else socket.AF_INET, socket.SOCK_STREAM)
        reservation.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            reservation.bind((self.host, 0))
        except OSError as error:
            reservation.close()
            raise ConfigError(
                f"strategy.server.host is {self.host!r}, and no port can be had there ({error}): give an address of "
                "this machine (`ip address` lists them), or 0.0.0.0 for all."
            ) from error
        return reservation

    def url(self, port: int) -> str:
        """Where this machine reaches a generator that listens on `port`."""
        reached = self._reached
        return f"{'https' if self.tls_cert else 'http'}://{f'[{reached}]' if ':' in reached else reached}:{port}"

    def flags(self) -> dict[str, Any]:
        """vLLM's flags; None leaves one out. Paths are absolute, for whoever reads them off the command line."""
        cert, key = (path and os.path.abspath(path) for path in (self.tls_cert, self.tls_key))
        return {"host": self.host, "ssl-certfile": cert, "ssl-keyfile": key}

    def trust(self) -> ssl.SSLContext | None:
        """Whom a client believes: the one certificate, under whatever name, or the system's authorities.

        None without TLS.
        """
        if not self.tls_cert:
            return None
        if self.tls_trust == "system":
            return ssl.create_default_context()
        return trust_only(self.tls_cert)

    @property
    def _reached(self) -> str:
        """`host`, or the loopback of its family when that is every address."""
        with contextlib.suppress(ValueError):  # a name
            address = ipaddress.ip_address(self.host)
            if address.is_unspecified:
                return LOOPBACK if address.version == 4 else "::1"
        return self.host

    def _try_certificate(self) -> None:
        """A handshake in memory between vLLM's end and the trainer's."""
        for name in ("tls_cert", "tls_key"):
            path = getattr(self, name)
            try:
                Path(path).read_bytes()
            except OSError as error:
                remedy = "give a PEM file that this user can read"
                raise ConfigError(f"strategy.server.{name}={path!r}: {error.strerror}; {remedy}.") from error
        try:
            _shake_hands(*self._ends())
        except ssl.SSLError as error:
            raise ConfigError(
                f"strategy.server.tls_cert={self.tls_cert!r} with tls_key={self.tls_key!r} and "
                f"tls_trust={self.tls_trust!r} fails: {error}. Give a certificate that is valid for "
                f"{self._reached!r} with its own key, not encrypted, both PEM; docs/security.md makes one."
            ) from error

    def _ends(self) -> tuple[ssl.SSLObject, ssl.SSLObject]:
        """The two ends of a connection without a network: the trainer's and vLLM's."""
        trust = self.trust()
        assert trust is not None and self.tls_cert is not None, "only with a certificate"
        serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # vLLM gives no password; without one here, OpenSSL would ask for it on the terminal.
        serving.load_cert_chain(self.tls_cert, self.tls_key, password="")
        there, back = ssl.MemoryBIO(), ssl.MemoryBIO()
        client = trust.wrap_bio(back, there, server_hostname=self._reached)
        return client, serving.wrap_bio(there, back, server_side=True)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`. A name other than localhost may stand for any address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def trust_only(certificate: str) -> ssl.SSLContext:
    """Believes whoever holds the key of the first certificate in this PEM file, and nobody else.

    The name in it does not count: the certificate itself is the identity.
    """
    return trust_text(first_certificate(certificate))


def first_certificate(path: str) -> str:
    """The first certificate of a PEM file as text, and nothing else: the file may hold a private key as well."""
    text = Path(path).read_text("ascii", errors="ignore").partition(ssl.PEM_HEADER)[2]
    return ssl.PEM_HEADER + text.partition(ssl.PEM_FOOTER)[0] + ssl.PEM_FOOTER


def trust_text(certificate: str) -> ssl.SSLContext:
    """`trust_only` for a certificate's text."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # an authority's signature on it is not asked for
    context.load_verify_locations(cadata=certificate)
    return context


def connect(url: str, trust: ssl.SSLContext | None, timeout_s: float) -> http.client.HTTPConnection:
    """A connection to a generator; not through urllib, which would ask a cluster's HTTP proxy for loopback."""
    address = urlsplit(url)
    assert address.hostname is not None, "every generator has an address"
    if trust is None:
        return http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)
    return http.client.HTTPSConnection(address.hostname, address.port, timeout=timeout_s, context=trust)


def _shake_hands(client: ssl.SSLObject, server: ssl.SSLObject) -> None:
    """Raises ssl.SSLError if one end does not accept the other."""
    for end in (client, server, client, server):
        with contextlib.suppress(ssl.SSLWantReadError):
            end.do_handshake()
