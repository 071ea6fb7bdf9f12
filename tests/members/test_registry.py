"""What a joining process asks of a run over HTTP, and what the run answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lrl.errors import ConfigError, NoAnswer, NotRunning
from lrl.members import registry as registry_module
from lrl.members.registry import LEASE_S, Kind, Member, Registry, RegistryServer, RunClient, Status
from lrl.system.endpoint import Endpoint, Location
from tests.certificates import self_signed
from tests.http_call import call
from tests.members.served_run import TOKEN, client_of, served, spec_of

TERMS = {"spec": "of its workers"}
SOMEWHERE = Location("http://127.0.0.1:1")


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with served(spec_of(), terms=lambda: TERMS) as found:
        yield found


@pytest.fixture(params=list(Kind))
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param)


def speak(client: RunClient, kind: Kind, number: int, **words: Any) -> Member:
    return client.register(kind, number, spec_of().run_id, SOMEWHERE, **words)


def test_a_run_tells_its_requirements_as_they_are_and_serves_no_model_that_has_a_name(
    server: RegistryServer, tmp_path: Path
) -> None:
    assert client_of(server).spec() == server.registry.spec
    assert client_of(server).terms(Kind.WORKER) == TERMS
    client_of(server).fetch_model(tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []


def test_every_claim_of_a_number_gets_another_one(server: RegistryServer) -> None:
    for kind in Kind:
        numbers = [1, 2, 3] if kind is Kind.GENERATOR else [0, 1, 2]
        assert [client_of(server).claim(kind) for _ in range(3)] == numbers
    server.registry.set_status(Kind.WORKER, 1, Status.LOST)
    server.registry.ask_to_leave(Kind.GENERATOR, 1)
    assert server.registry.view(Kind.GENERATOR, 1).status is Status.STARTING, "of its kind alone"
    assert server.registry.leaving(Kind.WORKER) == []


def test_a_member_is_alive_where_it_says_as_long_as_it_speaks(
    server: RegistryServer, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, client, registry = [1000.0], client_of(server), server.registry
    monkeypatch.setattr(registry_module.time, "monotonic", lambda: now[0])
    number = registry.claim(kind)
    registry.register(kind, number, Location())
    assert registry.alive(kind) == {}, "it starts"
    for _ in range(20):
        now[0] += LEASE_S / 2
        registry.register(kind, number, SOMEWHERE)
        assert registry.alive(kind)[number].location == SOMEWHERE
    now[0] += LEASE_S
    assert registry.alive(kind) == {}
    monkeypatch.undo()
    speak(client, kind, number)
    assert list(registry.alive(kind)) == [number]
    client.withdraw(kind, number)
    assert registry.alive(kind) == {}


def test_the_runs_word_about_a_member_reaches_its_process(
    server: RegistryServer, kind: Kind
) -> None:
    client, registry = client_of(server), server.registry
    number = client.claim(kind)

    def seen() -> tuple[Status, int, bool, str]:
        found = speak(client, kind, number, workers=3)
        assert (found.kind, found.number, found.location, found.workers) == (
            kind,
            number,
            SOMEWHERE,
            3,
        )
        return found.status, found.version, found.leaving, found.leave_refusal

    assert seen() == (Status.STARTING, -1, False, "") and client.joined(kind) == []
    registry.set_status(kind, number, Status.SERVING, 7)
    assert seen() == (Status.SERVING, 7, False, "") and client.joined(kind) == [number]
    client.ask_to_leave(kind, number)
    assert registry.leaving(kind) == [number] and client.view(kind, number).leaving
    registry.answer_leave(kind, number, "it is the last one")
    assert seen() == (Status.SERVING, 7, False, "it is the last one")
    client.ask_to_leave(kind, number)
    assert client.view(kind, number).leave_refusal == "", "that was about the request before"
    registry.set_status(kind, number, Status.LEFT, 8)
    registry.answer_leave(kind, number, "")
    assert seen() == (Status.LEFT, 8, False, "") and client.joined(kind) == []


@pytest.mark.parametrize("number", [0, 1, 7])
def test_nobody_registers_under_a_number_that_was_not_given_to_them(
    server: RegistryServer, kind: Kind, number: int
) -> None:
    with pytest.raises(NotRunning, match=f"409.*nobody has taken the number {number} for a {kind}"):
        speak(client_of(server), kind, number)
    server.registry.ask_to_leave(kind, 0)
    assert server.registry.alive(kind) == {}


def test_a_number_of_another_runs_member_is_not_this_runs(
    server: RegistryServer, kind: Kind
) -> None:
    number = client_of(server).claim(kind)
    with pytest.raises(NotRunning, match="409.*another run's"):
        client_of(server).register(kind, number, "another run", SOMEWHERE)
    assert server.registry.alive(kind) == {}


def test_a_member_that_cannot_serve_says_why_and_is_refused(
    server: RegistryServer, kind: Kind
) -> None:
    client = client_of(server)
    number = client.claim(kind)
    speak(client, kind, number)
    client.withdraw(kind, number, "there is no module named 'mine'")
    assert client.view(kind, number).status is Status.REFUSED
    refusal = server.registry.refusal(kind)
    assert "cannot serve: there is no module named 'mine'" in refusal and refusal.startswith(
        f"{kind} {number} on ".capitalize()
    )


def test_a_member_without_weights_that_was_cut_off_comes_again_and_a_generator_does_not(
    server: RegistryServer, kind: Kind
) -> None:
    after = Status.LOST if kind is Kind.GENERATOR else Status.STARTING
    number = client_of(server).claim(kind)
    server.registry.set_status(kind, number, Status.LOST, why="it is silent")
    assert speak(client_of(server), kind, number).status is after


def test_a_member_that_has_ended_with_the_run_stays_so(server: RegistryServer, kind: Kind) -> None:
    number = server.registry.claim(kind)
    server.registry.withdraw(kind, number)
    server.registry.end()
    server.registry.set_status(kind, number, Status.SERVING)
    assert client_of(server).view(kind, number).status is Status.ENDED


def test_the_runs_own_generators_may_be_asked_to_leave_and_have_not_joined(
    server: RegistryServer,
) -> None:
    client = client_of(server)
    client.ask_to_leave(Kind.GENERATOR, 0)
    assert server.registry.leaving(Kind.GENERATOR) == [0] and client.joined(Kind.GENERATOR) == []


def test_a_run_without_work_for_them_takes_no_workers() -> None:
    with served(spec_of()) as server:
        client = client_of(server)
        for request in (client.terms, client.claim):
            with pytest.raises(NotRunning, match="409.*the run takes no workers"):
                request(Kind.WORKER)
        assert client.claim(Kind.GENERATOR) == 1


@pytest.mark.parametrize(
    "words",
    [
        {},
        [1],
        {"kind": "judge"},
        {"number": "one"},
        {"location": 1},
        {"node": "\n"},
        {"node": 65 * "n"},
        {"more": 1},
    ],
)
def test_what_is_no_word_of_a_member_is_refused(
    server: RegistryServer, kind: Kind, words: Any
) -> None:
    number = server.registry.claim(kind)
    known = {"kind": kind, "number": number, "run": "ab12", "node": "far", "workers": 0}
    known["location"] = {"url": SOMEWHERE.url}
    said = {**known, **words} if words and isinstance(words, dict) else words
    for body, expected in ((json.dumps(said), 400), ("{", 400), (json.dumps(known), 200)):
        assert server.registry.alive(kind) == {}
        url, headers = server.location().url, {"Authorization": f"Bearer {TOKEN}"}
        assert call(url, "POST", "/run/register", headers, body.encode())[0] == expected


ROUTES = [
    *(("POST", f"/run/{name}") for name in ("spec", "terms", "model", "joined", "claim", "view")),
    *(("POST", f"/run/{name}") for name in ("register", "withdraw", "ask_to_leave")),
    ("GET", "/run/model/config.json"),
    ("GET", "/"),
    ("GET", "/other"),
]


@pytest.mark.parametrize(("method", "route"), ROUTES)
def test_without_the_token_no_route_answers(
    server: RegistryServer, method: str, route: str
) -> None:
    body = json.dumps({"kind": "worker"}).encode()
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
        status, answer = call(server.location().url, method, route, headers, body)
        assert status == 401 and TOKEN not in str(answer)
    assert server.registry.claim(Kind.WORKER) == 0, "nothing has changed"
    with pytest.raises(NotRunning, match="401.*only with the token of that run"):
        client_of(server, "another").spec()


def test_all_routes_are_among_those_that_are_tried(server: RegistryServer) -> None:
    known = {
        (route.method, route.resource.canonical.format(call=name, name="config.json"))
        for route in server._runner.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
        for name in server.calls
    }
    assert known <= set(ROUTES)


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


def test_a_port_that_is_taken_is_named_with_its_setting(server: RegistryServer) -> None:
    with pytest.raises(
        ConfigError, match=f"strategy.join_port is {server.port}, which cannot be had"
    ):
        RegistryServer(Registry(spec_of()), Endpoint(), TOKEN, server.port)


def test_with_tls_the_run_answers_those_who_know_its_certificate(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    server = RegistryServer(Registry(spec_of()), Endpoint(tls_cert=certificate, tls_key=key), TOKEN)
    try:
        location = server.location()
        assert location.url.startswith("https://") and "PRIVATE KEY" not in location.certificate
        assert client_of(server).claim(Kind.GENERATOR) == 1
        stranger = client_of(server)
        stranger._trust = Location(location.url, "system").context()
        with pytest.raises(NoAnswer, match="CERTIFICATE_VERIFY_FAILED"):
            stranger.claim(Kind.GENERATOR)
    finally:
        server.close()
