"""Endpoints: settings rejected before a start, certificates that the trainer trusts, and a real
server with TLS, on which a run evaluates."""

from __future__ import annotations

import asyncio
import http.client
import socket
import ssl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

import lrl
from lrl.callbacks import Evaluation
from lrl.errors import GeneratorError
from lrl.generators.client import GeneratorClient
from lrl.generators.server import Server
from lrl.generators.settings import ServerSettings
from lrl.system import endpoint
from lrl.system.endpoint import Endpoint, Location, connect, first_certificate, trust_only
from tests.certificates import openssl, self_signed, signed_by
from tests.lent_server import LentServer
from tests.runs.test_async_run import PROMPTS, STEPS, fit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def pair(folder: Path) -> tuple[str, str]:
    """A certificate and its key."""
    return self_signed(folder)


@pytest.fixture(scope="module")
def other(folder: Path) -> tuple[str, str]:
    """Another certificate for the same names."""
    return self_signed(folder, "other")


def test_an_address_that_other_machines_reach_needs_tls_or_insecure_and_loopback_neither() -> None:
    outside = ("0.0.0.0", "192.0.2.7", "::", "gpu7", "localhost.example.com", "127.0.0.1.nip.io")
    for host in outside:
        with pytest.raises(ValueError, match=rf"host is '{host}'.*tls_key.*insecure: true"):
            ServerSettings(host=host)
        assert ServerSettings(host=host, insecure=True).host == host
    for host in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert ServerSettings(host=host).host == host


def test_the_trainer_reaches_a_generator_on_every_address_by_loopback() -> None:
    reached = {"0.0.0.0": "127.0.0.1", "::": "[::1]", "::1": "[::1]", "a": "a"}
    assert {host: Endpoint(host).url(80) for host in reached} == {
        host: f"http://{address}:80" for host, address in reached.items()
    }


def test_an_address_of_another_machine_is_named_before_a_start(tmp_path: Path) -> None:
    settings = ServerSettings(host="203.0.113.7", insecure=True)
    with pytest.raises(ValueError, match="cannot be had at strategy.server.host 203.0.113.7"):
        Server("a/model", settings, "shared_memory", [], tmp_path, 0)


def test_a_certificate_that_cannot_serve_is_refused_before_a_start(
    pair: tuple[str, str], other: tuple[str, str], tmp_path: Path
) -> None:
    cert, key = pair
    missing, junk, locked = (str(tmp_path / name) for name in ("no.pem", "junk.pem", "locked.pem"))
    Path(junk).write_bytes(b"\xff no certificate")
    openssl("pkcs8", "-topk8", "-in", key, "-out", locked, "-passout", "pass:secret")
    for its_cert, its_key, why in [
        (cert, None, "tls_key is not set"),
        (None, key, "tls_cert is not set"),
        (missing, key, f"tls_cert='{missing}'.*No such file"),
        (cert, str(tmp_path), f"tls_key='{tmp_path}'.*fails"),
        (junk, key, f"tls_cert='{junk}'"),
        (cert, junk, f"tls_key='{junk}'"),
        (cert, other[1], f"tls_key='{other[1]}'.*own key"),
        (cert, locked, f"tls_key='{locked}'.*not encrypted"),
    ]:
        with pytest.raises(ValueError, match=why):
            ServerSettings(tls_cert=its_cert, tls_key=its_key)


def test_the_systems_authorities_are_trusted_only_by_a_setting_and_for_the_host(
    pair: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = pair
    with pytest.raises(ValueError, match="tls_trust='system' fails.*self-signed"):
        ServerSettings(tls_cert=cert, tls_key=key, tls_trust="system")
    monkeypatch.setenv("SSL_CERT_FILE", cert)
    ServerSettings(tls_cert=cert, tls_key=key, tls_trust="system")
    with pytest.raises(ValueError, match=r"tls_trust='system' fails.*127\.0\.0\.2"):
        ServerSettings(host="127.0.0.2", tls_cert=cert, tls_key=key, tls_trust="system")


def test_only_the_certificate_itself_is_trusted_and_not_its_issuer(
    folder: Path, pair: tuple[str, str]
) -> None:
    one, two = (signed_by(folder, pair, name) for name in ("one", "two"))
    chain = folder / "chain.pem"
    chain.write_bytes(Path(one[0]).read_bytes() + Path(pair[0]).read_bytes())
    trust = trust_only(first_certificate(str(chain)))
    Endpoint(tls_cert=one[0], tls_key=one[1])._shake_hands(trust)
    for cert, key in (two, pair):
        with pytest.raises(ssl.SSLError, match="verify failed"):
            Endpoint(tls_cert=cert, tls_key=key)._shake_hands(trust)


@pytest.fixture(scope="module")
def tls_server(pair: tuple[str, str], folder: Path, policy_folder: Path) -> Iterator[LentServer]:
    """A real server on every address of this machine, with TLS; the trainer's own gloo has another
    interface."""
    settings = ServerSettings(
        max_model_len=160, max_num_seqs=96, dtype="float32", kv_cache_gib=0.1,
        host="0.0.0.0", tls_cert=pair[0], tls_key=pair[1]
    )  # fmt: skip
    server = Server(str(policy_folder), settings, "shared_memory", [], folder, 0)
    with pytest.MonkeyPatch.context() as patch:
        if outside := list(outside_addresses()):
            patch.setenv("GLOO_SOCKET_IFNAME", outside[0])
        server.start()
    try:
        server.wait_ready()
        yield LentServer(server)
    finally:
        server.stop()


def outside_addresses() -> dict[str, str]:
    """Returns this machine's addresses that are not loopback, by interface."""
    return {
        name: address.address
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family == socket.AF_INET and not endpoint.is_loopback(address.address)
    }


def probe(server: LentServer, trust: ssl.SSLContext | None) -> list[float]:
    async def scene() -> list[float]:
        client = GeneratorClient(server.url, server.name, server.token, trust)
        try:
            return await client.prompt_logprobs([5, 6, 7], salt="tls", deadline_s=300.0)
        finally:
            await client.close()

    return asyncio.run(scene())


def test_a_real_server_speaks_tls_to_clients_with_its_certificate_and_no_plain_http(
    tls_server: LentServer, other: tuple[str, str]
) -> None:
    assert tls_server.url.startswith("https://")
    assert len(probe(tls_server, tls_server.location.context())) == 2
    for stranger in (trust_only(first_certificate(other[0])), ssl.create_default_context()):
        with pytest.raises(GeneratorError, match="CERTIFICATE_VERIFY_FAILED"):
            probe(tls_server, stranger)
    with pytest.raises((http.client.HTTPException, OSError)):
        plain = connect(Location(tls_server.url.replace("https", "http")), 10.0)
        plain.request("GET", "/health")
        plain.getresponse()


def test_only_the_guarded_port_is_open_to_other_machines_and_asks_for_the_token(
    tls_server: LentServer,
) -> None:
    for address in ["127.0.0.1", *outside_addresses().values()]:
        url = f"https://{address}:{tls_server.port}"
        there = connect(replace(tls_server.location, url=url), 10.0)
        there.request("POST", "/pause", b"", {"Content-Type": "application/json"})
        assert there.getresponse().status == 401
    ports = [port for one in tls_server.processes() for port in one.net_connections("tcp")]
    open_ports = {port.laddr for port in ports if port.status == psutil.CONN_LISTEN}
    assert ("0.0.0.0", tls_server.port) in open_ports and len(open_ports) > 1
    assert {ip for ip, port in open_ports if port != tls_server.port} == {"127.0.0.1"}


def test_a_reserved_generator_evaluates_one_pinned_version_behind_tls(
    tls_server: LentServer, lent_server: LentServer, policy_folder: Path, tmp_path: Path
) -> None:
    held_out = lrl.Prompts(PROMPTS, name="held_out", shuffle=False)
    evaluation = Evaluation(held_out, every_n_steps=2, rewards=["tests.odd_lengths:brevity"])
    fit(lent_server, policy_folder, tmp_path, callbacks=[evaluation], for_evaluation=(tls_server,))
    assert {report.n for _, report in evaluation.reports} == {len(PROMPTS)}
    assert [(step, report.versions) for step, report in evaluation.reports][0] == (0, [0])
    assert all(report.versions == [step] for step, report in evaluation.reports)
    assert [step for step, _ in evaluation.reports][-1] == STEPS
