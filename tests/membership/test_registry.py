"""What a joining process asks of a run over HTTP, and what the run answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from lrl.generators.endpoint import Endpoint, Location
from lrl.membership import registry as registry_module
from lrl.membership.discovery import NotRunning
from lrl.membership.registry import MemberStatus, Registry, View
from lrl.membership.service import RegistryServer
from lrl.runtime.config_errors import ConfigError
from tests.certificates import self_signed
from tests.http_call import call
from tests.membership.served_run import TOKEN, client_of, served, spec_of

SOMEWHERE = Location("http://127.0.0.1:1")


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with served(spec_of()) as found:
        yield found


def test_a_run_tells_its_requirements_as_they_are(server: RegistryServer) -> None:
    assert client_of(server).spec() == server.registry.spec


def test_every_claim_of_a_number_gets_another_one(server: RegistryServer) -> None:
    assert [client_of(server).claim() for _ in range(3)] == [1, 2, 3]


def test_a_generator_is_where_it_says_as_long_as_it_speaks(
    server: RegistryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, client = [1000.0], client_of(server)
    monkeypatch.setattr(registry_module.time, "monotonic", lambda: now[0])
    number = server.registry.claim()
    server.registry.register(number, Location())
    assert server.registry.locations() == {}, "it starts"
    for _ in range(20):
        now[0] += registry_module.LEASE_S / 2
        server.registry.register(number, SOMEWHERE)
        assert server.registry.locations() == {number: SOMEWHERE}
    now[0] += registry_module.LEASE_S
    assert server.registry.locations() == {}
    monkeypatch.undo()
    client.register(number, SOMEWHERE)
    assert server.registry.locations() == {number: SOMEWHERE}
    client.withdraw(number)
    assert server.registry.locations() == {}


def test_the_runs_word_about_a_generator_reaches_its_process(server: RegistryServer) -> None:
    client, registry = client_of(server), server.registry
    number = client.claim()
    assert client.register(number, SOMEWHERE) == View() and client.joined() == []
    registry.set_status(number, MemberStatus("serves", 7))
    assert client.register(number, SOMEWHERE) == View(MemberStatus("serves", 7)) and client.joined() == [number]
    client.ask_to_leave(number)
    assert registry.leaving() == [number] and client.view(number).leaving
    registry.answer_leave(number, "it is the last one")
    assert client.view(number) == View(MemberStatus("serves", 7), why_it_stays="it is the last one")
    client.ask_to_leave(number)
    assert client.view(number).why_it_stays == "", "that was about the request before"
    registry.set_status(number, MemberStatus("left", 8))
    registry.answer_leave(number, "")
    assert client.view(number) == View(MemberStatus("left", 8)) and client.joined() == []


@pytest.mark.parametrize("number", [0, 1, 7])
def test_nobody_registers_under_a_number_that_was_not_given_to_them(server: RegistryServer, number: int) -> None:
    with pytest.raises(NotRunning, match=f"409.*nobody has taken the number {number}"):
        client_of(server).register(number, SOMEWHERE)
    server.registry.ask_to_leave(0)
    assert server.registry.locations() == {}


def test_the_runs_own_generators_may_be_asked_to_leave_and_have_not_joined(server: RegistryServer) -> None:
    client = client_of(server)
    client.ask_to_leave(0)
    assert server.registry.leaving() == [0] and client.joined() == []


ROUTES = [("GET", "/run"), ("GET", "/run/model"), ("GET", "/run/model/config.json"), ("GET", "/run/generators")]
ROUTES += [("POST", "/run/generators"), ("GET", "/run/generators/1"), ("PUT", "/run/generators/1")]
ROUTES += [("DELETE", "/run/generators/1"), ("POST", "/run/generators/1/leave"), ("GET", "/"), ("GET", "/other")]


@pytest.mark.parametrize(("method", "route"), ROUTES)
def test_without_the_token_no_route_answers(server: RegistryServer, method: str, route: str) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
        status, body = call(server.location().url, method, route, headers)
        assert status == 401 and TOKEN not in str(body)
    assert server.registry.claim() == 1, "nothing has changed"


def test_all_routes_are_among_those_that_are_tried() -> None:
    registry = Registry(spec_of())
    server = RegistryServer(registry, Endpoint(), TOKEN)
    try:
        known = {
            (route.method, route.resource.canonical.replace("{number}", "1").replace("{name}", "config.json"))
            for route in server._runner.app.router.routes()
            if route.resource is not None and route.method != "HEAD"
        }
    finally:
        server.close()
    assert known <= set(ROUTES)


def test_another_token_is_named_by_the_error(server: RegistryServer) -> None:
    with pytest.raises(NotRunning, match="the token is not the run's .LRL_TOKEN"):
        client_of(server, "another").spec()


def test_the_files_of_a_model_arrive_unchanged_and_no_other_file_can_be_had(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "more").mkdir(parents=True)
    files = {"config.json": b"{}", "model.safetensors": bytes(range(256)) * 9000}
    for name, content in files.items():
        (model / name).write_bytes(content)
    (tmp_path / "secret").write_text("not the model's")
    with served(replace(spec_of(), model=str(model), serves_model=True)) as server:
        client_of(server).fetch_model(tmp_path / "copy")
        for name in ("..%2Fsecret", "secret", "more", "%2e%2e/secret"):
            headers = {"Authorization": f"Bearer {TOKEN}"}
            assert call(server.location().url, "GET", f"/run/model/{name}", headers)[0] == 404
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == files


def test_a_model_that_has_a_name_is_not_served(server: RegistryServer, tmp_path: Path) -> None:
    client_of(server).fetch_model(tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []


def test_a_port_that_is_taken_is_named_with_its_setting(server: RegistryServer) -> None:
    with pytest.raises(ConfigError, match=f"strategy.join_port is {server.port}, which cannot be had"):
        RegistryServer(Registry(spec_of()), Endpoint(), TOKEN, server.port)


def test_with_tls_the_run_answers_those_who_know_its_certificate(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    server = RegistryServer(Registry(spec_of()), Endpoint(tls_cert=certificate, tls_key=key), TOKEN)
    try:
        location = server.location()
        assert location.url.startswith("https://") and "PRIVATE KEY" not in location.certificate
        assert client_of(server).claim() == 1
        stranger = client_of(server)
        stranger._trust = Location(location.url, "system").context()
        with pytest.raises(OSError, match="CERTIFICATE_VERIFY_FAILED"):
            stranger.claim()
    finally:
        server.close()
