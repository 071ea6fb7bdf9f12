"""Reward hosts that a launcher starts: the run waits for them, keeps them, and names why none can be had."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import lrl
from lrl.generators.client import GeneratorClient
from lrl.generators.launchers import Given, Job, Launcher, Slurm
from lrl.generators.server import ServerError
from lrl.generators.settings import ServerSettings
from lrl.membership import keeper as keeper_module
from lrl.membership.reward_hosts import RewardHosts
from lrl.membership.service import RegistryServer
from lrl.rewards import RewardPool
from lrl.rewards.hosts import Host
from lrl.types import Prompt, Rollout
from tests.membership.served_run import TOKEN, served, spec_of
from tests.membership.test_join import Scripted
from tests.membership.test_keeper import ModelJob
from tests.runs.test_launched_run import SRUN


class ModelLauncher(Launcher):
    cores = 3

    def __init__(self, jobs: int) -> None:
        super().__init__(jobs)
        self.setting = "data.reward_launcher"
        self.started: list[tuple[str, list[str], dict[str, str]]] = []
        self.made: list[ModelJob] = []

    def start(self, name: str, words: Sequence[str], environment: Mapping[str, str], folder: Path) -> Job:
        self.started.append((name, [*words], {**environment}))
        self.made.append(ModelJob())
        return self.made[-1]


class NoLink:
    def send(self, message: bytes) -> None:
        """Goes nowhere."""

    end = cut = lambda self: None


class ModelFleet:
    """Runs nothing in the background; `look` has the places looked after once."""

    def run_in_background(self, work: Any) -> None:
        work.close()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper_module, "OWN_END_S", 0.0)
    monkeypatch.setattr(keeper_module, "FIRST_BACKOFF_S", 0.0)


@pytest.fixture
def server() -> Iterator[RegistryServer]:
    with served(spec_of(generators=0)) as made:
        yield made


def launched(launcher: Launcher, server: RegistryServer, folder: Path) -> RewardHosts:
    hosts = RewardHosts(RewardPool([lrl.rewards.GSM8K()]).hosts, launcher, heartbeat_s=30.0)
    hosts.launch(server, ModelFleet(), folder)  # type: ignore[arg-type]
    return hosts


def look(hosts: RewardHosts, times: int = 1) -> None:
    async def scene() -> None:
        keeper = hosts._keeper
        assert keeper is not None
        for _ in range(times):
            for place in keeper._places:
                await keeper._look_after(place)

    asyncio.run(scene())


def join(hosts: RewardHosts, number: int) -> Host:
    host, _ = hosts.hosts.connect(number, "", "far", NoLink())
    hosts.hosts.hear(host, {"ready": 3})
    return host


def test_a_job_has_the_address_the_workers_and_a_number_and_the_token_in_no_word(
    server: RegistryServer, tmp_path: Path
) -> None:
    launcher = ModelLauncher(2)
    hosts = launched(launcher, server, tmp_path)
    look(hosts)
    address = server.location().url
    assert [name for name, *_ in launcher.started] == ["rewards-0", "rewards-1"]
    assert launcher.started[1][1] == ["score", "--join", address, "--workers", "3", "--number", "1"]
    assert launcher.started[1][2]["LRL_TOKEN"] == TOKEN and TOKEN not in " ".join(launcher.started[1][1])


def test_a_host_that_is_lost_is_replaced_and_one_that_serves_is_kept(server: RegistryServer, tmp_path: Path) -> None:
    launcher = ModelLauncher(2)
    hosts = launched(launcher, server, tmp_path)
    look(hosts)
    first = join(hosts, 0)
    join(hosts, 1)
    launcher.made[1].alive = False
    look(hosts, times=3)
    assert len(launcher.started) == 2, "its scheduler has lost sight of one that serves"
    hosts.hosts.lose(first, "it is silent")
    look(hosts, times=2)
    assert [name for name, *_ in launcher.started] == ["rewards-0", "rewards-1", "rewards-2"]
    assert [job.stops for job in launcher.made] == [1, 0, 0]
    hosts.end()
    hosts.stop()
    assert [job.stops for job in launcher.made] == [1, 1, 1]


def test_a_run_whose_hosts_cannot_import_the_rewards_ends_and_names_host_and_remedy(
    server: RegistryServer, tmp_path: Path
) -> None:
    hosts = launched(ModelLauncher(1), server, tmp_path)
    for number in range(keeper_module.ATTEMPTS):
        look(hosts)
        hosts.raise_if_in_vain()
        host, _ = hosts.hosts.connect(number, "", "far", NoLink())
        hosts.hosts.hear(host, {"refused": "there is no module named 'mine'"})
        look(hosts)
    with pytest.raises(ServerError) as caught:
        hosts.raise_if_in_vain()
    for part in ("No reward host of data.reward_launcher ModelLauncher has joined in 3 attempts", "host 2 on far",
                 "no module named 'mine'", "put them on its machine"):  # fmt: skip
        assert part in str(caught.value)
    with pytest.raises(ServerError, match="3 attempts"):
        hosts.wait_joined(600.0, lambda: None)


def test_a_run_begins_with_the_hosts_that_are_there_at_the_deadline(server: RegistryServer, tmp_path: Path) -> None:
    hosts = launched(ModelLauncher(2), server, tmp_path)
    look(hosts)
    with pytest.raises(ServerError, match="No reward host of .* has joined within server.start_timeout_s=0"):
        hosts.wait_joined(0.0, lambda: None)
    join(hosts, 1)
    hosts.wait_joined(0.0, lambda: None)
    join(hosts, 0)
    hosts.wait_joined(600.0, lambda: None)


def test_the_reason_of_a_host_that_somebody_started_is_in_the_error(server: RegistryServer, tmp_path: Path) -> None:
    hosts = launched(Given(1), server, tmp_path)
    host, _ = hosts.hosts.connect(None, "", "far", NoLink())
    hosts.hosts.hear(host, {"refused": "there is no module named 'mine'"})
    with pytest.raises(ServerError, match="(?s)server.start_timeout_s=0.*host 0 on far cannot score.*'mine'"):
        hosts.wait_joined(0.0, lambda: None)


def test_a_run_that_does_not_train_takes_no_hosts() -> None:
    data = SimpleNamespace(reward_pool=RewardPool([lrl.rewards.GSM8K()]), reward_launcher=ModelLauncher(1))
    for verb, routes in (("validate", 0), ("fit", 1)):
        trainer: Any = SimpleNamespace(datamodule=data, state=SimpleNamespace(fn=verb))
        hosts = RewardHosts.of_run(trainer, heartbeat_s=30.0)
        assert len(hosts.routes) == routes and (hosts.launcher is None) == (routes == 0)


def test_a_run_starts_its_hosts_has_them_score_and_ends_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator is a small program, srun a stand-in; the host is a real one."""

    async def respond(self: GeneratorClient, *words: Any, **settings: Any) -> None:
        """Succeeds."""

    class ScriptedRun(lrl.AsyncSingleDevice):
        def make_servers(self, trainer: Any, placements: list[list[int]]) -> list[Any]:
            return [
                Scripted(str(tmp_path), ServerSettings(), "shared_memory", [], tmp_path, 0, self.run_id, self.token)
            ]

        def _settings(self, trainer: Any) -> ServerSettings:
            return ServerSettings()

    for name in ("prompt_logprobs", "heartbeat"):
        monkeypatch.setattr(GeneratorClient, name, respond)
    monkeypatch.setattr(keeper_module, "OWN_END_S", 60.0)
    (tmp_path / "srun").write_text(SRUN)
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    strategy = ScriptedRun()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    pool, launcher = RewardPool([lrl.rewards.GSM8K()], workers=1), Slurm(1)
    parts = {"strategy": strategy, "lightning_module": SimpleNamespace(policy_folder=str(tmp_path))}
    data = SimpleNamespace(reward_pool=pool, reward_launcher=launcher, resumes_from=None)
    trainer: Any = SimpleNamespace(
        **parts,
        global_step=0,
        datamodule=data,
        state=SimpleNamespace(fn="fit"),
        interrupted=False,
        loggers=[],
        default_root_dir=str(tmp_path),
        logger=None,
    )
    prompt = Prompt(id=0, token_ids=[1], text="1+1=", columns={"answer": "#### 2"})
    tokens: dict[str, Any] = {"token_ids": [1], "logprobs": [0.0], "versions": [0], "finish_reason": "stop"}
    rollouts = [Rollout(text=text, **tokens) for text in ("#### 2", "#### 3")]
    pool.start(prompt)
    try:
        strategy.start_generators(trainer)
        (host,) = pool.hosts.ready
        asyncio.run(pool.score(prompt, rollouts))
    finally:
        strategy.stop_generators()
        pool.close()
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0] and pool.scored_by == {host.name: 2}
    said = (tmp_path / "srun-rewards-0.log").read_text()
    assert "srun --job-name=lrl-rewards-0" in said and said.endswith(
        "reward host: the run has ended, and so does it.\n"
    )
