"""Generators that a launcher starts: each place is filled, and filled again; the jobs are models."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

import lrl
from lrl.generators.endpoint import Location
from lrl.generators.launchers import Given, Job, Launcher
from lrl.generators.server import ServerError
from lrl.membership import keeper as keeper_module
from lrl.membership.keeper import Keeper
from lrl.membership.registry import MemberStatus, Registry
from lrl.runtime.config_errors import ConfigError
from tests.membership.served_run import TOKEN, served, spec_of

SOMEWHERE = Location("http://127.0.0.1:1")


class ModelJob(Job):
    alive = True
    stops = 0

    def stop(self) -> None:
        self.alive, self.stops = False, self.stops + 1

    def tail(self) -> str:
        return "the node has no such partition"


class ModelLauncher(Launcher):
    def __init__(self, jobs: int) -> None:
        super().__init__(jobs)
        self.made: dict[str, ModelJob] = {}
        self.started: list[tuple[list[str], dict[str, str]]] = []

    def start(self, name: str, words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Job:
        self.started.append(([*words], {**environment}))
        self.made[name] = ModelJob()
        return self.made[name]


def generators(*numbers: int) -> list[str]:
    return [f"generator-{number}" for number in numbers]


def registry_of(keeper: Keeper) -> Registry:
    assert isinstance(keeper.roll, Registry)
    return keeper.roll


def keep(keeper: Keeper, looks: int = 1) -> None:
    """Looks after every place so many times."""

    async def scene() -> None:
        for _ in range(looks):
            for place in keeper._places:
                await keeper._look_after(place)

    asyncio.run(scene())


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of a job does not end by itself."""
    monkeypatch.setattr(keeper_module, "OWN_END_S", 0.0)


@pytest.fixture
def launcher() -> ModelLauncher:
    return ModelLauncher(2)


@pytest.fixture
def keeper(launcher: ModelLauncher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Keeper:
    monkeypatch.setattr(keeper_module, "FIRST_BACKOFF_S", 0.0)
    return Keeper(launcher, Registry(spec_of(generators=0)), ["serve", "--join", "url"], {}, tmp_path)


def test_every_place_gets_a_job_with_a_number_of_its_own(keeper: Keeper, launcher: ModelLauncher) -> None:
    keep(keeper, looks=3)
    assert sorted(launcher.made) == generators(0, 1)
    assert [words[-2:] for words, _ in launcher.started] == [["--generator", "0"], ["--generator", "1"]]


def test_a_job_that_ends_is_replaced_and_what_it_said_is_kept(keeper: Keeper, launcher: ModelLauncher) -> None:
    keep(keeper)
    launcher.made["generator-1"].alive = False
    keep(keeper, looks=2)
    assert sorted(launcher.made) == generators(0, 1, 2), "a number is never given twice"
    assert launcher.made["generator-1"].stops == 1 and launcher.made["generator-0"].alive and "partition" in keeper.said


@pytest.mark.parametrize("state", ["lost", "refused"])
def test_the_job_of_a_generator_that_the_run_gave_up_is_ended_and_replaced(
    keeper: Keeper, launcher: ModelLauncher, state: str
) -> None:
    keep(keeper)
    registry_of(keeper).set_status(0, MemberStatus(state, why="it is silent"))
    keep(keeper, looks=2)
    assert launcher.made["generator-0"].stops == 1 and sorted(launcher.made) == generators(0, 1, 2)


def test_a_generator_that_serves_is_kept_when_its_scheduler_has_lost_sight_of_it(
    keeper: Keeper, launcher: ModelLauncher
) -> None:
    keep(keeper)
    registry_of(keeper).set_status(0, MemberStatus("serves", 3))
    launcher.made["generator-0"].alive = False
    keep(keeper, looks=3)
    assert sorted(launcher.made) == generators(0, 1) and launcher.made["generator-0"].stops == 0
    registry_of(keeper).set_status(0, MemberStatus("lost", why="it is silent"))
    keep(keeper, looks=2)
    assert sorted(launcher.made) == generators(0, 1, 2)


def test_a_generator_that_was_asked_to_leave_is_not_replaced(keeper: Keeper, launcher: ModelLauncher) -> None:
    keep(keeper)
    registry_of(keeper).set_status(0, MemberStatus("left", 3))
    launcher.made["generator-0"].alive = False
    keep(keeper, looks=5)
    assert sorted(launcher.made) == generators(0, 1)


def test_a_place_that_fails_again_and_again_waits_longer_and_longer(
    keeper: Keeper, launcher: ModelLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(keeper_module, "FIRST_BACKOFF_S", 1.0)
    monkeypatch.setattr(keeper_module.time, "monotonic", lambda: now[0])
    starts = []
    for second in range(40):
        now[0] = float(second)
        before = len(launcher.made)
        keep(keeper)
        starts += [second] if len(launcher.made) > before else []
        for job in [*launcher.made.values()][-2:]:
            job.alive = False
    pauses = [later - earlier for earlier, later in zip(starts, starts[1:], strict=False)]
    assert pauses == sorted(pauses) and pauses[-1] >= 8


def test_a_generator_that_served_is_replaced_as_fast_as_at_first(keeper: Keeper, launcher: ModelLauncher) -> None:
    keep(keeper)
    launcher.made["generator-0"].alive = False
    keep(keeper, looks=2)
    assert keeper._places[0].failures == 1
    registry_of(keeper).set_status(2, MemberStatus("serves", 1))
    keep(keeper)
    assert keeper._places[0].failures == 0


def test_a_job_that_ends_by_itself_is_not_forced(
    keeper: Keeper, launcher: ModelLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper_module, "OWN_END_S", 600.0)
    keep(keeper)
    ends = [threading.Timer(0.3, setattr, (job, "alive", False)) for job in launcher.made.values()]
    for end in ends:
        end.start()
    keeper.stop()
    assert not any(end.is_alive() for end in ends), "it has waited for them"


def test_all_jobs_end_with_the_run(keeper: Keeper, launcher: ModelLauncher) -> None:
    keep(keeper)
    keeper.stop()
    assert [job.stops for job in launcher.made.values()] == [1, 1]


def test_a_run_whose_jobs_fail_ends_with_what_they_say(keeper: Keeper, launcher: ModelLauncher) -> None:
    for _ in range(keeper_module.ATTEMPTS):
        keep(keeper, looks=1)
        for job in launcher.made.values():
            job.alive = False
        keep(keeper, looks=1)
    with pytest.raises(ServerError, match="(?s)ModelLauncher has joined in 3 attempts.*no such partition"):
        keeper.wait_joined(lambda: 0, 600.0, lambda: None)


def test_a_run_begins_with_the_generators_that_are_there_at_the_deadline(keeper: Keeper) -> None:
    keeper.wait_joined(lambda: 2, 600.0, lambda: None)
    keeper.wait_joined(lambda: 1, 0.0, lambda: None)
    with pytest.raises(ServerError, match="within server.start_timeout_s=0"):
        keeper.wait_joined(lambda: 0, 0.0, lambda: None)


def test_a_wait_for_generators_can_be_interrupted(keeper: Keeper) -> None:
    def signal() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        keeper.wait_joined(lambda: 0, 600.0, signal)


def test_the_token_of_the_run_is_in_no_word_of_a_command(launcher: ModelLauncher, tmp_path: Path) -> None:
    with served(spec_of(generators=0)) as server:
        keep(made := Keeper.of_run(launcher, server, [0, 1], tmp_path))
        made.stop()
    words, environment = launcher.started[0]
    assert TOKEN not in " ".join(words) and environment["LRL_TOKEN"] == TOKEN
    assert words[:3] == ["serve", "--join", server.location().url] and words[3:5] == ["--devices", "0,1"]


def test_given_generators_are_waited_for_and_nothing_is_started(tmp_path: Path) -> None:
    keeper = Keeper(Given(2), Registry(spec_of(generators=0)), [], {}, tmp_path)
    keep(keeper, looks=3)
    assert keeper.said == "" and [place.failures for place in keeper._places] == [0, 0]
    keeper.stop()


def test_generators_that_somebody_starts_need_a_token_that_somebody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LRL_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="strategy.launcher is Given, and LRL_TOKEN is not set"):
        lrl.AsyncSingleDevice(generator_devices=0, launcher=Given(1))
    monkeypatch.setenv("LRL_TOKEN", TOKEN)
    assert lrl.AsyncSingleDevice(generator_devices=0, launcher=Given(1)).token == TOKEN
