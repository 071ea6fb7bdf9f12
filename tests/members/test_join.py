"""`lrl join` and `lrl leave` against a live fleet: real supervisors and processes, small programs
in vLLM's place. A member outlives an outage of the run, and never the run itself."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from lrl.cli.main import main
from lrl.errors import NoAnswer, NotRunning
from lrl.generators.fleet import Fleet
from lrl.generators.settings import ServerSettings
from lrl.members import join
from lrl.members.registry import JoinSpec, Kind, Member
from tests.generators.model_fleet import Scripted
from tests.leftovers import wait_for
from tests.members.served_run import live_fleet, served, spec_of, sync
from tests.members.test_find_run import ELSEWHERE

SPEC = spec_of()


class Remembered(Scripted):
    """A generator whose program is up at once, and which is remembered."""

    made: list[Remembered] = []

    def start(self) -> None:
        self.made.append(self)
        super().start()


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(join, "POLL_S", 0.02)
    monkeypatch.setattr(join, "Server", Remembered)
    monkeypatch.setattr(Remembered, "made", [])
    own = Remembered("base", ServerSettings(), "shared_memory", [], tmp_path, 0)
    with (
        served(SPEC, tmp_path, own.token) as server,
        live_fleet([own], server.registry, own.token) as made,
    ):
        yield made


def serve(fleet: Fleet) -> None:
    """Syncs the generator that joins."""
    wait_for(lambda: bool(fleet.rollouts.pending))
    sync(fleet, 7)
    wait_for(lambda: fleet.joined == 1)


class Meanwhile(threading.Thread):
    """Acts while `lrl join` has the main thread, which signals need; a failure ends that, too."""

    def __init__(self, *acts: Callable[[], Any]) -> None:
        super().__init__()
        self.acts = acts
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            for act in self.acts:
                act()
        except BaseException as error:
            self.error = error
            os.kill(os.getpid(), signal.SIGTERM)

    def done(self) -> None:
        self.join()
        if self.error is not None:
            raise self.error


def test_it_joins_with_the_token_of_the_run_serves_and_leaves_at_ctrl_c(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = Meanwhile(
        lambda: serve(fleet),
        lambda: wait_for(lambda: fleet.alive == 2),
        lambda: os.kill(os.getpid(), signal.SIGINT),
    )
    assert main(["join", str(tmp_path)]) == 0
    others.done()
    said = capsys.readouterr().out
    words = ["starts, with the model base", "answers at http", "since version 7", "has left"]
    places = [said.find(word) for word in words]
    assert -1 not in places and places == sorted(places), said
    _, server = Remembered.made
    assert not server.alive and fleet.left == 1 and fleet.alive == 1
    token = server.token
    assert token == fleet.generators[0].server.token and token not in said
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 3 and not any(token.encode() in path.read_bytes() for path in files)


def test_leave_removes_the_last_that_joined_and_prints_why_the_last_of_all_stays(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["leave", str(tmp_path)]) == 2
    assert "--number N" in capsys.readouterr().err
    assert main(["leave", str(tmp_path), "--number", "0"]) == 2
    assert "generator 0 is the last one that serves" in capsys.readouterr().err.lower()
    statuses: list[int] = []
    others = Meanwhile(
        lambda: serve(fleet), lambda: statuses.append(main(["leave", str(tmp_path)]))
    )
    assert main(["join", str(tmp_path)]) == 0
    others.done()
    assert (
        statuses == [0] and "generator 1 has left" in capsys.readouterr().out and fleet.alive == 1
    )


def no_answer(cause: OSError) -> NoAnswer:
    error = NoAnswer("the run does not answer")
    error.__cause__ = cause
    return error


class Session(join.JoinSession):
    kind = Kind.GENERATOR

    def serve(self) -> Any: ...


@pytest.mark.parametrize(
    ("error", "limit_s"),
    [
        (no_answer(ConnectionRefusedError("nobody listens")), join.REFUSED_S),
        (no_answer(TimeoutError("the network is cut")), join.SILENT_S),
        (NotRunning("the token is not the run's"), 0.0),
    ],
)
def test_a_member_outlives_an_outage_of_the_run_and_not_its_end(
    error: Exception, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, client = [1000.0], Mock()
    client.register.return_value = Member(Kind.GENERATOR, 1)
    monkeypatch.setattr(join.time, "monotonic", lambda: now[0])
    session = Session("", client, SPEC, ServerSettings())
    for _ in range(3):
        client.register.side_effect = error if limit_s else None
        now[0] += 0.9 * limit_s
        session.speak()
        client.register.side_effect = None
        session.speak()
    client.register.side_effect = error
    now[0] += 1.1 * limit_s
    with pytest.raises(join.JoinEnded, match="the run has ended"):
        session.speak()


def test_a_member_ends_at_once_with_a_run_that_was_killed_on_its_machine() -> None:
    client, killed = Mock(), replace(SPEC, owner=replace(SPEC.owner, started=1))
    client.register.side_effect = no_answer(ConnectionRefusedError("nobody listens"))
    session = Session("", client, killed, ServerSettings())
    with pytest.raises(join.JoinEnded, match="the run has ended"):
        session.speak()


AWAY = {"on_cpu": False, "owner": ELSEWHERE}


@pytest.mark.parametrize(
    ("spec", "devices", "host", "remedy"),
    [
        (spec_of("ipc"), [], "", "generator_devices above 0"),
        (spec_of(owner=ELSEWHERE), [], "", "weight_transfer: pull, or nccl"),
        (spec_of("pull", owner=ELSEWHERE), [], "", "server.host 127.0.0.1, which only its own"),
        (spec_of("nccl", on_cpu=False), [], "", "--devices .not given.*are on GPUs"),
        (spec_of(), [0], "", "--devices 0: .*leave it out"),
        (spec_of("nccl", **AWAY), [0], "", "--host 127.0.0.1: the run is on another"),
        (spec_of("nccl", **AWAY), [0], "0.0.0.0", "--host 0.0.0.0"),
        (spec_of("nccl", **AWAY), [0], "10.0.0.7", "insecure: true"),
    ],
)
def test_a_generator_that_cannot_join_is_an_error_before_its_start(
    spec: JoinSpec, devices: list[int], host: str, remedy: str
) -> None:
    with pytest.raises(ValueError, match=remedy):
        join.check_generator("runs/1", spec, devices)
        join.settings_here(spec, {"host": host} if host else {}, "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("of_run", "here", "named"),
    [
        ({"NCCL_ALGO": "Ring"}, {"NCCL_ALGO": "Tree"}, "NCCL_ALGO is 'Tree' here and is 'Ring' in"),
        ({"NCCL_ALGO": "Ring"}, {"NCCL_SOCKET_IFNAME": "eth1"}, None),
    ],
)
def test_nccl_settings_that_contradict_the_runs_are_an_error_with_both_values(
    of_run: dict[str, str], here: dict[str, str], named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of("nccl", on_cpu=False, environment=of_run)
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=named) if named else nullcontext():
        join.check_generator("runs/1", spec, [0])
