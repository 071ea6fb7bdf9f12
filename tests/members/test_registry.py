"""What a joining process asks of a run over HTTP, and what the run answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lrl.errors import NoAnswer, NotRunning
from lrl.members import registry as registry_module
from lrl.members.join import join
from lrl.members.registry import (
    CALLS,
    LEASE_S,
    Kind,
    Member,
    Registry,
    RegistryServer,
    RunClient,
    Status,
)
from lrl.system.endpoint import Location
from tests.certificates import self_signed
from tests.http_call import call
from tests.members.served_run import TOKEN, client_of, served, spec_of

TERMS = {"spec": "of its workers"}
SOMEWHERE = Location("http://127.0.0.1:1")
RIGHT = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with served(spec_of(terms=TERMS)) as found:
        yield found


@pytest.fixture(params=list(Kind))
def kind(request: pytest.FixtureRequest) -> Kind:
    return Kind(request.param)


def speak(client: RunClient, kind: Kind, number: int, **words: Any) -> Member:
    said = {"run": spec_of().run_id, "location": SOMEWHERE, "node": "far"} | words
    member: Member = client.register(kind=kind, number=number, **said)
    return member


def alive(registry: Registry, kind: Kind) -> list[Member]:
    return [member for member in registry.members(kind) if member.alive]


def test_a_run_tells_its_requirements_as_they_are_and_serves_no_model_that_has_a_name(
    server: RegistryServer, tmp_path: Path
) -> None:
    assert client_of(server).spec() == server.registry.spec()
    client_of(server).fetch_model(tmp_path / "copy")
    assert list((tmp_path / "copy").iterdir()) == []


def test_every_claim_of_a_number_gets_another_one(server: RegistryServer) -> None:
    for kind in Kind:
        numbers = [1, 2, 3] if kind is Kind.GENERATOR else [0, 1, 2]
        assert [client_of(server).claim(kind=kind) for _ in range(3)] == numbers
    server.registry.change(Kind.WORKER, 1, status=Status.LOST, leaving=True)
    other = server.registry.view(Kind.GENERATOR, 1)
    assert other.status is Status.STARTING and not other.leaving, "of its kind alone"


def test_a_member_is_alive_where_it_says_as_long_as_it_speaks(
    server: RegistryServer, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, client, registry = [1000.0], client_of(server), server.registry
    monkeypatch.setattr(registry_module.time, "monotonic", lambda: now[0])
    number = registry.claim(kind)
    registry.register(kind, number, Location())
    assert alive(registry, kind) == [], "it starts"
    for _ in range(20):
        now[0] += LEASE_S / 2
        registry.register(kind, number, SOMEWHERE)
        assert [member.location for member in alive(registry, kind)] == [SOMEWHERE]
    now[0] += LEASE_S
    assert alive(registry, kind) == []
    monkeypatch.undo()
    speak(client, kind, number)
    assert [member.number for member in alive(registry, kind)] == [number]
    client.withdraw(kind=kind, number=number)
    assert alive(registry, kind) == []


def test_the_runs_word_about_a_member_reaches_its_process(
    server: RegistryServer, kind: Kind
) -> None:
    client, registry = client_of(server), server.registry
    number = client.claim(kind=kind)

    def seen() -> tuple[Status, int, bool, str]:
        found = speak(client, kind, number, workers=3)
        said = (found.kind, found.number, found.location, found.workers)
        assert said == (kind, number, SOMEWHERE, 3)
        return found.status, found.version, found.leaving, found.leave_refusal

    assert seen() == (Status.STARTING, -1, False, "") and client.joined(kind=kind) == []
    registry.change(kind, number, status=Status.SERVING, version=7)
    assert seen() == (Status.SERVING, 7, False, "") and client.joined(kind=kind) == [number]
    client.ask_to_leave(kind=kind, number=number)
    assert client.view(kind=kind, number=number).leaving
    registry.change(kind, number, leaving=False, leave_refusal="it is the last one")
    assert seen() == (Status.SERVING, 7, False, "it is the last one")
    again = client.ask_to_leave(kind=kind, number=number)
    assert again.leave_refusal == "", "that was about the request before"
    registry.change(kind, number, status=Status.LEFT, version=8, leaving=False)
    assert seen() == (Status.LEFT, 8, False, "") and client.joined(kind=kind) == []


@pytest.mark.parametrize("number", [0, 1, 7])
def test_nobody_registers_under_a_number_that_was_not_given_to_them(
    server: RegistryServer, kind: Kind, number: int
) -> None:
    client = client_of(server)
    with pytest.raises(NotRunning, match=f"409.*nobody has taken the number {number} for a {kind}"):
        speak(client, kind, number)
    claimed = client.claim(kind=kind)
    with pytest.raises(NotRunning, match="409.*another run's"):
        speak(client, kind, claimed, run="another run")
    assert alive(server.registry, kind) == []


def test_a_member_without_weights_that_was_cut_off_comes_again_and_a_generator_does_not(
    server: RegistryServer, kind: Kind
) -> None:
    after = Status.LOST if kind is Kind.GENERATOR else Status.STARTING
    number = client_of(server).claim(kind=kind)
    server.registry.change(kind, number, status=Status.LOST, why="it is silent")
    assert speak(client_of(server), kind, number).status is after


def test_a_member_that_has_ended_with_the_run_stays_so(server: RegistryServer, kind: Kind) -> None:
    number = server.registry.claim(kind)
    server.registry.withdraw(kind, number)
    server.registry.end()
    assert server.registry.change(kind, number, status=Status.SERVING).status is Status.ENDED


def test_a_run_without_work_for_them_takes_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LRL_TOKEN", TOKEN)
    with served(spec_of()) as server, pytest.raises(NotRunning, match="takes no workers"):
        join(server.location().url, Kind.WORKER)


NO_WORDS: list[Any] = [{}, [1], {"kind": "judge"}, {"number": "one"}, {"location": 1}, {"more": 1}]


@pytest.mark.parametrize("words", NO_WORDS)
def test_what_is_no_word_of_a_member_is_refused(
    server: RegistryServer, kind: Kind, words: Any
) -> None:
    number = server.registry.claim(kind)
    known = {"kind": kind, "number": number, "run": "ab12", "node": "far", "workers": 0}
    known["location"] = {"url": SOMEWHERE.url}
    said = {**known, **words} if words and isinstance(words, dict) else words
    for body, expected in ((json.dumps(said), 400), ("{", 400), (json.dumps(known), 200)):
        assert alive(server.registry, kind) == []
        url = server.location().url
        assert call(url, "POST", "/run/register", RIGHT, body.encode())[0] == expected


def test_without_the_token_no_route_answers(server: RegistryServer) -> None:
    body, url = json.dumps({"kind": "worker"}).encode(), server.location().url
    routes = [("POST", f"/run/{name}") for name in CALLS]
    for method, route in [*routes, ("GET", "/run/model/config.json"), ("GET", "/other")]:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": TOKEN}):
            status, answer = call(url, method, route, headers, body)
            assert status == 401 and TOKEN not in str(answer), route
    assert server.registry.claim(Kind.WORKER) == 0, "nothing has changed"
    with pytest.raises(NotRunning, match="401.*only with the token of that run"):
        client_of(server, "another").spec()


def test_no_other_method_of_the_registry_can_be_called(server: RegistryServer) -> None:
    assert call(server.location().url, "POST", "/run/change", RIGHT, b"{}")[0] == 404


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
            assert call(server.location().url, "GET", f"/run/model/{name}", RIGHT)[0] == 404
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == files


def test_with_tls_the_run_answers_those_who_know_its_certificate(tmp_path: Path) -> None:
    certificate, key = self_signed(tmp_path)
    with served(spec_of(), tls_cert=certificate, tls_key=key) as server:
        location = server.location()
        assert location.url.startswith("https://") and "PRIVATE KEY" not in location.certificate
        assert client_of(server).claim(kind=Kind.GENERATOR) == 1
        with pytest.raises(NoAnswer, match="CERTIFICATE_VERIFY_FAILED"):
            RunClient(Location(location.url), TOKEN).claim(kind=Kind.GENERATOR)
