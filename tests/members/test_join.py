"""`lrl join` and `lrl leave` against a live fleet: real supervisors and processes, small programs
in vLLM's place."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lrl
from lrl.cli.main import main
from lrl.generators.fleet import Fleet
from lrl.generators.generator import Generator
from lrl.generators.settings import ServerSettings
from lrl.members import admission, join, join_session, joining_generator
from lrl.members.admission import GeneratorAdmission, poll_forever
from lrl.members.join_session import LocalOverrides
from lrl.members.joining_generator import JoiningGenerator
from lrl.members.live_run import find_run
from tests.cli.test_prompt import Scripted
from tests.leftovers import wait_for
from tests.members.served_run import served, spec_of
from tests.scripted_run import ScriptedRun, let_requests_succeed

SPEC = spec_of()


class Watched(Scripted):
    """Records the servers that `lrl join` starts."""

    made: list[Watched] = []

    def __init__(self, *words: Any, **settings: Any) -> None:
        super().__init__(*words, **settings)
        self.made.append(self)


def sync(fleet: Fleet, version: int, failing: str = "") -> None:
    """Does a model of a sync."""

    async def work() -> None:
        await fleet.rollouts.admit_pending()
        failed = {
            one: "it is not the same" for one in fleet.rollouts.generators if one.name == failing
        }
        for generator in fleet.rollouts.generators:
            if generator not in failed:
                generator.version = version
                generator.verify()
        await fleet.rollouts.finish_sync(failed)

    fleet.call(work(), "a model of a sync")


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    """A fleet of one generator, which serves version 0."""
    let_requests_succeed(monkeypatch)
    monkeypatch.setattr(admission, "POLL_S", 0.02)
    monkeypatch.setattr(join, "POLL_S", 0.02)
    monkeypatch.setattr(join_session, "POLL_S", 0.02)
    monkeypatch.setattr(joining_generator, "Server", Watched)
    monkeypatch.setattr(Watched, "made", [])
    own = Scripted("base", ServerSettings(), "shared_memory", [], tmp_path, 0, "ab12")
    made = Fleet([own], capacity=4)
    try:
        made.start()
        with served(SPEC, tmp_path, own.token) as server:
            admits = GeneratorAdmission(made, server.registry, own.token, own.settings, tmp_path)
            made.run_in_background(poll_forever(admits.poll))
            sync(made, 0)
            made.registry_server = server  # type: ignore[attr-defined]
            yield made
    finally:
        made.stop()


def pending(fleet: Fleet) -> list[Generator]:
    return fleet.rollouts.pending


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
        lambda: wait_for(lambda: bool(pending(fleet))),
        lambda: sync(fleet, 7),
        lambda: wait_for(lambda: fleet.joined == 1),
        lambda: wait_for(lambda: fleet.alive == 2),
        lambda: os.kill(os.getpid(), signal.SIGINT),
    )
    assert main(["join", str(tmp_path)]) == 0
    others.done()
    said = capsys.readouterr().out
    words = ["starts, with the model base", "answers at http", "since version 7", "has left"]
    places = [said.find(word) for word in words]
    assert -1 not in places and places == sorted(places), said
    (server,) = Watched.made
    assert not server.alive and fleet.left == 1 and fleet.alive == 1
    token = server.token
    assert token == fleet.generators[0].server.token and token not in said
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 3 and not any(token.encode() in path.read_bytes() for path in files)


def test_its_supervisor_may_not_remove_the_runs_own_shared_memory(
    fleet: Fleet, tmp_path: Path
) -> None:
    others = Meanwhile(
        lambda: wait_for(lambda: bool(pending(fleet))), lambda: os.kill(os.getpid(), signal.SIGTERM)
    )
    assert main(["join", str(tmp_path)]) == 0
    others.done()
    weights = f"lrl-{SPEC.run_id}-0-"  # as `lrl.callbacks.weight_sync` and its transport name it
    assert not weights.startswith(f"lrl-{Watched.made[0].run_id}-")
    assert Watched.made[0].run_id.startswith(SPEC.run_id), (
        "the run's own supervisors may remove its files"
    )


def test_it_ends_with_the_run_and_prints_so(
    fleet: Fleet,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(join_session, "REFUSED_S", 0.1)
    close = fleet.registry_server.close  # type: ignore[attr-defined]
    others = Meanwhile(lambda: wait_for(lambda: bool(pending(fleet))), fleet.stop, close)
    assert main(["join", str(tmp_path)]) == 0
    others.done()
    assert (
        "the run has ended, and so does it" in capsys.readouterr().out and not Watched.made[0].alive
    )


def test_a_generator_that_fails_its_probe_prints_the_reason_and_ends(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    others = Meanwhile(
        lambda: wait_for(lambda: bool(pending(fleet))),
        lambda: sync(fleet, 7, failing="generator 1"),
    )
    assert main(["join", str(tmp_path)]) == 1
    others.done()
    assert (
        "not admitted it: it is not the same" in capsys.readouterr().out
        and not Watched.made[0].alive
    )


def test_leave_removes_the_last_that_joined_and_prints_why_the_last_of_all_stays(
    fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["leave", str(tmp_path)]) == 2
    assert "--number N" in capsys.readouterr().err
    assert main(["leave", str(tmp_path), "--number", "0"]) == 2
    assert "generator 0 is the last one that serves" in capsys.readouterr().err.lower()
    statuses: list[int] = []
    others = Meanwhile(
        lambda: wait_for(lambda: bool(pending(fleet))),
        lambda: sync(fleet, 7),
        lambda: wait_for(lambda: fleet.joined == 1),
        lambda: statuses.append(main(["leave", str(tmp_path)])),
    )
    assert main(["join", str(tmp_path)]) == 0
    others.done()
    assert (
        statuses == [0] and "generator 1 has left" in capsys.readouterr().out and fleet.alive == 1
    )


def test_a_joining_generator_gets_the_settings_of_the_runs_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServerSettings(
        max_model_len=77, dtype="float32", max_num_seqs=9, extra_args={"swap-space": 3}
    )
    let_requests_succeed(monkeypatch)
    strategy = ScriptedRun(Scripted, tmp_path, settings)
    data = lrl.RolloutDataModule([{"prompt": "1", "answer": "1"}], [lrl.rewards.GSM8K()])
    try:
        strategy.start_generators(strategy.trainer(data))
        client = find_run(str(tmp_path))
        spec = client.spec()
        assert JoiningGenerator(str(tmp_path), client, spec, LocalOverrides()).settings == settings
        told = (
            spec.model,
            spec.transport,
            spec.run_id,
            spec.on_cpu,
            spec.generators,
            spec.owner.here,
        )
        assert told == (str(tmp_path), "shared_memory", strategy.run_id, True, 1, True)
        assert client.token == strategy.token
    finally:
        strategy.stop_generators()
    assert not (tmp_path / "fleet").exists()
