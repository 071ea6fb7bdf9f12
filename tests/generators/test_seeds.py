"""No two generators of a run draw the same numbers, and none draws any again.

Covers lrl/generators/server.py.
"""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch

import lrl
from lrl.generators.server import Server, generator_seed, run_seed
from lrl.generators.settings import ServerSettings
from lrl.members import join
from lrl.members.join import JoinSession, LocalOverrides
from lrl.members.registry import Kind
from lrl.members.run_file import RUN_TOKEN
from lrl.strategies.generator_servers import join_spec
from tests.members.served_run import TOKEN, served, spec_of

SILENT = "import time; time.sleep(600)"


class Recorded(Server):
    """A server that notes its command line and runs a small program."""

    seeds: list[str]

    def command(self) -> list[str]:
        self.seeds = [*getattr(self, "seeds", []), seed_of(super().command())]
        return [sys.executable, "-c", SILENT]


def seed_of(command: list[str]) -> str:
    assert command.count("--seed") == 1
    return command[command.index("--seed") + 1]


def test_no_start_of_any_generator_has_the_seed_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for seed, steps, number, starts in itertools.product(range(3), (0, 1, 100), range(4), range(3)):
        monkeypatch.setenv("PL_GLOBAL_SEED", str(seed))
        found.append(generator_seed(run_seed(steps), number, starts))
    assert len(set(found)) == len(found) and min(found) >= 0 and max(found) < 2**31
    assert generator_seed(run_seed(100), 3, 2) == found[-1], "the same run has the same seeds"


def test_a_restarted_generator_does_not_draw_its_first_numbers_again(tmp_path: Path) -> None:
    servers = [
        Recorded("m", ServerSettings(), "shared_memory", [], tmp_path, number, "ab")
        for number in (0, 1)
    ]
    for server in (*servers, *servers):
        server.start()
        server.stop()
    assert len({seed for server in servers for seed in server.seeds}) == 4


def servers_of_a_run(
    folder: Path, seed: int, checkpoint: str | None = None
) -> tuple[list[str], int]:
    """Returns the seeds of a run's two generators, and that which it tells those that join."""
    L.seed_everything(seed, verbose=False)
    strategy = lrl.AsyncSingleDevice(generator_devices=2)
    strategy.parallel_devices = [torch.device("cpu")] * 3
    run: Any = SimpleNamespace(
        strategy=strategy,
        policy=SimpleNamespace(policy_folder="a/model", dtype_name="float32", lora=None),
        data=SimpleNamespace(max_model_tokens=64, resumes_from=checkpoint),
        trainer=SimpleNamespace(global_step=0, loggers=[], default_root_dir=str(folder)),
    )
    servers = strategy.make_servers(run)
    return [seed_of(server.command()) for server in servers], join_spec(run, generators=2).seed


def test_seed_everything_reaches_the_generators_and_a_resume_goes_on_with_other_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setenv("PL_SEED_WORKERS", "0")
    first = servers_of_a_run(tmp_path, 5)
    assert servers_of_a_run(tmp_path, 5) == first
    others = [
        servers_of_a_run(tmp_path, 6),
        servers_of_a_run(tmp_path, 5, "runs/epoch=0-step=7.ckpt"),
    ]
    runs = [first, *others]
    assert len({seed for seeds, _ in runs for seed in seeds}) == 6
    assert len({told for _, told in runs}) == 3


def test_each_generator_that_joins_has_a_seed_of_the_run_and_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Server] = []

    def make(session: JoinSession) -> int:
        session.number = session.client.claim(Kind.GENERATOR)
        made.append(session.make_server("base"))  # type: ignore[attr-defined]
        return 0

    monkeypatch.setattr(JoinSession, "run", make)
    for seed in (1, 2):
        with served(spec_of(seed=seed), tmp_path):
            for _ in range(2):
                monkeypatch.setenv(RUN_TOKEN, TOKEN)
                join.join(str(tmp_path), Kind.GENERATOR, LocalOverrides())
    assert len({seed_of(server.command()) for server in made}) == 4
    assert seed_of(made[0].command()) == str(generator_seed(1, made[0].number, 0))
