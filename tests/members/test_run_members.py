"""Members that a launcher starts: each place is filled, and filled again, and the run waits for
them.

The jobs are models, but for the last test.

Covers lrl/members/launched.py, lrl/members/launchers.py.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lrl
from lrl.errors import ConfigError, ServerError
from lrl.generators import fleet
from lrl.generators.settings import ServerSettings
from lrl.members import launched
from lrl.members.launched import ATTEMPTS, LaunchedMembers
from lrl.members.launchers import Command, Given, Launcher, Ray, Slurm
from lrl.members.registry import Kind, RegistryServer, Status
from lrl.members.run_members import SETTINGS, RunMembers, make_members
from lrl.system.endpoint import Location
from tests.leftovers import living, nothing_left, wait_for, words
from tests.members.served_run import TOKEN, bare_run, client_of, served, spec_of

RUN_ID = spec_of().run_id
mark = pytest.fixture(nothing_left)


class ModelJob:
    alive = True
    stops = 0

    def __init__(self, name: str, given: dict[str, Any]) -> None:
        self.name = name
        self.given = given

    def stop(self) -> None:
        self.alive, self.stops = False, self.stops + 1

    def tail(self) -> str:
        return "the node has no such partition"


class ModelLauncher(Launcher):
    cores = 3

    def __init__(self, jobs: int) -> None:
        super().__init__(jobs)
        self.made: list[ModelJob] = []

    def start(self, name: str, index: int, **given: Any) -> Any:
        self.made.append(ModelJob(name, given))
        return self.made[-1]


class Scene:
    def __init__(
        self, launcher: Launcher, kind: Kind, server: RegistryServer, folder: Path
    ) -> None:
        self.kind = kind
        self.registry = server.registry
        self.launcher = launcher
        roster = client_of(server), folder, server.registry
        self.launched = LaunchedMembers(launcher, kind, *roster, [[0, 1], [2, 3]])
        self.members: Any = RunMembers(
            None, None, [self.launched], ServerSettings(), folder, server
        )

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            for job in self.launched.jobs:
                job.poll()

    def set_status(self, number: int, status: Status, why: str = "") -> None:
        self.registry.change(self.kind, number, status=status, why=why)

    def refuse(self, number: int, why: str) -> None:
        self.registry.register(self.kind, number, Location(), "far")
        self.registry.withdraw(self.kind, number, why)

    def wait(self, deadline_s: float = 0.0, interrupted: Any = lambda: None) -> None:
        self.members.settings.start_timeout_s = deadline_s
        self.members.wait_joined(self.kind, self.launcher.jobs, interrupted)


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of a job does not end by itself."""
    monkeypatch.setattr(launched, "OWN_END_S", 0.0)
    monkeypatch.setattr(fleet, "FIRST_BACKOFF_S", 0.0)


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with served(spec_of(generators=0)) as made:
        yield made


@pytest.fixture
def launcher() -> ModelLauncher:
    return ModelLauncher(2)


@pytest.fixture(params=list(Kind))
def scene(
    request: pytest.FixtureRequest, launcher: ModelLauncher, server: RegistryServer, tmp_path: Path
) -> Scene:
    return Scene(launcher, Kind(request.param), server, tmp_path)


def test_every_place_gets_a_job_with_its_number_and_devices_or_workers_and_the_token_in_no_word(
    scene: Scene, launcher: ModelLauncher, server: RegistryServer
) -> None:
    scene.poll(times=3)
    assert [job.name for job in launcher.made] == [f"{scene.kind}-0", f"{scene.kind}-1"]
    for number, job in enumerate(launcher.made):
        own = ["--workers", "3"]
        if scene.kind is Kind.GENERATOR:
            own = ["--devices", ["0,1", "2,3"][number]]
        join = ["join", server.location().url, "--kind", scene.kind, *own, "--number", str(number)]
        assert job.given["words"] == join and TOKEN not in " ".join(join)
        assert job.given["environment"]["LRL_TOKEN"] == TOKEN


@pytest.mark.parametrize(
    ("status", "by_itself", "job_alive", "replaced"),
    [
        (Status.STARTING, False, False, True),
        (Status.LOST, False, True, True),
        (Status.REFUSED, False, True, True),
        (Status.SERVING, False, False, False),  # only its scheduler has lost sight of it
        (Status.LEFT, False, False, False),  # somebody has asked it to leave
        (Status.LEFT, True, True, True),  # its scheduler takes its place away
        (Status.ENDED, False, False, False),
    ],
)
def test_a_member_is_replaced_unless_it_serves_or_was_asked_to_leave(
    scene: Scene,
    launcher: ModelLauncher,
    status: Status,
    by_itself: bool,
    job_alive: bool,
    replaced: bool,
) -> None:
    scene.poll()
    scene.registry.ask_to_leave(scene.kind, 0, by_itself=by_itself)
    scene.set_status(0, status, "it is silent")
    launcher.made[0].alive = job_alive
    scene.poll(times=3)
    later = [job.name for job in launcher.made[2:]]
    assert later == [f"{scene.kind}-2"] * replaced, "a number is never given twice"
    assert launcher.made[0].stops == (status is not Status.SERVING)
    assert launcher.made[1].stops == 0


@pytest.mark.parametrize("said", ["", "there is no module named 'mine'"])
def test_a_run_whose_jobs_fail_ends_with_their_reason(
    scene: Scene, launcher: ModelLauncher, said: str
) -> None:
    for attempt in range(ATTEMPTS):
        scene.poll()
        scene.members.raise_if_all_failed()
        for number in (2 * attempt, 2 * attempt + 1):
            launcher.made[number].alive = False
            if said:
                scene.refuse(number, said)
        scene.poll()
    setting = SETTINGS[scene.kind]
    cause = f"{scene.kind.capitalize()} 5 on far.*{said}" if said else "no such partition"
    with pytest.raises(
        ServerError,
        match=f"(?s){setting} ModelLauncher: no {scene.kind} has joined in 3 attempts.*{cause}",
    ):
        scene.wait(600.0)


def test_a_run_begins_with_the_members_that_are_there_at_the_deadline(scene: Scene) -> None:
    scene.poll()
    with pytest.raises(
        ServerError,
        match=f"ModelLauncher: no {scene.kind} has joined within server.start_timeout_s=0",
    ):
        scene.wait()
    scene.set_status(1, Status.SERVING)
    scene.wait()

    def signal() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        scene.wait(600.0, signal)
    scene.set_status(0, Status.PENDING)
    scene.wait(600.0)


@pytest.mark.parametrize("kind", list(Kind))
def test_given_members_are_waited_for_and_nothing_is_started(
    kind: Kind, server: RegistryServer, tmp_path: Path
) -> None:
    scene = Scene(Given(2), kind, server, tmp_path)
    assert scene.launched.jobs == []
    server.registry.claim(kind)
    scene.refuse(0, "there is no module named 'mine'")
    with pytest.raises(
        ServerError, match=f"(?s)start_timeout_s=0.1.*{kind.capitalize()} 0 on far cannot.*'mine'"
    ):
        scene.wait(0.1)


def test_a_command_gets_the_words_its_place_and_the_token_which_is_in_no_word(
    tmp_path: Path,
) -> None:
    (tmp_path / "lrl").write_text("#!/bin/sh\nread token; echo $token, $0 $*; exec sleep 600\n")
    (tmp_path / "lrl").chmod(0o755)
    launcher = Command(3, f"env place={{index}} {tmp_path}/{{join}} --as {{name}}")
    words, token = ["join", "http://far:7000", "--number", "5"], {"LRL_TOKEN": TOKEN}
    job = launcher.start("generator-5", 2, words=words, environment=token, folder=tmp_path)
    try:
        wait_for(lambda: job.tail(), 60.0, "its output")
        joined = f"{tmp_path}/lrl join http://far:7000 --number 5 --as generator-5"
        assert job.tail() == f"{TOKEN}, {joined}"
        assert b"place=2" in Path(f"/proc/{job._process.pid}/environ").read_bytes()
        assert TOKEN not in " ".join(job._process.args) and job.alive
    finally:
        job.stop()
    assert not job.alive


@pytest.mark.parametrize(
    ("launcher", "line"),
    [
        (Slurm(1, ["--exact"]), "srun --nodes=1 --ntasks=1 --export=ALL --unbuffered --gpus=2 --e"),
        (
            Ray(1, cpus=4, resources={"h100": 1}),
            "lrl ray --gpus 2 --cpus 4 --resources '{\"h100\": 1}' --address auto",
        ),
    ],
)
def test_a_scheduler_is_asked_for_the_gpus_of_a_generator(
    launcher: Launcher, line: str, tmp_path: Path
) -> None:
    strategy = lrl.AsyncSingleDevice(
        generator_devices=0, launcher=launcher, server=ServerSettings(tensor_parallel_size=2)
    )
    strategy.parallel_devices = [torch.device("cuda", 0)]
    run = bare_run(strategy, tmp_path)
    members = make_members(run, SimpleNamespace(generators=[]))  # type: ignore[arg-type]
    members.server.close()
    assert launcher.line().startswith(line)
    assert [list(job.devices) for job in members.launched[0].jobs] == [[0, 1]]


def test_a_command_ends_with_the_thread_that_has_started_it(tmp_path: Path, mark: str) -> None:
    """Also one that waits in a queue while its trainer is killed."""

    def start() -> None:
        Command(1, "python -c 'import time; time.sleep(600)' {join}").start(
            "generator-0", 0, words=["join"], environment=os.environ, folder=tmp_path
        )
        wait_for(lambda: any(words(one)[1:2] == ["-c"] for one in living(mark)), 60.0, "its exec")

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    wait_for(lambda: not living(mark), 60.0, "its end")


def test_generators_that_somebody_starts_need_a_token_that_somebody_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("LRL_TOKEN", raising=False)
    with pytest.raises(ConfigError, match="strategy.launcher is Given, and LRL_TOKEN is not set"):
        lrl.AsyncSingleDevice(generator_devices=0, launcher=Given(1))
    monkeypatch.setenv("LRL_TOKEN", TOKEN)
    assert lrl.AsyncSingleDevice(generator_devices=0, launcher=Given(1)).token == TOKEN
